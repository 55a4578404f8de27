"""Part of a video: from one frame to another, every n-th of them; and frames in memory."""

import math
import re
from collections.abc import Iterator
from fractions import Fraction
from itertools import islice
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from tcore.data.arrays import stack
from tcore.data.images import Frame
from tcore.data.video import Video, open_video
from tcore.errors import InputError

Clip = UInt8[np.ndarray, "time height width 3"]


class PartOfVideo(Video):
    """Every n-th frame of a video from one to another, both included; `stems` has the original numbers."""

    def __init__(self, whole: Video, start: int, end: int | None, every: int) -> None:
        self.whole, self.start, self.every = whole, start, every
        self.path, self.rate, self.stems = whole.path, whole.rate / every, whole.stems
        last = whole.count if end is None else end + 1 if whole.count is None else min(end + 1, whole.count)
        self._stop = None if end is None else end + 1
        self.count = None if last is None or whole.count is None else len(range(start, last, every))

    def __iter__(self) -> Iterator[Frame]:
        found = False
        for frame in islice(iter(self.whole), self.start, self._stop, self.every):
            found = True
            yield frame
        self.problem = self.whole.problem
        if not found:
            raise self._too_short()

    def reach(self, stop: int) -> int:
        """How many of the first `stop` frames there are."""
        return len(range(self.start, self.whole.reach(self.number(stop - 1) + 1), self.every))

    def backward(self, stop: int) -> Iterator[Frame]:
        """The frames stop - 1, stop - 2, ..., 0."""
        return islice(
            self.whole.backward(self.number(stop - 1) + 1), 0, (stop - 1) * self.every + 1, self.every
        )

    def around(self, index: int) -> tuple[Frame | None, list[Frame]]:
        """A frame, None after the last one; and those right before and after it in the whole video."""
        number = self.number(index)
        if self._stop is not None and number >= self._stop:
            return None, []
        frame, nearby = self.whole.around(number)
        if frame is None and index == 0:
            raise self._too_short()
        return frame, nearby

    def _too_short(self) -> InputError:
        return InputError(f"{self.path} ends before frame {self.start}, where it should start.")

    def number(self, index: int) -> int:
        """The number of a frame in the whole video."""
        return self.start + index * self.every

    def file_name(self, number: int) -> str:
        """The image file of a frame, by its number in the whole video."""
        return self.whole.file_name(number)


def open_part(
    path: Path, start: str = "0", end: str | None = None, every: int = 1, *, start_is: str = "start"
) -> Video:
    """A video file or a folder of images, or a part of it; no frame is read yet.

    `start` and `end`, which is included, are numbers of frames, or times such as 3.5s; an error calls `start`
    by the name `start_is`.
    """
    video = open_video(path)
    if (start, end, every) == ("0", None, 1):
        return video
    first = frame_at(start, video, start_is)
    last = None if end is None else frame_at(end, video, "end")
    if last is not None and last < first:
        raise InputError(f"end {end} comes before start {start}.")
    if every < 1:
        raise InputError(f"every {every}: need 1 or more.")
    return PartOfVideo(video, first, last, every)


def frame_at(place: str, video: Video, what: str) -> int:
    """The number of a frame from its text, or from a time in seconds (3.5s)."""
    match = re.fullmatch(r"(\d{1,9})|(\d{1,7}(?:\.\d{1,9})?)\s?s", place)
    if not match:
        raise InputError(
            f"{what} {place!r}: need the number of a frame, such as 120, or a time, such as 3.5s."
        )
    number = int(match[1]) if match[1] else math.floor(Fraction(match[2]) * video.rate)
    if video.count is not None and number >= video.count:
        until = f", {float(video.count / video.rate):.4g} s" if match[2] else ""
        raise InputError(f"{what} {place}: {video.path} has {video.count} frames, from 0 on{until}.")
    return number


def read_video(path: str | Path, start: int | str = 0, end: int | str | None = None, every: int = 1) -> Clip:
    """The frames of a video file or of a folder of images, in memory: time x height x width x RGB, uint8.

    `start` and `end`, which is included, are frame numbers or times such as "3.5s".
    """
    video = open_part(Path(path), str(start), None if end is None else str(end), every)
    return stack(list(video), str(path))
