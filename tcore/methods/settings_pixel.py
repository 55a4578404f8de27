"""Settings of the methods that reconstruct pixels, with their limits beside each field; no torch."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, get_args

from tcore.errors import InputError
from tcore.methods.limits import Areas, Count, Cuts, Limit, Momenta, Positive, Seconds, Share, Weight
from tcore.methods.settings import AnySettings, FrameConfig

if TYPE_CHECKING:
    from tcore.config import Config

Masked = Annotated[float, Limit(lambda x: 0 < x < 1, "need a value between 0 and 1")]
Gap = Annotated[tuple[int, int], Limit(lambda x: 1 <= x[0] <= x[1], "need two rising numbers of 1 or more")]
Filter = Literal["bicubic", "bilinear", "sharp"]
FRAME_RATE = 30.0  # of the videos that published gaps and strides count frames of


@dataclass(frozen=True)
class CropConfig:
    """Boxes, flips and pixels of the views; side and area are views.global_size and views.global_area."""

    draw: Literal["ten-tries", "one-try", "multi-scale"] = "ten-tries"
    """How a box is drawn: tried until it fits, cut off where it does not, or one of a list (VideoMAE)."""
    flip: Literal["shared", "own", "none"] = "own"
    """Mirror all views of a sample together, each independently, or none; with probability 0.5."""
    filter: Filter = "bicubic"
    """How pixels are resized; bicubic and bilinear average over what shrinks, sharp is bilinear without."""


@dataclass(frozen=True)
class DecoderConfig:
    """The decoder, which only training uses."""

    width: Count = 256
    """Width of a token."""
    depth: Count = 4
    """Number of blocks."""
    num_heads: Count = 8
    """Attention heads."""


@dataclass(frozen=True)
class PairConfig:
    """Which two frames of a video make a sample."""

    gap: Seconds = (4 / FRAME_RATE, 48 / FRAME_RATE)
    """Distance of the two frames in seconds; a store must have frames that close."""
    gap_frames: Gap | None = None
    """The same in frames of the store, whatever its rate: not what was published."""
    cuts: Cuts = "ignore"
    """Where the store knows shot cuts: cross them, or treat each shot as a video."""


@dataclass(frozen=True)
class ClipConfig:
    """Which frames of a video make a clip."""

    frames: Count = 16
    """Frames of a clip."""
    stride: Positive = 4 / FRAME_RATE
    """Distance of two of them in seconds; a store must have frames that close."""
    stride_frames: Count | None = None
    """The same in frames of the store, whatever its rate: not what was published."""
    tube: Count = 2
    """Frames of a token."""
    cuts: Cuts = "ignore"
    """Where the store knows shot cuts: cross them, or treat each shot as a video."""


@dataclass(frozen=True)
class PixelSettings(AnySettings):
    """What the methods share that reconstruct pixels."""

    unused: ClassVar[tuple[str, ...]] = (
        *(f"views.{name}" for name in ("local_size", "num_local", "local_area", "photometry", "flip_global")),
        *(f"views.{name}" for name in ("auxiliary_box", "color", "blur", "fixed_space", "fixed_time")),
        *(f"vit.{name}" for name in ("drop_path_rule", "drop_path_form", "auxiliary_drop_path", "init")),
        *(f"vit.{name}" for name in ("position_std", "class_std", "train_patch_embed", "reach")),
        *(f"optim.{name}" for name in ("matching_lr", "freeze_last_layer_epochs", "freeze")),
    )
    class_token: ClassVar[bool] = True
    positions: ClassVar[str] = "grid"
    """What the encoder has: settings that are fixed by the method."""

    crop: CropConfig = field(default_factory=CropConfig)
    decoder: DecoderConfig = field(default_factory=DecoderConfig)
    mask_ratio: Masked = 0.75
    """Share of the patches that the encoder does not see."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a score card must say about how an encoder was trained."""
        spacing: PairConfig | ClipConfig | None = getattr(self, "pair", None) or getattr(self, "clip", None)
        what = ""
        if isinstance(spacing, PairConfig) and spacing.gap_frames is not None:
            what = "pairs {} to {} frames of its store apart".format(*spacing.gap_frames)
        if isinstance(spacing, ClipConfig) and spacing.stride_frames is not None:
            stride = spacing.stride_frames
            apart = "consecutive frames" if stride == 1 else f"frames {stride} apart"
            what = f"clips of {spacing.frames} {apart} of its store"
        return (f"{self.name} was trained on {what}, which is not the published spacing",) if what else ()

    def check(self, shared: "Config") -> None:
        """Refuse combinations that cannot work."""
        vit, decoder, grid = shared.vit, self.decoder, shared.views.global_size // shared.vit.patch_size
        need: dict[str, object] = {"num_registers": 0, "drop_path": 0.0, "layer_scale": None}
        need |= {"class_token": self.class_token, "positions": self.positions}
        for name, value in need.items():
            if getattr(vit, name) != value:
                raise InputError(f"vit.{name}={getattr(vit, name)}: {self.name} needs {value}.")
        for name, width in (("decoder.width", decoder.width), ("vit.dim", vit.dim)):
            if width % 4:
                raise InputError(f"{name}={width}: need a multiple of 4.")
        if decoder.width % decoder.num_heads:
            raise InputError(f"decoder.num_heads={decoder.num_heads}: need a divisor of {decoder.width}.")
        if shared.source == "images" and not hasattr(self, "frame"):
            raise InputError(f"source=images: {self.name} needs videos.")
        if not 0 < int(self.tokens(grid) * (1 - self.mask_ratio)) < self.tokens(grid):
            raise InputError(
                f"mask_ratio={self.mask_ratio}: none or all of {self.tokens(grid)} patches are left."
            )

    def tokens(self, grid: int) -> int:
        """Tokens that a mask is drawn over."""
        return grid * grid


