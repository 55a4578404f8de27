"""Self-distillation: a student predicts what a slowly moving teacher makes of other views.

The parts that DINO (arXiv:2104.14294), iBOT (arXiv:2111.07832), DINOv2 (arXiv:2304.07193) and T-CoRe share.
"""

import copy
from collections.abc import Mapping
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tcore.config import Config
from tcore.methods.batch import Batch
from tcore.methods.health import Health, measure_health
from tcore.methods.method import (
    Length,
    Method,
    Part,
    cosine,
    follow,
    named_parameters,
    some_rows,
    warmup_linear,
)
from tcore.methods.settings import DinoSettings, LossForm, MaskedSettings
from tcore.methods.settings_groups import (
    FrameMaskingConfig,
    HeadConfig,
    MaskingConfig,
    PatchHeadConfig,
    PatchLossConfig,
    PatchTeacherConfig,
    TeacherConfig,
)
from tcore.model import losses
from tcore.model.attention import working_dtype
from tcore.model.fused import fused_frame_sum, fused_patch_sums
from tcore.model.heads import ProjectionHead
from tcore.model.losses import TeacherTargets, Warmth
from tcore.model.vit import Tokens, VisionTransformer, build_vit

HEALTH_CROPS = 16  # crops whose patches are looked at where the losses need none


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

    def observe(self, total: Float[Tensor, "k"], count: int | Tensor) -> None:
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


