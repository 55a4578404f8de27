"""What the teacher asks for: targets over all prototypes, made for a few rows at a time."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Teaching:
    """Targets of n rows as softmax((outputs - center) / temperature), without holding n x K numbers.

    Outputs are those of the teacher's head, from its bottleneck and its prototypes; or they are `given`.
    """

    bottleneck: Float[Tensor, "n z"]
    prototypes: Float[Tensor, "k z"]
    center: Float[Tensor, "k"]
    temperature: float
    given: Float[Tensor, "n k"] | None = None

    @property
    def count(self) -> int:
        """Number of rows."""
        return self.bottleneck.shape[0]

    def outputs(self, rows: slice | Tensor) -> Float[Tensor, "r k"]:
        """Raw outputs of some rows."""
        return self.bottleneck[rows] @ self.prototypes.T if self.given is None else self.given[rows]

    def targets(self, rows: slice | Tensor = slice(None)) -> Float[Tensor, "r k"]:
        """Probabilities of some rows."""
        return ((self.outputs(rows).float() - self.center) / self.temperature).softmax(dim=-1)

    def total(self) -> Float[Tensor, "k"]:
        """Sum of the raw outputs over all rows; a sum of bottlenecks, since outputs are linear in them."""
        return self.prototypes.float() @ self.bottleneck.float().sum(dim=0)


def as_given(targets: Float[Tensor, "n k"]) -> Teaching:
    """Targets that were made already, all rows together."""
    rows, prototypes = (targets.new_empty(side, 0) for side in targets.shape)
    return Teaching(rows, prototypes, targets.new_zeros(targets.shape[1]), 1.0, targets.log())
