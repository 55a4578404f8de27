"""Video files through PyAV: frames one at a time or at a rate, and an mp4 written."""

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from tcore.data.images import LARGEST, Frame, ahead, read_image, shrink_size
from tcore.data.stores import list_images
from tcore.errors import InputError, import_package, reason
from tcore.files import atomic, open_regular
from tcore.text import format_size

DEFAULT_RATE = Fraction(24)  # frames per second where a video does not state a sensible rate
MAX_PAUSE_S = 60  # a longer pause between two frames is an error in the time stamps, not a still picture
H264 = ("libx264", "libopenh264")
LAST_PART = 0.9  # the last frame lies at least this far into a file of the stated length ...
SLACK_S = 1.0  # ... which may itself be wrong by this much
STRETCH = 128 << 20  # bytes of decoded frames that are held to read a file backward
LEAD = 16  # frames: the first ones after a key frame may refer to frames before it
NO_FRAME = "not a video, damaged, or cut off before its first frame"


class UnreadableError(InputError):
    """A video that cannot be used; `reason` says why, without the name of the file."""

    def __init__(self, path: Path | str, reason: str) -> None:
        super().__init__(f"cannot read video {path}: {reason}.")
        self.reason = reason


# Reading


@contextmanager
def open_stream(path: Path, container_format: str | None = None) -> Iterator[tuple[Any, Any]]:
    """The container and the main video stream of a file; `container_format` is the only one tried.

    Whatever is wrong with the file, here or inside the block, becomes an UnreadableError.
    """
    av = import_package("av", f"video file {path}")
    try:
        with open_regular(path) as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise UnreadableError(path, "the file is empty")
        # An absolute path is no address of FFmpeg's, and a list of other files must not lead to the network.
        # Frames may be larger than the header says: the decoder refuses them before it takes the memory.
        options = {"max_pixels": str(LARGEST), "protocol_whitelist": "file"}
        name = os.fspath(path.absolute())
        # Strange characters in the metadata do not matter; from version 19 on PyAV ignores them by itself.
        before = {} if int(av.__version__.partition(".")[0]) >= 19 else {"metadata_errors": "ignore"}
        with av.open(name, format=container_format, options=options, **before) as container:
            stream = container.streams.best("video")
            if stream is None or stream.disposition & av.stream.Disposition.attached_pic:  # a cover picture
                raise UnreadableError(path, "no video stream in the file (audio only?)")
            if stream.codec_context is None:
                raise UnreadableError(path, "no decoder for this kind of video")
            stream.codec_context.options = {"max_pixels": str(LARGEST)}
            yield container, stream
    except UnreadableError:
        raise
    except _faults() as error:
        raise UnreadableError(path, _reason(error)) from error


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

    def reach(self, stop: int) -> int:
        """How many of the first `stop` frames there are; they can be read backward then."""
        raise NotImplementedError

    def backward(self, stop: int) -> Iterator[Frame]:
        """The frames stop - 1, stop - 2, ..., 0; a few are in memory at a time."""
        raise NotImplementedError

    def around(self, index: int) -> tuple[Frame | None, list[Frame]]:
        """A frame, None after the last one; and those right before and after it that there are."""
        frames = islice(iter(self), max(0, index - 1), index + 2)
        nearby = list(islice(frames, min(1, index)))
        frame = next(frames, None)
        with suppress(InputError):  # what comes after may not be readable, and is not needed
            nearby += frames
        return frame, [] if frame is None else [near for near in nearby if near.shape == frame.shape]

    def number(self, index: int) -> int:
        """The number of a frame in its file or folder."""
        return index

    def file_name(self, number: int) -> str:
        """The image file of a frame, by its number, or what it is called once frames are written to files."""
        return f"{number:05d}.png"


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
        return ahead(read_image, self.files)

    def reach(self, stop: int) -> int:
        """How many of the first `stop` frames there are."""
        return min(stop, len(self.files))

    def backward(self, stop: int) -> Iterator[Frame]:
        """The frames stop - 1, stop - 2, ..., 0."""
        return ahead(read_image, reversed(self.files[:stop]))

    def file_name(self, number: int) -> str:
        """The name of the image file."""
        return self.files[number].name


