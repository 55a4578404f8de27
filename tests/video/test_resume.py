"""Runs that are stopped or killed: the same command goes on, and ends with the same bytes."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tcore.cli import encoders
from tcore.cli.main import main
from tcore.data.rendered import RenderedVideo
from tcore.errors import InputError
from tcore.evaluation import run_clip
from tcore.evaluation.encoder import Encoder
from tcore.evaluation.protocols import RENDERED, Precision
from tcore.files import LOCKS
from tcore.text import Progress
from tcore.video.propagate_video import propagate_video_file
from tcore.video.resume import CARD, UNFINISHED, DoneError
from tests.evaluation.clips import mask, need_av, write_file, write_folder

# A short memory, so that frames leave the ring within eight frames.
SHORT = replace(RENDERED, context=2)


def points(path: Path) -> Path:
    others = "".join(f"1,other{at},{at},{(7 * at) % 64}\n" for at in range(2, 64, 5))
    path.write_text(f"frame,name,x,y\n1,nose,20,30\n1,tail,40.5,12\n{others}4,nose,25,31\n")
    return path


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def after(frames: int) -> Any:
    """Ctrl-C after so many frames, those of the pass backward included."""
    asked = iter([*(frames * [False]), True])
    return lambda: next(asked)


def stop(encoder: Encoder, clip: Path, labels: Any, out: Path, frames: int, **knobs: Any) -> None:
    with pytest.raises(InputError, match="rerun the same command") as stopped:
        propagate_video_file(encoder, clip, labels, out, interrupted=after(frames), **knobs)
    assert stopped.value.exit_code == 130


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for every frame that the loop over frames encodes."""
    calls: list[int] = []
    encode = run_clip.encode

    def counted(*values: Any, **named: Any) -> Any:
        calls.append(1)
        return encode(*values, **named)

    monkeypatch.setattr(run_clip, "encode", counted)
    return calls


# Eight frames, and those of the pass backward: up to frame 5 where labels come later, up to 4 for points.
WORK = {"first": 8, "halved": 8, "later": 8 + 6, "points": 8 + 5}
STOPS = [(kind, frames) for kind, work in WORK.items() for frames in (1, 2, 5, 7, 10) if frames < work]


