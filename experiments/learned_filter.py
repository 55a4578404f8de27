"""A learned filter of labels, for comparison with the guided one: the frame says whose label counts.

Like `tcore.evaluation.edges.guided_labels`, it takes soft labels of the grid and a frame, and returns soft
labels of the guide. experiments/edge_filter.py trains it.
"""

from functools import lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Float
from safetensors import safe_open
from torch import Tensor, nn

from tcore.data.render import normalize
from tcore.evaluation.edges import FineLabels, Pixels, guide, guide_side
from tcore.evaluation.propagate import Labels

REACH = 4  # neighbors of a cell that labels are mixed from: 9 x 9


def mix_neighbors(
    queries: Float[Tensor, "b dim fine_rows fine_columns"],
    keys: Float[Tensor, "b dim rows columns"],
    values: Float[Tensor, "b channels rows columns"],
    falloff: Float[Tensor, ""],
) -> Float[Tensor, "b channels fine_rows fine_columns"]:
    """Every pixel mixes the values of the 9 x 9 cells around its own, by a softmax over them.

    A cell counts by query . key, less `falloff` times its squared distance from the pixel, in cells. Rows of
    cells are done a few at a time, so that memory stays bounded.
    """
    rows, columns = keys.shape[2:]
    side, wide = queries.shape[2] // rows, 2 * REACH + 1
    place = (torch.arange(side, device=keys.device) + 0.5) / side - 0.5
    apart = (place[:, None] - torch.arange(-REACH, REACH + 1, device=keys.device)).square()
    distance = (apart[:, None, :, None] + apart[None, :, None, :]).flatten(2, 3).flatten(0, 1)
    bias = -falloff * distance
    pad = (REACH,) * 4
    inside = F.pad(keys.new_ones(1, 1, rows, columns), pad)
    keys, values = F.pad(keys, pad), F.pad(values, pad)
    allowed = 1 << 30 if keys.is_cuda else 32 << 20  # bytes of weights that exist at a time
    step = max(1, allowed // (4 * len(keys) * columns * side**2 * wide**2))

    def around(x: Tensor, top: int, bottom: int) -> Tensor:
        """The neighbors of the cells of some rows: b, cells, 81, channels."""
        near = x[:, :, top : bottom + 2 * REACH].unfold(2, wide, 1).unfold(3, wide, 1)
        return near.permute(0, 2, 3, 4, 5, 1).flatten(3, 4).flatten(1, 2)

    found = []
    for top in range(0, rows, step):
        bottom = min(rows, top + step)
        mine = queries[:, :, top * side : bottom * side].unflatten(2, (-1, side)).unflatten(4, (-1, side))
        mine = mine.permute(0, 2, 4, 3, 5, 1).flatten(3, 4).flatten(1, 2)
        scores = mine @ around(keys, top, bottom).transpose(-1, -2) + bias
        scores = scores.masked_fill(around(inside, top, bottom).transpose(-1, -2) == 0, -torch.inf)
        mixed = scores.softmax(dim=-1) @ around(values, top, bottom)
        mixed = mixed.unflatten(1, (bottom - top, columns)).unflatten(3, (side, side))
        found.append(mixed.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3))
    return torch.cat(found, dim=2)


class EdgeFilter(nn.Module):
    """A small network of the frame alone: queries of pixels and keys of cells, which say whose label counts.

    Three scales of convolutions over the guide; keys are means over their cells.
    """

    def __init__(self, width: int = 32, dim: int = 32) -> None:
        super().__init__()

        def layers(given: int, made: int, stride: int, count: int) -> nn.Sequential:
            steps: list[nn.Module] = [nn.Conv2d(given, made, 3, stride, 1), nn.GELU()]
            for _ in range(count - 1):
                steps += [nn.Conv2d(made, made, 3, 1, 1), nn.GELU()]
            return nn.Sequential(*steps)

        self.sizes = {"width": width, "dim": dim}
        self.fine = layers(3, width, 1, 2)
        self.middle = layers(width, 2 * width, 2, 2)
        self.coarse = layers(2 * width, 3 * width, 2, 3)
        self.from_middle = nn.Conv2d(2 * width, width, 1)
        self.from_coarse = nn.Conv2d(3 * width, 2 * width, 1)
        self.query = nn.Conv2d(width, dim, 1)
        self.key = nn.Conv2d(width, dim, 1)
        self.falloff = nn.Parameter(torch.tensor(1.0))
        nn.init.normal_(self.query.weight, std=0.01)  # at first, distance alone counts

    def forward(
        self,
        images: Float[Tensor, "b 3 fine_rows fine_columns"],
        values: Float[Tensor, "b channels rows columns"],
    ) -> Float[Tensor, "b channels fine_rows fine_columns"]:
        """Values of the grid, brought to the size of the images, which are normalized."""
        grid = values.shape[-2:]
        fine = self.fine(images)
        middle = self.middle(fine)
        middle = middle + grow(self.from_coarse(self.coarse(middle)), middle)
        fine = fine + grow(self.from_middle(middle), fine)
        queries = self.query(fine)
        keys = F.avg_pool2d(self.key(fine), queries.shape[2] // grid[0])
        return mix_neighbors(queries, keys, values, F.softplus(self.falloff))

    @torch.no_grad()
    def refine(self, labels: Labels, frame: Pixels) -> FineLabels:
        """Soft labels of the grid as those of the guide: a cell becomes `guide_side` pixels."""
        grid = (labels.shape[0], labels.shape[1])
        side = guide_side(grid, (frame.shape[0], frame.shape[1]))
        image = normalize(guide(frame.to(labels.device), grid, side))
        return self(image, labels.movedim(-1, 0)[None].float())[0].movedim(0, -1)


def grow(x: Float[Tensor, "b c rows columns"], like: Tensor) -> Float[Tensor, "b c fine_rows fine_columns"]:
    """Bilinear, to the size of another."""
    return F.interpolate(x, size=like.shape[-2:], mode="bilinear", align_corners=False)


@lru_cache(maxsize=2)
def load_filter(device: torch.device, file: Path) -> EdgeFilter:
    """A filter that `save_filter` wrote."""
    with safe_open(file, "pt") as opened:
        sizes = {name: int(value) for name, value in (opened.metadata() or {}).items()}
        weights = {name: opened.get_tensor(name).float() for name in opened.keys()}  # noqa: SIM118
    found = EdgeFilter(**sizes)
    found.load_state_dict(weights)
    return found.eval().requires_grad_(False).to(device)
