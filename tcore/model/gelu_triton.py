"""The MLP's activation on a GPU: one reading of its input for all that the backward pass needs of it."""

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS, TIMES, WARPS = 4, 256, 64, 4  # of a tile; tiles that a program goes down; warps

# The error function to 1.5e-7 (Abramowitz and Stegun, 7.1.26), far finer than bf16. Its one exponential is
# also the density that the gradient needs.
P, A1, A2, A3, A4, A5 = 0.3275911, 0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429
ROOT_HALF, DENSITY = 0.7071067811865476, 0.3989422804014327


def fast_gelu(x: Tensor) -> Tensor:
    """The exact GELU, computed in fp32 with a short error function; made for a compiler."""
    wide = x.float()
    t = 1 / (1 + P * ROOT_HALF * wide.abs())
    tail = ((((A5 * t + A4) * t + A3) * t + A2) * t + A1) * t * torch.exp(-0.5 * wide * wide) * 0.5
    return (wide * torch.where(wide < 0, tail, 1 - tail)).to(x.dtype)


@triton.jit
def _gradients_kernel(
    h, pull, made, to_h, sums, rows, width,
    P: tl.constexpr, A1: tl.constexpr, A2: tl.constexpr, A3: tl.constexpr, A4: tl.constexpr, A5: tl.constexpr,
    DENSITY: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TIMES: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (column < width)[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    first = tl.program_id(1).to(tl.int64) * (ROWS * TIMES)
    for time in range(0, TIMES):
        row = first + time * ROWS + tl.arange(0, ROWS)
        at = row[:, None] * width + column[None, :]
        there = (row < rows)[:, None] & inside
        x = tl.load(h + at, there, 0.0).to(tl.float32)
        g = tl.load(pull + at, there, 0.0).to(tl.float32)
        t = 1 / (1 + P * tl.abs(x))
        bell = tl.exp(-0.5 * x * x)
        tail = ((((A5 * t + A4) * t + A3) * t + A2) * t + A1) * t * bell * 0.5
        share = tl.where(x < 0, tail, 1 - tail)
        down = g * (share + x * bell * DENSITY)
        tl.store(made + at, (x * share).to(made.dtype.element_ty), there)
        tl.store(to_h + at, down.to(to_h.dtype.element_ty), there)
        total += down
    tl.store(sums + tl.program_id(1) * width + column, tl.sum(total, 0), column < width)


def run_gradients(
    h: Tensor, pull: Tensor, tile: tuple[int, int, int, int] = (ROWS, COLUMNS, TIMES, WARPS)
) -> tuple[Tensor, Tensor, Tensor]:
    """GELU of h once more, the gradient of h, and its sums over some rows each."""
    rows, columns, times, warps = tile
    count, width = h.shape
    parts = triton.cdiv(count, rows * times)
    made, to_h = torch.empty_like(h), torch.empty_like(h)
    sums = h.new_empty(parts, width, dtype=torch.float32)
    if count:
        _gradients_kernel[(triton.cdiv(width, columns), parts)](
            h, pull, made, to_h, sums, count, width,
            P=P * ROOT_HALF, A1=A1, A2=A2, A3=A3, A4=A4, A5=A5, DENSITY=DENSITY,
            ROWS=rows, COLUMNS=columns, TIMES=times, num_warps=warps,
        )  # fmt: skip
    return made, to_h, sums


@torch.library.custom_op("tcore::gelu_gradients", mutates_args=())
def gelu_gradients(h: Tensor, pull: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same, for the compiler to call."""
    return run_gradients(h.contiguous(), pull.contiguous())


@gelu_gradients.register_fake
def _(h: Tensor, pull: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    parts = (h.shape[0] + ROWS * TIMES - 1) // (ROWS * TIMES)
    return torch.empty_like(h), torch.empty_like(h), h.new_empty(parts, h.shape[1], dtype=torch.float32)


class ActivatedLinear(torch.autograd.Function):
    """A linear layer of GELU(h). Keeps h alone; the bias of the layer before was added without a gradient."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, before: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """All in one precision, but for `before`: the bias in h, which is here for its gradient alone."""
        ctx.save_for_backward(h, weight)
        return F.linear(fast_gelu(h), weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        """Gradients of h, of both biases and of the weight."""
        h, weight = ctx.saved_tensors
        pull = gradients[0].flatten(0, -2)
        made, to_h, sums = gelu_gradients(h.flatten(0, -2), pull @ weight)
        return to_h.view_as(h), sums.sum(dim=0), pull.T @ made, pull.sum(dim=0)


def mlp(x: Tensor, first: torch.nn.Linear, second: torch.nn.Linear) -> Tensor:
    """The twin of Mlp in bf16."""
    h = F.linear(x.bfloat16(), first.weight.bfloat16(), first.bias.detach().bfloat16())
    weight, bias = second.weight.bfloat16(), second.bias.bfloat16()
    made: Tensor = ActivatedLinear.apply(h, first.bias, weight, bias)
    return made
