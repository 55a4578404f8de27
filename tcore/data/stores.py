"""FrameStore: videos as ordered frames, whether on disk, packed, rendered, or panned over photographs."""

import copy
import hashlib
import math
import os
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int64, UInt8
from PIL import Image

from tcore.data.images import IMAGE_SUFFIXES, Frame, ahead, decode_image, read_file
from tcore.data.packed import STORE, PackedVideos, shard_path
from tcore.data.rendered import render_video
from tcore.errors import InputError

VIDEO_SUFFIXES = set(
    ".mp4 .avi .mkv .webm .mov .m4v .mpg .mpeg .flv .wmv .ts .mts .m2ts .3gp .ogv .vob .mxf .f4v .asf .divx "
    ".rm .rmvb .gif .y4m .ivf .h264 .264 .h265 .265 .hevc".split()
)
EXAMPLE = "CLIPS*5+photographs:PHOTOS+STORE"
RATE = "fps.txt"  # beside the frames of a video: its own frames per second
PHOTOGRAPHS = "photographs:"
# A camera that moves over photographs:
MOVED_FRAMES = 20
WINDOW = 0.7  # share of the photograph's sides that a frame shows at the widest; the rest is room to move in
# Largest turn, zoom (as a factor, either way) and change of brightness (likewise) over a video.
TURN, ZOOM, LIGHT = math.radians(12), 1.25, 1.2


class FrameStore:
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
    rates: Float64[np.ndarray, " videos"] | None = None
    """Frames per second of each video, where they differ or have their own; nan: unknown."""

    def __len__(self) -> int:
        return len(self.names)

    def read(self, video: int, frames: Sequence[int]) -> list[Frame]:
        """Pixels of some frames of one video."""
        stored = zip(frames, self.read_bytes(video, frames), strict=True)
        return [decode_image(data, self.where(video, frame)) for frame, data in stored]

    def read_bytes(self, video: int, frames: Sequence[int]) -> list[bytes]:
        """Some frames of one video as they are stored; only stores that hold image files have this."""
        raise NotImplementedError

    def where(self, video: int, frame: int) -> str:
        """What an error calls a frame."""
        return f"{frame} of video {self.names[video]}"

    def cuts(self, video: int) -> tuple[int, ...]:
        """Frames that begin a new shot, where the store knows them."""
        return ()

    def all_cuts(self) -> tuple[Int64[np.ndarray, " cuts"], Int64[np.ndarray, " cuts"]]:
        """Video and frame of every cut."""
        rows = [(video, frame) for video in range(len(self)) for frame in self.cuts(video)]
        videos, frames = np.array(rows, dtype=np.int64).reshape(-1, 2).T
        return videos, frames

    def fingerprint(self) -> str:
        """A short hash of the videos' names and lengths, which changes when the data does."""
        digest = hashlib.sha256()
        for name, length in zip(self.names, self.lengths.tolist(), strict=True):
            digest.update(f"{name}\0{length}\n".encode("utf-8", "surrogateescape"))
        return digest.hexdigest()[:16]

    @staticmethod
    def open(path: str | Path) -> "FrameStore":
        """Open a store on disk: packed by `tcore prepare`, or a folder of frame folders."""
        root = Path(path)
        if (root / STORE).is_file():
            return PackedStore(root)
        if (root / "plan.json").is_file() and (root / "shards").is_dir():
            raise InputError(f"store {root} is unfinished: rerun the same tcore prepare command to resume.")
        return FolderStore(root)

    @staticmethod
    def rendered(*, videos: int = 256, frames: int = 20, size: int = 128, seed: int = 0) -> "FrameStore":
        """Rendered training videos; the same arguments give the same videos."""
        return RenderedStore(videos, frames, size, seed)


class FolderStore(FrameStore):
    """A folder of frame folders at any depth: `<any>/<video>/00000.jpg`."""

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            problem = "is a file" if root.exists() else "does not exist"
            raise InputError(f"{root} {problem}: give a folder of frame folders, or of images.")
        self.root = root
        folders = walk_frames(root)
        if not folders:
            raise InputError(_explain_empty(root))
        self.names, self.files = [name for name, _, _ in folders], [images for _, images, _ in folders]
        self.lengths = np.array([len(images) for images in self.files], dtype=np.int64)
        if any(rated for _, _, rated in folders):
            rates = (read_rate(root / name / RATE) if rated else math.nan for name, _, rated in folders)
            self.rates = np.array(list(rates))

    def read_bytes(self, video: int, frames: Sequence[int]) -> list[bytes]:
        """Some image files of one video."""
        return [read_file(self.path(video, frame)) for frame in frames]

    def where(self, video: int, frame: int) -> str:
        """The file of a frame."""
        return str(self.path(video, frame))

    def path(self, video: int, frame: int) -> Path:
        """The file of a frame."""
        return self.root / self.names[video] / self.files[video][frame]


