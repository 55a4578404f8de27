"""How fine the grid of a video is: by name, or the finest that this machine computes fast enough."""

import time
from dataclasses import replace
from fractions import Fraction

import torch

from tcore.data.images import Frame
from tcore.evaluation.encoder import Encoder
from tcore.evaluation.propagate import Propagator
from tcore.evaluation.protocols import CELL, FINER, Detail, Precision, Protocol, Search
from tcore.evaluation.resize import Size, input_size
from tcore.evaluation.run_clip import encode
from tcore.text import Say, format_seconds, silent

SHORT_SIDE = 480  # larger videos are scaled down
HALVED = 1024  # patches of a grid above which a CPU searches means of four cells first
SLOWEST = 0.7  # frames per second that a fine grid must reach on a CPU to be chosen


def fit_size(frame: Size, patch_size: int, detail: Detail = "coarse", long_side: int | None = None) -> Size:
    """The input size at which a patch covers 16, 8 or about 5 pixels of a frame, whatever the patch.

    Frames with a short side above 480, or a long side above `long_side`, are scaled down first.

    >>> fit_size((480, 854), 16), fit_size((480, 854), 16, "fine"), fit_size((480, 854), 8, "fine")
    ((480, 848), (960, 1696), (480, 848))
    >>> fit_size((1080, 1920), 14, "finest"), fit_size((1080, 1920), 16, "coarse", 448)
    ((1260, 2240), (240, 448))
    """
    cell = Fraction(CELL, FINER[detail])
    if long_side is None:
        return input_size(frame, patch_size, short=min(SHORT_SIDE, *frame), cell=cell)
    return input_size(frame, patch_size, long=min(long_side, max(frame)), cell=cell)


def suited(
    protocol: Protocol,
    encoder: Encoder,
    inside: Size,
    search: Search | None = None,
    precision: Precision | None = None,
) -> Protocol:
    """The protocol as this machine computes it fast: in bf16 on a GPU, with a halved search on a CPU.

    A search or a precision that is asked for is kept, and so is the exact search on small grids.
    """
    kind, patches = next(encoder.parameters()).device.type, inside[0] * inside[1] // encoder.patch_size**2
    slow = patches > HALVED and kind == "cpu"
    return replace(
        protocol,
        precision=precision or ("bf16" if kind == "cuda" else protocol.precision),
        search=search or ("halved" if slow else protocol.search),
    )


def choose_detail(
    encoder: Encoder,
    frame: Frame,
    count: int | None,
    protocol: Protocol,
    long_side: int | None = None,
    search: Search | None = None,
    say: Say = silent,
    asked: Detail | None = None,
    precision: Precision | None = None,
    backward: int = 0,
) -> Detail:
    """The detail that is asked for, or else `fine`, or `coarse` where that would be too slow.

    The time that it takes is measured on one frame, and said with what would make it faster. `backward`
    frames are carried in both directions.
    """
    size, on_cpu = (frame.shape[0], frame.shape[1]), next(encoder.parameters()).device.type == "cpu"

    def measure(detail: Detail) -> tuple[float, float]:
        inside = fit_size(size, encoder.patch_size, detail, long_side)
        chosen = suited(protocol, encoder, inside, search, precision)
        spent = estimate(encoder, frame, inside, count or chosen.context, chosen)
        each = spent["encode"] + spent["step"]
        return each, spent["total"] + backward * each

    detail: Detail = asked or "fine"
    (each, total), why = measure(detail), ""
    if asked is None and on_cpu and each * SLOWEST > 1:
        detail, why = "coarse", f" (fine would take {each:.2g})"
        each, total = measure(detail)
    whole = "" if count is None else f", {format_seconds(total)} for {count} frames"
    ways = [] if detail == "coarse" else ["--detail coarse"]
    ways += [] if count is None else ["a larger --every"]  # the page has no such flag
    ways += ["a smaller --long-side"]
    ways += ["a GPU"] if on_cpu else []
    faster = f" Faster: {', '.join(ways)}." if ways else ""
    say(f"detail {detail}: about {each:.2g} s a frame here{why}{whole}.{faster}")
    return detail


def estimate(
    encoder: Encoder, frame: Frame, inside: Size, count: int, protocol: Protocol
) -> dict[str, float]:
    """Seconds to encode a frame, for a step with a full context, and for a clip of `count` frames."""
    features = encode(encoder, frame, inside, protocol.precision, smooth=True)  # the first call is slower
    held, propagator = min(protocol.context, max(0, count - 2)), Propagator(protocol)
    labels = torch.zeros(*features.shape[1:], 2)
    propagator.start(features, labels)
    for _ in range(held):
        propagator.skip(features, labels)
    started = time.perf_counter()
    features = encode(encoder, frame, inside, protocol.precision, smooth=True)
    features.cpu()  # a GPU has computed it only now
    encoded = time.perf_counter()
    propagator.step(features).cpu()
    encode_s, step_s = encoded - started, time.perf_counter() - encoded
    # The cost of a step grows with the number of frames that it searches.
    searched = sum(1 + min(index - 1, protocol.context) for index in range(1, count)) / (1 + held)
    return {"encode": encode_s, "step": step_s, "total": count * encode_s + searched * step_s}
