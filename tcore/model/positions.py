"""Positions of tokens on a grid and in time: fixed by a formula, or learned."""

from functools import lru_cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

# grid: fixed, of row and column, and learned of the frame where there are several (MAE, DropMAE);
# line: fixed, of one running index (VideoMAE); separable: learned, of patch and time slot (MAE-ST).
PlaceKind = Literal["grid", "line", "separable"]


def grid_positions(rows: int, columns: int, dim: int, *, row_first: bool = False) -> Float[Tensor, "n {dim}"]:
    """Sines and cosines of the column, then of the row, row by row (MAE, arXiv:2111.06377).

    MoCo v3 (arXiv:2104.02057) has those of the row first.
    """
    omega = 10000.0 ** (-torch.arange(dim // 4, dtype=torch.float64) / (dim // 4))

    def waves(count: int) -> Tensor:
        angles = torch.arange(count, dtype=torch.float64)[:, None] * omega
        return torch.cat([angles.sin(), angles.cos()], dim=1)

    both = [waves(columns).expand(rows, -1, -1), waves(rows)[:, None].expand(-1, columns, -1)]
    return torch.cat(both[::-1] if row_first else both, dim=2).flatten(0, 1).float()


def line_positions(length: int, dim: int) -> Float[Tensor, "{length} {dim}"]:
    """Sines (even channels) and cosines (odd ones) of a running index (VideoMAE, arXiv:2203.12602)."""
    channel = torch.arange(dim, dtype=torch.float64)
    angles = torch.arange(length, dtype=torch.float64)[:, None] / 10000.0 ** (2 * (channel // 2) / dim)
    return torch.where(channel % 2 == 0, angles.sin(), angles.cos()).float()


def resize_positions(
    grid: Float[Tensor, "1 d n n"], rows: int, columns: int, *, antialias: bool
) -> Float[Tensor, "1 d {rows} {columns}"]:
    """Positions on another grid, bicubic: to the size with antialias, or in DINO's form.

    In DINO's form, sampling coordinates follow from a factor that is a little too large (arXiv:2104.14294).
    """
    if antialias:
        return F.interpolate(grid, size=(rows, columns), mode="bicubic", antialias=True)
    factors = ((rows + 0.1) / grid.shape[2], (columns + 0.1) / grid.shape[3])
    return F.interpolate(grid, scale_factor=factors, mode="bicubic")


@lru_cache(maxsize=16)
def resize_matrix(
    side: int, rows: int, columns: int, antialias: bool, device: torch.device
) -> Float[Tensor, "{side}*{side} {rows}*{columns}"]:
    """What every cell of a grid gives to every cell of the resized one, in double precision."""
    cells = torch.eye(side**2, dtype=torch.float64).view(1, side**2, side, side)
    return resize_positions(cells, rows, columns, antialias=antialias)[0].flatten(1).to(device)


class ResizePositions(torch.autograd.Function):
    """`resize_positions` with a gradient that is a matrix product.

    On CUDA the gradient of torch's own is added up in any order, so that no two runs would be the same.
    """

    @staticmethod
    def forward(ctx: Any, grid: Tensor, rows: int, columns: int, antialias: bool) -> Tensor:
        """As without."""
        ctx.resized = (grid.shape[-1], rows, columns, antialias)
        return resize_positions(grid, rows, columns, antialias=antialias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        """Every cell gets from the resized ones what it gave to them."""
        (gradient,) = gradients
        side = ctx.resized[0]
        matrix = resize_matrix(*ctx.resized, gradient.device)
        found = gradient[0].flatten(1).double() @ matrix.T
        return found.view(1, -1, side, side).to(gradient.dtype), None, None, None


class Places(nn.Module):
    """Positions of all tokens of a frame or clip, that of the class token first where there is one.

    >>> Places("grid", dim=8, grid=3)().shape, Places("line", dim=8, grid=3, slots=4)().shape
    (torch.Size([1, 10, 8]), torch.Size([1, 37, 8]))
    """

    def __init__(
        self, kind: PlaceKind, *, dim: int, grid: int, slots: int = 1, class_token: bool = True
    ) -> None:
        super().__init__()
        self.class_token = class_token
        zero = torch.zeros(1, int(class_token and kind != "separable"), dim)
        if kind == "separable":
            self.space = nn.Parameter(torch.empty(1, grid**2, dim))
            self.time = nn.Parameter(torch.empty(1, slots, dim))
            self.frame = nn.Parameter(torch.empty(1, int(class_token), dim))
            for values in (self.space, self.time, self.frame):
                nn.init.trunc_normal_(values, std=0.02)
            return
        fixed = grid_positions(grid, grid, dim) if kind == "grid" else line_positions(slots * grid**2, dim)
        self.table = nn.Parameter(torch.cat([zero, fixed[None]], dim=1), requires_grad=False)
        if kind == "grid" and slots > 1:
            self.time = nn.Parameter(torch.randn(1, slots, dim))  # of spread 1, as released with DropMAE

    def forward(self) -> Float[Tensor, "1 n d"]:
        """The table of positions."""
        if hasattr(self, "space"):
            both = self.time[:, :, None] + self.space[:, None]
            return torch.cat([self.frame, both.flatten(1, 2)], dim=1)
        if not hasattr(self, "time"):
            return self.table
        front, patches = self.table.split([int(self.class_token), self.table.shape[1] - self.class_token], 1)
        return torch.cat([front, (self.time[:, :, None] + patches[:, None]).flatten(1, 2)], dim=1)