class ImageStore(FolderStore):
    """The images of a folder, at any depth; each is a video of one frame, named by its relative path."""

    def __init__(self, folders: FolderStore) -> None:
        self.root = folders.root
        videos = zip(folders.names, folders.files, strict=True)
        self.names = [os.path.normpath(f"{folder}/{name}") for folder, files in videos for name in files]
        self.lengths = np.ones(len(self.names), dtype=np.int64)

    def path(self, video: int, frame: int) -> Path:
        """The file of an image."""
        return self.root / self.names[video]


class PackedStore(PackedVideos, FrameStore):
    """Frames in tar files, as `tcore prepare` writes them."""

    def where(self, video: int, frame: int) -> str:
        """What an error calls a frame."""
        shard = shard_path(self.root, int(self._index["shards"][video]))
        return f"{super().where(video, frame)} in {shard}"


class RenderedStore(FrameStore):
    """Rendered videos; each one is kept once it has been rendered."""

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
            rendered.frames.setflags(write=False)  # callers get views of the kept video itself
            self._kept[video] = rendered.frames
        return [self._kept[video][index] for index in frames]


class Pose(NamedTuple):
    """Camera pose: the center as a share of the available room, turn, zoom and brightness."""

    x: float
    y: float
    turn: float
    zoom: float
    light: float


class MovedStore(FrameStore):
    """A video for every photograph: a camera pans, zooms and turns on a path given by (seed, video)."""

    fps = 2.0

    def __init__(self, photographs: FrameStore, seed: int) -> None:
        self.photographs, self.seed = photographs, seed
        self.names = [f"moved-{seed}/{name}" for name in photographs.names]
        self.lengths = np.full(len(photographs), MOVED_FRAMES, dtype=np.int64)

    def read(self, video: int, frames: Sequence[int]) -> list[Frame]:
        """What the camera sees at some times; the photograph is decoded once."""
        photograph = Image.fromarray(self.photographs.read(video, [0])[0])
        last = int(self.lengths[video]) - 1
        return [look(photograph, pose(self.seed, video, frame / last)) for frame in frames]


def pose(seed: int, video: int, time: float) -> Pose:
    """The pose at a time between 0 and 1: a drift and a slow swing, each with its own direction and phase."""
    rng = np.random.default_rng((seed, video))
    drift, swing, phase = rng.uniform(-1, 1, 5), rng.uniform(-1, 1, 5), rng.uniform(0, 2 * math.pi, 5)
    path = 0.7 * drift * (2 * time - 1) + 0.3 * swing * np.sin(2 * math.pi * time + phase)
    x, y, turn, zoom, light = (float(value) for value in path)
    return Pose(x, y, TURN * turn, ZOOM**zoom, LIGHT**light)


def look(photograph: Image.Image, camera: Pose) -> Frame:
    """The part of a photograph that a camera sees; the frame never leaves the photograph.

    >>> gray = Image.new("RGB", (100, 80), (100, 100, 100))
    >>> look(gray, Pose(1.0, -1.0, 0.2, 1.0, 1.0)).shape
    (56, 70, 3)
    """
    width, height = photograph.size
    frame = (max(1, round(WINDOW * width)), max(1, round(WINDOW * height)))
    cosine, sine = math.cos(camera.turn), math.sin(camera.turn)
    # Half the sides of the upright box around the turned frame, before zooming.
    reach = (
        (frame[0] * abs(cosine) + frame[1] * abs(sine)) / 2,
        (frame[0] * abs(sine) + frame[1] * abs(cosine)) / 2,
    )
    # A wide zoom together with a turn may need more than the photograph shows: limit the zoom.
    scale = min(1 / camera.zoom, width / 2 / reach[0], height / 2 / reach[1])
    center = (
        width / 2 + camera.x * (width / 2 - scale * reach[0]),
        height / 2 + camera.y * (height / 2 - scale * reach[1]),
    )
    across, down = (scale * cosine, scale * sine), (-scale * sine, scale * cosine)
    start = tuple(
        c - a * frame[0] / 2 - d * frame[1] / 2 for c, a, d in zip(center, across, down, strict=True)
    )
    numbers = (across[0], down[0], start[0], across[1], down[1], start[1])
    seen = photograph.transform(frame, Image.Transform.AFFINE, numbers, Image.Resampling.BICUBIC)
    lit = np.asarray(seen, dtype=np.float32) * camera.light
    return np.clip(np.rint(lit), 0, 255).astype(np.uint8)