@dataclass(frozen=True)
class MaeSettings(PixelSettings):
    """MAE (arXiv:2111.06377): predict the pixels of the masked patches of a frame."""

    name: ClassVar[str] = "mae"

    frame: FrameConfig = field(default_factory=lambda: FrameConfig(current=(0.0, 1.0)))


@dataclass(frozen=True)
class FollowingConfig:
    """A teacher that follows the student."""

    momentum: Momenta = (0.996, 0.996)
    """Momentum of the moving average, first to last step: constant as released; 0.996 1 was meant."""


@dataclass(frozen=True)
class RcMaeSettings(MaeSettings):
    """RC-MAE (arXiv:2210.02077): MAE that also predicts what its moving average predicts."""

    name: ClassVar[str] = "rcmae"

    teacher: FollowingConfig = field(default_factory=FollowingConfig)
    consistency: Weight = 1.0
    """Weight of the error against the teacher's prediction."""


@dataclass(frozen=True)
class CrossDecoderConfig(DecoderConfig):
    """The decoder, which only training uses."""

    hidden: Count = 2048
    """Width of its MLPs."""
    dropout: Share = 0.1
    """Dropout of attention, MLPs and residuals."""


@dataclass(frozen=True)
class SiamMaeSettings(PixelSettings):
    """SiamMAE (arXiv:2305.14344): predict a later frame from an earlier one and 5% of its patches."""

    name: ClassVar[str] = "siammae"

    crop: CropConfig = field(default_factory=lambda: CropConfig("one-try", "shared", "bilinear"))
    decoder: CrossDecoderConfig = field(default_factory=CrossDecoderConfig)
    mask_ratio: Masked = 0.95
    """Share of the patches of the later frame that the encoder does not see."""
    pair: PairConfig = field(default_factory=lambda: PairConfig(gap=(4 / FRAME_RATE, 47 / FRAME_RATE)))


@dataclass(frozen=True)
class CropMaeSettings(PixelSettings):
    """CropMAE (arXiv:2403.17823): predict a crop from two of its patches and a larger crop around it."""

    name: ClassVar[str] = "cropmae"

    crop: CropConfig = field(default_factory=lambda: CropConfig("one-try", "own", "bilinear"))
    inner_area: Areas = (0.3, 0.6)
    """Area of the inner crop, as a share of the outer one."""
    decoder: CrossDecoderConfig = field(default_factory=CrossDecoderConfig)
    mask_ratio: Masked = 0.985
    """Share of the patches of the inner crop that the encoder does not see."""
    frame: FrameConfig = field(default_factory=lambda: FrameConfig(current=(0.0, 1.0)))


