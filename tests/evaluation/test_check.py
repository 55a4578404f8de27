"""What `tcore check` finds in benchmarks: what is missing is named, all of it."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tcore.evaluation.check import check_benchmark, recognize
from tests.data.test_check import told
from tests.evaluation.layouts import heldout_videos, write_davis, write_jhmdb, write_mat, write_vip

VIDEOS = heldout_videos(2, num_frames=4, size=32)


@pytest.fixture
def davis(tmp_path: Path) -> Path:
    return write_davis(tmp_path / "d", VIDEOS)


def test_a_whole_davis_says_how_it_differs_from_the_official_one(davis: Path, tmp_path: Path) -> None:
    assert (recognize(davis), recognize(tmp_path)) == ("davis", None)
    findings = check_benchmark("davis", davis)
    assert findings.exit_code == 0
    assert findings.figures["frames"] == 8
    assert findings.figures["objects"] == sum(int(video.objects[0].max()) for video in VIDEOS)
    assert "2 of 30 clips" in told(findings, "warning")


def test_every_file_that_is_missing_broken_or_of_another_size_is_named(davis: Path) -> None:
    (davis / "ImageSets/2017").mkdir(parents=True)
    (davis / "ImageSets/2017/val.txt").write_text("clip0\nclip1\nblackswan\ncamel\n")
    Image.fromarray(np.zeros((8, 9), np.uint8)).save(davis / "Annotations/480p/clip0/00001.png")
    frame = davis / "JPEGImages/480p/clip0/00003.png"
    frame.write_bytes(frame.read_bytes()[:100])
    (davis / "Annotations/480p/clip1/00002.png").unlink()
    findings = check_benchmark("davis", davis)
    problems = told(findings, "error")
    assert findings.exit_code == 1
    assert findings.figures["whole"] == 0
    assert "official list" in findings.text()
    assert "clip blackswan has 0 frames" in problems
    assert "clip camel has 0 frames" in problems
    assert "00001.png is 9x8, its frame 32x32" in problems
    assert f"cannot read frame {frame}" in problems
    assert "clip clip1: 00002 has a frame or a mask, but not both (1 such)" in problems
    shutil.rmtree(davis / "Annotations")
    assert "480p does not exist" in told(check_benchmark("davis", davis), "error")


def test_masks_of_one_object_ask_for_binary(davis: Path) -> None:
    for path in (davis / "Annotations").rglob("*.png"):
        with Image.open(path) as mask:
            binary = np.where(np.asarray(mask) > 0, 255, 0).astype(np.uint8)
        Image.fromarray(binary).save(path)
    findings = check_benchmark("davis", davis)
    assert "--binary" in told(findings, "advice")
    assert findings.figures["objects"] == 2


def test_a_davis_without_masks_beyond_the_first_cannot_be_scored(davis: Path) -> None:
    for path in (davis / "Annotations/480p").glob("*/0000[1-9].png"):
        path.unlink()
    findings = check_benchmark("davis", davis)
    assert findings.exit_code == 0
    assert "no masks beyond the first frame" in told(findings, "warning")


def test_vip_wants_a_mask_for_every_frame(tmp_path: Path) -> None:
    root = write_vip(tmp_path / "v", VIDEOS)
    assert recognize(root) == "vip"
    assert check_benchmark("vip", root).exit_code == 0
    (root / "Annotations/Category_ids/videos2/00003.png").unlink()
    findings = check_benchmark("vip", root)
    assert "clip videos2: 00003 has a frame or a mask" in told(findings, "error")
    assert "1 of 50 clips" in told(findings, "warning")


def test_jhmdb_wants_joints_of_every_frame_and_all_split_files(tmp_path: Path) -> None:
    root = write_jhmdb(tmp_path / "j", VIDEOS)
    assert recognize(root) == "jhmdb"
    findings = check_benchmark("jhmdb", root)
    assert findings.exit_code == 0
    assert "20 of 21 files splits/ACTION_test_split1.txt are missing" in told(findings, "warning")
    (root / "joint_positions/walk/clip0/joint_positions.mat").unlink()
    write_mat(root / "joint_positions/walk/clip1/joint_positions.mat", {"pos_img": np.ones((2, 15, 3))})
    problems = told(check_benchmark("jhmdb", root), "error")
    assert "clip walk/clip0 is not complete" in problems
    assert "clip walk/clip1 has 4 frames, but joints of 3" in problems
