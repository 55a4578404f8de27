"""Which videos and frames a step takes."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from jaxtyping import UInt8
from PIL import Image

from tcore.config import Config, OptimConfig
from tcore.data.stores import FrameStore
from tcore.errors import InputError
from tcore.methods import build_sampling, build_source
from tcore.methods.sampling import SandwichSampling
from tcore.methods.settings import Auxiliary, SandwichConfig
from tests.data.painted import ALL_MASKED, TINY, Painted, paint, samples_of, sandwiches_of, videos_of
from tests.tiny import change

# Epochs


def test_an_epoch_uses_every_video_at_most_once_in_an_order_of_its_own() -> None:
    source = build_source(Painted([20] * 11), TINY)
    assert source.steps_per_epoch == 2  # floor(11 / 4)
    epochs = [[v for step in (2 * e, 2 * e + 1) for v in videos_of(source.read(step, 0))] for e in range(6)]
    for videos in epochs:
        assert len(set(videos)) == 8
    assert len({tuple(videos) for videos in epochs}) == 6
    # The remainder that is left out changes too, so that no video is never seen.
    assert set().union(*map(set, epochs)) == set(range(11))


def test_a_store_smaller_than_a_batch_is_gone_through_repeatedly() -> None:
    source = build_source(Painted([20] * 3), change(TINY, optim=OptimConfig(batch=8)))
    assert source.steps_per_epoch == 1
    counts = np.bincount(videos_of(source.read(0, 0)), minlength=3)
    assert sorted(counts.tolist()) == [2, 3, 3]
    assert videos_of(source.read(1, 0)) != videos_of(source.read(0, 0))


# Which frames are read


class Counting(Painted):
    """Painted videos that write down what is read of them."""

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__(lengths)
        self.log: list[tuple[int, tuple[int, ...]]] = []

    def read(self, video: int, frames: Sequence[int]) -> list[UInt8[np.ndarray, "height width 3"]]:
        self.log.append((video, tuple(frames)))
        return super().read(video, frames)


def has_mask(config: Config, step: int) -> list[bool]:
    """Which videos of a step are masked, in either crop."""
    return [bool(masks.any()) for masks in build_sampling(config).masks(step).swapaxes(0, 1)]


@pytest.mark.parametrize(
    ("auxiliary", "of_masked"), [("none", (1,)), ("past", (0, 1)), ("future", (1, 2)), ("both", (0, 1, 2))]
)
def test_frames_that_nobody_looks_at_are_not_read(auxiliary: Auxiliary, of_masked: tuple[int, ...]) -> None:
    config = change(TINY, auxiliary=auxiliary)
    num_masked = 0
    for step in range(6):
        samples = samples_of(build_source(Painted([20] * 6), ALL_MASKED).read(step, 0))
        masked = has_mask(config, step)
        store = Counting([20] * 6)
        raw = build_source(store, config).read(step, 0)
        expected = [
            (video, tuple(sandwich[position] for position in (of_masked if is_masked else (1,))))
            for (video, sandwich), is_masked in zip(samples, masked, strict=True)
        ]
        assert store.log == expected
        assert raw.frames[:, 0, 0].tolist() == [[*paint(v, f)] for v, frames in expected for f in frames]
        num_masked += sum(masked)
    assert 0 < num_masked < 6 * 4  # there were videos of either kind


@pytest.mark.parametrize(("fixed_time", "positions"), [(True, (1,)), (False, (0, 1))])
def test_a_student_that_looks_at_the_past_has_it_read_with_and_without_masks(
    fixed_time: bool, positions: tuple[int, ...]
) -> None:
    views = replace(TINY.views, fixed_space=False, fixed_time=fixed_time)
    samples = samples_of(build_source(Painted([20] * 6), ALL_MASKED).read(0, 0))
    store = Counting([20] * 6)
    build_source(store, change(TINY, auxiliary="none", views=views)).read(0, 0)
    assert store.log == [(video, tuple(s[position] for position in positions)) for video, s in samples]


def save_painted(folder: Path) -> None:
    """Four painted videos as folders of images."""
    for video in range(4):
        (folder / f"video-{video}").mkdir()
        for frame in range(20):
            Image.new("RGB", (20, 20), paint(video, frame)).save(folder / f"video-{video}" / f"{frame}.png")


def test_a_broken_frame_matters_only_where_it_is_looked_at(tmp_path: Path) -> None:
    save_painted(tmp_path)
    masked = has_mask(TINY, 0)
    samples = samples_of(build_source(FrameStore.open(tmp_path), ALL_MASKED).read(0, 0))
    source = build_source(FrameStore.open(tmp_path), TINY)
    whole = source.read(0, 0)

    def broken(slot: int, position: int) -> Path:
        video, sandwich = samples[slot]
        path = tmp_path / f"video-{video}" / f"{sandwich[position]}.png"
        path.write_bytes(b"")
        return path

    for position in (0, 2):
        broken(masked.index(False), position)
    assert torch.equal(source.read(0, 0).frames, whole.frames)
    assert source.read(0, 0).bad == ()
    path = broken(masked.index(True), 0)
    assert str(path) in source.read(0, 0).bad[0]


def test_an_unreadable_clip_is_replaced_by_another_that_seed_step_and_slot_decide(tmp_path: Path) -> None:
    save_painted(tmp_path)
    source = build_source(FrameStore.open(tmp_path), ALL_MASKED)
    whole = [videos_of(source.read(step, 0)) for step in range(6)]
    for path in (tmp_path / "video-1").iterdir():
        path.write_bytes(b"")
    again = build_source(FrameStore.open(tmp_path), ALL_MASKED)
    for step, before in enumerate(whole):
        raw = source.read(step, 0)
        after = videos_of(raw)
        assert 1 not in after
        assert len(raw.bad) >= before.count(1)
        assert [b for a, b in zip(before, after, strict=True) if a != 1] == [a for a in before if a != 1]
        assert torch.equal(again.read(step, 0).frames, raw.frames)
        # Nor does it matter how a batch is shared among processes.
        slots = [videos_of(source.read_slots(step, range(i, i + 1))) for i in range(len(before))]
        assert [video for slot in slots for video in slot] == after


# Short videos


def test_short_videos_are_counted_and_left_out_repeated_or_refused() -> None:
    source = build_source(Painted([6, 7, 1, 20, 3, 8]), change(TINY, optim=OptimConfig(batch=3)))
    assert source.num_short == 3
    assert {v for step in range(4) for v in videos_of(source.read(step, 0))} == {1, 3, 5}
    source = build_source(Painted([6, 7, 1, 2]), change(ALL_MASKED, sandwich__short_videos="repeat"))
    assert source.num_short == 3
    shown = dict(samples_of(source.read(0, 0)))
    assert set(shown) == {0, 1, 2, 3}
    assert shown[2] == shown[3] == (0, 0, 0)
    with pytest.raises(
        InputError, match=r"no usable video among 3: the longest has 6 frames.*\(0\.15, 0\.25\)"
    ):
        build_source(Painted([6, 5, 1]), TINY)


# Cuts


def test_cuts_keep_a_sandwich_within_its_shot_when_split_and_are_crossed_when_ignored() -> None:
    store = Painted([10 + 12 + 4], cuts=(10, 22))
    split, whole = (
        build_source(store, change(ALL_MASKED, sandwich__cuts=cuts, optim=OptimConfig(batch=2)))
        for cuts in ("split", "ignore")
    )
    assert any(min(s) < 10 <= max(s) for step in range(20) for s in sandwiches_of(whole.read(step, 0)))
    assert split.num_short == 1  # the shot of four frames
    for step in range(20):
        shots = sorted(sandwiches_of(split.read(step, 0)))
        assert all(0 <= frame < 10 for frame in shots[0])
        assert all(10 <= frame < 22 for frame in shots[1])
        # Each with its own T: 3..6 of ten frames, 3..7 of twelve.
        assert 3 <= shots[0][1] <= 6
        assert 13 <= shots[1][1] <= 17


# Offsets in seconds


def in_seconds(*seconds: float) -> Config:
    first, last = seconds
    return change(ALL_MASKED, sandwich=SandwichConfig(offset_seconds=(first, last)))


def test_offsets_in_seconds_become_frames_of_the_store() -> None:
    def offsets(store: Painted, config: Config) -> tuple[int, int] | None:
        sampling = build_source(store, config).sampling
        assert isinstance(sampling, SandwichSampling)
        return sampling.offset_frames

    config = in_seconds(1.5, 2.5)
    assert offsets(Painted([90]), TINY) is None
    assert offsets(Painted([90]), config) == (3, 5)  # 2 frames per second
    assert offsets(Painted([90]), change(config, fps=10.0)) == (15, 25)
    assert offsets(Painted([90], fps=4.0), change(config, fps=10.0)) == (6, 10)


def test_offsets_in_seconds_that_cannot_work_are_refused() -> None:
    config = in_seconds(0.4, 2.0)
    with pytest.raises(InputError, match=r"offset_seconds=\(0\.4, 2\.0\) is less than one frame at 2 frames"):
        build_source(Painted([20] * 4), config)
    build_source(Painted([20] * 4, fps=2.5), config)  # one frame
    with pytest.raises(InputError, match=r"sandwich\.offset_seconds=\(9\.0, 10\.0\)") as caught:
        build_source(Painted([20] * 4), in_seconds(9.0, 10.0))
    assert "repeat" not in str(caught.value)  # offsets in seconds are never repeated
