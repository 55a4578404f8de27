"""A look at stored videos: frames decoded small, to see whether they can be read and move; equal bytes."""

import hashlib
from collections import defaultdict
from contextlib import suppress
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from tcore.data.findings import for_each
from tcore.data.images import BAD_IMAGE, image_problem, open_image
from tcore.data.stores import FolderStore, FrameStore, PackedStore
from tcore.errors import InputError

FRAMES_PER_VIDEO = 64  # frames decoded of a video, unless all are asked for
THUMB = 32  # side of the gray thumbnails that are compared

Thumb = UInt8[np.ndarray, "32 32"]


class Look(NamedTuple):
    """What decoding some frames of a video showed."""

    video: int
    name: str
    num_frames: int
    sizes: tuple[tuple[int, int], ...]
    """Distinct heights and widths."""
    unreadable: tuple[str, ...]
    """Errors of the frames that cannot be read."""
    changes: tuple[float, ...]
    """Mean changes between thumbnails of two frames, in gray levels of 255."""


def look_at(store: FrameStore, video: int, distance: int, full: bool) -> Look:
    """Decode frames of a video small; changes are measured between frames this far apart."""
    length = int(store.lengths[video])
    distance = min(max(1, distance), max(1, length - 1))
    thumbs: dict[int, Thumb] = {}
    sizes, unreadable = set(), []
    wanted = choose_frames(length, distance, full)
    for index in wanted:
        try:
            (data,) = store.read_bytes(video, [index])
            size, thumbs[index] = read_thumb(data, store.where(video, index))
            sizes.add(size)
        except InputError as error:
            unreadable.append(str(error))
    pairs = ((thumbs[t], thumbs[t + distance]) for t in thumbs if t + distance in thumbs)
    changes = tuple(change(before, after) for before, after in pairs)
    return Look(video, store.names[video], len(wanted), tuple(sorted(sizes)), tuple(unreadable), changes)


def change(before: Thumb, after: Thumb) -> float:
    """Mean change between two thumbnails, in gray levels."""
    return float(np.abs(before.astype(np.int16) - after).mean())


def choose_frames(length: int, distance: int, full: bool) -> list[int]:
    """Frames to decode: all of a short video, pairs that are `distance` apart spread over a long one.

    >>> choose_frames(5, 2, full=False), len(choose_frames(7200, 1440, full=False))
    ([0, 1, 2, 3, 4], 65)
    """
    if full or length <= FRAMES_PER_VIDEO:
        return list(range(length))
    anchors = np.linspace(0, length - 1 - distance, FRAMES_PER_VIDEO // 2).astype(int).tolist()
    return sorted({0, length // 2, length - 1, *anchors, *(t + distance for t in anchors)})


def read_thumb(data: bytes, name: str) -> tuple[tuple[int, int], Thumb]:
    """Height and width of an image, and the image in gray and small; errors call it `name`."""
    try:
        with open_image(data) as image:
            size = image.height, image.width
            image.draft("L", (2 * THUMB, 2 * THUMB))  # a JPEG is decoded small: several times faster
            small = image.convert("L").resize((THUMB, THUMB), Image.Resampling.BOX)
            return size, np.asarray(small)
    except BAD_IMAGE as error:
        raise InputError(f"cannot read frame {name}: {image_problem(error)}.") from error


def same_bytes(store: FrameStore, threads: int) -> list[list[int]]:
    """Groups of videos with the same bytes; only those whose sizes in bytes agree are read."""
    by_size: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    sizes = for_each(lambda video: _size_of(store, video), range(len(store)), "comparing", threads)
    for video, size in enumerate(sizes):
        by_size[size].append(video)
    same: defaultdict[bytes, list[int]] = defaultdict(list)
    for size, group in by_size.items():
        for video in group if size and len(group) > 1 else ():
            with suppress(InputError, OSError):  # reported as unreadable
                same[_digest(store, video)].append(video)
    return [group for group in same.values() if len(group) > 1]


def _size_of(store: FrameStore, video: int) -> tuple[int, ...]:
    """Sizes in bytes, as far as they are cheap to get; none where nothing is stored."""
    length = int(store.lengths[video])
    if isinstance(store, PackedStore):
        return store.sizes(video)
    with suppress(OSError):
        if isinstance(store, FolderStore):
            return length, *(store.path(video, i).stat().st_size for i in (0, length // 2, length - 1))
    return ()


def _digest(store: FrameStore, video: int) -> bytes:
    """A hash of all that is stored of a video."""
    digest, frames = hashlib.sha256(), range(int(store.lengths[video]))
    if isinstance(store, FolderStore):
        for path in dict.fromkeys(store.path(video, frame) for frame in frames):
            with path.open("rb") as file:
                hashlib.file_digest(file, lambda: digest)
    else:
        for data in store.read_bytes(video, frames):
            digest.update(data)
    return digest.digest()
