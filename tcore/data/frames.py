"""FrameStore: videos as ordered frames, from a folder of images, packed files, or rendered on the spot."""

import hashlib
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64, UInt8

from tcore.data.image_file import BAD_IMAGE, image_problem, open_image
from tcore.data.jpeg import decode_jpeg
from tcore.data.rendered import render_video
from tcore.errors import InputError
from tcore.files import read_bytes

Frame = UInt8[np.ndarray, "height width 3"]

IMAGE_SUFFIXES = {".jpg", ".jpeg", ".png"}
VIDEO_SUFFIXES = set(
    ".mp4 .avi .mkv .webm .mov .m4v .mpg .mpeg .flv .wmv .ts .mts .m2ts .3gp .ogv .vob .mxf .f4v .asf .divx "
    ".rm .rmvb .gif .y4m .ivf .h264 .264 .h265 .265 .hevc".split()
)


class NoFramesError(InputError):
    """A folder without any image in it."""


class FrameStore(ABC):
    """Videos as ordered frames: how many there are, how long each one is, and their pixels.

    >>> store = FrameStore.rendered(videos=2, frames=8, size=32)
    >>> len(store), store.lengths.tolist()
    (2, [8, 8])
    >>> [frame.shape for frame in store.read(0, [1, 4, 7])]
    [(32, 32, 3), (32, 32, 3), (32, 32, 3)]
    """

    names: Sequence[str]
    lengths: Int64[np.ndarray, " videos"]
    fps: float | None = None

    def __len__(self) -> int:
        return len(self.names)

    @abstractmethod
    def read(self, video: int, frames: Sequence[int]) -> list[Frame]:
        """Pixels of some frames of one video."""

    def cuts(self, video: int) -> tuple[int, ...]:
        """Frames that begin a new shot, where the store knows them."""
        return ()

    def all_cuts(self) -> tuple[Int64[np.ndarray, " cuts"], Int64[np.ndarray, " cuts"]]:
        """Video and frame of every cut."""
        rows = [(video, frame) for video in range(len(self)) for frame in self.cuts(video)]
        videos, frames = np.array(rows, dtype=np.int64).reshape(-1, 2).T
        return videos, frames

    def fingerprint(self) -> str:
        """A short name for the videos and their lengths; another one means other data."""
        digest = hashlib.sha256()
        for name, length in zip(self.names, self.lengths.tolist(), strict=True):
            digest.update(f"{name}\0{length}\n".encode("utf-8", "surrogateescape"))
        return digest.hexdigest()[:16]

    @staticmethod
    def open(path: str | Path) -> "FrameStore":
        """Open a store on disk: packed by `tcore prepare`, or a folder of frame folders."""
        root = Path(path)
        if (root / "store.json").is_file():
            from tcore.data.packed import PackedStore

            return PackedStore(root)
        if (root / "plan.json").is_file() and (root / "shards").is_dir():
            raise InputError(
                f"store {root} is unfinished: give the same tcore prepare command again; it goes on."
            )
        return FolderStore(root)

    @staticmethod
    def rendered(*, videos: int = 256, frames: int = 20, size: int = 128, seed: int = 0) -> "FrameStore":
        """Rendered training videos, the same ones for the same numbers."""
        return RenderedStore(videos, frames, size, seed)


class FolderStore(FrameStore):
    """A folder of frame folders at any depth: `<any>/<video>/00000.jpg`."""

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            what = "is a file" if root.exists() else "does not exist"
            raise InputError(f"frame store {root} {what}: give a folder of frame folders.")
        self.root = root
        files = dict(walk_frames(root))
        if not files:
            raise NoFramesError(_explain_empty(root))
        self.names = sorted(files, key=natural)
        self.files = [files[name] for name in self.names]
        self.lengths = np.array([len(images) for images in self.files], dtype=np.int64)

    def read(self, video: int, frames: Sequence[int]) -> list[Frame]:
        """Decode some frames of one video."""
        return [read_image(self.path(video, index)) for index in frames]

    def path(self, video: int, frame: int) -> Path:
        """The file of a frame."""
        return self.root / self.names[video] / self.files[video][frame]


