import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from tcore.data.decode import upright
from tcore.data.rendered import render_video
from tcore.errors import InputError
from tcore.video.video_file import open_video, video_writer
from tests.evaluation.clips import cut, need_av, turn, write_file, write_folder


@pytest.fixture(scope="module")
def frames() -> np.ndarray:
    return render_video(0, 0, num_frames=8, size=64).frames[:, :, :48]


def test_a_folder_gives_its_images_in_natural_order(frames: np.ndarray, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "clip", frames)
    for index in range(8):  # 0.png ... 7.png, then 10.png, which sorts before 2.png as text
        (folder / f"{index:05d}.png").rename(folder / f"{index if index < 7 else 10}.png")
    video = open_video(folder)
    np.testing.assert_array_equal(np.stack(list(video)), frames)
    assert (video.count, video.stems["10"], video.name(7)) == (8, 7, "10")


def test_a_folder_is_read_one_image_at_a_time(frames: np.ndarray, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "clip", frames)
    iterator = iter(open_video(folder))
    next(iterator)
    (folder / "00001.png").write_bytes(b"broken since")
    with pytest.raises(InputError, match=r"cannot read frame .*00001\.png"):
        next(iterator)


def test_a_file_gives_the_frames_that_were_written(frames: np.ndarray, tmp_path: Path) -> None:
    need_av()
    video = open_video(write_file(tmp_path / "clip.mp4", frames))
    assert (video.count, int(video.rate), video.name(3)) == (8, 10, "00003")
    for _ in range(2):  # and again from the start
        found = np.stack(list(video))
        assert video.problem == ""
        assert np.abs(found.astype(int) - frames).mean() < 2


def test_frames_are_turned_upright(frames: np.ndarray, tmp_path: Path) -> None:
    need_av()
    video = open_video(turn(write_file(tmp_path / "clip.mp4", frames)))
    found = np.stack(list(video))
    assert found.shape == (8, 48, 64, 3)
    clockwise = np.rot90(frames, -1, axes=(1, 2))
    assert np.abs(found.astype(int) - clockwise).mean() < 2
    assert upright(frames[0], 0).shape == (64, 48, 3)


def test_what_is_left_of_a_cut_video_is_read_and_said(frames: np.ndarray, tmp_path: Path) -> None:
    need_av()
    video = open_video(cut(write_file(tmp_path / "clip.mp4", frames), 0.7))
    found = np.stack(list(video))
    assert 2 <= len(found) < 8
    assert np.abs(found.astype(int) - frames[: len(found)]).mean() < 2
    assert f"{len(found)} of 8 frames" in video.problem


def test_a_cut_video_without_a_count_is_noticed_by_its_length(frames: np.ndarray, tmp_path: Path) -> None:
    need_av()
    video = open_video(cut(write_file(tmp_path / "clip.mkv", frames), 0.6))
    found = list(video)
    assert 2 <= len(found) < 7
    assert f"{len(found)} of about 8 frames" in video.problem


@pytest.mark.parametrize("content", [b"", b"no video at all " * 50])
def test_files_that_are_no_videos_are_one_line(content: bytes, tmp_path: Path) -> None:
    need_av()
    (tmp_path / "clip.mp4").write_bytes(content)
    with pytest.raises(InputError, match=r"cannot read video .*clip\.mp4: .*empty, or cut off") as caught:
        open_video(tmp_path / "clip.mp4")
    assert "\n" not in str(caught.value)


def test_a_file_of_sound_alone_is_refused(tmp_path: Path) -> None:
    need_av()
    import av

    with av.open(str(tmp_path / "sound.wav"), "w") as container:
        stream = container.add_stream("pcm_s16le", rate=8000, layout="mono")
        sound = av.AudioFrame.from_ndarray(np.zeros((1, 800), dtype=np.int16), format="s16", layout="mono")
        sound.rate = 8000
        container.mux(stream.encode(sound))
    with pytest.raises(InputError, match="no video stream"):
        open_video(tmp_path / "sound.wav")


def test_paths_without_frames_are_named(frames: np.ndarray, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere does not exist"):
        open_video(tmp_path / "nowhere")
    (tmp_path / "films").mkdir()
    (tmp_path / "films" / "one.mp4").touch()
    with pytest.raises(InputError, match=r"no frames in .*films.*films/one\.mp4"):
        open_video(tmp_path / "films")
    folder = write_folder(tmp_path / "clip", frames[:2])
    (folder / "00001.jpg").write_bytes((folder / "00001.png").read_bytes())
    with pytest.raises(InputError, match=r"two images named 00001"):
        open_video(folder)


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "clip.mp4").write_bytes(b"anything")
    monkeypatch.setitem(sys.modules, "av", None)  # importing it fails
    with pytest.raises(InputError, match="pip install av, or give a folder of images"):
        open_video(tmp_path / "clip.mp4")


def test_what_is_written_can_be_read_and_odd_sides_are_padded(frames: np.ndarray, tmp_path: Path) -> None:
    need_av()
    odd = frames[:, :63, :47]
    with video_writer(tmp_path / "out.mp4", Fraction(10), (63, 47)) as write:
        for frame in odd:
            write(frame)
        assert not (tmp_path / "out.mp4").exists()  # it appears when it is complete
    found = np.stack(list(open_video(tmp_path / "out.mp4")))
    assert found.shape == (8, 64, 48, 3)
    assert np.abs(found[:, :63, :47].astype(int) - odd).mean() < 12
    with (
        pytest.raises(InputError, match=r"cannot write .*out\.mp4/x\.mp4"),
        video_writer(tmp_path / "out.mp4" / "x.mp4", Fraction(10), (63, 47)),
    ):
        pass
