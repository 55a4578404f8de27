"""From a step's number to its batch: randomness, parts, masks, reading processes."""

import shutil
import sys
import threading
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tcore.config import OptimConfig, RuntimeConfig
from tcore.data.images import Frame
from tcore.data.loader import holds_frames, load, render_batch
from tcore.data.render import normalize, render_pixels
from tcore.data.source import Counts, FrameBuffer, RawBatch, pad
from tcore.data.stores import FrameStore, hold_frames, open_mixture
from tcore.data.views import ViewPlan
from tcore.errors import InputError
from tcore.methods import build_sampling, build_source
from tcore.methods.settings import Auxiliary
from tcore.methods.settings_groups import MaskingConfig
from tests.data.clips import break_jpeg, write_clip
from tests.data.painted import ALL_MASKED, TINY, Painted, sandwiches_of, videos_of
from tests.tiny import change

CPU = torch.device("cpu")


def same(first: RawBatch, second: RawBatch) -> bool:
    return (
        torch.equal(first.frames, second.frames)
        and torch.equal(first.mask, second.mask)
        and first.counts == second.counts
        and all(
            np.array_equal(getattr(first.plans[name], field.name), getattr(second.plans[name], field.name))
            for name in ("global", "local", "past", "future")
            for field in fields(ViewPlan)
        )
    )


def test_a_batch_is_a_function_of_seed_and_step(rendered: FrameStore) -> None:
    source = build_source(rendered, TINY)
    first = source.read(3, 0)
    source.read(4, 0)  # reading something else in between changes nothing
    assert same(first, source.read(3, 0))
    assert same(first, build_source(FrameStore.rendered(videos=6, frames=8, size=32), TINY).read(3, 0))
    assert not same(first, source.read(4, 0))
    assert not same(first, build_source(rendered, change(TINY, seed=1)).read(3, 0))


def test_every_kind_of_randomness_follows_step_and_seed() -> None:
    store = Painted([20] * 8)
    here = build_source(store, ALL_MASKED).read(0, 0)
    for other in (
        build_source(store, ALL_MASKED).read(2, 0),
        build_source(store, change(ALL_MASKED, seed=1)).read(0, 0),
    ):
        assert videos_of(here) != videos_of(other)
        assert sandwiches_of(here) != sandwiches_of(other)
        assert not torch.equal(here.mask, other.mask)
        assert not np.array_equal(here.plans["global"].box, other.plans["global"].box)
        assert not np.array_equal(here.plans["local"].jitter, other.plans["local"].jitter)


def test_samples_of_one_step_differ_even_for_the_same_video() -> None:
    raw = build_source(Painted([20]), ALL_MASKED).read(0, 0)
    assert len(set(sandwiches_of(raw))) > 1
    assert len({box.tobytes() for box in raw.plans["global"].box}) == 8


def test_parts_of_a_step_are_the_whole_step(rendered: FrameStore) -> None:
    accumulate = 2
    divided = build_source(rendered, change(TINY, optim=OptimConfig(batch=4, accumulate=accumulate)))
    whole = build_source(rendered, TINY).read(1, 0)
    assert len(whole.frames) == 10  # a video without a mask has but one
    parts = list(load(divided, 1, 2, CPU))
    size = 4 // accumulate
    # Where the frames of each part begin among those of the whole.
    first = np.cumsum([0] + [len(part.frames) for part in parts[:-1]])
    assert torch.equal(torch.cat([part.frames for part in parts]), whole.frames)
    masks = torch.cat([part.mask.reshape(2, size, -1) for part in parts], dim=1)
    assert torch.equal(masks.reshape(8, -1), whole.mask)
    drawn = build_sampling(TINY).masks(1)
    assert torch.equal(whole.mask, torch.from_numpy(drawn.reshape(8, -1)))
    for raw in (whole, *parts):
        assert raw.counts == render_batch(raw, CPU).counts == Counts(4, 4, int(drawn.sum()))
    for name, crops in (("global", 2), ("local", 3)):
        boxes = [part.plans[name].box.reshape(crops, size, 4) for part in parts]
        together = np.concatenate(boxes, axis=1).reshape(-1, 4)
        assert np.array_equal(together, whole.plans[name].box)
        frames = [
            part.plans[name].frame.reshape(crops, size) + start
            for part, start in zip(parts, first, strict=True)
        ]
        assert np.array_equal(np.concatenate(frames, axis=1).ravel(), whole.plans[name].frame)
    assert sum(len(part.plans["past"]) for part in parts) == len(whole.plans["past"])
    for name in ("past", "future"):
        of_parts = [part.plans[name].frame + start for part, start in zip(parts, first, strict=True)]
        assert sorted(np.concatenate(of_parts)) == sorted(whole.plans[name].frame)


