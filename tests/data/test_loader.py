"""From a step's number to its batch."""

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from jaxtyping import UInt8
from torch import Tensor

from tcore.config import (
    Config,
    MaskingConfig,
    OptimConfig,
    RuntimeConfig,
    SandwichConfig,
    ViewsConfig,
    VitConfig,
)
from tcore.data.batch import Batch, Counts, find_holes, make_batch
from tcore.data.frames import FrameStore
from tcore.data.loader import RawBatch, Source, load, offset_in_frames, render_batch, step_masks
from tcore.data.render import MEAN, STD
from tcore.data.sandwich import Frames
from tcore.data.views import NO_JITTER, ViewPlan, central_box
from tcore.errors import InputError
from tcore.model.tcore import Auxiliary

CPU = torch.device("cpu")
GRID = 4
TINY = Config(
    views=ViewsConfig(global_size=32, local_size=16, num_local=3),
    vit=VitConfig(patch_size=8),
    optim=OptimConfig(batch=4),
    runtime=RuntimeConfig(workers=0),
)
SIZES = [(20, 30), (32, 24), (26, 26), (40, 18), (24, 33)]  # height, width


class Painted(FrameStore):
    """Frames of one colour each, which says where they come from: red the video, green the frame."""

    def __init__(
        self,
        lengths: Sequence[int],
        cuts: tuple[int, ...] = (),
        fps: float | None = None,
        sizes: Sequence[tuple[int, int]] = ((20, 20),),
    ) -> None:
        self.names = [f"video-{index}" for index in range(len(lengths))]
        self.lengths = np.array(lengths, dtype=np.int64)
        self.fps = fps
        self._cuts, self._sizes = cuts, sizes

    def read(self, video: int, frames: Sequence[int]) -> list[UInt8[np.ndarray, "height width 3"]]:
        assert all(0 <= frame < self.lengths[video] for frame in frames)
        shape = (*self._sizes[video % len(self._sizes)], 3)
        return [np.full(shape, (10 * video + 5, frame, 60), np.uint8) for frame in frames]

    def cuts(self, video: int) -> tuple[int, ...]:
        return self._cuts


