"""One shard from its videos: the unit of work of `tcore prepare`, done by one process from end to end."""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
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
from tcore.errors import InputError
from tcore.files import TEMPORARY, read_bytes, write_text

MIN_PARTIAL = 7  # frames; the usual offsets between past, current and future need as many
STALL_S = 240  # without a frame; then a video in its own process is given up


@dataclass(frozen=True)
class Settings:
    """What decides about the pixels of a store."""

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


@dataclass(frozen=True)
class Note:
    """A line of skipped.csv."""

    file: str
    outcome: str  # skipped or partial
    frames: int
    reason: str


Tell = Callable[[str, int], None]
"""Told ("frame", 0) now and then, so that silence means trouble, and (outcome, frames) after each video."""


def record_path(store: Path, number: int) -> Path:
    """The file that says that a shard is finished."""
    return store / "parts" / f"{number:06d}.json"


def write_shard(task: Task, tell: Tell) -> None:
    """Write a shard and its record; a video that killed a process before is tried in one of its own."""
    trying = record_path(task.store, task.number).with_suffix(".trying")
    suspects = _read_numbers(trying)
    final = shard_path(task.store, task.number)
    for leftover in final.parent.glob(f".{final.name}.*{TEMPORARY}"):  # of a process that was killed
        leftover.unlink(missing_ok=True)
    try:
        with shard_writer(task.store, task.number) as writer:
            notes = _pack_all(task, writer, tell, trying, suspects)
            shard = writer.close()
        record = {"shard": asdict(shard), "notes": [asdict(note) for note in notes]}
        write_text(record_path(task.store, task.number), json.dumps(record))
    finally:
        trying.unlink(missing_ok=True)  # only a process that dies leaves it behind


def _pack_all(task: Task, writer: ShardWriter, tell: Tell, trying: Path, suspects: set[int]) -> list[Note]:
    """Pack the videos of a shard one by one; `trying` says which, in case the process does not survive it."""
    notes = []
    trying.parent.mkdir(parents=True, exist_ok=True)
    for place, item in enumerate(task.items):
        trying.write_text(" ".join(map(str, [*sorted(suspects), place])))
        pack = _pack_isolated if place in suspects else pack_item
        note = pack(task, item, writer, tell)
        if note is None:
            tell("whole", len(writer.videos[-1].sizes))
        else:
            notes.append(note)
            tell(note.outcome, note.frames)
    return notes


def read_record(path: Path) -> tuple[Shard, list[Note]]:
    """What a finished shard says about itself."""
    record = json.loads(path.read_text(encoding="utf-8"))
    shard = record["shard"]
    return Shard(shard["bytes"], shard["sha256"], [PackedVideo(**video) for video in shard["videos"]]), [
        Note(**note) for note in record["notes"]
    ]


def pack_item(task: Task, item: Item, writer: ShardWriter, tell: Tell) -> Note | None:
    """Pack one video; a note where it could not be taken in, or not to its end."""
    where = os.fspath(Path(item.path) / item.images[0]) if task.settings.kind == "images" else item.path
    try:
        if task.settings.kind == "videos":
            damage = _pack_video(task, item, writer, tell)
        elif task.settings.kind == "rendered":
            damage = _pack_rendered(task, item, writer, tell)
        else:
            damage = _pack_images(task, item, writer, tell)
    except UnreadableError as error:
        writer.begin()
        return Note(where, "skipped", 0, str(error))
    return Note(where, "partial", len(writer.videos[-1].sizes), damage) if damage else None


def _pack_video(task: Task, item: Item, writer: ShardWriter, tell: Tell) -> str:
    settings = task.settings
    fps = Fraction(settings.fps or 0).limit_denominator(1000)
    video = SampledVideo(task.source / item.path, fps, settings.short_side)
    looks = _Looks()
    for pixels, times in video:
        data = encode_jpeg(pixels, settings.quality)
        looks.add(pixels, times, (pixels.shape[0], pixels.shape[1]))
        for _ in range(times):
            writer.add(item.name, data)
        tell("frame", 0)
    if video.damage and looks.frames < MIN_PARTIAL:
        raise UnreadableError(f"{video.damage}: {looks.frames} good frames, fewer than {MIN_PARTIAL}")
    writer.finish(item.name, looks.size, find_cuts(looks.differences))
    return f"{video.damage}: the {looks.frames} frames before that were kept" if video.damage else ""


def _pack_rendered(task: Task, item: Item, writer: ShardWriter, tell: Tell) -> str:
    """Render a training video and encode its frames."""
    settings = task.settings
    side = settings.short_side or 0
    for pixels in render_video(0, int(item.path), size=side).frames:
        writer.add(item.name, encode_jpeg(pixels, settings.quality))
        tell("frame", 0)
    writer.finish(item.name, (side, side), [])
    return ""


