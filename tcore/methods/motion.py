"""Cross-attention that follows motion: masked patches are displaced as nearby visible ones like them. Ours.

In the published module a masked patch asks before anything is known of the other frame. It has no content to
compare, so the best that it can do is to look where it is itself. Here the visible patches are compared
first, each with the other frame; a masked one then takes the displacement of those that are near and look
alike. What an encoder writes into its features about places is removed before, or everything would be found
where it was.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from tcore.model.vit import VisionTransformer

SPREAD = 2.5  # patches: how far away the patches are that one takes its displacement from (a Gaussian)
EVEN = 1e-6  # given to every cell: a patch that has left the frame looks at all of them alike


class Scene(NamedTuple):
    """What is known of current frames beside their patches."""

    masked: Bool[Tensor, "b n"]
    places: Float[Tensor, "n d"]
    """What the encoder makes of each place where nothing is seen at all."""
    grid: tuple[int, int]
    apart: Int64[Tensor, "n n"]
    """The number of the displacement from each patch to each other one."""
    near: Float[Tensor, "n n"]
    """Logarithm of how much each patch counts for each other one, by their distance."""


@torch.no_grad()
def view_scene(backbone: VisionTransformer, masked: Bool[Tensor, "b n"], grid: tuple[int, int]) -> Scene:
    """The scene of some masked frames: places are the patches of a frame that is masked as a whole."""
    height, width = (side * backbone.patch_size for side in grid)
    nothing = torch.zeros(1, 3, height, width, device=masked.device)
    everywhere = masked.new_ones(1, masked.shape[1])
    places = backbone(nothing, everywhere, stochastic_depth=False).patches[0]
    return Scene(masked, places, grid, *geometry(*grid, masked.device))


def geometry(
    rows: int, columns: int, device: torch.device
) -> tuple[Int64[Tensor, "n n"], Float[Tensor, "n n"]]:
    """Displacements and nearness of the patches of a grid."""
    cells = torch.cartesian_prod(torch.arange(rows, device=device), torch.arange(columns, device=device))
    shift = cells[None] - cells[:, None]
    number = (shift[..., 0] + rows - 1) * (2 * columns - 1) + shift[..., 1] + columns - 1
    return number, -shift.square().sum(dim=-1) / (2 * SPREAD**2)


def forget_places(
    patches: Float[Tensor, "b n d"], places: Float[Tensor, "n d"], seen: Bool[Tensor, "b n"] | None = None
) -> Float[Tensor, "b n d"]:
    """Patches without what says where they are, and without what those of a frame have in common."""
    direction = F.normalize(places - places.mean(dim=0), dim=-1)
    free = patches - (patches * direction).sum(dim=-1, keepdim=True) * direction
    if seen is None:
        return free - free.mean(dim=1, keepdim=True)
    weights = seen[..., None].to(free.dtype)
    return free - (free * weights).sum(dim=1, keepdim=True) / weights.sum(dim=1, keepdim=True).clamp(min=1)


def follow_motion(
    current: Float[Tensor, "b heads n w"], other: Float[Tensor, "b heads n w"], scale: float, scene: Scene
) -> Float[Tensor, "b heads n n"]:
    """Where the patches of the current frames are in others, from directions of content; rows sum to 1."""
    rows, columns = scene.grid
    found = (scale * (current @ other.mT)).float().softmax(dim=-1)
    there = found.new_zeros(*found.shape[:-1], (2 * rows - 1) * (2 * columns - 1))
    there = there.scatter(-1, scene.apart.expand_as(found), found)  # the same shares, by displacement
    alike = (scale * (current @ current.mT)).float() + scene.near
    alike = alike.masked_fill(scene.masked[:, None, None], torch.finfo(alike.dtype).min).softmax(dim=-1)
    moved = (alike @ there).float().gather(-1, scene.apart.expand_as(found)) + EVEN
    return moved / moved.sum(dim=-1, keepdim=True)
