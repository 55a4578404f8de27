"""Video files as a few upright frames per second."""

import itertools
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tcore.data.cuts import color_difference, describe_colors, find_cuts
from tcore.data.decode import SampledVideo, UnreadableError, _Clock
from tcore.data.rendered import render_video
from tests.evaluation.clips import cut, need_av, turn, write_file


@pytest.fixture(autouse=True)
def _av() -> None:
    need_av()


def gray(levels: Sequence[int], size: tuple[int, int] = (48, 64)) -> np.ndarray:
    return np.stack([np.full((*size, 3), level, np.uint8) for level in levels])


def write_at(path: Path, frames: np.ndarray, milliseconds: Sequence[int]) -> Path:
    """A video whose frames come at given times."""
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=1000, options={"crf": "5", "bf": "0"})
        stream.height, stream.width, stream.pix_fmt = *frames.shape[1:3], "yuv420p"
        stream.time_base = stream.codec_context.time_base = Fraction(1, 1000)
        for frame, time in zip(frames, milliseconds, strict=True):
            picture = av.VideoFrame.from_ndarray(frame, format="rgb24")
            picture.pts, picture.time_base = time, Fraction(1, 1000)
            container.mux(stream.encode(picture))
        container.mux(stream.encode())
    return path


def levels(path: Path, fps: float = 2) -> list[int]:
    """The gray level of every kept frame, to the next ten."""
    found = []
    for pixels, times in SampledVideo(path, Fraction(fps), None):
        found += [round(float(pixels.mean()) / 10) * 10] * times
    return found


def test_frames_are_kept_at_even_times(tmp_path: Path) -> None:
    path = write_file(tmp_path / "v.mp4", gray(range(0, 200, 10)), rate=10)  # 2 seconds
    assert levels(path, 2) == [0, 50, 100, 150]
    assert levels(path, 5) == list(range(0, 200, 20))
    assert levels(path, 10) == list(range(0, 200, 10))


def test_frames_that_come_at_uneven_times_are_taken_by_their_times(tmp_path: Path) -> None:
    path = write_at(tmp_path / "v.mkv", gray([10, 50, 90, 130, 170]), [0, 400, 501, 1700, 1710])
    # On the screen at 0, 0.5, 1, 1.5 s.
    assert levels(path) == [10, 50, 90, 90]


def test_a_slow_video_shows_its_frames_longer(tmp_path: Path) -> None:
    assert levels(write_file(tmp_path / "v.mp4", gray([20, 60, 100]), rate=1)) == [20, 20, 60, 60, 100, 100]


def test_one_frame_is_a_video(tmp_path: Path) -> None:
    assert levels(write_file(tmp_path / "v.mp4", gray([70]), rate=30)) == [70]


def test_a_jump_of_the_clock_is_not_filled_with_stills(tmp_path: Path) -> None:
    times = [0, 500, 1000, 90_000_000, 90_000_500]
    found = levels(write_at(tmp_path / "v.mkv", gray([10, 50, 90, 130, 170]), times))
    assert found[:3] == [10, 50, 90]
    assert len(found) <= 6


@pytest.mark.parametrize("stamps", [[None] * 6, [0, 1, 2, 3, 0, 1], [1, 4, 3, 5, 7, 6]])
def test_stamps_that_miss_or_go_back_do_not_stop_the_clock(stamps: list[int | None]) -> None:
    stream = SimpleNamespace(average_rate=Fraction(30), guessed_rate=None, time_base=Fraction(1, 30))
    clock = _Clock(stream)
    dts: list[int | None] = [None] * 6 if None in stamps else [2, 3, 4, 5, 6, 7]
    times = [
        clock.advance(SimpleNamespace(pts=pts, dts=other, duration=1))
        for pts, other in zip(stamps, dts, strict=True)
    ]
    assert times == sorted(times)
    assert times[0] == 0
    assert 4 <= times[-1] <= 8


