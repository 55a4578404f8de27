"""Which frames, views and masks make a sample: plain numbers, no pixels, picklable to reading processes."""

import zlib
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Self

import numpy as np
import torch
from jaxtyping import Bool, Int64, Integer
from torch import Tensor

from tcore.config import Config, ViewsConfig
from tcore.data.boxes import one_frame
from tcore.data.masking import sample_step_masks
from tcore.data.source import RawBatch
from tcore.data.views import Photometry, Size, ViewPlan, sample_photometry, sample_views
from tcore.device import send
from tcore.errors import InputError
from tcore.methods.batch import Batch, make_batch
from tcore.methods.regions import RegionBatch
from tcore.methods.settings import (
    FrameConfig,
    FrameSettings,
    MaskedSettings,
    OdinSettings,
    SandwichConfig,
    TCoReSettings,
)
from tcore.methods.settings_groups import MaskingConfig
from tcore.methods.settings_pixel import Filter

MASKS = 3  # the stream of randomness that masks are drawn from; data/source.py has the others


class Sandwich(NamedTuple):
    """Frame indices of one sample; both auxiliary frames may lie on one side in an ablation."""

    past: int
    current: int
    future: int


def sample_sandwich(
    num_frames: int,
    rng: np.random.Generator,
    sandwich: SandwichConfig,
    offset_frames: tuple[int, int] | None = None,
) -> Sandwich:
    """Draw a sandwich; offsets are fractions of the video unless `offset_frames` gives them in frames.

    >>> sample_sandwich(20, np.random.default_rng(0), SandwichConfig())
    Sandwich(past=8, current=12, future=16)
    """
    if num_frames == 1:
        return Sandwich(0, 0, 0)
    current, offset, frames = sandwich.current, sandwich.offset, sandwich.frames
    low, high = offset_frames or (int(offset[0] * num_frames), int(offset[1] * num_frames))
    first, last = int(current[0] * num_frames), int(current[1] * num_frames) - 1
    if offset_frames:
        first, last = max(first, high), min(last, num_frames - 1 - high)
    middle = int(rng.integers(first, max(first, last), endpoint=True))
    before, after = (int(x) for x in rng.integers(low, high, size=2, endpoint=True))
    left = -before if frames != "future-future" else before
    right = after if frames != "past-past" else -after
    if sandwich.still and rng.random() < sandwich.still:
        left = right = 0
    return Sandwich(middle + left, middle, middle + right)


def usable(
    lengths: Integer[np.ndarray, "videos"],
    sandwich: SandwichConfig,
    offset_frames: tuple[int, int] | None = None,
) -> Bool[np.ndarray, "videos"]:
    """Which videos are long enough: an offset of at least one frame, and a current frame that has room."""
    first, end = ((share * lengths).astype(np.int64) for share in sandwich.current)
    last = end - 1
    if offset_frames is None:
        return ((sandwich.offset[0] * lengths).astype(np.int64) > 0) & (first <= last)
    reach = offset_frames[1]
    return np.asarray(np.maximum(first, reach) <= np.minimum(last, lengths - 1 - reach))