class SelfDistillation(Method):
    """Student, teacher and centers: DINO, and with masked patches iBOT and DINOv2; T-CoRe builds on it.

    Which terms there are is said by their weights: dino, koleo, patch_teacher.

    >>> backbone = VisionTransformer(dim=48, depth=1, num_heads=3, image_size=32, num_registers=0)
    >>> head = ProjectionHead(dim=48, hidden=64, bottleneck=16, num_prototypes=32)
    >>> from tcore.methods.batch import make_batch
    >>> crops, local = torch.zeros(4, 3, 32, 32), torch.zeros(2, 3, 16, 16)
    >>> batch = make_batch(crops, local, torch.zeros(4, 0, dtype=torch.bool))
    >>> list(SelfDistillation(backbone, head, {"dino": 1.0})(batch, {"teacher_temperature": 0.04}))
    ['dino']
    """

    def __init__(
        self,
        backbone: VisionTransformer,
        head: ProjectionHead,
        weights: Mapping[str, float],
        *,
        teacher: TeacherConfig | None = None,
        masking: MaskingConfig | None = None,
        form: LossForm = "release",
        student_temperature: float = 0.1,
        koleo_global: bool = False,
        fused: bool = True,
    ) -> None:
        super().__init__(weights)
        self.schedule, self.masking = teacher or TeacherConfig(), masking or MaskingConfig()
        self.form, self.targets, self.fused = form, self.schedule.targets, fused
        self.student_temperature, self.koleo_global = student_temperature, koleo_global
        self.student = Network(backbone, head)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.frame_center, self.patch_center = (
            Center(len(prototypes), self.schedule.center_momentum) for prototypes in head.weights()
        )
        self.whole_crops = self.masking.draw == "independent"
        """Whether the last block makes all tokens of all global crops: their shapes are the same then."""
        self._most_masked = 0
        self.train()

    def train(self, mode: bool = True) -> "SelfDistillation":
        """Switch the student; the teacher always evaluates."""
        super().train(mode)
        self.teacher.eval()
        return self

    live: tuple[str, ...] = ("teacher_temperature", "patch_teacher_temperature")
    switches = ("masked",)

    def forward(
        self, batch: Batch, values: Mapping[str, Warmth], generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """Run teacher and student on one batch and compare what they make of it."""
        if values.get("masked") == 0:
            batch = batch.unmasked()
        # The teacher sees every patch of the global crops ...
        with torch.no_grad():
            patches = self.compares_patches(batch)
            seen = self.teacher.backbone(batch.teacher_crops, wanted="all" if patches else "frames")
            about_frames, about_patches = self.teach(batch, seen, values)
            context = self.context(batch, generator)

        # ... the student sees them with masked patches, and all local crops.
        wanted = ("all" if self.whole_crops else batch.wanted()) if patches else "frames"
        mask = batch.mask if batch.mask.shape[1] else None
        global_ = self.student.backbone(batch.global_crops, mask, generator, wanted=wanted)
        frames = self.student_frames(batch, global_.frame, generator)
        restored = self.restore(batch, global_.patches, context) if patches else {}

        self.take_health_sample(batch, seen, about_frames, about_patches, restored)
        compare = self._compare_fused if self.fused else self._compare_plainly
        terms = compare(batch, about_frames, about_patches, frames, restored)
        return {"dino": terms.pop("dino"), **self.koleo(batch, global_.frame), **terms}

    def compares_patches(self, batch: Batch) -> bool:
        """Whether there is a loss of patches."""
        return batch.mask.shape[1] > 0 and self.weights.get("patch_teacher", 0.0) > 0

    def context(self, batch: Batch, generator: torch.Generator | None) -> dict[str, Tensor]:
        """What else the student restores patches from, without gradient: nothing."""
        return {}

    def restore(
        self, batch: Batch, patches: Float[Tensor, "m n d"], context: Mapping[str, Tensor]
    ) -> dict[str, Float[Tensor, "h d"]]:
        """What the student makes of the masked patches, by side: its own tokens there."""
        return {"patch": batch.at_masked(patches)}

    def student_frames(
        self, batch: Batch, global_: Float[Tensor, "two_b d"], generator: torch.Generator | None
    ) -> Float[Tensor, "f d"]:
        """Frame tokens of all crops of the student, those of the local ones made here."""
        if not len(batch.local_crops):
            return global_
        local = self.student.backbone(batch.local_crops, None, generator, wanted="frames")
        return torch.cat([global_, local.frame])

    @torch.no_grad()
    def teach(
        self, batch: Batch, seen: Tokens, values: Mapping[str, Warmth]
    ) -> tuple[TeacherTargets, TeacherTargets]:
        """The teacher's targets for frames and masked patches; its centers note the outputs they need."""
        head, frames = self.teacher.head, seen.frame
        every = self.centers_all_patches or not len(seen.patches)
        patches = seen.patches.flatten(0, 1) if every else batch.at_masked(seen.patches)
        bottleneck = head.project(torch.cat([frames, patches])).to(working_dtype(frames))
        rows = bottleneck.split([frames.shape[0], patches.shape[0]])
        temperature = values["teacher_temperature"]
        temperatures = (temperature, values.get("patch_teacher_temperature", temperature))
        centers = (self.frame_center, self.patch_center)
        asked = [
            TeacherTargets(part, prototypes.to(part.dtype), center.value, warmth)
            for part, prototypes, center, warmth in zip(
                rows, head.weights(), centers, temperatures, strict=True
            )
        ]
        counted = batch.counted if len(patches) else None
        if self.targets == "centering":
            for targets, center, some in zip(asked, centers, (None, None if every else counted), strict=True):
                center.observe(targets.total(some), targets.count if some is None else some.sum())
        if every and len(patches):
            masked = batch.at_masked(rows[1].unflatten(0, seen.patches.shape[:2]))
            asked[1] = replace(asked[1], bottleneck=masked)
        if self.targets == "sinkhorn":
            asked = [
                losses.given_targets(
                    losses.sinkhorn_targets(
                        x.outputs(slice(None)), x.temperature, peers=self.peers, counted=some
                    )
                )
                for x, some in zip(asked, (None, counted), strict=True)
            ]
        return asked[0], asked[1]

    @property
    def centers_all_patches(self) -> bool:
        """Whether the patches' center is the mean of all patches, masked or not."""
        teacher = self.schedule
        return isinstance(teacher, PatchTeacherConfig) and teacher.patch_center == "all"

    def _compare_fused(
        self,
        batch: Batch,
        about_frames: TeacherTargets,
        about_patches: TeacherTargets,
        frames: Float[Tensor, "f d"],
        restored: dict[str, Tensor],
    ) -> dict[str, Tensor]:
        """Predictions beside targets, a few rows of K numbers at a time."""
        head = self.student.head
        bottleneck = head.project(torch.cat([frames, *restored.values()]))
        frame_rows, patch_rows = bottleneck.split([len(frames), len(bottleneck) - len(frames)])
        prototypes, of_patches = head.weights()
        terms = {"dino": self.dino(batch, about_frames, frame_rows, prototypes)}
        if restored:
            sides = patch_rows.unflatten(0, (len(restored), -1))
            terms |= self.fused_patches(batch, about_patches, list(restored), sides, of_patches)
        return terms

    def _compare_plainly(
        self,
        batch: Batch,
        about_frames: TeacherTargets,
        about_patches: TeacherTargets,
        frames: Float[Tensor, "f d"],
        restored: dict[str, Tensor],
    ) -> dict[str, Tensor]:
        """The plain twin: all outputs at once, the losses as they are written down."""
        head = self.student.head
        terms = {"dino": self.plain_dino(batch, about_frames, frames)}
        if restored:
            own = head.weights()[1]
            outputs = {side: head.project(tokens) @ own.T for side, tokens in restored.items()}
            terms |= self.plain_patches(batch, about_patches, outputs)
        return terms

    def fused_patches(
        self, batch: Batch, targets: TeacherTargets, sides: list[str], rows: Tensor, prototypes: Tensor
    ) -> dict[str, Tensor]:
        """Losses of patches from bottlenecks of what was restored, by side."""
        return self.patch_sums(batch, targets, sides, rows, prototypes)[0]

    def plain_patches(
        self, batch: Batch, targets: TeacherTargets, outputs: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """The plain twin, from all outputs."""
        probabilities, warmth = targets.targets(), self.student_temperature
        return {
            f"{side}_teacher": losses.patch_loss(
                probabilities, output, batch.patch_weights, warmth, self.num_crops(batch)
            )
            for side, output in outputs.items()
        }

    def patch_sums(
        self, batch: Batch, targets: TeacherTargets, sides: list[str], rows: Tensor, prototypes: Tensor
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Cross-entropy of each side with the teacher, and two sums of distances between two sides."""
        weights, warmth = batch.patch_weights, self.student_temperature
        entropies, distance, apart = fused_patch_sums(
            rows, prototypes, targets, weights, warmth, kernels=self.kernels
        )
        crops = max(1, self.num_crops(batch))
        terms = {f"{side}_teacher": x / crops for side, x in zip(sides, entropies, strict=True)}
        return terms, distance, apart

    def num_crops(self, batch: Batch) -> int:
        """What losses of patches are divided by: all crops, in T-CoRe's paper those that carry a mask."""
        return batch.counts.masked_crops if self.form == "paper" else 2 * batch.counts.videos

    def koleo(self, batch: Batch, frames: Float[Tensor, "two_b d"]) -> dict[str, Tensor]:
        """KoLeo of both global crops, where it has a weight."""
        if not self.weights.get("koleo"):
            return {}
        peers = {"peers": self.peers} if self.koleo_global else {}
        first, second = (losses.koleo_loss(x, batch.counts.videos, **peers) for x in frames.chunk(2))
        return {"koleo": first + second}

    def dino(
        self, batch: Batch, targets: TeacherTargets, frame_rows: Tensor, prototypes: Tensor
    ) -> Float[Tensor, ""]:
        """L_DINO from bottlenecks of the frame tokens, a few rows of K numbers at a time."""
        views = frame_rows.unflatten(0, (-1, len(batch.global_crops) // 2))
        pairs = 2 * (len(views) - 2) + 2
        total = fused_frame_sum(views, prototypes, targets, self.student_temperature, kernels=self.kernels)
        return total / (pairs * batch.counts.videos)

    def plain_dino(
        self, batch: Batch, targets: TeacherTargets, frames: Float[Tensor, "f d"]
    ) -> Float[Tensor, ""]:
        """The plain twin: all outputs at once, the loss as it is written down."""
        global_, local = self.student.head(frames).tensor_split([len(batch.global_crops)])
        temperature, videos = self.student_temperature, batch.counts.videos
        return losses.dino_loss(targets.targets(), global_, local, temperature, videos)

    def values(self, step: int, length: Length) -> dict[str, float]:
        """Momentum of the teacher and temperature of its targets."""
        teacher, epoch = self.schedule, length.steps_per_epoch
        steps = length.warmup(teacher.temperature_epochs, 0.075)

        def warmed(ends: tuple[float, float], step: int) -> float:
            if step < 0:
                return ends[0]
            if teacher.temperature_by == "epoch":
                return warmup_linear(step // epoch, *ends, -(-steps // epoch))
            return warmup_linear(step, *ends, steps)

        values = {
            "momentum": cosine(step, *teacher.momentum, length.num_steps),
            "teacher_temperature": warmed(teacher.temperature, step),
            "student_temperature": self.student_temperature,
        }
        start = epoch * self.masking.start_epoch if isinstance(self.masking, FrameMaskingConfig) else 0
        if isinstance(teacher, PatchTeacherConfig) and teacher.patch_temperature is not None:
            values["patch_teacher_temperature"] = warmed(teacher.patch_temperature, step - start)
        return values | ({"masked": float(step >= start)} if start else {})

    def sums(self) -> list[Tensor]:
        """What the centers have noted of a step, to be summed over its processes before they move."""
        if self.targets != "centering":
            return []
        return [
            x for center in (self.frame_center, self.patch_center) for x in (center.waiting, center.count)
        ]

    @torch.no_grad()
    def finish_step(self, values: Mapping[str, float]) -> None:
        """Let the teacher follow the student, and move the centers toward the outputs of the step."""
        follow(self.teacher.parameters(), self.student.parameters(), values["momentum"])
        if self.targets == "centering":
            self.frame_center.update()
            self.patch_center.update()

    def parts(self) -> dict[str, Part]:
        """Backbone and head of the student."""
        return {
            "backbone": Part(named_parameters(self.student.backbone)),
            "head": Part(
                named_parameters(self.student.head), last_layer=("prototypes.", "patch_prototypes.")
            ),
        }

    def encoder(self) -> VisionTransformer:
        """The teacher's backbone."""
        return self.teacher.backbone

    def backbones(self) -> list[VisionTransformer]:
        """Those of student and teacher."""
        return [self.student.backbone, self.teacher.backbone]

    def in_fixed_shapes(self, batch: Batch) -> Batch:
        """Masked patches filled up to a number that hardly any step exceeds; then it grows."""
        count = len(batch.masked_patches)
        if count > self._most_masked:
            self._most_masked = -(-(count + count // 16) // 128) * 128
        dtype = working_dtype(batch.global_crops)
        return batch.in_fixed_shapes(self._most_masked, self.whole_crops, dtype)

    def fixed_shapes(self, videos: int, batch: int) -> bool:
        """Without `whole_crops` the number of masked crops counts: fixed where a part has whole groups."""
        exact = self.masking.draw == "stratified"
        return self.whole_crops or (exact and (videos % self.masking.group == 0 or videos == batch))

    def warnings(self, videos: int) -> list[str]:
        """KoLeo needs neighbors."""
        if self.weights.get("koleo") and videos == 1 and not (self.koleo_global and self.peers.size > 1):
            return ["warning: one video at a time has no neighbors: koleo is 0 throughout."]
        return []

    def take_health_sample(
        self,
        batch: Batch,
        seen: Tokens,
        about_frames: TeacherTargets,
        about_patches: TeacherTargets,
        restored: Mapping[str, Tensor],
    ) -> None:
        """Keep a few rows of everything, where the step is observed."""
        if not self.observing:
            return
        patches = seen.patches
        if not len(patches):  # losses need none: they are made for the health figures alone
            with torch.no_grad():
                patches = self.teacher.backbone(batch.teacher_crops[:HEALTH_CROPS]).patches

        def some(count: int) -> slice:
            return some_rows(count, self.health_rows)

        def masked() -> slice | Tensor:
            count = len(batch.masked_patches)
            if batch.counted is None or not count:
                return some(count)
            # Those that fill up to a fixed number are at the end.
            share = torch.arange(self.health_rows, device=batch.counted.device) / self.health_rows
            return (share * batch.counted.sum()).long()

        def rows(x: Tensor, which: slice | Tensor) -> Tensor:
            return x.detach()[which].float().clone()

        patches = patches.flatten(0, 1)
        self.health_sample = {
            "frames": rows(seen.frame, some(len(seen.frame))),
            "patches": rows(patches, some(len(patches))),
            "frame_targets": about_frames.targets(some(about_frames.count)),
        }
        if restored:
            self.health_sample["patch_targets"] = about_patches.targets(masked())
        if "past" in restored and "future" in restored:
            self.health_sample |= {
                f"from_{side}": rows(restored[side], masked()) for side in ("past", "future")
            }

    def health(self, rows: Mapping[str, Tensor], losses: Mapping[str, float]) -> Health:
        """Ranks of the features, and what the targets distinguish."""
        return measure_health(rows, losses["dino"])


def build_head(head: HeadConfig, dim: int) -> ProjectionHead:
    """The projection head of a run."""
    return ProjectionHead(
        dim=dim,
        hidden=head.hidden,
        bottleneck=head.bottleneck,
        num_prototypes=head.prototypes,
        train_gains=head.train_gains,
        num_patch_prototypes=head.patch_prototypes if isinstance(head, PatchHeadConfig) else None,
    )


def build_distillation(config: Config, settings: DinoSettings | MaskedSettings) -> SelfDistillation:
    """The networks of DINO, iBOT or DINOv2, with weights drawn from torch's generator."""
    backbone = build_vit(config.vit, config.views.global_size)
    masking = settings.masking if isinstance(settings, MaskedSettings) else None
    if masking is None or not masking.probability:
        backbone.mask_token.requires_grad_(False)
    return SelfDistillation(
        backbone,
        build_head(settings.head, config.vit.dim),
        settings.loss.weights(),
        teacher=settings.teacher,
        masking=masking,
        student_temperature=settings.loss.student_temperature,
        koleo_global=isinstance(settings.loss, PatchLossConfig) and settings.loss.koleo_global,
    )
