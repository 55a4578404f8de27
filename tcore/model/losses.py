"""The losses of self-distillation as pure functions; sums are divided by counts of the whole step.

A process or a micro-batch holds a part of the step's batch. Every function therefore takes the count that
its sum is to be divided by, so that the parts of a step add up to the loss of the whole.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def _itself(x: Tensor) -> Tensor:
    return x


class Peers(NamedTuple):
    """What a process learns of the others that share its step; alone, all of it is the identity."""

    rank: int = 0
    """Which of the processes this is."""
    total: Callable[[Tensor], Tensor] = _itself
    """Sum over all processes."""
    largest: Callable[[Tensor], Tensor] = _itself
    """Largest value of all processes."""
    rows: Callable[[Tensor], Tensor] = _itself
    """Rows of all processes, equally many of each, in the order of the processes; with gradient."""
    size: int = 1
    """How many processes there are."""


ALONE = Peers()


Warmth = float | Float[Tensor, ""]  # a temperature; a number on the device where a CUDA graph reads it


@dataclass(frozen=True)
class TeacherTargets:
    """Targets of n rows as softmax((outputs - center) / temperature), without holding n x K numbers.

    Outputs are those of the teacher's head, from its bottleneck and its prototypes; or they are `given`.
    """

    bottleneck: Float[Tensor, "n z"]
    prototypes: Float[Tensor, "k z"]
    center: Float[Tensor, "k"]
    temperature: Warmth
    given: Float[Tensor, "n k"] | None = None

    @property
    def count(self) -> int:
        """Number of rows."""
        return self.bottleneck.shape[0]

    def outputs(self, rows: slice | Tensor) -> Float[Tensor, "r k"]:
        """Raw outputs of some rows."""
        return self.bottleneck[rows] @ self.prototypes.T if self.given is None else self.given[rows]

    def targets(self, rows: slice | Tensor = slice(None)) -> Float[Tensor, "r k"]:
        """Probabilities of some rows: centered so that no prototype wins for all, and sharpened."""
        return ((self.outputs(rows).float() - self.center) / self.temperature).softmax(dim=-1)

    def total(self, counted: Float[Tensor, "n"] | None = None) -> Float[Tensor, "k"]:
        """Sum of the raw outputs of all rows; a sum of bottlenecks, since outputs are linear in them.

        Where `counted` is 0, a row is left out (1 elsewhere).
        """
        rows = self.bottleneck.float()
        return self.prototypes.float() @ (rows if counted is None else rows * counted[:, None]).sum(dim=0)


def given_targets(targets: Float[Tensor, "n k"]) -> TeacherTargets:
    """Targets that were made already, all rows together."""
    rows, prototypes = (targets.new_empty(side, 0) for side in targets.shape)
    return TeacherTargets(rows, prototypes, targets.new_zeros(targets.shape[1]), 1.0, targets.log())


def sinkhorn_targets(
    outputs: Float[Tensor, "n k"],
    temperature: Warmth,
    iterations: int = 3,
    peers: Peers = ALONE,
    counted: Float[Tensor, "n"] | None = None,
) -> Float[Tensor, "n k"]:
    """Teacher targets that use all prototypes equally: rows and columns normalized in turn.

    The rows are those of all processes, of which one may have none. Where `counted` is 0, a row is left out
    (1 elsewhere); its target is uniform.
    """
    rows, k = outputs.shape
    scaled = outputs.double() / temperature
    if counted is not None:
        scaled = torch.where(counted[:, None] > 0, scaled, -math.inf)
    n = peers.total(scaled.new_full((), rows) if counted is None else counted.sum(dtype=scaled.dtype))
    # A common factor cancels; without it exp overflows.
    q = (scaled - peers.largest(scaled.max() if rows else scaled.new_full((), -math.inf))).exp()
    q = q / peers.total(q.sum())
    for _ in range(iterations):
        q = q / (peers.total(q.sum(dim=0, keepdim=True)) * k)
        q = q / (q.sum(dim=1, keepdim=True) * n)
        if counted is not None:
            q = torch.where(counted[:, None] > 0, q, 0.0)
    if counted is not None:
        q = torch.where(counted[:, None] > 0, q, 1 / (n * k))
    return (q * n).float()


def cross_entropy(
    targets: Float[Tensor, "*n k"], outputs: Float[Tensor, "*n k"], temperature: float
) -> Float[Tensor, "*n"]:
    """Cross-entropy of each row between target probabilities and sharpened outputs, in fp32."""
    return -(targets * F.log_softmax(outputs.float() / temperature, dim=-1)).sum(dim=-1)


def dino_loss(
    targets: Float[Tensor, "two_b k"],
    global_outputs: Float[Tensor, "two_b k"],
    local_outputs: Float[Tensor, "local_b k"],
    temperature: float,
    num_videos: int,
) -> Float[Tensor, ""]:
    """Mean over the pairs (teacher global crop, another student view) of the same video.

    Rows are crop-major: index = crop * videos + video.
    """
    first, second = targets.chunk(2)
    local = local_outputs.unflatten(0, (-1, first.shape[0]))
    pairs = 2 * local.shape[0] + 2
    crossed = cross_entropy(torch.cat([second, first]), global_outputs, temperature).sum()
    # The cross-entropy is linear in its targets: both teacher crops meet a local crop at once.
    local_pairs = cross_entropy((first + second).expand_as(local), local, temperature).sum()
    return (crossed + local_pairs) / (pairs * num_videos)


def patch_loss(
    targets: Float[Tensor, "t k"],
    outputs: Float[Tensor, "t k"],
    patch_weights: Float[Tensor, "t"],
    temperature: float,
    num_crops: int,
) -> Float[Tensor, ""]:
    """Cross-entropy at the masked patches: mean within a crop, sum over crops, divided by `num_crops`."""
    return (cross_entropy(targets, outputs, temperature) * patch_weights).sum() / max(1, num_crops)


def past_future_probability_distance(
    past: Float[Tensor, "t k"],
    future: Float[Tensor, "t k"],
    patch_weights: Float[Tensor, "t"],
    temperature: float,
    num_crops: int,
) -> Float[Tensor, ""]:
    """L_pf as printed: squared distance of the two predictions, mean within a crop and over crops."""
    p = (past.float() / temperature).softmax(dim=-1)
    q = (future.float() / temperature).softmax(dim=-1)
    return ((p - q).square().sum(dim=-1) * patch_weights).sum() / max(1, num_crops)


def past_future_output_distance(
    past: Float[Tensor, "t k"], future: Float[Tensor, "t k"], num_tokens: int
) -> Float[Tensor, ""]:
    """L_pf as released: squared distance of the raw outputs, mean over tokens and prototypes."""
    return (past.float() - future.float()).square().sum() / (max(1, num_tokens) * past.shape[1])


def koleo_loss(frames: Float[Tensor, "b d"], num_videos: int, peers: Peers = ALONE) -> Float[Tensor, ""]:
    """Spread the frame tokens of one crop: minus the log distance to the nearest other one."""
    with torch.autocast(frames.device.type, enabled=False):
        x = F.normalize(frames.float(), dim=-1, eps=1e-8)
        others = peers.rows(x)
        if others.shape[0] < 2:
            return frames.sum() * 0.0
        with torch.no_grad():
            cosines = x @ others.T
            first = peers.rank * x.shape[0]  # our own place among all
            cosines.diagonal(first).fill_(-2.0)  # below any cosine: nobody is its own neighbor
            nearest = cosines.argmax(dim=1)
        distance = F.pairwise_distance(x, others[nearest], eps=1e-8)
        return -(distance + 1e-8).log().sum() / num_videos
