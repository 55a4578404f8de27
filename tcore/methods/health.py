"""Whether training learns, waits on a plateau, or collapses: figures from a few rows of the last step."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

State = Literal["learning", "plateau", "collapse"]

# Targets that differ by less than this (in nats) distinguish nothing; this close to ln K they are uniform.
NOTHING_DISTINGUISHED, UNIFORM = 0.01, 0.9
# The student has learned something of the targets once it beats the uniform answer by this share.
BETTER_THAN_UNIFORM = 0.005
# Fewer prototypes than this in use, features that vary in fewer directions, or frames more alike than this.
COLLAPSE_PROTOTYPES, COLLAPSE_RANK, COLLAPSE_COSINE = 2.0, 1.5, 0.999
# From fewer frames than these no collapse can be told.
FEWEST_FRAMES = 16


@dataclass(frozen=True)
class Health:
    """Figures that say what the losses do not, under the names that are logged."""

    state: State
    figures: Mapping[str, float]
    line: str
    """The figures for the progress line."""
    warning: str | None = None
    """A line for the user where something must be done."""

    def logged(self) -> dict[str, float | str]:
        """What goes into metrics.jsonl."""
        return {**self.figures, "state": self.state}


def mean_cosine(features: Float[Tensor, "n d"]) -> float:
    """Mean cosine between different rows; 0 where there is only one."""
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


def measure_health(rows: Mapping[str, Tensor], dino: float) -> Health:
    """The health figures of a step of self-distillation, from a sample of its rows and its DINO loss."""
    targets, uniform = rows["frame_targets"], math.log(rows["frame_targets"].shape[1])
    target_entropy = float(entropy(targets).mean())
    entropy_of_mean = float(entropy(targets.mean(dim=0)))
    figures = {
        # Effective ranks of the teacher's frame and patch tokens.
        "frame_rank": effective_rank(rows["frames"]),
        "patch_rank": effective_rank(rows["patches"]),
        # Effective number of prototypes in the mean target: exp of its entropy.
        "prototypes_used": math.exp(entropy_of_mean),
        # Mean entropy of a target, in nats; ln K is uniform.
        "target_entropy": target_entropy,
        # Entropy of the mean target minus mean entropy of the targets, in nats: what targets distinguish.
        "target_information": entropy_of_mean - target_entropy,
        # Mean cosine between the frame tokens of different crops.
        "frame_cosine": mean_cosine(rows["frames"]),
    }
    if len(rows.get("from_past", ())):
        # Cosine of what is restored from the past and from the future.
        cosines = F.cosine_similarity(rows["from_past"], rows["from_future"], dim=-1)
        figures["past_future_cosine"] = float(cosines.mean())
    ranks = (figures["frame_rank"], figures["patch_rank"])
    collapsed = len(targets) >= FEWEST_FRAMES and (
        figures["prototypes_used"] < COLLAPSE_PROTOTYPES
        or min(ranks) < COLLAPSE_RANK
        or figures["frame_cosine"] > COLLAPSE_COSINE
    )
    information = figures["target_information"]
    state = judge(collapsed, target_entropy / uniform, information, dino / uniform)
    line = (
        f"dino {dino:.3f} (ln K {uniform:.2f})  {state} (rank {ranks[0]:.1f}/{ranks[1]:.1f}, "
        f"targets {target_entropy:.2f} nats each, {information:.2f} distinguished)"
    )
    warning = (
        f"collapse: {figures['prototypes_used']:.1f} prototypes in use, effective rank {ranks[0]:.1f} "
        f"(frames) and {ranks[1]:.1f} (patches). The encoder distinguishes nothing; try "
        "--teacher.targets sinkhorn, a lower --optim.base-lr or a higher --teacher.temperature."
    )
    return Health(state, figures, line, warning if state == "collapse" else None)


def judge(collapsed: bool, entropy_share: float, information: float, dino_share: float) -> State:
    """Plateau: targets distinguish nothing, or the student does no better than the uniform answer.

    Shares are of ln K. At the start of a long run all frames are alike and all targets uniform: a plateau,
    not a collapse. Early losses can lie below ln K while all targets are the same: no learning either.
    """
    nothing = information < NOTHING_DISTINGUISHED
    if nothing and entropy_share > UNIFORM:
        return "plateau"
    if collapsed:
        return "collapse"
    return "plateau" if nothing or dino_share > 1 - BETTER_THAN_UNIFORM else "learning"
