"""The settings of a run: frozen and typed; a run is a value."""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Literal

MaskKind = Literal["block", "random"]
Sides = Literal["past-future", "past-past", "future-future"]
AuxiliaryBox = Literal["central", "current"]
Auxiliary = Literal["none", "past", "future", "both"]
LossForm = Literal["paper", "release"]
Targets = Literal["centering", "sinkhorn"]
Range = tuple[float, float]
Compile = Literal["auto", "on", "off"]
Sharding = Literal["replicate", "shard"]
Reach = int | Literal["everywhere"] | None
"""How far patches are to look where an encoder is used; None: as it was trained."""


@dataclass(frozen=True)
class SandwichConfig:
    """Which three frames make a sample."""

    current: Range = (0.3, 0.7)
    """Where the current frame lies, as fractions of the video."""
    offset: Range = (0.15, 0.25)
    """Distance of past and future from it, as fractions of the video."""
    offset_seconds: Range | None = None
    """The same in seconds instead, for videos that are not about 10 s long."""
    frames: Sides = "past-future"
    """Sides that the two auxiliary frames come from."""
    short_videos: Literal["skip", "repeat"] = "skip"
    """Leave out videos too short for an offset of one frame, or repeat their frames."""
    cuts: Literal["ignore", "split"] = "ignore"
    """Where the store knows shot cuts: cross them (as published), or treat each shot as a video."""


@dataclass(frozen=True)
class ViewsConfig:
    """Crops of the current frame."""

    global_size: int = 224
    """Side of the two global crops and of the auxiliary views, in pixels."""
    local_size: int = 96
    """Side of the local crops, in pixels."""
    num_local: int = 8
    """Number of local crops."""
    global_area: Range = (0.32, 1.0)
    """Area of a global crop, as a share of the frame."""
    local_area: Range = (0.05, 0.32)
    """Area of a local crop, as a share of the frame."""
    auxiliary_box: AuxiliaryBox = "central"
    """What the auxiliary views show: the middle of their frame, or the box of the global crop they serve."""
    color: float = 1.0
    """How often colors change (jitter, gray, solarised), as a share of how often they do as published."""
    fixed_space: bool = True
    """Student and teacher see the same box (table 3b turns it off; needs --auxiliary none)."""
    fixed_time: bool = True
    """Student and teacher see the same frame (table 3b turns it off; needs --auxiliary none)."""


@dataclass(frozen=True)
class MaskingConfig:
    """What the student does not see."""

    probability: float = 0.5
    """Share of the global crops that carry a mask."""
    ratio: Range = (0.1, 0.5)
    """Share of the patches that are masked in such a crop."""
    kind: MaskKind = "block"
    """Blocks, or independent patches."""
    group: int = 32
    """Videos that share one set of stratified masks."""


@dataclass(frozen=True)
class VitSpec:
    """The frame encoder."""

    dim: int = 384
    """Width: 192 (Ti), 384 (S), 768 (B), 1024 (L)."""
    depth: int = 12
    """Number of blocks: 12, or 24 for L."""
    num_heads: int = 6
    """Attention heads: 3 (Ti), 6 (S), 12 (B), 16 (L)."""
    patch_size: int = 16
    """Side of a patch, in pixels."""
    num_registers: int = 4
    """Extra tokens that hold no place in the image."""
    layer_scale: float = 1e-5
    """Initial gain of the residuals; 1e-5 is published, the short recipes have 1."""
    drop_path: float = 0.1
    """Stochastic depth of the student: share of the samples that skip a residual."""
    auxiliary_drop_path: bool = True
    """Stochastic depth in the auxiliary branch too, as released."""
    position_std: float = 0.02
    """Spread of the position embedding at the start; patches have about 1, so that 0.02 is learned late."""
    reach: int | None = None
    """How far a patch looks, in patches up, down and to the sides, or everywhere, as published."""


@dataclass(frozen=True)
class MatchingConfig:
    """The patch matching module."""

    num_heads: int = 16
    """Attention heads."""
    gain: float = 4.0
    """Factor on the cross-attention before it is added."""
    num_blocks: int = 1
    """Stacked blocks; each one's output is the current frame of the next."""
    temperature: float = 1.0
    """Temperature of the cross-attention."""


@dataclass(frozen=True)
class HeadConfig:
    """The projection head."""

    hidden: int = 2048
    """Width of the hidden layers."""
    bottleneck: int = 256
    """Width of the normalized bottleneck."""
    prototypes: int = 65536
    """Number of prototypes K; a loss of ln K is the uniform answer."""
    train_gains: bool = True
    """Train the prototypes' gains, or fix them at 1."""


@dataclass(frozen=True)
class TeacherConfig:
    """The teacher: how it follows the student, and what it asks for."""

    momentum: Range = (0.992, 1.0)
    """Momentum of the moving average, first to last step."""
    temperature: Range = (0.04, 0.07)
    """Temperature of the targets, before and after its warm-up."""
    temperature_epochs: int = 30
    """Epochs of that warm-up (7.5 % of the run where it is given in steps)."""
    targets: Targets = "centering"
    """How the targets are kept from collapsing."""
    center_momentum: float = 0.9
    """Momentum of the two centers."""


