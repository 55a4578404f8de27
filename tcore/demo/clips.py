"""Clips of the page: a real and some rendered samples, and uploaded files that only PyAV opens."""

import io
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from tcore.data.images import Frame
from tcore.data.rendered import JOINT_NAMES, render_video
from tcore.data.video import FileVideo
from tcore.errors import InputError
from tcore.evaluation.masks import Ids
from tcore.evaluation.resize import Size
from tcore.evaluation.run_clip import same_size
from tcore.text import format_size
from tcore.video.detail import SHORT_SIDE

Claim = Callable[[Size], None]
"""Called with the size of a frame before it is written; raises where there is no room for more."""
LONG_SIDE = 1280  # of frames that are shown and labeled: no panorama may take all memory
SAMPLE_SEED, SAMPLE_FRAMES, SAMPLE_SIZE, SAMPLE_RATE = 7, 30, 256, Fraction(10)
MAX_PIXELS = 36_000_000  # of one frame; a file may claim any size
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
    """A video that training never saw: a file of the package, or a rendered one."""

    name: str
    description: str
    video: int | str


SAMPLES: dict[str, Sample] = {
    "dog": Sample("Dog", "a real video: a dog that leaps for a ball", "dog.mp4"),
    "walker": Sample("Walker", "a figure and three objects that turn and grow", 11),
    "crossing": Sample("Crossing paths", "objects that hide the figure for a while", 8),
    "light": Sample("Changing light", "light and colors drift, the camera moves", 6),
}


@dataclass(frozen=True)
class Clip:
    """Frames on disk at the size of the page, and where they come from."""

    name: str
    folder: Path
    count: int
    size: Size
    original: Size
    """The size before the frames were shrunk."""
    rate: Fraction = SAMPLE_RATE
    remarks: tuple[str, ...] = ()
    truth: tuple[Ids, dict[str, tuple[float, float]]] | None = None
    """Of the first frame of a sample: object ids, and x and y of the visible joints."""

    def file_name(self, index: int) -> str:
        """What a frame is called in downloads."""
        return f"{index:05d}.png"

    def frame(self, index: int) -> Frame:
        """One frame."""
        return np.load(self.folder / f"frame-{index}.npy")


def save_array(path: Path, values: np.ndarray) -> None:
    """Write an array to a file of its own; a full disk is the system's error, which np.save would hide."""
    content = io.BytesIO()
    np.save(content, values)
    path.write_bytes(content.getbuffer())


def open_sample(key: str, max_frames: int, folder: Path, claim: Claim) -> Clip:
    """Read or render a sample of at most `max_frames` frames."""
    if key not in SAMPLES:
        raise InputError(f"no sample {key!r}: there are {', '.join(SAMPLES)}.")
    sample, count = SAMPLES[key], min(SAMPLE_FRAMES, max_frames)
    if isinstance(sample.video, str):
        file = FileVideo(Path(__file__).with_name(sample.video))
        return Clip(sample.name, folder, *_store(islice(file, max_frames), folder, claim), file.rate)
    video = render_video(SAMPLE_SEED, sample.video, split="heldout", num_frames=count, size=SAMPLE_SIZE)
    joints = zip(JOINT_NAMES, video.joints[0].tolist(), strict=True)
    visible = {name: (x, y) for name, (x, y, seen) in joints if seen > 0}
    return Clip(sample.name, folder, *_store(video.frames, folder, claim), truth=(video.objects[0], visible))


def read_upload(path: Path, max_frames: int, folder: Path, claim: Claim) -> Clip:
    """The first frames of an uploaded video, at the size at which `tcore propagate` works."""
    try:
        video = FileVideo(path, container_of(path))
        if not 0 < video.size[0] * video.size[1] <= MAX_PIXELS:
            raise InputError(f"frames of {format_size(*video.size)} are too large for this page.")
        frames = iter(video)
        stored = _store(islice(frames, max_frames), folder, claim)
        more = next(frames, None) is not None
    except InputError as error:
        # A visitor knows the chosen file, not its name on this machine.
        said = str(error).replace(f"video {path}", "this file").replace(str(path), "this file")
        raise InputError(said) from None
    remarks = [video.problem.replace(f"video {path}", "This file")] if video.problem else []
    if more:
        of = f" of {video.count}" if video.count else ""
        remarks.append(f"Only the first {max_frames} frames{of} are used.")
    _, size, original = stored
    if size != original:
        alike = ", as by tcore propagate" if min(size) == SHORT_SIDE else ""
        remarks.append(
            f"Frames of {format_size(*original)} are shown and labeled at {format_size(*size)}{alike}; "
            "downloads have the size of the video."
        )
    return Clip("Your video", folder, *stored, video.rate, tuple(remarks))


def container_of(path: Path) -> str:
    """The container by its first bytes; playlists, which name other files, are none of these."""
    with path.open("rb") as file:
        head = file.read(200)
    for signature, name in SIGNATURES.items():
        if re.match(signature, head, re.DOTALL):
            return name
    raise InputError("this file is not a video: give mp4, mov, mkv, webm, avi, gif, ogg, flv, wmv or ts.")


def _store(frames: Iterable[Frame], folder: Path, claim: Claim) -> tuple[int, Size, Size]:
    """Shrink frames to a short side of 480 and save them: their number, size and original size."""
    count, size, original = 0, (0, 0), (0, 0)
    for index, frame in enumerate(same_size(frames)):
        count, original = index + 1, (frame.shape[0], frame.shape[1])
        scale = min(1.0, SHORT_SIDE / min(original), LONG_SIDE / max(original))
        size = (max(1, round(original[0] * scale)), max(1, round(original[1] * scale)))
        if size != original:
            frame = np.asarray(Image.fromarray(frame).resize(size[::-1], Image.Resampling.BOX))
        claim(size)
        save_array(folder / f"frame-{index}.npy", frame)
    return count, size, original
