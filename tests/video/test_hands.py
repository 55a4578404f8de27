"""What people do with a video of their own: mark it, take a part of it, several at once, stop, and go on."""

import csv
import json
import signal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import tcore
from tcore.cli import encoders
from tcore.cli.main import main
from tcore.data.part import open_part
from tcore.data.rendered import RenderedVideo
from tcore.errors import InputError
from tcore.evaluation.encoder import Encoder
from tcore.evaluation.masks import read_ids
from tcore.evaluation.protocols import RENDERED
from tcore.video.propagate import propagate
from tcore.video.propagate_video import propagate_video_file
from tcore.video.tracked import sharpness
from tests.conftest import Refused
from tests.evaluation.clips import mask, need_av, write_file, write_folder

Capture = pytest.CaptureFixture[str]
FRAMES = np.zeros((2, 64, 64, 3), np.uint8)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch, encoder: Encoder) -> None:
    """The command line loads the tiny encoder, whatever its name."""
    monkeypatch.setattr(encoders.WithEncoder, "load", lambda self: encoder)


def rows(out: Path) -> list[dict[str, str]]:
    with (out / "confidence.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_a_part_of_a_video_keeps_its_numbers_and_equals_the_same_frames_alone(
    encoder: Encoder, video: RenderedVideo, clip: Path, tmp_path: Path
) -> None:
    first = mask(tmp_path / "any.png", video.objects[2])
    knobs: dict[str, Any] = {"protocol": RENDERED, "overlay": False, "detail": "fine"}
    propagate_video_file(encoder, clip, first, tmp_path / "part", start="2", end="6", every=2, **knobs)
    alone = write_folder(tmp_path / "alone", video.frames[2:7:2])
    propagate_video_file(encoder, alone, first, tmp_path / "out", **knobs)
    names = [f"{number:05d}.png" for number in (2, 4, 6)]
    assert sorted(path.name for path in (tmp_path / "part" / "masks").iterdir()) == names
    for name, other in zip(names, ("00000.png", "00001.png", "00002.png"), strict=True):
        found = read_ids(tmp_path / "part" / "masks" / name)
        np.testing.assert_array_equal(found, read_ids(tmp_path / "out" / "masks" / other))
    assert [row["frame"] for row in rows(tmp_path / "part")] == ["2", "4", "6"]
    card = json.loads((tmp_path / "part" / "propagation.json").read_text())
    assert (card["start"], card["every"], card["frames"]) == (2, 2, 3)


def test_labels_of_a_part_go_both_ways_and_coco_names_its_images(
    encoder: Encoder, video: RenderedVideo, clip: Path, tmp_path: Path
) -> None:
    late = mask(tmp_path / "00005.png", video.objects[5])
    knobs: dict[str, Any] = {"form": "coco", "protocol": RENDERED, "overlay": False}
    propagate_video_file(encoder, clip, late, tmp_path / "out", start="3", end="6", **knobs)
    coco = json.loads((tmp_path / "out" / "coco.json").read_text())
    assert [image["file_name"] for image in coco["images"]] == [f"{n:05d}.png" for n in (3, 4, 5, 6)]
    assert {one["image_id"] for one in coco["annotations"]} <= {4, 5, 6, 7}
    assert [row["given"] for row in rows(tmp_path / "out")] == ["0", "0", "1", "0"]


