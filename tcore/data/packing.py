"""One shard from its videos: the unit of work of `tcore prepare`, done by one process."""

import os
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32, UInt8
from PIL import Image

from tcore.data.images import (
    BAD_IMAGE,
    Frame,
    decode_image,
    encode_jpeg,
    image_problem,
    open_image,
    shrink_size,
)
from tcore.data.packed import PackedVideo, Shard, ShardWriter, shard_path, shard_writer
from tcore.data.rendered import render_video
from tcore.data.rendered_varied import render_varied
from tcore.data.video import SampledVideo, UnreadableError
from tcore.errors import InputError
from tcore.files import TEMPORARY, read_bytes, read_json, read_text, whole, write_json

MIN_PARTIAL = 7  # frames; the usual offsets between past, current and future need this many
STALL_S = 240  # seconds without a new frame after which a process is killed
KILLS = "reading it ended the process twice: it crashes the decoder, hangs, or needs too much memory"


@dataclass(frozen=True)
class Settings:
    """The settings that determine the pixels of a store."""

    kind: str  # videos, frames, images or rendered
    fps: float | None
    short_side: int | None
    quality: int


@dataclass(frozen=True)
class Item:
    """One future video: a video file, or the image files of a folder."""

    name: str
    path: str  # relative to the source; a folder where there are images
    images: tuple[str, ...]
    bytes: int
    changed: int = 0
    """When the file, or the folder, was last modified (st_mtime_ns)."""


@dataclass(frozen=True)
class Task:
    """A shard to be written."""

    source: Path
    store: Path
    settings: Settings
    number: int
    items: tuple[Item, ...]

    @property
    def record(self) -> Path:
        """The file that says that the shard is finished."""
        return record_path(self.store, self.number)

    @property
    def trying(self) -> Path:
        """The file that names the videos at which a process died; the last may be one that is being read."""
        return self.record.with_suffix(".trying")


@dataclass(frozen=True)
class Note:
    """A line of skipped.csv."""

    file: str
    outcome: str  # skipped or partial
    frames: int
    reason: str


Beat = Callable[[], None]  # called after every frame: a process that stops calling it hangs


def record_path(store: Path, number: int) -> Path:
    """The file that says that a shard is finished."""
    return store / "parts" / f"{number:06d}.json"


def _is_name(value: Any) -> bool:
    """Whether a value is the name of a file; half a character is none."""
    try:
        return isinstance(value, str) and bool(os.fsencode(value))
    except UnicodeEncodeError:
        return False


def _is_side(value: Any) -> bool:
    return whole(value) and 0 < value < 2**31


VIDEO = {
    "name": _is_name,
    "height": _is_side,
    "width": _is_side,
    "offsets": [whole],
    "sizes": [_is_side],
    "cuts": [lambda value: whole(value) and value < 2**31],
}
RECORD = {
    "shard": {"bytes": whole, "sha256": str, "videos": [VIDEO]},
    "notes": [{"file": _is_name, "outcome": str, "frames": whole, "reason": str}],
}


def read_record(path: Path) -> tuple[Shard, list[Note]]:
    """What the record of a finished shard says."""
    remedy = "remove it and rerun tcore prepare, which makes this shard again"
    record = read_json(path, "the record of a shard, ", RECORD, remedy)
    shard = record["shard"]
    videos = [PackedVideo(*(video[field.name] for field in fields(PackedVideo))) for video in shard["videos"]]
    if any(not len(video.offsets) == len(video.sizes) > 0 for video in videos):
        raise InputError(f"the record of a shard, {path}, is damaged: {remedy}.")
    notes = [Note(*(note[field.name] for field in fields(Note))) for note in record["notes"]]
    return Shard(shard["bytes"], shard["sha256"], videos), notes


