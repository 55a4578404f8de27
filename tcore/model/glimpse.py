"""A glimpse of what a step sees, for the health figures."""

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from tcore.model.teaching import Teaching

GLIMPSE_ROWS = 256  # over all processes


class Glimpse(NamedTuple):
    """A few detached rows of what the last forward saw, for the health figures."""

    frames: Float[Tensor, "f d"]
    patches: Float[Tensor, "p d"]
    frame_targets: Float[Tensor, "f k"]
    patch_targets: Float[Tensor, "h k"]
    from_past: Float[Tensor, "h d"] | None
    from_future: Float[Tensor, "h d"] | None


def take_glimpse(
    frames: Tensor,
    patches: Tensor,
    about_frames: Teaching,
    about_holes: Teaching,
    restored: dict[str, Tensor],
    most: int,
) -> Glimpse:
    """A few rows of everything, evenly spaced, at most so many of each."""

    def some(count: int) -> slice:
        # Evenly spaced rows: neighboring patches of one frame say little about the batch.
        stride = max(1, count // most)
        return slice(0, min(count, stride * most), stride)

    def rows(x: Tensor) -> Tensor:
        return x.detach()[some(len(x))].float().clone()

    both = "past" in restored and "future" in restored
    return Glimpse(
        rows(frames),
        rows(patches.flatten(0, 1)),
        about_frames.targets(some(about_frames.count)),
        about_holes.targets(some(about_holes.count)),
        rows(restored["past"]) if both else None,
        rows(restored["future"]) if both else None,
    )