@dataclass(frozen=True)
class SandwichSampling:
    """T-CoRe's sandwiches: a current frame between a past and a future one, and its masked crops."""

    settings: TCoReSettings
    view_settings: ViewsConfig
    seed: int
    batch_size: int
    grid: int
    offset_frames: tuple[int, int] | None
    """The offsets in frames of the store, where they are given in seconds."""

    names = ("past", "current", "future")
    only_masked = ("past", "future")
    filter: ClassVar[Filter] = "bicubic"

    @staticmethod
    def of(config: Config, settings: TCoReSettings, fps: float) -> "SandwichSampling":
        """The sampling of a run on a store of this frame rate."""
        return SandwichSampling(
            settings,
            config.views,
            config.seed,
            config.optim.samples,
            config.views.global_size // config.vit.patch_size,
            offset_in_frames(settings.sandwich, fps),
        )

    @property
    def split_at_cuts(self) -> bool:
        """Whether each shot counts as a video, where the store knows shot cuts."""
        return self.settings.sandwich.cuts == "split"

    @property
    def repeats_short(self) -> bool:
        """Whether videos that are too short take part, with their frames repeated."""
        return self.settings.sandwich.short_videos == "repeat"

    @property
    def sides(self) -> dict[str, int]:
        """Views in the order they are rendered, with their sides in pixels."""
        views = self.view_settings
        wanted = ["global", *(["student"] if self._moves_student() else []), *self._auxiliary()]
        return dict.fromkeys(wanted, views.global_size) | local_side(views)

    def _moves_student(self) -> bool:
        return not (self.view_settings.fixed_space and self.view_settings.fixed_time)

    def _auxiliary(self) -> list[str]:
        auxiliary = self.settings.auxiliary
        return [side for side in ("past", "future") if auxiliary in (side, "both")]

    def usable(self, lengths: Integer[np.ndarray, "videos"]) -> Bool[np.ndarray, "videos"]:
        """Which videos are long enough."""
        return usable(lengths, self.settings.sandwich, self.offset_frames)

    def why_unusable(self) -> str:
        """The end of a sentence about videos that are all too short."""
        sandwich = self.settings.sandwich
        if sandwich.offset_seconds is not None:
            return (
                f"sandwich.offset_seconds={sandwich.offset_seconds} ({self.offset_frames} frames); "
                "use smaller offsets or longer videos."
            )
        return (
            f"sandwich.offset={sandwich.offset}; use larger offsets, more frames per second, "
            "--sandwich.short-videos repeat, or, for folders of single images, --source images."
        )

    def masks(self, step: int) -> Bool[np.ndarray, "2 videos n"]:
        """The masks of a whole step, for both global crops of each video."""
        seed = (self.seed, MASKS, step)
        return sample_step_masks(seed, self.batch_size, self.grid, self.settings.masking)

    def needs(self, masked: bool) -> tuple[str, ...]:
        """Frames of a sample that are read: past and future only where a crop carries a mask."""
        wanted = [side for side in self._auxiliary() if masked]
        if not self.view_settings.fixed_time and "past" not in wanted:
            wanted.append("past")
        return tuple(name for name in self.names if name == "current" or name in wanted)

    def frames(self, length: int, rng: np.random.Generator) -> dict[str, int]:
        """Which frames of a video of this length make a sample, by name."""
        return sample_sandwich(length, rng, self.settings.sandwich, self.offset_frames)._asdict()

    def views(self, sizes: dict[str, Size], rng: np.random.Generator) -> dict[str, ViewPlan]:
        """Crops of these frames, by name; frames are numbered as in `names`."""
        # A frame that is not read has no views; any size will do for their numbers.
        past, current, future = (sizes.get(name, sizes["current"]) for name in self.names)
        plan = sample_views(rng, (past, current, future), self.view_settings)
        return {name: plan[name] for name in self.sides}

    def batch(self, crops: dict[str, Tensor], raw: RawBatch) -> Batch:
        """The batch that the method takes."""
        return make_batch(
            crops.get("student", crops["global"]),
            crops.get("local"),
            raw.mask,
            crops.get("past"),
            crops.get("future"),
            teacher_crops=crops["global"],
            counts=raw.counts,
        )

    def warnings(self) -> list[str]:
        """Lines about settings without effect."""
        return masks_none(self.settings.masking, self.batch_size)


@dataclass(frozen=True)
class FrameSampling:
    """One frame of a video and crops of it: for methods that know no time."""

    settings: FrameConfig
    view_settings: ViewsConfig
    seed: int
    batch_size: int
    grid: int
    masking: MaskingConfig | None = None
    """Of the global crops; None: nothing is masked."""

    names = ("current",)
    only_masked = ()
    repeats_short = False
    filter: ClassVar[Filter] = "bicubic"

    @classmethod
    def of(cls, config: Config, settings: FrameSettings) -> Self:
        """The sampling of a run."""
        return cls(
            settings.frame,
            config.views,
            config.seed,
            config.optim.samples,
            config.views.global_size // config.vit.patch_size,
            settings.masking if isinstance(settings, MaskedSettings) else None,
        )

    @property
    def split_at_cuts(self) -> bool:
        """Whether each shot counts as a video, where the store knows shot cuts."""
        return self.settings.cuts == "split"

    @property
    def sides(self) -> dict[str, int]:
        """Views in the order they are rendered, with their sides in pixels."""
        return {"global": self.view_settings.global_size} | local_side(self.view_settings)

    def usable(self, lengths: Integer[np.ndarray, "videos"]) -> Bool[np.ndarray, "videos"]:
        """Every video has a frame."""
        return np.ones(len(lengths), dtype=bool)

    def why_unusable(self) -> str:
        """Only a store without videos has none that can be used."""
        return "a sample; give a store that holds videos."

    def masks(self, step: int) -> Bool[np.ndarray, "2 videos n"]:
        """The masks of a whole step, for both global crops of each video."""
        if self.masking is None or not self.masking.probability:
            return np.zeros((2, self.batch_size, 0), dtype=bool)
        return sample_step_masks((self.seed, MASKS, step), self.batch_size, self.grid, self.masking)

    def needs(self, masked: bool) -> tuple[str, ...]:
        """The one frame."""
        return self.names

    def frames(self, length: int, rng: np.random.Generator) -> dict[str, int]:
        """A frame, uniform over the wanted stretch of the video."""
        return {"current": one_frame(length, self.settings.current, rng)}

    def views(self, sizes: dict[str, Size], rng: np.random.Generator) -> dict[str, ViewPlan]:
        """Global and local crops of the frame."""
        plan = sample_views(rng, (sizes["current"],) * 3, self.view_settings)
        # The views of a sandwich call its middle frame 1; here it is the only one.
        return {name: plan[name].with_frame(plan[name].frame * 0) for name in ("global", "local")}

    def batch(self, crops: dict[str, Tensor], raw: RawBatch) -> Batch:
        """The batch that the method takes."""
        return make_batch(crops["global"], crops.get("local"), raw.mask, counts=raw.counts)

    def warnings(self) -> list[str]:
        """Lines about settings without effect."""
        return [] if self.masking is None else masks_none(self.masking, self.batch_size)