class MixedStore(FrameStore):
    """The videos of several stores, one store after another, each store repeated `times` times."""

    def __init__(self, stores: Sequence[FrameStore], times: Sequence[int]) -> None:
        rates = {store.fps for store in stores}
        self.fps = rates.pop() if len(rates) == 1 else None
        copies = [
            (f"{number}.{copy}", store)
            for number, store in enumerate(stores)
            for copy in range(times[number])
        ]
        self.stores = [store for _, store in copies]
        self.names = [f"{prefix}/{name}" for prefix, store in copies for name in store.names]
        self.lengths = np.concatenate([store.lengths for store in self.stores])
        if self.fps is None or any(store.rates is not None for store in stores):
            known = [
                np.full(len(store), store.fps or math.nan) if store.rates is None else store.rates
                for store in self.stores
            ]
            self.rates = np.concatenate(known)
        self._ends = np.cumsum([len(store) for store in self.stores])

    def _place(self, video: int) -> tuple[FrameStore, int]:
        """The store that holds a video, and its number there."""
        number = int(np.searchsorted(self._ends, video, side="right"))
        store = self.stores[number]
        return store, video - int(self._ends[number]) + len(store)

    def read(self, video: int, frames: Sequence[int]) -> list[Frame]:
        """Frames of one video, from the store that holds it."""
        store, number = self._place(video)
        return store.read(number, frames)

    def cuts(self, video: int) -> tuple[int, ...]:
        """Frames that begin a new shot, where the store knows them."""
        store, number = self._place(video)
        return store.cuts(number)


class Room:
    """Memory for frames, which several threads take; it counts as full when a hundredth is left."""

    def __init__(self, gib: float) -> None:
        self._all = self._left = gib * 2**30
        self._lock = threading.Lock()

    @property
    def full(self) -> bool:
        """Whether it is no longer worth trying what fits."""
        return self._left < self._all / 100

    def take(self, count: int) -> bool:
        """Take this many bytes, if they are there."""
        with self._lock:
            fits = count <= self._left
            self._left -= count if fits else 0
            return fits

    def give_back(self, count: int) -> None:
        """Bytes that were not needed after all."""
        with self._lock:
            self._left += count


class HeldStore(FrameStore):
    """A store of which as many videos as there is room for are decoded once and kept.

    Reading processes that are forked afterwards share the pixels. Other videos are read as before.
    """

    def __init__(self, store: FrameStore, room: Room, threads: int) -> None:
        self.store, self.names, self.lengths = store, store.names, store.lengths
        self.fps, self.rates, self._room = store.fps, store.rates, room
        self._kept = list(ahead(self._decode, range(len(store)), threads))

    def _decode(self, video: int) -> list[Frame] | None:
        """All frames of a video; None where there is no room for them, or one of them is unreadable."""
        length, taken = int(self.lengths[video]), 0
        if self._room.full:
            return None
        try:
            first = self.store.read(video, [0])
            if not self._room.take(length * first[0].nbytes):  # before the others are in memory
                return None
            taken = length * first[0].nbytes
            return first + self.store.read(video, range(1, length))
        except InputError:
            self._room.give_back(taken)
            return None

    def read(self, video: int, frames: Sequence[int]) -> list[Frame]:
        """Look the frames up."""
        kept = self._kept[video]
        return self.store.read(video, frames) if kept is None else [kept[index] for index in frames]

    def cuts(self, video: int) -> tuple[int, ...]:
        """Frames that begin a new shot, where the store knows them."""
        return self.store.cuts(video)


def hold_frames(store: FrameStore, gib: float, threads: int) -> FrameStore:
    """The store with its frames in memory; of a mixture, each store once, however often it is repeated."""
    room = Room(gib)

    def hold(one: FrameStore) -> FrameStore:
        return HeldStore(one, room, threads) if can_hold(one) else one

    if not isinstance(store, MixedStore):
        return hold(store)
    held = {one: hold(one) for one in dict.fromkeys(store.stores)}
    mixture = copy.copy(store)
    mixture.stores = [held[one] for one in store.stores]
    return mixture


def can_hold(store: FrameStore) -> bool:
    """Whether frames of the store are decoded; rendered ones are kept anyway."""
    parts = store.stores if isinstance(store, MixedStore) else [store]
    return not all(isinstance(one, RenderedStore) for one in parts)


