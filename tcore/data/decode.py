"""A video file as a few upright frames per second, through PyAV."""

import os
from collections.abc import Iterator
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import UInt8

from tcore.data.images import Frame
from tcore.errors import InputError

GAP_S = 60  # a longer pause between two frames is a fault of the time stamps, not a still picture
DEFAULT_RATE = Fraction(25)


class UnreadableError(Exception):
    """A video that cannot be used; the text is the reason, for a person."""


class Kept(NamedTuple):
    """A frame, and for how many of the wanted times in a row it is the one on the screen."""

    pixels: Frame
    times: int


class SampledVideo:
    """The frames on the screen at times 0, 1/fps, 2/fps, ... after the first one; smaller where wanted.

    Frames are taken up to the first damage. `damage` then says what it was; an UnreadableError means that
    there is no frame at all.
    """

    def __init__(self, path: Path, fps: Fraction, short_side: int | None) -> None:
        self.path, self.fps, self.short_side = path, fps, short_side
        self.damage = ""
        self.decoded = 0

    def __iter__(self) -> Iterator[Kept]:
        """Decode; whatever a file does ends in an UnreadableError or in a note about damage."""
        try:
            if self.path.stat().st_size == 0:
                raise UnreadableError("the file is empty")
            with open_container(self.path) as container:
                stream = _video_stream(container)
                yield from self._sample(container, stream)
        except _faults() as error:
            raise UnreadableError(_reason(error)) from error
        if self.decoded == 0:
            raise UnreadableError(f"no frame could be decoded: {self.damage or 'there is none'}")

    def _sample(self, container: Any, stream: Any) -> Iterator[Kept]:
        clock = _Clock(stream)
        # Frame k is the last one whose time is not after k / fps; integers, so that none is missed.
        ticks, unit = clock.unit.numerator * self.fps.numerator, clock.unit.denominator * self.fps.denominator
        due, before, convert = 0, None, _Converter(self.short_side)
        for frame in self._decode(container, stream):
            now = -(-clock.advance(frame) * ticks // unit)
            if before is not None and now > due:
                yield Kept(convert(before), now - due)
                due = now
            before = frame
        if before is not None:
            now = max(-(-clock.end() * ticks // unit), 1)
            if now > due:
                yield Kept(convert(before), now - due)
        self._compare(stream, container, clock)

    def _decode(self, container: Any, stream: Any) -> Iterator[Any]:
        """Frames in the order of time, up to the first damage; trouble before the first one is forgiven."""
        context, packets = stream.codec_context, container.demux(stream)
        while True:
            try:
                packet = next(packets, None)
                frames = [] if packet is None else packet.decode()
            except _faults() as error:
                self.damage = _reason(error)
                if self.decoded:
                    with suppress(*_faults()):  # what was decoded before the damage is still in the decoder
                        yield from self._count(context.decode(None))
                    return
                continue
            if packet is None:
                return
            for frame in self._count(frames):
                if frame.is_corrupt and self.decoded > 1:
                    self.damage = "damaged data"
                    return
                self.damage = ""
                yield frame

    def _count(self, frames: list[Any]) -> Iterator[Any]:
        for frame in frames:
            self.decoded += 1
            yield frame

    def _compare(self, stream: Any, container: Any, clock: "_Clock") -> None:
        """Note it where much less came out than the file promises."""
        promised = float(container.duration / 10**6) if container.duration else 0.0
        found = float(clock.end() * clock.unit)
        few = stream.frames and self.decoded < 0.9 * stream.frames - 1
        if self.damage:
            self.damage = f"damaged after {found:.1f} s" + (f" of {promised:.1f} s" if promised else "")
        elif few and found < 0.9 * promised - 1:
            self.damage = f"cut off after {found:.1f} s of {promised:.1f} s"


class _Clock:
    """Times of frames in ticks since the first one; without or against sense, one frame after another."""

    def __init__(self, stream: Any) -> None:
        rate = stream.average_rate or stream.guessed_rate or DEFAULT_RATE
        rate = Fraction(rate) if 0 < rate <= 1000 else DEFAULT_RATE
        self.unit = Fraction(stream.time_base) if stream.time_base else 1 / rate
        self._usual = max(1, round(1 / rate / self.unit))
        self._gap = max(self._usual, int(GAP_S / self.unit))
        self._now, self._length = -1, self._usual
        self._stamp: int | None = None
        self._last: dict[str, int] = {}
        self._faults = {"pts": 0, "dts": 0}

    def advance(self, frame: Any) -> int:
        """The time of the next frame."""
        stamp, step = self._read(frame), self._length
        if self._now < 0:
            step = 1
        elif stamp is not None and self._stamp is not None and 0 <= stamp - self._stamp <= self._gap:
            step = stamp - self._stamp
        self._now += step
        self._stamp = stamp
        lasts = frame.duration or 0
        self._length = lasts if 0 < lasts <= self._gap else self._usual
        return self._now

    def _read(self, frame: Any) -> int | None:
        """The time stamp of a frame, of the kind that goes backwards less often (AVI may have bad ones)."""
        stamps = {"pts": frame.pts, "dts": frame.dts}
        for kind, stamp in stamps.items():
            if stamp is not None:
                self._faults[kind] += stamp <= self._last.get(kind, stamp - 1)
                self._last[kind] = stamp
        prefer = "pts" if self._faults["pts"] <= self._faults["dts"] else "dts"
        return stamps[prefer] if stamps[prefer] is not None else stamps["dts" if prefer == "pts" else "pts"]

    def end(self) -> int:
        """When the last frame leaves the screen."""
        return self._now + self._length


def open_container(path: Path, container: str | None = None) -> Any:
    """Open a video file for reading; strange characters in its metadata do not matter.

    `container` is the FFmpeg name of the only container that is tried.
    """
    av = import_av(f"video file {path}")
    return av.open(os.fspath(path), format=container, metadata_errors="ignore")


def upright(frame: Frame, degrees: int) -> UInt8[np.ndarray, "rows columns 3"]:
    """Turn a frame counterclockwise by a multiple of 90 degrees, as a camera held upright asks for."""
    return np.ascontiguousarray(np.rot90(frame, round(degrees / 90)))


def import_av(what: str) -> Any:
    """PyAV, or an error that says how to get it."""
    try:
        import av
    except ImportError as error:
        raise InputError(
            f"{what} needs PyAV, which cannot be imported ({error}): pip install av, "
            "or give a folder of images."
        ) from error
    return av


def _video_stream(container: Any) -> Any:
    """The main video stream, decoded by one thread: processes share the cores between them."""
    stream = container.streams.best("video")
    if stream is None or _is_cover(stream):
        raise UnreadableError("no video in the file (sound only?)")
    if stream.codec_context is None:
        raise UnreadableError("no decoder for this kind of video")
    stream.codec_context.thread_count = 1
    return stream


def _is_cover(stream: Any) -> bool:
    """Whether a stream is the picture of a sound file."""
    import_av("a video file")
    from av.stream import Disposition

    return bool(stream.disposition & Disposition.attached_pic)


class _Converter:
    """From a decoded frame to upright pixels of one size, the same for all frames of a video."""

    def __init__(self, short_side: int | None) -> None:
        import_av("a video file")
        from av.video.reformatter import VideoReformatter

        # One for all frames: setting it up takes longer than using it.
        self._reformatter = VideoReformatter()
        self._short_side = short_side
        self._size: tuple[int, int] | None = None

    def __call__(self, frame: Any) -> Frame:
        self._size = self._size or self._shrink(frame.width, frame.height)
        # Means over areas: as free of aliases as bicubic when shrinking, in half the time.
        small = self._reformatter.reformat(frame, *self._size, "rgb24", interpolation="AREA").to_ndarray()
        return upright(small, frame.rotation) if frame.rotation else small

    def _shrink(self, width: int, height: int) -> tuple[int, int]:
        """Width and height to convert to; the short side shrinks, and never grows."""
        if self._short_side is None or min(width, height) <= self._short_side:
            return width, height
        scale = self._short_side / min(width, height)
        return max(1, round(width * scale)), max(1, round(height * scale))


def _faults() -> tuple[type[Exception], ...]:
    """What a bad file may raise; anything else is a fault of the program."""
    av = import_av("a video file")
    return (av.FFmpegError, OSError, ValueError, EOFError, MemoryError, ArithmeticError, RuntimeError)


def _reason(error: Exception) -> str:
    """What a person understands of an error of FFmpeg."""
    av = import_av("a video file")
    if isinstance(error, av.InvalidDataError):
        return "not a video, damaged, or cut off before its first frame"
    if isinstance(error, av.DecoderNotFoundError):
        return "no decoder for this kind of video"
    if isinstance(error, MemoryError):
        return "not enough memory to decode it"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
