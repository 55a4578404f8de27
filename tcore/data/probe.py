"""Video files as `tcore check` looks at them: what each states, what is wrong with it, some of its frames."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from tcore.data.images import Frame
from tcore.data.stores import FolderStore
from tcore.data.video import LAST_PART, NO_FRAME, SLACK_S, UnreadableError, open_stream, upright


@dataclass(frozen=True)
class Probe:
    """What a video file states about itself, what is wrong with it, and three frames of it."""

    name: str
    problem: str = ""
    codec: str = ""
    size: tuple[int, int] = (0, 0)
    fps: float = 0.0
    seconds: float = 0.0
    thumbs: Sequence[UInt8[np.ndarray, "32 32"]] = ()
    """First, middle and last frame, gray and small."""


def probe(root: Path, name: str, full: bool) -> Probe:
    """Open a file and decode its first, middle and last part; with `full`, all of it before that."""
    begun = False
    try:
        if full:
            with open_stream(root / name) as (container, stream):
                for _ in container.decode(stream):
                    begun = True
        with open_stream(root / name) as (container, stream):
            seconds = float(container.duration or 0) / 1e6
            if stream.duration:
                seconds = float(stream.duration * stream.time_base)
            # The last frame is the one that no other follows.
            parts = ((0.0, 0.0), (seconds / 2, seconds / 2), (seconds - 0.5, math.inf))
            frames = []
            for start, time in parts:
                frame = _frame_at(container, stream, start, time)
                if frame is not None:
                    begun = True
                    frames.append(frame)
            if not frames:
                raise UnreadableError(name, "no frame can be decoded")
            last, problem = max(float(frame.time or 0) for frame in frames), ""
            if seconds and last < LAST_PART * seconds - SLACK_S:
                problem = f"cut off: the last frame is at {last:.1f} s of {seconds:.1f} s; download it again"
            return Probe(
                name,
                problem,
                stream.codec_context.codec.canonical_name,
                (stream.codec_context.height, stream.codec_context.width),
                float(stream.average_rate or stream.guessed_rate or 0),
                seconds or last,
                [frame.reformat(32, 32, "gray").to_ndarray() for frame in frames],
            )
    except UnreadableError as error:
        why = (
            "damaged or cut off after its first frame" if begun and error.reason == NO_FRAME else error.reason
        )
        return Probe(name, f"cannot be read ({why}): download it again")


def _frame_at(container: Any, stream: Any, start: float, time: float) -> Any:
    """The first frame at or after a time, or else the last one, from the key frame at `start` on."""
    if start > 0:
        container.seek((stream.start_time or 0) + int(start / stream.time_base), stream=stream)
    frame = None
    for frame in container.decode(stream):
        if float(frame.time or 0) >= time:
            break
    return frame


class VideoFiles(FolderStore):
    """Video files read at a lower rate, as `tcore prepare` would store them; slow, for `tcore check`."""

    def __init__(self, root: Path, probes: Sequence[Probe], fps: float) -> None:
        self.root, self.fps = root, fps
        self.names = [probe.name for probe in probes]
        self.lengths = np.array([max(1, int(probe.seconds * fps)) for probe in probes], dtype=np.int64)

    def path(self, video: int, frame: int) -> Path:
        """The file of a video."""
        return self.root / self.names[video]

    def read(self, video: int, frames: Sequence[int]) -> list[Frame]:
        """Decode frames one after another, each from the key frame before it."""
        path, found = self.path(video, 0), []
        with open_stream(path) as (container, stream):
            for index in frames:
                time = index / float(self.fps or 1)
                frame = _frame_at(container, stream, time, time)
                if frame is None:
                    raise UnreadableError(path, f"it is cut off before frame {index}")
                found.append(upright(frame.to_ndarray(format="rgb24"), frame.rotation))
        return found
