"""Regions: what an image shows in parts is compared part by part between two views of it.

CrOC (arXiv:2303.13245) clusters both views together and distills its regions like frames. ODIN
(arXiv:2203.08777) discovers regions in a view around both, and contrasts them as DetCon (arXiv:2103.10957).
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from safetensors import SafetensorError
from torch import Tensor

from tcore.config import Config
from tcore.errors import InputError
from tcore.methods.batch import Batch
from tcore.methods.contrast import Contrast, build_backbone, build_projectors
from tcore.methods.distillation import SelfDistillation, build_head
from tcore.methods.health import Health
from tcore.methods.method import Length, cosine, follow
from tcore.methods.settings import CrocSettings, OdinSettings
from tcore.methods.settings_groups import (
    ContrastConfig,
    DiscoveryConfig,
    ObjectContrastConfig,
    RegionConfig,
    TeacherConfig,
)
from tcore.model import losses
from tcore.model.attention import working_dtype
from tcore.model.clustering import (
    assign,
    carry_labels,
    cluster,
    draw_distinct,
    k_means,
    patch_positions,
    pool,
    sample_noise,
    seed_probability,
)
from tcore.model.contrast import Projector, object_contrast_rows
from tcore.model.fused import fused_patch_sums
from tcore.model.heads import ProjectionHead
from tcore.model.losses import TeacherTargets, Warmth
from tcore.model.vit import Tokens, VisionTransformer, load_safetensors


@dataclass(frozen=True)
class RegionBatch:
    """Two views of b videos, where they lie in their frames, and a seed for what is random in a sample."""

    views: Batch
    boxes: Float[Tensor, "2 b 4"]
    flips: Bool[Tensor, "2 b"]
    seeds: Int64[Tensor, "b"]
    around: Float[Tensor, "b 3 size size"] | None = None
    """ODIN: the smallest box around both views, with its colors left alone."""
    around_box: Float[Tensor, "b 4"] | None = None


class Found(NamedTuple):
    """Regions of a part of a step: r rows are the heads of its images, m the regions of a row."""

    weights: Float[Tensor, "2 r n m"]
    """Of the patches of each view in each region."""
    valid: Bool[Tensor, "r m"]
    """Regions that both views see."""

    def rows(self) -> Float[Tensor, "rows"]:
        """Which rows of region vectors count, those of the first view before those of the second."""
        return self.valid.flatten().repeat(2).float()


class Croc(SelfDistillation):
    """DINO on two crops, and the same on the regions that the teacher's keys cluster into."""

    def __init__(
        self,
        backbone: VisionTransformer,
        head: ProjectionHead,
        regions: RegionConfig,
        *,
        teacher: TeacherConfig | None = None,
        student_temperature: float = 0.1,
        fused: bool = True,
    ) -> None:
        super().__init__(
            backbone,
            head,
            {"dino": 1.0, "region": regions.weight},
            teacher=teacher,
            student_temperature=student_temperature,
            fused=fused,
        )
        self.regions = regions

    def forward(  # type: ignore[override]
        self, batch: RegionBatch, values: Mapping[str, Warmth], generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """The student's frame tokens and regions of a view predict the teacher's of the other."""
        views = batch.views
        with torch.no_grad():
            seen = self.teacher.backbone(views.teacher_crops, wanted="keys")
            found = self.find_regions(seen, batch)
            about_frames, nothing = self.teach(views, seen._replace(patches=seen.patches[:0]), values)
            about_regions = self.teach_regions(seen, found, values)
        tokens = self.student.backbone(views.global_crops, None, generator)
        self.take_health_sample(views, seen, about_frames, nothing, {})
        if self.observing:
            self.health_sample["regions"] = found.valid.float()
        frames = self.student_frames(views, tokens.frame, generator)
        regions = self.region_vectors(tokens, found)
        head = self.student.head
        frame_rows, region_rows = head.project(torch.cat([frames, regions])).tensor_split([len(frames)])
        counted = self.region_weights(found, views)
        (prototypes, of_regions), temperature = head.weights(), self.student_temperature
        if not self.fused:
            outputs = region_rows @ of_regions.T
            region = losses.patch_loss(about_regions.targets(), outputs, counted, temperature, 1)
            return {"dino": self.plain_dino(views, about_frames, frames), "region": region}
        region, _, _ = fused_patch_sums(
            region_rows[None], of_regions, about_regions, counted, temperature, kernels=self.kernels
        )
        dino = self.dino(views, about_frames, frame_rows, prototypes)
        return {"dino": dino, "region": region[0]}

    @torch.no_grad()
    def find_regions(self, seen: Tokens, batch: RegionBatch) -> Found:
        """Cluster the patches of both views of each image by the teacher's keys, head by head, in fp32."""
        assert seen.keys is not None
        settings, heads = self.regions, self.teacher.backbone.num_heads
        prefix, videos = self.teacher.backbone.num_prefix, batch.seeds.shape[0]
        with torch.autocast(seen.keys.device.type, enabled=False):
            keys = F.normalize(seen.keys.float().unflatten(2, (heads, -1)), dim=-1)
            keys = keys.unflatten(0, (2, videos)).permute(1, 3, 0, 2, 4).flatten(0, 1)  # row, view, token
            tokens = keys[:, :, prefix:].flatten(1, 2)
            grid = round(seen.patches.shape[1] ** 0.5)
            places = patch_positions(batch.boxes.flatten(0, 1), batch.flips.flatten(), grid)
            places = places.unflatten(0, (2, videos)).transpose(0, 1).flatten(1, 2)
            marginal = seed_probability(tokens, keys[:, :, 0], settings.marginal_temperature)
            seeds = self.draw_seeds(marginal, batch)
            images = videos if self.regions.cost_range == "image" else None
            plans = cluster(tokens, places.repeat_interleave(heads, 0), marginal, seeds, settings, images)
            weights = assign(plans, settings.most)
            return Found(weights, (weights.sum(dim=2) > 0).all(dim=0))

    def draw_seeds(self, marginal: Float[Tensor, "r t"], batch: RegionBatch) -> Int64[Tensor, "r k"]:
        """Distinct tokens that clusters start from, by their likeness to the frame token."""
        noise = sample_noise(batch.seeds, marginal.numel() // len(batch.seeds))
        return draw_distinct(marginal, noise.view(marginal.shape), self.regions.seeds)

    def region_vectors(self, tokens: Tokens, found: Found) -> Float[Tensor, "rows d"]:
        """Weighted sums of patches, as long as frame tokens are on average; first view, then second."""
        with torch.autocast(tokens.frame.device.type, enabled=False):
            length = tokens.frame.float().norm(dim=1).mean()
            if self.regions.mean_over == "all":
                length = self.peers.rows(length[None]).mean()
            heads = self.teacher.backbone.num_heads
            patches = tokens.patches.float().unflatten(0, (2, -1))
            weights = found.weights.unflatten(1, (-1, heads))
            pooled = torch.einsum("vbhnm,vbnd->vbhmd", weights, patches)
            return F.normalize(pooled, dim=-1).flatten(0, 3) * length

    def region_weights(self, found: Found, views: Batch) -> Float[Tensor, "rows"]:
        """Shares of the rows in the step's loss: the mean over both views and all regions that count.

        A mean over the regions of a process (or part of a step) weighs as much as it has videos.
        """
        rows, share = found.rows(), len(views.global_crops) / (2 * views.counts.videos)
        if self.regions.mean_over == "process":
            return rows * share / rows.sum().clamp(min=1)
        return rows * share * self.peers.size / self.peers.total(rows.sum()).clamp(min=1)

    @torch.no_grad()
    def teach_regions(self, seen: Tokens, found: Found, values: Mapping[str, Warmth]) -> TeacherTargets:
        """Targets of each region: what the teacher makes of it in the other view."""
        head = self.teacher.head
        bottleneck = head.project(self.region_vectors(seen, found)).to(working_dtype(seen.frame))
        prototypes, rows = head.weights()[1].to(bottleneck.dtype), found.rows()
        temperature = values.get("patch_teacher_temperature", values["teacher_temperature"])
        if self.targets == "centering":
            total = (bottleneck.float() * rows[:, None]).sum(dim=0)
            self.patch_center.observe(prototypes.float() @ total, rows.sum())
        crossed = bottleneck.unflatten(0, (2, -1)).flip(0).flatten(0, 1)
        asked = TeacherTargets(crossed, prototypes, self.patch_center.value, temperature)
        if self.targets == "centering":
            return asked
        outputs = asked.outputs(slice(None))
        return losses.given_targets(
            losses.sinkhorn_targets(outputs, temperature, peers=self.peers, counted=rows)
        )

    def in_fixed_shapes(self, batch: RegionBatch) -> RegionBatch:  # type: ignore[override]
        """It has no masks."""
        return batch

    def fixed_shapes(self, videos: int, batch: int) -> bool:
        """Regions that are not there weigh nothing, but have their rows."""
        return True

    def health(self, rows: Mapping[str, Tensor], losses: Mapping[str, float]) -> Health:
        """DINO's figures, and how many regions a head finds in an image."""
        health = super().health(rows, losses)
        count = float(rows["regions"].sum(dim=1).mean())
        line = f"{health.line}  region {losses['region']:.3f} ({count:.1f} an image and head)"
        return replace(health, figures={**health.figures, "regions": count}, line=line)


class Odin(Contrast):
    """DetCon's contrast on regions that k-means finds in the features of a discovery network."""

    graphed_health = False  # it looks at the regions that there are

    def __init__(
        self,
        backbone: VisionTransformer,
        projector: Projector,
        predictor: Projector | None,
        settings: ObjectContrastConfig,
        discovery: DiscoveryConfig,
    ) -> None:
        momentum, temperature = settings.momentum, settings.temperature
        super().__init__(
            backbone, projector, predictor, ContrastConfig(temperature=temperature, momentum=momentum)
        )
        self.finding = discovery
        # By default the discovery network is the teacher's backbone: both start and move alike.
        own = discovery.momentum is not None
        self.discovery = copy.deepcopy(backbone).requires_grad_(False) if own else None

    def forward(  # type: ignore[override]
        self, batch: RegionBatch, values: Mapping[str, float], generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """Discover regions, pool both views over them, and let each region find itself in the other view."""
        crops, videos, clusters = batch.views.global_crops, batch.seeds.shape[0], self.finding.clusters
        with torch.no_grad():
            assert self.teacher is not None
            labels = self.discover(batch)
            seen, present = self._pooled(self.teacher.backbone(crops, stochastic_depth=False).patches, labels)
            valid = present.unflatten(0, (2, videos)).all(dim=0)  # masks that are empty in a view drop out
            counted = valid.flatten().expand(2, -1)
            keys = F.normalize(self.teacher.projector(seen, counted, self.peers), dim=-1)
        pooled, _ = self._pooled(self.student.backbone(crops, None, generator).patches, labels)
        queries = self.predict(self.student.projector(pooled, counted, self.peers), counted)
        ids = torch.where(valid, torch.arange(clusters, device=valid.device), -1)
        every_key = self.peers.rows(keys.unflatten(1, (videos, clusters)).transpose(0, 1).contiguous())
        rows = object_contrast_rows(
            queries.unflatten(1, (videos, clusters)),
            every_key.transpose(0, 1),
            ids.expand(2, -1, -1),
            self.peers.rows(ids).expand(2, -1, -1),
            self.settings.temperature,
            first=self.peers.rank * videos,
        )
        if self.observing:
            self.take_health_sample(pooled[:, counted[0]].flatten(0, 1), queries[:, counted[0]])
        return {"contrast": rows.sum() / self.peers.total(valid.sum().float()).clamp(min=1)}

    def _pooled(self, patches: Tensor, labels: Tensor) -> tuple[Float[Tensor, "2 r d"], Tensor]:
        """Mean features of each mask, by view, and which masks a view has."""
        with torch.autocast(patches.device.type, enabled=False):
            pooled, present = pool(patches.float(), labels, self.finding.clusters)
        return pooled.unflatten(0, (2, -1)).flatten(1, 2), present

    @torch.no_grad()
    def discover(self, batch: RegionBatch) -> Int64[Tensor, "two_b n"]:
        """Labels of the patches of both views, carried over from those of the view around them."""
        assert self.teacher is not None
        assert batch.around is not None
        assert batch.around_box is not None
        network = self.discovery or self.teacher.backbone
        features = network(batch.around, stochastic_depth=False).patches
        with torch.autocast(features.device.type, enabled=False):
            noise = sample_noise(batch.seeds, features.shape[1])
            start = draw_distinct(torch.ones_like(noise), noise, self.finding.clusters)
            labels = k_means(features, start, self.finding.iterations)
        grid = batch.views.global_crops.shape[-1] // network.patch_size
        views = zip(batch.boxes, batch.flips, strict=True)
        return torch.cat([carry_labels(labels, batch.around_box, *view, grid) for view in views])

    def values(self, step: int, length: Length) -> dict[str, float]:
        """Momenta of the teacher and of a discovery network of its own."""
        momenta = {"momentum": self.settings.momentum, "discovery_momentum": self.finding.momentum}
        return {name: cosine(step, *m, length.num_steps) for name, m in momenta.items() if m is not None}

    @torch.no_grad()
    def finish_step(self, values: Mapping[str, float]) -> None:
        """Let teacher and discovery network follow the student."""
        super().finish_step(values)
        if self.discovery is not None and values["discovery_momentum"] < 1:
            student = self.student.backbone.parameters()
            follow(self.discovery.parameters(), student, values["discovery_momentum"])

    def backbones(self) -> list[VisionTransformer]:
        """Those of student, teacher and discovery network."""
        return super().backbones() + ([] if self.discovery is None else [self.discovery])


def build_croc(config: Config, settings: CrocSettings) -> Croc:
    """CrOC's networks, with weights drawn from torch's generator."""
    backbone = build_backbone(config)
    head = build_head(settings.head, config.vit.dim)
    student_temperature = settings.loss.student_temperature
    return Croc(
        backbone, head, settings.regions, teacher=settings.teacher, student_temperature=student_temperature
    )


def build_odin(config: Config, settings: OdinSettings) -> Odin:
    """ODIN's networks, with weights drawn from torch's generator; discovery may start from a run."""
    backbone = build_backbone(config)
    projectors = build_projectors(settings.projector, settings.predictor, config.vit.dim, bias=True)
    method = Odin(backbone, *projectors, settings.contrast, settings.discovery)
    if settings.discovery.init is not None and method.discovery is not None:
        load_discovery(method.discovery, settings.discovery.init)
    return method


def load_discovery(network: VisionTransformer, run: str) -> None:
    """Give a discovery network the encoder of a run of the same sizes."""
    path = Path(run) / "encoder.safetensors"
    try:
        network.load_state_dict(load_safetensors(path))
    except (OSError, InputError, SafetensorError, ValueError, RuntimeError) as error:
        last = str(error).splitlines()[-1].strip()
        why = f"does not fit: {last}" if path.is_file() else "is missing"
        raise InputError(f"discovery.init={run}: {path} {why}; give a run of the same encoder.") from error
