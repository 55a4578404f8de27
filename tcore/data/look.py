"""A look at videos: frames decoded small, to see whether they can be read, move, and are alike."""

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, UInt8
from PIL import Image

from tcore.data.findings import for_each
from tcore.data.images import BAD_IMAGE, image_problem, open_image
from tcore.data.stores import FolderStore, FrameStore, ImageStore, PackedStore
from tcore.errors import InputError
from tcore.files import read_bytes

THUMB, PORTRAIT = 32, 8  # sides of the gray thumbnails that are compared
STILL = 1.0  # gray levels of 255: below this, JPEG noise is all that changes
ALIKE = 3.0  # gray levels, root mean square over three portraits
FLAT = 8.0  # portraits that deviate less show nothing to compare: black, white, fog
MOST_COMPARED = 20_000  # portraits; beyond, comparing all pairs takes too long
FRAMES_PER_VIDEO = 64  # looked at in a video, unless all are asked for

Thumb = UInt8[np.ndarray, "32 32"]


class Look(NamedTuple):
    """What a look at one video showed."""

    video: int
    num_frames: int
    """Frames looked at."""
    sizes: tuple[tuple[int, int], ...]
    """Distinct heights and widths."""
    unreadable: tuple[str, ...]
    """What the frames that cannot be read said."""
    motion: float
    """Mean change of the thumbnails over the distance, in gray levels of 255; NaN for a single frame."""
    most_motion: float
    """The largest change."""
    portrait: UInt8[np.ndarray, "3 8 8"] | None
    """First, middle and last frame, tiny; None where one cannot be read."""