@pytest.mark.parametrize(
    ("auxiliary", "fixed_space"), [("none", False), ("past", True), ("future", True), ("both", True)]
)
def test_crops_that_are_made_together_are_those_of_their_plans(
    rendered: FrameStore, auxiliary: Auxiliary, fixed_space: bool
) -> None:
    views = replace(TINY.views, fixed_space=fixed_space)
    config = change(TINY, auxiliary=auxiliary, views=views, masking=MaskingConfig(probability=0.5))
    raw = build_source(rendered, config).read(3, 0)
    batch = render_batch(raw, CPU)
    assert ("student" in raw.plans) == (not fixed_space)
    kinds = {"teacher_crops": "global", "past": "past", "future": "future", "local_crops": "local"}
    for name, view in (kinds | {"global_crops": "global" if fixed_space else "student"}).items():
        found = getattr(batch, name)
        if name in ("past", "future") and auxiliary not in (name, "both"):
            assert found is None
            assert view not in raw.plans
        else:
            size = views.local_size if view == "local" else views.global_size
            torch.testing.assert_close(found, normalize(render_pixels(raw.frames, raw.plans[view], size)))


def test_auxiliary_views_of_a_masked_second_crop_keep_its_recipe() -> None:
    source = build_source(Painted([20] * 4), TINY)
    first, second = [], []
    for step in range(25):
        raw = source.read(step, 0)
        masked = raw.mask.any(dim=1).nonzero().squeeze(1).numpy()
        first += [raw.plans["past"].blur[masked < 4], raw.plans["future"].blur[masked < 4]]
        second += [raw.plans["past"].blur[masked >= 4], raw.plans["future"].blur[masked >= 4]]
    assert not np.concatenate(first).any()
    assert (np.concatenate(second) > 0).mean() > 0.8


def test_the_number_of_readers_does_not_change_the_batches() -> None:
    batches = []
    for workers in (0, 2):
        config = replace(
            TINY, runtime=RuntimeConfig(workers=workers), optim=OptimConfig(batch=2, accumulate=2)
        )
        source = build_source(FrameStore.rendered(videos=3, frames=8, size=32), config)
        batches.append(list(load(source, 1, 3, CPU)))
    alone, together = batches
    own = [source.read(step, part) for step in (1, 2) for part in (0, 1)]
    assert all(same(a, b) and same(b, c) for a, b, c in zip(alone, together, own, strict=True))
    assert list(load(source, 5, 5, CPU)) == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU needs pinned memory")
def test_what_goes_to_the_device_is_pinned() -> None:
    (raw,) = load(build_source(Painted([20] * 4), TINY), 0, 1, torch.device("cuda"))
    assert raw.frames.is_pinned()
    assert raw.mask.is_pinned()


def frames_of(sizes: list[tuple[int, int]]) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(1, 256, (*size, 3), dtype=np.uint8) for size in sizes]


@pytest.mark.parametrize(
    "sizes",
    [
        [(4, 6)] * 5,
        [(4, 6), (4, 6), (5, 7), (3, 9), (3, 9), (4, 6)],
        [(2, 2), (3, 3), (9, 9), (20, 30), (40, 50)],  # more room is needed again and again
    ],
)
def test_every_frame_is_found_again_in_its_corner_and_the_rest_is_zero(sizes: list[tuple[int, int]]) -> None:
    frames, buffer = frames_of(sizes), FrameBuffer(len(sizes))
    for frame in frames:
        buffer.add(frame)
    assert len(buffer.pixels) == sum(frame.size for frame in frames), "there are gaps"
    padded = pad(buffer.pixels, buffer.sizes)
    plain = np.zeros((len(sizes), *np.max(sizes, axis=0), 3), np.uint8)
    for row, frame in zip(plain, frames, strict=True):
        row[: frame.shape[0], : frame.shape[1]] = frame
    assert torch.equal(padded, torch.from_numpy(plain))
    # Frames of one size are not copied again.
    assert (padded.data_ptr() == buffer.pixels.data_ptr()) == (len(set(sizes)) == 1)