def test_parts_of_files_and_folders_are_read_forward_and_backward(
    video: RenderedVideo, tmp_path: Path
) -> None:
    need_av()
    path = write_file(tmp_path / "clip.mp4", video.frames)
    whole = tcore.read_video(path)
    np.testing.assert_array_equal(tcore.read_video(path, "0.2s", 6, 2), whole[2:7:2])
    part = open_part(path, "2", "6", 2)
    assert (part.rate, part.count, part.reach(3)) == (Fraction(5), 3, 3)
    np.testing.assert_array_equal(np.stack(list(part.backward(3))), whole[6:1:-2])
    np.testing.assert_array_equal(np.stack(list(part.backward(1))), whole[2:3])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--start 9", "start 9"),
        ("--start soon", "'soon'"),
        ("--start -1", "'-1'"),
        ("--start 4 --end 2", "end 2 comes before start 4"),
        ("--end 99s", "end 99s"),
        ("--every 0", "--every 0"),
        ("--every 3 --labels 00001.png", "frame 1"),
        ("--start 3 --labels 00001.png", "frame 1"),
        ("--end 3 --labels 00005.png", "frame 5, but frame 3 is the last"),
        ("--device tpu", "tpu"),
        ("--long-side -5", "long side of -5"),
        ("--mark-at 2", "--mark-at 2"),
        ("--box dog 1 2 3", "--box"),
        ("--box dog 90 2 3 4", "box 90 2 3 4"),
        ("--box a 1 1 9 9 --box a 2 2 9 9", "own NAME"),
        ("--click dog 100 3", "x 100, y 3"),
        ("--click-not dog 3 3", "--click-not dog"),
        ("--click dog 3 3 --mark-at 8", "mark-at 8"),
    ],
)
def test_bad_flags_are_one_line_and_nothing_is_written(
    flags: str, said: str, video: RenderedVideo, clip: Path, tmp_path: Path, refused: Refused
) -> None:
    for name in ("first", "00001", "00005"):
        mask(tmp_path / f"{name}.png", video.objects[0])
    words = [str(tmp_path / word) if word.endswith(".png") else word for word in flags.split()]
    if not {"--labels", "--click"} & set(words):
        words += ["--labels", str(tmp_path / "first.png")]
    error = refused("propagate", "tiny", clip, *words, "--out", tmp_path / "out")
    assert said in error
    assert "Traceback" not in error
    assert not (tmp_path / "out").exists()


def test_boxes_and_clicks_make_the_first_masks(
    video: RenderedVideo, clip: Path, tmp_path: Path, capsys: Capture
) -> None:
    label = int(video.objects[3].max())
    y, x = (int(values.mean()) for values in np.nonzero(video.objects[3] == label))
    words = (
        f"--box ball {x - 12} {y - 12} 24 24 --click dog 5 5 --click-not dog 60 60 --mark-at 3 --no-overlay"
    )
    main(["propagate", "tiny", str(clip), *words.split(), "--out", str(tmp_path / "out")])
    said = capsys.readouterr().err
    assert "object 1 is 'ball'" in said
    assert "object 2 is 'dog'" in said
    ids = read_ids(tmp_path / "out" / "masks" / "00003.png")
    assert ids[y, x] == 1
    assert ids[5, 5] == 2
    confidence = rows(tmp_path / "out")
    assert confidence[3]["given"] == "1"
    assert {"object 'ball'", "object 'dog'"} <= confidence[3].keys()
    marks = json.loads((tmp_path / "out" / "propagation.json").read_text())["marks"]
    assert [one["name"] for one in marks] == ["ball", "dog"]


def test_marked_objects_keep_their_names_beside_those_of_a_mask(
    video: RenderedVideo, clip: Path, tmp_path: Path
) -> None:
    given = mask(tmp_path / "first.png", (video.objects[0] > 0) * np.uint8(1))
    words = "--click my\ndog 5 5 --format yolo --no-overlay --end 1".split(" ")
    main(["propagate", "tiny", str(clip), "--labels", str(given), *words, "--out", str(tmp_path / "out")])
    assert (tmp_path / "out" / "classes.txt").read_text() == "object 1\nmy?dog\n"


def test_several_videos_take_their_labels_by_name_and_a_bad_one_stops_no_other(
    video: RenderedVideo, tmp_path: Path, refused: Refused
) -> None:
    for name in ("a", "b", "c"):
        write_folder(tmp_path / "in" / name, video.frames[:2])
    mask(tmp_path / "labels" / "a.png", video.objects[0])
    mask(tmp_path / "labels" / "c" / "00001.png", video.objects[1])
    videos = [tmp_path / "in" / name for name in ("a", "b", "c")]
    words = ("--labels", tmp_path / "labels", "--out", tmp_path / "out", "--no-overlay")
    error = refused("propagate", "tiny", *videos, *words)
    assert "no labels for b" in error
    assert "1 of 3 videos failed: b" in error
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a", "c"]
    assert [row["given"] for row in rows(tmp_path / "out" / "c")] == ["0", "1"]


