"""Settings of the training methods, with their limits beside each field; no torch, no other room."""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Literal, Self, get_args

from tcore.errors import InputError
from tcore.methods.limits import Count, Cuts, Positive, Seconds, Share, Shares, Stretch, Weight, Weights
from tcore.methods.settings_groups import (
    ContrastConfig,
    DiscoveryConfig,
    FrameMaskingConfig,
    HeadConfig,
    MaskingConfig,
    ObjectContrastConfig,
    PatchHeadConfig,
    PatchLossConfig,
    PatchTeacherConfig,
    PredictionConfig,
    PredictorConfig,
    ProjectorConfig,
    RegionConfig,
    TeacherConfig,
)

if TYPE_CHECKING:
    from tcore.config import Config

Sides = Literal["past-future", "past-past", "future-future"]
Auxiliary = Literal["none", "past", "future", "both"]
LossForm = Literal["paper", "release"]
AttentionForm = Literal["dot", "cosine", "motion"]
AttentionStart = Literal["xavier", "identity"]


@dataclass(frozen=True)
class AnySettings:
    """What the settings of every method say about it."""

    name: ClassVar[str]
    unused: ClassVar[tuple[str, ...]] = ()
    """Shared settings that have no effect on this method; a value other than the default is refused."""
    whole_step: ClassVar[bool] = False
    """Whether all samples of a step must be there at once, so that it cannot be computed in parts."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a score card must say about how an encoder was trained."""
        return ()

    @property
    def needs_neighbors(self) -> bool:
        """Whether training on images needs their nearest neighbors."""
        return False

    def without_neighbors(self) -> Self:
        """The same for images whose neighbors are not known yet."""
        return self


@dataclass(frozen=True)
class SandwichConfig:
    """Which three frames make a sample."""

    current: Stretch = (0.3, 0.7)
    """Where the current frame lies, as fractions of the video."""
    offset: Shares = (0.15, 0.25)
    """Distance of past and future from it, as fractions of the video."""
    offset_seconds: Seconds | None = None
    """The same in seconds instead, for videos that are not about 10 s long."""
    frames: Sides = "past-future"
    """Sides that the two auxiliary frames come from."""
    short_videos: Literal["skip", "repeat"] = "skip"
    """Leave out videos too short for an offset of one frame, or repeat their frames."""
    cuts: Cuts = "ignore"
    """Where the store knows shot cuts: cross them (as published), or treat each shot as a video."""
    still: Share = 0.0
    """Share of the samples whose past and future are the current frame itself (published: none)."""


@dataclass(frozen=True)
class MatchingConfig:
    """The patch matching module."""

    num_heads: Count = 16
    """Attention heads."""
    gain: float = 4.0
    """Factor on the cross-attention before it is added."""
    num_blocks: Count = 1
    """Stacked blocks; each one's output is the current frame of the next."""
    temperature: Positive = 1.0
    """Temperature of the cross-attention."""
    form: AttentionForm = "dot"
    """Cross-attention by products, as published, by cosines, or by how visible patches nearby have moved."""
    start: AttentionStart = "xavier"
    """How the projections of the cross-attention start: random, as published, or as the identity."""
    auxiliary_gradient: bool = False
    """Train the encoder through past and future, too (published: they are seen without gradient)."""