class FileVideo(Video):
    """A video file, its frames turned upright as its metadata say."""

    size: tuple[int, int]
    """Height and width as stored, before frames are turned."""

    def __init__(self, path: Path, container_format: str | None = None) -> None:
        self.path, self.stems, self._format = path, {}, container_format
        with open_stream(path, container_format) as (container, stream):
            self.rate = _stated_rate(stream).limit_denominator(65535)
            self.count = stream.frames or None
            self.size = (stream.height, stream.width)
            duration = container.duration
        # Some containers state how long they last, but not how many frames they hold.
        self._about = None if duration is None else math.floor(self.rate * Fraction(duration, 10**6))

    def __iter__(self) -> Iterator[Frame]:
        self.problem, damaged = "", False
        with open_stream(self.path, self._format) as (container, stream):
            frames = Decoding(container, stream)
            size = None
            for frame in frames:
                damaged |= frame.is_corrupt
                size = size or (frame.height, frame.width)
                if (frame.height, frame.width) != size:
                    now, first = format_size(frame.height, frame.width), format_size(*size)
                    raise UnreadableError(self.path, f"frame {frames.count - 1} is {now}, the first {first}")
                yield upright(frame.to_ndarray(format="rgb24"), frame.rotation)
        count, exact, about = frames.count, self.count, self._about or 0
        if count == 0:
            raise InputError(f"no frame of {self.path} could be decoded: the file is empty or cut off.")
        short = count < LAST_PART * about - 1 if exact is None else count < exact
        if frames.problem or damaged or short:
            of = f" of about {about}" if exact is None and about else f" of {exact}" if exact else ""
            self.problem = f"video {self.path} is cut off or damaged: {count}{of} frames could be decoded."

    def reach(self, stop: int) -> int:
        """How many of the first `stop` frames can be decoded; their time stamps are noted."""
        with open_stream(self.path, self._format) as (container, stream):
            self._stamps = [frame.pts for frame in islice(Decoding(container, stream), stop)]
        return len(self._stamps)

    def backward(self, stop: int) -> Iterator[Frame]:
        """The frames stop - 1, stop - 2, ..., 0, after `reach`: decoded in stretches, the last one first."""
        length = max(1, STRETCH // (3 * self.size[0] * self.size[1]))
        for start in range((stop - 1) // length * length, -1, -length):
            held = self._stretch(start, min(stop, start + length))
            while held:
                yield held.pop()

    def _stretch(self, start: int, stop: int) -> list[Frame]:
        """Some frames: decoded from a key frame before them, if time stamps lead there, or from the start."""
        wanted = self._stamps[start:stop]
        if None not in self._stamps and sorted(set(self._stamps)) == self._stamps:
            with suppress(UnreadableError), open_stream(self.path, self._format) as (container, stream):
                container.seek(self._stamps[max(0, start - LEAD)], stream=stream)
                decoded = (frame for frame in Decoding(container, stream) if (frame.pts or 0) >= wanted[0])
                found = list(islice(decoded, len(wanted)))
                if [frame.pts for frame in found] == wanted and not any(frame.is_corrupt for frame in found):
                    return [upright(frame.to_ndarray(format="rgb24"), frame.rotation) for frame in found]
        return list(islice(self, start, stop))


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
        # One for all frames: setting it up takes longer than using it.
        self._reformatter = import_package("av", f"video file {path}").video.reformatter.VideoReformatter()
        self._size: tuple[int, int] | None = None

    def __iter__(self) -> Iterator[tuple[Frame, int]]:
        with open_stream(self.path) as (container, stream):
            stream.codec_context.thread_count = 1  # processes share the cores between them
            clock, frames = _Clock(stream), Decoding(container, stream)
            # Frame k is the last one whose time is not after k / fps; in fractions, so that none is missed.
            self.damage = ""
            rate, due, before, damage = clock.unit * self.fps, 0, None, ""
            for frame in frames:
                if frame.is_corrupt and frames.count > 1:
                    damage = "damaged data"
                    break
                now = math.ceil(clock.advance(frame) * rate)
                if before is not None and now > due:
                    yield self._convert(before), now - due
                    due = now
                before = frame
            damage = damage or frames.problem
            if before is None:
                raise UnreadableError(self.path, f"no frame could be decoded: {damage or 'there is none'}")
            now = max(math.ceil(clock.end() * rate), 1)
            if now > due:
                yield self._convert(before), now - due
            found = float(clock.end() * clock.unit)
            stated = float(container.duration / 10**6) if container.duration else 0.0
            few = stream.frames and frames.count < LAST_PART * stream.frames - 1
            if damage or (few and found < LAST_PART * stated - SLACK_S):
                what = "damaged" if damage else "cut off"
                self.damage = f"{what} after {found:.1f} s" + (f" of {stated:.1f} s" if stated else "")

    def _convert(self, frame: Any) -> Frame:
        """Upright pixels, all frames of one size; a short side above `short_side` shrinks."""
        if self._size is None:
            self._size = shrink_size(frame.height, frame.width, self.short_side)
        # Means over areas: as free of aliasing as bicubic when shrinking, in half the time.
        small = self._reformatter.reformat(frame, *self._size, "rgb24", interpolation="AREA").to_ndarray()
        return upright(small, frame.rotation) if frame.rotation else small


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


def _stated_rate(stream: Any) -> Fraction:
    """Frames per second as a stream states it, if that is sensible."""
    rate = stream.average_rate or stream.guessed_rate or DEFAULT_RATE
    return Fraction(rate) if 0 < rate <= 1000 else DEFAULT_RATE


def _faults() -> tuple[type[Exception], ...]:
    """What a bad file may raise; anything else is a bug of the program."""
    av = import_package("av", "a video file")
    usual = (OSError, ValueError, EOFError, LookupError, MemoryError, ArithmeticError, RuntimeError)
    return (av.FFmpegError, *usual)


def _reason(error: Exception) -> str:
    """An error of FFmpeg in words that a person understands."""
    av = import_package("av", "a video file")
    if isinstance(error, av.InvalidDataError):
        return NO_FRAME
    if isinstance(error, av.DecoderNotFoundError):
        return "no decoder for this kind of video"
    if isinstance(error, MemoryError):
        return "not enough memory to decode it"
    return reason(error)


# Writing


def h264_encoder() -> str | None:
    """The name of an H.264 encoder, where there is one."""
    with suppress(InputError):
        return next((name for name in H264 if name in import_package("av", "H.264").codecs_available), None)
    return None


@contextmanager
def video_writer(path: Path, rate: Fraction, size: tuple[int, int]) -> Iterator[Callable[[Frame], None]]:
    """An H.264 mp4 that grows frame by frame and appears when it is complete.

    An odd side gets one more line, a copy of the last: the format needs even ones.
    """
    av = import_package("av", f"video file {path}")
    height, width = size
    pad = ((0, height % 2), (0, width % 2), (0, 0))
    try:
        with (
            atomic(path) as temporary,
            av.open(os.fspath(temporary), "w", format="mp4", options={"movflags": "faststart"}) as container,
        ):
            # A short look-ahead keeps few frames in memory. x264's macroblock tree reads memory that nobody
            # wrote: with it, equal frames give other bytes each time.
            options = {"preset": "veryfast", "mbtree": "0"}
            stream = container.add_stream(h264_encoder(), rate=rate, options=options)
            stream.width, stream.height, stream.pix_fmt = width + width % 2, height + height % 2, "yuv420p"

            def write(frame: Frame) -> None:
                picture = av.VideoFrame.from_ndarray(np.pad(frame, pad, mode="edge"), format="rgb24")
                container.mux(stream.encode(picture))

            yield write
            container.mux(stream.encode())
    except (av.FFmpegError, OSError) as error:
        raise InputError(f"cannot write {path}: {reason(error)}.") from error
