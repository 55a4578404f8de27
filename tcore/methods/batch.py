"""What methods of self-distillation take: views of videos, and which of their patches are masked."""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from tcore.data.source import Counts
from tcore.device import send
from tcore.model.subset import Subset, Take, Wanted


@dataclass(frozen=True)
class Batch:
    """Views of b videos, crop-major (index = crop * b + video), and what is masked of them.

    `masked` lists the m global crops that carry a mask; past and future views exist for those alone.
    `order` lists all global crops, those that carry a mask first.
    `masked_patches` are positions in the m * n patches of those crops; a patch weighs
    1 / (masked patches of its crop).
    """

    global_crops: Float[Tensor, "two_b 3 size size"]
    local_crops: Float[Tensor, "local_b 3 small small"]
    teacher_crops: Float[Tensor, "two_b 3 size size"]
    mask: Bool[Tensor, "two_b n"]
    masked: Int64[Tensor, "m"]
    order: Int64[Tensor, "two_b"]
    masked_patches: Int64[Tensor, "h"]
    patch_weights: Float[Tensor, "h"]
    counts: Counts
    past: Float[Tensor, "m 3 size size"] | None = None
    future: Float[Tensor, "m 3 size size"] | None = None
    counted: Float[Tensor, "h"] | None = None
    """Where masked patches are filled up to a fixed number: 1 for those that are real, 0 for the others."""

    def wanted(self) -> Wanted | Literal["all"]:
        """What losses need of the student: patches of masked crops; of the others, frame tokens alone."""
        # Asked of the whole step: all its processes must go the same way through the network.
        if self.counts.masked_crops == 2 * self.counts.videos:
            return "all"
        places, masked = self.order.argsort(), len(self.masked)
        outside = torch.full_like(places, -1)
        return Wanted(
            Subset(self.masked, torch.where(places < masked, places, outside)),
            Subset(self.order[masked:], torch.where(places < masked, outside, places - masked)),
        )

    def at_masked(self, patches: Float[Tensor, "crops n d"]) -> Float[Tensor, "h d"]:
        """The tokens of masked crops, or of all crops, at their masked patches."""
        n, places = patches.shape[1], self.masked_patches
        if len(patches) != len(self.masked):
            places = self.masked[places // n] * n + places % n
        rows = patches.flatten(0, 1)
        found = self._take(rows, places) if rows.requires_grad else rows[places]
        return found if self.counted is None else found * self.counted[:, None].to(found.dtype)

    def _take(self, rows: Float[Tensor, "all d"], places: Int64[Tensor, "h"]) -> Float[Tensor, "h d"]:
        """Rows by their places, with a gradient that is a gather: PyTorch's own would sort the places."""
        # No patch is masked twice. Those that fill up are all the same one, and get a place beyond the end.
        beyond = torch.full_like(places, len(rows))
        target = places if self.counted is None else torch.where(self.counted > 0, places, beyond)
        found = places.new_full((len(rows) + 1,), -1)
        found.scatter_(0, target, torch.arange(len(places), device=places.device))
        taken: Tensor = Take.apply(rows, places, found[:-1])  # type: ignore[no-untyped-call]
        return taken

    def num_masked(self) -> int | Float[Tensor, ""]:
        """Masked patches of the whole step, at least 1; a number on the device where they are filled up."""
        if self.counted is None:
            return max(1, self.counts.masked_patches)
        return self.counted.sum().clamp(min=1)

    def in_fixed_shapes(self, rows: int, all_crops: bool, dtype: torch.dtype) -> "Batch":
        """The same as the whole step, with masked patches filled up to `rows` by some that count nothing.

        Where all crops are wanted, all of them count as masked, so that their number is fixed as well. Crops
        are rounded to `dtype`, as the encoder would do.
        """
        masked, places, counts = self.masked, self.masked_patches, self.counts
        if all_crops:
            n, every = self.mask.shape[1], torch.arange(len(self.order), device=self.order.device)
            masked, places = every, (masked[places // n] * n + places % n if len(places) else places)
            counts = counts._replace(masked_crops=len(every))
        spare = rows - len(places)
        views = ("global_crops", "local_crops", "teacher_crops", "past", "future")
        crops = {name: getattr(self, name) for name in views if getattr(self, name) is not None}
        return replace(
            self,
            **{name: x.to(dtype) for name, x in crops.items()},
            masked=masked,
            order=masked if all_crops else self.order,
            masked_patches=F.pad(places, (0, spare)),
            patch_weights=F.pad(self.patch_weights, (0, spare)),
            counted=F.pad(torch.ones_like(self.patch_weights), (0, spare)),
            counts=counts._replace(masked_patches=0),
        )

    def unmasked(self) -> "Batch":
        """The same views with nothing masked."""
        empty = (
            "masked",
            "masked_patches",
            "patch_weights",
            *(["counted"] if self.counted is not None else []),
        )
        none = {name: getattr(self, name)[:0] for name in empty}
        order = torch.arange(len(self.order), device=self.order.device)
        return replace(self, mask=torch.zeros_like(self.mask), order=order, **none)


def make_batch(
    global_crops: Float[Tensor, "two_b 3 size size"],
    local_crops: Float[Tensor, "local_b 3 small small"] | None,
    mask: Bool[Tensor, "two_b n"],
    past: Float[Tensor, "m 3 size size"] | None = None,
    future: Float[Tensor, "m 3 size size"] | None = None,
    *,
    teacher_crops: Float[Tensor, "two_b 3 size size"] | None = None,
    counts: Counts | None = None,
) -> Batch:
    """Index the masks of a batch; without `counts` it is the whole step."""
    # In numpy: torch would wake all cores for it, which takes longer than the work.
    every = mask.cpu().numpy()
    number = every.sum(axis=1)
    masked = np.flatnonzero(number)
    weights = np.repeat(1.0 / number[masked], number[masked]).astype(np.float32)
    patches = np.flatnonzero(every[masked])
    order = np.concatenate([masked, np.flatnonzero(number == 0)])
    for name, views in (("past", past), ("future", future)):
        if views is not None and views.shape[0] != len(masked):
            raise ValueError(f"{name} has {views.shape[0]} views for {len(masked)} masked crops.")
    device = global_crops.device
    return Batch(
        global_crops=global_crops,
        local_crops=global_crops[:0] if local_crops is None else local_crops,
        teacher_crops=global_crops if teacher_crops is None else teacher_crops,
        mask=send(mask, device),
        masked=send(torch.from_numpy(masked), device),
        order=send(torch.from_numpy(order), device),
        masked_patches=send(torch.from_numpy(patches), device),
        patch_weights=send(torch.from_numpy(weights), device),
        counts=counts or Counts(mask.shape[0] // 2, len(masked), len(patches)),
        past=past,
        future=future,
    )