def open_mixture(frames: str, seed: int) -> FrameStore:
    """The store that a --frames argument names: one folder, moved photographs, or a mixture."""
    if Path(frames).exists():  # a path may contain any character
        return FrameStore.open(frames)
    stores, times = list[FrameStore](), list[int]()
    for piece in frames.split("+"):
        match = re.fullmatch(rf"({PHOTOGRAPHS})?(?P<place>.+?)(\*(?P<times>[0-9]+))?", piece.strip())
        if match is None or match["times"] == "0" or match["place"] == PHOTOGRAPHS:
            raise InputError(f"--frames {frames}: cannot read {piece!r}; write it as in {EXAMPLE}.")
        place = match["place"]
        stores.append(MovedStore(open_images(place), seed) if match[1] else FrameStore.open(place))
        times.append(int(match["times"] or 1))
    return stores[0] if times == [1] else MixedStore(stores, times)


def open_images(path: str | Path) -> FrameStore:
    """A store of single images: a packed one, or any folder of images."""
    store = FrameStore.open(path)
    if isinstance(store, FolderStore):
        return ImageStore(store)
    if store.lengths.max() > 1:
        raise InputError(
            f"{path} holds videos of up to {int(store.lengths.max())} frames, not single images: "
            "pack images with tcore prepare IMAGES STORE --images; to train on videos, use --source videos."
        )
    return store


class Clips(NamedTuple):
    """Parts of videos that samples are drawn from: whole videos, or their shots."""

    video: Int64[np.ndarray, " clips"]
    start: Int64[np.ndarray, " clips"]
    length: Int64[np.ndarray, " clips"]

    def select(self, keep: np.ndarray) -> "Clips":
        """Some of the clips."""
        return Clips(self.video[keep], self.start[keep], self.length[keep])


def list_clips(store: FrameStore, split_at_cuts: bool) -> Clips:
    """One clip per video, or one per shot."""
    everything = np.arange(len(store), dtype=np.int64)
    lengths = np.asarray(store.lengths)
    if not split_at_cuts:
        return Clips(everything, np.zeros_like(everything), lengths)
    cut_video, cut = store.all_cuts()
    inside = (cut > 0) & (cut < lengths[cut_video])
    marks = np.stack([np.append(everything, cut_video[inside]), np.append(0 * everything, cut[inside])])
    video, start = np.unique(marks, axis=1)  # sorted by video, then by frame
    end = np.append(start[1:], 0)
    last = np.append(video[1:] != video[:-1], True)
    return Clips(video, start, np.where(last, lengths[video], end) - start)


def walk(root: Path) -> Iterator[tuple[str, list[str]]]:
    """Folders at any depth with their files, without hidden ones; links are followed, but not in circles."""
    seen = {os.path.realpath(root)}
    for folder, below, files in os.walk(root, followlinks=True):
        below[:] = sorted(name for name in below if not name.startswith("."))
        for name in list(below):
            place = os.path.realpath(Path(folder) / name)
            if place in seen:
                below.remove(name)
            seen.add(place)
        yield os.path.relpath(folder, root), sorted(name for name in files if not name.startswith("."))


def walk_files(root: Path) -> list[str]:
    """Files at any depth, by their paths relative to the root."""
    return [os.path.normpath(f"{folder}/{name}") for folder, files in walk(root) for name in files]


def walk_frames(root: Path) -> list[tuple[str, list[str], bool]]:
    """Folders that hold images, their images in natural order, and whether a file says their rate."""
    found = ((folder, image_names(files), RATE in files) for folder, files in walk(root))
    return sorted((row for row in found if row[1]), key=lambda row: natural(row[0]))


def image_names(names: Iterable[str]) -> list[str]:
    """The images among some files, in natural order."""
    return sorted((name for name in names if Path(name).suffix.lower() in IMAGE_SUFFIXES), key=natural)


def read_rate(path: Path) -> float:
    """The frames per second that a file beside frames holds."""
    text = read_file(path)[:100].decode("ascii", "replace").strip()
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not 0 < rate < 1e6:
        raise InputError(f"{path} holds {text!r}: write frames per second, as in 29.97.")
    return rate


def list_images(folder: Path) -> tuple[Path, ...]:
    """Images of a folder in natural order."""
    names = (path.name for path in folder.iterdir() if path.name[0] != ".")
    return tuple(folder / name for name in image_names(names))


def natural(name: str) -> tuple[list[tuple[int, int, str]], str]:
    """A sort key that puts 2 before 10, and always 01 before 1."""
    pieces = [piece for piece in re.split(r"([0-9]+)", name) if piece]
    return [(0, int(x), "") if x[0] in "0123456789" else (1, 0, x) for x in pieces], name


def _explain_empty(root: Path) -> str:
    files = walk_files(root)
    videos = sum(Path(name).suffix.lower() in VIDEO_SUFFIXES for name in files)
    hint = f"; tcore prepare {root} STORE packs the {videos} video files" if videos else ""
    return (
        f"no frames under {root} (found {len(files)} other files): expected folders of images such as "
        f"{root}/VIDEO/00000.jpg{hint}."
    )
