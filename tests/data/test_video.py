"""Video files and folders of images as frames, at a rate too; and the video that is written."""

import io
import os
import subprocess
import sys
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tcore.data.packing import CutFinder, find_cuts
from tcore.data.rendered import render_video
from tcore.data.video import (
    FileVideo,
    SampledVideo,
    UnreadableError,
    _Clock,
    open_video,
    upright,
    video_writer,
)
from tcore.errors import InputError
from tests.evaluation.clips import cut, need_av, turn, write_file, write_folder
from tests.readers.data import write_video


@pytest.fixture(scope="module")
def frames() -> np.ndarray:
    need_av()
    return render_video(0, 0, num_frames=8, size=64).frames[:, :, :48]


def difference(found: Any, wanted: np.ndarray) -> float:
    return float(np.abs(np.stack(list(found)).astype(int) - wanted).mean())


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
    """The gray level of every kept frame, rounded to ten."""
    found = []
    for pixels, times in SampledVideo(path, Fraction(fps), None):
        found += [round(float(pixels.mean()) / 10) * 10] * times
    return found


def test_a_folder_gives_its_images_in_natural_order_one_at_a_time(frames: np.ndarray, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "clip", frames)
    for index in range(8):  # 0.png ... 6.png, then 10.png, which sorts before 2.png as text
        (folder / f"{index:05d}.png").rename(folder / f"{index if index < 7 else 10}.png")
    video = open_video(folder)
    np.testing.assert_array_equal(np.stack(list(video)), frames)
    assert (video.count, video.stems["10"], video.file_name(7)) == (8, 7, "10.png")
    (folder / "1.png").write_bytes(b"damaged since")
    iterator = iter(video)
    np.testing.assert_array_equal(next(iterator), frames[0])  # what comes before is there
    with pytest.raises(InputError, match=r"1\.png"):
        next(iterator)