def test_a_folder_of_video_files_stands_for_all_of_them(video: RenderedVideo, tmp_path: Path) -> None:
    need_av()
    for name in ("a", "b"):
        write_file(tmp_path / "in" / f"{name}.mp4", video.frames[:2])
        mask(tmp_path / "labels" / f"{name}.png", video.objects[0])
    words = ["--labels", str(tmp_path / "labels"), "--out", str(tmp_path / "out"), "--no-overlay"]
    main(["propagate", "tiny", str(tmp_path / "in"), *words])
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a", "b"]


def test_only_the_second_ctrl_c_ends_the_program(capsys: Capture) -> None:
    with encoders.first_interrupt("stopping") as pressed:
        assert not pressed()
        signal.raise_signal(signal.SIGINT)
        assert pressed()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert "stopping" in capsys.readouterr().err


def test_a_frame_is_written_as_a_picture(
    video: RenderedVideo, clip: Path, tmp_path: Path, capsys: Capture, refused: Refused
) -> None:
    out = tmp_path / "frame.png"
    main(["frame", str(clip), str(out), "--at", "3"])
    np.testing.assert_array_equal(np.asarray(Image.open(out)), video.frames[3])
    main(["frame", str(clip), str(tmp_path / "time.png"), "--at", "0.2s"])
    assert "frame 4, 64x64" in capsys.readouterr().out  # folders have 24 frames per second
    for words, said in (
        ([str(out)], "already exists"),
        ([str(tmp_path / "frame.tiff")], ".png or .jpg"),
        ([str(tmp_path / "b.png"), "--at", "8"], "8 frames"),
        ([str(tmp_path / "b.png"), "--at", "99s"], "error: --at 99s: "),
        ([str(tmp_path / "b.png"), "--at", "1e3"], "'1e3'"),
    ):
        assert said in refused("frame", clip, *words)
    assert not (tmp_path / "b.png").exists()


def test_an_object_that_disappears_is_said_to_be_lost(
    encoder: Encoder, video: RenderedVideo, tmp_path: Path
) -> None:
    frames = video.frames.copy()
    frames[4:] = np.random.default_rng(0).integers(0, 255, frames[4:].shape, dtype=np.uint8)
    clip, said = write_folder(tmp_path / "clip", frames), list[str]()
    labels = mask(tmp_path / "first.png", video.objects[0])
    propagate_video_file(
        encoder, clip, labels, tmp_path / "out", protocol=RENDERED, overlay=False, say=said.append
    )
    lost = [line for line in said if "was lost at frame 4" in line]
    assert lost
    assert any("correct next: 4" in line for line in said)
    found = rows(tmp_path / "out")
    objects = [name for name in found[0] if name.startswith("object ")]
    assert len(objects) == len(np.unique(video.objects[0])) - 1
    assert all(float(found[0][name]) == 1 for name in objects)
    assert json.loads((tmp_path / "out" / "propagation.json").read_text())["losses"]


def covered(video: RenderedVideo) -> np.ndarray:
    """A still video of six frames; another texture covers its left half in frame 3."""
    still = np.repeat(video.frames[:1], 6, axis=0)
    still[3, :, :32] = np.random.default_rng(0).integers(0, 255, (64, 32, 3))
    return still


def certain(encoder: Encoder, frames: np.ndarray, given: Any) -> np.ndarray:
    return np.array([one.each for one in propagate(encoder, frames, given, detail="fine")])