@dataclass(frozen=True)
class LossConfig:
    """Weights of the losses, and the form of the patch losses."""

    form: LossForm = "paper"
    """Patch losses as printed in the paper, or as the released code computes them."""
    dino: float = 1.0
    """Weight of L_DINO."""
    past_teacher: float = 0.8
    """Weight of L_pt."""
    future_teacher: float = 0.8
    """Weight of L_ft."""
    past_future: float = 20.0
    """Weight of L_pf."""
    koleo: float = 0.1
    """Weight of L_koleo."""
    patch_teacher: float = 1.0
    """Weight of the patch loss that takes the place of the middle three with --auxiliary none."""
    student_temperature: float = 0.1
    """Temperature of the student's predictions."""
    koleo_global: bool = False
    """Neighbors of L_koleo among the videos of all processes, not of the own process (as published)."""

    def weights(self) -> dict[str, float]:
        """The weights by the names of the losses."""
        named = dataclasses.asdict(self)
        return {
            name: named[name] for name in named if name not in ("form", "student_temperature", "koleo_global")
        }


@dataclass(frozen=True)
class OptimConfig:
    """Length, batch and optimizer."""

    epochs: int = 400
    """Length of the run; an epoch is one sandwich of every usable video."""
    steps: int | None = None
    """Length in steps; stands for epochs when given, and warm-ups become fractions of it."""
    warmup_epochs: int = 20
    """Linear warm-up of the learning rate (5 % of the run where it is given in steps)."""
    batch: int = 256
    """Videos per step, over all processes."""
    accumulate: int = 1
    """Parts that a step is computed in, to save memory; KoLeo, Sinkhorn and drop path act per part."""
    base_lr: float = 2e-3
    """Peak learning rate is this times sqrt(batch / 1024)."""
    matching_lr: float = 0.1
    """Peak learning rate of the patch matching module, as a factor on the other."""
    end_lr: float = 1e-6
    """Learning rate at the end, of both."""
    weight_decay: Range = (0.04, 0.4)
    """Weight decay, first to last step."""
    clip: float = 3.0
    """Largest gradient norm of backbone, head and matching module, each by itself."""
    betas: Range = (0.9, 0.999)
    """Momenta of AdamW."""
    eps: float = 1e-8
    """Epsilon of AdamW."""
    layer_decay: float = 1.0
    """Factor on the learning rate per layer below the last."""
    patch_embed_lr: float = 1.0
    """Further factor on that of the patch embedding."""
    freeze_last_layer_epochs: int = 0
    """Epochs in which the prototypes do not move."""
    freeze_backbone_steps: int = 0
    """First steps in which the student's backbone does not move, while head and matching module learn."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Arithmetic of the networks (auto: bf16 on CUDA, fp32 on CPU); weights and losses are always fp32."""

    @property
    def peak_lr(self) -> float:
        """Learning rate after the warm-up."""
        return self.base_lr * math.sqrt(self.batch / 1024)


@dataclass(frozen=True)
class RenderedConfig:
    """Rendered videos, the training data where no store is given."""

    videos: int = 256
    """Number of videos."""
    frames: int = 20
    """Frames of a video."""
    size: int = 128
    """Side of a frame, in pixels."""


@dataclass(frozen=True)
class RuntimeConfig:
    """How a run is carried out: no setting of the method, and free to change on resume."""

    device: str = "auto"
    """auto (CUDA where there is one), cpu, cuda, cuda:1 ..."""
    compile: Compile = "auto"
    """Compile blocks, losses and pixels with torch.compile (auto: on CUDA; takes about a minute at first)."""
    workers: int | None = None
    """Processes that read frames (default: one per core, up to 16 for each GPU; 0 for rendered videos)."""
    sharding: Sharding = "replicate"
    """Under torchrun: every process holds the whole model, or (for ViT-L and up) a share of it."""
    log_every: int = 10
    """Steps between two progress lines and health figures."""
    bad_samples: float = 0.01
    """Largest share of unreadable samples (others stand in for them) before training stops."""
    patience: float = 600.0
    """Under torchrun: seconds without a move until a process counts as hanging (first step: 6 times that)."""


@dataclass(frozen=True)
class Config:
    """A run is a value.

    >>> Config().optim.peak_lr
    0.001
    >>> Config(loss=LossConfig(past_future=0.0)).loss.weights()["past_future"]
    0.0
    """

    source: Literal["videos", "images"] = "videos"
    """What samples are drawn from: videos, or single images whose neighbors stand in for the past."""
    auxiliary: Auxiliary = "both"
    """Sides that the auxiliary branch sees; none is the self-distillation baseline."""
    init: str | None = None
    """Encoder to start from: a run folder, a checkpoint or the word default (unset: random weights)."""
    seed: int = 0
    """Everything random follows from it."""
    fps: float = 2.0
    """Frames per second of a store that does not know its own."""
    checkpoint_every: int = 500
    """Steps between two checkpoints."""
    keep_every: int | None = None
    """Steps between two encoders that are kept under encoders/ (default: 20 over the run)."""
    sandwich: SandwichConfig = field(default_factory=SandwichConfig)
    views: ViewsConfig = field(default_factory=ViewsConfig)
    masking: MaskingConfig = field(default_factory=MaskingConfig)
    vit: VitSpec = field(default_factory=VitSpec)
    matching: MatchingConfig = field(default_factory=MatchingConfig)
    head: HeadConfig = field(default_factory=HeadConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    rendered: RenderedConfig = field(default_factory=RenderedConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
