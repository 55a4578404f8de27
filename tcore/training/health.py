"""Whether training learns, waits on the plateau, or collapses: figures from a glimpse of the last step."""

import math
from dataclasses import asdict, dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from tcore.model.tcore import Glimpse

State = Literal["learning", "plateau", "collapse"]

# Targets that differ by less than this (in nats) tell nothing apart; this close to ln K they are uniform.
NOTHING_TOLD_APART, UNIFORM = 0.01, 0.9
# Fewer prototypes than this in use, or features that vary in fewer directions than this.
COLLAPSE_PROTOTYPES, COLLAPSE_RANK = 2.0, 1.5


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


def measure(glimpse: Glimpse) -> Health:
    """The health figures of one step."""
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
    return Health(
        frame_rank=frame_rank,
        patch_rank=patch_rank,
        prototypes_used=used,
        target_entropy=mean_entropy,
        target_information=information,
        past_future_cosine=cosine,
        state=judge(used, mean_entropy, information, frame_rank, patch_rank, num_prototypes),
    )


def judge(
    used: float,
    mean_entropy: float,
    information: float,
    frame_rank: float,
    patch_rank: float,
    num_prototypes: int,
) -> State:
    """Plateau: targets tell nothing apart. Collapse: one target for all, or features in one direction."""
    nothing = information < NOTHING_TOLD_APART
    if nothing and mean_entropy > UNIFORM * math.log(num_prototypes):
        return "plateau"
    if used < COLLAPSE_PROTOTYPES or min(frame_rank, patch_rank) < COLLAPSE_RANK:
        return "collapse"
    return "plateau" if nothing else "learning"


def entropy(probabilities: Float[Tensor, "*n k"]) -> Float[Tensor, "*n"]:
    """Entropy in nats."""
    return torch.special.entr(probabilities).sum(dim=-1)


def effective_rank(features: Float[Tensor, "n d"]) -> float:
    """In how many directions features vary: exp of the entropy of their normalised singular values."""
    centred = features - features.mean(dim=0)
    values = torch.linalg.svdvals(centred.double())
    total = float(values.sum())
    # Differences at the level of rounding are no variation.
    if total <= 1e-6 * float(features.double().norm()):
        return 1.0
    return float(entropy(values / total).exp())
