"""Video files through PyAV: frames one at a time or at a rate, what a file holds, and an mp4 written."""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from tcore.data.images import Frame, read_image
from tcore.data.stores import FrameStore, list_images
from tcore.errors import InputError
from tcore.files import atomic

DEFAULT_RATE = Fraction(24)  # frames per second where a video does not state a sensible rate
MAX_PAUSE_S = 60  # a longer pause between two frames is an error in the time stamps, not a still picture
H264 = ("libx264", "libopenh264")
LAST_PART = 0.9  # the last frame lies at least this far into a file of the stated length ...
SLACK_S = 1.0  # ... which may itself be wrong by this much


class UnreadableError(Exception):
    """A video that cannot be used; the text is the reason alone, without the name of the file."""


def import_av(what: str) -> Any:
    """PyAV, or an error that says how to install it."""
    try:
        import av
    except ImportError as error:
        raise InputError(
            f"{what} needs PyAV, which cannot be imported ({error}): pip install av, "
            "or give a folder of images."
        ) from error
    return av


# Reading


@contextmanager
def open_stream(path: Path, container_format: str | None = None) -> Iterator[tuple[Any, Any]]:
    """The container and the main video stream of a file; `container_format` is the only one tried.

    Whatever is wrong with the file, here or inside the block, becomes an UnreadableError.
    """
    av = import_av(f"video file {path}")
    try:
        if path.stat().st_size == 0:
            raise UnreadableError("the file is empty")
        # Strange characters in the metadata do not matter.
        with av.open(os.fspath(path), format=container_format, metadata_errors="ignore") as container:
            stream = container.streams.best("video")
            if stream is None or stream.disposition & av.stream.Disposition.attached_pic:  # a cover picture
                raise UnreadableError("no video stream in the file (audio only?)")
            if stream.codec_context is None:
                raise UnreadableError("no decoder for this kind of video")
            yield container, stream
    except _faults() as error:
        raise UnreadableError(_reason(error)) from error


class Decoding:
    """Decoded frames in the order of time, up to the first packet that cannot be decoded.

    Bad packets before the first frame are skipped. Afterwards, `problem` says why decoding stopped early.
    """

    def __init__(self, container: Any, stream: Any) -> None:
        self._container, self._stream = container, stream
        self.count = 0
        self.problem = ""

    def __iter__(self) -> Iterator[Any]:
        packets = self._container.demux(self._stream)
        while True:
            try:
                packet = next(packets, None)
                frames = [] if packet is None else packet.decode()
                self.problem = "" if frames else self.problem
            except _faults() as error:
                self.problem = _reason(error)
                if self.count == 0:
                    continue
                packet, frames = None, []
                with suppress(*_faults()):  # frames before the damage are still in the decoder
                    frames = self._stream.codec_context.decode(None)
            for frame in frames:
                self.count += 1
                yield frame
            if packet is None:
                return


def upright(frame: Frame, degrees: int) -> UInt8[np.ndarray, "rows columns 3"]:
    """Turn a frame counterclockwise by a multiple of 90 degrees, as the file's metadata say."""
    return np.ascontiguousarray(np.rot90(frame, round(degrees / 90)))


class Video:
    """A video read while it is iterated over: one frame in memory at a time."""

    path: Path
    rate: Fraction = DEFAULT_RATE
    """Frames per second."""
    count: int | None = None
    """Number of frames, where it is known beforehand."""
    stems: dict[str, int]
    """Frame numbers by file name without suffix; empty for a video file."""
    problem: str = ""
    """Why the last iteration ended early."""

    def __iter__(self) -> Iterator[Frame]:
        raise NotImplementedError

    def name(self, index: int) -> str:
        """The name of a frame: that of its image file without the suffix, or its number."""
        return f"{index:05d}"


