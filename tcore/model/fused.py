"""The losses over all prototypes in chunks of rows: no matrix of rows x K outlives its chunk.

Outputs of the head are computed from its bottleneck where they are needed, forwards and again backwards.
A row of K outputs is read once forwards, which leaves a few numbers of it, and once backwards. Means the
same as the losses of losses.py on outputs that are held; tests compare them. The two functions that see
rows x K numbers are plain torch here; fused_triton.py has their twins for a GPU.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from tcore.model.attention import working_dtype
from tcore.model.losses import TeacherTargets, Warmth

# Bytes of outputs that exist at a time: a CPU is fastest in its cache, a GPU needs much at once.
CPU_CHUNK, GPU_CHUNK = 64 << 20, 1 << 30


class RowStats(NamedTuple):
    """What a loss needs to know of rows of outputs, predictions and targets being softmaxes over K.

    With one side, what compares two sides is 0.
    """

    teacher: Float[Tensor, "r"]
    """Log of the sum of exponentials of the centered, sharpened teacher outputs."""
    student: Float[Tensor, "sides r"]
    """The same of the sharpened student outputs."""
    agreement: Float[Tensor, "sides r"]
    """Sum of targets times sharpened student outputs."""
    distance: Float[Tensor, "r"]
    """Squared distance of the raw outputs of two sides."""
    overlap: Float[Tensor, "3 r"]
    """Sums of the products of the two predictions: first with itself, second with itself, both."""


class Pulls(NamedTuple):
    """Gradients of a loss with respect to numbers of each row."""

    entropy: Float[Tensor, "sides r"]
    """With respect to the cross-entropy."""
    outputs: Float[Tensor, ""]
    """With respect to the distance of raw outputs, of every row."""
    probabilities: Float[Tensor, "r"]
    """With respect to the squared distance of the two predictions."""


class Temperatures(NamedTuple):
    """Temperatures of the teacher's and the student's outputs."""

    teacher: Warmth
    student: float


def row_stats(
    outputs: Float[Tensor, "sides r k"],
    teacher: Float[Tensor, "m k"],
    center: Float[Tensor, "k"],
    rows: Int64[Tensor, "r"],
    temperatures: Temperatures,
) -> RowStats:
    """Numbers of every row; `rows` says which row of the teacher belongs to it."""
    asked = ((teacher.float() - center) / temperatures.teacher)[rows]
    lse = asked.logsumexp(dim=-1)
    targets = (asked - lse[:, None]).exp()
    student = outputs.float() / temperatures.student
    predicted = student.softmax(dim=-1)
    first, last = predicted[0], predicted[-1]
    distance = (outputs[0].float() - outputs[-1].float()).square().sum(dim=-1)
    overlap = torch.stack([(a * b).sum(dim=-1) for a, b in ((first, first), (last, last), (first, last))])
    return RowStats(
        lse,
        student.logsumexp(dim=-1),
        (targets * student).sum(dim=-1),
        distance,
        overlap if len(outputs) == 2 else torch.zeros_like(overlap),
    )


def row_gradients(
    outputs: Float[Tensor, "sides r k"],
    teacher: Float[Tensor, "m k"],
    center: Float[Tensor, "k"],
    rows: Int64[Tensor, "r"],
    temperatures: Temperatures,
    stats: RowStats,
    pulls: Pulls,
) -> Float[Tensor, "sides r k"]:
    """Gradient with respect to the outputs; it may take the place of the outputs."""
    targets = (((teacher.float() - center) / temperatures.teacher)[rows] - stats.teacher[:, None]).exp()
    predicted = (outputs.float() / temperatures.student - stats.student[..., None]).exp()
    gradient = pulls.entropy[..., None] * (predicted - targets) / temperatures.student
    if len(outputs) == 2:
        sign = torch.tensor([1.0, -1.0], device=outputs.device)[:, None, None]
        apart = sign * (predicted[0] - predicted[1])
        own = (stats.overlap[:2] - stats.overlap[2])[..., None]
        pull = pulls.probabilities[:, None] / temperatures.student
        gradient = gradient + 2 * pull * predicted * (apart - own)
        gradient = gradient + 2 * pulls.outputs * sign * (outputs[0].float() - outputs[1].float())
    return gradient.to(outputs.dtype)


class Kernels(NamedTuple):
    """The two functions that see rows x K numbers."""

    row_stats: Callable[..., RowStats] = row_stats
    row_gradients: Callable[..., Tensor] = row_gradients


PLAIN = Kernels()


def chunks(rows: int, prototypes: Tensor, copies: int) -> Iterator[slice]:
    """Slices of rows whose outputs fit the budget."""
    budget = GPU_CHUNK if prototypes.is_cuda else CPU_CHUNK
    size = max(1, budget // (prototypes.shape[0] * prototypes.element_size() * copies))
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))


class PatchSums(torch.autograd.Function):
    """Sums over all masked patches from the student's bottlenecks and prototypes."""

    @staticmethod
    def forward(
        ctx: Any,
        bottleneck: Tensor,
        prototypes: Tensor,
        teacher_targets: TeacherTargets,
        weights: Tensor,
        temperature: float,
        kernels: Kernels,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Weighted cross-entropies, distance of raw outputs, weighted distance of probabilities."""
        ctx.rest = (teacher_targets, temperature, kernels)
        ctx.stats = []
        for part in chunks(bottleneck.shape[1], prototypes, bottleneck.shape[0] + 1):
            ctx.stats.append(
                kernels.row_stats(
                    bottleneck[:, part] @ prototypes.T,
                    teacher_targets.outputs(part),
                    teacher_targets.center,
                    torch.arange(part.stop - part.start, device=bottleneck.device),
                    Temperatures(teacher_targets.temperature, temperature),
                )
            )
        ctx.save_for_backward(bottleneck, prototypes, weights)
        zero = torch.zeros(len(bottleneck), device=bottleneck.device)
        entropies, distance, apart = zero, zero.sum(), zero.sum()
        start = 0
        for stats in ctx.stats:
            row = weights[start : start + len(stats.teacher)]
            start += len(stats.teacher)
            entropies = entropies + ((stats.student - stats.agreement) * row).sum(dim=1)
            distance = distance + stats.distance.sum()
            apart = apart + ((stats.overlap[0] + stats.overlap[1] - 2 * stats.overlap[2]) * row).sum()
        return entropies, distance, apart

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the bottlenecks and the prototypes; outputs are computed once more."""
        bottleneck, prototypes, weights = ctx.saved_tensors
        teacher_targets, temperature, kernels = ctx.rest
        entropies, distance, apart = gradients
        to_bottleneck = torch.zeros_like(bottleneck)
        to_prototypes = torch.zeros_like(prototypes, dtype=torch.float32)
        parts = chunks(bottleneck.shape[1], prototypes, bottleneck.shape[0] + 1)
        for part, stats in zip(parts, ctx.stats, strict=True):
            row = weights[part]
            gradient = kernels.row_gradients(
                bottleneck[:, part] @ prototypes.T,
                teacher_targets.outputs(part),
                teacher_targets.center,
                torch.arange(len(row), device=row.device),
                Temperatures(teacher_targets.temperature, temperature),
                stats,
                Pulls(entropies[:, None] * row, distance, apart * row),
            )
            to_bottleneck[:, part] = gradient @ prototypes
            to_prototypes += gradient.flatten(0, 1).T @ bottleneck[:, part].flatten(0, 1)
        return to_bottleneck, to_prototypes.to(prototypes.dtype), None, None, None, None


class FrameSum(torch.autograd.Function):
    """Cross-entropies of all pairs (teacher crop, another view), summed over videos."""

    @staticmethod
    def forward(
        ctx: Any,
        bottleneck: Tensor,
        prototypes: Tensor,
        teacher_targets: TeacherTargets,
        temperature: float,
        kernels: Kernels,
    ) -> Tensor:
        """The sum over all videos."""
        ctx.save_for_backward(bottleneck, prototypes)
        ctx.rest = (teacher_targets, temperature, kernels)
        ctx.stats = []
        total = torch.zeros((), device=bottleneck.device)
        for videos in chunks(bottleneck.shape[1], prototypes, bottleneck.shape[0] + 6):
            asked, center, rows, mass = frame_targets(teacher_targets, videos, len(bottleneck))
            outputs = (bottleneck[:, videos] @ prototypes.T).flatten(0, 1)[None]
            stats = kernels.row_stats(outputs, asked, center, rows, Temperatures(1.0, temperature))
            total += ((stats.student - stats.agreement)[0] * mass).sum()
            ctx.stats.append(stats)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the bottlenecks and the prototypes; outputs are computed once more."""
        bottleneck, prototypes = ctx.saved_tensors
        teacher_targets, temperature, kernels = ctx.rest
        to_bottleneck = torch.zeros_like(bottleneck)
        to_prototypes = torch.zeros_like(prototypes, dtype=torch.float32)
        parts = chunks(bottleneck.shape[1], prototypes, bottleneck.shape[0] + 6)
        for videos, stats in zip(parts, ctx.stats, strict=True):
            asked, center, rows, mass = frame_targets(teacher_targets, videos, len(bottleneck))
            part = bottleneck[:, videos].flatten(0, 1)
            zero = torch.zeros_like(mass)
            gradient = kernels.row_gradients(
                (part @ prototypes.T)[None],
                asked,
                center,
                rows,
                Temperatures(1.0, temperature),
                stats,
                Pulls((gradients[0] * mass)[None], zero.sum(), zero),
            )[0]
            to_bottleneck[:, videos] = (gradient @ prototypes).unflatten(0, (len(bottleneck), -1))
            to_prototypes += gradient.T @ part
        return to_bottleneck, to_prototypes.to(prototypes.dtype), None, None, None


def frame_targets(
    teacher_targets: TeacherTargets, videos: slice, views: int
) -> tuple[Float[Tensor, "m k"], Float[Tensor, "k"], Int64[Tensor, "r"], Float[Tensor, "r"]]:
    """Targets of every view of some videos as logs: rows of them, and how much each view's target weighs.

    A global view is asked for what the teacher sees in the other one; a local view for what it sees in
    both, which is twice their mean, because the cross-entropy is linear in its targets.
    """
    count, size = teacher_targets.count // 2, videos.stop - videos.start
    first, second = (
        ((teacher_targets.outputs(slice(c + videos.start, c + videos.stop)).float() - teacher_targets.center)
         / teacher_targets.temperature).log_softmax(dim=-1)
        for c in (0, count)
    )  # fmt: skip
    both = torch.logaddexp(first, second) - math.log(2)
    device = first.device
    which = torch.arange(views, device=device).clamp(max=2)
    rows = (which[:, None] * size + torch.arange(size, device=device)).flatten()
    mass = torch.where(which < 2, 1.0, 2.0).repeat_interleave(size)
    return torch.cat([second, first, both]), torch.zeros_like(teacher_targets.center), rows, mass


def fused_patch_sums(
    bottleneck: Float[Tensor, "sides h z"],
    prototypes: Float[Tensor, "k z"],
    teacher_targets: TeacherTargets,
    weights: Float[Tensor, "h"],
    temperature: float,
    *,
    kernels: Kernels = PLAIN,
) -> tuple[Float[Tensor, "sides"], Float[Tensor, ""], Float[Tensor, ""]]:
    """Weighted cross-entropies of each side with the teacher, and two distances of two sides.

    The first distance is of raw outputs, not weighted; the second of predictions, weighted like the rest.
    """
    dtype = working_dtype(bottleneck)
    with torch.autocast(bottleneck.device.type, enabled=False):
        return PatchSums.apply(  # type: ignore[no-untyped-call]
            bottleneck.to(dtype), prototypes.to(dtype), teacher_targets, weights, temperature, kernels
        )


def fused_frame_sum(
    bottleneck: Float[Tensor, "views v z"],
    prototypes: Float[Tensor, "k z"],
    teacher_targets: TeacherTargets,
    temperature: float,
    *,
    kernels: Kernels = PLAIN,
) -> Float[Tensor, ""]:
    """Cross-entropies of all pairs (teacher crop, another view of the same video), summed."""
    dtype = working_dtype(bottleneck)
    with torch.autocast(bottleneck.device.type, enabled=False):
        return FrameSum.apply(  # type: ignore[no-untyped-call]
            bottleneck.to(dtype), prototypes.to(dtype), teacher_targets, temperature, kernels
        )