def masks_none(masking: MaskingConfig, batch: int) -> list[str]:
    """A line where so few crops make a group that their share with a mask is none."""
    crops, share = 2 * min(masking.group, batch), masking.probability
    if masking.draw == "stratified" and share > 0 and int(crops * share) == 0:
        return [f"warning: masking.probability={share} of {crops} crops masks none: no patch losses."]
    return []


@dataclass(frozen=True)
class RegionSampling(FrameSampling):
    """The same for methods that must know where the crops of a frame lie; `around` adds a view of both."""

    around: bool = False

    @classmethod
    def of(cls, config: Config, settings: FrameSettings) -> Self:
        """The sampling of a run."""
        return replace(super().of(config, settings), around=isinstance(settings, OdinSettings))

    @property
    def sides(self) -> dict[str, int]:
        """Views in the order they are rendered, with their sides in pixels."""
        return super().sides | ({"around": self.view_settings.global_size} if self.around else {})

    def views(self, sizes: dict[str, Size], rng: np.random.Generator) -> dict[str, ViewPlan]:
        """Crops of the frame, and the smallest box around the global ones, its colors left alone."""
        plans = super().views(sizes, rng)
        if not self.around:
            return plans
        box = plans["global"].box
        start, end = box[:, :2].min(axis=0), (box[:, :2] + box[:, 2:]).max(axis=0)
        whole = np.concatenate([start, end - start])[None]
        plain = Photometry(jitter=0.0, gray=0.0)
        return {**plans, "around": sample_photometry(rng, np.zeros(1, np.int64), whole, [plain])}

    def batch(self, crops: dict[str, Tensor], raw: RawBatch) -> RegionBatch:  # type: ignore[override]
        """Crops with their boxes and flips, and a seed of each sample."""
        plan, views = raw.plans["global"], super().batch(crops, raw)
        videos = len(plan) // 2
        numbers = [plan.box[:videos], plan.box[videos:], plan.flip.reshape(2, -1).T]
        numbers += [sample_seeds(plan)[:, None], *([raw.plans["around"].box] if self.around else [])]
        together = torch.from_numpy(np.concatenate(numbers, axis=1, dtype=np.float64))
        sent = send(together, views.global_crops.device)  # in one go
        boxes = sent[:, :8].reshape(videos, 2, 4).transpose(0, 1).float()
        flips, seeds = sent[:, 8:10].T.bool(), sent[:, 10].long()
        return RegionBatch(
            views, boxes, flips, seeds, crops.get("around"), sent[:, 11:].float() if self.around else None
        )


def sample_seeds(plan: ViewPlan) -> Int64[np.ndarray, "videos"]:
    """A seed for what is random about a sample later on: a checksum of how its two views were drawn.

    So it depends on (seed, step, place in the batch) alone, like the views, on any number of processes.
    """
    drawn = np.concatenate([plan.box, plan.order, plan.jitter], axis=1, dtype=np.float64)
    by_sample = drawn.reshape(2, len(plan) // 2, -1).transpose(1, 0, 2)
    return np.array([zlib.crc32(row.tobytes()) for row in by_sample], dtype=np.int64)


def local_side(views: ViewsConfig) -> dict[str, int]:
    """Local crops with their side in pixels, where there are any."""
    return {"local": views.local_size} if views.num_local else {}


def offset_in_frames(sandwich: SandwichConfig, fps: float) -> tuple[int, int] | None:
    """Offsets given in seconds as frames of a store; None where they are fractions."""
    seconds = sandwich.offset_seconds
    if seconds is None:
        return None
    low, high = int(seconds[0] * fps), int(seconds[1] * fps)
    if low < 1:
        raise InputError(
            f"sandwich.offset_seconds={seconds} is less than one frame at {fps:g} frames per second: "
            f"need at least {1 / fps:g} s."
        )
    return low, high
