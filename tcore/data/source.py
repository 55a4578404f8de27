"""From the number of a step to what it sees: which videos, which frames, which views.

Everything random is a function of (seed, step), so a run can stop and resume anywhere, and neither the
number of training or reading processes nor the parts a step is computed in change what is seen (but for
rounding: frames of different sizes are padded to the largest of a part).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Int64, Integer, UInt8
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from tcore.config import Config
from tcore.data.images import Frame
from tcore.data.stores import FrameStore, list_clips
from tcore.data.views import Size, ViewPlan
from tcore.device import ALONE, World
from tcore.errors import InputError
from tcore.methods.settings_pixel import Filter

# Streams of randomness that must not meet; methods have 3 (masks) and 4 (inside the network).
ORDER, SAMPLE, NEIGHBOR, REPLACE = 1, 2, 5, 6
REPLACEMENTS = 10  # clips that are tried in place of an unreadable one


class Counts(NamedTuple):
    """What the losses of a step are divided by: counts over all its processes and parts."""

    videos: int
    masked_crops: int = 0
    masked_patches: int = 0


@runtime_checkable
class Sampling(Protocol):
    """A method's side of the data: plain numbers, no pixels, picklable to reading processes."""

    @property
    def names(self) -> tuple[str, ...]:
        """Frames of a sample by name; views point to them by their place in this list."""

    @property
    def only_masked(self) -> tuple[str, ...]:
        """Views that are made for crops that carry a mask alone."""

    @property
    def sides(self) -> dict[str, int]:
        """Views in the order they are rendered, with their sides in pixels."""

    @property
    def split_at_cuts(self) -> bool:
        """Whether each shot counts as a video, where the store knows shot cuts."""

    @property
    def repeats_short(self) -> bool:
        """Whether videos that are too short take part, with their frames repeated."""

    @property
    def filter(self) -> Filter:
        """How the pixels of views are resized."""

    def usable(self, lengths: Integer[np.ndarray, "videos"]) -> Bool[np.ndarray, "videos"]:
        """Which videos are long enough."""

    def why_unusable(self) -> str:
        """The end of a sentence about videos that are all too short."""

    def masks(self, step: int) -> Bool[np.ndarray, "crops videos n"]:
        """The masks of a whole step; n is 0 where the method masks nothing."""

    def needs(self, masked: bool) -> tuple[str, ...]:
        """Which frames of a sample are read, by name."""

    def frames(self, length: int, rng: np.random.Generator) -> dict[str, int]:
        """Which frames of a video of this length make a sample, by name."""

    def views(self, sizes: dict[str, Size], rng: np.random.Generator) -> dict[str, ViewPlan]:
        """Which crops of these frames, by name."""

    def batch(self, crops: dict[str, Tensor], raw: "RawBatch") -> Any:
        """The batch that the method takes: views by name, and masks, counts, boxes and flips of `raw`."""

    def warnings(self) -> list[str]:
        """Lines about settings without effect."""


@dataclass(frozen=True)
class RawBatch:
    """What the reading processes hand over: frames as they were decoded, and the views to make of them."""

    pixels: UInt8[Tensor, " bytes"]
    """The frames behind one another."""
    sizes: list[Size]
    """Of each frame."""
    plans: dict[str, ViewPlan]
    """Views by name, crop-major."""
    mask: Bool[Tensor, "crops_b n"]
    counts: Counts
    sampling: Sampling
    """Who makes a batch of the views."""
    bad: tuple[str, ...] = ()
    """What was wrong with the clips that were replaced by others."""

    @property
    def frames(self) -> UInt8[Tensor, "read height width 3"]:
        """The frames, padded to one size."""
        return pad(self.pixels, self.sizes)

    def pin_memory(self) -> "RawBatch":
        """Prepare frames and mask for an asynchronous copy; called by the loader."""
        object.__setattr__(self, "pixels", self.pixels.pin_memory())
        object.__setattr__(self, "mask", self.mask.pin_memory())
        return self


Sample = tuple[dict[str, Frame], dict[str, ViewPlan]]  # frames that are read, and views, both by name


