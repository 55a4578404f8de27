"""Samples of the methods that reconstruct pixels: a frame, two frames or a clip, their views and masks."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float64, Integer
from torch import Tensor

from tcore.config import Config, ViewsConfig
from tcore.data import boxes
from tcore.data.boxes import Box
from tcore.data.source import RawBatch
from tcore.data.views import ASPECT, Size, ViewPlan, random_boxes
from tcore.device import send
from tcore.errors import InputError
from tcore.methods.reconstruction import PixelBatch
from tcore.methods.sampling import MASKS
from tcore.methods.settings_pixel import (
    ClipConfig,
    CropMaeSettings,
    DropMaeSettings,
    Filter,
    MaeStSettings,
    PairConfig,
    PixelSettings,
    RspSettings,
    SiamMaeSettings,
    VideoMaeSettings,
)
from tcore.model.pixels import num_kept

Pair = Callable[[int, tuple[int, int], np.random.Generator], tuple[int, int]]
# Stores whose frames are farther apart than asked for by more than this share are too slow.
TOLERANCE = 0.05


@dataclass(frozen=True)
class PixelSampling:
    """Frames, views and masks of a run on a store of one frame rate."""

    settings: PixelSettings
    view_settings: ViewsConfig
    seed: int
    batch_size: int
    """Samples of a step."""
    grid: int
    fps: float

    only_masked = ()
    repeats_short = False

    @staticmethod
    def of(config: Config, settings: PixelSettings, fps: float) -> "PixelSampling":
        """The sampling of a run on a store of this frame rate; one that is too slow is refused."""
        grid = config.views.global_size // config.vit.patch_size
        made = PixelSampling(settings, config.views, config.seed, config.optim.samples, grid, fps)
        made.spacing()
        return made

    @property
    def pair(self) -> PairConfig | None:
        """Settings of pairs of frames."""
        found = self.settings
        return found.pair if isinstance(found, SiamMaeSettings | RspSettings | DropMaeSettings) else None

    @property
    def clip(self) -> ClipConfig | None:
        """Settings of clips."""
        found = self.settings
        return found.clip if isinstance(found, VideoMaeSettings | MaeStSettings) else None

    def spacing(self) -> tuple[int, int]:
        """Smallest and largest gap of a pair, or twice the stride of a clip, in frames of the store."""
        pair, clip = self.pair, self.clip
        if pair is not None:
            if pair.gap_frames is not None:
                return pair.gap_frames
            need_rate("pair.gap", pair.gap[0], self.fps)
            low = max(1, round(pair.gap[0] * self.fps))
            return low, max(low, math.floor(pair.gap[1] * self.fps + 1e-6))
        if clip is None:
            return 0, 0
        if clip.stride_frames is not None:
            return clip.stride_frames, clip.stride_frames
        need_rate("clip.stride", clip.stride, self.fps)
        stride = max(1, round(clip.stride * self.fps))
        return stride, stride

    @property
    def names(self) -> tuple[str, ...]:
        """The one frame, an earlier and a later one, or the frames of a clip."""
        if isinstance(self.settings, SiamMaeSettings):
            return "past", "current"
        if self.pair is not None:
            return "current", "future"
        if self.clip is not None:
            return "current", *(f"frame{number}" for number in range(1, self.clip.frames))
        return ("current",)

    @property
    def filter(self) -> Filter:
        """How pixels are resized."""
        return self.settings.crop.filter

    @property
    def split_at_cuts(self) -> bool:
        """Whether each shot counts as a video, where the store knows shot cuts."""
        found = self.pair or self.clip or getattr(self.settings, "frame", None)
        return found is not None and found.cuts == "split"

    @property
    def has_memory(self) -> bool:
        """Whether a sample has a view that is seen whole."""
        return isinstance(self.settings, SiamMaeSettings | CropMaeSettings | RspSettings)

    @property
    def sides(self) -> dict[str, int]:
        """Views in the order they are rendered, with their sides in pixels."""
        names = ("memory", "global") if self.has_memory else ("global",)
        return dict.fromkeys(names, self.view_settings.global_size)

    @property
    def slots(self) -> int:
        """Times that a mask is drawn for."""
        if self.clip is not None:
            return self.clip.frames // self.clip.tube
        return 2 if isinstance(self.settings, DropMaeSettings) else 1

    def usable(self, lengths: Integer[np.ndarray, "videos"]) -> Bool[np.ndarray, "videos"]:
        """Which videos are long enough: two frames for all that knows time."""
        return np.asarray(lengths >= (1 if len(self.names) == 1 else 2))

    def why_unusable(self) -> str:
        """The end of a sentence about videos that are all too short."""
        return f"a sample of {self.settings.name}, which needs 2; give videos."

    def masks(self, step: int) -> Bool[np.ndarray, "slots videos n"]:
        """The masks of a whole step; every sample masks equally many patches."""
        rng = np.random.default_rng((self.seed, MASKS, step))
        n, ratio = self.grid**2, self.settings.mask_ratio
        if isinstance(self.settings, VideoMaeSettings):
            # Here the masked number is cut off, and places are masked.
            mask = hide(rng.random((self.batch_size, n)), n - int(ratio * n))
            return np.repeat(mask[None], self.slots, axis=0)
        tokens = self.slots * n
        mask = hide(rng.random((self.batch_size, tokens)), num_kept(tokens, ratio))
        return mask.reshape(self.batch_size, self.slots, n).transpose(1, 0, 2)

    def needs(self, masked: bool) -> tuple[str, ...]:
        """All frames."""
        return self.names

    def frames(self, length: int, rng: np.random.Generator) -> dict[str, int]:
        """Which frames of a video of this length make a sample, by name."""
        settings, spacing = self.settings, self.spacing()
        if self.pair is not None:
            rules: dict[type, Pair] = {SiamMaeSettings: boxes.gap_first, RspSettings: boxes.room_first}
            rule = rules.get(type(settings), boxes.start_first)
            return dict(zip(self.names, rule(length, spacing, rng), strict=True))
        if self.clip is None:
            return {"current": boxes.one_frame(length, getattr(settings, "frame").current, rng)}  # noqa: B009
        count, stride = self.clip.frames, spacing[0]
        if isinstance(settings, VideoMaeSettings):
            start = int(rng.integers(boxes.num_starts(length, count, stride)))
            found = boxes.strided_clip(length, count, stride, start)
        else:
            apart = stride if self.clip.stride_frames else self.clip.stride * self.fps
            found = boxes.spread_clip(length, count, count * apart, rng.random())
        return dict(zip(self.names, found, strict=True))

    def views(self, sizes: dict[str, Size], rng: np.random.Generator) -> dict[str, ViewPlan]:
        """Views of these frames: one box for all, one of their own, or one inside of the other."""
        settings, count = self.settings, len(self.names)
        box = self._box(sizes[self.names[0]], rng)
        if isinstance(settings, CropMaeSettings):
            side = self.view_settings.global_size
            inner = boxes.one_try_box((side, side), settings.inner_area, rng)
            drawn, frame = [box, boxes.inside(box, inner, side)], np.zeros(2, dtype=np.int64)
        elif isinstance(settings, DropMaeSettings):
            drawn, frame = [box, self._box(sizes[self.names[1]], rng)], np.arange(2)
        else:
            if len({sizes[name] for name in self.names}) > 1:
                raise InputError(
                    f"frames of different sizes, {sorted(set(sizes.values()))}: one box fits none."
                )
            drawn, frame = [box] * count, np.arange(count)
        flips = rng.random(len(drawn)) < 0.5
        if settings.crop.flip != "own":
            flips[:] = flips[0] and settings.crop.flip == "shared"
        plan = boxes.plain_views(frame, drawn, flips)
        if not self.has_memory:
            return {"global": plan}
        return {"memory": plan.select(slice(0, 1)), "global": plan.select(slice(1, 2))}

    def _box(self, size: Size, rng: np.random.Generator) -> Box:
        draw, area = self.settings.crop.draw, self.view_settings.global_area
        if draw == "multi-scale":
            return boxes.multi_scale_box(size, self.view_settings.global_size, rng)
        if draw == "one-try":
            return boxes.one_try_box(size, area, rng)
        top, left, height, width = random_boxes(size, area, ASPECT, rng)[0].tolist()
        return top, left, height, width

    def batch(self, crops: dict[str, Tensor], raw: RawBatch) -> PixelBatch:
        """The batch that the method takes: views of a sample become its frames in time."""
        samples = len(raw.mask) // self.slots
        mask = raw.mask.view(self.slots, samples, -1).transpose(0, 1).flatten(1)

        def in_time(views: Tensor) -> Tensor:
            return views.unflatten(0, (-1, samples)).permute(1, 2, 0, 3, 4)

        memory = in_time(crops["memory"]) if self.has_memory else None
        return make_pixel_batch(in_time(crops["global"]), mask, raw.counts.videos, memory)

    def warnings(self) -> list[str]:
        """What is not as published."""
        return [f"note: {line}" for line in self.settings.notes]


def hide(noise: Float64[np.ndarray, "b n"], kept: int) -> Bool[np.ndarray, "b n"]:
    """Mask all tokens but those with the least noise."""
    mask = np.ones(noise.shape, dtype=bool)
    np.put_along_axis(mask, np.argpartition(noise, kept - 1, axis=1)[:, :kept], False, axis=1)
    return mask


def make_pixel_batch(
    target: Tensor, mask: Bool[Tensor, "b n"], samples: int | None = None, memory: Tensor | None = None
) -> PixelBatch:
    """Places of the patches that are seen and masked; without `samples` it is the whole step."""
    every = mask.cpu().numpy()
    visible, masked = (
        send(torch.from_numpy(np.nonzero(chosen)[1].reshape(len(chosen), -1)), target.device)
        for chosen in (~every, every)
    )
    return PixelBatch(target, visible, masked, samples or len(every), memory)


def need_rate(name: str, seconds: float, fps: float) -> None:
    """Refuse a store whose frames are farther apart than what a method was published with."""
    if seconds * fps < 1 - TOLERANCE:
        rate = math.ceil(10 / seconds - 1e-6) / 10
        flag = f"--{name}-frames"
        raise InputError(
            f"{name}={seconds:.3g} s needs a store of {rate:g} frames per second or more, this one has "
            f"{fps:g} (--fps, where it does not say): make one by tcore prepare VIDEOS STORE --fps "
            f"{max(8, math.ceil(rate))}, or give {flag}, which is not what was published."
        )
