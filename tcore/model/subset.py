"""Work for some samples of a batch alone: stochastic depth, and what is wanted of the last block."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor


class Subset(NamedTuple):
    """Samples for which a residual is computed, and where each sample of the batch is among them (or -1)."""

    rows: Int64[Tensor, "kept"]
    places: Int64[Tensor, "b"]


class Wanted(NamedTuple):
    """What is wanted of a batch: all tokens of some samples, of the others the frame token alone."""

    whole: Subset
    frame_only: Subset


def draw_subsets(
    rates: Sequence[float], batch: int, generator: torch.Generator | None, device: torch.device
) -> list["Share"]:
    """Independent random subsets that leave out these shares of the batch, all drawn at once."""
    order = torch.rand(len(rates), batch, generator=generator, device=device).argsort(dim=1)
    found: list[Share] = [None] * len(rates)
    for rate in dict.fromkeys(rates):  # those of one rate in one go
        same = [index for index, other in enumerate(rates) if other == rate and rate > 0]
        kept = min(batch, max(1, int(batch * (1 - rate))))
        rows = order[same, :kept] if len(same) < len(rates) else order[:, :kept]
        places = torch.full((len(same), batch), -1, device=device)
        places.scatter_(1, rows, torch.arange(kept, device=device).expand(len(same), kept))
        for index, *pair in zip(same, rows.unbind(), places.unbind(), strict=True):
            found[index] = Subset(*pair)
    return found


def draw_gates(
    rates: Sequence[float], batch: int, generator: torch.Generator | None, device: torch.device
) -> list["Share"]:
    """Factors of each sample: 0 with the probability of the rate, and the others scaled up to match."""
    draws = torch.rand(len(rates), batch, generator=generator, device=device)
    return [
        None if rate == 0 else (draw >= rate).float() / (1 - rate)
        for rate, draw in zip(rates, draws.unbind(), strict=True)
    ]


class Take(torch.autograd.Function):
    """The samples of a subset. A gather both ways: PyTorch's own gradient would add up one by one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, places: Tensor) -> Tensor:
        """Samples by their rows."""
        ctx.save_for_backward(rows, places)
        return x[rows]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """The gradient at the places of the samples."""
        return spread(gradients[0], ctx.saved_tensors[1]), None, None


class Spread(torch.autograd.Function):
    """A subset's values at the places of its samples, 0 elsewhere."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, places: Tensor) -> Tensor:
        """Values at their places."""
        ctx.save_for_backward(rows, places)
        return spread(x, places)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """The gradient by rows."""
        return gradients[0][ctx.saved_tensors[0]], None, None


def spread(x: Float[Tensor, "kept ..."], places: Int64[Tensor, "b"]) -> Float[Tensor, "b ..."]:
    """Rows by their places; 0 where there is none."""
    if x.shape[0] == 0:
        return x.new_zeros(places.shape[0], *x.shape[1:])
    there = (places >= 0).view(-1, *[1] * (x.ndim - 1))
    return torch.where(there, x[places.clamp(min=0)], 0)


# For whom a residual is computed: for all, for a subset, or for all and then scaled (by 0: left out).
Share = Subset | Float[Tensor, "b"] | None


def add_residual(
    x: Float[Tensor, "b n d"], residual: Callable[[Tensor], Tensor], share: Share
) -> Float[Tensor, "b n d"]:
    """Add a residual; with a subset compute it for those samples alone, scaled up to match."""
    if not isinstance(share, Subset):
        return x + scale_by(share, residual(x))
    if x.shape[0] == 0:
        return x + residual(x)
    scale = x.shape[0] / share.rows.shape[0]
    update = residual(Take.apply(x, *share))  # type: ignore[no-untyped-call]
    spread_out: Tensor = Spread.apply(update, *share)  # type: ignore[no-untyped-call]
    return x + scale * spread_out


def gates(subset: Share) -> Float[Tensor, "b"] | None:
    """A subset as factors: 0 for a sample that is left out, and the others scaled up to match."""
    if not isinstance(subset, Subset):
        return subset
    if subset.places.shape[0] == 0:
        return None
    scale = subset.places.shape[0] / subset.rows.shape[0]
    return scale * (subset.places >= 0).float()


def scale_by(gate: Float[Tensor, "b"] | None, residual: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
    """A residual times the gate of its sample."""
    return residual if gate is None else gate[:, None, None] * residual
