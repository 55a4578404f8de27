import csv
import json
import sys
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from tcore.cli.main import main
from tcore.data.rendered import JOINT_NAMES, RenderedVideo
from tcore.data.stores import list_images
from tcore.data.video import open_video
from tcore.errors import InputError
from tcore.evaluation.benchmarks.rendered import true_joints
from tcore.evaluation.encoder import Encoder
from tcore.evaluation.masks import davis_palette, read_ids
from tcore.evaluation.propagate import Propagator
from tcore.evaluation.protocols import RENDERED, TCORE
from tcore.evaluation.run_clip import run_clip, run_masks
from tcore.video import detail as detail_module
from tcore.video.detail import choose_detail, fit_size, suited
from tcore.video.labels import Masks
from tcore.video.propagate import propagate
from tcore.video.propagate_video import propagate_video_file
from tcore.video.tracked import TrackedMasks, share_of_forward
from tests.evaluation.clips import cut, mask, need_av, write_file, write_folder


@pytest.fixture
def first(video: RenderedVideo, tmp_path: Path) -> Path:
    """The mask of the first frame."""
    return mask(tmp_path / "first.png", video.objects[0])


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def run(encoder: Encoder, clip: Path, labels: Any, out: Path, **knobs: Any) -> list[str]:
    said: list[str] = []
    propagate_video_file(encoder, clip, labels, out, protocol=RENDERED, say=said.append, **knobs)
    return said


def test_masks_are_those_of_the_benchmark_with_confidence_and_a_card(
    encoder: Encoder, video: RenderedVideo, clip: Path, tmp_path: Path
) -> None:
    ids = np.where(video.objects[0] == 1, 200, video.objects[0]).astype(np.uint8)  # one id far from the rest
    said: list[str] = []
    first, out = mask(tmp_path / "first.png", ids), tmp_path / "out"
    done = propagate_video_file(encoder, clip, first, out, protocol=RENDERED, say=said.append)
    assert done.frames == 8
    assert said[1] == "detail fine: frames of 64x64 go in at 64x64, a grid of 8x8."
    assert "a frame here" in said[0]

    count = int(video.objects[0].max()) + 1
    edges = replace(RENDERED, edges="guided")
    expected = list(run_masks(encoder, list_images(clip), video.objects[0], (64, 64), edges, count))
    found = [read_ids(out / "masks" / f"{index:05d}.png") for index in range(8)]
    np.testing.assert_array_equal(found[0], ids)  # as given
    for index in range(1, 8):
        # Ids are searched in their order; the lone one comes last, which matters only in ties.
        same = np.where(found[index] == 200, 1, found[index]) == expected[index]
        assert same.mean() > 0.999
    with Image.open(out / "masks" / "00003.png") as image:
        assert image.mode == "P"
        assert image.getpalette() == davis_palette()

    rows = table(out / "confidence.csv")
    assert [row["frame"] for row in rows] == [str(index) for index in range(8)]
    assert [row["given"] for row in rows] == ["1"] + 7 * ["0"]
    confidence = [float(row["confidence"]) for row in rows]
    assert 0 < min(confidence) <= max(confidence) == confidence[0] <= 1
    assert float(rows[0]["share"]) == pytest.approx((ids > 0).mean(), abs=1e-4)
    assert done.confidence == pytest.approx(np.mean(confidence), abs=1e-4)
    card = json.loads((out / "propagation.json").read_text())
    assert card["frames"] == 8
    assert card["frame_size"] == card["input_size"] == [64, 64]
    assert card["detail"] == "fine"
    assert card["protocol"]["edges"] == "guided"
    assert str(out.parent) not in (out / "propagation.json").read_text()  # it may be given to others
    assert card["encoder"]["weights"] == encoder.fingerprint()
    assert card["protocol"]["radius"] == RENDERED.radius
    assert not [p for p in out.rglob("*") if p.name.endswith(".tmp")]


