"""Labels that go forward and back return to their place where features follow what moves."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tcore import FrameStore, InputError, load_encoder, recipe, train
from tcore.evaluation.cycle import (
    DRAWS,
    REGIONS,
    cycle_consistency,
    random_regions,
    rendered_clips,
    share_returned,
    store_clips,
)
from tcore.evaluation.encoder import Encoder
from tcore.methods import build


def noise(time: int, seed: int = 0) -> Tensor:
    return torch.randn(time, 32, 12, 12, generator=torch.Generator().manual_seed(seed))


def test_more_returns_the_better_features_follow_what_moves() -> None:
    wide = torch.randn(32, 12, 24, generator=torch.Generator().manual_seed(0))
    moved = torch.stack([wide[:, :, t : t + 12] for t in range(6)])
    same = torch.ones(6, 8, 12, 12)
    assert share_returned(noise(1).expand(6, -1, -1, -1)) == 1, "identical frames"
    found = [share_returned(features, reach=0) for features in (same, noise(6), moved)]
    assert found == sorted(found)
    assert found[0] < 0.4, "features that are all the same"
    assert found[2] > found[1] + 0.05
    assert share_returned(moved) > found[2]


def test_one_frame_is_no_cycle_and_frames_of_any_size_are_brought_to_sixteen_patches() -> None:
    with pytest.raises(InputError, match="a clip of 1 frames"):
        share_returned(noise(1))
    encoder = load_encoder("random:vitti16")
    with pytest.raises(InputError, match="no clips"):
        cycle_consistency(encoder, [])
    clips = [list(np.random.default_rng(0).integers(0, 255, (2, 90, 140, 3), dtype=np.uint8))]
    assert 0 < cycle_consistency(encoder, clips) <= 1


def test_regions_cover_the_grid_once_and_are_the_same_each_time() -> None:
    regions = random_regions(6, 9)
    assert regions.shape == (DRAWS, REGIONS, 6, 9)
    assert (regions.sum(dim=1) == 1).all()
    assert torch.equal(regions, random_regions(6, 9))


def test_clips_come_from_the_beginnings_of_a_store_that_is_spread_over() -> None:
    store = FrameStore.rendered(videos=7, frames=12, size=32)
    clips = list(store_clips(store, count=3, frames=4))
    assert [len(clip) for clip in clips] == [4, 4, 4]
    for clip, video in zip(clips, (0, 3, 6), strict=True):
        assert np.array_equal(np.stack(clip), np.stack(store.read(video, range(4))))
    with pytest.raises(InputError, match="two frames"):
        list(store_clips(FrameStore.rendered(videos=2, frames=1, size=32)))


@pytest.mark.long
def test_more_returns_with_a_trained_encoder_than_with_an_untrained_one(tmp_path: Path) -> None:
    config = recipe("quickstart", {"optim.steps": 150})
    untrained = Encoder(build(config).encoder(), "untrained")
    trained = load_encoder(train(config, tmp_path / "run", quiet=True))
    assert cycle_consistency(trained) > cycle_consistency(untrained) + 0.02
    assert len(list(rendered_clips(32, count=2, frames=3))) == 2
