"""Groups of settings of the methods: masks, heads, teachers, losses, projectors, contrast, regions."""

from dataclasses import dataclass
from typing import Literal

from tcore.methods.limits import (
    AtLeastZero,
    Count,
    Momenta,
    Positive,
    Share,
    Shares,
    Temperatures,
    TwoOrMore,
    Weight,
)

MaskKind = Literal["block", "random"]
MaskDraw = Literal["stratified", "independent"]
Targets = Literal["centering", "sinkhorn"]


@dataclass(frozen=True)
class MaskingConfig:
    """What the student does not see."""

    probability: Share = 0.5
    """Share of the global crops that carry a mask."""
    ratio: Shares = (0.1, 0.5)
    """Share of the patches that are masked in such a crop."""
    kind: MaskKind = "block"
    """Blocks, or independent patches."""
    group: Count = 32
    """Videos that share one set of stratified masks."""
    draw: MaskDraw = "stratified"
    """An exact share of the crops with evenly spread ratios, or every crop draws independently (iBOT)."""
    smallest_block: Count = 4
    """Patches of the smallest block (iBOT: 16, on a grid of 14 x 14)."""
    largest_block: Count | None = None
    """Patches of the largest block (DINOv2: 98), or no limit."""
    fill: bool = True
    """Mask single patches where no block fits any more; without it, such masks fall short of their ratio."""


@dataclass(frozen=True)
class HeadConfig:
    """The projection head."""

    hidden: Count = 2048
    """Width of the hidden layers."""
    bottleneck: Count = 256
    """Width of the normalized bottleneck."""
    prototypes: TwoOrMore = 65536
    """Number of prototypes K; a loss of ln K is the uniform answer."""
    train_gains: bool = True
    """Train the prototypes' gains, or fix them at 1."""


@dataclass(frozen=True)
class TeacherConfig:
    """The teacher: how it follows the student, and how its targets are made."""

    momentum: Momenta = (0.992, 1.0)
    """Momentum of the moving average, first to last step."""
    temperature: Temperatures = (0.04, 0.07)
    """Temperature of the targets, before and after its warm-up."""
    temperature_epochs: AtLeastZero = 30
    """Epochs of that warm-up (7.5% of a run whose length is given in steps)."""
    temperature_by: Literal["step", "epoch"] = "step"
    """Whether the warm-up moves with every step, or once an epoch."""
    targets: Targets = "centering"
    """How the targets are kept from collapsing."""
    center_momentum: Share = 0.9
    """Momentum of the centers."""


@dataclass(frozen=True)
class FrameMaskingConfig(MaskingConfig):
    """What the student does not see, and from when on."""

    start_epoch: AtLeastZero = 0
    """First epoch with masks, from which the warm-up of the patches' own temperature counts too."""


@dataclass(frozen=True)
class PatchHeadConfig(HeadConfig):
    """The projection head of frames and patches."""

    patch_prototypes: TwoOrMore | None = None
    """Number of prototypes that patches have for themselves; None: those of frames."""


@dataclass(frozen=True)
class PatchTeacherConfig(TeacherConfig):
    """The teacher of frames and patches."""

    patch_temperature: Temperatures | None = None
    """Temperature of the patches' targets, before and after the warm-up; None: that of frames."""
    patch_center: Literal["masked", "all"] = "masked"
    """Which patches the patches' center is the mean of."""


@dataclass(frozen=True)
class PredictionConfig:
    """The student's predictions."""

    student_temperature: Positive = 0.1
    """Temperature of the student's predictions."""

    def weights(self) -> dict[str, float]:
        """The weights by the names of the losses."""
        return {"dino": 1.0}


