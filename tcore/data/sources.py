"""What a folder offers to `tcore prepare`, and which videos share a shard."""

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tcore.data.images import IMAGE_SUFFIXES
from tcore.data.stores import VIDEO_SUFFIXES, natural, walk, walk_frames
from tcore.errors import InputError

SHARD_VIDEOS = 256
SHARD_BYTES = 2**30  # of the source
FEWEST_SHARDS = 64  # small sources are divided further: a shard is what one process works on at a time
FRAME_BYTES = 50_000  # about; looking up millions of file sizes takes long


RENDERED_BYTES = 2**22  # about what a rendered video of 256 px takes before it is encoded


@dataclass(frozen=True)
class Item:
    """One video to be: a video file, or the image files of a folder."""

    name: str
    path: str  # relative to the source; a folder where there are images
    images: tuple[str, ...]
    bytes: int


@dataclass(frozen=True)
class Listing:
    """Everything that a source offers, in the order of the store."""

    root: Path
    kind: str  # videos, frames, images or rendered
    items: list[Item]
    ignored: int  # files of other kinds


def list_source(source: Path, images: bool) -> Listing:
    """Video files, or else folders of frames; with `images`, every image by itself; or rendered:N videos."""
    if str(source).startswith("rendered:") and not source.exists():
        count = re.fullmatch(r"rendered:([0-9]{1,7})", str(source))
        if count is None or int(count[1]) < 1:
            raise InputError(f"{source}: need a number of videos from 1, as in rendered:512.")
        items = [Item(f"rendered-{n:05d}", str(n), (), RENDERED_BYTES) for n in range(int(count[1]))]
        return Listing(Path(), "rendered", items, 0)
    if not source.exists():
        raise InputError(f"source {source} does not exist: give a folder of videos or of frame folders.")
    if source.is_file():
        listing = _list_files(source.parent, [source.name], VIDEO_SUFFIXES, "videos")
    elif images:
        listing = _list_files(source, _walk(source), IMAGE_SUFFIXES, "images")
    else:
        listing = _list_files(source, _walk(source), VIDEO_SUFFIXES, "videos")
        if not listing.items:
            listing = _list_folders(source, listing.ignored)
    if not listing.items:
        wanted = "image" if images else "video"
        raise InputError(f"no {wanted} files under {source} (found {listing.ignored} other files).")
    return listing


def _list_files(root: Path, files: Sequence[str], suffixes: set[str], kind: str) -> Listing:
    chosen = [file for file in files if Path(file).suffix.lower() in suffixes]
    rows = []
    for file, name in zip(chosen, unique_names(chosen), strict=True):
        path, single = (Path(file).parent, (Path(file).name,)) if kind == "images" else (Path(file), ())
        rows.append(Item(name, os.fspath(path), single, (root / file).stat().st_size))
    rows.sort(key=lambda item: natural(item.name))
    return Listing(root, kind, rows, len(files) - len(chosen))


def _list_folders(root: Path, others: int) -> Listing:
    folders = sorted(walk_frames(root), key=lambda row: natural(row[0]))
    items = [Item(name, name, tuple(files), FRAME_BYTES * len(files)) for name, files in folders]
    return Listing(root, "frames", items, others - sum(len(item.images) for item in items))


def _walk(root: Path) -> list[str]:
    """Files at any depth."""
    paths = (os.path.normpath(f"{folder}/{name}") for folder, files in walk(root) for name in files)
    return [path for path in paths if (root / path).is_file()]


def unique_names(files: Sequence[str]) -> list[str]:
    """Paths without their endings; where two would be one, with them.

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
    """Videos in order, as many to a shard as their number and size allow; nothing else decides."""
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
