"""Cross-attention that follows motion (not in the paper): masked patches move as similar visible ones do.

In the published module, a masked patch queries the other frame before anything is known about that frame. It
has no content to compare, so the best it can do is attend to its own position. Here the visible patches are
first compared with the other frame; a masked patch then takes the displacement of similar patches nearby.
Position information is removed from the features first; otherwise every patch would match its own position.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from tcore.model.vit import VisionTransformer

SPREAD = 2.5  # sigma, in patches, of the Gaussian that weights nearby patches
EVEN = 1e-6  # added to every cell: a patch that has left the frame attends uniformly


class Scene(NamedTuple):
    """Facts about current frames besides their patches."""

    masked: Bool[Tensor, "b n"]
    places: Float[Tensor, "n d"]
    """The encoder's features of a fully masked frame, by position."""
    grid: tuple[int, int]
    apart: Int64[Tensor, "n n"]
    """Index of the displacement from each patch to every other patch."""
    near: Float[Tensor, "n n"]
    """Logarithm of the weight of each patch for every other, by distance."""


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
    """Patches with position information projected out and the mean of their frame subtracted."""
    direction = F.normalize(places - places.mean(dim=0), dim=-1)
    free = patches - (patches * direction).sum(dim=-1, keepdim=True) * direction
    if seen is None:
        return free - free.mean(dim=1, keepdim=True)
    weights = seen[..., None].to(free.dtype)
    return free - (free * weights).sum(dim=1, keepdim=True) / weights.sum(dim=1, keepdim=True).clamp(min=1)


def follow_motion(
    current: Float[Tensor, "b heads n w"], other: Float[Tensor, "b heads n w"], scale: float, scene: Scene
) -> Float[Tensor, "b heads n n"]:
    """Where current patches are in the other frames, from unit vectors of content; rows sum to 1."""
    rows, columns = scene.grid
    found = (scale * (current @ other.mT)).float().softmax(dim=-1)
    there = found.new_zeros(*found.shape[:-1], (2 * rows - 1) * (2 * columns - 1))
    there = there.scatter(-1, scene.apart.expand_as(found), found)  # the same shares, by displacement
    alike = (scale * (current @ current.mT)).float() + scene.near
    alike = alike.masked_fill(scene.masked[:, None, None], torch.finfo(alike.dtype).min).softmax(dim=-1)
    moved = (alike @ there).float().gather(-1, scene.apart.expand_as(found)) + EVEN
    return moved / moved.sum(dim=-1, keepdim=True)
