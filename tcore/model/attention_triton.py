"""Attention among few tokens on a GPU: the twin of Attention's plain form, without a copy around it.

All keys of a sample fit into one program, so a softmax sees its whole row at once. Queries, keys and values
are read from the joint projection as it is, and their gradients are written as it wants them; the sums of
these over tokens are the gradient of its bias. No number is added to by several programs: results are the
same twice.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST = 256  # tokens
LOG2_E = 1.4426950408889634


class Forward(NamedTuple):
    """How a program cuts its work."""

    parts: tuple[int, int, int]
    """Keys are held in up to three tiles, powers of two: 201 keys are 128 + 64 + 16, not 256."""
    rows: int = 64
    """Queries at a time."""
    blocks: int = 1
    """Times that a program takes so many queries."""
    warps: int = 4
    stages: int = 1


class Backward(NamedTuple):
    """The same for gradients: a program holds all queries of a sample."""

    keys: int
    """Keys at a time."""
    warps: int
    stages: int = 1


def key_parts(n: int) -> tuple[int, int, int]:
    """Three powers of two, or fewer and zeros, that hold n keys and little more.

    >>> key_parts(201), key_parts(41), key_parts(21), key_parts(64)
    ((128, 64, 16), (32, 16, 0), (32, 0, 0), (64, 0, 0))
    """
    parts: list[int] = []
    left = max(16, -(-n // 16) * 16)
    while left > 0:
        whole = 1 << (left.bit_length() - 1)
        size = whole if len(parts) < 2 else triton.next_power_of_2(left)
        parts.append(size)
        left -= size
    first, second, third = (*parts, 0, 0)[:3]
    return first, second, third


def forward_plan(n: int) -> Forward:
    """What was fastest on an H200 for 201 and 41 tokens (benchmarks/attention.py)."""
    return Forward(key_parts(n), blocks=4, stages=2) if n > 128 else Forward(key_parts(n))


def backward_plan(n: int) -> Backward:
    """What was fastest on an H200 for 201 and 41 tokens."""
    if n > 128:
        return Backward(keys=32, warps=8, stages=2)
    return Backward(keys=64, warps=4) if n <= 64 else Backward(keys=32, warps=4)


@triton.jit
def _tile(base, start, stride, N: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Rows of a sample and a head from `start` on, 0 beyond the last."""
    row = start + tl.arange(0, SIZE)
    return tl.load(base + row[:, None] * stride + tl.arange(0, WIDTH)[None, :], (row < N)[:, None], 0.0)