@pytest.mark.skipif(sys.platform != "linux", reason="reading processes are forked on Linux alone")
def test_frames_that_are_held_are_decoded_once_and_batches_stay_the_same(tmp_path: Path) -> None:
    for number in range(5):
        write_clip(tmp_path / f"{'one' if number < 2 else 'two'}/{number}", 8, seed=number)
    break_jpeg(tmp_path / "two/3/00004.jpg")  # read as before, and replaced where it is drawn
    store = open_mixture(f"{tmp_path / 'one'}*2+{tmp_path / 'two'}", 0)
    source = build_source(store, change(TINY, runtime__workers=1, runtime__hold_gib=1.0))
    plain = [source.read(step, 0) for step in range(24)]
    assert any(raw.bad for raw in plain)
    parts = load(source, 0, 24, CPU)
    first = next(parts)
    for whole in ("one/0", "one/1", "two/2", "two/4"):
        shutil.rmtree(tmp_path / whole)
    for before, now in zip(plain, (first, *parts), strict=True):
        assert same(before, now)
        assert before.bad == now.bad


def held_videos(store: FrameStore, root: Path) -> list[bool]:
    """Which videos can be read when the files are gone."""
    shutil.move(root, root.with_name("away"))
    found = []
    for video in range(len(store)):
        try:
            found.append(len(store.read(video, [0, 7])) == 2)
        except InputError:
            found.append(False)
    shutil.move(root.with_name("away"), root)
    return found


def test_as_many_videos_as_fit_are_held_and_repeats_count_once(tmp_path: Path) -> None:
    root = tmp_path / "clips"
    for name, frames in (("one/a", 8), ("two/a", 24), ("two/b", 8), ("two/c", 8)):
        write_clip(root / name, frames)
    break_jpeg(root / "two/b/00004.jpg")  # takes no room in the end
    store = open_mixture(f"{root / 'one'}*3+{root / 'two'}", 0)  # six videos, four of them different
    short = 8 * 32 * 32 * 3 / 2**30
    for clips, expected in ((0.99, ""), (1.01, "012"), (2.01, "0125"), (3.99, "0125"), (5.01, "01235")):
        held = hold_frames(store, clips * short, 1)
        assert held_videos(held, root) == [str(video) in expected for video in range(6)]
        for video in range(6):  # the others are read as before
            for pair in zip(held.read(video, [0, 7]), store.read(video, [0, 7]), strict=True):
                np.testing.assert_array_equal(*pair)


def test_frames_are_held_elsewhere_than_on_linux_where_the_training_process_reads_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    settings = change(TINY, runtime__hold_gib=1.0, runtime__workers=None)
    with pytest.raises(InputError, match=r"runtime\.hold_gib=1: .* --runtime\.workers 0"):
        holds_frames(build_source(Painted([20] * 4), settings))
    assert holds_frames(build_source(Painted([20] * 4), change(settings, runtime__workers=0)))
    rendered = FrameStore.rendered(videos=2, frames=10, size=32)
    assert not holds_frames(build_source(rendered, settings))


class Counting(Painted):
    """Counts the frames that are decoded."""

    decoded, lock = 0, threading.Lock()

    def read(self, video: int, frames: Sequence[int]) -> list[Frame]:
        with self.lock:
            self.decoded += len(frames)
        return super().read(video, frames)


def test_many_threads_decode_no_more_than_there_is_room_for() -> None:
    store, threads = Counting([20] * 40), 16
    frame = store.read(0, [0])[0].nbytes
    store.decoded = 0
    hold_frames(store, 3.005 * 20 * frame / 2**30, threads)
    # Three videos, and of those that are tried beside them no more than the first frame.
    assert 3 * 20 <= store.decoded <= 3 * 20 + threads
