"""Datasets on disk: what is found, and what is said where something is missing."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tcore.errors import InputError
from tcore.evaluation.benchmarks.benchmark import Benchmark
from tcore.evaluation.benchmarks.davis import Davis
from tcore.evaluation.benchmarks.jhmdb import Jhmdb, read_mat
from tcore.evaluation.benchmarks.vip import Vip
from tcore.evaluation.masks import read_ids
from tcore.evaluation.protocols import TCORE
from tests.evaluation.layouts import heldout_videos, write_davis, write_jhmdb, write_mat, write_vip

VIDEOS = heldout_videos(2, num_frames=4, size=32)
DATA = os.environ.get("TCORE_DATA")
needs_data = pytest.mark.skipif(DATA is None, reason="TCORE_DATA is not set: no real dataset to read")


def found(benchmark: type[Benchmark], root: Path) -> tuple[list[str], str]:
    opened = benchmark.open(root, TCORE)
    return [clip.name for clip in opened.clips], opened.clips_from


def test_clips_are_those_of_the_official_list_or_all(tmp_path: Path) -> None:
    root = write_davis(tmp_path / "davis", VIDEOS)
    assert found(Davis, root) == (["clip0", "clip1"], "all clips found")
    (root / "ImageSets" / "2017").mkdir(parents=True)
    (root / "ImageSets" / "2017" / "val.txt").write_text("clip1\n")
    assert found(Davis, root) == (["clip1"], "the official list")
    vip = write_vip(tmp_path / "vip", VIDEOS)
    assert found(Vip, vip) == (["videos1", "videos2"], "the official list")
    jhmdb = write_jhmdb(tmp_path / "jhmdb", VIDEOS)
    assert found(Jhmdb, jhmdb) == (["walk/clip0", "walk/clip1"], "the official list")
    assert Jhmdb.read_truth(Jhmdb.open(jhmdb, TCORE).clips[0]).shape == (2, 15, 4)
    some = Vip.open(vip, TCORE, most=1)
    assert ([clip.name for clip in some.clips], some.clips_from) == (["videos1"], "some of the official list")


def test_missing_folders_and_files_are_named_with_what_was_found(tmp_path: Path) -> None:
    (tmp_path / "JPEGImages" / "480p" / "clip").mkdir(parents=True)
    with pytest.raises(InputError, match="does not exist"):
        Davis.layout(tmp_path / "nowhere")
    for benchmark, missing in ((Davis, "Annotations/480p"), (Vip, "Images"), (Jhmdb, "Rename_Images")):
        with pytest.raises(InputError, match=rf"{missing} does not exist: .* holds JPEGImages\."):
            benchmark.layout(tmp_path)


def test_truth_of_0_and_255_asks_for_binary(tmp_path: Path) -> None:
    root = write_davis(tmp_path, VIDEOS[:1])
    path = root / "Annotations" / "480p" / "clip0" / "00000.png"
    Image.fromarray(np.where(VIDEOS[0].objects[0] > 0, 255, 0).astype(np.uint8)).save(path)
    several, one = (Davis.open(root, TCORE, binary=binary) for binary in (False, True))
    with pytest.raises(InputError, match="--binary"):
        several.check()
    assert isinstance(one, Davis)
    assert set(np.unique(one.first_labels(one.clips[0])[0])) == {0, 1}


def test_masks_are_read_by_index_and_others_refused_by_name(tmp_path: Path) -> None:
    image = Image.fromarray(np.array([[0, 1], [2, 3]], np.uint8))
    image.putpalette([9, 9, 9, 200, 0, 0, 0, 200, 0, 0, 0, 200])
    image.save(tmp_path / "mask.png")
    assert read_ids(tmp_path / "mask.png").tolist() == [[0, 1], [2, 3]]
    Image.new("RGB", (4, 4)).save(tmp_path / "color.png")
    (tmp_path / "broken.png").write_bytes(b"\x89PNG nothing")
    for name, said in (("color.png", "color.png is a RGB image"), ("broken.png", "cannot read .*broken.png")):
        with pytest.raises(InputError, match=said):
            read_ids(tmp_path / name)


@pytest.mark.parametrize("compressed", [True, False])
def test_matlab_arrays_are_read_back_and_broken_files_are_one_line(compressed: bool, tmp_path: Path) -> None:
    arrays = {"pos_img": np.random.default_rng(0).normal(size=(2, 15, 7)), "x": np.arange(6.0).reshape(2, 3)}
    write_mat(tmp_path / "a.mat", arrays, compressed)
    read = read_mat(tmp_path / "a.mat")
    assert read.keys() == arrays.keys()
    for name, values in arrays.items():
        np.testing.assert_array_equal(read[name], values)
    for data in (b"", b"not a mat file", b"MATLAB 5.0".ljust(126) + b"IM" + b"\xff" * 40):
        (tmp_path / "a.mat").write_bytes(data)
        with pytest.raises(InputError, match=r"cannot read .*a.mat"):
            read_mat(tmp_path / "a.mat")


@needs_data
def test_real_joints_are_read() -> None:
    opened = Jhmdb.open(Path(str(DATA)) / "jhmdb_clip", TCORE)
    assert (len(opened.clips), opened.clips_from) == (1, "all clips found")
    truth = Jhmdb.read_truth(opened.clips[0])
    assert truth.shape == (2, 15, 40)
    assert np.nanmin(truth) > -20
    assert np.nanmax(truth) < 340


@needs_data
def test_published_masks_score_as_published() -> None:
    data = Path(str(DATA))
    expected = json.loads((data / "davis2016_osvos" / "scores.json").read_text())
    opened = Davis.open(data / "davis2016", TCORE, binary=True)
    dog = next(clip for clip in opened.clips if clip.name == "dog")
    result = opened.score_saved(dog, data / "davis2016_osvos")
    for name in ("J", "F"):
        for part, value in expected["dog"][name].items():
            assert result[name][part] == pytest.approx(value, abs=1e-6)
