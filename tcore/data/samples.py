"""From the number of a step to what it sees: which videos, which frames, which views.

Everything random is a function of (seed, step), so a run can stop and go on anywhere, and neither the
number of training or reading processes nor the parts a step is computed in change what is seen (but for
rounding: frames of different sizes are padded to the largest of a part).
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int64, UInt8
from torch import Tensor
from torch.utils.data import Dataset

from tcore.config import Config
from tcore.data.batch import Counts
from tcore.data.buffer import FrameBuffer, pad
from tcore.data.images import Frame
from tcore.data.masking import sample_step_masks
from tcore.data.sandwich import sample_sandwich, usable
from tcore.data.stores import FrameStore, list_clips
from tcore.data.views import CURRENT, FUTURE, PAST, SamplePlan, Size, ViewPlan, sample_views
from tcore.errors import InputError

ORDER, SAMPLE, MASKS, DEPTH, NEIGHBOR, REPLACE = 1, 2, 3, 4, 5, 6  # streams of randomness that must not meet
REPLACEMENTS = 10  # clips that are tried in the place of an unreadable one


@dataclass(frozen=True)
class RawBatch:
    """What the reading processes hand over: frames as they were decoded, and what is to become of them."""

    pixels: UInt8[Tensor, " bytes"]
    """The frames behind one another."""
    sizes: list[Size]
    """Of each frame."""
    global_: ViewPlan
    local: ViewPlan
    past: ViewPlan
    future: ViewPlan
    student: ViewPlan | None
    mask: Bool[Tensor, "two_b n"]
    counts: Counts
    bad: tuple[str, ...] = ()
    """What was wrong with the clips that others stand in for."""

    @property
    def frames(self) -> UInt8[Tensor, "read height width 3"]:
        """The frames, padded to one size."""
        return pad(self.pixels, self.sizes)

    def pin_memory(self) -> "RawBatch":
        """Prepare frames and mask for an asynchronous copy; called by the loader."""
        object.__setattr__(self, "pixels", self.pixels.pin_memory())
        object.__setattr__(self, "mask", self.mask.pin_memory())
        return self


class Sample(NamedTuple):
    """Frames of one sample by their place in the sandwich, those that are looked at, and its views."""

    frames: dict[int, Frame]
    plan: SamplePlan


class Seen(NamedTuple):
    """A sample whose frames are in the batch."""

    places: tuple[int, ...]
    plan: SamplePlan


class Share(NamedTuple):
    """Which share of every part a training process reads."""

    rank: int = 0
    size: int = 1
    here: int = 1
    """Training processes on this machine, which share its cores."""


WHOLE = Share()


class Source(Dataset[RawBatch]):
    """The usable clips of a store; item i is (a share of) part i % accumulate of step i // accumulate."""

    def __init__(self, store: FrameStore, config: Config, share: Share = WHOLE) -> None:
        self.store, self.config, self.share = store, config, share
        self.offset_frames = offset_in_frames(store, config)
        sandwich = config.sandwich
        self.all_clips = list_clips(store, split_at_cuts=sandwich.cuts == "split")
        long_enough = usable(
            self.all_clips.length,
            current=sandwich.current,
            offset=sandwich.offset,
            offset_frames=self.offset_frames,
        )
        self.num_short = int((~long_enough).sum())
        repeat = sandwich.short_videos == "repeat" or config.source == "images"
        self.clips = self.all_clips if repeat else self.all_clips.select(long_enough)
        if len(self.clips.video) == 0:
            raise InputError(self._explain_unusable())

    def _explain_unusable(self) -> str:
        sandwich = self.config.sandwich
        longest = int(self.all_clips.length.max(initial=0))
        if longest == 1:
            return (
                f"these are single images, {len(self.store)} of them, not videos: run tcore neighbors on "
                "them, then tcore train vits16-imagenet (or another recipe with --source images)."
            )
        found = f"no usable video among {len(self.store)}: the longest has {longest} frames, too few for "
        if sandwich.offset_seconds is not None:
            return (
                f"{found}sandwich.offset_seconds={sandwich.offset_seconds} ({self.offset_frames} frames); "
                "use smaller offsets or longer videos."
            )
        return (
            f"{found}sandwich.offset={sandwich.offset}; "
            "use larger offsets, more frames per second, --sandwich.short-videos repeat, or, "
            "for folders of single images, --source images."
        )

    def fingerprint(self) -> str:
        """A short name for the data; a run that goes on must find the same."""
        return self.store.fingerprint()

    @property
    def steps_per_epoch(self) -> int:
        """One sandwich of every usable clip, the remainder left out."""
        return max(1, len(self.clips.video) // self.config.optim.batch)

    def __getitem__(self, index: int) -> RawBatch:
        accumulate = self.config.optim.accumulate
        return self.read(index // accumulate, index % accumulate)

    def chosen(self, step: int) -> Int64[np.ndarray, " b"]:
        """The clips of a step, in an order drawn for each epoch."""
        epoch, position = divmod(step, self.steps_per_epoch)
        batch = self.config.optim.batch
        order = _order(self.config.seed, epoch, len(self.clips.video), batch)
        return order[position * batch : (position + 1) * batch]

    def read(self, step: int, part: int) -> RawBatch:
        """Read this process' share of one part of a step."""
        size = self.config.optim.batch // self.config.optim.accumulate
        own = size // self.share.size
        first = part * size + self.share.rank * own
        return self.read_slots(step, range(first, first + own))

    def read_slots(self, step: int, slots: range) -> RawBatch:
        """Read some samples of a step, by their places in its batch."""
        config, size = self.config, len(slots)
        chosen = self.chosen(step)
        # Masks first: past and future of a video without a mask are not even read.
        masks = step_masks(config, step)
        masked = np.asarray(masks.any(axis=(0, 2)))
        wanted = [self._needs(place, bool(masked[slot])) for slot in slots for place in range(3)]
        buffer, samples, bad = FrameBuffer(sum(wanted)), list[Seen](), list[str]()
        for slot in slots:
            sample = self._readable_sample(step, slot, int(chosen[slot]), bool(masked[slot]), bad)
            for frame in sample.frames.values():
                buffer.add(frame)
            samples.append(Seen(tuple(sample.frames), sample.plan))
        mask = masks[:, slots.start : slots.stop].reshape(2 * size, -1)
        counts = Counts(config.optim.batch, int(masks.any(axis=-1).sum()), int(masks.sum()))
        return replace(_collate(samples, buffer, mask, counts), bad=tuple(bad))

    def _readable_sample(self, step: int, slot: int, clip: int, masked: bool, bad: list[str]) -> Sample:
        """A sample of a clip; where it cannot be read, of another that (seed, step, slot) alone decides."""
        rng = np.random.default_rng((self.config.seed, REPLACE, step, slot))
        others = rng.integers(len(self.clips.video), size=REPLACEMENTS).tolist()
        for candidate in (clip, *others):
            try:
                return self._sample(step, slot, candidate, masked)
            except InputError as error:
                bad.append(str(error))
        raise InputError(f"{len(bad)} clips could not be read, one after the other; the last: {bad[-1]}")

    def _sample(self, step: int, slot: int, clip: int, masked: bool) -> Sample:
        """The frames that are looked at, and the views to be made of them."""
        views = self.config.views
        rng = np.random.default_rng((self.config.seed, SAMPLE, step, slot))
        frames = self.frames(step, slot, clip, rng, masked)
        # A frame that nobody looks at has no views; any size will do for their numbers.
        sizes = [frames.get(position, frames[CURRENT]).shape[:2] for position in range(3)]
        plan = sample_views(
            rng,
            (sizes[PAST], sizes[CURRENT], sizes[FUTURE]),
            num_local=views.num_local,
            global_area=views.global_area,
            local_area=views.local_area,
            auxiliary_box=views.auxiliary_box,
            color=views.color,
            fixed_space=views.fixed_space,
            fixed_time=views.fixed_time,
        )
        return Sample(frames, plan)

    def frames(
        self, step: int, slot: int, clip: int, rng: np.random.Generator, masked: bool
    ) -> dict[int, Frame]:
        """Those of the three frames of a sample that are looked at, by their place in the sandwich."""
        sandwich = self.config.sandwich
        video, start, length = (int(x[clip]) for x in self.clips)
        indices = sample_sandwich(
            length,
            rng,
            current=sandwich.current,
            offset=sandwich.offset,
            offset_frames=self.offset_frames,
            frames=sandwich.frames,
        )
        needed = [position for position in range(3) if self._needs(position, masked)]
        read = self.store.read(video, [start + indices[position] for position in needed])
        return dict(zip(needed, read, strict=True))

    def _needs(self, position: int, masked: bool) -> bool:
        """Whether the past, current or future frame of a sample is looked at."""
        auxiliary = self.config.auxiliary
        if position == CURRENT:
            return True
        if position == PAST:
            return (masked and auxiliary in ("past", "both")) or not self.config.views.fixed_time
        return masked and auxiliary in ("future", "both")


def offset_in_frames(store: FrameStore, config: Config) -> tuple[int, int] | None:
    """Offsets given in seconds as frames of this store; None where they are fractions."""
    seconds = config.sandwich.offset_seconds
    if seconds is None:
        return None
    fps = store.fps or config.fps
    low, high = int(seconds[0] * fps), int(seconds[1] * fps)
    if low < 1:
        raise InputError(
            f"sandwich.offset_seconds={seconds} is less than one frame at {fps:g} frames per second: "
            f"need at least {1 / fps:g} s."
        )
    return low, high


def step_masks(config: Config, step: int) -> Bool[np.ndarray, "2 videos n"]:
    """The masks of a step."""
    return sample_step_masks(
        (config.seed, MASKS, step),
        config.optim.batch,
        config.views.global_size // config.vit.patch_size,
        group=config.masking.group,
        probability=config.masking.probability,
        ratio=config.masking.ratio,
        kind=config.masking.kind,
    )


def stochastic_depth_seed(seed: int, step: int, part: int, rank: int = 0) -> int:
    """The seed from which a process draws the stochastic depth of a part of a step."""
    stream = (seed, DEPTH, step, part, *((rank,) if rank else ()))
    return int(np.random.SeedSequence(stream).generate_state(1, np.uint64)[0] >> 1)


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, num_clips: int, batch: int) -> Int64[np.ndarray, " n"]:
    """Clips of an epoch in random order; a store smaller than a batch is gone through repeatedly."""
    rng = np.random.default_rng((seed, ORDER, epoch))
    rounds = max(1, -(-batch // num_clips))
    return np.concatenate([rng.permutation(num_clips) for _ in range(rounds)])


def _collate(samples: list[Seen], buffer: FrameBuffer, mask: np.ndarray, counts: Counts) -> RawBatch:
    """Views crop-major, auxiliary ones of masked crops alone."""
    # Where the frame of a sample (0 past, 1 current, 2 future) lies among those that were read.
    where = np.full(3 * len(samples), -1)
    read = [3 * i + place for i, sample in enumerate(samples) for place in sample.places]
    where[read] = np.arange(len(read))
    masked = np.flatnonzero(mask.any(axis=1))
    plans = [sample.plan for sample in samples]
    students = [plan.student for plan in plans if plan.student is not None]
    return RawBatch(
        pixels=buffer.pixels,
        sizes=buffer.sizes,
        global_=_crop_major([plan.global_ for plan in plans], where),
        local=_crop_major([plan.local for plan in plans], where),
        past=_crop_major([plan.past for plan in plans], where).select(masked),
        future=_crop_major([plan.future for plan in plans], where).select(masked),
        student=_crop_major(students, where) if students else None,
        mask=torch.from_numpy(mask),
        counts=counts,
    )


def _crop_major(plans: list[ViewPlan], where: Int64[np.ndarray, " frames"]) -> ViewPlan:
    """Views of all samples, crop by crop; frame indices become those of the batch."""
    together = ViewPlan.concatenate(plans)
    crops = len(plans[0])
    sample = np.repeat(np.arange(len(plans)), crops)
    together = together.with_frame(where[together.frame + 3 * sample])
    rows = np.arange(len(together)).reshape(len(plans), crops).T.ravel()
    return together.select(rows)
