"""Datasets on disk: what is found, and what is said where something is missing."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tcore.errors import InputError
from tcore.evaluation import davis, jhmdb, vip
from tcore.evaluation.masks import read_ids
from tcore.evaluation.matfile import read_mat
from tcore.evaluation.rendered import heldout_videos
from tcore.evaluation.resize import input_size
from tests.evaluation.layouts import write_davis, write_jhmdb, write_mat, write_vip

VIDEOS = heldout_videos(2, num_frames=4, size=32)
DATA = os.environ.get("TCORE_DATA")
needs_data = pytest.mark.skipif(DATA is None, reason="TCORE_DATA is not set: no real dataset to read")


def test_davis_takes_the_clips_of_its_list(tmp_path: Path) -> None:
    root = write_davis(tmp_path, VIDEOS)
    assert [clip.name for clip in davis.find_clips(root)[0]] == ["clip0", "clip1"]
    assert davis.find_clips(root)[1] is False
    (root / "ImageSets" / "2017").mkdir(parents=True)
    (root / "ImageSets" / "2017" / "val.txt").write_text("clip1\n")
    clips, listed = davis.find_clips(root)
    assert ([clip.name for clip in clips], listed) == (["clip1"], True)


def test_missing_masks_are_named_with_what_was_found(tmp_path: Path) -> None:
    (tmp_path / "JPEGImages" / "480p" / "clip").mkdir(parents=True)
    with pytest.raises(InputError, match=r"no masks under .*Annotations/480p; found JPEGImages/\."):
        davis.find_clips(tmp_path)
    with pytest.raises(InputError, match="does not exist"):
        davis.find_clips(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"no frames under .*Images; found JPEGImages/"):
        vip.find_clips(tmp_path)
    with pytest.raises(InputError, match=r"no frames under .*Rename_Images; found JPEGImages/"):
        jhmdb.find_clips(tmp_path)


def test_missing_frame_is_named(tmp_path: Path) -> None:
    root = write_davis(tmp_path, VIDEOS)
    (root / "JPEGImages" / "480p" / "clip1" / "00002.png").unlink()
    with pytest.raises(InputError, match="clip1: 00002 has a frame or a mask, but not both"):
        davis.find_clips(root)


def test_truth_of_0_and_255_asks_for_binary(tmp_path: Path) -> None:
    root = write_davis(tmp_path, VIDEOS[:1])
    path = root / "Annotations" / "480p" / "clip0" / "00000.png"
    Image.fromarray(np.where(VIDEOS[0].objects[0] > 0, 255, 0).astype(np.uint8)).save(path)
    clip = davis.find_clips(root)[0][0]
    with pytest.raises(InputError, match="--binary"):
        davis.read_truth(clip, 0, binary=False)
    assert set(np.unique(davis.read_truth(clip, 0, binary=True))) == {0, 1}


def test_palette_masks_are_read_by_index(tmp_path: Path) -> None:
    image = Image.fromarray(np.array([[0, 1], [2, 3]], np.uint8))
    image.putpalette([9, 9, 9, 200, 0, 0, 0, 200, 0, 0, 0, 200])
    image.save(tmp_path / "mask.png")
    assert read_ids(tmp_path / "mask.png").tolist() == [[0, 1], [2, 3]]


def test_color_and_broken_masks_are_refused_by_name(tmp_path: Path) -> None:
    Image.new("RGB", (4, 4)).save(tmp_path / "color.png")
    (tmp_path / "broken.png").write_bytes(b"\x89PNG nothing")
    with pytest.raises(InputError, match=r"color.png is a RGB image"):
        read_ids(tmp_path / "color.png")
    with pytest.raises(InputError, match=r"cannot read mask .*broken.png"):
        read_ids(tmp_path / "broken.png")


def test_vip_sizes_follow_the_long_side() -> None:
    assert input_size((1280, 720), 16, long=vip.LONG_SIDE, multiple=vip.MULTIPLE) == (880, 448)


def test_vip_takes_its_list(tmp_path: Path) -> None:
    clips, listed = vip.find_clips(write_vip(tmp_path, VIDEOS))
    assert ([clip.name for clip in clips], listed) == (["videos1", "videos2"], True)


def test_jhmdb_takes_the_test_clips_of_split_1(tmp_path: Path) -> None:
    root = write_jhmdb(tmp_path, VIDEOS)
    clips, listed = jhmdb.find_clips(root)
    assert ([clip.name for clip in clips], listed) == (["walk/clip0", "walk/clip1"], True)
    assert jhmdb.read_truth(clips[0]).shape == (2, 15, 4)


@pytest.mark.parametrize("compressed", [True, False])
def test_matlab_arrays_are_read_back(compressed: bool, tmp_path: Path) -> None:
    arrays = {"pos_img": np.random.default_rng(0).normal(size=(2, 15, 7)), "x": np.arange(6.0).reshape(2, 3)}
    write_mat(tmp_path / "a.mat", arrays, compressed)
    found = read_mat(tmp_path / "a.mat")
    assert found.keys() == arrays.keys()
    for name, values in arrays.items():
        np.testing.assert_array_equal(found[name], values)


@pytest.mark.parametrize("data", [b"", b"not a mat file", b"MATLAB 5.0".ljust(126) + b"IM" + b"\xff" * 40])
def test_broken_matlab_files_are_one_line(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.mat").write_bytes(data)
    with pytest.raises(InputError, match=r"cannot read .*a.mat"):
        read_mat(tmp_path / "a.mat")


@needs_data
def test_real_joints_are_read() -> None:
    clips, listed = jhmdb.find_clips(Path(str(DATA)) / "jhmdb_clip")
    assert (len(clips), listed) == (1, False)
    truth = jhmdb.read_truth(clips[0])
    assert truth.shape == (2, 15, 40)
    assert np.nanmin(truth) > -20
    assert np.nanmax(truth) < 340


@needs_data
def test_published_masks_score_as_published() -> None:
    import json

    from tcore.evaluation.score import score_sequence

    data = Path(str(DATA))
    expected = json.loads((data / "davis2016_osvos" / "scores.json").read_text())
    clips = {clip.name: clip for clip in davis.find_clips(data / "davis2016")[0]}
    found = score_sequence(clips["dog"], data / "davis2016_osvos", binary=True)
    for name in ("J", "F"):
        for part, value in expected["dog"][name].items():
            assert found[name][part] == pytest.approx(value, abs=1e-6)
