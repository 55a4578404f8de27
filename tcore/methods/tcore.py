"""T-CoRe (CVPR 2025): teacher, student and auxiliary branch on one batch of sandwiches."""

from collections.abc import Mapping
from contextlib import nullcontext

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tcore.config import Config
from tcore.methods.batch import Batch
from tcore.methods.distillation import SelfDistillation, build_head
from tcore.methods.matching import PatchMatchingModule
from tcore.methods.method import Length, Part, linear, named_parameters
from tcore.methods.motion import Scene, view_scene
from tcore.methods.settings import LossConfig, TCoReSettings
from tcore.methods.settings_groups import MaskingConfig, TeacherConfig
from tcore.model import losses
from tcore.model.heads import ProjectionHead
from tcore.model.losses import TeacherTargets, Warmth
from tcore.model.vit import VisionTransformer, build_vit

AUXILIARY = ("past_teacher", "future_teacher", "past_future")
OWN = "patch_teacher"  # the loss of patches that the student restores without another frame
FACTOR = "auxiliary_factor"  # the value of a step that they are multiplied by


class TCoRe(SelfDistillation):
    """The method: from past and future, a student restores masked patches as the teacher sees them.

    `forward` follows self-distillation: teacher, `context` (the auxiliary branch), student, `restore` (the
    matching module), losses.

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
        loss: LossConfig | None = None,
        teacher: TeacherConfig | None = None,
        masking: MaskingConfig | None = None,
        auxiliary_drop_path: bool = True,
        matching_lr: float = 1.0,
        auxiliary_gradient: bool = False,
        fused: bool = True,
    ) -> None:
        loss = loss or LossConfig()
        weights = loss.weights()
        if match is not None:  # restoring from past and future replaces the student's own patch loss
            weights[OWN] = loss.own_patches
        super().__init__(
            backbone,
            head,
            weights,
            teacher=teacher,
            masking=masking,
            form=loss.form,
            student_temperature=loss.student_temperature,
            koleo_global=loss.koleo_global,
            fused=fused,
        )
        self.match, self.auxiliary_drop_path, self.matching_lr = match, auxiliary_drop_path, matching_lr
        self.auxiliary_gradient, self.auxiliary_factor = auxiliary_gradient, loss.auxiliary
        self.whole_crops = False  # the matching module takes masked crops alone
        self.train()

    live = (*SelfDistillation.live, FACTOR)

    def forward(
        self, batch: Batch, values: Mapping[str, Warmth], generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """Losses of self-distillation; those of past and future may have a schedule."""
        found = super().forward(batch, values, generator)
        if FACTOR not in values:
            return found
        return {name: x * values[FACTOR] if name in AUXILIARY else x for name, x in found.items()}

    def values(self, step: int, length: Length) -> dict[str, float]:
        """Also the factor on the losses of past and future, where it is not always 1."""
        found = super().values(step, length)
        if self.auxiliary_factor != (1.0, 1.0):
            found[FACTOR] = linear(step, *self.auxiliary_factor, length.num_steps)
        return found

    def compares_patches(self, batch: Batch) -> bool:
        """Patches restored from other frames are always compared, a frame's own where they have a weight."""
        return self.match is not None or super().compares_patches(batch)

    def context(self, batch: Batch, generator: torch.Generator | None) -> dict[str, Tensor]:
        """Patches of the auxiliary views of the masked crops, both sides in one pass.

        The auxiliary branch is the student, unmasked and (as published) without gradient.
        """
        sides = {"past": batch.past, "future": batch.future}
        views = {side: crops for side, crops in sides.items() if crops is not None}
        if self.match is None or not views:
            return {}
        with torch.enable_grad() if self.auxiliary_gradient else nullcontext():
            tokens = self.student.backbone(
                torch.cat(list(views.values())), None, generator, stochastic_depth=self.auxiliary_drop_path
            )
            return dict(zip(views, tokens.patches.chunk(len(views)), strict=True))

    def restore(
        self, batch: Batch, patches: Float[Tensor, "m n d"], context: Mapping[str, Tensor]
    ) -> dict[str, Float[Tensor, "h d"]]:
        """The student restores masked patches by matching patches across time, once from each side."""
        if self.match is None:
            return super().restore(batch, patches, context)
        scene = self.scene(batch)
        sides = {side: batch.at_masked(self.match(patches, other, scene)) for side, other in context.items()}
        return {**sides, **super().restore(batch, patches, context)} if self.weights[OWN] else sides

    def scene(self, batch: Batch) -> Scene | None:
        """What a module that follows motion knows of the masked crops beside their patches."""
        if self.match is None or not self.match.needs_scene:
            return None
        backbone = self.student.backbone
        sides = [side // backbone.patch_size for side in batch.global_crops.shape[-2:]]
        return view_scene(backbone, batch.mask[batch.masked], (sides[0], sides[1]))

    def fused_patches(
        self, batch: Batch, targets: TeacherTargets, sides: list[str], rows: Tensor, prototypes: Tensor
    ) -> dict[str, Tensor]:
        """Each side with the teacher, and past and future with one another."""
        if "patch" in sides:  # the student's own, which come last, have no other side
            terms = super().fused_patches(batch, targets, sides[-1:], rows[-1:], prototypes)
            if sides[:-1]:
                terms |= self.fused_patches(batch, targets, sides[:-1], rows[:-1], prototypes)
            return terms
        terms, distance, apart = self.patch_sums(batch, targets, sides, rows, prototypes)
        counts = batch.counts
        if len(sides) == 2 and self.form == "paper":
            terms["past_future"] = apart / max(1, counts.masked_crops)
        elif len(sides) == 2:
            terms["past_future"] = distance / (batch.num_masked() * prototypes.shape[0])
        return terms

    def plain_patches(
        self, batch: Batch, targets: TeacherTargets, outputs: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """The plain twin, from all outputs."""
        terms, counts = super().plain_patches(batch, targets, outputs), batch.counts
        if "past" in outputs and "future" in outputs:
            past, future = outputs["past"], outputs["future"]
            if self.form == "paper":
                terms["past_future"] = losses.past_future_probability_distance(
                    past, future, batch.patch_weights, self.student_temperature, counts.masked_crops
                )
            else:
                terms["past_future"] = losses.past_future_output_distance(past, future, counts.masked_patches)
        return terms

    def parts(self) -> dict[str, Part]:
        """Backbone, head and matching module."""
        if self.match is None:
            return super().parts()
        return {**super().parts(), "match": Part(named_parameters(self.match), lr=self.matching_lr)}

    def compiled(self) -> list[nn.Module]:
        """The matching module."""
        return [] if self.match is None else [self.match]

    def extras(self) -> dict[str, nn.Module]:
        """Student backbone and matching module, for figures of the attention across time."""
        if self.match is None:
            return {}
        return {"matching": nn.ModuleDict({"backbone": self.student.backbone, "match": self.match})}


def build_matching(settings: TCoReSettings, dim: int) -> PatchMatchingModule:
    """The patch matching module of a run."""
    matching = settings.matching
    return PatchMatchingModule(
        dim=dim,
        num_heads=matching.num_heads,
        gain=matching.gain,
        num_blocks=matching.num_blocks,
        temperature=matching.temperature,
        form=matching.form,
        start=matching.start,
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
        loss=settings.loss,
        teacher=settings.teacher,
        masking=settings.masking,
        auxiliary_drop_path=config.vit.auxiliary_drop_path,
        matching_lr=config.optim.matching_lr,
        auxiliary_gradient=settings.matching.auxiliary_gradient,
    )