def _pack_images(task: Task, item: Item, writer: ShardWriter, tell: Tell) -> str:
    """Image files go in byte for byte, unless they are larger than wanted."""
    settings, looks = task.settings, _Looks()
    for file in item.images:
        try:
            data = read_bytes(task.source / item.path / file)
            size, small = _glance(data)
            if settings.short_side is not None and min(size) > settings.short_side:
                data = _shrink(decode_image(data, file), settings)
                size, small = _glance(data)
        except InputError as error:
            raise UnreadableError(str(error).rstrip(".")) from error
        except BAD_IMAGE as error:
            raise UnreadableError(f"{file}: {image_problem(error)}") from error
        looks.add(small, 1, size)
        writer.add(item.name, data)
        tell("frame", 0)
    writer.finish(item.name, looks.size, find_cuts(looks.differences))
    return ""


def _glance(data: bytes) -> tuple[tuple[int, int], Frame]:
    """Height and width of an image, and its pixels, fewer where that is faster; all of the file is read."""
    with open_image(data) as image:
        size = image.height, image.width
        image.draft("RGB", (image.width // 4, image.height // 4))
        return size, np.asarray(image.convert("RGB"))


def _shrink(pixels: Frame, settings: Settings) -> bytes:
    """A smaller image, as JPEG."""
    height, width = pixels.shape[:2]
    scale = (settings.short_side or 0) / min(height, width)
    size = max(1, round(width * scale)), max(1, round(height * scale))
    smaller = Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC)
    return encode_jpeg(np.asarray(smaller), settings.quality)


class _Looks:
    """Sizes and color differences of the frames of a video, as they come by."""

    def __init__(self) -> None:
        self.frames, self.size = 0, (0, 0)
        self.differences: list[float] = []
        self._last: Any = None

    def add(self, pixels: Frame, times: int, size: tuple[int, int]) -> None:
        """Look at a frame of some (height, width) that is there `times` times."""
        described = describe_colors(pixels)
        if self._last is None:
            self.size = size
        else:
            self.differences.append(color_difference(self._last, described))
        self.differences += [0.0] * (times - 1)
        self.frames += times
        self._last = described


def _pack_isolated(task: Task, item: Item, writer: ShardWriter, tell: Tell) -> Note | None:
    """Pack one video by a process of its own, which may die or fall silent."""
    folder = record_path(task.store, task.number).parent
    with tempfile.TemporaryDirectory(dir=folder, prefix=".alone-") as scratch:
        spool = Path(scratch) / "video.tar"
        code = "from tcore.data.packing import isolated_main; isolated_main()"
        with subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as child:
            assert child.stdin is not None
            with suppress(BrokenPipeError):
                child.stdin.write(_to_json(task, item, spool).encode())
                child.stdin.close()
            said, silent = _listen(child, tell)
        if child.returncode != 0:
            return Note(item.path, "skipped", 0, _why_died(child.returncode, silent))
        answer = json.loads(said)
        if answer["video"] is not None:
            video, tar = PackedVideo(**answer["video"]), spool.read_bytes()
            for offset, size in zip(video.offsets, video.sizes, strict=True):
                writer.add(video.name, tar[offset : offset + size])
            writer.finish(video.name, (video.height, video.width), video.cuts)
        return Note(**answer["note"]) if answer["note"] else None


def isolated_main() -> None:
    """What the process of its own does: a task on stdin; dots for frames, then the answer, on stdout."""
    task, item, spool = _from_json(sys.stdin.read())
    writer = ShardWriter(spool)
    note = pack_item(task, item, writer, lambda what, frames: print(".", flush=True))
    shard = writer.close()
    video = asdict(shard.videos[0]) if shard.videos else None
    print(json.dumps({"video": video, "note": asdict(note) if note else None}), flush=True)


def _to_json(task: Task, item: Item, spool: Path) -> str:
    """What the process of its own needs to know; paths are ASCII in JSON, whatever their bytes are."""
    return json.dumps(
        {
            "source": os.fspath(task.source),
            "store": os.fspath(task.store),
            "settings": asdict(task.settings),
            "number": task.number,
            "item": asdict(item),
            "spool": os.fspath(spool),
        }
    )


def _from_json(text: str) -> tuple[Task, Item, Path]:
    said = json.loads(text)
    item = Item(**(said["item"] | {"images": tuple(said["item"]["images"])}))
    settings = Settings(**said["settings"])
    task = Task(Path(said["source"]), Path(said["store"]), settings, said["number"], (item,))
    return task, item, Path(said["spool"])


def _listen(child: subprocess.Popen[bytes], tell: Tell) -> tuple[bytes, bool]:
    """The last line that a process says, and whether it was ended because it said nothing for too long."""
    assert child.stdout is not None
    heard = b""
    while select.select([child.stdout], [], [], STALL_S)[0]:
        more = os.read(child.stdout.fileno(), 2**16)
        if not more:
            return heard.strip().rpartition(b"\n")[2], False
        heard += more
        tell("frame", 0)
    child.kill()
    return b"", True


def _why_died(code: int, silent: bool) -> str:
    if silent:
        return f"the decoder hangs: nothing came out of it for {STALL_S} s"
    if code == -signal.SIGKILL:
        return "decoding it was killed twice (out of memory?)"
    name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return f"the decoder crashes on it ({name}), twice"


def _read_numbers(path: Path) -> set[int]:
    """Videos that were being read when a process ended; none where the file makes no sense."""
    with suppress(OSError, ValueError):
        return {int(word) for word in path.read_text().split()}
    return set()
