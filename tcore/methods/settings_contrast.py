"""Groups of settings of contrast and regions: projectors, what is compared, how regions are found."""

from dataclasses import dataclass
from typing import Literal

from tcore.methods.limits import (
    AtLeastZero,
    Count,
    Momenta,
    Positive,
    TwoOrMore,
    Weight,
)

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
    """Rows that a batch norm counts: those of each view by itself, or of both."""
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
