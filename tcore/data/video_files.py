"""Video files as they are: what a file holds, whether it can be decoded, its frames at a lower rate."""

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from tcore.data.decode import import_av, open_container, upright
from tcore.data.images import Frame
from tcore.data.look import THUMB, shrink
from tcore.data.stores import VIDEO_SUFFIXES, FrameStore, natural
from tcore.errors import InputError

LAST_PART = 0.9  # of the length: where the last frame has to lie, at least
SLACK = 1.0  # seconds that the stated length may be wrong by


@dataclass(frozen=True)
class Probe:
    """What a video file says of itself, and what is wrong with it."""

    name: str
    problem: str = ""
    codec: str = ""
    size: tuple[int, int] = (0, 0)
    fps: float = 0.0
    seconds: float = 0.0
    portrait: UInt8[np.ndarray, "3 8 8"] | None = None
    changes: tuple[float, ...] = ()
    """Change from the first to the middle and to the last part, in gray levels of 255."""


def list_videos(root: Path) -> list[str]:
    """Video files under a folder, by their paths in it."""
    found = []
    for folder, below, files in os.walk(root, followlinks=True):
        below[:] = [name for name in below if not name.startswith(".")]
        for name in files:
            if Path(name).suffix.lower() in VIDEO_SUFFIXES and not name.startswith("."):
                found.append(os.path.relpath(Path(folder) / name, root))
    return sorted(found, key=natural)


def probe(root: Path, name: str, full: bool) -> Probe:
    """Open a file and decode its first, middle and last part, or all of it."""
    av, path = import_av("checking video files"), root / name
    if path.stat().st_size == 0:
        return Probe(name, "empty (0 bytes): get it again")
    try:
        with open_video(path) as (container, stream):
            return _probe_stream(name, container, stream, full)
    except InputError as error:
        return Probe(name, str(error))
    except (av.FFmpegError, OSError, ValueError, OverflowError) as error:
        return Probe(name, f"cannot be decoded ({getattr(error, 'strerror', None) or error}): get it again")


def _probe_stream(name: str, container: Any, stream: Any, full: bool) -> Probe:
    seconds = length_of(container, stream)
    rate = float(stream.average_rate or stream.guessed_rate or 0)
    middle, end = seconds / 2, math.inf
    # Each part by the time it starts at and the times of the frames to keep; the last one has no end.
    parts = [(0.0, [0.0]), (middle, [middle]), (seconds - 0.5, [end])]
    thumbs, last = [], 0.0
    for start, times in [(0.0, [0.0, middle, end])] if full else parts:
        frame = None
        for frame in decode_from(container, stream, start):
            last = max(last, float(frame.time or 0))
            if last >= times[0]:
                thumbs.append(_thumb(frame))
                times.pop(0)
            if not times:
                break
        if frame is not None and times:
            thumbs.append(_thumb(frame))
    if not thumbs:
        return Probe(name, "no frame can be decoded: get it again")
    three = [thumbs[i] for i in (0, len(thumbs) // 2, -1)]
    cut_off = seconds and last < LAST_PART * seconds - SLACK
    return Probe(
        name,
        f"cut off: the last frame is at {last:.1f} s of {seconds:.1f} s; get it again" if cut_off else "",
        stream.codec_context.codec.canonical_name,
        (stream.codec_context.height, stream.codec_context.width),
        rate,
        seconds or last,
        np.stack([shrink(thumb) for thumb in three]),
        tuple(float(np.abs(three[0].astype(np.int16) - other).mean()) for other in three[1:]),
    )


def _thumb(frame: Any) -> UInt8[np.ndarray, "32 32"]:
    small: UInt8[np.ndarray, "32 32"] = frame.reformat(THUMB, THUMB, "gray").to_ndarray()
    return small


def length_of(container: Any, stream: Any) -> float:
    """Length in seconds as the file states it; 0 where it does not."""
    if stream.duration:
        return float(stream.duration * stream.time_base)
    return container.duration / 1e6 if container.duration else 0.0


def decode_from(container: Any, stream: Any, seconds: float) -> Iterator[Any]:
    """Frames from a time on; the first one may be some before it, where the last key frame is."""
    if seconds > 0:
        start = stream.start_time or 0
        container.seek(start + int(seconds / stream.time_base), stream=stream)
    yield from container.decode(stream)


@contextmanager
def open_video(path: Path) -> Iterator[tuple[Any, Any]]:
    """A container and its main video stream."""
    av = import_av("checking video files")
    try:
        container = open_container(path)
    except (av.FFmpegError, OSError) as error:
        reason = error.strerror or str(error)
        raise InputError(f"cannot be opened ({reason}): no video, or cut off; get it again") from error
    with container:
        stream = container.streams.best("video")
        if stream is None or stream.codec_context is None:
            raise InputError("holds no video that can be decoded: remove it")
        yield container, stream


class VideoFiles(FrameStore):
    """Video files read at a lower rate, as they would be after `tcore prepare`; slow, for looking only."""

    def __init__(self, root: Path, probes: Sequence[Probe], fps: float) -> None:
        self.root, self.fps = root, fps
        self.names = [probe.name for probe in probes]
        self.lengths = np.array([max(1, int(probe.seconds * fps)) for probe in probes], dtype=np.int64)

    def read(self, video: int, frames: Sequence[int]) -> list[Frame]:
        """Decode frames one after another, each from the key frame before it."""
        path, found = self.root / self.names[video], []
        with open_video(path) as (container, stream):
            for index in frames:
                wanted, frame = index / float(self.fps or 1), None
                for frame in decode_from(container, stream, wanted):
                    if float(frame.time or 0) >= wanted:
                        break
                if frame is None:
                    raise InputError(f"cannot read frame {index} of {path}: cut off; get it again.")
                found.append(upright(frame.to_ndarray(format="rgb24"), frame.rotation))
        return found
