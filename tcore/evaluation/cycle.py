"""Cycle consistency: labels carried forward and back should return to their place; no truth is needed."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tcore.data.frames import Frame, FrameStore
from tcore.data.synthetic import render_video
from tcore.errors import InputError
from tcore.evaluation.carry import encode
from tcore.evaluation.encoder import Encoder
from tcore.evaluation.protocols import RENDERED, Protocol
from tcore.evaluation.rendered import HELDOUT_SEED
from tcore.evaluation.rendered_benchmark import GRID

CLIPS, FRAMES = 4, 10  # enough to tell encoders apart within a second or two on a CPU
REACH = 1  # patches


@torch.no_grad()
def share_returned(
    features: Float[Tensor, "time channels rows columns"],
    protocol: Protocol = RENDERED,
    reach: int = REACH,
) -> float:
    """Share of the first frame's patches whose own label comes back, from at most `reach` patches away.

    Every patch is a label of its own. The way back begins anew at the last frame, so that the first one is
    reached through the others only. An encoder that looks at nothing but places would return everything:
    this figure goes beside scores and ranks, not in their place.
    """
    if len(features) < 2:
        raise InputError(f"a clip of {len(features)} frames goes nowhere: a cycle needs at least 2.")
    rows, columns = features.shape[2:]
    labels = torch.eye(rows * columns, device=features.device).view(rows, columns, -1)
    for way in (features, features.flip(0)):
        propagator = protocol.propagator()
        propagator.start(way[0], labels)
        for frame in way[1:]:
            labels = propagator.step(frame)
    place = torch.arange(rows * columns, device=features.device)
    origin = labels.flatten(0, 1).argmax(dim=1)
    down, right = place // columns - origin // columns, place % columns - origin % columns
    returned = (down.abs() <= reach) & (right.abs() <= reach)
    return float(returned.float().mean())


def cycle_consistency(
    encoder: Encoder, clips: Iterable[Sequence[Frame]] | None = None, protocol: Protocol = RENDERED
) -> float:
    """Mean share that returns over some clips, in square frames of 16 patches; rendered ones by default."""
    side = GRID * encoder.patch_size
    found = []
    for frames in rendered_clips(side) if clips is None else clips:
        features = [encode(encoder, frame, (side, side), protocol.precision) for frame in frames]
        found.append(share_returned(torch.stack(features), protocol))
    if not found:
        raise InputError("no clips: cycle consistency needs at least one.")
    return float(np.mean(found))


def rendered_clips(side: int, count: int = CLIPS, frames: int = FRAMES) -> Iterator[Sequence[Frame]]:
    """Rendered videos that training never sees."""
    for number in range(count):
        video = render_video(HELDOUT_SEED, number, split="heldout", num_frames=frames, size=side)
        yield list(video.frames)


def store_clips(store: FrameStore, count: int = CLIPS, frames: int = FRAMES) -> Iterator[Sequence[Frame]]:
    """The beginnings of some videos of a store, evenly spread over it."""
    long = np.flatnonzero(store.lengths >= 2)
    if not len(long):
        raise InputError("no video of this store has two frames: cycle consistency needs videos.")
    for index in np.unique(np.linspace(0, len(long) - 1, min(count, len(long))).round().astype(int)):
        video = int(long[index])
        yield store.read(video, range(min(frames, int(store.lengths[video]))))