def test_a_file_gives_nearly_the_masks_of_its_frames_and_an_overlay(
    encoder: Encoder, video: RenderedVideo, clip: Path, first: Path, tmp_path: Path
) -> None:
    need_av()
    run(encoder, clip, first, tmp_path / "a", overlay=False)
    run(encoder, write_file(tmp_path / "clip.mp4", video.frames), first, tmp_path / "b")
    a, b = ([read_ids(path) for path in list_images(tmp_path / out / "masks")] for out in ("a", "b"))
    assert np.mean(np.stack(a) == np.stack(b)) > 0.95
    overlay = open_video(tmp_path / "b" / "overlay.mp4")
    frames = np.stack(list(overlay)).astype(int)
    assert (int(overlay.rate), frames.shape) == (10, (8, 64, 64, 3))
    change = np.abs(frames[0] - video.frames[0]).mean(axis=2)
    assert change[video.objects[0] > 0].mean() > 2 * change[video.objects[0] == 0].mean()


def test_without_pyav_there_is_no_overlay_and_one_frame_is_written_as_given(
    encoder: Encoder, video: RenderedVideo, first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "av", None)  # importing it fails
    said = run(encoder, write_folder(tmp_path / "clip", video.frames[:1]), first, tmp_path / "out")
    assert "overlay.mp4" in said[1]
    assert "one frame" in said[-1]
    np.testing.assert_array_equal(read_ids(tmp_path / "out" / "masks" / "00000.png"), video.objects[0])
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["confidence.csv", "masks", "propagation.json"]


def masks_of(folder: Path) -> np.ndarray:
    return np.stack([read_ids(path) for path in list_images(folder / "masks")])


def test_given_frames_come_out_as_they_are_and_labels_go_both_ways_from_them(
    encoder: Encoder, video: RenderedVideo, clip: Path, tmp_path: Path
) -> None:
    early, late = (mask(tmp_path / f"{index:05d}.png", video.objects[index]) for index in (2, 5))
    said = run(encoder, clip, [late, early], tmp_path / "both", overlay=False)
    assert any("6 frames backward" in line for line in said)
    both = masks_of(tmp_path / "both")
    np.testing.assert_array_equal(both[[2, 5]], video.objects[[2, 5]])
    assert [row["given"] for row in table(tmp_path / "both" / "confidence.csv")] == list("00100100")
    # Before the first given frame and after the last one, labels come from one side.
    before = write_folder(tmp_path / "before", video.frames[2::-1])
    run(encoder, before, mask(tmp_path / "a.png", video.objects[2]), tmp_path / "back", overlay=False)
    after = write_folder(tmp_path / "after", video.frames[5:])
    run(encoder, after, mask(tmp_path / "b.png", video.objects[5]), tmp_path / "on", overlay=False)
    assert np.mean(both[1::-1] == masks_of(tmp_path / "back")[1:]) > 0.999  # kept in half precision
    np.testing.assert_array_equal(both[5:], masks_of(tmp_path / "on"))
    # An object that only the later mask has appears between the two.
    later = video.objects[5].copy()
    later[20:44, 20:44] = 77
    run(encoder, clip, [early, mask(tmp_path / "00005.png", later)], tmp_path / "new", overlay=False)
    new = masks_of(tmp_path / "new")
    assert not (new[:3] == 77).any()
    assert (new[4] == 77).any()
    assert (new[6] == 77).any()


def test_labels_between_two_given_frames_are_nearer_to_the_truth_than_those_of_either_side(
    encoder: Encoder, video: RenderedVideo
) -> None:
    frames, truth = video.frames, video.objects
    both = list(propagate(encoder, frames, {0: truth[0], 7: truth[7]}, protocol=RENDERED))
    forward = list(propagate(encoder, frames, truth[0], protocol=RENDERED))
    backward = list(propagate(encoder, frames[::-1], truth[7], protocol=RENDERED))[::-1]
    right = [np.mean(np.stack(found) == truth) for found in (both, forward, backward)]
    assert right[0] > max(right[1:]) + 0.01
    np.testing.assert_array_equal(both[0], truth[0])
    np.testing.assert_array_equal(both[7], truth[7])


def test_masks_follow_edges_unless_they_should_not(
    encoder: Encoder, video: RenderedVideo, clip: Path
) -> None:
    on, off = (
        np.stack(list(propagate(encoder, video.frames, video.objects[0], protocol=RENDERED, edges=edges)))
        for edges in (True, False)
    )
    count = int(video.objects[0].max()) + 1
    plain = list(run_masks(encoder, list_images(clip), video.objects[0], (64, 64), RENDERED, count))
    assert (off[1:] == np.stack(plain[1:])).mean() > 0.999  # ids in another order may win in ties
    assert 0.001 < (on != off).mean() < 0.2