@dataclass(frozen=True)
class LatentConfig:
    """The latent of the future: categorical variables."""

    variables: Count = 32
    """Number of variables."""
    values: Count = 32
    """Values of each."""
    noise: Weight = 0.5
    """Noise on the future frame that the posterior sees, in deviations of a pixel."""
    weight: Weight = 0.01
    """Weight of the divergence of posterior and prior."""
    balance: Share = 0.2
    """Share of its gradient that goes to the posterior."""
    floor: Weight = 0.1
    """Divergence below which it has no gradient."""


@dataclass(frozen=True)
class RspSettings(PixelSettings):
    """RSP (arXiv:2406.07398): predict a future frame from the current one and a random latent."""

    name: ClassVar[str] = "rsp"

    crop: CropConfig = field(default_factory=lambda: CropConfig(flip="shared"))
    decoder: DecoderConfig = field(default_factory=lambda: DecoderConfig(512, 8, 16))
    pair: PairConfig = field(default_factory=PairConfig)
    latent: LatentConfig = field(default_factory=LatentConfig)


@dataclass(frozen=True)
class DropMaeSettings(PixelSettings):
    """DropMAE (arXiv:2304.00571): MAE on two frames, whose decoder attends less within a frame."""

    name: ClassVar[str] = "dropmae"
    class_token: ClassVar[bool] = False

    decoder: DecoderConfig = field(default_factory=lambda: DecoderConfig(512, 8, 16))
    pair: PairConfig = field(default_factory=lambda: PairConfig(gap=(1 / 8, 49 / FRAME_RATE)))
    attention_dropout: Share = 0.1
    """Share of the pairs of patches within a frame that do not see each other in the decoder."""

    def tokens(self, grid: int) -> int:
        """Of both frames together."""
        return 2 * grid * grid


@dataclass(frozen=True)
class VideoMaeSettings(PixelSettings):
    """VideoMAE (arXiv:2203.12602): predict the masked tubes of a clip."""

    name: ClassVar[str] = "videomae"
    class_token: ClassVar[bool] = False
    positions: ClassVar[str] = "learned"

    crop: CropConfig = field(default_factory=lambda: CropConfig("multi-scale", "none", "bilinear"))
    decoder: DecoderConfig = field(default_factory=lambda: DecoderConfig(192, 4, 3))
    mask_ratio: Masked = 0.9
    """Share of the places that the encoder does not see, the same at all times."""
    clip: ClipConfig = field(default_factory=ClipConfig)

    def check(self, shared: "Config") -> None:
        """Refuse combinations that cannot work."""
        super().check(shared)
        check_clip(self.clip, shared)


@dataclass(frozen=True)
class MaeStSettings(PixelSettings):
    """MAE-ST (arXiv:2205.09113): predict the masked patches of a clip, masked anywhere in space and time."""

    name: ClassVar[str] = "maest"
    positions: ClassVar[str] = "learned"

    crop: CropConfig = field(default_factory=lambda: CropConfig(flip="shared", filter="sharp"))
    decoder: DecoderConfig = field(default_factory=lambda: DecoderConfig(512, 4, 16))
    mask_ratio: Masked = 0.9
    """Share of the tokens that the encoder does not see."""
    clip: ClipConfig = field(default_factory=ClipConfig)

    def tokens(self, grid: int) -> int:
        """Of the whole clip."""
        return self.clip.frames // self.clip.tube * grid * grid

    def check(self, shared: "Config") -> None:
        """Refuse combinations that cannot work."""
        super().check(shared)
        check_clip(self.clip, shared)


def check_clip(clip: ClipConfig, shared: "Config") -> None:
    """Refuse clips that do not make whole tubes, and weights of frames for them."""
    if clip.frames % clip.tube or clip.frames < 2 * clip.tube:
        raise InputError(f"clip.frames={clip.frames}: need two or more times clip.tube={clip.tube}.")
    if shared.init is not None:
        raise InputError("init: an encoder of frames cannot start one of clips; leave it out.")


PixelMethodSettings = (
    MaeSettings
    | RcMaeSettings
    | SiamMaeSettings
    | CropMaeSettings
    | RspSettings
    | DropMaeSettings
    | VideoMaeSettings
    | MaeStSettings
)
PIXEL_METHODS: tuple[type[PixelMethodSettings], ...] = get_args(PixelMethodSettings)
