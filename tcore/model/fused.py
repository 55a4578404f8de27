"""The losses over all prototypes in chunks of rows: no matrix of rows x K outlives its chunk.

Outputs of the head are computed from its bottleneck where they are needed, forwards and again backwards.
Means the same as the losses of losses.py on outputs that are held; tests compare them. The four functions
that work on a chunk are plain torch; on a GPU they are compiled, so that a chunk is read once or twice.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tcore.model.teaching import Teaching, working_dtype

# Bytes of outputs that exist at a time: a CPU is fastest in its cache, a GPU needs much at once.
CPU_CHUNK, GPU_CHUNK = 64 << 20, 1 << 30


def patch_sums(
    outputs: Float[Tensor, "sides r k"],
    teacher: Float[Tensor, "r k"],
    center: Float[Tensor, "k"],
    weights: Float[Tensor, "r"],
    teacher_temperature: float,
    temperature: float,
    probabilities: bool,
) -> Float[Tensor, "sides+1"]:
    """Weighted cross-entropies of each side, and the distance of the two sides, summed over rows."""
    targets = ((teacher.float() - center) / teacher_temperature).softmax(dim=-1)
    student = outputs.float() / temperature
    entropies = (student.logsumexp(dim=-1) - (targets * student).sum(dim=-1)) * weights
    first, last = (student.softmax(dim=-1) if probabilities else outputs.float())[[0, -1]]
    distance = (first - last).square().sum(dim=-1) * (weights if probabilities else 1.0)
    return torch.cat([entropies.sum(dim=1), distance.sum()[None]])


def patch_gradients(
    outputs: Float[Tensor, "sides r k"],
    teacher: Float[Tensor, "r k"],
    center: Float[Tensor, "k"],
    weights: Float[Tensor, "r"],
    upstream: Float[Tensor, "sides+1"],
    teacher_temperature: float,
    temperature: float,
    probabilities: bool,
) -> Float[Tensor, "sides r k"]:
    """Gradient of `upstream` times the sums with respect to the outputs."""
    targets = ((teacher.float() - center) / teacher_temperature).softmax(dim=-1)
    predicted = (outputs.float() / temperature).softmax(dim=-1)
    row = weights[:, None]
    gradient = upstream[:-1, None, None] * row * (predicted - targets) / temperature
    if outputs.shape[0] == 2:
        sign = torch.tensor([1.0, -1.0], device=outputs.device)[:, None, None]
        if probabilities:
            apart = sign * (predicted[0] - predicted[1])
            pull = predicted * (apart - (predicted * apart).sum(dim=-1, keepdim=True)) * row / temperature
        else:
            pull = sign * (outputs[0].float() - outputs[1].float())
        gradient = gradient + 2 * upstream[-1] * pull
    return gradient.to(outputs.dtype)


def frame_sum(
    outputs: Float[Tensor, "views v k"],
    teacher: Float[Tensor, "2 v k"],
    center: Float[Tensor, "k"],
    teacher_temperature: float,
    temperature: float,
) -> Float[Tensor, ""]:
    """Cross-entropies of all pairs (teacher crop, another view); the first two views are the global ones."""
    first, second = ((teacher.float() - center) / teacher_temperature).softmax(dim=-1)
    student = outputs.float() / temperature
    mass = torch.full((outputs.shape[0], 1), 2.0, device=outputs.device)
    mass[:2] = 1.0
    lines = (student.logsumexp(dim=-1) * mass).sum()
    crossed = (student[0] * second + student[1] * first).sum()
    return lines - crossed - (student[2:] * (first + second)).sum()


def frame_gradients(
    outputs: Float[Tensor, "views v k"],
    teacher: Float[Tensor, "2 v k"],
    center: Float[Tensor, "k"],
    upstream: Float[Tensor, ""],
    teacher_temperature: float,
    temperature: float,
) -> Float[Tensor, "views v k"]:
    """Gradient of `upstream` times the sum with respect to the outputs."""
    first, second = ((teacher.float() - center) / teacher_temperature).softmax(dim=-1)
    predicted = (outputs.float() / temperature).softmax(dim=-1)
    globals_ = predicted[:2] - torch.stack([second, first])
    locals_ = 2 * predicted[2:] - (first + second)
    return (torch.cat([globals_, locals_]) * (upstream / temperature)).to(outputs.dtype)


@dataclass
class Kernels:
    """The four functions that see rows x K numbers; compiled ones may take their places."""

    patch_sums: Callable[..., Tensor] = patch_sums
    patch_gradients: Callable[..., Tensor] = patch_gradients
    frame_sum: Callable[..., Tensor] = frame_sum
    frame_gradients: Callable[..., Tensor] = frame_gradients


PLAIN = Kernels()


def chunks(rows: int, prototypes: Tensor, copies: int) -> Iterator[slice]:
    """Slices of rows whose outputs fit the budget."""
    budget = GPU_CHUNK if prototypes.is_cuda else CPU_CHUNK
    size = max(1, budget // (prototypes.shape[0] * prototypes.element_size() * copies))
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))


class PatchSums(torch.autograd.Function):
    """`patch_sums` of all rows from the student's bottlenecks and prototypes."""

    @staticmethod
    def forward(
        ctx: Any,
        bottleneck: Tensor,
        prototypes: Tensor,
        teaching: Teaching,
        weights: Tensor,
        temperature: float,
        probabilities: bool,
        kernels: Kernels,
    ) -> Tensor:
        """Sums over all rows."""
        ctx.save_for_backward(bottleneck, prototypes, weights)
        ctx.rest = (teaching, temperature, probabilities, kernels)
        sums = torch.zeros(bottleneck.shape[0] + 1, device=bottleneck.device)
        for rows in chunks(bottleneck.shape[1], prototypes, bottleneck.shape[0] + 1):
            sums += kernels.patch_sums(
                bottleneck[:, rows] @ prototypes.T,
                teaching.outputs(rows),
                teaching.center,
                weights[rows],
                teaching.temperature,
                temperature,
                probabilities,
            )
        return sums

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the bottlenecks and the prototypes; outputs are computed once more."""
        bottleneck, prototypes, weights = ctx.saved_tensors
        teaching, temperature, probabilities, kernels = ctx.rest
        to_bottleneck = torch.zeros_like(bottleneck)
        to_prototypes = torch.zeros_like(prototypes, dtype=torch.float32)
        for rows in chunks(bottleneck.shape[1], prototypes, bottleneck.shape[0] + 1):
            part = bottleneck[:, rows]
            gradient = kernels.patch_gradients(
                part @ prototypes.T,
                teaching.outputs(rows),
                teaching.center,
                weights[rows],
                gradients[0],
                teaching.temperature,
                temperature,
                probabilities,
            )
            to_bottleneck[:, rows] = gradient @ prototypes
            to_prototypes += gradient.flatten(0, 1).T @ part.flatten(0, 1)
        return to_bottleneck, to_prototypes.to(prototypes.dtype), None, None, None, None, None


class FrameSum(torch.autograd.Function):
    """`frame_sum` of all videos from the student's bottlenecks and prototypes."""

    @staticmethod
    def forward(
        ctx: Any,
        bottleneck: Tensor,
        prototypes: Tensor,
        teaching: Teaching,
        temperature: float,
        kernels: Kernels,
    ) -> Tensor:
        """The sum over all videos."""
        ctx.save_for_backward(bottleneck, prototypes)
        ctx.rest = (teaching, temperature, kernels)
        total = torch.zeros((), device=bottleneck.device)
        for videos in chunks(bottleneck.shape[1], prototypes, bottleneck.shape[0] + 2):
            total += kernels.frame_sum(
                bottleneck[:, videos] @ prototypes.T,
                both_crops(teaching, videos),
                teaching.center,
                teaching.temperature,
                temperature,
            )
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the bottlenecks and the prototypes; outputs are computed once more."""
        bottleneck, prototypes = ctx.saved_tensors
        teaching, temperature, kernels = ctx.rest
        to_bottleneck = torch.zeros_like(bottleneck)
        to_prototypes = torch.zeros_like(prototypes, dtype=torch.float32)
        for videos in chunks(bottleneck.shape[1], prototypes, bottleneck.shape[0] + 2):
            part = bottleneck[:, videos]
            gradient = kernels.frame_gradients(
                part @ prototypes.T,
                both_crops(teaching, videos),
                teaching.center,
                gradients[0],
                teaching.temperature,
                temperature,
            )
            to_bottleneck[:, videos] = gradient @ prototypes
            to_prototypes += gradient.flatten(0, 1).T @ part.flatten(0, 1)
        return to_bottleneck, to_prototypes.to(prototypes.dtype), None, None, None


def both_crops(teaching: Teaching, videos: slice) -> Float[Tensor, "2 v k"]:
    """The teacher's outputs for both global crops of some videos; its rows are crop-major."""
    count = teaching.count // 2
    return torch.stack(
        [teaching.outputs(slice(c * count + videos.start, c * count + videos.stop)) for c in (0, 1)]
    )