def test_shares_of_the_two_sides_follow_distance_and_confidence() -> None:
    assert [share_of_forward(index, [2, 6]) for index in (0, 2, 3, 5, 6, 9)] == [0, 1, 0.75, 0.25, 1, 1]
    ids = np.zeros((16, 16), np.uint8)
    ids[4:, 4:] = 1
    track = TrackedMasks(Masks({0: ids, 4: ids}), (16, 16), (16, 16), 8, RENDERED)
    sure, unsure = torch.tensor([[[0.0, 1.0]]]), torch.tensor([[[0.5, 0.5]]])
    np.testing.assert_allclose(track.blend(2, sure, unsure)[0, 0], [1 / 6, 5 / 6], rtol=1e-5)
    np.testing.assert_allclose(track.blend(3, sure, sure.flip(2))[0, 0], [0.75, 0.25], rtol=1e-5)
    assert track.blend(4, sure, unsure) is not None
    np.testing.assert_array_equal(track.blend(4, sure, unsure), sure)


def test_a_file_goes_both_ways_like_its_frames(
    encoder: Encoder, video: RenderedVideo, clip: Path, tmp_path: Path
) -> None:
    need_av()
    labels = [mask(tmp_path / f"{index:05d}.png", video.objects[index]) for index in (3, 6)]
    run(encoder, clip, labels, tmp_path / "a", overlay=False)
    run(encoder, write_file(tmp_path / "clip.mp4", video.frames), labels, tmp_path / "b", overlay=False)
    assert np.mean(masks_of(tmp_path / "a") == masks_of(tmp_path / "b")) > 0.95


def test_a_damaged_frame_before_the_first_given_one_is_named(
    encoder: Encoder, video: RenderedVideo, tmp_path: Path
) -> None:
    clip = write_folder(tmp_path / "clip", video.frames[:6])
    mask(clip / "00001.png", video.frames[1][:56])
    labels = mask(tmp_path / "00004.png", video.objects[4])
    with pytest.raises(InputError, match="frame 1 is 64x56, the first 64x64"):
        run(encoder, clip, labels, tmp_path / "out", overlay=False)
    assert not (tmp_path / "out").exists()
    first = mask(tmp_path / "first.png", video.objects[0])
    with pytest.raises(InputError, match="frame 1 is 64x56, the first 64x64"):
        run(encoder, clip, [first, labels], tmp_path / "out", overlay=False)
    np.testing.assert_array_equal(masks_of(tmp_path / "out"), video.objects[:1])


def write_points(path: Path, video: RenderedVideo, frames: list[int]) -> Path:
    joints = true_joints(video)
    lines = ["frame,name,x,y"]
    for frame in frames:
        for number, name in enumerate(JOINT_NAMES):
            x, y = joints[:, number, frame]
            lines.append(f"{frame},{name}," + ("," if np.isnan(x) else f"{x},{y}"))
    path.write_text("\n".join(lines) + "\n")
    return path


def positions(path: Path) -> np.ndarray:
    """Tracks as (frames, points, x y confidence), NaN where a point is lost."""
    rows = table(path)
    values = [[float(row[k] or "nan") for k in ("x", "y", "confidence")] for row in rows]
    points = len({row["name"] for row in rows})
    return np.array(values).reshape(-1, points, 3)


def test_points_of_a_still_video_stay_where_they_are(
    encoder: Encoder, video: RenderedVideo, tmp_path: Path
) -> None:
    still = np.repeat(video.frames[:1], 4, axis=0)
    clip = write_folder(tmp_path / "clip", still)
    knobs = replace(RENDERED, topk=1)
    labels = write_points(tmp_path / "points.csv", video, [0])
    propagate_video_file(encoder, clip, labels, tmp_path / "out", protocol=knobs, overlay=False)
    found = positions(tmp_path / "out" / "tracks.csv")
    given = true_joints(video)[:, :, 0].T
    seen = ~np.isnan(given[:, 0])
    np.testing.assert_allclose(found[:, seen, :2], np.repeat(given[None, seen], 4, axis=0), atol=2e-3)
    np.testing.assert_allclose(found[0, seen, 2], 1)
    assert np.isnan(found[:, ~seen, :2]).all()