class FolderVideo(Video):
    """The images of a folder in natural order."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = list_images(path)
        if not self.files:
            raise InputError(f"no frames in {path}: give a folder of .jpg or .png images, or a video file.")
        self.count = len(self.files)
        self.stems = {file.stem: index for index, file in enumerate(self.files)}
        if len(self.stems) < len(self.files):
            twice = next(file for index, file in enumerate(self.files) if self.stems[file.stem] != index)
            raise InputError(
                f"folder {path} holds two images named {twice.stem}: keep masks in another folder."
            )

    def __iter__(self) -> Iterator[Frame]:
        return map(read_image, self.files)

    def name(self, index: int) -> str:
        """The name of the image file, without its suffix."""
        return self.files[index].stem


class FileVideo(Video):
    """A video file, its frames turned upright as its metadata say."""

    size: tuple[int, int]
    """Height and width as stored, before frames are turned."""

    def __init__(self, path: Path, container_format: str | None = None) -> None:
        self.path, self.stems, self._format = path, {}, container_format
        with self._open() as (container, stream):
            self.rate = _stated_rate(stream).limit_denominator(65535)
            self.count = stream.frames or None
            self.size = (stream.height, stream.width)
            duration = container.duration
        # Some containers state how long they last, but not how many frames they hold.
        self._about = None if duration is None else math.floor(self.rate * Fraction(duration, 10**6))

    def __iter__(self) -> Iterator[Frame]:
        self.problem, damaged = "", False
        with self._open() as (container, stream):
            frames = Decoding(container, stream)
            for frame in frames:
                damaged |= frame.is_corrupt
                yield upright(frame.to_ndarray(format="rgb24"), frame.rotation)
        count, exact, about = frames.count, self.count, self._about or 0
        if count == 0:
            raise InputError(f"no frame of {self.path} could be decoded: the file is empty or cut off.")
        short = count < LAST_PART * about - 1 if exact is None else count < exact
        if frames.problem or damaged or short:
            of = f" of about {about}" if exact is None and about else f" of {exact}" if exact else ""
            self.problem = f"video {self.path} is cut off or damaged: {count}{of} frames could be decoded."

    @contextmanager
    def _open(self) -> Iterator[tuple[Any, Any]]:
        try:
            with open_stream(self.path, self._format) as opened:
                yield opened
        except UnreadableError as error:
            raise InputError(f"cannot read video {self.path}: {error}.") from error


def open_video(path: Path) -> Video:
    """A video file, or a folder of images; no frame is read yet."""
    if not path.exists():
        raise InputError(f"video {path} does not exist: give a video file or a folder of images.")
    return FolderVideo(path) if path.is_dir() else FileVideo(path)


# Reading at a rate, for `tcore prepare`


class SampledVideo:
    """The frames on the screen at times 0, 1/fps, 2/fps, ... after the first one, shrunk where wanted.

    Each comes with the number of these times in a row at which it is on the screen.
    Frames are taken up to the first damage, which `damage` then describes; an UnreadableError means that
    there is no frame at all.
    """

    def __init__(self, path: Path, fps: Fraction, short_side: int | None) -> None:
        self.path, self.fps, self.short_side = path, fps, short_side
        self.damage = ""

    def __iter__(self) -> Iterator[tuple[Frame, int]]:
        with open_stream(self.path) as (container, stream):
            stream.codec_context.thread_count = 1  # processes share the cores between them
            yield from self._sample(container, stream)

    def _sample(self, container: Any, stream: Any) -> Iterator[tuple[Frame, int]]:
        clock, frames = _Clock(stream), Decoding(container, stream)
        # Frame k is the last one whose time is not after k / fps; in integers, so that none is missed.
        ticks, unit = clock.unit.numerator * self.fps.numerator, clock.unit.denominator * self.fps.denominator
        due, before, convert = 0, None, _Converter(self.short_side)
        self.damage = ""
        for frame in frames:
            if frame.is_corrupt and frames.count > 1:
                self.damage = "damaged data"
                break
            now = -(-clock.advance(frame) * ticks // unit)
            if before is not None and now > due:
                yield convert(before), now - due
                due = now
            before = frame
        self.damage = self.damage or frames.problem
        if before is None:
            raise UnreadableError(f"no frame could be decoded: {self.damage or 'there is none'}")
        now = max(-(-clock.end() * ticks // unit), 1)
        if now > due:
            yield convert(before), now - due
        self.damage = self._describe_damage(stream, container, clock, frames.count)

    def _describe_damage(self, stream: Any, container: Any, clock: "_Clock", decoded: int) -> str:
        """Where the damage lies, also where much less was decoded than the file states."""
        stated = float(container.duration / 10**6) if container.duration else 0.0
        found = float(clock.end() * clock.unit)
        few = stream.frames and decoded < LAST_PART * stream.frames - 1
        if self.damage:
            return f"damaged after {found:.1f} s" + (f" of {stated:.1f} s" if stated else "")
        if few and found < LAST_PART * stated - SLACK_S:
            return f"cut off after {found:.1f} s of {stated:.1f} s"
        return ""


class _Clock:
    """Times of frames in ticks since the first; frames without a sensible time follow one another."""

    def __init__(self, stream: Any) -> None:
        rate = _stated_rate(stream)
        self.unit = Fraction(stream.time_base) if stream.time_base else 1 / rate
        self._usual = max(1, round(1 / rate / self.unit))
        self._longest = max(self._usual, int(MAX_PAUSE_S / self.unit))
        self._now, self._length = -1, self._usual
        self._stamp: int | None = None
        self._last: dict[str, int] = {}
        self._backward = {"pts": 0, "dts": 0}

    def advance(self, frame: Any) -> int:
        """The time of the next frame."""
        stamp, step = self._read(frame), self._length
        if self._now < 0:
            step = 1
        elif stamp is not None and self._stamp is not None and 0 <= stamp - self._stamp <= self._longest:
            step = stamp - self._stamp
        self._now += step
        self._stamp = stamp
        duration = frame.duration or 0
        self._length = duration if 0 < duration <= self._longest else self._usual
        return self._now

    def _read(self, frame: Any) -> int | None:
        """The time stamp of a frame, of the kind that goes backward less often (AVI files have bad ones)."""
        stamps = {"pts": frame.pts, "dts": frame.dts}
        for kind, stamp in stamps.items():
            if stamp is not None:
                self._backward[kind] += stamp <= self._last.get(kind, stamp - 1)
                self._last[kind] = stamp
        better, other = ("pts", "dts") if self._backward["pts"] <= self._backward["dts"] else ("dts", "pts")
        return stamps[better] if stamps[better] is not None else stamps[other]

    def end(self) -> int:
        """When the last frame leaves the screen."""
        return self._now + self._length


class _Converter:
    """From decoded frames to upright pixels, all of one size; a short side above `short_side` shrinks."""

    def __init__(self, short_side: int | None) -> None:
        import_av("a video file")
        from av.video.reformatter import VideoReformatter

        # One for all frames: setting it up takes longer than using it.
        self._reformatter = VideoReformatter()
        self._short_side = short_side
        self._size: tuple[int, int] | None = None

    def __call__(self, frame: Any) -> Frame:
        if self._size is None:
            short = min(frame.width, frame.height)
            scale = min(1.0, (self._short_side or short) / short)
            self._size = max(1, round(frame.width * scale)), max(1, round(frame.height * scale))
        # Means over areas: as free of aliasing as bicubic when shrinking, in half the time.
        small = self._reformatter.reformat(frame, *self._size, "rgb24", interpolation="AREA").to_ndarray()
        return upright(small, frame.rotation) if frame.rotation else small


def _stated_rate(stream: Any) -> Fraction:
    """Frames per second as a stream states it, if that is sensible."""
    rate = stream.average_rate or stream.guessed_rate or DEFAULT_RATE
    return Fraction(rate) if 0 < rate <= 1000 else DEFAULT_RATE


def _faults() -> tuple[type[Exception], ...]:
    """What a bad file may raise; anything else is a bug of the program."""
    av = import_av("a video file")
    return (av.FFmpegError, OSError, ValueError, EOFError, MemoryError, ArithmeticError, RuntimeError)


def _reason(error: Exception) -> str:
    """An error of FFmpeg in words that a person understands."""
    av = import_av("a video file")
    if isinstance(error, av.InvalidDataError):
        return "not a video, damaged, or cut off before its first frame"
    if isinstance(error, av.DecoderNotFoundError):
        return "no decoder for this kind of video"
    if isinstance(error, MemoryError):
        return "not enough memory to decode it"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


# Looking at files, for `tcore check`


@dataclass(frozen=True)
class Probe:
    """What a video file states about itself, what is wrong with it, and three frames of it."""

    name: str
    problem: str = ""
    codec: str = ""
    size: tuple[int, int] = (0, 0)
    fps: float = 0.0
    seconds: float = 0.0
    thumbs: UInt8[np.ndarray, "3 32 32"] | None = None
    """First, middle and last frame, gray and small."""


def probe(root: Path, name: str, full: bool) -> Probe:
    """Open a file and decode its first, middle and last part, or all of it."""
    try:
        with open_stream(root / name) as (container, stream):
            return _probe_stream(name, container, stream, full)
    except UnreadableError as error:
        return Probe(name, f"cannot be read ({error}): download it again")


def _probe_stream(name: str, container: Any, stream: Any, full: bool) -> Probe:
    if stream.duration:
        seconds = float(stream.duration * stream.time_base)
    else:
        seconds = container.duration / 1e6 if container.duration else 0.0
    times = (0.0, seconds / 2, math.inf)  # the last frame is the one that no other follows
    if full:
        frames = _frames_at(container, stream, 0.0, *times)
    else:
        starts = (0.0, seconds / 2, seconds - 0.5)
        parts = zip(starts, times, strict=True)
        frames = [frame for start, time in parts for frame in _frames_at(container, stream, start, time)]
    if not frames:
        return Probe(name, "no frame can be decoded: download it again")
    last, problem = max(float(frame.time or 0) for frame in frames), ""
    if seconds and last < LAST_PART * seconds - SLACK_S:
        problem = f"cut off: the last frame is at {last:.1f} s of {seconds:.1f} s; download it again"
    thumbs = [frames[i].reformat(32, 32, "gray").to_ndarray() for i in (0, len(frames) // 2, -1)]
    return Probe(
        name,
        problem,
        stream.codec_context.codec.canonical_name,
        (stream.codec_context.height, stream.codec_context.width),
        float(stream.average_rate or stream.guessed_rate or 0),
        seconds or last,
        np.stack(thumbs),
    )


def _frames_at(container: Any, stream: Any, start: float, *times: float) -> list[Any]:
    """The first frames at or after some times, or else the last one, from the key frame at `start` on."""
    if start > 0:
        container.seek((stream.start_time or 0) + int(start / stream.time_base), stream=stream)
    found: list[Any] = []
    frame = None
    for frame in container.decode(stream):
        if float(frame.time or 0) >= times[len(found)]:
            found.append(frame)
        if len(found) == len(times):
            return found
    return found if frame is None else [*found, frame]


class VideoFiles(FrameStore):
    """Video files read at a lower rate, as `tcore prepare` would store them; slow, for `tcore check`."""

    def __init__(self, root: Path, probes: Sequence[Probe], fps: float) -> None:
        self.root, self.fps = root, fps
        self.names = [probe.name for probe in probes]
        self.lengths = np.array([max(1, int(probe.seconds * fps)) for probe in probes], dtype=np.int64)

    def read(self, video: int, frames: Sequence[int]) -> list[Frame]:
        """Decode frames one after another, each from the key frame before it."""
        path, found = self.root / self.names[video], []
        try:
            with open_stream(path) as (container, stream):
                for index in frames:
                    time = index / float(self.fps or 1)
                    frame = next(iter(_frames_at(container, stream, time, time)), None)
                    if frame is None:
                        raise UnreadableError(f"it is cut off before frame {index}")
                    found.append(upright(frame.to_ndarray(format="rgb24"), frame.rotation))
        except UnreadableError as error:
            raise InputError(f"cannot read video {path}: {error}; download it again.") from error
        return found


# Writing


def h264_encoder() -> str | None:
    """The name of an H.264 encoder, where there is one."""
    with suppress(InputError):
        return next((name for name in H264 if name in import_av("H.264").codecs_available), None)
    return None


@contextmanager
def video_writer(path: Path, rate: Fraction, size: tuple[int, int]) -> Iterator[Callable[[Frame], None]]:
    """An H.264 mp4 that grows frame by frame and appears when it is complete.

    An odd side gets one more line, a copy of the last: the format needs even ones.
    """
    av = import_av(f"video file {path}")
    height, width = size
    pad = ((0, height % 2), (0, width % 2), (0, 0))
    try:
        with (
            atomic(path) as temporary,
            av.open(os.fspath(temporary), "w", format="mp4", options={"movflags": "faststart"}) as container,
        ):
            # A short look-ahead keeps few frames in memory.
            stream = container.add_stream(h264_encoder(), rate=rate, options={"preset": "veryfast"})
            stream.width, stream.height, stream.pix_fmt = width + width % 2, height + height % 2, "yuv420p"

            def write(frame: Frame) -> None:
                picture = av.VideoFrame.from_ndarray(np.pad(frame, pad, mode="edge"), format="rgb24")
                container.mux(stream.encode(picture))

            yield write
            container.mux(stream.encode())
    except (av.FFmpegError, OSError) as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}.") from error
