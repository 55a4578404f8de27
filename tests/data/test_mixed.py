"""Photographs that a camera moves over, and several stores as one."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tcore.data.prepare import prepare
from tcore.data.stores import (
    FrameStore,
    MixedStore,
    MovedStore,
    Pose,
    ingredients,
    look,
    open_images,
    open_mixture,
    pose,
)
from tcore.errors import InputError
from tcore.training.loop import train
from tests.tiny import tiny


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    folder = tmp_path / "photographs"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for index in range(4):
        coarse = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8))
        coarse.resize((96, 72), Image.Resampling.BICUBIC).save(folder / f"{index}.png")
    return folder


def test_a_photograph_becomes_a_video_that_moves_smoothly(photographs: Path) -> None:
    store = MovedStore(open_images(photographs), seed=1)
    frames = np.stack(store.read(2, range(20))).astype(float)
    assert frames.shape == (20, 50, 67, 3)
    near = np.abs(np.diff(frames, axis=0)).mean(axis=(1, 2, 3))
    far = np.abs(frames[0] - frames[-1]).mean()
    assert (near > 0.3).all()  # it never stands still
    assert near.max() < far  # and never jumps


def test_the_way_of_the_camera_follows_from_seed_and_video(photographs: Path) -> None:
    images = open_images(photographs)
    first, again, other = (MovedStore(images, seed).read(0, [3, 9]) for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert MovedStore(images, 1).fingerprint() != MovedStore(images, 2).fingerprint()
    assert pose(1, 0, 0.5) != pose(1, 1, 0.5)


@pytest.mark.parametrize("corner", [(-1.0, -1.0), (1.0, -1.0), (-1.0, 1.0), (1.0, 1.0)])
def test_the_frame_never_leaves_the_photograph(corner: tuple[float, float]) -> None:
    white = Image.new("RGB", (90, 60), (255, 255, 255))
    for turn in (-0.3, 0.0, 0.3):
        for zoom in (0.6, 1.0, 1.4):
            seen = look(white, Pose(*corner, turn, zoom, 1.0))
            # A cubic filter needs a pixel beyond; nothing but that may be dark.
            assert (seen[2:-2, 2:-2] == 255).all(), (turn, zoom)


def test_camera_moves_the_way_it_says() -> None:
    ramp = np.tile(np.arange(100, dtype=np.uint8)[None, :, None], (80, 1, 3))
    picture = Image.fromarray(ramp)
    left, right = (look(picture, Pose(x, 0.0, 0.0, 1.0, 1.0)).mean() for x in (-0.5, 0.5))
    assert right - left == pytest.approx(15, abs=0.5)  # half of the 30 pixels of room
    near, wide = (np.ptp(look(picture, Pose(0.0, 0.0, 0.0, zoom, 1.0))[40, 5:-5]) for zoom in (1.2, 1.0))
    assert near < wide
    assert look(picture, Pose(0, 0, 0, 1.0, 1.1)).mean() > look(picture, Pose(0, 0, 0, 1.0, 1.0)).mean()


def test_a_mixture_is_its_stores_behind_one_another() -> None:
    a, b = FrameStore.rendered(videos=2, frames=8, size=32), FrameStore.rendered(videos=1, frames=9, size=40)
    mixed = MixedStore([a, b], [2, 3])
    assert mixed.lengths.tolist() == [8, 8, 8, 8, 9, 9, 9]
    assert len(set(mixed.names)) == 7
    assert np.array_equal(mixed.read(3, [5]), a.read(1, [5]))
    assert np.array_equal(mixed.read(6, [0, 8]), b.read(0, [0, 8]))
    assert mixed.fps == 2.0


def test_mixtures_are_read_as_they_are_written(tmp_path: Path) -> None:
    found = ingredients("clips*5+photographs:photos*2+store")
    assert [tuple(one) for one in found] == [("clips", False, 5), ("photos", True, 2), ("store", False, 1)]
    odd = tmp_path / "a+b*3"
    odd.mkdir()
    assert ingredients(str(odd))[0].place == str(odd)  # what exists is meant as it is
    with pytest.raises(InputError, match=r"cannot read 'x\*0'"):
        ingredients("clips+x*0")
    with pytest.raises(InputError, match="nowhere does not exist"):
        open_mixture("nowhere+elsewhere", 0)


def test_training_runs_on_a_mixture(photographs: Path, tmp_path: Path) -> None:
    clips = tmp_path / "clips"
    for video in range(3):
        (clips / str(video)).mkdir(parents=True)
        for number, frame in enumerate(FrameStore.rendered(videos=3, size=48).read(video, range(20))):
            Image.fromarray(frame).save(clips / str(video) / f"{number:05d}.jpg")
    run = train(tiny(), tmp_path / "run", f"{clips}*2+photographs:{photographs}", quiet=True)
    assert (run / "encoder.safetensors").exists()
    assert "photographs:" in (run / "environment.json").read_text()


def test_rendered_videos_can_be_packed_beforehand(tmp_path: Path) -> None:
    summary = prepare(Path("rendered:3"), tmp_path / "store", short_side=64, engine="here")
    assert summary is not None
    store = FrameStore.open(tmp_path / "store")
    assert store.lengths.tolist() == [20, 20, 20]
    assert store.fps == 2
    expected = FrameStore.rendered(videos=3, size=64).read(2, [7])[0]
    found = store.read(2, [7])[0]
    assert np.abs(found.astype(int) - expected).mean() < 12  # JPEG
    with pytest.raises(InputError, match="--fps 3 does not apply to rendered"):
        prepare(Path("rendered:3"), tmp_path / "other", fps=3)