def test_points_follow_a_moving_texture(encoder: Encoder, tmp_path: Path) -> None:
    big = np.kron(np.random.default_rng(0).integers(0, 255, (16, 32, 3)), np.ones((8, 8, 1))).astype(np.uint8)
    frames = np.stack([big[:96, 8 * t : 8 * t + 96] for t in range(6)])  # everything moves left by one cell
    (tmp_path / "p.json").write_text(json.dumps([{"frame": 0, "name": "dot", "x": 71.0, "y": 43.0}]))
    clip = write_folder(tmp_path / "clip", frames)
    knobs = replace(TCORE, topk=1, radius=4)
    propagate_video_file(encoder, clip, tmp_path / "p.json", tmp_path / "out", protocol=knobs)
    found = positions(tmp_path / "out" / "tracks.csv")[:, 0]
    np.testing.assert_allclose(found[:, 0], 71 - 8 * np.arange(6), atol=4)
    np.testing.assert_allclose(found[:, 1], 43, atol=4)


def test_points_given_later_replace_only_themselves(
    encoder: Encoder, video: RenderedVideo, clip: Path, tmp_path: Path
) -> None:
    labels = write_points(tmp_path / "points.csv", video, [0])
    run(encoder, clip, labels, tmp_path / "once", overlay=False)
    (tmp_path / "more.csv").write_text(f"frame,name,x,y\n3,{JOINT_NAMES[0]},5,60\n3,new,30,31\n")
    run(encoder, clip, [labels, tmp_path / "more.csv"], tmp_path / "twice", overlay=False)
    once, twice = (positions(tmp_path / out / "tracks.csv") for out in ("once", "twice"))
    old = len(JOINT_NAMES)
    np.testing.assert_array_equal(twice[:3, 1:old], once[:3, 1:])
    assert np.isfinite(twice[:3, old, :2]).all()  # carried backward
    np.testing.assert_allclose(twice[3, [0, old]], [[5, 60, 1], [30, 31, 1]])
    np.testing.assert_allclose(twice[3, 1:old], once[3, 1:], atol=1e-3)
    assert np.linalg.norm(twice[4, 0, :2] - [5, 60]) < np.linalg.norm(once[4, 0, :2] - [5, 60])


