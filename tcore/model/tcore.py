"""T-CoRe: teacher, student and auxiliary branch on one batch of sandwiches."""

import copy
from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tcore.config import LossForm, Targets
from tcore.data.batch import Batch
from tcore.model import losses
from tcore.model.attention import working_dtype
from tcore.model.fused import PLAIN, fused_frame_sum, fused_patch_sums
from tcore.model.glimpse import GLIMPSE_ROWS, Glimpse, take_glimpse
from tcore.model.heads import ProjectionHead
from tcore.model.losses import Losses
from tcore.model.matching import PatchMatchingModule
from tcore.model.peers import ALONE
from tcore.model.teaching import Teaching, as_given
from tcore.model.vit import VisionTransformer


class Network(nn.Module):
    """A backbone and its head: the student, or the teacher that follows it."""

    def __init__(self, backbone: VisionTransformer, head: ProjectionHead) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head


class Center(nn.Module):
    """Running mean of the teacher's raw outputs; sums of a step wait until the step is done."""

    value: Tensor
    waiting: Tensor
    count: Tensor

    def __init__(self, num_prototypes: int, momentum: float) -> None:
        super().__init__()
        self.momentum = momentum
        self.register_buffer("value", torch.zeros(num_prototypes))
        self.register_buffer("waiting", torch.zeros(num_prototypes), persistent=False)
        self.register_buffer("count", torch.zeros(()), persistent=False)

    def observe(self, total: Float[Tensor, "k"], count: int) -> None:
        """Note the raw outputs of a part of the step: their sum and number."""
        self.waiting += total
        self.count += count

    def update(self) -> None:
        """Move toward the mean of what was observed; with nothing observed, stay."""
        mean = self.waiting / self.count.clamp(min=1)
        moved = self.momentum * self.value + (1 - self.momentum) * mean
        self.value.copy_(torch.where(self.count > 0, moved, self.value))
        self.waiting.zero_()
        self.count.zero_()