def test_paths_without_frames_are_named(frames: np.ndarray, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nowhere"):
        open_video(tmp_path / "nowhere")
    (tmp_path / "films").mkdir()
    (tmp_path / "films" / "one.mp4").touch()
    with pytest.raises(InputError, match=r"no frames in .*films"):
        open_video(tmp_path / "films")
    folder = write_folder(tmp_path / "clip", frames[:2])
    (folder / "00001.jpg").write_bytes((folder / "00001.png").read_bytes())
    with pytest.raises(InputError, match="00001"):
        open_video(folder)


def test_a_file_gives_the_frames_that_were_written_each_time(frames: np.ndarray, tmp_path: Path) -> None:
    video = open_video(write_file(tmp_path / "clip.mp4", frames))
    assert (video.count, int(video.rate), video.file_name(3)) == (8, 10, "00003.png")
    for _ in range(2):
        assert difference(video, frames) < 2
        assert video.problem == ""


def test_metadata_that_is_no_text_does_not_matter(frames: np.ndarray, tmp_path: Path) -> None:
    import av

    path = write_at(tmp_path / "plain.mp4", frames, range(0, 800, 100))
    with av.open(str(path)) as found, av.open(str(tmp_path / "titled.mp4"), "w") as container:
        stream = found.streams.video[0]
        copy, container.metadata["title"] = container.add_stream_from_template(stream), "WORDS"
        for packet in found.demux(stream):
            if packet.dts is not None:
                packet.stream = copy
                container.mux(packet)
    data = (tmp_path / "titled.mp4").read_bytes()
    assert b"WORDS" in data
    path.write_bytes(data.replace(b"WORDS", b"\xff\xfe\xc3\x28\x80"))
    assert len(list(open_video(path))) == 8


def test_rotated_videos_are_turned_upright(frames: np.ndarray, tmp_path: Path) -> None:
    path = turn(write_file(tmp_path / "clip.mp4", frames))
    clockwise = np.rot90(frames, -1, axes=(1, 2))
    assert difference(open_video(path), clockwise) < 2
    assert difference((pixels for pixels, _ in SampledVideo(path, Fraction(10), None)), clockwise) < 4
    assert upright(frames[0], 0).shape == (64, 48, 3)


@pytest.mark.parametrize(("name", "said"), [("clip.mp4", "{} of 8 frames"), ("clip.mkv", "{} of about 8")])
def test_what_is_left_of_a_cut_video_is_read(
    frames: np.ndarray, tmp_path: Path, name: str, said: str
) -> None:
    """An mp4 states how many frames it holds, an mkv only how long it lasts."""
    path = cut(write_file(tmp_path / name, frames), 0.6)
    video = open_video(path)
    found = list(video)
    assert 2 <= len(found) < 7
    assert difference(found, frames[: len(found)]) < 2
    assert said.format(len(found)) in video.problem
    sampled = SampledVideo(path, Fraction(10), None)
    kept = [pixels for pixels, times in sampled for _ in range(times)]
    assert difference(kept, frames[: len(kept)]) < 4
    assert len(kept) >= 2
    assert name == "clip.mkv" or "s of 0.8 s" in sampled.damage


def test_an_mp4_cut_anywhere_in_its_header_is_one_line(tmp_path: Path) -> None:
    need_av()
    whole = write_video(tmp_path / "whole.mp4", "libx264").read_bytes()
    path, refused = tmp_path / "cut.mp4", list[str]()
    for length in range(0, len(whole), 11):
        path.write_bytes(whole[:length])
        for read in (lambda: list(open_video(path)), lambda: list(SampledVideo(path, Fraction(2), 32))):
            try:
                assert len(read()) > 0
            except InputError as error:
                refused.append(str(error))
    assert len(refused) > len(whole) // 11
    assert all("cut.mp4" in line and "\n" not in line for line in refused)


def growing(path: Path, side: int) -> Path:
    """A video of small frames that are followed by large ones."""
    import av

    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream("mjpeg", rate=8)
        stream.width = stream.height = 64
        stream.pix_fmt = "yuvj420p"
        container.start_encoding()
        for index in range(12):
            buffer = io.BytesIO()
            size = (64, 64) if index < 9 else (side, side)
            Image.new("YCbCr", size, (9 * index, 128, 128)).save(buffer, "jpeg")
            packet = av.Packet(buffer.getvalue())
            packet.stream, packet.pts, packet.dts = stream, index, index
            packet.time_base, packet.is_keyframe = Fraction(1, 8), True
            container.mux(packet)
    return path


PEAK = """
import sys
from fractions import Fraction
from pathlib import Path
from tcore.data import probe, video
from tcore.errors import InputError
path, usual = Path(sys.argv[1]), video.LARGEST
video.import_package("av", "a test")
WAYS = {
    "file": lambda: sum(1 for _ in video.FileVideo(path)),
    "sampled": lambda: sum(1 for _ in video.SampledVideo(path, Fraction(8), 32)),
    "probed": lambda: probe.probe(path.parent, path.name, full=True).problem,
}
def largest():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
for way, read in WAYS.items():
    for video.LARGEST in (2**20, usual):
        Path("/proc/self/clear_refs").write_text("5")  # the largest memory so far is forgotten
        before = largest()
        try:
            said = read()
        except InputError as error:
            said = error
        print(way, (largest() - before) // 1024, said)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_frames_that_grow_after_the_header_take_no_memory(tmp_path: Path) -> None:
    need_av()
    run = [sys.executable, "-c", PEAK, str(growing(tmp_path / "grows.avi", 4000))]
    # Large blocks go back to the system once they are free, so that the next way does not find them there.
    plain = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    lines = subprocess.run(run, check=True, capture_output=True, text=True, env=plain).stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["file", "file", "sampled", "sampled", "probed", "probed"]
    for limited, free in zip(lines[::2], lines[1::2], strict=True):
        assert int(limited.split()[1]) < 12, lines  # MB; a frame has 24
        assert int(free.split()[1]) > 20, lines
    assert "frame 9 is 4000x4000, the first 64x64" in lines[1]


def test_frames_of_ten_bits_and_of_odd_sizes_are_decoded(tmp_path: Path) -> None:
    need_av()
    deep = write_video(tmp_path / "deep.mkv", "libx264", pixels="yuv420p10le")
    odd = write_video(tmp_path / "odd.avi", "ffv1", (47, 63), pixels="yuv444p")
    for path, shape in ((deep, (48, 64, 3)), (odd, (47, 63, 3))):
        found = list(open_video(path))
        assert [frame.shape for frame in found] == [shape] * 8
        wanted = [20 * index for index in range(8)]
        assert (
            np.abs([int(frame[-1, -1].mean()) - w for frame, w in zip(found, wanted, strict=True)]).max() < 4
        )
        assert [pixels.shape for pixels, _ in SampledVideo(path, Fraction(2), None)] == [shape] * 2


@pytest.mark.parametrize("data", [b"", b"\0" * 5000])
def test_what_is_not_a_video_is_named_in_one_line(tmp_path: Path, data: bytes) -> None:
    need_av()
    (tmp_path / "v.mp4").write_bytes(data)
    reason = "not a video" if data else "empty"
    with pytest.raises(InputError, match=rf"v\.mp4.*{reason}") as caught:
        open_video(tmp_path / "v.mp4")
    assert "\n" not in str(caught.value)
    with pytest.raises(UnreadableError, match=reason):
        list(SampledVideo(tmp_path / "v.mp4", Fraction(2), None))


def test_a_file_of_sound_alone_is_refused(tmp_path: Path) -> None:
    need_av()
    import av

    with av.open(str(tmp_path / "v.mkv"), "w") as container:
        stream = container.add_stream("pcm_s16le", rate=8000)
        sound = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), format="s16", layout="mono")
        sound.rate = 8000
        container.mux(stream.encode(sound))
        container.mux(stream.encode())
    with pytest.raises(UnreadableError, match="audio only"):
        list(SampledVideo(tmp_path / "v.mkv", Fraction(2), None))
    with pytest.raises(InputError, match="audio only"):
        open_video(tmp_path / "v.mkv")


def test_a_missing_pyav_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "clip.mp4").write_bytes(b"anything")
    monkeypatch.setitem(sys.modules, "av", None)  # importing it fails
    with pytest.raises(InputError, match="pip install av"):
        open_video(tmp_path / "clip.mp4")


def test_frames_are_kept_at_even_times(tmp_path: Path) -> None:
    need_av()
    path = write_file(tmp_path / "v.mp4", gray(range(0, 200, 10)), rate=10)  # 2 seconds
    assert levels(path, 2) == [0, 50, 100, 150]
    assert levels(path, 5) == list(range(0, 200, 20))
    assert levels(path, 10) == list(range(0, 200, 10))
    slow = write_file(tmp_path / "slow.mp4", gray([20, 60, 100]), rate=1)
    assert levels(slow) == [20, 20, 60, 60, 100, 100]
    assert levels(write_file(tmp_path / "one.mp4", gray([70]), rate=30)) == [70]


def test_frames_at_uneven_times_are_taken_by_their_times(tmp_path: Path) -> None:
    need_av()
    path = write_at(tmp_path / "v.mkv", gray([10, 50, 90, 130, 170]), [0, 400, 501, 1700, 1710])
    assert levels(path) == [10, 50, 90, 90]  # on the screen at 0, 0.5, 1, 1.5 s
    jump = write_at(tmp_path / "j.mkv", gray([10, 50, 90, 130, 170]), [0, 500, 1000, 90_000_000, 90_000_500])
    found = levels(jump)  # not filled with stills
    assert found[:3] == [10, 50, 90]
    assert len(found) <= 6


@pytest.mark.parametrize("stamps", [[None] * 6, [0, 1, 2, 3, 0, 1], [1, 4, 3, 5, 7, 6]])
def test_missing_or_backward_time_stamps_do_not_stop_the_clock(stamps: list[int | None]) -> None:
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
    need_av()
    path = write_file(tmp_path / "v.mp4", gray([50], (90, 130)))
    shapes = {
        side: next(iter(SampledVideo(path, Fraction(2), side)))[0].shape for side in (None, 45, 90, 200)
    }
    assert shapes == {None: (90, 130, 3), 45: (45, 65, 3), 90: (90, 130, 3), 200: (90, 130, 3)}


def test_what_is_written_can_be_read_and_odd_sides_are_padded(frames: np.ndarray, tmp_path: Path) -> None:
    odd = frames[:, :63, :47]
    with video_writer(tmp_path / "out.mp4", Fraction(10), (63, 47)) as write:
        for frame in odd:
            write(frame)
        assert not (tmp_path / "out.mp4").exists()  # it appears when it is complete
    found = np.stack(list(open_video(tmp_path / "out.mp4")))
    assert found.shape == (8, 64, 48, 3)
    assert difference(found[:, :63, :47], odd) < 12
    with (
        pytest.raises(InputError, match=r"out\.mp4/x\.mp4"),
        video_writer(tmp_path / "out.mp4" / "x.mp4", Fraction(10), (63, 47)),
    ):
        pass


def test_equal_frames_are_written_as_equal_bytes(tmp_path: Path) -> None:
    frames = render_video(0, 1, num_frames=12, size=64).frames
    found, rng = set[bytes](), np.random.default_rng(0)
    for size in rng.integers(1 << 12, 1 << 18, 12):
        np.full(size, rng.integers(256), np.uint8)  # what is in free memory is no part of the result
        with video_writer(tmp_path / "out.mp4", Fraction(10), (64, 64)) as write:
            for frame in frames:
                write(frame)
        found.add((tmp_path / "out.mp4").read_bytes())
    assert len(found) == 1


def test_a_hard_cut_is_found_and_motion_is_not() -> None:
    shots = [render_video(3, video, num_frames=12, size=48).frames for video in (0, 1, 2)]
    for first, second in ((0, 1), (1, 2), (2, 0)):
        finder = CutFinder()
        for frame in np.concatenate([shots[first], shots[second][:9]]):
            finder.add(frame)
        assert finder.cuts() == [12]
    # A still that begins to move is no cut.
    assert find_cuts([0.0, 0.0, 0.3, 0.0, 0.3, 0.0]) == []
    assert find_cuts([0.0, 0.5, 0.0, 0.5, 0.0, 0.5]) == []
    assert find_cuts([]) == []


def test_files_and_folders_are_read_backward_a_few_frames_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_av()
    import av

    monkeypatch.setattr("tcore.data.video.STRETCH", 7 * 3 * 64 * 64)  # 7 frames
    monkeypatch.setattr("tcore.data.video.LEAD", 2)
    frames = (
        np.random.default_rng(0).integers(0, 255, (40, 8, 8, 3)).astype(np.uint8).repeat(8, 1).repeat(8, 2)
    )
    path = tmp_path / "gop.mp4"
    with av.open(str(path), "w") as container:  # frames that refer to others, also across key frames
        options = {"g": "12", "bf": "3", "x264-params": "open-gop=1"}
        stream = container.add_stream("libx264", rate=10, options=options)
        stream.height, stream.width, stream.pix_fmt = 64, 64, "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    video = FileVideo(path)
    forward = list(video)
    assert (video.reach(33), video.reach(50)) == (33, 40)
    assert [frame.tobytes() for frame in video.backward(33)] == [frame.tobytes() for frame in forward[32::-1]]
    assert len(video._stretch(21, 28)) == 7
    with monkeypatch.context() as patch:
        patch.setattr(FileVideo, "__iter__", lambda video: iter(()))  # it does not count from the start
        assert len(list(video.backward(40))) == 40
    video._stamps[5] = None  # but where time stamps do not help
    assert [frame.tobytes() for frame in video.backward(9)] == [frame.tobytes() for frame in forward[8::-1]]
    folder = open_video(write_folder(tmp_path / "folder", frames[:5]))
    assert folder.reach(9) == 5
    np.testing.assert_array_equal(np.stack(list(folder.backward(4))), frames[3::-1])
