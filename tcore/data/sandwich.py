"""Which three frames make a sample: a current one between a past and a future one."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Integer

from tcore.config import Sides

Range = tuple[float, float]


class Sandwich(NamedTuple):
    """Frame indices of one sample; both auxiliary frames may lie on one side in an ablation."""

    past: int
    current: int
    future: int


def sample_sandwich(
    num_frames: int,
    rng: np.random.Generator,
    *,
    current: Range = (0.3, 0.7),
    offset: Range = (0.15, 0.25),
    offset_frames: tuple[int, int] | None = None,
    frames: Sides = "past-future",
) -> Sandwich:
    """Draw a sandwich; offsets are fractions of the video unless `offset_frames` gives them in frames.

    >>> sample_sandwich(20, np.random.default_rng(0))
    Sandwich(past=8, current=12, future=16)
    """
    if num_frames == 1:
        return Sandwich(0, 0, 0)
    low, high = offset_frames or _offsets(num_frames, offset)
    first, last = int(current[0] * num_frames), int(current[1] * num_frames) - 1
    if offset_frames:
        first, last = max(first, high), min(last, num_frames - 1 - high)
    middle = int(rng.integers(first, max(first, last), endpoint=True))
    before, after = (int(x) for x in rng.integers(low, high, size=2, endpoint=True))
    left = -before if frames != "future-future" else before
    right = after if frames != "past-past" else -after
    return Sandwich(middle + left, middle, middle + right)


def _offsets(num_frames: int, offset: Range) -> tuple[int, int]:
    return int(offset[0] * num_frames), int(offset[1] * num_frames)


def usable(
    lengths: Integer[np.ndarray, "videos"],
    *,
    current: Range = (0.3, 0.7),
    offset: Range = (0.15, 0.25),
    offset_frames: tuple[int, int] | None = None,
) -> Bool[np.ndarray, "videos"]:
    """Which videos are long enough: an offset of at least one frame, and a current frame that has room."""
    first, last = (current[0] * lengths).astype(np.int64), (current[1] * lengths).astype(np.int64) - 1
    if offset_frames is None:
        return ((offset[0] * lengths).astype(np.int64) > 0) & (first <= last)
    reach = offset_frames[1]
    return np.asarray(np.maximum(first, reach) <= np.minimum(last, lengths - 1 - reach))
