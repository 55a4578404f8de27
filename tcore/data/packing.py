"""One shard from its videos: the unit of work of `tcore prepare`, done by one process."""

import json
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tcore.data.cuts import color_difference, describe_colors, find_cuts
from tcore.data.images import BAD_IMAGE, Frame, decode_image, encode_jpeg, image_problem, open_image
from tcore.data.packed import PackedVideo, Shard, ShardWriter, shard_path, shard_writer
from tcore.data.rendered import render_video
from tcore.data.sources import Item
from tcore.data.video import SampledVideo, UnreadableError
from tcore.data.workers import die_with_parent
from tcore.errors import InputError
from tcore.files import TEMPORARY, read_bytes, write_text

MIN_PARTIAL = 7  # frames; the usual offsets between past, current and future need this many
STALL_S = 240  # seconds without a new frame after which a process is killed


@dataclass(frozen=True)
class Settings:
    """The settings that determine the pixels of a store."""

    kind: str  # videos, frames, images or rendered
    fps: float | None
    short_side: int | None
    quality: int


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

    def suspects(self) -> set[int]:
        """Videos that were being read when a process died."""
        with suppress(OSError, ValueError):
            return {int(word) for word in self.trying.read_text().split()}
        return set()

    @property
    def trying(self) -> Path:
        """The file that names the video being read, and the suspects; only a process that dies leaves it."""
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


def read_record(path: Path) -> tuple[Shard, list[Note]]:
    """What the record of a finished shard says."""
    record = json.loads(path.read_text(encoding="utf-8"))
    shard = record["shard"]
    videos = [PackedVideo(**video) for video in shard["videos"]]
    return Shard(shard["bytes"], shard["sha256"], videos), [Note(**note) for note in record["notes"]]


def write_shard(task: Task, beat: Beat = lambda: None) -> None:
    """Write a shard and its record; a video that killed a process before is read by a process of its own."""
    suspects, notes = task.suspects(), list[Note]()
    remove_leftovers(task)
    task.trying.parent.mkdir(parents=True, exist_ok=True)
    try:
        with shard_writer(task.store, task.number) as writer:
            for place, item in enumerate(task.items):
                task.trying.write_text(" ".join(map(str, [*sorted(suspects), place])))
                note = (_pack_isolated if place in suspects else pack_item)(task, item, writer, beat)
                notes += [note] if note else []
            shard = writer.close()
        record = {"shard": asdict(shard), "notes": [asdict(note) for note in notes]}
        write_text(task.record, json.dumps(record))
    finally:
        task.trying.unlink(missing_ok=True)


def write_guarded(task: Task) -> Task:
    """Write a shard; no new frame for STALL_S seconds kills the process (SIGALRM). Returns the task."""

    def beat() -> None:
        signal.setitimer(signal.ITIMER_REAL, STALL_S)

    beat()
    try:
        write_shard(task, beat)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return task


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
        return Note(where, "skipped", 0, str(error))
    return Note(where, "partial", len(writer.videos[-1].sizes), damage) if damage else None


def _pack_video(task: Task, item: Item, writer: ShardWriter, beat: Beat) -> str:
    """Decode a video file and encode its frames; returns what is wrong with its end, if anything."""
    settings = task.settings
    fps = Fraction(settings.fps or 0).limit_denominator(1000)
    video = SampledVideo(task.source / item.path, fps, settings.short_side)
    changes = _ColorChanges()
    for pixels, times in video:
        data = encode_jpeg(pixels, settings.quality)
        changes.add(pixels, times, (pixels.shape[0], pixels.shape[1]))
        for _ in range(times):
            writer.add(item.name, data)
        beat()
    if video.damage and changes.frames < MIN_PARTIAL:
        raise UnreadableError(f"{video.damage}: {changes.frames} good frames, fewer than {MIN_PARTIAL}")
    writer.finish(item.name, changes.size, find_cuts(changes.differences))
    return f"{video.damage}: the {changes.frames} frames before that were kept" if video.damage else ""