def test_nothing_that_is_held_grows_with_the_video(
    encoder: Encoder, video: RenderedVideo, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames_alive: list[int] = []
    held: list[int] = []

    def endless() -> Iterator[np.ndarray]:
        seen: list[weakref.ref[np.ndarray]] = []
        for index in range(24):
            frame = video.frames[index % 8].copy()
            seen.append(weakref.ref(frame))
            frames_alive.append(sum(ref() is not None for ref in seen))
            yield frame

    step = Propagator.step

    def measured(self: Propagator, features: Tensor) -> Tensor:
        labels = step(self, features)
        held.append(sum(value.nbytes for value in vars(self).values() if isinstance(value, Tensor)))
        return labels

    monkeypatch.setattr(Propagator, "step", measured)
    track = TrackedMasks(Masks({0: video.objects[0]}), (64, 64), (64, 64), 8, RENDERED)
    knobs = replace(RENDERED, context=3)
    taken = 0
    for _ in run_clip(encoder, endless(), track.given, (64, 64), knobs):
        taken += 1
        assert len(frames_alive) == taken  # no frame is read before it is asked for
    assert taken == 24
    assert max(frames_alive) <= 2  # the one that is handed out, and the next
    assert len(set(held)) == 1


def test_large_frames_go_in_smaller_and_masks_come_out_large(
    encoder: Encoder, video: RenderedVideo, tmp_path: Path
) -> None:
    large = video.frames[:3].repeat(3, axis=1).repeat(2, axis=2)
    ids = video.objects[0].repeat(3, axis=0).repeat(2, axis=1)
    clip = write_folder(tmp_path / "clip", large, first=1)
    said = run(
        encoder, clip, mask(tmp_path / "00001.png", ids), tmp_path / "out", long_side=90, overlay=False
    )
    assert said[0].startswith("detail fine: about ")  # an estimate of the time
    assert said[1] == "detail fine: frames of 128x192 go in at 56x88, a grid of 7x11."
    names = sorted(path.name for path in (tmp_path / "out" / "masks").iterdir())
    assert names == ["00001.png", "00002.png", "00003.png"]  # named like the frames
    assert read_ids(tmp_path / "out" / "masks" / "00003.png").shape == (192, 128)


def test_input_sizes_fit_the_patch() -> None:
    assert fit_size((17, 900), 16) == (16, 896)
    assert fit_size((100, 60), 16) == (96, 48)  # never larger than the frame
    for patch in (8, 14, 16):  # the grid does not depend on the patch
        sizes = [fit_size((720, 1280), patch, detail) for detail in ("coarse", "fine", "finest")]
        grids = [(height / patch, width / patch) for height, width in sizes]
        assert grids == [(30, 53), (60, 106), (90, 160)]
    assert fit_size((720, 1280), 16, "fine", long_side=640) == (720, 1280)
    with pytest.raises(InputError, match="64x15"):
        fit_size((15, 64), 16)
    with pytest.raises(InputError, match="long side of 8"):
        fit_size((64, 64), 16, "coarse", 8)


def test_large_grids_on_a_cpu_are_searched_halved_unless_asked_otherwise(encoder: Encoder) -> None:
    for inside, search, expected in (
        ((240, 240), None, "exact"),
        ((240, 424), None, "halved"),
        ((240, 424), "exact", "exact"),
        ((64, 64), "halved", "halved"),
    ):
        assert suited(TCORE, encoder, inside, search).search == expected  # type: ignore[arg-type]


def test_a_gpu_propagates_in_bf16_unless_asked_otherwise(
    encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = (64, 64)
    assert suited(TCORE, encoder, size).precision == "fp32"
    assert suited(TCORE, encoder, size, precision="bf16").precision == "bf16"
    on_gpu = SimpleNamespace(device=torch.device("cuda"))
    monkeypatch.setattr(encoder, "parameters", lambda: iter([on_gpu]))
    assert suited(TCORE, encoder, size).precision == "bf16"
    assert suited(TCORE, encoder, size, precision="fp32").precision == "fp32"


def test_detail_is_fine_unless_the_machine_is_too_slow(
    encoder: Encoder, video: RenderedVideo, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    for seconds, expected in ((0.5, "fine"), (5.0, "coarse")):
        spent = {"encode": seconds, "step": 0.1, "total": 9.0}
        monkeypatch.setattr(detail_module, "estimate", lambda *values, spent=spent: spent)
        assert choose_detail(encoder, video.frames[0], 12, TCORE, say=said.append) == expected
    choose_detail(encoder, video.frames[0], 12, TCORE, say=said.append, asked="fine", backward=10)
    assert "9.0 s for 12 frames" in said[0]
    assert "1:00 for 12 frames" in said[2]  # ten frames more, at 5.1 s each
    assert "5.1 s a frame" in said[1]
    masks = [list(propagate(encoder, video.frames[:2], video.objects[0], detail=d)) for d in (None, "coarse")]
    assert np.array_equal(masks[0], masks[1])


def test_what_is_left_of_a_cut_video_is_propagated(
    encoder: Encoder, video: RenderedVideo, first: Path, tmp_path: Path
) -> None:
    need_av()
    clip = cut(write_file(tmp_path / "clip.mp4", video.frames), 0.7)
    later = mask(tmp_path / "00007.png", video.objects[7])
    said = run(encoder, clip, [first, later], tmp_path / "out")
    done = len(list((tmp_path / "out" / "masks").iterdir()))
    assert 2 <= done < 8
    assert f"{done} of 8 frames" in said[-2]
    assert "frame 7" in said[-1]
    assert len(list(open_video(tmp_path / "out" / "overlay.mp4"))) == done


def test_bad_labels_are_one_line_and_nothing_is_written(
    encoder: Encoder, video: RenderedVideo, clip: Path, first: Path, tmp_path: Path
) -> None:
    (tmp_path / "out.csv").write_text("frame,name,x,y\n0,a,64,3\n")
    (tmp_path / "hidden.csv").write_text("frame,name,x,y\n0,a,,\n")
    for labels, message in (
        (mask(tmp_path / "empty.png", np.zeros((64, 64), np.uint8)), r"background"),
        (mask(tmp_path / "small.png", video.objects[0][:40]), r"frame 0 is 64x40, .* 64x64"),
        ([first, mask(tmp_path / "00008.png", video.objects[7])], "frame 8, but .* has 8 frames"),
        (tmp_path / "out.csv", "'a' of frame 0 lies at x 64, y 3"),
        (tmp_path / "hidden.csv", "no point is visible"),
        (clip / "00000.png", "among the frames"),
    ):
        with pytest.raises(InputError, match=message) as caught:
            run(encoder, clip, labels, tmp_path / "out")
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "out").exists()


def test_frames_of_another_size_and_damaged_ones_are_named_and_the_labels_before_them_kept(
    encoder: Encoder, video: RenderedVideo, first: Path, tmp_path: Path
) -> None:
    clip = write_folder(tmp_path / "clip", video.frames[:4])
    mask(clip / "00003.png", video.frames[3][:56])
    with pytest.raises(InputError, match="frame 3 is 64x56, the first 64x64"):
        run(encoder, clip, first, tmp_path / "size")
    (clip / "00003.png").write_bytes(b"damaged")
    with pytest.raises(InputError, match=r"00003\.png"):
        run(encoder, clip, first, tmp_path / "damaged")
    (clip / "00003.png").unlink()
    run(encoder, clip, first, tmp_path / "whole")
    for name in ("size", "damaged", "whole"):
        card = json.loads((tmp_path / name / "propagation.json").read_text())
        assert (card["frames"], len(card["remarks"])) == (3, name != "whole")
        assert len(list((tmp_path / name / "masks").iterdir())) == 3


def test_python_users_get_the_masks_of_the_command_and_points(
    encoder: Encoder, video: RenderedVideo, clip: Path, first: Path, tmp_path: Path
) -> None:
    found = list(propagate(encoder, video.frames, video.objects[0].astype(np.int64), protocol=RENDERED))
    run(encoder, clip, first, tmp_path / "out", overlay=False)
    saved = [read_ids(path) for path in list_images(tmp_path / "out" / "masks")]
    assert all(np.array_equal(a, b) for a, b in zip(found, saved, strict=True))

    points = np.array([[20.0, 30.0], [40.5, 12.0], [np.nan, np.nan]])
    found = list(propagate(encoder, iter(video.frames), points, protocol=RENDERED))
    assert [places.shape for places in found] == 8 * [(3, 2)]
    assert np.array_equal(found[0], points, equal_nan=True)
    assert np.isnan(found[7][2]).all()
    assert np.isfinite(found[7][:2]).all()


def test_an_out_folder_with_anything_else_in_it_is_refused(
    encoder: Encoder, clip: Path, first: Path, tmp_path: Path
) -> None:
    run(encoder, clip, first, tmp_path / "out", overlay=False)
    before = sorted(path.name for path in (tmp_path / "out").rglob("*"))
    with pytest.raises(InputError, match=rf"{tmp_path}/out already holds"):
        run(encoder, clip, first, tmp_path / "out", overlay=False)
    assert sorted(path.name for path in (tmp_path / "out").rglob("*")) == before
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    with pytest.raises(InputError, match=r"holds thesis\.tex"):
        run(encoder, clip, first, tmp_path / "other")
    with pytest.raises(InputError, match=r"first\.png lies in the out folder"):
        run(encoder, clip, first, tmp_path)
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InputError, match=r"cannot write to .*file"):
            run(encoder, clip, first, out)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that nobody can write to")
def test_an_out_folder_that_cannot_be_made_is_refused_before_anything_is_measured(
    encoder: Encoder, clip: Path, first: Path
) -> None:
    said = list[str]()
    with pytest.raises(
        InputError, match=r"cannot write to /proc/a/b: no folder can be made in /proc \("
    ) as no:
        propagate_video_file(encoder, clip, first, Path("/proc/a/b"), say=said.append)
    assert not said
    assert "\n" not in str(no.value)


def test_a_folder_that_will_not_do_is_one_line_before_anything_else_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], video: RenderedVideo
) -> None:
    monkeypatch.chdir(tmp_path)
    target = write_folder(tmp_path / "annex" / "0fb31c", video.frames[:2])
    Path("dog").symlink_to(target)
    both = np.where(video.objects[0] > 0, 255, 0).astype(np.uint8)  # as in DAVIS-2016: this is reported, too
    Image.fromarray(both).save("first.png")
    Image.fromarray(both).save("00001.png")
    words = ["propagate", "random:vitti16", "dog", "--labels", "first.png", "--labels", "00001.png"]
    words.append("--no-overlay")
    main(words)
    assert [row["given"] for row in table(Path("propagated/dog/confidence.csv"))] == ["1", "1"]
    assert "propagated/dog: 2 frames" in capsys.readouterr().out  # a link goes by its own name
    with pytest.raises(SystemExit):
        main(words)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tcore: error: ")
    assert "propagated/dog" in line