def test_large_frames_shrink_and_small_ones_stay(tmp_path: Path) -> None:
    path = write_file(tmp_path / "v.mp4", gray([50], (90, 130)))
    shapes = {
        side: next(iter(SampledVideo(path, Fraction(2), side))).pixels.shape for side in (None, 45, 90, 200)
    }
    assert shapes == {None: (90, 130, 3), 45: (45, 65, 3), 90: (90, 130, 3), 200: (90, 130, 3)}


def test_odd_sizes_and_ten_bits_are_decoded(tmp_path: Path) -> None:
    import av

    frames = render_video(0, 0, num_frames=2, size=64).frames[:, :51, :37]
    with av.open(str(tmp_path / "v.mkv"), "w") as container:
        stream = container.add_stream("libx264", rate=1, options={"crf": "1"})
        stream.height, stream.width, stream.pix_fmt = 51, 37, "yuv444p10le"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    found = [kept.pixels for kept in SampledVideo(tmp_path / "v.mkv", Fraction(1), None)]
    assert np.abs(np.stack(found).astype(int) - frames).mean() < 3


def test_a_turned_video_is_turned_upright(tmp_path: Path) -> None:
    frames = np.repeat(render_video(0, 0, num_frames=1, size=64).frames[:, :48], 3, axis=0)
    path = turn(write_file(tmp_path / "v.mp4", frames))
    pixels = next(iter(SampledVideo(path, Fraction(2), None))).pixels
    assert pixels.shape == (64, 48, 3)
    assert np.abs(pixels.astype(int) - np.rot90(frames[0], -1)).mean() < 8


def test_a_truncated_video_gives_what_comes_before_the_damage(tmp_path: Path) -> None:
    frames = render_video(0, 1, num_frames=20, size=64).frames
    path = cut(write_file(tmp_path / "v.mp4", frames, rate=2), 0.6)
    video = SampledVideo(path, Fraction(2), None)
    kept = [pixels for pixels, times in video for _ in range(times)]
    assert "s of 10.0 s" in video.damage
    assert 8 <= len(kept) <= 14
    assert np.abs(np.stack(kept).astype(int) - frames[: len(kept)]).mean() < 8


@pytest.mark.parametrize(
    ("data", "reason"), [(b"", "empty"), (b"hello world", "not a video"), (b"\0" * 5000, "not a video")]
)
def test_what_is_no_video_says_so(tmp_path: Path, data: bytes, reason: str) -> None:
    (tmp_path / "v.mp4").write_bytes(data)
    with pytest.raises(UnreadableError, match=reason):
        list(SampledVideo(tmp_path / "v.mp4", Fraction(2), None))


def test_a_file_of_sound_alone_says_so(tmp_path: Path) -> None:
    import av

    with av.open(str(tmp_path / "v.mkv"), "w") as container:
        stream = container.add_stream("pcm_s16le", rate=8000)
        sound = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), format="s16", layout="mono")
        sound.rate = 8000
        container.mux(stream.encode(sound))
        container.mux(stream.encode())
    with pytest.raises(UnreadableError, match="sound only"):
        list(SampledVideo(tmp_path / "v.mkv", Fraction(2), None))


def test_a_hard_cut_is_found_and_motion_is_not() -> None:
    shots = [render_video(3, video, num_frames=12, size=96).frames for video in (0, 1, 2)]
    for first, second in ((0, 1), (1, 2), (2, 0)):
        described = [describe_colors(frame) for frame in np.concatenate([shots[first], shots[second][:9]])]
        changes = [color_difference(a, b) for a, b in itertools.pairwise(described)]
        assert find_cuts(changes) == [12]


def test_a_still_that_begins_to_move_is_no_cut() -> None:
    assert find_cuts([0.0, 0.0, 0.3, 0.0, 0.3, 0.0]) == []
    assert find_cuts([0.0, 0.5, 0.0, 0.5, 0.0, 0.5]) == []
    assert find_cuts([]) == []
