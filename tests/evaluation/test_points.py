"""Points of one's own: folders of frames with a keypoints.csv."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tcore import evaluate
from tcore.data.rendered import JOINT_NAMES, RenderedVideo
from tcore.errors import InputError
from tcore.evaluation import scores
from tcore.evaluation.benchmarks.points import Points, individuals, read_keypoints
from tcore.evaluation.benchmarks.rendered import true_joints
from tcore.evaluation.check import check_benchmark
from tcore.evaluation.encoders import load_encoder
from tcore.evaluation.evaluate import predictions_saver
from tcore.evaluation.protocols import TCORE, protocol
from tests.evaluation.clips import tiny_encoder, write_folder
from tests.evaluation.layouts import heldout_videos

VIDEOS = heldout_videos(2, num_frames=5, size=64)
STILL = replace(VIDEOS[0], frames=VIDEOS[0].frames[:1].repeat(5, 0), joints=VIDEOS[0].joints[:1].repeat(5, 0))


def write_points(root: Path, videos: list[RenderedVideo], late: int = 2) -> Path:
    """Two clips; their first point is labeled from frame `late` on."""
    for number, video in enumerate(videos):
        clip = write_folder(root / f"clip{number}", video.frames)
        lines = ["frame,name,x,y,visible"]
        for point, name in enumerate(JOINT_NAMES):
            for frame, (x, y) in enumerate(true_joints(video)[:, point].T):
                seen = not np.isnan(x) and (point or frame >= late)
                lines.append(f"{frame},{name},{x},{y},1" if seen else f"{frame},{name},,,0")
        (clip / "keypoints.csv").write_text("\n".join(lines) + "\n")
    return root


def test_a_point_is_right_within_a_share_of_the_box_of_its_individual_after_its_first_frame() -> None:
    # Two individuals: boxes of 10x4 and 2x20 in every frame; the last point appears in frame 1.
    first = np.array([[0.0, 10, 50, 52], [0, 4, 0, 20]])
    truth = np.repeat(first[:, :, None], 3, axis=2)
    truth[:, 3, 0] = np.nan
    found = truth.copy()
    found[:, 3, 0] = 7
    found[0, 0, 0] += 99  # its first frame does not count
    found[0, 0, 1] += 0.9  # within .1 of 10
    found[1, 0, 2] += 1.5  # within .2
    found[0, 1, 1] = np.nan  # lost
    found[1, 2, 2] += 3.9  # alone in frame 0, in a box of 20 in frame 2
    found[0, 3, 2] += 4.1
    who = ["a", "a", "b", "b"]
    shares, counts = scores.pck_of_points(truth, found, who)
    assert counts.tolist() == [2, 2, 2, 1]
    np.testing.assert_allclose(shares, [[0.5, 0.5, 0.5, 0], [1, 0.5, 1, 0]])
    together, _ = scores.pck_of_points(truth, found, ["", "", "", ""])  # one box of 52x20
    np.testing.assert_allclose(together, [[1, 0.5, 1, 1], [1, 0.5, 1, 1]])
    assert individuals(["a0_head", "a0_tail_1", "b_head"]) == ["a0", "a0", "b"]
    assert individuals(["left_ear", "nose"]) == ["", ""]


def test_true_points_score_100_and_missing_or_wrong_files_are_named(tmp_path: Path) -> None:
    root = write_points(tmp_path / "set" / "sub", VIDEOS).parent
    benchmark = Points.open(root, TCORE)
    assert [clip.name for clip in benchmark.clips] == ["sub/clip0", "sub/clip1"]
    save = predictions_saver(tmp_path / "saved")
    for clip in benchmark.clips:
        save(clip.name, "joints.npz", read_keypoints(clip)[1])
    total, details = benchmark.score(tmp_path / "saved")
    assert total == {"PCK@0.1": 1, "PCK@0.2": 1}
    visible = [(~np.isnan(read_keypoints(clip)[1][0])).sum(axis=1) for clip in benchmark.clips]
    assert details["scored"] == sum((counts - 1).sum() for counts in visible)
    assert check_benchmark("points", root).figures["whole"] == 2

    table = root / "sub" / "clip1" / "keypoints.csv"
    for content, message in (
        ("frame,name,x,y\n0,a,1,2\n", "no column visible"),
        ("frame,name,x,y,visible\n9,a,1,2,1\n", "line 2: frame 9 of 5"),
        ("frame,name,x,y,visible\n0,a,1,2,1\n0,a,1,2,1\n", "line 3: 'a' of frame 0"),
        ("frame,name,x,y,visible\n0,a,one,2,1\n", "one"),
        ("frame,name,x,y,visible\n0,a,1,2,1\n", "nothing to score"),
    ):
        table.write_text(content)
        with pytest.raises(InputError, match=message) as caught:
            read_keypoints(benchmark.clips[1])
        assert str(table) in str(caught.value)
    with pytest.raises(InputError, match=r"keypoints\.csv"):
        Points.open(tmp_path / "saved", TCORE)


def test_points_that_start_later_are_propagated_from_there_and_finer_grids_have_more_cells(
    tmp_path: Path,
) -> None:
    root = write_points(tmp_path / "set", VIDEOS[:1])
    encoder = tiny_encoder()
    benchmark = Points.open(root, TCORE, size=(64, 64))
    assert isinstance(benchmark, Points)
    found, truth, size = benchmark.predict(encoder, benchmark.clips[0])
    assert size == (64, 64)
    names = read_keypoints(benchmark.clips[0])[0]
    late = names.index(JOINT_NAMES[0])
    assert np.isnan(found[:, late, :2]).all()
    np.testing.assert_allclose(found[:, late, 2], truth[:, late, 2], atol=1e-3)
    # The others are what they are without it.
    alone = write_points(tmp_path / "alone", VIDEOS[:1], late=9)
    other = Points.open(alone, TCORE, size=(64, 64))
    assert isinstance(other, Points)
    expected = other.predict(encoder, other.clips[0])[0]
    rest = [names.index(name) for name in read_keypoints(other.clips[0])[0]]
    np.testing.assert_array_equal(found[:, rest], expected)
    fine = Points.open(root, protocol("tcore-fine"))
    assert benchmark.fixed_size == (64, 64)
    whole = Points.open(root, TCORE)
    assert [whole.input_size(encoder, size) for size in ((64, 70), (720, 960))] == [(64, 64), (480, 640)]
    assert (whole.protocol.radius, fine.protocol.radius, fine.protocol.context) == (6, 12, 7)
    assert fine.input_size(encoder, (720, 960)) == (480, 640)  # a patch of 8 over 8 pixels


def test_frames_of_another_size_have_points_in_their_own_pixels(tmp_path: Path) -> None:
    root = write_points(tmp_path / "set", [STILL], late=0)
    large = STILL.frames[3].repeat(2, 0).repeat(3, 1)
    Image.fromarray(large).save(root / "clip0" / "00003.png")
    benchmark = Points.open(root, replace(TCORE, topk=1), size=(64, 64))
    assert isinstance(benchmark, Points)
    found = benchmark.predict(tiny_encoder(), benchmark.clips[0])[0]
    np.testing.assert_allclose((found[:, :, 3].T + 0.5) / [3, 2], found[:, :, 2].T + 0.5, atol=1e-3)


def test_copies_score_100_on_a_still_clip(tmp_path: Path) -> None:
    root = write_points(tmp_path / "set", [STILL])
    card = evaluate(load_encoder("control:copy"), points=root, size=(64, 64), out=tmp_path / "out", save=True)
    assert card["benchmarks"]["points"]["scores"]["PCK@0.1"] == 1
    assert (tmp_path / "out" / "predictions" / "points" / "clip0" / "joints.npz").exists()
