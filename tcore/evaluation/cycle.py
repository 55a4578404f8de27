"""Cycle consistency: labels propagated forward and back should return to their place; no truth is needed.

The idea of CRW (arXiv:2006.14613), here as a score.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from tcore.data.images import Frame
from tcore.data.rendered import render_video
from tcore.data.stores import FrameStore
from tcore.errors import InputError
from tcore.evaluation.benchmarks.benchmark import spread
from tcore.evaluation.benchmarks.rendered import GRID, HELDOUT_SEED
from tcore.evaluation.encoder import Encoder
from tcore.evaluation.propagate import propagate_features
from tcore.evaluation.protocols import RENDERED
from tcore.evaluation.run_clip import encode

CLIPS, FRAMES = 8, 10  # enough to distinguish encoders: a few seconds on a CPU
DRAWS, REGIONS = 4, 6  # random segmentations of a frame, and regions of each: about as large as objects are
REACH = 1  # patches


@torch.no_grad()
def share_returned(features: Float[Tensor, "time channels rows columns"], reach: int = REACH) -> float:
    """Share of the first frame's patches whose own label returns, at most `reach` patches away.

    Labels are the regions of random segmentations. The way back restarts at the last frame, so that the
    first one is reached only through the others. Chance matches return as well, because similarity is mutual,
    and features that encode only the position always return: use this beside scores, not instead of them.
    """
    if len(features) < 2:
        raise InputError(f"a clip of {len(features)} frames has no cycle: need at least 2.")
    first = random_regions(features.shape[2], features.shape[3]).to(features.device)
    labels = first.flatten(0, 1).movedim(0, -1).float()
    for way in (features, features.flip(0)):
        *_, labels = propagate_features(way, labels, RENDERED)
    found = labels.movedim(-1, 0).unflatten(0, first.shape[:2]).argmax(dim=1, keepdim=True)
    near = F.max_pool2d(first.float(), 2 * reach + 1, stride=1, padding=reach)
    return float(near.gather(1, found).mean())


def random_regions(rows: int, columns: int) -> Bool[Tensor, "draws regions rows columns"]:
    """Segmentations of a grid: every patch belongs to the nearest of some random points."""
    generator = torch.Generator().manual_seed(0)
    points = torch.rand(DRAWS, REGIONS, 2, generator=generator)
    down = (torch.arange(rows) + 0.5)[:, None] / rows - points[:, :, 0, None, None]
    right = (torch.arange(columns) + 0.5) / columns - points[:, :, 1, None, None]
    nearest = (down**2 + right**2).argmin(dim=1)
    return F.one_hot(nearest, REGIONS).movedim(-1, 1).bool()


def cycle_consistency(encoder: Encoder, clips: Iterable[Sequence[Frame]] | None = None) -> float:
    """Mean share that returns over some clips, in square frames of 16 patches; rendered ones by default."""
    side = GRID * encoder.patch_size
    found = []
    for frames in rendered_clips(side) if clips is None else clips:
        features = [encode(encoder, frame, (side, side)) for frame in frames]
        found.append(share_returned(torch.stack(features)))
    if not found:
        raise InputError("no clips: cycle consistency needs at least one.")
    return float(np.mean(found))


@lru_cache(maxsize=1)  # a run uses them at every score
def rendered_clips(side: int, count: int = CLIPS, frames: int = FRAMES) -> tuple[Sequence[Frame], ...]:
    """Rendered videos that training never sees."""
    return tuple(
        list(render_video(HELDOUT_SEED, number, split="heldout", num_frames=frames, size=side).frames)
        for number in range(count)
    )


def store_clips(store: FrameStore, count: int = CLIPS, frames: int = FRAMES) -> Iterator[Sequence[Frame]]:
    """The beginnings of some videos of a store, evenly spread over it."""
    long = np.flatnonzero(store.lengths >= 2)
    if not len(long):
        raise InputError("no video of this store has two frames: cycle consistency needs videos.")
    for video in spread(long.tolist(), count):
        yield store.read(video, range(min(frames, int(store.lengths[video]))))
