"""What the compiler is told of our networks: rows that are gathered and normed are read once.

The compiler's own rule reads rows twice where they come from places that are not known beforehand: samples
that stochastic depth keeps. Rows of an encoder fit into the registers of a program.
"""

from typing import Any

from torch._inductor.choices import InductorChoices
from torch._inductor.runtime.hints import ReductionHint
from torch._inductor.virtualized import V

LONGEST = 1024  # numbers of a row


class OnePass(InductorChoices):  # type: ignore[misc]
    """torch's choices, but for this one."""

    def uuid(self) -> str:
        """What tells kernels that were compiled with these choices from others in the compiler's cache."""
        return f"tcore: rows of up to {LONGEST} in one pass"

    @staticmethod
    def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
        """Whether a program holds a whole row."""
        short = V.graph.sizevars.statically_known_leq(features.reduction_numel, LONGEST)
        unknown = features.get_reduction_hint() == ReductionHint.DEFAULT
        known = InductorChoices.should_use_persistent_reduction(features, cooperative_reduction)
        return bool(known or (short and unknown and not cooperative_reduction))
