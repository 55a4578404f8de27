"""Batches: which pixels their views show, and what is masked of them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tcore.config import Config, OptimConfig
from tcore.data.loader import render_batch
from tcore.data.source import Counts, RawBatch
from tcore.data.stores import FrameStore
from tcore.data.views import NO_JITTER, ViewPlan, central_box
from tcore.methods import build_source
from tcore.methods.batch import Batch, make_batch
from tcore.methods.settings import Auxiliary
from tcore.methods.settings_groups import MaskingConfig
from tests.data.painted import ALL_MASKED, GRID, TINY, Painted, colors_of, samples_of
from tests.tiny import change

CPU = torch.device("cpu")
SIZES = [(20, 30), (32, 24), (26, 26), (40, 18), (24, 33)]  # height, width


def plain(raw: RawBatch) -> RawBatch:
    """The same views in their own colors."""

    def of(plan: ViewPlan) -> ViewPlan:
        n, no = len(plan), np.zeros(len(plan), bool)
        jitter = np.tile(NO_JITTER, (n, 1))
        return replace(plan, jitter=jitter, gray=no, solarize=no, blur=np.zeros(n))

    return replace(raw, plans={name: of(plan) for name, plan in raw.plans.items()})


def batch_of(config: Config, store: FrameStore, step: int = 0) -> Batch:
    batch: Batch = render_batch(build_source(store, config).read(step, 0), CPU)
    return batch


@pytest.mark.parametrize("step", range(3))
def test_only_masked_crops_get_past_and_future_views(step: int) -> None:
    store = Painted([20] * 6)
    samples = samples_of(build_source(store, ALL_MASKED).read(step, 0))  # masks do not decide what is chosen
    assert all(past < current < future for _, (past, current, future) in samples)
    raw = build_source(store, TINY).read(step, 0)
    batch = render_batch(plain(raw), CPU)
    masked = raw.mask.any(dim=1).nonzero().squeeze(1)
    assert len(masked) == 4  # of 8 crops
    assert torch.equal(batch.masked, masked)
    assert batch.past is not None
    assert batch.future is not None
    of_masked = [samples[i % 4] for i in masked.tolist()]
    assert colors_of(batch.past) == [(v, s[0]) for v, s in of_masked]
    assert colors_of(batch.future) == [(v, s[2]) for v, s in of_masked]
    # Crop-major: all videos of the first crop, then all of the second.
    assert colors_of(batch.global_crops) == [(v, s[1]) for v, s in samples] * 2
    assert colors_of(batch.local_crops) == [(v, s[1]) for v, s in samples] * 3


@pytest.mark.parametrize("other", ["none", "past", "future"])
def test_the_auxiliary_branch_changes_nothing_else(rendered: FrameStore, other: Auxiliary) -> None:
    both, fewer = (batch_of(change(TINY, auxiliary=a), rendered) for a in ("both", other))
    assert both.global_crops.shape == (8, 3, 32, 32)
    assert both.local_crops.shape == (12, 3, 16, 16)
    assert both.mask.shape == (8, GRID * GRID)
    assert (fewer.past is None) == (other != "past")
    assert (fewer.future is None) == (other != "future")
    assert torch.equal(both.global_crops, fewer.global_crops)
    assert torch.equal(both.local_crops, fewer.local_crops)
    assert torch.equal(both.mask, fewer.mask)
    for name in ("past", "future"):
        if getattr(fewer, name) is not None:
            assert torch.equal(getattr(both, name), getattr(fewer, name))


def test_without_masks_there_are_no_auxiliary_views() -> None:
    batch = batch_of(change(TINY, masking=MaskingConfig(probability=0.0)), Painted([20] * 4))
    assert batch.past is not None
    assert batch.past.shape == (0, 3, 32, 32)
    assert batch.masked_patches.shape == batch.patch_weights.shape == batch.masked.shape == (0,)
    assert batch.counts == Counts(4, 0, 0)


@pytest.mark.parametrize("fixed_time", [True, False])
def test_alignment_decides_which_frame_the_student_sees(fixed_time: bool) -> None:
    views = replace(TINY.views, fixed_space=False, fixed_time=fixed_time)
    store = Painted([20] * 4, sizes=[(64, 64)])
    samples = samples_of(build_source(store, ALL_MASKED).read(0, 0))
    raw = build_source(store, change(TINY, auxiliary="none", views=views)).read(0, 0)
    batch = render_batch(plain(raw), CPU)
    current, past = ([(v, s[place]) for v, s in samples] * 2 for place in (1, 0))
    assert colors_of(batch.teacher_crops) == current
    assert colors_of(batch.global_crops) == (current if fixed_time else past)


def test_frames_of_different_sizes_share_a_batch_without_showing_their_padding() -> None:
    config = change(ALL_MASKED, optim=OptimConfig(batch=5))
    raw = build_source(Painted([20] * 5, sizes=SIZES), config).read(0, 0)
    videos = [video for video, _ in samples_of(raw)]
    assert raw.frames.shape == (15, 40, 33, 3)
    batch = render_batch(plain(raw), CPU)
    assert batch.past is not None
    assert batch.future is not None
    for crops in (batch.global_crops, batch.local_crops, batch.past, batch.future):
        shown = [video for video, _ in colors_of(crops)]  # one color each: no padding
        assert shown == videos * (len(crops) // 5)
    for sample, video in enumerate(videos):
        assert raw.plans["past"].box[sample].tolist() == list(central_box(SIZES[video]))
        assert np.array_equal(raw.plans["past"].box[sample], raw.plans["future"].box[sample])


def test_masked_patches_are_indexed_within_the_masked_crops() -> None:
    mask = torch.tensor([[0, 1, 1, 0], [0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]]).bool()
    found = make_batch(torch.zeros(4, 3, 4, 4), torch.zeros(2, 3, 2, 2), mask)
    assert found.masked.tolist() == [0, 2, 3]
    assert found.masked_patches.tolist() == [1, 2, 4, 8, 9, 10, 11]
    assert found.patch_weights.tolist() == [0.5, 0.5, 1, 0.25, 0.25, 0.25, 0.25]


def test_a_batch_without_counts_is_the_whole_step() -> None:
    mask = torch.tensor([[0, 1, 1, 0], [0, 0, 0, 0]]).bool()
    crops = torch.zeros(2, 3, 16, 16)
    batch = make_batch(crops, torch.zeros(3, 3, 8, 8), mask)
    assert batch.counts == Counts(1, 1, 2)
    assert batch.teacher_crops is batch.global_crops
    assert batch.past is batch.future is None


@pytest.mark.parametrize("name", ["past", "future"])
@pytest.mark.parametrize("num_views", [0, 1, 3, 4])
def test_a_batch_has_as_many_auxiliary_views_as_masked_crops(name: str, num_views: int) -> None:
    mask = torch.tensor([[0, 1, 1, 0], [0, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]).bool()
    crops, local = torch.zeros(4, 3, 16, 16), torch.zeros(3, 3, 8, 8)
    views = torch.zeros(num_views, 3, 16, 16)
    past, future = (views, None) if name == "past" else (None, views)
    with pytest.raises(ValueError, match=f"{name} has {num_views} views for 2 masked crops"):
        make_batch(crops, local, mask, past, future)
