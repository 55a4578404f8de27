"""What a folder offers to `tcore prepare`, and which videos share a shard."""

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tcore.data.images import IMAGE_SUFFIXES
from tcore.data.stores import VIDEO_SUFFIXES, natural, walk_files, walk_frames
from tcore.errors import InputError

SHARD_VIDEOS = 256
SHARD_BYTES = 2**30  # of the source
FEWEST_SHARDS = 64  # small sources are divided further: a process works on one shard at a time
# Approximate sizes of a frame in a folder (looking up millions of them takes long) and of a rendered video.
FRAME_BYTES, RENDERED_BYTES = 50_000, 2**22


@dataclass(frozen=True)
class Item:
    """One future video: a video file, or the image files of a folder."""

    name: str
    path: str  # relative to the source; a folder where there are images
    images: tuple[str, ...]
    bytes: int


def list_source(source: Path, images: bool) -> tuple[Path, str, list[Item]]:
    """The folder, the kind (videos, frames, images or rendered) and the videos that a source offers.

    These are video files, or else folders of frames; with `images`, every image by itself.
    """
    if str(source).startswith("rendered:") and not source.exists():
        count = re.fullmatch(r"rendered:([0-9]{1,7})", str(source))
        if count is None or int(count[1]) < 1:
            raise InputError(f"{source}: need a number of videos from 1, as in rendered:512.")
        items = [Item(f"rendered-{n:05d}", str(n), (), RENDERED_BYTES) for n in range(int(count[1]))]
        return Path(), "rendered", items
    if not source.exists():
        raise InputError(f"source {source} does not exist: give a folder of videos or of frame folders.")
    root, files = (source.parent, [source.name]) if source.is_file() else (source, walk_files(source))
    kind = "images" if images and source.is_dir() else "videos"
    items = _list_files(root, files, kind)
    if kind == "videos" and not items and source.is_dir():
        folders = sorted(walk_frames(source), key=lambda row: natural(row[0]))
        kind, items = "frames", [Item(name, name, tuple(f), FRAME_BYTES * len(f)) for name, f in folders]
    if not items:
        wanted = "image" if images else "video"
        raise InputError(f"no {wanted} files under {source} (found {len(files)} other files).")
    return root, kind, items


def _list_files(root: Path, files: Sequence[str], kind: str) -> list[Item]:
    suffixes = IMAGE_SUFFIXES if kind == "images" else VIDEO_SUFFIXES
    chosen = [f for f in files if Path(f).suffix.lower() in suffixes and (root / f).is_file()]
    rows = []
    for file, name in zip(chosen, unique_names(chosen), strict=True):
        path, single = (Path(file).parent, (Path(file).name,)) if kind == "images" else (Path(file), ())
        rows.append(Item(name, os.fspath(path), single, (root / file).stat().st_size))
    return sorted(rows, key=lambda item: natural(item.name))


def unique_names(files: Sequence[str]) -> list[str]:
    """Paths without their suffixes; with them where two would be the same.

    >>> unique_names(["a/x.mp4", "b/x.mp4", "b/y.mp4", "b/y.avi"])
    ['a/x', 'b/x', 'b/y.mp4', 'b/y.avi']
    """
    names = [os.fspath(Path(file).with_suffix("")) for file in files]
    while True:
        counts = Counter(names)
        changed = [file if counts[name] > 1 else name for file, name in zip(files, names, strict=True)]
        if changed == names:
            return names
        names = changed


def plan_shards(items: Sequence[Item]) -> list[list[Item]]:
    """Videos in order, as many per shard as their number and sizes allow; a function of the items alone."""
    most = min(SHARD_VIDEOS, max(1, len(items) // FEWEST_SHARDS))
    shards: list[list[Item]] = []
    room, size = 0, 0
    for item in items:
        if room == 0 or size + item.bytes > SHARD_BYTES:
            shards.append([])
            room, size = most, 0
        shards[-1].append(item)
        room -= 1
        size += item.bytes
    return shards
