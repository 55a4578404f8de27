"""Contrast: two views of a frame find each other among the views of all frames of a step.

SimCLR (arXiv:2002.05709) by the encoder alone, MoCo v3 (arXiv:2104.02057) with keys of a momentum encoder.
"""

import copy
import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from tcore.config import Config
from tcore.methods.batch import Batch
from tcore.methods.health import (
    COLLAPSE_RANK,
    FEWEST_FRAMES,
    Health,
    State,
    effective_rank,
    mean_cosine,
)
from tcore.methods.method import Length, Method, Part, cosine, follow, named_parameters, some_rows
from tcore.methods.settings import ContrastSettings
from tcore.methods.settings_groups import ContrastConfig, PredictorConfig, ProjectorConfig
from tcore.model.contrast import Projector, contrast_rows
from tcore.model.vit import VisionTransformer, build_vit

# Projections whose log mean potential is above this all lie at one place; -4 is uniform on a large sphere.
COLLAPSE_UNIFORMITY = -0.05
# Views find each other better than by chance once the loss is below it by this share.
BETTER_THAN_CHANCE = 0.01


class Projected(nn.Module):
    """A backbone and what projects its features: the student, or the teacher that follows it."""

    def __init__(self, backbone: VisionTransformer, projector: Projector) -> None:
        super().__init__()
        self.backbone = backbone
        self.projector = projector


