"""What `tcore check` finds in video files."""

import builtins
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tcore.data.check_videos import check_videos
from tcore.data.video import VideoFiles, list_videos, probe
from tcore.errors import InputError
from tcore.recipes import recipe

av = pytest.importorskip("av")
CONFIG = recipe("quickstart", {"runtime.workers": 1})


def write_video(path: Path, seconds: float, *, rate: int = 10, moving: bool = True) -> Path:
    """A video whose brightness is its time, so that a frame says where it is from."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=rate, options={"g": "5"})
        stream.width, stream.height, stream.pix_fmt = 48, 32, "yuv420p"
        for index in range(round(seconds * rate)):
            level = 20 + (round(20 * index / rate) if moving else 0)
            frame = np.full((32, 48, 3), level, np.uint8)
            frame[:, ::8] = 255  # something to be seen
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return path


@pytest.fixture
def videos(tmp_path: Path) -> Path:
    write_video(tmp_path / "videos" / "a.avi", 10)
    write_video(tmp_path / "videos" / "deep" / "b.avi", 8)
    return tmp_path / "videos"


@pytest.mark.parametrize("full", [False, True])
def test_good_files_are_described(videos: Path, full: bool) -> None:
    findings, store = check_videos(videos, CONFIG, full=full)
    assert findings.exit_code == 0
    assert "mpeg4 (2)" in findings.text()
    assert "48x32 (2)" in findings.text()
    assert findings.figures["hours"] == pytest.approx(18 / 3600, rel=0.02)
    assert store is not None
    assert store.lengths.tolist() == [20, 16]


@pytest.mark.parametrize("full", [False, True])
def test_empty_text_and_truncated_files_are_named_with_reasons(videos: Path, full: bool) -> None:
    (videos / "empty.mp4").touch()
    (videos / "text.mp4").write_text("not a video")
    whole = (videos / "a.avi").read_bytes()
    (videos / "cut.avi").write_bytes(whole[: len(whole) // 2])
    findings, _ = check_videos(videos, CONFIG, full=full)
    bad = findings.figures["bad"]
    assert set(bad) == {"empty.mp4", "text.mp4", "cut.avi"}
    assert "empty" in bad["empty.mp4"]
    assert "cannot be opened" in bad["text.mp4"]
    assert "cut off" in bad["cut.avi"]
    assert findings.exit_code == 1


def test_a_short_video_a_copy_and_a_still_one_are_named(videos: Path) -> None:
    write_video(videos / "brief.avi", 2)
    write_video(videos / "statue.avi", 10, moving=False)
    shutil.copy(videos / "a.avi", videos / "twin.avi")
    findings, _ = check_videos(videos, CONFIG)
    assert findings.figures["too_short"] == ["brief.avi"]
    assert findings.figures["duplicates"] == [["a.avi", "twin.avi"]]
    assert findings.figures["still"] == ["statue.avi"]


@pytest.mark.parametrize("full", [False, True])
def test_first_middle_and_last_part_are_seen(videos: Path, full: bool) -> None:
    found = probe(videos, "a.avi", full)
    assert found.thumbs is not None
    first, middle, last = found.thumbs.reshape(3, -1).min(axis=1).tolist()
    assert middle - first == pytest.approx(100 * 7 / 8, abs=25)
    assert last - first == pytest.approx(200 * 7 / 8, abs=40)


def test_frames_come_from_their_time(videos: Path) -> None:
    store = VideoFiles(videos, [probe(videos, "a.avi", False)], fps=2.0)
    levels = [int(np.median(frame)) for frame in store.read(0, [0, 10, 4])]
    assert levels == pytest.approx([20, 120, 60], abs=6)


def test_a_folder_without_videos_is_refused(tmp_path: Path) -> None:
    assert list_videos(tmp_path) == []
    with pytest.raises(InputError, match="no video files under"):
        check_videos(tmp_path, CONFIG)


def test_without_pyav_it_says_what_to_install(videos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = builtins.__import__

    def without_av(name: str, *rest: Any, **named: Any) -> Any:
        if name == "av":
            raise ImportError("No module named 'av'")
        return usual(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without_av)
    with pytest.raises(InputError, match="pip install av"):
        check_videos(videos, CONFIG)
