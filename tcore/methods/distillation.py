"""Self-distillation: a student predicts what a slowly moving teacher makes of other views.

The parts that DINO (arXiv:2104.14294), iBOT (arXiv:2111.07832), DINOv2 (arXiv:2304.07193) and T-CoRe share.
"""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from tcore.config import Config
from tcore.data.source import Counts
from tcore.methods.health import Health, State, effective_rank, entropy, mean_cosine
from tcore.methods.method import Method, Part, named_parameters, own_shares, some_rows
from tcore.methods.schedules import Length, cosine, warmup_linear
from tcore.methods.settings import DinoSettings, HeadConfig, Targets, TeacherConfig
from tcore.model import losses
from tcore.model.attention import working_dtype
from tcore.model.fused import fused_frame_sum
from tcore.model.heads import ProjectionHead
from tcore.model.losses import TeacherTargets
from tcore.model.subset import Subset, Wanted
from tcore.model.vit import VisionTransformer, build_vit

# Targets that differ by less than this (in nats) distinguish nothing; this close to ln K they are uniform.
NOTHING_DISTINGUISHED, UNIFORM = 0.01, 0.9
# The student has learned something of the targets once it beats the uniform answer by this share.
BETTER_THAN_UNIFORM = 0.005
# Fewer prototypes than this in use, features that vary in fewer directions, or frames more alike than this.
COLLAPSE_PROTOTYPES, COLLAPSE_RANK, COLLAPSE_COSINE = 2.0, 1.5, 0.999
# From fewer frames than these no collapse can be told.
FEWEST_FRAMES = 16
HEALTH_CROPS = 16  # crops whose patches are looked at where the losses need none


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

    def at_masked(self, patches: Float[Tensor, "m n d"]) -> Float[Tensor, "h d"]:
        """The tokens of masked crops at their masked patches."""
        return patches.flatten(0, 1)[self.masked_patches]


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

    def send(x: Tensor) -> Tensor:
        # A copy from memory that is not pinned would wait for the pixels that are being made.
        on_its_way = device.type == "cuda" and not x.is_cuda
        return x.pin_memory().to(device, non_blocking=True) if on_its_way else x.to(device)

    return Batch(
        global_crops=global_crops,
        local_crops=global_crops[:0] if local_crops is None else local_crops,
        teacher_crops=global_crops if teacher_crops is None else teacher_crops,
        mask=send(mask),
        masked=send(torch.from_numpy(masked)),
        order=send(torch.from_numpy(order)),
        masked_patches=send(torch.from_numpy(patches)),
        patch_weights=send(torch.from_numpy(weights)),
        counts=counts or Counts(mask.shape[0] // 2, len(masked), len(patches)),
        past=past,
        future=future,
    )


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


class SelfDistillation(Method):
    """Student, teacher and centers: what all methods of self-distillation share; by itself it is DINO.

    >>> backbone = VisionTransformer(dim=48, depth=1, num_heads=3, image_size=32, num_registers=0)
    >>> head = ProjectionHead(dim=48, hidden=64, bottleneck=16, num_prototypes=32)
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
        targets: Targets = "centering",
        student_temperature: float = 0.1,
        center_momentum: float = 0.9,
        fused: bool = True,
    ) -> None:
        super().__init__(weights)
        self.schedule = teacher or TeacherConfig()
        self.targets, self.fused, self.student_temperature = targets, fused, student_temperature
        self.student = Network(backbone, head)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        num_prototypes = head.prototypes.directions.shape[0]
        self.frame_center = Center(num_prototypes, center_momentum)
        self.patch_center = Center(num_prototypes, center_momentum)
        self.train()

    def train(self, mode: bool = True) -> "SelfDistillation":
        """Switch the student; the teacher always evaluates."""
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(
        self, batch: Batch, values: Mapping[str, float], generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """DINO: the student's frame tokens of all crops predict the teacher's of the global ones."""
        with torch.no_grad():
            seen = self.teacher.backbone(batch.teacher_crops, wanted="frames").frame
            targets, _ = self.teach(seen, seen[:0], values["teacher_temperature"])
            if self.observing:  # losses need no patches: they are made for the health figures alone
                patches = self.teacher.backbone(batch.teacher_crops[:HEALTH_CROPS]).patches
                self.take_health_sample(seen, patches, targets)
        global_ = self.student.backbone(batch.global_crops, None, generator, wanted="frames")
        frames = self.student_frames(batch, global_.frame, generator)
        if not self.fused:
            return {"dino": self.plain_dino(batch, targets, frames)}
        head = self.student.head
        return {"dino": self.dino(batch, targets, head.project(frames), head.prototypes.weights())}

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
        self, frames: Float[Tensor, "f d"], patches: Float[Tensor, "h d"], temperature: float
    ) -> tuple[TeacherTargets, TeacherTargets]:
        """What the teacher asks for, of frames and at masked patches; its centers take note."""
        head = self.teacher.head
        bottleneck = head.project(torch.cat([frames, patches])).to(working_dtype(frames))
        prototypes = head.prototypes.weights().to(bottleneck.dtype)
        centers = (self.frame_center, self.patch_center)
        rows = bottleneck.split([frames.shape[0], patches.shape[0]])
        asked = [
            TeacherTargets(part, prototypes, center.value, temperature)
            for part, center in zip(rows, centers, strict=True)
        ]
        if self.targets == "sinkhorn":
            outputs = [targets.outputs(slice(None)) for targets in asked]
            asked = [
                losses.given_targets(losses.sinkhorn_targets(x, temperature, peers=self.peers))
                for x in outputs
            ]
        else:
            for targets, center in zip(asked, centers, strict=True):
                center.observe(targets.total(), targets.count)
        return asked[0], asked[1]

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
        teacher, now = self.schedule, step
        steps = length.warmup(teacher.temperature_epochs, 0.075)
        if teacher.temperature_by == "epoch":
            now, steps = step // length.steps_per_epoch, -(-steps // length.steps_per_epoch)
        return {
            "momentum": cosine(step, *teacher.momentum, length.num_steps),
            "teacher_temperature": warmup_linear(now, *teacher.temperature, steps),
            "student_temperature": self.student_temperature,
        }

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
        student, teacher = (own_shares(network.parameters()) for network in (self.student, self.teacher))
        torch._foreach_lerp_(teacher, student, 1 - values["momentum"])
        if self.targets == "centering":
            self.frame_center.update()
            self.patch_center.update()

    def parts(self) -> dict[str, Part]:
        """Backbone and head of the student."""
        return {
            "backbone": Part(named_parameters(self.student.backbone)),
            "head": Part(named_parameters(self.student.head), last_layer="prototypes."),
        }

    def encoder(self) -> VisionTransformer:
        """The teacher's backbone."""
        return self.teacher.backbone

    def backbones(self) -> list[VisionTransformer]:
        """Those of student and teacher."""
        return [self.student.backbone, self.teacher.backbone]

    def take_health_sample(
        self,
        frames: Tensor,
        patches: Tensor,
        about_frames: TeacherTargets,
        about_patches: TeacherTargets | None = None,
        restored: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Keep a few rows of everything, where the step is observed."""
        if not self.observing:
            return

        def rows(x: Tensor) -> Tensor:
            return x.detach()[some_rows(len(x), self.health_rows)].float().clone()

        def targets(asked: TeacherTargets) -> Tensor:
            return asked.targets(some_rows(asked.count, self.health_rows))

        self.health_sample = {"frames": rows(frames), "patches": rows(patches.flatten(0, 1))}
        self.health_sample["frame_targets"] = targets(about_frames)
        if about_patches is not None:
            self.health_sample["patch_targets"] = targets(about_patches)
        if restored is not None and "past" in restored and "future" in restored:
            self.health_sample |= {f"from_{side}": rows(restored[side]) for side in ("past", "future")}

    def health(self, rows: Mapping[str, Tensor], losses: Mapping[str, float]) -> Health:
        """Ranks of the features, and what the targets distinguish."""
        return measure_health(rows, losses["dino"])


def measure_health(rows: Mapping[str, Tensor], dino: float) -> Health:
    """The health figures of one step from a sample of its rows and its DINO loss."""
    targets, uniform = rows["frame_targets"], math.log(rows["frame_targets"].shape[1])
    target_entropy = float(entropy(targets).mean())
    entropy_of_mean = float(entropy(targets.mean(dim=0)))
    figures = {
        # Effective ranks of the teacher's frame and patch tokens.
        "frame_rank": effective_rank(rows["frames"]),
        "patch_rank": effective_rank(rows["patches"]),
        # Effective number of prototypes in the mean target: exp of its entropy.
        "prototypes_used": math.exp(entropy_of_mean),
        # Mean entropy of a target, in nats; ln K is uniform.
        "target_entropy": target_entropy,
        # Entropy of the mean target minus mean entropy of the targets, in nats: what targets distinguish.
        "target_information": entropy_of_mean - target_entropy,
        # Mean cosine between the frame tokens of different crops.
        "frame_cosine": mean_cosine(rows["frames"]),
    }
    if len(rows.get("from_past", ())):
        # Cosine of what is restored from the past and from the future.
        cosines = F.cosine_similarity(rows["from_past"], rows["from_future"], dim=-1)
        figures["past_future_cosine"] = float(cosines.mean())
    ranks = (figures["frame_rank"], figures["patch_rank"])
    collapsed = len(targets) >= FEWEST_FRAMES and (
        figures["prototypes_used"] < COLLAPSE_PROTOTYPES
        or min(ranks) < COLLAPSE_RANK
        or figures["frame_cosine"] > COLLAPSE_COSINE
    )
    information = figures["target_information"]
    state = judge(collapsed, target_entropy / uniform, information, dino / uniform)
    line = (
        f"dino {dino:.3f} (ln K {uniform:.2f})  {state} (rank {ranks[0]:.1f}/{ranks[1]:.1f}, "
        f"targets {target_entropy:.2f} nats each, {information:.2f} distinguished)"
    )
    warning = (
        f"collapse: {figures['prototypes_used']:.1f} prototypes in use, effective rank {ranks[0]:.1f} "
        f"(frames) and {ranks[1]:.1f} (patches). The encoder distinguishes nothing; try "
        "--teacher.targets sinkhorn, a lower --optim.base-lr or a higher --teacher.temperature."
    )
    return Health(state, figures, line, warning if state == "collapse" else None)


def judge(collapsed: bool, entropy_share: float, information: float, dino_share: float) -> State:
    """Plateau: targets distinguish nothing, or the student does no better than the uniform answer.

    Shares are of ln K. At the start of a long run all frames are alike and all targets uniform: a plateau,
    not a collapse. Early losses can lie below ln K while all targets are the same: no learning either.
    """
    nothing = information < NOTHING_DISTINGUISHED
    if nothing and entropy_share > UNIFORM:
        return "plateau"
    if collapsed:
        return "collapse"
    return "plateau" if nothing or dino_share > 1 - BETTER_THAN_UNIFORM else "learning"


def build_head(head: HeadConfig, dim: int) -> ProjectionHead:
    """The projection head of a run."""
    return ProjectionHead(
        dim=dim,
        hidden=head.hidden,
        bottleneck=head.bottleneck,
        num_prototypes=head.prototypes,
        train_gains=head.train_gains,
    )


def build_dino(config: Config, settings: DinoSettings) -> SelfDistillation:
    """DINO's networks, with weights drawn from torch's generator."""
    backbone = build_vit(config.vit, config.views.global_size)
    backbone.mask_token.requires_grad_(False)  # nothing is masked
    return SelfDistillation(
        backbone,
        build_head(settings.head, config.vit.dim),
        {"dino": 1.0},
        teacher=settings.teacher,
        targets=settings.teacher.targets,
        student_temperature=settings.loss.student_temperature,
        center_momentum=settings.teacher.center_momentum,
    )