class RenderedStore(FrameStore):
    """Rendered videos; each is kept once it was rendered."""

    fps = 2.0

    def __init__(self, videos: int, frames: int, size: int, seed: int) -> None:
        self.names = [f"rendered-{seed}-{index:05d}-{size}px" for index in range(videos)]
        self.lengths = np.full(videos, frames, dtype=np.int64)
        self._size, self._seed = size, seed
        self._kept: dict[int, UInt8[np.ndarray, "time height width 3"]] = {}

    def read(self, video: int, frames: Sequence[int]) -> list[Frame]:
        """Render the video, or look it up."""
        if video not in self._kept:
            length = int(self.lengths[video])
            rendered = render_video(self._seed, video, num_frames=length, size=self._size)
            rendered.frames.setflags(write=False)  # what is handed out is the kept video itself
            self._kept[video] = rendered.frames
        return [self._kept[video][index] for index in frames]


class Clips(NamedTuple):
    """Stretches of videos that samples are drawn from: whole videos, or their shots."""

    video: Int64[np.ndarray, " clips"]
    start: Int64[np.ndarray, " clips"]
    length: Int64[np.ndarray, " clips"]

    def select(self, keep: np.ndarray) -> "Clips":
        """Some of the clips."""
        return Clips(self.video[keep], self.start[keep], self.length[keep])


def list_clips(store: FrameStore, split_at_cuts: bool) -> Clips:
    """One clip per video, or one per shot."""
    everything = np.arange(len(store), dtype=np.int64)
    if not split_at_cuts:
        return Clips(everything, np.zeros_like(everything), np.asarray(store.lengths))
    lengths = np.asarray(store.lengths)
    cut_video, cut = store.all_cuts()
    inside = (cut > 0) & (cut < lengths[cut_video])
    marks = np.stack([np.append(everything, cut_video[inside]), np.append(0 * everything, cut[inside])])
    video, start = np.unique(marks, axis=1)  # sorted by video, then by frame
    end = np.append(start[1:], 0)
    last = np.append(video[1:] != video[:-1], True)
    return Clips(video, start, np.where(last, lengths[video], end) - start)


def read_image(path: Path) -> Frame:
    """Decode one image file to RGB."""
    try:
        data = read_bytes(path)
    except OSError as error:
        raise InputError(f"cannot read frame {path}: {error.strerror}.") from error
    return decode_image(data, str(path))


def decode_image(data: bytes, name: str) -> Frame:
    """Decode one image to RGB, turned as its pixels are stored; an error calls it by `name`."""
    if (frame := decode_jpeg(data)) is not None:
        return frame
    try:
        with open_image(data) as image:
            if image.mode.startswith("I"):  # Pillow would cut 16 bits off at 255
                gray = (np.asarray(image) >> 8).astype(np.uint8)
                return np.repeat(gray[:, :, None], 3, axis=2)
            if image.mode == "RGB":  # converting would copy it
                return np.asarray(image)
            with_alpha = image.mode == "P" and "transparency" in image.info
            return np.asarray((image.convert("RGBA") if with_alpha else image).convert("RGB"))
    except BAD_IMAGE as error:
        raise InputError(f"cannot read frame {name}: {image_problem(error)}.") from error


def walk(root: Path) -> Iterator[tuple[str, list[str]]]:
    """Folders at any depth with their files, hidden ones left out; links are followed, but not in circles."""
    seen = {os.path.realpath(root)}
    for folder, below, files in os.walk(root, followlinks=True):
        below[:] = sorted(name for name in below if not name.startswith("."))
        for name in list(below):
            place = os.path.realpath(Path(folder) / name)
            if place in seen:
                below.remove(name)
            seen.add(place)
        yield os.path.relpath(folder, root), sorted(name for name in files if not name.startswith("."))


def walk_frames(root: Path) -> list[tuple[str, list[str]]]:
    """Folders that hold images, with the images in natural order."""
    found = (
        (folder, [f for f in files if Path(f).suffix.lower() in IMAGE_SUFFIXES])
        for folder, files in walk(root)
    )
    return [(folder, sorted(images, key=natural)) for folder, images in found if images]


def natural(name: str) -> tuple[list[tuple[int, int, str]], str]:
    """A sort key that puts 2 before 10, and always 01 before 1."""
    pieces = [piece for piece in re.split(r"([0-9]+)", name) if piece]
    return [(0, int(x), "") if x[0] in "0123456789" else (1, 0, x) for x in pieces], name


def _explain_empty(root: Path) -> str:
    names = [name for _, _, files in os.walk(root) for name in files]
    videos = sum(Path(name).suffix.lower() in VIDEO_SUFFIXES for name in names)
    found = f"found {len(names)} other files" + (f", {videos} of them video files" if videos else "")
    hint = f"; tcore prepare {root} STORE makes a store of videos." if videos else "."
    return (
        f"no frames under {root} ({found}): expected folders of images such as {root}/VIDEO/00000.jpg{hint}"
    )