@dataclass(frozen=True)
class LossConfig:
    """Weights of the losses, and the form of the patch losses."""

    form: LossForm = "paper"
    """Patch losses as printed in the paper, or as the released code computes them."""
    dino: Weight = 1.0
    """Weight of L_DINO."""
    past_teacher: Weight = 0.8
    """Weight of L_pt."""
    future_teacher: Weight = 0.8
    """Weight of L_ft."""
    past_future: Weight = 20.0
    """Weight of L_pf."""
    koleo: Weight = 0.1
    """Weight of L_koleo."""
    patch_teacher: Weight = 1.0
    """Weight of the patch loss that takes the place of the middle three with --auxiliary none."""
    auxiliary: Weights = (1.0, 1.0)
    """Factor on the weights of L_pt, L_ft and L_pf, first to last step (published: 1 throughout)."""
    own_patches: Weight = 0.0
    """With an auxiliary branch: weight of that same patch loss in addition (published: none)."""
    student_temperature: Positive = 0.1
    """Temperature of the student's predictions."""
    koleo_global: bool = False
    """Neighbors of L_koleo among the videos of all processes, not of the own process (as published)."""

    def weights(self) -> dict[str, float]:
        """The weights by the names of the losses."""
        names = ("dino", "past_teacher", "future_teacher", "past_future", "koleo", "patch_teacher")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class TCoReSettings(AnySettings):
    """T-CoRe (CVPR 2025): sandwich sampling, patch matching across time, self-distillation."""

    name: ClassVar[str] = "tcore"

    auxiliary: Auxiliary = "both"
    """Sides that the auxiliary branch sees; none is the self-distillation baseline."""
    sandwich: SandwichConfig = field(default_factory=SandwichConfig)
    masking: MaskingConfig = field(default_factory=MaskingConfig)
    matching: MatchingConfig = field(default_factory=MatchingConfig)
    head: HeadConfig = field(default_factory=HeadConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    loss: LossConfig = field(default_factory=LossConfig)

    @property
    def needs_neighbors(self) -> bool:
        """Whether training on images needs their nearest neighbors."""
        return self.auxiliary != "none"

    def without_neighbors(self) -> Self:
        """The same without the auxiliary branch."""
        return replace(self, auxiliary="none", sandwich=SandwichConfig())

    def check(self, shared: "Config") -> None:
        """Refuse combinations that cannot work."""
        if shared.source == "images":
            self._check_images(shared)
        self._check_sandwich(shared)
        vit = shared.vit
        if self.auxiliary != "none" and vit.dim % self.matching.num_heads:
            raise InputError(
                f"matching.num_heads={self.matching.num_heads}: need a divisor of vit.dim={vit.dim}."
            )
        if self.auxiliary == "none" and self.loss.own_patches:
            raise InputError(
                f"loss.own_patches={self.loss.own_patches} has no effect with auxiliary=none: there "
                "--loss.patch-teacher is the weight of this loss."
            )
        check_blocks(self.masking, shared)

    def _check_images(self, shared: "Config") -> None:
        """An image has a neighbor in the place of the past: no future, no offsets, no other moment."""
        if self.auxiliary not in ("past", "none"):
            raise InputError(
                f"auxiliary={self.auxiliary}: with source=images one neighbor stands in for the past; "
                "use --auxiliary past (or none, for the run whose features find the neighbors)."
            )
        if self.sandwich != SandwichConfig():
            raise InputError("sandwich.* has no effect with source=images: leave those settings out.")
        if not shared.views.fixed_time or shared.views.auxiliary_box != "central":
            raise InputError(
                "views.fixed_time and views.auxiliary_box have no effect with source=images: "
                "leave those settings out."
            )

    def _check_sandwich(self, shared: "Config") -> None:
        sandwich, views = self.sandwich, shared.views
        current, offset, seconds = sandwich.current, sandwich.offset, sandwich.offset_seconds
        inside = current[0] - offset[1] >= 0 and current[1] + offset[1] <= 1
        repeats = sandwich.short_videos == "repeat"
        if seconds is None and not inside:
            raise InputError(
                f"sandwich.offset={offset} reaches outside the video from sandwich.current={current}: "
                "need current[0] - offset[1] >= 0 and current[1] + offset[1] <= 1."
            )
        if seconds is not None and repeats:
            raise InputError(
                f"sandwich.short_videos=repeat does not go with sandwich.offset_seconds={seconds}: use skip."
            )
        if seconds is None and offset[0] == 0 and not repeats:
            raise InputError(f"sandwich.offset={offset} makes every video too short: start above 0.")
        if self.auxiliary != "none" and not (views.fixed_space and views.fixed_time):
            raise InputError(
                f"views.fixed_space={views.fixed_space}, views.fixed_time={views.fixed_time} is an "
                f"ablation without auxiliary branch, but auxiliary={self.auxiliary}: add --auxiliary none."
            )
        if sandwich.frames != "past-future" and self.auxiliary != "both":
            raise InputError(
                f"sandwich.frames={sandwich.frames} chooses the sides of two auxiliary frames, "
                f"but auxiliary={self.auxiliary}: use --auxiliary both."
            )


@dataclass(frozen=True)
class FrameConfig:
    """Which frame of a video makes a sample, for methods that know no time."""

    current: Stretch = (0.3, 0.7)
    """Where the frame lies, as fractions of the video; 0 1 is any frame."""
    cuts: Cuts = "ignore"
    """Where the store knows shot cuts: ignore them, or treat each shot as a video."""


@dataclass(frozen=True)
class FrameSettings(AnySettings):
    """What methods share that know no time: a sample is one frame of a video, or an image."""

    unused: ClassVar[tuple[str, ...]] = (
        "views.auxiliary_box",
        "views.fixed_space",
        "views.fixed_time",
        "vit.auxiliary_drop_path",
        "optim.matching_lr",
    )
    local_crops: ClassVar[bool] = True
    """Whether local crops have a use."""

    frame: FrameConfig = field(default_factory=FrameConfig)

    def check(self, shared: "Config") -> None:
        """Refuse combinations that cannot work."""
        if shared.source == "images" and self.frame != FrameConfig():
            raise InputError("frame.* has no effect with source=images: leave those settings out.")
        if shared.views.num_local and not self.local_crops:
            count = shared.views.num_local
            raise InputError(
                f"views.num_local={count} has no effect on {self.name}: use --views.num-local 0."
            )


@dataclass(frozen=True)
class DinoSettings(FrameSettings):
    """DINO (arXiv:2104.14294): self-distillation of the frame token over crops of one frame."""

    name: ClassVar[str] = "dino"

    head: HeadConfig = field(default_factory=HeadConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    loss: PredictionConfig = field(default_factory=PredictionConfig)


@dataclass(frozen=True)
class MaskedSettings(FrameSettings):
    """What iBOT and DINOv2 share: self-distillation of the frame token and of masked patches."""

    masking: FrameMaskingConfig = field(default_factory=FrameMaskingConfig)
    head: PatchHeadConfig = field(default_factory=PatchHeadConfig)
    teacher: PatchTeacherConfig = field(default_factory=PatchTeacherConfig)
    loss: PatchLossConfig = field(default_factory=PatchLossConfig)

    def check(self, shared: "Config") -> None:
        """Refuse combinations that cannot work."""
        super().check(shared)
        check_blocks(self.masking, shared)


@dataclass(frozen=True)
class IbotSettings(MaskedSettings):
    """iBOT (arXiv:2111.07832): DINO, and masked patches predict the teacher's answer at their place."""

    name: ClassVar[str] = "ibot"

    masking: FrameMaskingConfig = field(
        default_factory=lambda: FrameMaskingConfig(draw="independent", smallest_block=16, fill=False)
    )
    head: PatchHeadConfig = field(default_factory=lambda: PatchHeadConfig(prototypes=8192))
    teacher: PatchTeacherConfig = field(
        default_factory=lambda: PatchTeacherConfig(
            momentum=(0.996, 1.0), temperature_by="epoch", patch_center="all"
        )
    )


@dataclass(frozen=True)
class Dinov2Settings(MaskedSettings):
    """DINOv2 (arXiv:2304.07193) without distillation: iBOT's losses and KoLeo, with T-CoRe's schedules."""

    name: ClassVar[str] = "dinov2"

    masking: FrameMaskingConfig = field(
        default_factory=lambda: FrameMaskingConfig(largest_block=98, fill=False)
    )
    loss: PatchLossConfig = field(default_factory=lambda: PatchLossConfig(koleo=0.1))


def check_blocks(masking: MaskingConfig, shared: "Config") -> None:
    """Refuse blocks that no grid of the run has room for."""
    grid = shared.views.global_size // shared.vit.patch_size
    if masking.kind == "random" or not masking.probability:
        return
    if grid < 2:
        raise InputError(f"views.global_size={shared.views.global_size}: block masks need 2 x 2 patches.")
    if masking.largest_block is not None and masking.largest_block < masking.smallest_block:
        raise InputError(
            f"masking.largest_block={masking.largest_block}: "
            f"need masking.smallest_block={masking.smallest_block} or more."
        )


@dataclass(frozen=True)
class ContrastSettings(FrameSettings):
    """SimCLR (arXiv:2002.05709) and MoCo v3 (arXiv:2104.02057): two views of a frame find each other."""

    name: ClassVar[str] = "contrast"
    whole_step: ClassVar[bool] = True
    local_crops: ClassVar[bool] = False

    projector: ProjectorConfig = field(default_factory=ProjectorConfig)
    predictor: PredictorConfig = field(default_factory=PredictorConfig)
    contrast: ContrastConfig = field(default_factory=ContrastConfig)


@dataclass(frozen=True)
class CrocSettings(FrameSettings):
    """CrOC (arXiv:2303.13245): DINO, plus regions clustered across two views, in the place of patches."""

    name: ClassVar[str] = "croc"

    head: PatchHeadConfig = field(default_factory=lambda: PatchHeadConfig(patch_prototypes=8192))
    teacher: PatchTeacherConfig = field(default_factory=PatchTeacherConfig)
    loss: PredictionConfig = field(default_factory=PredictionConfig)
    regions: RegionConfig = field(default_factory=RegionConfig)

    def check(self, shared: "Config") -> None:
        """Refuse combinations that cannot work."""
        super().check(shared)
        if self.teacher.patch_center != "masked":
            raise InputError("teacher.patch_center has no effect on croc: leave it out.")
        regions, patches = self.regions, 2 * (shared.views.global_size // shared.vit.patch_size) ** 2
        if not regions.most <= regions.seeds <= patches:
            raise InputError(
                f"regions.seeds={regions.seeds}: need at least regions.most={regions.most}, and at most the "
                f"{patches} patches of two views."
            )


@dataclass(frozen=True)
class OdinSettings(FrameSettings):
    """ODIN (arXiv:2203.08777): regions that one network discovers are what another learns to distinguish."""

    name: ClassVar[str] = "odin"
    whole_step: ClassVar[bool] = True
    local_crops: ClassVar[bool] = False

    projector: ProjectorConfig = field(default_factory=lambda: ProjectorConfig(layers=2, last_norm="none"))
    predictor: PredictorConfig = field(default_factory=lambda: PredictorConfig(last_norm="none"))
    contrast: ObjectContrastConfig = field(default_factory=ObjectContrastConfig)
    discovery: DiscoveryConfig = field(default_factory=DiscoveryConfig)

    def check(self, shared: "Config") -> None:
        """Refuse combinations that cannot work."""
        super().check(shared)
        discovery, patches = self.discovery, (shared.views.global_size // shared.vit.patch_size) ** 2
        if discovery.clusters > patches:
            raise InputError(f"discovery.clusters={discovery.clusters}: need at most {patches}, the patches.")
        if discovery.init is not None and discovery.momentum is None:
            raise InputError(f"discovery.init={discovery.init}: add --discovery.momentum 1 1 to keep it.")
        if discovery.init is not None and shared.init is not None:
            raise InputError(f"init={shared.init} would replace discovery.init={discovery.init}: give one.")


MethodSettings = (
    TCoReSettings
    | DinoSettings
    | IbotSettings
    | Dinov2Settings
    | ContrastSettings
    | CrocSettings
    | OdinSettings
)
METHODS: tuple[type[MethodSettings], ...] = get_args(MethodSettings)
