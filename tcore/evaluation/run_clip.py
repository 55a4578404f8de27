"""One clip through the label propagation: frames are read ahead, encoded once and labeled one at a time."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor

from tcore.data.images import THREADS, Frame, ahead, read_image
from tcore.data.render import normalize
from tcore.errors import InputError
from tcore.evaluation.edges import labels_to_ids
from tcore.evaluation.encoder import Encoder
from tcore.evaluation.masks import VOID, Ids
from tcore.evaluation.propagate import GivenLabels, Labels, Propagator, Watch, propagate_features
from tcore.evaluation.protocols import Precision, Protocol
from tcore.evaluation.resize import Size, ids_to_grid, resize_images
from tcore.text import format_size

PLAIN = ("480x880", "short480", "native", "up480")  # input sizes that are about those of the frames


class Past(NamedTuple):
    """Frames whose soft labels an earlier run has left: how many, the last given one, and their labels."""

    frames: int
    given: int
    labels: Callable[[int], Labels]


def run_clip(
    encoder: Encoder,
    frames: Iterable[Frame],
    labels: Labels | GivenLabels,
    size: Size,
    protocol: Protocol,
    *,
    smooth: bool = False,
    past: Past | None = None,
    watch: Watch | None = None,
) -> Iterator[tuple[Frame, Labels]]:
    """Every frame with its soft labels; only the protocol's context is held in memory.

    `labels` as in `propagate_features`: those of the first frame, or a function that returns labels where
    a frame has some. Frames go in at `size`; `smooth` as in `encode`. Of the frames of the `past`, which keep
    their labels, only those are encoded that later ones look at. `watch` as in `propagate_features`; of the
    past, it sees the last given frame.
    """
    if encoder.copies:
        soft: Labels | None = None
        for index, frame in enumerate(frames):
            given = labels(index, soft) if callable(labels) else labels
            soft = soft if given is None else given
            assert soft is not None
            yield frame, soft
        return
    shown: deque[Frame] = deque()  # at most one frame: encoded, its labels not there yet
    incoming, propagator, known = same_size(frames), Propagator(protocol), past.frames if past else 0
    device = next(encoder.parameters()).device

    def features() -> Iterator[Float[Tensor, "channels rows columns"]]:
        for frame in incoming:
            shown.append(frame)
            yield encode(encoder, frame, size, protocol.precision, smooth=smooth)

    for index, frame in enumerate(islice(incoming, known)):
        assert past is not None
        soft = past.labels(index).to(device)
        if index == past.given:
            here = encode(encoder, frame, size, protocol.precision, smooth=smooth)
            propagator.start(here, soft)
            if watch is not None:
                watch(index, soft, here)
        elif index >= known - protocol.context and index > past.given:
            propagator.skip(encode(encoder, frame, size, protocol.precision, smooth=smooth), soft)
        elif index > past.given:
            propagator.pass_over()
        yield frame, soft
    for soft in propagate_features(features(), labels, protocol, propagator, known, watch):
        yield shown.popleft(), soft


def same_size(
    frames: Iterable[Frame], size: Size | None = None, start: int = 0, step: int = 1
) -> Iterator[Frame]:
    """The frames, up to one of another size than the first, which is an error.

    `size` is that of the first one, where it is known; `start` and `step` number the frames.
    """
    for index, frame in enumerate(frames):
        here = (frame.shape[0], frame.shape[1])
        size = size or here
        if here != size:
            found, expected = format_size(*here), format_size(*size)
            number = start + step * index
            raise InputError(f"frame {number} is {found}, the first {expected}; all must have the same size.")
        yield frame


def run_masks(
    encoder: Encoder, frames: Sequence[Path], first: Ids, size: Size, protocol: Protocol, num_classes: int
) -> Iterator[Ids]:
    """Ids of every frame on disk, at the size of the first mask, which passes through the grid as well."""
    ids = torch.from_numpy(np.where(first == VOID, 0, first).astype(np.uint8))
    grid = (size[0] // encoder.patch_size, size[1] // encoder.patch_size)
    soft = ids_to_grid(
        ids, input_size=size, grid=grid, num_classes=num_classes, nearest=protocol.labels == "nearest"
    )
    output_size = (first.shape[0], first.shape[1])
    # An input that is larger than the frames, for its finer grid, knows no more of their pixels.
    at = size if protocol.resize in PLAIN else min(size, output_size)
    labeled = run_clip(encoder, ahead(read_image, frames), soft, size, protocol)
    yield from to_host(labels_to_ids(labels, frame, at, output_size, protocol) for frame, labels in labeled)


def to_host(found: Iterable[UInt8[Tensor, "height width"]]) -> Iterator[Ids]:
    """Ids as arrays; those of a GPU one behind, so that it computes the next while they are copied."""
    behind: tuple[Tensor, torch.cuda.Event] | None = None
    for ids in found:
        if not ids.is_cuda:
            yield ids.cpu().numpy()
            continue
        host = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=True).copy_(ids, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        if behind is not None:
            behind[1].synchronize()
            yield behind[0].numpy()
        behind = host, copied
    if behind is not None:
        behind[1].synchronize()
        yield behind[0].numpy()


def encode(
    encoder: Encoder, frame: Frame, size: Size, precision: Precision = "fp32", *, smooth: bool = False
) -> Float[Tensor, "channels rows columns"]:
    """Features of one frame at the input size.

    The benchmarks' protocols resize without antialiasing; `smooth` adds it where a frame shrinks by 1.5
    or more, as for a user's large videos.
    """
    if smooth and frame.shape[0] >= 1.5 * size[0]:
        frame = np.asarray(Image.fromarray(frame).resize((size[1], size[0]), Image.Resampling.BILINEAR))
    device = next(encoder.parameters()).device
    image = torch.from_numpy(frame.copy()).to(device)
    with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
        return encoder.features(normalize(resize_images(image, size))[None])[0].float()


@contextmanager
def write_behind(write: Callable[..., None]) -> Iterator[Callable[..., None]]:
    """The same function, called in threads; on exit all calls have ended, and the first error is raised."""
    waiting: deque[Future[None]] = deque()
    with ThreadPoolExecutor(THREADS) as pool:

        def later(*values: Any) -> None:
            waiting.append(pool.submit(write, *values))
            if len(waiting) > 8 * THREADS:
                waiting.popleft().result()

        yield later
        while waiting:
            waiting.popleft().result()