@pytest.mark.parametrize(("kind", "frames"), STOPS)
def test_a_run_that_was_stopped_anywhere_ends_with_the_bytes_of_one_that_was_not(
    kind: str, frames: int, encoder: Encoder, video: RenderedVideo, clip: Path, tmp_path: Path
) -> None:
    knobs: dict[str, Any] = {"protocol": SHORT, "detail": "fine"}
    if kind == "points":
        labels = [points(tmp_path / "points.csv")]
    else:
        given = (1, 5) if kind == "later" else (0,)
        labels = [mask(tmp_path / f"{frame:05d}.png", video.objects[frame]) for frame in given]
        knobs |= {"search": "halved" if kind == "halved" else None}
    propagate_video_file(encoder, clip, labels, tmp_path / "whole", **knobs)
    out = tmp_path / "out"
    stop(encoder, clip, labels, out, frames, **knobs)
    assert (out / UNFINISHED).exists()
    stop(encoder, clip, labels, out, min(frames + 2, WORK[kind] - 1), **knobs)  # and stopped once more
    propagate_video_file(encoder, clip, labels, out, **knobs)
    assert content(out) == content(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def test_what_was_done_is_in_the_folder_and_only_the_ring_is_encoded_again(
    encoder: Encoder, video: RenderedVideo, clip: Path, tmp_path: Path, encoded: list[int]
) -> None:
    labels, said = mask(tmp_path / "first.png", video.objects[0]), list[str]()
    knobs: dict[str, Any] = {"protocol": SHORT, "detail": "fine", "overlay": False}
    stop(encoder, clip, labels, tmp_path / "out", 6, **knobs)
    names = {path.name for path in (tmp_path / "out" / "masks").iterdir()}
    assert names == {f"{frame:05d}.png" for frame in range(6)}
    encoded.clear()
    propagate_video_file(encoder, clip, labels, tmp_path / "out", say=said.append, **knobs)
    assert len(encoded) == 1 + 2 + 1  # the first frame, the two of the ring, and the last one
    assert any("resuming after 7 finished" in line for line in said)
    assert not (tmp_path / "out" / UNFINISHED).exists()


def test_a_run_in_another_precision_is_refused_and_loses_nothing(
    encoder: Encoder, video: RenderedVideo, clip: Path, tmp_path: Path
) -> None:
    labels, out = mask(tmp_path / "first.png", video.objects[0]), tmp_path / "out"
    knobs: dict[str, Any] = {"protocol": SHORT, "detail": "fine", "overlay": False}
    pairs: list[tuple[Precision | None, Precision | None]] = [
        (None, "bf16"),
        ("bf16", None),
        ("bf16", "fp32"),
    ]
    for before, now in pairs:
        stop(encoder, clip, labels, out, 3, precision=before, **knobs)
        kept = (out / UNFINISHED).read_bytes()
        with pytest.raises(InputError, match=r"other settings \(precision\)"):
            propagate_video_file(encoder, clip, labels, out, precision=now, **knobs)
        assert (out / UNFINISHED).read_bytes() == kept
        shutil.rmtree(out)
    propagate_video_file(encoder, clip, labels, out, precision="bf16", **knobs)
    assert json.loads((out / CARD).read_text())["protocol"]["precision"] == "bf16"


def test_a_video_file_goes_on_like_a_folder(encoder: Encoder, video: RenderedVideo, tmp_path: Path) -> None:
    need_av()
    clip, labels = write_file(tmp_path / "clip.mp4", video.frames), mask(tmp_path / "a.png", video.objects[0])
    knobs: dict[str, Any] = {"protocol": SHORT, "form": "coco", "start": "1", "every": 2}
    propagate_video_file(encoder, clip, labels, tmp_path / "whole", detail="fine", **knobs)
    stop(encoder, clip, labels, tmp_path / "out", 2, detail="fine", **knobs)
    propagate_video_file(encoder, clip, labels, tmp_path / "out", detail="fine", **knobs)
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_the_detail_that_a_machine_chose_is_kept(
    encoder: Encoder, video: RenderedVideo, clip: Path, tmp_path: Path
) -> None:
    labels, out = mask(tmp_path / "first.png", video.objects[0]), tmp_path / "out"
    stop(encoder, clip, labels, out, 3, protocol=SHORT)
    head = (out / UNFINISHED).read_bytes().partition(b"\n")[0]
    assert head.startswith(b'{"detail": "fine"')
    (out / UNFINISHED).write_bytes(head.replace(b'"fine"', b'"coarse"', 1) + b"\n")
    propagate_video_file(encoder, clip, labels, out, protocol=SHORT)
    assert b'"detail": "coarse"' in (out / "propagation.json").read_bytes()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"detail": "coarse"}, "detail"),
        ({"start": "1"}, "start"),
        ({"form": "coco"}, "format"),
        ({"edges": False}, "protocol"),
        ({"overlay": True}, "overlay"),
        ({"labels": "other.png"}, "labels"),
        ({"video": "other"}, "video"),
    ],
)
def test_another_command_is_refused_where_one_was_stopped(
    change: dict[str, Any], named: str, encoder: Encoder, video: RenderedVideo, clip: Path, tmp_path: Path
) -> None:
    mask(tmp_path / "first.png", video.objects[0])
    mask(tmp_path / "other.png", video.objects[1])
    write_folder(tmp_path / "other", video.frames[:6])
    knobs: dict[str, Any] = {"protocol": SHORT, "detail": "fine", "overlay": False}
    stop(encoder, clip, tmp_path / "first.png", tmp_path / "out", 3, **knobs)
    before = content(tmp_path / "out")
    labels, source = tmp_path / change.pop("labels", "first.png"), change.pop("video", None)
    with pytest.raises(InputError, match=rf"other settings \({named}\)") as refused:
        propagate_video_file(
            encoder, tmp_path / source if source else clip, labels, tmp_path / "out", **knobs | change
        )
    assert "\n" not in str(refused.value)
    assert content(tmp_path / "out") == before
    (tmp_path / "out" / "thesis.tex").touch()
    with pytest.raises(InputError, match=r"holds thesis\.tex"):
        propagate_video_file(encoder, clip, tmp_path / "first.png", tmp_path / "out", **knobs)