def fused_patch_sums(
    bottleneck: Float[Tensor, "sides h z"],
    prototypes: Float[Tensor, "k z"],
    teaching: Teaching,
    weights: Float[Tensor, "h"],
    temperature: float,
    *,
    probabilities: bool,
    kernels: Kernels = PLAIN,
) -> Float[Tensor, "sides+1"]:
    """Weighted cross-entropies of each side with the teacher, then the distance of two sides.

    The distance is of probabilities, weighted like the rest, or of raw outputs, not weighted.
    """
    dtype = working_dtype(bottleneck)
    with torch.autocast(bottleneck.device.type, enabled=False):
        return PatchSums.apply(  # type: ignore[no-untyped-call]
            bottleneck.to(dtype), prototypes.to(dtype), teaching, weights, temperature, probabilities, kernels
        )


def fused_frame_sum(
    bottleneck: Float[Tensor, "views v z"],
    prototypes: Float[Tensor, "k z"],
    teaching: Teaching,
    temperature: float,
    *,
    kernels: Kernels = PLAIN,
) -> Float[Tensor, ""]:
    """Cross-entropies of all pairs (teacher crop, another view of the same video), summed."""
    dtype = working_dtype(bottleneck)
    with torch.autocast(bottleneck.device.type, enabled=False):
        return FrameSum.apply(  # type: ignore[no-untyped-call]
            bottleneck.to(dtype), prototypes.to(dtype), teaching, temperature, kernels
        )