class Contrast(Method):
    """Student, predictor and momentum encoder, of which SimCLR has the first alone.

    >>> backbone = VisionTransformer(dim=48, depth=1, num_heads=3, image_size=32, num_registers=0)
    >>> model = Contrast(backbone, Projector(dim=48, hidden=16, out=8, layers=2), None, ContrastConfig())
    >>> model.encoder() is model.student.backbone
    True
    """

    def __init__(
        self,
        backbone: VisionTransformer,
        projector: Projector,
        predictor: Projector | None,
        settings: ContrastConfig,
    ) -> None:
        super().__init__({"contrast": 1.0})
        self.settings = settings
        self.student = Projected(backbone, projector)
        self.predictor = predictor
        follows = settings.momentum is not None
        self.teacher = copy.deepcopy(self.student).requires_grad_(False) if follows else None

    def forward(
        self, batch: Batch, values: Mapping[str, float], generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """Project both views, and let each find the other one."""
        settings, videos = self.settings, batch.counts.videos
        frames = self.student.backbone(batch.global_crops, None, generator, wanted="frames").frame
        projected = self._in_groups(self.student.projector, frames)
        queries = self.predict(projected)
        if self.teacher is None:
            found = queries
        else:
            with torch.no_grad():
                seen = self.teacher.backbone(
                    batch.global_crops, stochastic_depth=False, wanted="frames"
                ).frame
                found = F.normalize(self._in_groups(self.teacher.projector, seen), dim=-1)
        # Keys of all processes, view by view; without a momentum encoder their gradients go back to them.
        keys = self.peers.rows(found.transpose(0, 1).contiguous()).transpose(0, 1)
        first = self.peers.rank * queries.shape[1]
        rows = contrast_rows(
            queries, keys, settings.temperature, both_views=settings.negatives == "both-views", first=first
        )
        self.take_health_sample(frames, queries)
        return {"contrast": self.scale() * rows.sum() / videos}

    def _in_groups(self, projector: Projector, features: Float[Tensor, "two_b d"]) -> Float[Tensor, "2 b z"]:
        """Projections by view; batch norms are computed over each view separately, or over both."""
        groups = (1, -1) if self.settings.norm_over == "both" else (2, -1)
        return projector(features.unflatten(0, groups), None, self.peers).reshape(2, len(features) // 2, -1)

    def predict(
        self, projected: Float[Tensor, "g n d"], counted: Bool[Tensor, "g n"] | None = None
    ) -> Float[Tensor, "g n z"]:
        """Queries: what the predictor, if there is one, makes of projections, normalized."""
        if self.predictor is not None:
            projected = self.predictor(projected, counted, self.peers)
        return F.normalize(projected, dim=-1)

    def scale(self) -> float:
        """Factor on the sum of both views' means."""
        return 0.5 if self.settings.scale == "mean" else 2 * self.settings.temperature

    def values(self, step: int, length: Length) -> dict[str, float]:
        """Momentum with which the teacher moves after this step.

        MoCo v3 moves it before its own part of the step with the momentum of that step. The first of those
        moves is empty, the others are the same: here they come at the end of the step before.
        """
        if self.settings.momentum is None:
            return {}
        return {"momentum": cosine(step + 1, *self.settings.momentum, length.num_steps)}

    @torch.no_grad()
    def finish_step(self, values: Mapping[str, float]) -> None:
        """Let the teacher follow the student."""
        if self.teacher is not None:
            follow(self.teacher.parameters(), self.student.parameters(), values["momentum"])

    def parts(self) -> dict[str, Part]:
        """Backbone, projector and predictor of the student."""
        parts = {"backbone": Part(named_parameters(self.student.backbone))}
        for name, module in (("projector", self.student.projector), ("predictor", self.predictor)):
            if module is not None:
                # What has one dimension belongs to a norm, and is decayed as norms are.
                own = [
                    (f"norm.{inner}" if p.ndim == 1 else inner, p) for inner, p in named_parameters(module)
                ]
                parts[name] = Part(own)
        return parts

    def encoder(self) -> VisionTransformer:
        """The student's backbone, which the authors of both evaluate."""
        return self.student.backbone

    def backbones(self) -> list[VisionTransformer]:
        """Those of student and teacher."""
        networks = [self.student] if self.teacher is None else [self.student, self.teacher]
        return [network.backbone for network in networks]

    def take_health_sample(self, frames: Tensor, queries: Float[Tensor, "2 n d"]) -> None:
        """Keep a few rows of features, and of both views' projections, where the step is observed."""
        if not self.observing:
            return
        some, pairs = (some_rows(count, self.health_rows) for count in (len(frames), queries.shape[1]))
        first, second = queries.detach()[:, pairs].float().clone()
        features = frames.detach()[some].float().clone()
        self.health_sample = {"frames": features, "first": first, "second": second}

    def health(self, rows: Mapping[str, Tensor], losses: Mapping[str, float]) -> Health:
        """Alignment and uniformity of the projections, and the ranks of the features."""
        return measure_health(rows, losses["contrast"])

    def warnings(self, videos: int) -> list[str]:
        """Contrast needs others."""
        if videos * self.peers.size == 1:
            return ["warning: a step of one sample has no negatives: contrast is no loss at all."]
        return []


def alignment(first: Float[Tensor, "n d"], second: Float[Tensor, "n d"]) -> float:
    """Mean squared distance of two views of a sample, normalized (arXiv:2005.10242); 0 is the same place."""
    return float((first - second).square().sum(dim=1).mean())


def uniformity(rows: Float[Tensor, "n d"]) -> float:
    """Log of the mean Gaussian potential of pairs (arXiv:2005.10242): 0 at one place, -4 spread evenly."""
    n = rows.shape[0]
    if n < 2:
        return 0.0
    potential = torch.exp(-2 * torch.cdist(rows.double(), rows.double()).square()).sum() - n
    return math.log(max(float(potential) / (n * (n - 1)), 1e-300))


def measure_health(rows: Mapping[str, Tensor], loss: float) -> Health:
    """The health figures of one step from a sample of its rows and its loss."""
    first, second = rows["first"], rows["second"]
    figures = {
        # Squared distance of two views of a sample, and how evenly projections spread.
        "alignment": alignment(first, second),
        "uniformity": uniformity(first),
        # Effective ranks of features and projections, and the cosine of features of different frames: it says
        # nothing about collapse, because the first norm takes out whatever all features have in common.
        "frame_rank": effective_rank(rows["frames"]),
        "projection_rank": effective_rank(first),
        "frame_cosine": mean_cosine(rows["frames"]),
    }
    # How often a view finds its other one among those of this sample of rows.
    right = (first @ second.T).argmax(dim=1) == torch.arange(len(first), device=first.device)
    figures["found"] = float(right.float().mean())
    collapsed = len(first) >= FEWEST_FRAMES and (
        figures["uniformity"] > COLLAPSE_UNIFORMITY
        or min(figures["frame_rank"], figures["projection_rank"]) < COLLAPSE_RANK
    )
    by_chance = 1 / max(1, len(first))
    state: State = "collapse" if collapsed else "learning"
    if not collapsed and figures["found"] <= by_chance + BETTER_THAN_CHANCE:
        state = "plateau"
    line = (
        f"contrast {loss:.3f}  {state} (alignment {figures['alignment']:.2f}, uniformity "
        f"{figures['uniformity']:.2f}, rank {figures['frame_rank']:.1f}, {figures['found']:.0%} found)"
    )
    warning = (
        f"collapse: uniformity {figures['uniformity']:.2f} (0: all at one place), effective rank "
        f"{figures['frame_rank']:.1f} (features) and {figures['projection_rank']:.1f} (projections). The "
        "encoder distinguishes nothing; try a lower --optim.base-lr, or a larger --optim.batch."
    )
    return Health(state, figures, line, warning if collapsed else None)


def build_projectors(
    projector: ProjectorConfig, predictor: PredictorConfig, dim: int, bias: bool = False
) -> tuple[Projector, Projector | None]:
    """Projector and predictor of a run, with weights drawn from torch's generator."""
    first = Projector(
        dim=dim,
        hidden=projector.hidden,
        out=projector.out,
        layers=projector.layers,
        last_norm=projector.last_norm,
        bias=bias,
    )
    if not predictor.layers:
        return first, None
    return first, Projector(
        dim=projector.out,
        hidden=predictor.hidden,
        out=projector.out,
        layers=predictor.layers,
        last_norm=predictor.last_norm,
        bias=bias,
    )


def build_backbone(config: Config) -> VisionTransformer:
    """The encoder of a run that masks nothing; what it has no use for is not trained."""
    backbone = build_vit(config.vit, config.views.global_size)
    backbone.mask_token.requires_grad_(False)
    backbone.register_tokens.requires_grad_(config.vit.num_registers > 0)  # shards need elements
    return backbone


def build_contrast(config: Config, settings: ContrastSettings) -> Contrast:
    """The networks of a run, with weights drawn from torch's generator."""
    return Contrast(
        build_backbone(config),
        *build_projectors(settings.projector, settings.predictor, config.vit.dim),
        settings.contrast,
    )