class Source(Dataset[RawBatch]):
    """The usable clips of a store; item i is (a share of) part i % accumulate of step i // accumulate."""

    def __init__(
        self,
        store: FrameStore,
        config: Config,
        sampling: Sampling,
        share: World = ALONE,
        by_rate: Mapping[float, Sampling] | None = None,
    ) -> None:
        self.store, self.config, self.sampling, self.share = store, config, sampling, share
        """`share` says which process this is: it reads its share of every part."""
        self.by_rate = by_rate or {}
        """How videos are sampled that have a frame rate of their own."""
        self.all_clips = list_clips(store, split_at_cuts=sampling.split_at_cuts)
        long_enough = sampling.usable(self.all_clips.length)
        for rate, own in self.by_rate.items():
            assert store.rates is not None
            chosen = store.rates[self.all_clips.video] == rate
            long_enough[chosen] = own.usable(self.all_clips.length[chosen])
        self.num_short = int((~long_enough).sum())
        repeat = sampling.repeats_short or config.source == "images"
        self.clips = self.all_clips if repeat else self.all_clips.select(long_enough)
        longest = int(self.all_clips.length.max(initial=0))
        if len(self.clips.video) == 0 and longest == 1:
            raise InputError(
                f"these are single images, {len(store)} of them, not videos: run tcore neighbors on them, "
                "then tcore train vits16-imagenet (or another recipe with --source images)."
            )
        if len(self.clips.video) == 0:
            raise InputError(
                f"no usable video among {len(store)}: the longest has {longest} frames, too few for "
                + sampling.why_unusable()
            )

    def sampling_of(self, video: int) -> Sampling:
        """How a video is sampled, by its own frame rate where it has one."""
        rates = self.store.rates
        return self.sampling if rates is None else self.by_rate.get(float(rates[video]), self.sampling)

    def fingerprint(self) -> str:
        """A short name for the data; a run that resumes must find the same."""
        return self.store.fingerprint()

    @property
    def steps_per_epoch(self) -> int:
        """One sample of every usable clip, the remainder left out."""
        return max(1, len(self.clips.video) // self.config.optim.batch)

    def __getitem__(self, index: int) -> RawBatch:
        return self.read(*divmod(index, self.config.optim.accumulate))

    def chosen(self, step: int) -> Int64[np.ndarray, " b"]:
        """The clip of every sample of a step, in an order drawn for each epoch."""
        epoch, position = divmod(step, self.steps_per_epoch)
        batch = self.config.optim.batch
        order = _order(self.config.seed, epoch, len(self.clips.video), batch)
        return np.repeat(order[position * batch : (position + 1) * batch], self.config.optim.repeat)

    def read(self, step: int, part: int) -> RawBatch:
        """Read this process' share of one part of a step."""
        size = self.config.optim.samples // self.config.optim.accumulate
        own = size // self.share.size
        first = part * size + self.share.rank * own
        return self.read_slots(step, range(first, first + own))

    def read_slots(self, step: int, slots: range) -> RawBatch:
        """Read some samples of a step, by their places in its batch."""
        chosen = self.chosen(step)
        # Masks first: frames that only masked crops need are not even read elsewhere.
        masks = self.sampling.masks(step)
        masked = np.asarray(masks.any(axis=(0, 2)))
        needed = [self.sampling.needs(bool(masked[slot])) for slot in slots]
        buffer, bad = FrameBuffer(sum(map(len, needed))), list[str]()
        # Where the frames of each sample, by their places in `names`, lie among those that are read.
        where = np.full((len(slots), len(self.sampling.names)), -1)
        views = list[dict[str, ViewPlan]]()
        for row, slot in enumerate(slots):
            frames, own = self._readable_sample(step, slot, int(chosen[slot]), needed[row], bad)
            for name, frame in frames.items():
                where[row, self.sampling.names.index(name)] = len(buffer.sizes)
                buffer.add(frame)
            views.append(own)
        mask = masks[:, slots.start : slots.stop].reshape(masks.shape[0] * len(slots), -1)
        return RawBatch(
            pixels=buffer.pixels,
            sizes=buffer.sizes,
            plans=self._collate(views, where, mask),
            mask=torch.from_numpy(mask),
            counts=Counts(self.config.optim.samples, int(masks.any(axis=-1).sum()), int(masks.sum())),
            sampling=self.sampling,
            bad=tuple(bad),
        )

    def _readable_sample(
        self, step: int, slot: int, clip: int, needed: tuple[str, ...], bad: list[str]
    ) -> Sample:
        """A sample of a clip; where it cannot be read, of another that (seed, step, slot) alone decides."""
        rng = np.random.default_rng((self.config.seed, REPLACE, step, slot))
        others = rng.integers(len(self.clips.video), size=REPLACEMENTS).tolist()
        for candidate in (clip, *others):
            rng = np.random.default_rng((self.config.seed, SAMPLE, step, slot))
            try:
                frames = self.read_frames(step, slot, candidate, rng, needed)
                sizes = {name: (frame.shape[0], frame.shape[1]) for name, frame in frames.items()}
                return frames, self.sampling.views(sizes, rng)
            except InputError as error:
                bad.append(str(error))
        raise InputError(f"{len(bad)} clips could not be read, one after the other; the last: {bad[-1]}")

    def read_frames(
        self, step: int, slot: int, clip: int, rng: np.random.Generator, needed: Sequence[str]
    ) -> dict[str, Frame]:
        """The needed frames of a sample, by name."""
        video, start, length = (int(x[clip]) for x in self.clips)
        indices = self.sampling_of(video).frames(length, rng)
        read = self.store.read(video, [start + indices[name] for name in needed])
        return dict(zip(needed, read, strict=True))

    def _collate(
        self, views: list[dict[str, ViewPlan]], where: np.ndarray, mask: np.ndarray
    ) -> dict[str, ViewPlan]:
        """Views of all samples, crop by crop, on the frames that were read; some of masked crops alone."""
        masked, plans = np.flatnonzero(mask.any(axis=1)), dict[str, ViewPlan]()
        for view in self.sampling.sides:
            plan = ViewPlan.concatenate([own[view] for own in views])
            order = np.arange(len(plan)).reshape(len(views), -1)  # samples by crops
            sample = np.repeat(np.arange(len(views)), order.shape[1])
            plan = plan.with_frame(where[sample, plan.frame]).select(order.T.ravel())
            plans[view] = plan.select(masked) if view in self.sampling.only_masked else plan
        return plans


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, num_clips: int, batch: int) -> Int64[np.ndarray, " n"]:
    """Clips of an epoch in random order; a store smaller than a batch is gone through repeatedly."""
    rng = np.random.default_rng((seed, ORDER, epoch))
    rounds = max(1, -(-batch // num_clips))
    return np.concatenate([rng.permutation(num_clips) for _ in range(rounds)])


class FrameBuffer:
    """Frames of a batch behind one another without gaps; each is taken over once it is decoded.

    Padded to the largest, the frames of mixed videos would be twice as many bytes, and every byte is copied
    twice on its way to the training device.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.sizes: list[Size] = []
        self._memory, self._taken = torch.empty(0, dtype=torch.uint8), 0

    @property
    def pixels(self) -> UInt8[Tensor, " bytes"]:
        """The frames so far."""
        return self._memory[: self._taken]

    def add(self, frame: Frame) -> None:
        """Copy a frame."""
        end = self._taken + frame.size
        if end > len(self._memory):
            # Room for the rest, were they all like this one; what is not written to is no memory yet.
            before, left = self.pixels, self.count - len(self.sizes)
            self._memory = allocate(self._taken + left * frame.size)
            self.pixels[:] = before
        self._memory[self._taken : end].numpy().reshape(frame.shape)[:] = frame
        self._taken = end
        self.sizes.append((frame.shape[0], frame.shape[1]))


def allocate(size: int) -> UInt8[Tensor, " size"]:
    """Bytes; in a reading process in shared memory, from where they are handed over without another copy."""
    if get_worker_info() is None:
        return torch.empty(size, dtype=torch.uint8)
    storage = torch.UntypedStorage._new_shared(size)
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def pad(pixels: UInt8[Tensor, " bytes"], sizes: list[Size]) -> UInt8[Tensor, "{len(sizes)} height width 3"]:
    """Bring frames to the size of the largest, with zeros below and to the right."""
    if len(set(sizes)) == 1:
        return pixels.view(len(sizes), *sizes[0], 3)
    height, width = (max(sides) for sides in zip(*sizes, strict=True))
    padded = pixels.new_zeros(len(sizes), height, width, 3)
    first = 0
    for (rows, columns), run in groupby(sizes):  # frames of one video at once
        count = len(list(run))
        own, pixels = pixels.tensor_split([count * rows * columns * 3])
        padded[first : first + count, :rows, :columns] = own.view(count, rows, columns, 3)
        first += count
    return padded
