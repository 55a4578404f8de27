"""Clips of the page: rendered samples, and uploaded files that only PyAV opens."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from tcore.data.images import Frame
from tcore.data.rendered import JOINT_NAMES, render_video
from tcore.data.video import FileVideo
from tcore.errors import InputError
from tcore.evaluation.masks import Ids
from tcore.evaluation.run_clip import same_size
from tcore.text import format_size

LONG_SIDE = 640  # of the frames that are shown and labeled
SAMPLE_FRAMES, SAMPLE_SIZE, SAMPLE_RATE = 30, 256, Fraction(10)
MAX_PIXELS = 36_000_000  # of one frame; a file may claim any size
FORMATS = "mp4, mov, mkv, webm, avi, gif, ogg, flv, wmv or ts"
# First bytes of a container; a dot stands for any byte.
SIGNATURES = {
    rb"....(ftyp|moov|mdat|wide|free|skip)": "mov",
    rb"\x1aE\xdf\xa3": "matroska",
    rb"GIF8": "gif",
    rb"OggS": "ogg",
    rb"FLV\x01": "flv",
    rb"0&\xb2u": "asf",
    rb"RIFF....AVI ": "avi",
    rb"\x47.{187}\x47": "mpegts",
}


class Sample(NamedTuple):
    """A rendered video that training never saw."""

    name: str
    description: str
    seed: int
    video: int


SAMPLES: dict[str, Sample] = {
    "walker": Sample("Walker", "a figure and three objects that turn and grow", 7, 11),
    "crossing": Sample("Crossing paths", "objects that hide the figure for a while", 7, 8),
    "light": Sample("Changing light", "light and colors drift, the camera moves", 7, 6),
}


class Truth(NamedTuple):
    """What is known of the first frame of a rendered video: object ids, and x and y of the visible joints."""

    ids: Ids
    points: dict[str, tuple[float, float]]


@dataclass(frozen=True)
class Clip:
    """Frames on disk at the size of the page, and where they come from."""

    name: str
    frames: UInt8[np.ndarray, "time height width 3"]
    rate: Fraction
    original: tuple[int, int]
    """Height and width before the frames were shrunk."""
    remarks: tuple[str, ...] = ()
    truth: Truth | None = None

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        return self.frames.shape[1], self.frames.shape[2]


def render_sample(folder: Path, key: str, max_frames: int) -> Clip:
    """Render a sample of at most `max_frames` frames."""
    if key not in SAMPLES:
        raise InputError(f"no sample {key!r}: there are {', '.join(SAMPLES)}.")
    sample, count = SAMPLES[key], min(SAMPLE_FRAMES, max_frames)
    video = render_video(sample.seed, sample.video, split="heldout", num_frames=count, size=SAMPLE_SIZE)
    joints = zip(JOINT_NAMES, video.joints[0].tolist(), strict=True)
    truth = Truth(video.objects[0], {name: (x, y) for name, (x, y, visible) in joints if visible > 0})
    frames = _store(video.frames, folder)
    return Clip(sample.name, frames, SAMPLE_RATE, (SAMPLE_SIZE, SAMPLE_SIZE), truth=truth)


def read_upload(folder: Path, path: Path, max_frames: int) -> Clip:
    """The first frames of an uploaded video, with the long side at most 640."""
    try:
        video = FileVideo(path, container_of(path))
        if not 0 < video.size[0] * video.size[1] <= MAX_PIXELS:
            size = format_size(*video.size)
            raise InputError(f"the frames of this video are {size}: too large for this page.")
        decoded = iter(video)
        first = next(decoded)
        frames = _store(map(shrink, chain([first], islice(decoded, max_frames - 1))), folder)
        more = next(decoded, None) is not None
    except InputError as error:
        # A visitor knows the chosen file, not its name on this machine.
        said = str(error).replace(f"video {path}", "this file").replace(str(path), "this file")
        raise InputError(said) from None
    remarks = []
    if more:
        of = f" of {video.count}" if video.count else ""
        remarks.append(f"Only the first {max_frames} frames{of} are used.")
    elif video.problem:
        remarks.append(video.problem.replace(f"video {path}", "This file"))
    original, shown = (first.shape[0], first.shape[1]), (frames.shape[1], frames.shape[2])
    if shown != original:
        remarks.append(f"Frames of {format_size(*original)} are shown and labeled at {format_size(*shown)}.")
    return Clip("Your video", frames, video.rate, original, tuple(remarks))


def container_of(path: Path) -> str:
    """The container by its first bytes; playlists, which name other files, are none of these."""
    with path.open("rb") as file:
        head = file.read(200)
    for signature, name in SIGNATURES.items():
        if re.match(signature, head, re.DOTALL):
            return name
    raise InputError(f"this file is not a video that can be read here: give {FORMATS}.")


def shrink(frame: Frame) -> UInt8[np.ndarray, "rows columns 3"]:
    """A frame with the long side at most 640."""
    height, width = frame.shape[:2]
    scale = LONG_SIDE / max(height, width)
    if scale >= 1:
        return frame
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    return np.asarray(Image.fromarray(frame).resize(size, Image.Resampling.BOX))


def _store(frames: Iterable[Frame], folder: Path) -> UInt8[np.ndarray, "time height width 3"]:
    """Frames in a file of the folder, mapped into memory."""
    path, shape, count = folder / "frames.raw", (0, 0, 0), 0
    with path.open("wb") as file:
        for count, frame in enumerate(same_size(frames), start=1):  # noqa: B007
            shape = frame.shape
            file.write(frame.tobytes())
    return np.memmap(path, dtype=np.uint8, mode="r", shape=(count, *shape))