def test_a_point_that_no_longer_looks_like_itself_is_less_certain_from_then_on(
    encoder: Encoder, video: RenderedVideo
) -> None:
    each = certain(encoder, covered(video), [[12, 30], [52, 30], [np.nan, np.nan]])
    np.testing.assert_array_equal(each[0], [1, 1, 0])
    np.testing.assert_allclose(each[2], each[1], atol=0.02)
    assert each[3, 0] < each[2, 0] - 0.1
    assert (each[4:, 0] < each[2, 0] - 0.1).all()  # it may now be on something else that looks alike
    np.testing.assert_allclose(each[1:, 1], each[1, 1], atol=0.05)  # the other one was not covered
    assert (each[:, 2] == 0).all()


def test_confidence_of_points_comes_from_the_nearer_given_frame(
    encoder: Encoder, video: RenderedVideo
) -> None:
    points = [[12, 30], [52, 30]]
    both, ahead, back = (
        certain(encoder, covered(video), dict.fromkeys(given, points)) for given in ((0, 5), (0,), (5,))
    )
    np.testing.assert_array_equal(both[[0, 5]], 1)
    np.testing.assert_array_equal((ahead[0], back[5]), 1)
    assert back[4, 0] > ahead[4, 0] + 0.1  # carried backward, it has not been covered yet
    assert ahead[1, 0] > back[1, 0] + 0.1
    assert (both[[1, 4], 0] > (back[1, 0], ahead[4, 0])).all()


def test_confidence_of_an_object_falls_where_its_label_spreads() -> None:
    sharp, spread = torch.zeros(4, 4, 3), torch.zeros(4, 4, 3)
    sharp[..., 0], spread[..., 0] = 1, 0.7
    sharp[1, 1:3] = torch.tensor([0.0, 1.0, 0.0])
    spread[..., 1] = 0.3
    spread[0, 0] = torch.tensor([0.4, 0.6, 0.0])
    assert sharpness(sharp) == (1.0, 0.0)  # the second object is nowhere
    assert 0.3 < sharpness(spread)[0] < 0.4


def test_python_takes_what_people_have(
    encoder: Encoder, video: RenderedVideo, clip: Path, tmp_path: Path
) -> None:
    ids, knobs = video.objects[0], {"protocol": RENDERED, "detail": "fine"}
    expected = list(propagate(encoder, video.frames, ids, **knobs))  # type: ignore[arg-type]
    frames, masks = torch.from_numpy(video.frames), torch.from_numpy(ids)
    ways: list[tuple[Any, Any]] = [
        (clip, ids),
        (str(clip), mask(tmp_path / "first.png", ids)),
        (frames, masks),
        (frames.permute(0, 3, 1, 2), masks.long()),
        ([Image.fromarray(frame) for frame in video.frames], Image.fromarray(ids)),
        (iter(video.frames), {0: ids}),
    ]
    for given, labels in ways:
        found = list(propagate(encoder, given, labels, **knobs))  # type: ignore[arg-type]
        assert [one.frame for one in found] == list(range(8))
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(np.asarray(one), other.labels)
            assert 0 <= one.confidence <= 1
            assert len(one.each) == len(np.unique(ids)) - 1
    (single,) = propagate(encoder, video.frames[0], ids > 0)
    assert set(np.unique(single)) == {0, 1}
    points = list(propagate(encoder, clip, [[20, 30], [40.5, 12]], start=2, end=4, **knobs))  # type: ignore[arg-type]
    assert [one.frame for one in points] == [2, 3, 4]
    np.testing.assert_array_equal(points[0], [[20, 30], [40.5, 12]])