@pytest.mark.parametrize("cut", [0, 5, 400, -1, -100, "flip"])
def test_what_a_kill_cut_off_is_computed_again(
    cut: Any, encoder: Encoder, video: RenderedVideo, clip: Path, tmp_path: Path
) -> None:
    labels = [mask(tmp_path / f"{frame:05d}.png", video.objects[frame]) for frame in (0, 3)]
    knobs: dict[str, Any] = {"protocol": SHORT, "detail": "fine", "overlay": False}
    propagate_video_file(encoder, clip, labels, tmp_path / "whole", **knobs)
    stop(encoder, clip, labels, tmp_path / "out", 9, **knobs)
    data = (tmp_path / "out" / UNFINISHED).read_bytes()
    damaged = data[:-50] + bytes([data[-50] ^ 1]) + data[-49:] if cut == "flip" else data[:cut]
    left = tmp_path / "killed"  # a killed process leaves no other file than this and its lock
    left.mkdir()
    (left / UNFINISHED).write_bytes(damaged)
    for name in LOCKS:
        (left / name).write_text("{}")
    propagate_video_file(encoder, clip, labels, left, **knobs)
    assert content(left) == content(tmp_path / "whole")


def test_a_second_ctrl_c_leaves_what_is_needed_to_go_on_and_nothing_else(
    encoder: Encoder, video: RenderedVideo, clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels, labeled = mask(tmp_path / "first.png", video.objects[0]), list[Progress]()
    knobs: dict[str, Any] = {"protocol": SHORT, "detail": "fine", "overlay": False}
    propagate_video_file(encoder, clip, labels, tmp_path / "whole", **knobs)

    def interrupt(progress: Progress) -> None:
        labeled.append(progress)
        if len(labeled) == 4:
            assert list(tmp_path.glob(".out.*/confidence.csv"))  # something is on disk
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Progress, "advance", interrupt)
        with pytest.raises(KeyboardInterrupt):
            propagate_video_file(encoder, clip, labels, tmp_path / "out", **knobs)
    assert {path.name for path in tmp_path.iterdir()} == {"first.png", "whole", "out"}
    assert [path.name for path in (tmp_path / "out").iterdir()] == [UNFINISHED]
    propagate_video_file(encoder, clip, labels, tmp_path / "out", **knobs)
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_of_several_videos_those_that_are_done_are_left_alone(
    encoder: Encoder,
    video: RenderedVideo,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(encoders.WithEncoder, "load", lambda self: encoder)
    for name in ("a", "b"):
        write_folder(tmp_path / "in" / name, video.frames[:2])
        mask(tmp_path / "labels" / f"{name}.png", video.objects[0])
    words = ["propagate", "tiny", *(str(tmp_path / "in" / name) for name in ("a", "b")), "--no-overlay"]
    words += ["--detail", "fine", "--labels", str(tmp_path / "labels"), "--out", str(tmp_path / "out")]
    main(words)
    before = content(tmp_path / "out")
    (tmp_path / "out" / "b" / "propagation.json").unlink()
    for file in (tmp_path / "out" / "b").rglob("*.*"):
        file.unlink()
    (tmp_path / "out" / "b" / "masks").rmdir()
    capsys.readouterr()
    main(words)
    assert "already holds the result of this very command" in capsys.readouterr().err
    assert content(tmp_path / "out") == before
    with pytest.raises(DoneError):
        propagate_video_file(
            encoder,
            tmp_path / "in" / "a",
            tmp_path / "labels" / "a.png",
            tmp_path / "out" / "a",
            detail="fine",
            overlay=False,
        )
