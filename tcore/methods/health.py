"""Whether training learns, waits on a plateau, or collapses: figures from a few rows of the last step."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

State = Literal["learning", "plateau", "collapse"]


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