@pytest.mark.parametrize(
    ("frames", "labels", "said"),
    [
        (np.zeros((2, 64, 64, 3), np.float32), np.ones((64, 64), int), "float32"),
        (FRAMES, np.ones((64, 64, 3), int), "64x64x3"),
        (FRAMES, [["a", "b"]], "need ids"),
        (FRAMES, {"one": np.ones((64, 64), int)}, "numbered from 0"),
        (FRAMES, {5: np.ones((64, 64), int)}, "frame 5, but there are 2"),
        (7, np.ones((64, 64), int), "frames is a int"),
        ("nowhere.mp4", np.ones((64, 64), int), "nowhere.mp4"),
        ([], np.ones((64, 64), int), "no frames"),
        (FRAMES, np.full((64, 64), 300), "span 0 to 300"),
        (FRAMES, {-1: np.ones((64, 64), int)}, "numbered from 0"),
        (FRAMES, {}, "one or more"),
        (FRAMES, {0: np.ones((64, 64), int), 1: [[3.0, 4.0]]}, "kind"),
        (iter(FRAMES), {1: np.ones((64, 64), int)}, "length and an index"),
        (FRAMES, np.ones((32, 32), np.uint8), "frame 0 is 32x32, the frames are 64x64"),
    ],
)
def test_python_errors_are_one_line(frames: Any, labels: Any, said: str, encoder: Encoder) -> None:
    with pytest.raises(InputError, match=said) as stop:
        list(propagate(encoder, frames, labels))
    assert "\n" not in str(stop.value)


def test_an_encoder_takes_frames_of_any_kind_and_says_what_is_wrong(
    encoder: Encoder, video: RenderedVideo
) -> None:
    expected = encoder(torch.from_numpy(video.frames))
    torch.testing.assert_close(encoder(video.frames), expected)
    torch.testing.assert_close(encoder([Image.fromarray(video.frames[0])]), expected[:1])
    torch.testing.assert_close(encoder(video.frames[0]), expected[:1])
    for bad, said in (
        (np.zeros((1, 20, 64, 3), np.uint8), "patches of 8"),
        (np.zeros((1, 64, 64, 3)), "float64"),
        ([np.zeros((8, 8, 3), np.uint8), np.zeros((8, 16, 3), np.uint8)], "one size"),
        (3, "frames is a int"),
    ):
        with pytest.raises(InputError, match=said):
            encoder(bad)
    with pytest.raises(InputError, match="encoder is a int"):
        next(propagate(3, video.frames, video.objects[0]))  # type: ignore[arg-type]


def test_help_of_the_package_is_short() -> None:
    import pydoc

    text = pydoc.plain(pydoc.render_doc(tcore))
    # Python 3.13 says more about exceptions than 3.11, and breaks long lines.
    assert len(text.splitlines()) < 300
    assert "propagate(encoder" in "".join(text.split())


def test_marks_look_at_the_frames_right_before_and_after_in_the_whole_video(
    encoder: Encoder, clip: Path, tmp_path: Path
) -> None:
    frames, box = list(open_part(clip)), (20, 20, 30, 30)
    for at, part in (
        ("4", ["--start", "2", "--every", "2"]),
        ("0", []),
        ("6", ["--start", "6", "--end", "6"]),
    ):
        out = tmp_path / at
        words = ["--box", "it", *map(str, box), "--mark-at", at, "--no-overlay", *part]
        main(["propagate", "tiny", str(clip), *words, "--out", str(out)])
        near = [frames[place] for place in (int(at) - 1, int(at) + 1) if 0 <= place < len(frames)]
        expected = tcore.mark(frames[int(at)], encoder, box=box, nearby=near)
        np.testing.assert_array_equal(read_ids(out / "masks" / f"0000{at}.png") > 0, expected)


def test_frames_nearby_are_those_that_can_be_read_and_have_the_size(
    video: RenderedVideo, tmp_path: Path
) -> None:
    folder = tmp_path / "clip"
    write_folder(folder, video.frames[:4])
    Image.fromarray(video.frames[0, :40]).save(folder / "00000.png")
    (folder / "00003.png").write_bytes(b"not an image")
    whole = open_part(folder)
    for index, near in ((0, []), (1, [2]), (2, [1])):
        frame, nearby = whole.around(index)
        assert frame is not None
        assert [one.tolist() for one in nearby] == [video.frames[place].tolist() for place in near]
    part = open_part(folder, "1", "1")
    assert part.around(0)[1][0].tolist() == video.frames[2].tolist()  # after the part's end
    assert part.around(1) == (None, [])
