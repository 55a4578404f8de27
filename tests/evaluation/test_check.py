"""What `tcore check` finds in benchmarks: what is missing is named, all of it."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tcore.data.findings import Findings
from tcore.data.rendered import RenderedVideo, render_video
from tcore.errors import InputError
from tcore.evaluation.benchmarks.davis import Davis
from tcore.evaluation.check import check_benchmark, recognize
from tcore.evaluation.protocols import TCORE
from tests.evaluation.layouts import write_davis, write_jhmdb, write_mat, write_vip


@pytest.fixture(scope="module")
def videos() -> list[RenderedVideo]:
    return [render_video(0, index, num_frames=4, size=32) for index in range(2)]


def told(findings: Findings, level: str) -> str:
    return "\n".join(problem.text for problem in findings.problems if problem.level == level)


def test_layouts_are_recognized(tmp_path: Path, videos: list[RenderedVideo]) -> None:
    assert recognize(write_davis(tmp_path / "d", videos)) == "davis"
    assert recognize(write_vip(tmp_path / "v", videos)) == "vip"
    assert recognize(write_jhmdb(tmp_path / "j", videos)) == "jhmdb"
    assert recognize(tmp_path) is None


def test_a_whole_davis_says_how_it_differs_from_the_official_one(
    tmp_path: Path, videos: list[RenderedVideo]
) -> None:
    findings = check_benchmark("davis", write_davis(tmp_path / "d", videos))
    assert findings.exit_code == 0
    assert findings.figures["frames"] == 8
    assert findings.figures["objects"] == sum(int(video.objects[0].max()) for video in videos)
    assert "2 of 30 clips" in told(findings, "warning")


def test_a_missing_mask_is_named_as_the_reader_names_it(tmp_path: Path, videos: list[RenderedVideo]) -> None:
    root = write_davis(tmp_path / "d", videos)
    (root / "Annotations/480p/clip1/00002.png").unlink()
    findings = check_benchmark("davis", root)
    assert findings.exit_code == 1
    assert "clip clip1: 00002 has a frame or a mask, but not both (1 such)" in told(findings, "error")
    with pytest.raises(InputError, match="clip clip1: 00002 has a frame or a mask"):
        Davis.open(root, TCORE)


def test_every_sequence_of_the_list_is_looked_for(tmp_path: Path, videos: list[RenderedVideo]) -> None:
    root = write_davis(tmp_path / "d", videos)
    (root / "ImageSets/2017").mkdir(parents=True)
    (root / "ImageSets/2017/val.txt").write_text("clip0\nclip1\nblackswan\ncamel\n")
    findings = check_benchmark("davis", root)
    assert "clip blackswan has 0 frames" in told(findings, "error")
    assert "clip camel has 0 frames" in told(findings, "error")
    assert findings.figures["whole"] == 2
    assert "official list" in findings.text()


def test_masks_of_another_size_and_broken_frames_are_named(
    tmp_path: Path, videos: list[RenderedVideo]
) -> None:
    root = write_davis(tmp_path / "d", videos)
    Image.fromarray(np.zeros((8, 9), np.uint8)).save(root / "Annotations/480p/clip0/00001.png")
    frame = root / "JPEGImages/480p/clip1/00003.png"
    frame.write_bytes(frame.read_bytes()[:100])
    problems = told(check_benchmark("davis", root), "error")
    assert "00001.png is 8x9, its frame 32x32" in problems
    assert f"cannot read frame {frame}" in problems


def test_masks_of_one_object_ask_for_binary(tmp_path: Path, videos: list[RenderedVideo]) -> None:
    root = write_davis(tmp_path / "d", videos)
    for path in (root / "Annotations").rglob("*.png"):
        with Image.open(path) as mask:
            binary = np.where(np.asarray(mask) > 0, 255, 0).astype(np.uint8)
        Image.fromarray(binary).save(path)
    findings = check_benchmark("davis", root)
    assert any("--binary" in problem.text for problem in findings.problems)
    assert findings.figures["objects"] == 2


def test_a_missing_folder_is_an_error(tmp_path: Path, videos: list[RenderedVideo]) -> None:
    root = write_davis(tmp_path / "d", videos)
    shutil.rmtree(root / "Annotations")
    findings = check_benchmark("davis", root)
    assert "480p does not exist" in told(findings, "error")
    assert findings.exit_code == 1


def test_a_davis_without_masks_beyond_the_first_cannot_be_scored(
    tmp_path: Path, videos: list[RenderedVideo]
) -> None:
    root = write_davis(tmp_path / "d", videos)
    for path in (root / "Annotations/480p").glob("*/0000[1-9].png"):
        path.unlink()
    findings = check_benchmark("davis", root)
    assert findings.exit_code == 0
    assert "no masks beyond the first frame" in told(findings, "warning")


def test_vip_wants_a_mask_for_every_frame(tmp_path: Path, videos: list[RenderedVideo]) -> None:
    root = write_vip(tmp_path / "v", videos)
    assert check_benchmark("vip", root).exit_code == 0
    (root / "Annotations/Category_ids/videos2/00003.png").unlink()
    findings = check_benchmark("vip", root)
    assert "clip videos2: 00003 has a frame or a mask" in told(findings, "error")
    assert "1 of 50 clips" in told(findings, "warning")


def test_jhmdb_wants_joints_of_every_frame_and_all_split_files(
    tmp_path: Path, videos: list[RenderedVideo]
) -> None:
    root = write_jhmdb(tmp_path / "j", videos)
    findings = check_benchmark("jhmdb", root)
    assert findings.exit_code == 0
    assert "20 of 21 files splits/ACTION_test_split1.txt are missing" in told(findings, "warning")
    (root / "joint_positions/walk/clip0/joint_positions.mat").unlink()
    write_mat(root / "joint_positions/walk/clip1/joint_positions.mat", {"pos_img": np.ones((2, 15, 3))})
    problems = told(check_benchmark("jhmdb", root), "error")
    assert "clip walk/clip0 is not complete" in problems
    assert "clip walk/clip1 has 4 frames, but joints of 3" in problems
