"""Whether training learns, waits on the plateau, or collapses: figures from a glimpse of the last step."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from tcore.model.glimpse import Glimpse

State = Literal["learning", "plateau", "collapse"]

# Targets that differ by less than this (in nats) tell nothing apart; this close to ln K they are uniform.
NOTHING_TOLD_APART, UNIFORM = 0.01, 0.9
# The student has learned something of the targets once it does better than the uniform answer by this share.
BETTER_THAN_UNIFORM = 0.005
# Fewer prototypes than this in use, features that vary in fewer directions, or frames more alike than this.
COLLAPSE_PROTOTYPES, COLLAPSE_RANK, COLLAPSE_COSINE = 2.0, 1.5, 0.999
# From fewer frames than these no collapse can be told.
FEWEST_FRAMES = 16


@dataclass(frozen=True)
class Health:
    """Figures that say what the losses do not."""

    frame_rank: float
    """Effective rank of the teacher's frame tokens."""
    patch_rank: float
    """Effective rank of the teacher's patch tokens."""
    prototypes_used: float
    """Effective number of prototypes in the mean target: exp of its entropy."""
    target_entropy: float
    """Mean entropy of a target, in nats; ln K is uniform."""
    target_information: float
    """Entropy of the mean target minus mean entropy of the targets, in nats: what targets tell apart."""
    frame_cosine: float
    """Mean cosine between the frame tokens of different crops."""
    past_future_cosine: float | None
    """Cosine of what is restored from the past and from the future."""
    state: State

    def figures(self) -> dict[str, float | str]:
        """The figures that apply, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def warning(self) -> str | None:
        """A line for the user where the figures say collapse."""
        if self.state != "collapse":
            return None
        return (
            f"collapse: {self.prototypes_used:.1f} prototypes in use, effective rank {self.frame_rank:.1f} "
            f"(frames) and {self.patch_rank:.1f} (patches). The encoder tells nothing apart; try "
            "--teacher.targets sinkhorn, a lower --optim.base-lr or a higher --teacher.temperature."
        )


def measure(parts: Sequence[Glimpse], dino: float) -> Health:
    """The health figures of one step from glimpses of its parts and its DINO loss."""
    glimpse = gather(parts)
    targets = glimpse.frame_targets
    num_prototypes = targets.shape[1]
    mean_entropy = float(entropy(targets).mean())
    entropy_of_mean = float(entropy(targets.mean(dim=0)))
    cosine = None
    if glimpse.from_past is not None and glimpse.from_future is not None and len(glimpse.from_past):
        cosine = float(F.cosine_similarity(glimpse.from_past, glimpse.from_future, dim=-1).mean())
    frame_rank, patch_rank = effective_rank(glimpse.frames), effective_rank(glimpse.patches)
    used = math.exp(entropy_of_mean)
    information = entropy_of_mean - mean_entropy
    alike = mean_cosine(glimpse.frames)
    uniform = math.log(num_prototypes)
    collapsed = len(targets) >= FEWEST_FRAMES and (
        used < COLLAPSE_PROTOTYPES or min(frame_rank, patch_rank) < COLLAPSE_RANK or alike > COLLAPSE_COSINE
    )
    return Health(
        frame_rank=frame_rank,
        patch_rank=patch_rank,
        prototypes_used=used,
        target_entropy=mean_entropy,
        target_information=information,
        frame_cosine=alike,
        past_future_cosine=cosine,
        state=judge(collapsed, mean_entropy / uniform, information, dino / uniform),
    )


def gather(parts: Sequence[Glimpse]) -> Glimpse:
    """Glimpses of the parts of a step as one."""

    def rows(name: str) -> Tensor | None:
        found = [getattr(part, name) for part in parts]
        return None if any(x is None for x in found) else torch.cat(found)

    return Glimpse(**{name: rows(name) for name in Glimpse._fields})  # type: ignore[arg-type]


def judge(collapsed: bool, entropy_share: float, information: float, dino_share: float) -> State:
    """Plateau: targets tell nothing apart, or the student does no better than the uniform answer.

    Shares are of ln K. At the start of a long run all frames are alike and all targets uniform: a plateau,
    not a collapse. Early losses can lie below ln K while all targets are the same: no learning either.
    """
    nothing = information < NOTHING_TOLD_APART
    if nothing and entropy_share > UNIFORM:
        return "plateau"
    if collapsed:
        return "collapse"
    return "plateau" if nothing or dino_share > 1 - BETTER_THAN_UNIFORM else "learning"


def mean_cosine(features: Float[Tensor, "n d"]) -> float:
    """Mean cosine between different rows; 0 where there is but one."""
    n = features.shape[0]
    unit = F.normalize(features.double(), dim=-1)
    return float((unit.sum(dim=0).square().sum() - n) / (n * (n - 1))) if n > 1 else 0.0


def entropy(probabilities: Float[Tensor, "*n k"]) -> Float[Tensor, "*n"]:
    """Entropy in nats."""
    return torch.special.entr(probabilities).sum(dim=-1)


def effective_rank(features: Float[Tensor, "n d"]) -> float:
    """In how many directions features vary: exp of the entropy of their normalized singular values."""
    centered = features - features.mean(dim=0)
    values = torch.linalg.svdvals(centered.double())
    total = float(values.sum())
    # Differences at the level of rounding are no variation.
    if total <= 1e-6 * float(features.double().norm()):
        return 1.0
    return float(entropy(values / total).exp())
