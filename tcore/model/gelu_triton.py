"""The MLP's activation on a GPU: one reading of its input for all that the backward pass needs of it."""

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

# What was fastest on an H200 for 92,460 x 1,536 and 46,230 x 3,072 (benchmarks/attention.py).
SIZE, FORWARD_WARPS = 1024, 4  # numbers of a program, forward
ROWS, COLUMNS, TIMES, WARPS = 1, 512, 32, 2  # of a tile, backward; tiles that a program goes down; warps

# The error function to 1.5e-7 (Abramowitz and Stegun, 7.1.26), far finer than bf16. Its one exponential is
# also the density that the gradient needs.
A1, A2, A3 = tl.constexpr(0.254829592), tl.constexpr(-0.284496736), tl.constexpr(1.421413741)
A4, A5 = tl.constexpr(-1.453152027), tl.constexpr(1.061405429)
NEAR, DENSITY = tl.constexpr(0.3275911 * 0.7071067811865476), tl.constexpr(0.3989422804014327)


@triton.jit
def _share(x, bell):
    """How much of x passes; `bell` is exp(-x * x / 2)."""
    t = 1 / (1 + NEAR * tl.abs(x))
    tail = ((((A5 * t + A4) * t + A3) * t + A2) * t + A1) * t * bell * 0.5
    return tl.where(x < 0, tail, 1 - tail)


@triton.jit
def _gelu_kernel(h, made, count, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    x = tl.load(h + at, at < count, 0.0).to(tl.float32)
    found = x * _share(x, tl.exp(-0.5 * x * x))
    tl.store(made + at, found.to(made.dtype.element_ty), at < count)


@triton.jit
def _gradients_kernel(
    h, pull, made, to_h, sums, rows, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TIMES: tl.constexpr,
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
        bell = tl.exp(-0.5 * x * x)
        share = _share(x, bell)
        down = g * (share + x * bell * DENSITY)
        tl.store(made + at, (x * share).to(made.dtype.element_ty), there)
        tl.store(to_h + at, down.to(to_h.dtype.element_ty), there)
        total += down
    tl.store(sums + tl.program_id(1) * width + column, tl.sum(total, 0), column < width)


def run_forward(h: Tensor) -> Tensor:
    """The exact GELU, computed in fp32."""
    made = torch.empty_like(h)
    if h.numel():
        programs = triton.cdiv(h.numel(), SIZE)
        _gelu_kernel[(programs,)](h, made, h.numel(), SIZE=SIZE, num_warps=FORWARD_WARPS)
    return made


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
            ROWS=rows, COLUMNS=columns, TIMES=times, num_warps=warps,
        )  # fmt: skip
    return made, to_h, sums


@torch.library.custom_op("tcore::gelu", mutates_args=())
def gelu(h: Tensor) -> Tensor:
    """GELU, for the compiler to call."""
    return run_forward(h.contiguous())


@gelu.register_fake
def _(h: Tensor) -> Tensor:
    return torch.empty_like(h, memory_format=torch.contiguous_format)


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
        return F.linear(gelu(h), weight, bias)

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