def write_shard(task: Task, beat: Beat = lambda: None) -> Task:
    """Write a shard and its record, without the videos that killed two processes; returns the task."""
    deaths, notes = Counter[int](), list[Note]()
    with suppress(OSError, ValueError):
        deaths.update(map(int, read_text(task.trying).split()))
    remove_leftovers(task)
    task.trying.unlink(missing_ok=True)  # a pipe would be written to for ever
    task.trying.parent.mkdir(parents=True, exist_ok=True)
    try:
        with shard_writer(task.store, task.number) as writer:
            for place, item in enumerate(task.items):
                if deaths[place] >= 2:
                    notes.append(Note(item.path, "skipped", 0, KILLS))
                    continue
                task.trying.write_text(" ".join(map(str, [*deaths.elements(), place])))
                note = pack_item(task, item, writer, beat)
                notes += [note] if note else []
            shard = writer.close()
        record = {"shard": asdict(shard), "notes": [asdict(note) for note in notes]}
        write_json(task.record, record, indent=None)
    finally:
        task.trying.unlink(missing_ok=True)
    return task


def write_guarded(task: Task) -> Task:
    """Write a shard; no new frame for STALL_S seconds kills the process (SIGALRM, which Windows lacks)."""
    if not hasattr(signal, "setitimer"):
        return write_shard(task)

    def beat() -> None:
        signal.setitimer(signal.ITIMER_REAL, STALL_S)

    beat()
    try:
        return write_shard(task, beat)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def remove_leftovers(task: Task) -> None:
    """Remove the unfinished shard of a process that was killed."""
    final = shard_path(task.store, task.number)
    for leftover in final.parent.glob(f".{final.name}.*{TEMPORARY}"):
        leftover.unlink(missing_ok=True)


def pack_item(task: Task, item: Item, writer: ShardWriter, beat: Beat) -> Note | None:
    """Pack one video; a note where it cannot be read, or not to its end."""
    where = os.fspath(Path(item.path) / item.images[0]) if task.settings.kind == "images" else item.path
    pack = {"videos": _pack_video, "rendered": _pack_rendered}.get(task.settings.kind, _pack_images)
    try:
        damage = pack(task, item, writer, beat)
    except UnreadableError as error:
        writer.begin()
        return Note(where, "skipped", 0, error.reason)
    return Note(where, "partial", len(writer.videos[-1].sizes), damage) if damage else None


def _pack_video(task: Task, item: Item, writer: ShardWriter, beat: Beat) -> str:
    """Decode a video file and encode its frames; returns what is wrong with its end, if anything."""
    settings = task.settings
    fps = Fraction(settings.fps or 0).limit_denominator(1000)
    video = SampledVideo(task.source / item.path, fps, settings.short_side)
    shots, frames, size = CutFinder(), 0, (0, 0)
    for pixels, times in video:
        data = encode_jpeg(pixels, settings.quality)
        shots.add(pixels, times)
        for _ in range(times):
            writer.add(item.name, data)
        frames, size = frames + times, (pixels.shape[0], pixels.shape[1])
        beat()
    if video.damage and frames < MIN_PARTIAL:
        reason = f"{video.damage}: {frames} good frames, fewer than {MIN_PARTIAL}"
        raise UnreadableError(item.path, reason)
    writer.finish(item.name, size, shots.cuts())
    return f"{video.damage}: the {frames} frames before that were kept" if video.damage else ""


def _pack_rendered(task: Task, item: Item, writer: ShardWriter, beat: Beat) -> str:
    """Render a training video and encode its frames."""
    side = task.settings.short_side or 0
    number, varied = int(item.path), item.name.startswith("varied")
    frames = render_varied(0, number, size=side) if varied else render_video(0, number, size=side).frames
    for pixels in frames:
        writer.add(item.name, encode_jpeg(pixels, task.settings.quality))
        beat()
    writer.finish(item.name, (side, side), [])
    return ""