@triton.jit
def _scores(
    q, k, row, seen, START: tl.constexpr, N: tl.constexpr, SIZE: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Products of queries with keys, -inf where they do not look."""
    scores = tl.dot(q, tl.trans(k))
    key = START + tl.arange(0, SIZE)
    if MASKED:
        at = (row[:, None] < N) & (key < N)[None, :]
        looks = tl.load(seen + row[:, None] * N + key[None, :], at, 0) != 0
        # Rows beyond the last look at all: no row is empty.
        scores = tl.where((looks | (row[:, None] >= N)) & (key < N)[None, :], scores, -float("inf"))
    elif START + SIZE > N:
        scores = tl.where((key < N)[None, :], scores, -float("inf"))
    return scores


@triton.jit
def _forward_kernel(
    qkv, seen, out, lse, per_two,
    N: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    D: tl.constexpr = HEADS * WIDTH  # noqa: N806, a constant
    sample, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    base = qkv + sample * N * 3 * D + head * WIDTH
    k_a = _tile(base + D, 0, 3 * D, N, A, WIDTH)
    v_a = _tile(base + 2 * D, 0, 3 * D, N, A, WIDTH)
    if B > 0:
        k_b = _tile(base + D, A, 3 * D, N, B, WIDTH)
        v_b = _tile(base + 2 * D, A, 3 * D, N, B, WIDTH)
    if C > 0:
        k_c = _tile(base + D, A + B, 3 * D, N, C, WIDTH)
        v_c = _tile(base + 2 * D, A + B, 3 * D, N, C, WIDTH)
    for block in range(0, BLOCKS):
        start = (tl.program_id(1) * BLOCKS + block) * ROWS
        row = start + tl.arange(0, ROWS)
        q = _tile(base, start, 3 * D, N, ROWS, WIDTH)
        s_a = _scores(q, k_a, row, seen, 0, N, A, MASKED)
        most = tl.max(s_a, 1)
        if B > 0:
            s_b = _scores(q, k_b, row, seen, A, N, B, MASKED)
            most = tl.maximum(most, tl.max(s_b, 1))
        if C > 0:
            s_c = _scores(q, k_c, row, seen, A + B, N, C, MASKED)
            most = tl.maximum(most, tl.max(s_c, 1))
        most *= per_two
        p = tl.exp2(s_a * per_two - most[:, None])
        total = tl.sum(p, 1)
        found = tl.dot(p.to(v_a.dtype), v_a)
        if B > 0:
            p = tl.exp2(s_b * per_two - most[:, None])
            total += tl.sum(p, 1)
            found = tl.dot(p.to(v_a.dtype), v_b, found)
        if C > 0:
            p = tl.exp2(s_c * per_two - most[:, None])
            total += tl.sum(p, 1)
            found = tl.dot(p.to(v_a.dtype), v_c, found)
        inside = row < N
        to = out + (sample * N + row[:, None]) * D + head * WIDTH + tl.arange(0, WIDTH)[None, :]
        tl.store(to, (found / total[:, None]).to(out.dtype.element_ty), inside[:, None])
        tl.store(lse + (sample * HEADS + head) * N + row, most + tl.log2(total), inside)


@triton.jit
def _backward_kernel(
    qkv, seen, out, lse, to_out, to_qkv, sums, scale, per_two,
    N: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    D: tl.constexpr = HEADS * WIDTH  # noqa: N806, a constant
    sample, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    base = qkv + sample * N * 3 * D + head * WIDTH
    made = to_qkv + sample * N * 3 * D + head * WIDTH
    row, column = tl.arange(0, QUERIES), tl.arange(0, WIDTH)
    q = _tile(base, 0, 3 * D, N, QUERIES, WIDTH)
    pull = _tile(to_out + sample * N * D + head * WIDTH, 0, D, N, QUERIES, WIDTH)
    o = _tile(out + sample * N * D + head * WIDTH, 0, D, N, QUERIES, WIDTH)
    common = tl.sum(pull.to(tl.float32) * o.to(tl.float32), 1)
    # Rows beyond the last have no weights: exp2(-inf).
    level = tl.load(lse + (sample * HEADS + head) * N + row, row < N, float("inf"))
    to_q = tl.zeros([QUERIES, WIDTH], tl.float32)
    # Keys and values are the columns of their gradients here: a product wants 64 rows, and keys may be fewer.
    sum_k, sum_v = tl.zeros([WIDTH, KEYS], tl.float32), tl.zeros([WIDTH, KEYS], tl.float32)
    for start in range(0, N, KEYS):
        key = start + tl.arange(0, KEYS)
        there = (key < N)[None, :]
        k = _tile(base + D, start, 3 * D, N, KEYS, WIDTH)
        v = _tile(base + 2 * D, start, 3 * D, N, KEYS, WIDTH)
        p = tl.exp2(tl.dot(q, tl.trans(k)) * per_two - level[:, None])
        if MASKED:
            at = (row[:, None] < N) & there
            p = tl.where(tl.load(seen + row[:, None] * N + key[None, :], at, 0) != 0, p, 0.0)
        elif N % KEYS != 0:  # keys beyond the last score 0, which may be far above all others
            p = tl.where(there, p, 0.0)
        to_v = tl.dot(tl.trans(pull), p.to(q.dtype))
        pulled = (p * (tl.dot(pull, tl.trans(v)) - common[:, None]) * scale).to(q.dtype)
        to_k = tl.dot(tl.trans(q), pulled)
        to_q = tl.dot(pulled, k, to_q)
        at = made + D + key[None, :] * 3 * D + column[:, None]
        tl.store(at, to_k.to(made.dtype.element_ty), there)
        tl.store(at + D, to_v.to(made.dtype.element_ty), there)
        sum_k += tl.where(there, to_k, 0.0)
        sum_v += tl.where(there, to_v, 0.0)
    at = made + row[:, None] * 3 * D + column[None, :]
    tl.store(at, to_q.to(made.dtype.element_ty), (row < N)[:, None])
    total = sums + sample * 3 * D + head * WIDTH + column
    tl.store(total, tl.sum(to_q, 0))
    tl.store(total + D, tl.sum(sum_k, 1))
    tl.store(total + 2 * D, tl.sum(sum_v, 1))


def run_forward(
    qkv: Tensor, heads: int, seen: Tensor | None, plan: Forward | None = None
) -> tuple[Tensor, Tensor]:
    """What every token gathers, and the base-2 log of the sum that its weights were divided by."""
    b, n, triple = qkv.shape
    width = triple // 3 // heads
    out, lse = qkv.new_empty(b, n, triple // 3), qkv.new_empty(b, heads, n, dtype=torch.float32)
    plan = plan or forward_plan(n)
    if b:
        _forward_kernel[(b * heads, triton.cdiv(n, plan.rows * plan.blocks))](
            qkv, qkv if seen is None else seen, out, lse, LOG2_E * width**-0.5,
            N=n, HEADS=heads, WIDTH=width, MASKED=seen is not None, ROWS=plan.rows, BLOCKS=plan.blocks,
            A=plan.parts[0], B=plan.parts[1], C=plan.parts[2],
            num_warps=plan.warps, num_stages=plan.stages,
        )  # fmt: skip
    return out, lse


def run_backward(
    to_out: Tensor,
    qkv: Tensor,
    out: Tensor,
    lse: Tensor,
    heads: int,
    seen: Tensor | None,
    plan: Backward | None = None,
) -> tuple[Tensor, Tensor]:
    """The gradient of the joint projection, and its sums over the tokens of each sample."""
    b, n, triple = qkv.shape
    width = triple // 3 // heads
    to_qkv, sums = torch.empty_like(qkv), qkv.new_empty(b, triple, dtype=torch.float32)
    plan = plan or backward_plan(n)
    if b:
        _backward_kernel[(b * heads,)](
            qkv, qkv if seen is None else seen, out, lse, to_out, to_qkv, sums,
            width**-0.5, LOG2_E * width**-0.5,
            N=n, HEADS=heads, WIDTH=width, MASKED=seen is not None,
            QUERIES=max(64, triton.next_power_of_2(n)), KEYS=plan.keys,
            num_warps=plan.warps, num_stages=plan.stages,
        )  # fmt: skip
    return to_qkv, sums


@torch.library.custom_op("tcore::attend", mutates_args=())
def attend_op(qkv: Tensor, bias: Tensor, heads: int, seen: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attention; `bias` has been added already, and is here for its gradient alone."""
    return run_forward(qkv.contiguous(), heads, seen)


@torch.library.custom_op("tcore::attend_backward", mutates_args=())
def attend_backward_op(
    to_out: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, heads: int, seen: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Its gradients."""
    return run_backward(to_out.contiguous(), qkv.contiguous(), out, lse, heads, seen)


@attend_op.register_fake
def _(qkv: Tensor, bias: Tensor, heads: int, seen: Tensor | None) -> tuple[Tensor, Tensor]:
    b, n, triple = qkv.shape
    return qkv.new_empty(b, n, triple // 3), qkv.new_empty(b, heads, n, dtype=torch.float32)


@attend_backward_op.register_fake
def _(
    to_out: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, heads: int, seen: Tensor | None
) -> tuple[Tensor, Tensor]:
    b, n, triple = qkv.shape
    return qkv.new_empty(b, n, triple), qkv.new_empty(b, triple, dtype=torch.float32)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    qkv, bias, ctx.heads, seen = inputs
    ctx.dtype = bias.dtype
    ctx.save_for_backward(qkv, *output, *([] if seen is None else [seen]))
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, to_out: Tensor, to_lse: None) -> tuple[Tensor, Tensor, None, None]:
    qkv, out, lse, *seen = ctx.saved_tensors
    to_qkv, sums = attend_backward_op(to_out, qkv, out, lse, ctx.heads, seen[0] if seen else None)
    return to_qkv, sums.sum(dim=0).to(ctx.dtype), None, None


attend_op.register_autograd(_gradients, setup_context=_keep)


def takes(dtype: torch.dtype, n: int, width: int) -> bool:
    """Whether there are kernels for so many tokens and such heads."""
    return dtype == torch.bfloat16 and n <= MOST and 16 <= width <= 128 and width & (width - 1) == 0


def attend(qkv: Tensor, bias: Tensor, heads: int, seen: Tensor | None) -> Tensor:
    """Attention from the joint projection, whose bias was added without a gradient."""
    out: Tensor = attend_op(qkv, bias, heads, seen)[0]
    return out