def _pack_rendered(task: Task, item: Item, writer: ShardWriter, beat: Beat) -> str:
    """Render a training video and encode its frames."""
    side = task.settings.short_side or 0
    for pixels in render_video(0, int(item.path), size=side).frames:
        writer.add(item.name, encode_jpeg(pixels, task.settings.quality))
        beat()
    writer.finish(item.name, (side, side), [])
    return ""


def _pack_images(task: Task, item: Item, writer: ShardWriter, beat: Beat) -> str:
    """Copy image files byte for byte, unless they are larger than wanted."""
    wanted, changes = task.settings.short_side, _ColorChanges()
    for file in item.images:
        try:
            data = read_bytes(task.source / item.path / file)
            size, small = _glance(data)
            if wanted is not None and min(size) > wanted:
                data = _shrink(decode_image(data, file), wanted, task.settings.quality)
                size, small = _glance(data)
        except InputError as error:
            raise UnreadableError(str(error).rstrip(".")) from error
        except BAD_IMAGE as error:
            raise UnreadableError(f"{file}: {image_problem(error)}") from error
        changes.add(small, 1, size)
        writer.add(item.name, data)
        beat()
    writer.finish(item.name, changes.size, find_cuts(changes.differences))
    return ""


def _glance(data: bytes) -> tuple[tuple[int, int], Frame]:
    """Height and width of an image, and its pixels, fewer where that is faster; reads the whole file."""
    with open_image(data) as image:
        size = image.height, image.width
        image.draft("RGB", (image.width // 4, image.height // 4))
        return size, np.asarray(image.convert("RGB"))


def _shrink(pixels: Frame, short_side: int, quality: int) -> bytes:
    """A smaller image, as JPEG."""
    height, width = pixels.shape[:2]
    scale = short_side / min(height, width)
    size = max(1, round(width * scale)), max(1, round(height * scale))
    smaller = Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC)
    return encode_jpeg(np.asarray(smaller), quality)


class _ColorChanges:
    """Color differences between the frames of a video, their number, and the size of the first."""

    def __init__(self) -> None:
        self.frames, self.size = 0, (0, 0)
        self.differences: list[float] = []
        self._last: Any = None

    def add(self, pixels: Frame, times: int, size: tuple[int, int]) -> None:
        """Add a frame of some (height, width) that is shown `times` times."""
        described = describe_colors(pixels)
        if self._last is None:
            self.size = size
        else:
            self.differences.append(color_difference(self._last, described))
        self.differences += [0.0] * (times - 1)
        self.frames += times
        self._last = described


def _pack_isolated(task: Task, item: Item, writer: ShardWriter, beat: Beat) -> Note | None:
    """Pack one video in a process of its own, which may crash or hang: as a shard of a store of its own."""
    with tempfile.TemporaryDirectory(dir=task.record.parent, prefix=".alone-") as scratch:
        alone = replace(task, store=Path(scratch), items=(item,))
        process = multiprocessing.get_context("spawn").Process(target=_write_alone, args=(alone,))
        with without_main():
            process.start()
        while process.is_alive():
            process.join(1.0)
            beat()
        if process.exitcode != 0:
            return Note(item.path, "skipped", 0, _why_died(process.exitcode or 0))
        shard, notes = read_record(alone.record)
        tar = shard_path(alone.store, alone.number).read_bytes()
        for video in shard.videos:
            for offset, size in zip(video.offsets, video.sizes, strict=True):
                writer.add(video.name, tar[offset : offset + size])
            writer.finish(video.name, (video.height, video.width), video.cuts)
        return notes[0] if notes else None


def _write_alone(task: Task) -> None:
    die_with_parent()
    write_guarded(task)


def _why_died(code: int) -> str:
    if code == -signal.SIGALRM:
        return f"the decoder hangs: no frame for {STALL_S} s"
    name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return f"reading it ended the process twice ({name})"


@contextmanager
def without_main() -> Iterator[None]:
    """Keep processes started meanwhile from importing, and so running, the caller's script again."""
    main = sys.modules["__main__"]
    names: list[str] = [name for name in ("__file__", "__spec__") if name in vars(main)]
    before = {name: vars(main).pop(name) for name in names}
    main.__spec__ = None
    try:
        yield
    finally:
        vars(main).update(before)
