"""A batch: the views and masks of one step, as the model takes them."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from tcore.model.subset import Subset, Wanted


class Counts(NamedTuple):
    """What the losses of a step are divided by: counts over all its processes and micro-batches."""

    videos: int
    masked_crops: int
    masked_tokens: int


@dataclass(frozen=True)
class Batch:
    """Views of b videos, crop-major (index = crop * b + video), and what is masked of them.

    `masked` lists the m global crops that carry a mask; past and future views exist for those alone.
    `order` lists all global crops, those that carry a mask first.
    `holes` are the masked patches, as positions in the m * n patches of those crops.
    """

    global_crops: Float[Tensor, "two_b 3 size size"]
    local_crops: Float[Tensor, "local_b 3 small small"]
    past: Float[Tensor, "m 3 size size"] | None
    future: Float[Tensor, "m 3 size size"] | None
    teacher_crops: Float[Tensor, "two_b 3 size size"]
    mask: Bool[Tensor, "two_b n"]
    masked: Int64[Tensor, "m"]
    order: Int64[Tensor, "two_b"]
    holes: Int64[Tensor, "h"]
    hole_weights: Float[Tensor, "h"]
    counts: Counts

    def wanted(self) -> Wanted | Literal["all"]:
        """What losses want of the student: patches of masked crops; of the others, frame tokens alone."""
        # Asked of the whole step: all its processes must go the same way through the network.
        if self.counts.masked_crops == 2 * self.counts.videos:
            return "all"
        places, masked = self.order.argsort(), len(self.masked)
        outside = torch.full_like(places, -1)
        return Wanted(
            Subset(self.masked, torch.where(places < masked, places, outside)),
            Subset(self.order[masked:], torch.where(places < masked, outside, places - masked)),
        )


class Holes(NamedTuple):
    """Where the masks of a batch are."""

    masked: Int64[Tensor, "m"]
    order: Int64[Tensor, "two_b"]
    holes: Int64[Tensor, "h"]
    hole_weights: Float[Tensor, "h"]


def find_holes(mask: Bool[Tensor, "two_b n"]) -> Holes:
    """Index the masked crops and patches; a patch weighs 1 / (masked patches of its crop)."""
    # In numpy: torch would wake all cores for it, which takes longer than the work.
    every = mask.cpu().numpy()
    counts = every.sum(axis=1)
    masked = np.flatnonzero(counts)
    weights = np.repeat(1.0 / counts[masked], counts[masked]).astype(np.float32)
    holes = np.flatnonzero(every[masked])
    order = np.concatenate([masked, np.flatnonzero(counts == 0)])
    return Holes(*(torch.from_numpy(x) for x in (masked, order, holes, weights)))


def make_batch(
    global_crops: Float[Tensor, "two_b 3 size size"],
    local_crops: Float[Tensor, "local_b 3 small small"],
    mask: Bool[Tensor, "two_b n"],
    past: Float[Tensor, "m 3 size size"] | None = None,
    future: Float[Tensor, "m 3 size size"] | None = None,
    *,
    teacher_crops: Float[Tensor, "two_b 3 size size"] | None = None,
    counts: Counts | None = None,
) -> Batch:
    """Put a batch together; without `counts` it is the whole step."""
    found = find_holes(mask.cpu())
    if counts is None:
        counts = Counts(mask.shape[0] // 2, found.masked.shape[0], found.holes.shape[0])
    for name, views in (("past", past), ("future", future)):
        if views is not None and views.shape[0] != found.masked.shape[0]:
            raise ValueError(f"{name} has {views.shape[0]} views for {found.masked.shape[0]} masked crops.")
    device = global_crops.device

    def send(x: Tensor) -> Tensor:
        # A copy from memory that is not pinned would wait for the pixels that are being made.
        on_its_way = device.type == "cuda" and not x.is_cuda
        return x.pin_memory().to(device, non_blocking=True) if on_its_way else x.to(device)

    return Batch(
        global_crops=global_crops,
        local_crops=local_crops,
        past=past,
        future=future,
        teacher_crops=global_crops if teacher_crops is None else teacher_crops,
        mask=send(mask),
        masked=send(found.masked),
        order=send(found.order),
        holes=send(found.holes),
        hole_weights=send(found.hole_weights),
        counts=counts,
    )
