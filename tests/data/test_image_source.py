"""Images as videos of one frame, and a neighbor in the place of the past."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tcore.config import Config
from tcore.data.loader import render_batch
from tcore.data.neighbors import ImageSource
from tcore.data.source import RawBatch
from tcore.data.stores import FrameStore, ImageStore, open_images
from tcore.errors import InputError
from tcore.methods import build_sampling, build_source
from tests.data.painted import ALL_MASKED, TINY, Painted, videos_of
from tests.data.photos import ring
from tests.tiny import change

IMAGES = change(ALL_MASKED, source="images", auxiliary="past")
NUMBER = 12


def image_source(config: Config = IMAGES, first: int = 1, k: int = 5) -> ImageSource:
    store = Painted([1] * NUMBER)
    return ImageSource(store, config, build_sampling(config), ring(NUMBER, k, store.fingerprint(), first))


def past_of(raw: RawBatch) -> list[int]:
    """The image that each sample has for a past, by the frame of its past view for the first global crop."""
    frames = raw.plans["past"].frame[: len(raw.mask) // 2]
    return [(red - 5) // 10 for red in raw.frames[torch.from_numpy(frames), 0, 0, 0].tolist()]


def test_images_at_any_depth_are_videos_of_one_frame_in_natural_order(tmp_path: Path) -> None:
    for name in ("b10.png", "b2.png", "deep/er/a.jpg", "c/1.jpeg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 6), (200, 10, 10)).save(tmp_path / name)
    (tmp_path / "notes.txt").write_text("no image")
    store = open_images(tmp_path)
    assert isinstance(store, ImageStore)
    assert list(store.names) == ["b2.png", "b10.png", "c/1.jpeg", "deep/er/a.jpg"]
    assert store.lengths.tolist() == [1, 1, 1, 1]
    (pixels,) = store.read(0, [0])
    assert pixels.shape == (6, 8, 3)
    # An image more is another store.
    before = store.fingerprint()
    Image.new("RGB", (8, 6)).save(tmp_path / "z.png")
    assert open_images(tmp_path).fingerprint() != before


def test_videos_are_not_taken_for_images_nor_images_for_videos(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(FrameStore, "open", staticmethod(lambda path: Painted([1, 7, 1])))
    with pytest.raises(InputError, match="videos of up to 7 frames, not single images"):
        open_images(tmp_path)
    with pytest.raises(InputError, match=r"single images, 12 of them.*tcore neighbors.*vits16-imagenet"):
        build_source(Painted([1] * NUMBER), TINY)


def test_the_past_of_an_image_is_any_of_its_neighbors_equally_often() -> None:
    source = image_source()
    raw = source.read(0, 0)
    assert all(p in source.neighbors.indices[i] for i, p in zip(videos_of(raw), past_of(raw), strict=True))
    draws = Counter((source.neighbor(step, slot, 0) - 1) % NUMBER for step in range(500) for slot in range(4))
    assert sorted(draws) == [0, 1, 2, 3, 4]
    # 2,000 draws: a deviation of 20 % of the expected 400 is 4.5 standard deviations.
    assert all(320 < count < 480 for count in draws.values())


def test_a_draw_follows_seed_step_and_slot_alone() -> None:
    def drawn(config: Config) -> list[int]:
        source = image_source(config)
        return [source.neighbor(step, slot, 3) for step in range(8) for slot in range(4)]

    assert drawn(IMAGES) == drawn(IMAGES) != drawn(change(IMAGES, seed=1))
    late = image_source().read(7, 0)
    source = image_source()
    assert [past_of(source.read(step, 0)) for step in range(8)][7] == past_of(late)


def test_other_neighbors_change_the_past_and_nothing_else() -> None:
    mine, others = (image_source(first=first).read(0, 0) for first in (1, 6))
    assert videos_of(mine) == videos_of(others)
    assert set(past_of(mine)) != set(past_of(others))
    mine_batch, other_batch = (render_batch(raw, torch.device("cpu")) for raw in (mine, others))
    assert torch.equal(mine_batch.global_crops, other_batch.global_crops)
    assert torch.equal(mine_batch.local_crops, other_batch.local_crops)
    assert mine_batch.past is not None
    assert other_batch.past is not None
    assert mine_batch.future is None
    assert not torch.equal(mine_batch.past, other_batch.past)


def test_the_views_of_the_image_are_those_of_the_run_without_neighbors() -> None:
    store = Painted([1] * NUMBER)
    alone = build_source(store, change(IMAGES, auxiliary="none")).read(3, 0)
    with_neighbors = image_source().read(3, 0)
    assert np.array_equal(alone.plans["global"].box, with_neighbors.plans["global"].box)
    assert np.array_equal(alone.plans["global"].jitter, with_neighbors.plans["global"].jitter)
    assert alone.frames.shape[0] == 4
    assert with_neighbors.frames.shape[0] == 8
    # An image without a mask reads no neighbor.
    assert image_source(change(IMAGES, masking__probability=0.0)).read(0, 0).frames.shape[0] == 4


def test_neighbors_are_part_of_what_a_run_was_trained_on() -> None:
    prints = {image_source(first=first).fingerprint() for first in (1, 2, 1)}
    assert len(prints) == 2
    assert build_source(Painted([1] * NUMBER), change(IMAGES, auxiliary="none")).fingerprint() not in prints