class TCoRe(nn.Module):
    """The method: a student restores what it cannot see from the past and the future, as the teacher sees it.

    >>> backbone = VisionTransformer(dim=48, depth=1, num_heads=3, image_size=32)
    >>> head = ProjectionHead(dim=48, hidden=64, bottleneck=16, num_prototypes=32)
    >>> model = TCoRe(backbone, head, PatchMatchingModule(dim=48, num_heads=4))
    >>> model.teacher.backbone.cls_token.requires_grad
    False
    """

    def __init__(
        self,
        backbone: VisionTransformer,
        head: ProjectionHead,
        match: PatchMatchingModule | None,
        *,
        form: LossForm = "paper",
        targets: Targets = "centering",
        student_temperature: float = 0.1,
        center_momentum: float = 0.9,
        auxiliary_drop_path: bool = True,
        koleo_global: bool = False,
        fused: bool = True,
    ) -> None:
        super().__init__()
        self.form, self.targets = form, targets
        self.fused, self.kernels = fused, PLAIN
        self.koleo_global, self.peers = koleo_global, ALONE
        self.student_temperature, self.auxiliary_drop_path = student_temperature, auxiliary_drop_path
        self.student = Network(backbone, head)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.match = match
        num_prototypes = head.prototypes.directions.shape[0]
        self.frame_center = Center(num_prototypes, center_momentum)
        self.patch_center = Center(num_prototypes, center_momentum)
        self.watching, self.glimpse_rows = True, GLIMPSE_ROWS
        self.glimpse: Glimpse | None = None
        self.train()

    def train(self, mode: bool = True) -> "TCoRe":
        """Switch the student; the teacher always evaluates."""
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(
        self, batch: Batch, teacher_temperature: float, generator: torch.Generator | None = None
    ) -> Losses:
        """Run the three branches on one batch and compare what they make of it."""
        # The teacher sees every patch; the auxiliary branch is the student, unmasked and without gradient.
        with torch.no_grad():
            seen = self.teacher.backbone(batch.teacher_crops)
            about_frames, about_holes = self._teach(
                seen.frame, at_holes(seen.patches[batch.masked], batch), teacher_temperature
            )
            auxiliary = self._auxiliary_patches(batch, generator)

        # The student sees the current frame with holes in it ...
        global_ = self.student.backbone(batch.global_crops, batch.mask, generator, wanted=batch.wanted())
        local = self.student.backbone(batch.local_crops, None, generator, wanted="frames")

        # ... and fills them by matching patches across time, once from each side.
        with_holes = global_.patches
        if self.match is None:
            restored = {"patch": at_holes(with_holes, batch)}
        else:
            restored = {
                side: at_holes(self.match(with_holes, patches), batch) for side, patches in auxiliary.items()
            }

        if self.watching:
            self.glimpse = take_glimpse(
                seen.frame, seen.patches, about_frames, about_holes, restored, self.glimpse_rows
            )
        compare = self._compare_fused if self.fused else self._compare_plainly
        terms = compare(batch, about_frames, about_holes, torch.cat([global_.frame, local.frame]), restored)
        neighbors = {"peers": self.peers} if self.koleo_global else {}
        koleo = [losses.koleo_loss(crop, batch.counts.videos, **neighbors) for crop in global_.frame.chunk(2)]
        return Losses(**terms, koleo=koleo[0] + koleo[1])

    @torch.no_grad()
    def _teach(
        self, frames: Float[Tensor, "f d"], holes: Float[Tensor, "h d"], temperature: float
    ) -> tuple[Teaching, Teaching]:
        """What the teacher asks for, of frames and at the holes; its centers take note."""
        head = self.teacher.head
        bottleneck = head.project(torch.cat([frames, holes])).to(working_dtype(frames))
        prototypes = head.prototypes.weights().to(bottleneck.dtype)
        centers = (self.frame_center, self.patch_center)
        rows = bottleneck.split([frames.shape[0], holes.shape[0]])
        teachings = [
            Teaching(part, prototypes, center.value, temperature)
            for part, center in zip(rows, centers, strict=True)
        ]
        for teaching, center in zip(teachings, centers, strict=True):
            if self.targets == "centering":
                center.observe(teaching.total(), teaching.count)
        if self.targets == "sinkhorn":
            whole = slice(None)
            teachings = [
                as_given(losses.sinkhorn_targets(teaching.outputs(whole), temperature, peers=self.peers))
                for teaching in teachings
            ]
        return teachings[0], teachings[1]

    def _auxiliary_patches(self, batch: Batch, generator: torch.Generator | None) -> dict[str, Tensor]:
        """Patches of the auxiliary views of the masked crops, both sides in one pass."""
        sides = {"past": batch.past, "future": batch.future}
        views = {side: crops for side, crops in sides.items() if crops is not None}
        if self.match is None or not views:
            return {}
        tokens = self.student.backbone(
            torch.cat(list(views.values())), None, generator, stochastic_depth=self.auxiliary_drop_path
        )
        return dict(zip(views, tokens.patches.chunk(len(views)), strict=True))

    def _compare_fused(
        self,
        batch: Batch,
        about_frames: Teaching,
        about_holes: Teaching,
        frames: Float[Tensor, "f d"],
        restored: dict[str, Tensor],
    ) -> dict[str, Tensor]:
        """Predictions beside targets, a few rows of K numbers at a time."""
        counts, temperature, head = batch.counts, self.student_temperature, self.student.head
        bottleneck = head.project(torch.cat([frames, *restored.values()]))
        frame_rows, hole_rows = bottleneck.split([len(frames), len(bottleneck) - len(frames)])
        prototypes = head.prototypes.weights()
        views = frame_rows.unflatten(0, (-1, len(batch.global_crops) // 2))
        pairs = 2 * (len(views) - 2) + 2
        dino = fused_frame_sum(views, prototypes, about_frames, temperature, kernels=self.kernels)
        terms = {"dino": dino / (pairs * counts.videos)}
        if restored:
            entropies, distance, apart = fused_patch_sums(
                hole_rows.unflatten(0, (len(restored), -1)),
                prototypes,
                about_holes,
                batch.hole_weights,
                temperature,
                kernels=self.kernels,
            )
            for side, value in zip(restored, entropies, strict=True):
                terms[f"{side}_teacher"] = value / max(1, self._num_crops(batch))
            if len(restored) == 2 and self.form == "paper":
                terms["past_future"] = apart / max(1, counts.masked_crops)
            elif len(restored) == 2:
                terms["past_future"] = distance / (max(1, counts.masked_tokens) * prototypes.shape[0])
        return terms

    def _compare_plainly(
        self,
        batch: Batch,
        about_frames: Teaching,
        about_holes: Teaching,
        frames: Float[Tensor, "f d"],
        restored: dict[str, Tensor],
    ) -> dict[str, Tensor]:
        """The plain twin: all outputs at once, the losses as they are written down."""
        temperature, counts, head = self.student_temperature, batch.counts, self.student.head
        global_outputs, local_outputs = head(frames).tensor_split([len(batch.global_crops)])
        terms = {
            "dino": losses.dino_loss(
                about_frames.targets(), global_outputs, local_outputs, temperature, counts.videos
            )
        }
        targets, outputs = about_holes.targets(), {side: head(tokens) for side, tokens in restored.items()}
        for side, output in outputs.items():
            terms[f"{side}_teacher"] = losses.patch_loss(
                targets, output, batch.hole_weights, temperature, self._num_crops(batch)
            )
        if "past" in outputs and "future" in outputs:
            past, future = outputs["past"], outputs["future"]
            if self.form == "paper":
                terms["past_future"] = losses.past_future_probability_distance(
                    past, future, batch.hole_weights, temperature, counts.masked_crops
                )
            else:
                terms["past_future"] = losses.past_future_output_distance(past, future, counts.masked_tokens)
        return terms

    def _num_crops(self, batch: Batch) -> int:
        """The released code divides by all crops, the paper by those that carry a mask."""
        return batch.counts.masked_crops if self.form == "paper" else 2 * batch.counts.videos

    @torch.no_grad()
    def update_teacher(self, momentum: float) -> None:
        """Let the teacher follow the student."""
        student, teacher = (own_shares(network.parameters()) for network in (self.student, self.teacher))
        torch._foreach_lerp_(teacher, student, 1 - momentum)

    def waiting(self) -> list[Tensor]:
        """What the centers have noted of a step, to be summed over its processes before they move."""
        if self.targets != "centering":
            return []
        return [
            x for center in (self.frame_center, self.patch_center) for x in (center.waiting, center.count)
        ]

    @torch.no_grad()
    def update_centers(self) -> None:
        """Move both centers toward the outputs of the step that was just made."""
        if self.targets == "centering":
            self.frame_center.update()
            self.patch_center.update()

    def parts(self) -> dict[str, list[tuple[str, nn.Parameter]]]:
        """Trained parameters of backbone, head and matching module, each with its name within the part."""
        modules: Iterable[tuple[str, nn.Module | None]] = (
            ("backbone", self.student.backbone),
            ("head", self.student.head),
            ("match", self.match),
        )
        return {
            part: [(name, p) for name, p in module.named_parameters() if p.requires_grad]
            for part, module in modules
            if module is not None
        }


def own_shares(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """What this process holds of each parameter: all of it, unless it is sharded."""
    return [p.to_local() if hasattr(p, "to_local") else p for p in parameters]


def at_holes(patches: Float[Tensor, "m n d"], batch: Batch) -> Float[Tensor, "h d"]:
    """The tokens of masked crops at their masked patches."""
    return patches.flatten(0, 1)[batch.holes]
