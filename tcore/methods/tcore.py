"""T-CoRe (CVPR 2025): teacher, student and auxiliary branch on one batch of sandwiches."""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tcore.config import Config
from tcore.methods.distillation import Batch, SelfDistillation, build_head
from tcore.methods.matching import PatchMatchingModule
from tcore.methods.method import Part, named_parameters
from tcore.methods.settings import LossConfig, LossForm, Targets, TCoReSettings, TeacherConfig
from tcore.model import losses
from tcore.model.fused import fused_patch_sums
from tcore.model.heads import ProjectionHead
from tcore.model.losses import TeacherTargets
from tcore.model.vit import VisionTransformer, build_vit


class TCoRe(SelfDistillation):
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
        weights: Mapping[str, float] | None = None,
        teacher: TeacherConfig | None = None,
        form: LossForm = "paper",
        targets: Targets = "centering",
        student_temperature: float = 0.1,
        center_momentum: float = 0.9,
        auxiliary_drop_path: bool = True,
        koleo_global: bool = False,
        mask_group: int = 1,
        matching_lr: float = 1.0,
        fused: bool = True,
    ) -> None:
        super().__init__(
            backbone,
            head,
            LossConfig().weights() if weights is None else weights,
            teacher=teacher,
            targets=targets,
            student_temperature=student_temperature,
            center_momentum=center_momentum,
            fused=fused,
        )
        self.match, self.form, self.koleo_global = match, form, koleo_global
        self.auxiliary_drop_path, self.mask_group, self.matching_lr = (
            auxiliary_drop_path,
            mask_group,
            matching_lr,
        )
        self.train()

    def forward(
        self, batch: Batch, values: Mapping[str, float], generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """Run the three branches on one batch and compare what they make of it."""
        # The teacher sees every patch; the auxiliary branch is the student, unmasked and without gradient.
        with torch.no_grad():
            seen = self.teacher.backbone(batch.teacher_crops)
            about_frames, about_patches = self.teach(
                seen.frame, batch.at_masked(seen.patches[batch.masked]), values["teacher_temperature"]
            )
            auxiliary = self._auxiliary_patches(batch, generator)

        # The student sees the current frame with masked patches ...
        global_ = self.student.backbone(batch.global_crops, batch.mask, generator, wanted=batch.wanted())
        frames = self.student_frames(batch, global_.frame, generator)

        # ... and restores them by matching patches across time, once from each side.
        current = global_.patches
        if self.match is None:
            restored = {"patch": batch.at_masked(current)}
        else:
            restored = {
                side: batch.at_masked(self.match(current, patches)) for side, patches in auxiliary.items()
            }

        self.take_health_sample(seen.frame, seen.patches, about_frames, about_patches, restored)
        compare = self._compare_fused if self.fused else self._compare_plainly
        terms = compare(batch, about_frames, about_patches, frames, restored)
        peers = {"peers": self.peers} if self.koleo_global else {}
        koleo = [losses.koleo_loss(crop, batch.counts.videos, **peers) for crop in global_.frame.chunk(2)]
        return {"dino": terms.pop("dino"), "koleo": koleo[0] + koleo[1], **terms}

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
        about_frames: TeacherTargets,
        about_patches: TeacherTargets,
        frames: Float[Tensor, "f d"],
        restored: dict[str, Tensor],
    ) -> dict[str, Tensor]:
        """Predictions beside targets, a few rows of K numbers at a time."""
        head = self.student.head
        bottleneck = head.project(torch.cat([frames, *restored.values()]))
        frame_rows, patch_rows = bottleneck.split([len(frames), len(bottleneck) - len(frames)])
        prototypes = head.prototypes.weights()
        terms = {"dino": self.dino(batch, about_frames, frame_rows, prototypes)}
        if restored:
            entropies, distance, apart = fused_patch_sums(
                patch_rows.unflatten(0, (len(restored), -1)),
                prototypes,
                about_patches,
                batch.patch_weights,
                self.student_temperature,
                kernels=self.kernels,
            )
            for side, value in zip(restored, entropies, strict=True):
                terms[f"{side}_teacher"] = value / max(1, self._num_crops(batch))
            counts = batch.counts
            if len(restored) == 2 and self.form == "paper":
                terms["past_future"] = apart / max(1, counts.masked_crops)
            elif len(restored) == 2:
                terms["past_future"] = distance / (max(1, counts.masked_patches) * prototypes.shape[0])
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
        temperature, counts, head = self.student_temperature, batch.counts, self.student.head
        terms = {"dino": self.plain_dino(batch, about_frames, frames)}
        targets, outputs = about_patches.targets(), {side: head(tokens) for side, tokens in restored.items()}
        for side, output in outputs.items():
            terms[f"{side}_teacher"] = losses.patch_loss(
                targets, output, batch.patch_weights, temperature, self._num_crops(batch)
            )
        if "past" in outputs and "future" in outputs:
            past, future = outputs["past"], outputs["future"]
            if self.form == "paper":
                terms["past_future"] = losses.past_future_probability_distance(
                    past, future, batch.patch_weights, temperature, counts.masked_crops
                )
            else:
                terms["past_future"] = losses.past_future_output_distance(past, future, counts.masked_patches)
        return terms

    def _num_crops(self, batch: Batch) -> int:
        """The released code divides by all crops, the paper by those that carry a mask."""
        return batch.counts.masked_crops if self.form == "paper" else 2 * batch.counts.videos

    def parts(self) -> dict[str, Part]:
        """Backbone, head and matching module."""
        if self.match is None:
            return super().parts()
        return {**super().parts(), "match": Part(named_parameters(self.match), lr=self.matching_lr)}

    def compiled(self) -> list[nn.Module]:
        """The matching module."""
        return [] if self.match is None else [self.match]

    def fixed_shapes(self, videos: int, batch: int) -> bool:
        """The number of masked crops is fixed where a part has whole groups of masks."""
        return videos % self.mask_group == 0 or videos == batch

    def extras(self) -> dict[str, nn.Module]:
        """Student backbone and matching module, for figures of the attention across time."""
        if self.match is None:
            return {}
        return {"matching": nn.ModuleDict({"backbone": self.student.backbone, "match": self.match})}

    def warnings(self, videos: int) -> list[str]:
        """KoLeo needs neighbors."""
        if self.weights["koleo"] and videos == 1 and not (self.koleo_global and self.peers.size > 1):
            return ["warning: one video at a time has no neighbors: koleo is 0 throughout."]
        return []


def build_matching(settings: TCoReSettings, dim: int) -> PatchMatchingModule:
    """The patch matching module of a run."""
    matching = settings.matching
    return PatchMatchingModule(
        dim=dim,
        num_heads=matching.num_heads,
        gain=matching.gain,
        num_blocks=matching.num_blocks,
        temperature=matching.temperature,
    )


def build_tcore(config: Config, settings: TCoReSettings) -> TCoRe:
    """The networks of a run, with weights drawn from torch's generator."""
    backbone = build_vit(config.vit, config.views.global_size)
    head = build_head(settings.head, config.vit.dim)
    match = None if settings.auxiliary == "none" else build_matching(settings, config.vit.dim)
    return TCoRe(
        backbone,
        head,
        match,
        weights=settings.loss.weights(),
        teacher=settings.teacher,
        form=settings.loss.form,
        targets=settings.teacher.targets,
        student_temperature=settings.loss.student_temperature,
        center_momentum=settings.teacher.center_momentum,
        auxiliary_drop_path=config.vit.auxiliary_drop_path,
        koleo_global=settings.loss.koleo_global,
        mask_group=settings.masking.group,
        matching_lr=config.optim.matching_lr,
    )