@dataclass(frozen=True)
class PatchLossConfig(PredictionConfig):
    """Weights of the losses of frames and patches; a weight of 0 leaves a term out."""

    dino: Weight = 1.0
    """Weight of the loss of frames."""
    patch_teacher: Weight = 1.0
    """Weight of the loss of masked patches."""
    koleo: Weight = 0.0
    """Weight of KoLeo."""
    koleo_global: bool = False
    """Neighbors of KoLeo among the videos of all processes, not of the own process (as published)."""

    def weights(self) -> dict[str, float]:
        """The weights by the names of the losses."""
        return {"dino": self.dino, "koleo": self.koleo, "patch_teacher": self.patch_teacher}


# Contrast and regions: projectors, what is compared, how regions are found.


LastNorm = Literal["none", "plain", "scale"]


@dataclass(frozen=True)
class ProjectorConfig:
    """The projector: linear layers, with batch norm and ReLU between them."""

    layers: Count = 3
    """Number of linear layers."""
    hidden: Count = 4096
    """Width between them."""
    out: Count = 256
    """Width of what is compared."""
    last_norm: LastNorm = "plain"
    """Batch norm after the last layer: none, one without parameters, or one with a scale."""


@dataclass(frozen=True)
class PredictorConfig:
    """The predictor behind the student's projector."""

    layers: AtLeastZero = 2
    """Number of linear layers; 0 is no predictor."""
    hidden: Count = 4096
    """Width between them."""
    last_norm: LastNorm = "plain"
    """Batch norm after the last layer."""


@dataclass(frozen=True)
class ContrastConfig:
    """How views are compared."""

    temperature: Positive = 0.2
    """Temperature of the similarities."""
    negatives: Literal["other-view", "both-views"] = "other-view"
    """What a view is compared with: the other views of all samples (MoCo v3), or both (SimCLR)."""
    norm_over: Literal["view", "both"] = "view"
    """Rows that a batch norm is computed over: those of each view separately, or of both."""
    scale: Literal["mean", "2 tau"] = "2 tau"
    """The loss: mean over both views, or 2 * temperature times the sum of their means (MoCo v3)."""
    momentum: Momenta | None = (0.99, 1.0)
    """Momentum of the encoder that makes the keys, first to last step; None: there is none (SimCLR)."""


@dataclass(frozen=True)
class RegionConfig:
    """CrOC's regions: how the patches of two views are clustered, and what is asked of a region."""

    weight: Weight = 1.0
    """Weight of the region loss."""
    seeds: TwoOrMore = 5
    """Tokens that clusters start from; two clusters at a time become one."""
    most: TwoOrMore = 4
    """Largest number of regions of a head; the cheapest number from 2 to it is taken."""
    position_weight: Weight = 4.0
    """Weight of the distance in the frame beside the similarity of keys."""
    sharpness: Positive = 20.0
    """Factor on costs in the exponent of Sinkhorn's plan."""
    iterations: Count = 5
    """Rounds of Sinkhorn."""
    marginal_temperature: Positive = 2.0
    """Temperature of the likeness to the frame token, by which patches weigh."""
    cost_range: Literal["process", "image"] = "process"
    """What costs are brought to [0, 1] by: their range over all images of a process, or in each image."""
    mean_over: Literal["process", "all"] = "process"
    """What the loss is a mean over: regions of each process (as published), or of all processes."""


@dataclass(frozen=True)
class ObjectContrastConfig:
    """How regions are compared."""

    temperature: Positive = 0.1
    """Temperature of the similarities."""
    momentum: Momenta = (0.996, 1.0)
    """Momentum of the teacher, first to last step."""


@dataclass(frozen=True)
class DiscoveryConfig:
    """How ODIN discovers regions: by k-means on the features of a discovery network."""

    clusters: TwoOrMore = 8
    """Regions of an image."""
    iterations: Count = 10
    """Rounds of k-means."""
    momentum: Momenta | None = None
    """Momentum of a discovery network of its own; None: it is the teacher's encoder. 1 1 keeps it fixed."""
    init: str | None = None
    """A run folder whose encoder the discovery network starts from (ODIN2, with --discovery.momentum 1 1)."""