def videos_of(raw: RawBatch) -> list[int]:
    """The video of each sample."""
    return [(red - 5) // 10 for red in raw.frames[::3, 0, 0, 0].tolist()]


def sandwiches_of(raw: RawBatch) -> list[tuple[int, int, int]]:
    """The frames of each sample."""
    return [(p, c, f) for p, c, f in raw.frames[:, 0, 0, 1].reshape(-1, 3).tolist()]


def same_plan(first: ViewPlan, second: ViewPlan) -> bool:
    return all(np.array_equal(getattr(first, f.name), getattr(second, f.name)) for f in fields(ViewPlan))


def same(first: RawBatch, second: RawBatch) -> bool:
    return (
        torch.equal(first.frames, second.frames)
        and torch.equal(first.mask, second.mask)
        and first.counts == second.counts
        and all(
            same_plan(getattr(first, name), getattr(second, name))
            for name in ("global_", "local", "past", "future")
        )
    )


def plain(raw: RawBatch) -> RawBatch:
    """The same views in their own colours."""

    def of(plan: ViewPlan) -> ViewPlan:
        n, no = len(plan), np.zeros(len(plan), bool)
        jitter = np.tile(NO_JITTER, (n, 1))
        return replace(plan, jitter=jitter, grey=no, solarize=no, blur=np.zeros(n))

    return replace(
        raw,
        global_=of(raw.global_),
        local=of(raw.local),
        past=of(raw.past),
        future=of(raw.future),
        student=None if raw.student is None else of(raw.student),
    )


def colours_of(crops: Tensor) -> list[tuple[int, int]]:
    """Video and frame that each crop of a single colour shows."""
    pixels = 255 * (crops * torch.tensor(STD)[:, None, None] + torch.tensor(MEAN)[:, None, None])
    low, high = pixels.amin(dim=(2, 3)), pixels.amax(dim=(2, 3))
    assert (high - low).max() < 0.1, "a crop shows more than one colour"
    return [((round(red) - 5) // 10, round(green)) for red, green, _ in high.tolist()]


def batch_of(config: Config, store: FrameStore, step: int = 0) -> Batch:
    return render_batch(Source(store, config).read(step, 0), config, CPU)


@pytest.fixture(scope="module")
def rendered() -> FrameStore:
    """Videos that are rendered once."""
    return FrameStore.rendered(videos=6, frames=8, size=32)


def test_a_batch_is_a_function_of_seed_and_step(rendered: FrameStore) -> None:
    source = Source(rendered, TINY)
    first = source.read(3, 0)
    source.read(4, 0)  # reading something else in between changes nothing
    assert same(first, source.read(3, 0))
    assert same(first, Source(FrameStore.rendered(videos=6, frames=8, size=32), TINY).read(3, 0))
    assert not same(first, source.read(4, 0))
    assert not same(first, Source(rendered, replace(TINY, seed=1)).read(3, 0))


def test_every_kind_of_randomness_follows_step_and_seed() -> None:
    store = Painted([20] * 8)
    here = Source(store, TINY).read(0, 0)
    for other in (Source(store, TINY).read(2, 0), Source(store, replace(TINY, seed=1)).read(0, 0)):
        assert videos_of(here) != videos_of(other)
        assert sandwiches_of(here) != sandwiches_of(other)
        assert not torch.equal(here.mask, other.mask)
        assert not np.array_equal(here.global_.box, other.global_.box)
        assert not np.array_equal(here.local.jitter, other.local.jitter)


def test_samples_of_one_step_differ_even_for_the_same_video() -> None:
    raw = Source(Painted([20]), TINY).read(0, 0)
    assert videos_of(raw) == [0, 0, 0, 0]
    assert len(set(sandwiches_of(raw))) > 1
    assert len({box.tobytes() for box in raw.global_.box}) == 8


def test_an_epoch_uses_every_video_at_most_once_in_an_order_of_its_own() -> None:
    source = Source(Painted([20] * 11), TINY)
    assert source.steps_per_epoch == 2  # floor(11 / 4)
    epochs = [[v for step in (2 * e, 2 * e + 1) for v in videos_of(source.read(step, 0))] for e in range(6)]
    for videos in epochs:
        assert len(set(videos)) == 8
    assert len({tuple(videos) for videos in epochs}) == 6
    # The remainder that is left out changes too, so that no video is never seen.
    assert set().union(*map(set, epochs)) == set(range(11))


def test_an_order_follows_the_seed_and_the_epoch_alone() -> None:
    store = Painted([20] * 8)
    orders = [Source(store, replace(TINY, seed=seed)).chosen(0).tolist() for seed in (0, 1, 0)]
    assert orders[0] == orders[2] != orders[1]
    # Steps of the last epoch, asked for first: no state is carried on.
    source = Source(store, TINY)
    late = source.chosen(7).tolist()
    assert [source.chosen(step).tolist() for step in range(8)][7] == late


def test_a_store_smaller_than_a_batch_is_gone_through_repeatedly() -> None:
    source = Source(Painted([20] * 3), replace(TINY, optim=OptimConfig(batch=8)))
    assert source.steps_per_epoch == 1
    counts = np.bincount(videos_of(source.read(0, 0)), minlength=3)
    assert sorted(counts.tolist()) == [2, 3, 3]
    assert videos_of(source.read(1, 0)) != videos_of(source.read(0, 0))


@pytest.mark.parametrize("accumulate", [2, 4])
def test_parts_of_a_step_are_the_whole_step(rendered: FrameStore, accumulate: int) -> None:
    divided = Source(rendered, replace(TINY, optim=OptimConfig(batch=4, accumulate=accumulate)))
    whole = Source(rendered, TINY).read(2, 0)
    parts = [divided[2 * accumulate + part] for part in range(accumulate)]
    size = 4 // accumulate
    assert torch.equal(torch.cat([part.frames for part in parts]), whole.frames)
    masks = torch.cat([part.mask.reshape(2, size, -1) for part in parts], dim=1)
    assert torch.equal(masks.reshape(8, -1), whole.mask)
    assert all(part.counts == whole.counts for part in parts)
    for name, crops in (("global_", 2), ("local", 3)):
        boxes = [getattr(part, name).box.reshape(crops, size, 4) for part in parts]
        together = np.concatenate(boxes, axis=1).reshape(-1, 4)
        assert np.array_equal(together, getattr(whole, name).box)
        frames = [
            getattr(part, name).frame.reshape(crops, size) + 3 * size * i for i, part in enumerate(parts)
        ]
        assert np.array_equal(np.concatenate(frames, axis=1).ravel(), getattr(whole, name).frame)
    assert sum(len(part.past) for part in parts) == len(whole.past)


def test_counts_are_those_of_the_whole_step() -> None:
    config = replace(TINY, optim=OptimConfig(batch=4, accumulate=2))
    masks = step_masks(config, 5)
    assert masks.shape == (2, 4, GRID * GRID)
    raw = Source(Painted([20] * 4), config).read(5, 1)
    assert raw.counts == Counts(4, 4, int(masks.sum()))
    assert torch.equal(raw.mask, torch.from_numpy(masks[:, 2:].reshape(4, -1)))
    assert render_batch(raw, config, CPU).counts == raw.counts


def test_masks_do_not_depend_on_the_videos_and_follow_their_settings() -> None:
    config = replace(TINY, masking=MaskingConfig(probability=0.75, ratio=(0.5, 0.5), group=2))
    for step in range(10):
        masks = Source(Painted([20] * 4), config).read(step, 0).mask
        assert torch.equal(masks, Source(Painted([30] * 9), config).read(step, 0).mask)
        per_group = masks.reshape(2, 2, 2, -1).any(dim=3).sum(dim=(0, 2))  # crop, group, video
        assert per_group.tolist() == [3, 3]
        assert set(masks.sum(dim=1).tolist()) == {0, 8}


def test_masks_are_blocks_or_independent_patches_as_set() -> None:
    views = replace(TINY.views, global_size=112)  # 14 x 14 patches
    pairs = []
    for masking in (MaskingConfig(kind="block"), MaskingConfig(kind="random")):
        masks = step_masks(replace(TINY, views=views, masking=masking, optim=OptimConfig(batch=16)), 0)
        grid = masks.reshape(32, 14, 14)
        pairs.append(int((grid[:, 1:] & grid[:, :-1]).sum()))
    assert pairs[0] > 1.5 * pairs[1]


def test_areas_of_the_crops_are_those_set() -> None:
    views = replace(TINY.views, global_area=(0.8, 0.9), local_area=(0.1, 0.15))
    raw = Source(Painted([20] * 4, sizes=[(90, 90)]), replace(TINY, views=views)).read(0, 0)
    for plan, low, high in [(raw.global_, 0.8, 0.9), (raw.local, 0.1, 0.15)]:
        shares = plan.box[:, 2] * plan.box[:, 3] / 90**2
        assert np.all((low - 0.02 < shares) & (shares < high + 0.02))  # sides are rounded


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on a machine with one core
def test_the_number_of_readers_does_not_change_the_batches() -> None:
    batches = []
    for workers in (0, 2):
        config = replace(
            TINY, runtime=RuntimeConfig(workers=workers), optim=OptimConfig(batch=2, accumulate=2)
        )
        source = Source(FrameStore.rendered(videos=3, frames=8, size=32), config)
        batches.append(list(load(source, 1, 3, CPU)))
    alone, together = batches
    assert len(alone) == len(together) == 4
    assert all(same(a, b) for a, b in zip(alone, together, strict=True))


def test_loading_starts_at_any_step_and_ends_before_the_last() -> None:
    source = Source(Painted([20] * 8), TINY)
    loaded = list(load(source, 3, 5, CPU))
    assert len(loaded) == 2
    assert same(loaded[0], source.read(3, 0))
    assert same(loaded[1], source.read(4, 0))
    assert list(load(source, 5, 5, CPU)) == []


@pytest.mark.parametrize(
    ("frames", "expected"),
    [("past-future", (16, 20, 24)), ("past-past", (16, 20, 16)), ("future-future", (24, 20, 24))],
)
def test_settings_of_the_sandwich_decide_which_frames_are_read(
    frames: Frames, expected: tuple[int, int, int]
) -> None:
    sandwich = SandwichConfig(current=(0.5, 0.525), offset=(0.1, 0.1), frames=frames)
    raw = Source(Painted([40] * 4), replace(TINY, sandwich=sandwich)).read(0, 0)
    assert set(sandwiches_of(raw)) == {expected}


def test_views_are_taken_from_the_frames_they_belong_to() -> None:
    config = replace(TINY, masking=MaskingConfig(probability=1.0))
    source = Source(Painted([20] * 6), config)
    raw = source.read(0, 0)
    triples = list(zip(videos_of(raw), sandwiches_of(raw), strict=True))
    assert all(past < current < future for _, (past, current, future) in triples)
    batch = render_batch(plain(raw), config, CPU)
    # Crop-major: all videos of the first crop, then all of the second.
    assert colours_of(batch.global_crops) == [(v, s[1]) for v, s in triples] * 2
    assert colours_of(batch.local_crops) == [(v, s[1]) for v, s in triples] * 3
    assert batch.past is not None
    assert batch.future is not None
    assert colours_of(batch.past) == [(v, s[0]) for v, s in triples] * 2
    assert colours_of(batch.future) == [(v, s[2]) for v, s in triples] * 2


@pytest.mark.parametrize("step", range(3))
def test_only_masked_crops_get_past_and_future_views(step: int) -> None:
    source = Source(Painted([20] * 6), TINY)
    raw = source.read(step, 0)
    videos, sandwiches = videos_of(raw), sandwiches_of(raw)
    batch = render_batch(plain(raw), TINY, CPU)
    masked = raw.mask.any(dim=1).nonzero().squeeze(1)
    assert len(masked) == 4  # of 8 crops
    assert torch.equal(batch.masked, masked)
    assert batch.past is not None
    assert batch.future is not None
    assert colours_of(batch.past) == [(videos[i % 4], sandwiches[i % 4][0]) for i in masked.tolist()]
    assert colours_of(batch.future) == [(videos[i % 4], sandwiches[i % 4][2]) for i in masked.tolist()]


def test_crops_and_their_auxiliary_views_keep_their_photometric_recipe() -> None:
    source = Source(Painted([20] * 4), replace(TINY, masking=MaskingConfig(probability=1.0)))
    batches = [source.read(step, 0) for step in range(25)]
    for name in ("global_", "past", "future"):
        blur = np.stack([getattr(raw, name).blur.reshape(2, 4) > 0 for raw in batches])
        solarize = np.stack([getattr(raw, name).solarize.reshape(2, 4) for raw in batches])
        assert not blur[:, 0].any()
        assert not solarize[:, 0].any()
        assert 0.8 < blur[:, 1].mean() <= 1  # .9
        assert 0.05 < solarize[:, 1].mean() < 0.35  # .2
        assert not any(getattr(raw, name).flip.any() for raw in batches)
    assert 0.4 < np.mean([raw.local.flip.mean() for raw in batches]) < 0.6


def test_auxiliary_views_of_a_masked_second_crop_keep_its_recipe() -> None:
    source = Source(Painted([20] * 4), TINY)
    first, second = [], []
    for step in range(25):
        raw = source.read(step, 0)
        masked = raw.mask.any(dim=1).nonzero().squeeze(1).numpy()
        first += [raw.past.blur[masked < 4], raw.future.blur[masked < 4]]
        second += [raw.past.blur[masked >= 4], raw.future.blur[masked >= 4]]
    assert not np.concatenate(first).any()
    assert (np.concatenate(second) > 0).mean() > 0.8


@pytest.mark.parametrize("auxiliary", ["none", "past", "future", "both"])
def test_shapes_follow_the_auxiliary_branch(rendered: FrameStore, auxiliary: Auxiliary) -> None:
    config = replace(TINY, auxiliary=auxiliary)
    batch = batch_of(config, rendered)
    assert batch.global_crops.shape == (8, 3, 32, 32)
    assert batch.local_crops.shape == (12, 3, 16, 16)
    assert batch.mask.shape == (8, GRID * GRID)
    assert batch.masked.shape == (4,)
    expected = (4, 3, 32, 32)
    assert (batch.past is None) == (auxiliary in ("none", "future"))
    assert (batch.future is None) == (auxiliary in ("none", "past"))
    assert all(views.shape == expected for views in (batch.past, batch.future) if views is not None)
    assert torch.equal(batch.teacher_crops, batch.global_crops)  # the same pixels


def test_the_auxiliary_branch_changes_nothing_else(rendered: FrameStore) -> None:
    both, none = (batch_of(replace(TINY, auxiliary=a), rendered) for a in ("both", "none"))
    assert torch.equal(both.global_crops, none.global_crops)
    assert torch.equal(both.local_crops, none.local_crops)
    assert torch.equal(both.mask, none.mask)


def test_without_masks_there_are_no_auxiliary_views() -> None:
    batch = batch_of(replace(TINY, masking=MaskingConfig(probability=0.0)), Painted([20] * 4))
    assert batch.past is not None
    assert batch.past.shape == (0, 3, 32, 32)
    assert batch.holes.shape == batch.hole_weights.shape == batch.masked.shape == (0,)
    assert batch.counts == Counts(4, 0, 0)


@pytest.mark.parametrize(
    ("fixed_space", "fixed_time"), [(True, True), (False, True), (True, False), (False, False)]
)
def test_alignment_decides_which_box_and_frame_the_student_sees(fixed_space: bool, fixed_time: bool) -> None:
    views = replace(TINY.views, fixed_space=fixed_space, fixed_time=fixed_time)
    config = replace(TINY, auxiliary="none", views=views)
    raw = Source(Painted([20] * 4, sizes=[(64, 64)]), config).read(0, 0)
    videos, sandwiches = videos_of(raw), sandwiches_of(raw)
    batch = render_batch(plain(raw), config, CPU)
    teacher = [(v, s[1]) for v, s in zip(videos, sandwiches, strict=True)] * 2
    past = [(v, s[0]) for v, s in zip(videos, sandwiches, strict=True)] * 2
    assert colours_of(batch.teacher_crops) == teacher
    assert colours_of(batch.global_crops) == (teacher if fixed_time else past)
    student = raw.global_ if raw.student is None else raw.student
    assert np.array_equal(student.box, raw.global_.box) == fixed_space
    if not fixed_space:
        assert not (student.box == raw.global_.box).all(axis=1).any()


@pytest.mark.parametrize(("fixed_space", "fixed_time"), [(False, True), (True, False), (False, False)])
def test_teacher_and_student_pixels_differ_only_in_the_alignment_ablations(
    rendered: FrameStore, fixed_space: bool, fixed_time: bool
) -> None:
    aligned = batch_of(replace(TINY, auxiliary="none"), rendered)
    views = replace(TINY.views, fixed_space=fixed_space, fixed_time=fixed_time)
    moved = batch_of(replace(TINY, auxiliary="none", views=views), rendered)
    assert torch.equal(aligned.global_crops, aligned.teacher_crops)
    assert torch.equal(moved.teacher_crops, aligned.teacher_crops)
    assert torch.equal(moved.local_crops, aligned.local_crops)
    different = (moved.global_crops - moved.teacher_crops).abs().amax(dim=(1, 2, 3)) > 0.01
    assert different.all()


def test_frames_of_different_sizes_share_a_batch_without_showing_their_padding() -> None:
    config = replace(TINY, masking=MaskingConfig(probability=1.0), optim=OptimConfig(batch=5))
    raw = Source(Painted([20] * 5, sizes=SIZES), config).read(0, 0)
    videos = videos_of(raw)
    assert raw.frames.shape == (15, 40, 33, 3)
    batch = render_batch(plain(raw), config, CPU)
    assert batch.past is not None
    assert batch.future is not None
    for crops in (batch.global_crops, batch.local_crops, batch.past, batch.future):
        shown = [video for video, _ in colours_of(crops)]  # one colour each: no padding
        assert shown == videos * (len(crops) // 5)
    for sample, video in enumerate(videos):
        assert raw.past.box[sample].tolist() == list(central_box(SIZES[video]))
        assert np.array_equal(raw.past.box[sample], raw.future.box[sample])


def test_short_videos_are_counted_and_left_out() -> None:
    source = Source(Painted([6, 7, 1, 20, 3, 8]), replace(TINY, optim=OptimConfig(batch=3)))
    assert source.num_short == 3
    assert source.steps_per_epoch == 1
    assert {v for step in range(4) for v in videos_of(source.read(step, 0))} == {1, 3, 5}


def test_short_videos_are_repeated_on_request() -> None:
    config = replace(TINY, sandwich=SandwichConfig(short_videos="repeat"), optim=OptimConfig(batch=4))
    source = Source(Painted([6, 7, 1, 2]), config)
    assert source.num_short == 3
    raw = source.read(0, 0)
    shown = dict(zip(videos_of(raw), sandwiches_of(raw), strict=True))
    assert set(shown) == {0, 1, 2, 3}
    assert shown[2] == shown[3] == (0, 0, 0)
    past, current, future = shown[1]
    assert (current - past, future - current) == (1, 1)


def test_a_store_of_short_videos_alone_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"no usable video among 3: the longest has 6 frames.*\(0\.15, 0\.25\)"
    ):
        Source(Painted([6, 5, 1]), TINY)


def test_cuts_keep_a_sandwich_within_its_shot_when_split() -> None:
    store = Painted([10 + 12 + 4], cuts=(10, 22))
    split = Source(store, replace(TINY, sandwich=SandwichConfig(cuts="split"), optim=OptimConfig(batch=2)))
    assert split.num_short == 1  # the shot of four frames
    for step in range(20):
        shots = sorted(sandwiches_of(split.read(step, 0)))
        assert all(0 <= frame < 10 for frame in shots[0])
        assert all(10 <= frame < 22 for frame in shots[1])
        # Each with its own T: 3..6 of ten frames, 3..7 of twelve.
        assert 3 <= shots[0][1] <= 6
        assert 13 <= shots[1][1] <= 17


def test_cuts_are_crossed_when_ignored() -> None:
    source = Source(Painted([20], cuts=(10,)), replace(TINY, optim=OptimConfig(batch=1)))
    crossing = [min(s) < 10 <= max(s) for step in range(20) for s in sandwiches_of(source.read(step, 0))]
    assert sum(crossing) > 10
    assert source.num_short == 0


def in_seconds(*seconds: float) -> Config:
    first, last = seconds
    return replace(TINY, sandwich=SandwichConfig(offset_seconds=(first, last)))


def test_offsets_in_seconds_become_frames_of_the_store() -> None:
    config = in_seconds(1.5, 2.5)
    assert offset_in_frames(Painted([20]), TINY) is None
    assert offset_in_frames(Painted([20]), config) == (3, 5)  # 2 frames per second
    assert offset_in_frames(Painted([20]), replace(config, fps=10.0)) == (15, 25)
    assert offset_in_frames(Painted([20], fps=4.0), replace(config, fps=10.0)) == (6, 10)


def test_offsets_in_seconds_do_not_grow_with_the_video() -> None:
    source = Source(Painted([250] * 4), in_seconds(1.5, 2.5))
    for step in range(8):
        for past, current, future in sandwiches_of(source.read(step, 0)):
            assert 75 <= current <= 174
            assert 3 <= current - past <= 5
            assert 3 <= future - current <= 5


def test_videos_without_room_for_offsets_in_seconds_are_short() -> None:
    source = Source(Painted([10, 11, 12, 20]), in_seconds(1.5, 2.5))
    assert source.num_short == 1
    current = {
        (v, s[1])
        for t in range(30)
        for raw in [source.read(t, 0)]
        for v, s in zip(videos_of(raw), sandwiches_of(raw), strict=True)
    }
    assert {c for v, c in current if v == 1} == {5}
    assert {c for v, c in current if v == 2} == {5, 6}
    assert {c for v, c in current if v == 3} == set(range(6, 14))


def test_offsets_below_one_frame_are_refused() -> None:
    config = in_seconds(0.4, 2.0)
    with pytest.raises(InputError, match=r"offset_seconds=\(0\.4, 2\.0\) is less than one frame at 2 frames"):
        Source(Painted([20] * 4), config)
    Source(Painted([20] * 4, fps=2.5), config)  # one frame


def test_offsets_in_seconds_that_fit_no_video_are_refused_with_advice_that_helps() -> None:
    config = in_seconds(9.0, 10.0)
    with pytest.raises(InputError) as caught:
        Source(Painted([20] * 4), config)
    assert "sandwich.offset_seconds=(9.0, 10.0)" in str(caught.value)
    assert "repeat" not in str(caught.value)  # offsets in seconds are never repeated


def test_holes_are_the_masked_patches_of_the_masked_crops() -> None:
    mask = torch.tensor([[0, 1, 1, 0], [0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]]).bool()
    found = find_holes(mask)
    assert found.masked.tolist() == [0, 2, 3]
    assert found.holes.tolist() == [1, 2, 4, 8, 9, 10, 11]
    assert found.hole_weights.tolist() == [0.5, 0.5, 1, 0.25, 0.25, 0.25, 0.25]


def test_a_batch_without_counts_is_the_whole_step() -> None:
    mask = torch.tensor([[0, 1, 1, 0], [0, 0, 0, 0]]).bool()
    crops = torch.zeros(2, 3, 16, 16)
    batch = make_batch(crops, torch.zeros(3, 3, 8, 8), mask)
    assert batch.counts == Counts(1, 1, 2)
    assert batch.teacher_crops is batch.global_crops
    assert batch.past is batch.future is None