def look_at(store: FrameStore, video: int, distance: int, full: bool) -> Look:
    """Decode the frames of a video small; `distance` is the number of frames between past and current."""
    length = int(store.lengths[video])
    distance = min(max(1, distance), max(1, length - 1))
    thumbs: dict[int, Thumb] = {}
    sizes, unreadable = set(), []
    wanted = choose_frames(length, distance, full)
    for index in wanted:
        try:
            size, thumbs[index] = read_thumb(store, video, index)
            sizes.add(size)
        except InputError as error:
            unreadable.append(str(error))
    changes = [
        float(np.abs(thumbs[t].astype(np.int16) - thumbs[t + distance]).mean())
        for t in thumbs
        if t + distance in thumbs
    ]
    ends = [thumbs.get(t) for t in (0, length // 2, length - 1)]
    portrait = None if any(t is None for t in ends) else np.stack([shrink(t) for t in ends if t is not None])
    mean, most = (float(np.mean(changes)), max(changes)) if changes else (float("nan"), float("nan"))
    return Look(video, len(wanted), tuple(sorted(sizes)), tuple(unreadable), mean, most, portrait)


def choose_frames(length: int, distance: int, full: bool) -> list[int]:
    """Frames to look at: all of a short video, pairs that are `distance` apart spread over a long one.

    >>> choose_frames(5, 2, full=False), len(choose_frames(7200, 1440, full=False))
    ([0, 1, 2, 3, 4], 65)
    """
    if full or length <= FRAMES_PER_VIDEO:
        return list(range(length))
    anchors = np.linspace(0, length - 1 - distance, FRAMES_PER_VIDEO // 2).astype(int).tolist()
    return sorted({0, length // 2, length - 1, *anchors, *(t + distance for t in anchors)})


def read_thumb(store: FrameStore, video: int, index: int) -> tuple[tuple[int, int], Thumb]:
    """Size of a frame, and the frame in gray and small."""
    data = frame_bytes(store, video, index)
    if data is None:
        frame = store.read(video, [index])[0]
        return (frame.shape[0], frame.shape[1]), _thumb(Image.fromarray(frame))
    try:
        with open_image(data) as image:
            width, height = image.size
            image.draft("L", (2 * THUMB, 2 * THUMB))  # a JPEG is decoded small: several times faster
            return (height, width), _thumb(image)
    except BAD_IMAGE as error:
        where = name_frame(store, video, index)
        raise InputError(f"cannot read frame {where}: {image_problem(error)}.") from error


def frame_bytes(store: FrameStore, video: int, frame: int) -> bytes | None:
    """A frame as it is stored; None where it is not stored as a file."""
    if isinstance(store, PackedStore):
        return store.read_bytes(video, [frame])[0]
    if not isinstance(store, FolderStore | ImageStore):
        return None
    path = store.path(video, frame)
    try:
        return read_bytes(path)
    except OSError as error:
        raise InputError(f"cannot read frame {path}: {error.strerror}.") from error


def name_frame(store: FrameStore, video: int, frame: int) -> str:
    """Where a frame is."""
    if isinstance(store, FolderStore | ImageStore):
        return str(store.path(video, frame))
    return f"{frame} of video {store.names[video]}"


def _thumb(image: Image.Image) -> Thumb:
    return np.asarray(image.convert("L").resize((THUMB, THUMB), Image.Resampling.BOX))


def shrink(thumb: Thumb) -> UInt8[np.ndarray, "8 8"]:
    """A portrait of a thumbnail."""
    cell = THUMB // PORTRAIT
    blocks = thumb.reshape(PORTRAIT, cell, PORTRAIT, cell).mean(axis=(1, 3))
    return blocks.round().astype(np.uint8)


def same_bytes(store: FrameStore, videos: Sequence[int], threads: int) -> list[list[int]]:
    """Videos that are stored as the same bytes; candidates share first, middle and last frame."""

    def hints(video: int) -> tuple[object, ...]:
        length = int(store.lengths[video])
        return length, *(_hint(store, video, frame) for frame in (0, length // 2, length - 1))

    candidates: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
    for video, found in zip(videos, for_each(hints, videos, "comparing", threads), strict=True):
        candidates[found].append(video)
    same: defaultdict[bytes, list[int]] = defaultdict(list)
    for video in (video for group in candidates.values() if len(group) > 1 for video in group):
        digest = hashlib.sha256()
        for frame in range(int(store.lengths[video])):
            digest.update(frame_bytes(store, video, frame) or b"")
        same[digest.digest()].append(video)
    return [group for group in same.values() if len(group) > 1]


def _hint(store: FrameStore, video: int, frame: int) -> object:
    """Something that the same frames have in common: the size of a file, for it is cheap, or a hash."""
    if isinstance(store, FolderStore | ImageStore):
        try:
            return store.path(video, frame).stat().st_size
        except OSError:
            return video, frame  # like no other; a look at it will say what is wrong
    return hash(frame_bytes(store, video, frame))


def look_alike(looks: Sequence[Look]) -> list[list[int]]:
    """Groups of videos whose first, middle and last frame look nearly the same."""
    seen = [look for look in looks if look.portrait is not None and look.portrait.std() >= FLAT]
    if len(seen) < 2 or len(seen) > MOST_COMPARED:
        return []
    portraits: Float32[np.ndarray, "n d"] = np.stack(
        [np.asarray(look.portrait, np.float32).ravel() for look in seen]
    )
    squares = (portraits**2).sum(axis=1)
    group = list(range(len(seen)))  # each points to an earlier member of its group, the first to itself
    for start in range(0, len(seen), 1024):
        rows = slice(start, start + 1024)
        distances = squares[rows, None] + squares[None] - 2 * portraits[rows] @ portraits.T
        for i, j in np.argwhere(distances < ALIKE**2 * portraits.shape[1]).tolist():
            first, second = _root(group, start + i), _root(group, j)
            group[max(first, second)] = min(first, second)
    members: defaultdict[int, list[int]] = defaultdict(list)
    for index in range(len(seen)):
        members[_root(group, index)].append(seen[index].video)
    return [videos for videos in members.values() if len(videos) > 1]


def _root(group: list[int], index: int) -> int:
    while group[index] != index:
        index = group[index]
    return index
