"""Rows of K outputs on a GPU: the twins of row_stats and row_gradients, one reading of each row.

A program goes along one row. Every lane keeps running sums of its own columns, relative to the largest
exponent that the row has shown so far; the lanes are brought together at the end of the row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tcore.model.fused import Pulls, RowStats, Temperatures
from tcore.model.losses import Warmth

STATS = 9  # numbers that are kept of a row
COLUMNS, WARPS = 2048, 8


@triton.jit
def _meet(most, values):
    """A row meets more exponents: their maximum so far, what older sums are scaled by, the new terms."""
    new = tl.maximum(most, tl.max(values, 0))
    return new, tl.exp(most - new), tl.exp(values - new)


@triton.jit
def _stats_kernel(
    outputs, teacher, center, rows, found, count, teacher_temperature, per_student,
    K: tl.constexpr, SIDES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    asked = teacher + tl.load(rows + row) * K
    first, second = outputs + row * K, outputs + (count + row) * K
    per_teacher = 1 / tl.load(teacher_temperature).to(tl.float32)
    lanes = tl.arange(0, COLUMNS)
    zero = tl.zeros([COLUMNS], tl.float32)
    most_t, most_p, most_f = -1e30, -1e30, -1e30
    total_t, total_p, total_f, agree_p, agree_f = zero, zero, zero, zero, zero
    apart, pp, ff, pf = zero, zero, zero, zero
    for start in range(0, K, COLUMNS):
        column = start + lanes
        inside = column < K
        t = tl.load(asked + column, inside, 0.0).to(tl.float32) - tl.load(center + column, inside, 0.0)
        t = tl.where(inside, t * per_teacher, -float("inf"))
        p_raw = tl.load(first + column, inside, 0.0).to(tl.float32)
        p = tl.where(inside, p_raw * per_student, -1e30)
        most_t, scale_t, weight = _meet(most_t, t)
        most_p, scale_p, e_p = _meet(most_p, p)
        total_t = total_t * scale_t + weight
        total_p = total_p * scale_p + e_p
        agree_p = agree_p * scale_t + weight * p_raw
        if SIDES == 2:
            f_raw = tl.load(second + column, inside, 0.0).to(tl.float32)
            f = tl.where(inside, f_raw * per_student, -1e30)
            most_f, scale_f, e_f = _meet(most_f, f)
            total_f = total_f * scale_f + e_f
            agree_f = agree_f * scale_t + weight * f_raw
            apart += (p_raw - f_raw) * (p_raw - f_raw)
            pp = pp * scale_p * scale_p + e_p * e_p
            ff = ff * scale_f * scale_f + e_f * e_f
            pf = pf * scale_p * scale_f + e_p * e_f
    sum_t, sum_p = tl.sum(total_t, 0), tl.sum(total_p, 0)
    tl.store(found + row, most_t + tl.log(sum_t))
    tl.store(found + count + row, most_p + tl.log(sum_p))
    tl.store(found + 3 * count + row, tl.sum(agree_p, 0) / sum_t * per_student)
    if SIDES == 2:
        sum_f = tl.sum(total_f, 0)
        tl.store(found + 2 * count + row, most_f + tl.log(sum_f))
        tl.store(found + 4 * count + row, tl.sum(agree_f, 0) / sum_t * per_student)
        tl.store(found + 5 * count + row, tl.sum(apart, 0))
        tl.store(found + 6 * count + row, tl.sum(pp, 0) / (sum_p * sum_p))
        tl.store(found + 7 * count + row, tl.sum(ff, 0) / (sum_f * sum_f))
        tl.store(found + 8 * count + row, tl.sum(pf, 0) / (sum_p * sum_f))


@triton.jit
def _gradients_kernel(
    outputs, teacher, center, rows, stats, entropy, distance, probabilities, count,
    teacher_temperature, per_student, K: tl.constexpr, SIDES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    per_teacher = 1 / tl.load(teacher_temperature).to(tl.float32)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < K
    asked = teacher + tl.load(rows + row) * K
    first, second = outputs + row * K, outputs + (count + row) * K
    t = tl.load(asked + column, inside, 0.0).to(tl.float32) - tl.load(center + column, inside, 0.0)
    target = tl.exp(t * per_teacher - tl.load(stats + row))
    p_raw = tl.load(first + column, inside, 0.0).to(tl.float32)
    p = tl.exp(p_raw * per_student - tl.load(stats + count + row))
    to_p = tl.load(entropy + row) * per_student * (p - target)
    if SIDES == 2:
        f_raw = tl.load(second + column, inside, 0.0).to(tl.float32)
        f = tl.exp(f_raw * per_student - tl.load(stats + 2 * count + row))
        to_f = tl.load(entropy + count + row) * per_student * (f - target)
        both = tl.load(stats + 8 * count + row)
        pull = 2 * tl.load(probabilities + row) * per_student
        to_p += pull * p * (p - f - (tl.load(stats + 6 * count + row) - both))
        to_f += pull * f * (f - p - (tl.load(stats + 7 * count + row) - both))
        raw = 2 * tl.load(distance) * (p_raw - f_raw)
        tl.store(second + column, (to_f - raw).to(outputs.dtype.element_ty), inside)
        to_p += raw
    tl.store(first + column, to_p.to(outputs.dtype.element_ty), inside)


def on_device(temperature: Warmth, device: torch.device) -> Tensor:
    """A temperature where a kernel reads it, so that a CUDA graph can be replayed with another one."""
    if isinstance(temperature, Tensor):
        return temperature
    return torch.full((), temperature, device=device, dtype=torch.float64)


def row_stats(
    outputs: Tensor, teacher: Tensor, center: Tensor, rows: Tensor, temperatures: Temperatures
) -> RowStats:
    """The twin of fused.row_stats."""
    sides, count, k = outputs.shape
    found = torch.zeros(STATS, count, device=outputs.device)
    if count:
        _stats_kernel[(count,)](
            outputs.contiguous(),
            teacher.contiguous(),
            center,
            rows,
            found,
            count,
            on_device(temperatures.teacher, outputs.device),
            1 / temperatures.student,
            K=k,
            SIDES=sides,
            COLUMNS=COLUMNS,
            num_warps=WARPS,
        )
    return RowStats(found[0], found[1 : 1 + sides], found[3 : 3 + sides], found[5], found[6:9])


def row_gradients(
    outputs: Tensor,
    teacher: Tensor,
    center: Tensor,
    rows: Tensor,
    temperatures: Temperatures,
    stats: RowStats,
    pulls: Pulls,
) -> Tensor:
    """The twin of fused.row_gradients; the gradient takes the place of the outputs."""
    sides, count, k = outputs.shape
    gradient = outputs.contiguous()
    numbers = torch.zeros(STATS, count, device=outputs.device)
    numbers[0], numbers[1 : 1 + sides], numbers[6:9] = stats.teacher, stats.student, stats.overlap
    if count:
        _gradients_kernel[(count, triton.cdiv(k, COLUMNS))](
            gradient,
            teacher.contiguous(),
            center,
            rows,
            numbers,
            pulls.entropy.contiguous(),
            pulls.outputs.contiguous(),
            pulls.probabilities.contiguous(),
            count,
            on_device(temperatures.teacher, outputs.device),
            1 / temperatures.student,
            K=k,
            SIDES=sides,
            COLUMNS=COLUMNS,
            num_warps=WARPS,
        )
    return gradient
