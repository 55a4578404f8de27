"""The processes that share a step, as the model sees them: a few sums and rows of other processes."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


def _itself(x: Tensor) -> Tensor:
    return x


class Peers(NamedTuple):
    """What a process can learn of the others; of one process alone all of it is the identity."""

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