def _pack_images(task: Task, item: Item, writer: ShardWriter, beat: Beat) -> str:
    """Copy image files byte for byte, unless they are larger than wanted."""
    wanted, shots, sizes = task.settings.short_side, CutFinder(), []
    for file in item.images:
        try:
            data = read_bytes(task.source / item.path / file)
            size, small = _glance(data)
            if wanted is not None and min(size) > wanted:
                pixels = decode_image(data, file)
                smaller = shrink_size(pixels.shape[0], pixels.shape[1], wanted)
                resized = Image.fromarray(pixels).resize(smaller, Image.Resampling.BICUBIC)
                data = encode_jpeg(np.asarray(resized), task.settings.quality)
                size, small = _glance(data)
        except InputError as error:
            raise UnreadableError(item.path, str(error).rstrip(".")) from error
        except BAD_IMAGE as error:
            raise UnreadableError(item.path, f"{file}: {image_problem(error)}") from error
        shots.add(small)
        sizes.append(size)
        writer.add(item.name, data)
        beat()
    writer.finish(item.name, sizes[0], shots.cuts())
    return ""


def _glance(data: bytes) -> tuple[tuple[int, int], Frame]:
    """Height and width of an image, and its pixels, fewer where that is faster; reads the whole file."""
    with open_image(data) as image:
        size = image.height, image.width
        image.draft("RGB", (image.width // 4, image.height // 4))
        return size, np.asarray(image.convert("RGB"))


# Shot cuts: frames whose colors differ much from those of the frame before.


LARGE = 0.3  # of the pixels
TIMES = 2.5  # as large as the typical difference nearby
NEARBY = 4  # differences on either side
STILL = 0.002  # a repeated frame says nothing about motion
LEVELS = 5  # of each color
BINS = 4 * LEVELS**3

Colors = Float32[np.ndarray, "500"]


def describe_colors(frame: UInt8[np.ndarray, "height width 3"]) -> Colors:
    """Histograms of the four quarters of a frame, which together sum to 1."""
    height, width = frame.shape[:2]
    step = max(1, min(height, width) // 64)
    small = frame[::step, ::step]
    rows, columns = np.ogrid[: small.shape[0], : small.shape[1]]
    # Dithered: an even surface spreads over two levels, and does not jump when it gets a little lighter.
    dither = ((37 * rows + 23 * columns) % 64).astype(np.uint16)
    level = (small + dither[:, :, None]) >> 6
    quarter = 2 * (2 * rows >= small.shape[0]) + (2 * columns >= small.shape[1])
    bins = ((quarter * LEVELS + level[..., 0]) * LEVELS + level[..., 1]) * LEVELS + level[..., 2]
    return (np.bincount(bins.ravel(), minlength=BINS) / bins.size).astype(np.float32)


class CutFinder:
    """Finds the shot cuts of a video while its frames pass by.

    A frame is described by coarse color histograms of its four quarters. The difference of two frames is the
    share of pixels that would have to change their color (0 to 1). A cut is a difference that is large, and
    much larger than those around it: fast motion and flicker make many large ones in a row, a cut makes one.
    """

    def __init__(self) -> None:
        self._differences: list[float] = []
        self._last: Colors | None = None

    def add(self, frame: UInt8[np.ndarray, "height width 3"], times: int = 1) -> None:
        """The next frame, which is shown `times` times."""
        colors = describe_colors(frame)
        if self._last is not None:
            # The share of pixels that would have to change.
            self._differences.append(float(np.abs(self._last - colors).sum() / 2))
        self._differences += [0.0] * (times - 1)
        self._last = colors

    def cuts(self) -> list[int]:
        """Frames that begin a new shot."""
        return find_cuts(self._differences)


def find_cuts(differences: Sequence[float]) -> list[int]:
    """Frames that begin a new shot; `differences[i]` lies between frame i and frame i + 1.

    >>> find_cuts([0.1, 0.1, 0.9, 0.1, 0.1])
    [3]
    >>> find_cuts([0.5, 0.6, 0.7, 0.6, 0.5])
    []
    """
    cuts = []
    for i, here in enumerate(differences):
        around = [*differences[max(0, i - NEARBY) : i], *differences[i + 1 : i + 1 + NEARBY]]
        moving = sorted(value for value in around if value > STILL)
        typical = moving[len(moving) // 2] if moving else 0.0
        if here > LARGE and here > TIMES * typical:
            cuts.append(i + 1)
    return cuts
