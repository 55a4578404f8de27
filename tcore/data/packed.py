"""PackedStore: the frames of many videos in a few tar files, found through a memory-mapped index."""

import hashlib
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
from jaxtyping import Int64

from tcore.data.frames import Frame, FrameStore, decode_image
from tcore.errors import InputError
from tcore.files import read_json

STORE = "store.json"  # written last: where it is, the store is complete
FORMAT = "tcore frames 1"
KINDS = ("videos", "frames", "images", "rendered")
OPEN_SHARDS = 64  # kept open by each process

# Names, frames and cuts of all videos lie behind one another; the ends say whose they are.
INDEX: dict[str, np.dtype[Any]] = {
    "names": np.dtype(np.uint8),
    "name_ends": np.dtype(np.int64),
    "frame_ends": np.dtype(np.int64),
    "cut_ends": np.dtype(np.int64),
    "shards": np.dtype(np.int32),
    "heights": np.dtype(np.int32),
    "widths": np.dtype(np.int32),
    "offsets": np.dtype(np.int64),
    "sizes": np.dtype(np.int64),
    "cuts": np.dtype(np.int32),
}
PER_VIDEO = ("name_ends", "frame_ends", "cut_ends", "shards", "heights", "widths")
ENDS = {"name_ends": "names", "frame_ends": "offsets", "cut_ends": "cuts"}


def shard_path(root: Path, shard: int) -> Path:
    """The tar file of a shard."""
    return root / "shards" / f"{shard:06d}.tar"


def index_path(root: Path, name: str) -> Path:
    """The file of one array of the index."""
    return root / "index" / f"{name}.npy"


class PackedStore(FrameStore):
    """Frames in tar files under `shards/`, an index of arrays under `index/`, and `store.json` about both."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.about = _read_about(root)
        self._index = {name: _load(root, name) for name in INDEX}
        self._check_index()
        fps = self.about["fps"]
        self.fps = None if fps is None else float(fps)
        self.names = Names(self._index["names"], self._index["name_ends"])
        self.lengths = np.diff(self._index["frame_ends"], prepend=0)
        self._open: OrderedDict[int, _Shard] = OrderedDict()

    @property
    def kind(self) -> str:
        """What it was made from: videos, frames (folders of them) or images (each a video of one frame)."""
        return str(self.about["kind"])

    @property
    def sizes(self) -> Int64[np.ndarray, "videos 2"]:
        """Height and width of the first frame of every video."""
        return np.stack([self._index["heights"], self._index["widths"]], axis=1).astype(np.int64)

    def read(self, video: int, frames: Sequence[int]) -> list[Frame]:
        """Decode some frames of one video."""
        name = self.names[video]
        read = self.read_bytes(video, frames)
        return [
            decode_image(data, f"{frame} of video {name} in {self.shard_of(video)}")
            for frame, data in zip(frames, read, strict=True)
        ]

    def read_bytes(self, video: int, frames: Sequence[int]) -> list[bytes]:
        """Some frames of one video as they are stored."""
        ends = self._index["frame_ends"]
        first, end = int(ends[video - 1]) if video > 0 else 0, int(ends[video])
        if video < 0:
            raise IndexError(f"video {video} of {len(self)}")
        number = int(self._index["shards"][video])
        shard = self._shard(number)
        offsets, sizes = self._index["offsets"], self._index["sizes"]
        read = []
        for frame in frames:
            row = first + frame
            if not first <= row < end:
                raise IndexError(f"frame {frame} of {end - first} of video {self.names[video]}")
            offset, size = int(offsets[row]), int(sizes[row])
            if offset < 0 or size <= 0 or offset + size > shard.bytes:
                raise InputError(
                    f"store {self.root}: the index points outside {shard.path}; prepare it anew."
                )
            read.append(shard.read(offset, size))
        return read

    def shard_of(self, video: int) -> Path:
        """The tar file that holds a video."""
        return shard_path(self.root, int(self._index["shards"][video]))

    def cuts(self, video: int) -> tuple[int, ...]:
        """Frames that begin a new shot."""
        ends = self._index["cut_ends"]
        first = int(ends[video - 1]) if video else 0
        return tuple(self._index["cuts"][first : int(ends[video])].tolist())

    def all_cuts(self) -> tuple[Int64[np.ndarray, " cuts"], Int64[np.ndarray, " cuts"]]:
        """Video and frame of every cut."""
        counts = np.diff(self._index["cut_ends"], prepend=0)
        videos = np.repeat(np.arange(len(self), dtype=np.int64), counts)
        return videos, self._index["cuts"].astype(np.int64)

    def verify(self) -> list[str]:
        """Read everything once: a line for each thing that is not as it was written."""
        return list(self._problems())

    def _problems(self) -> Iterator[str]:
        for name, digest in self.about["index"].items():
            if name in INDEX and _sha256(index_path(self.root, name)) != digest:
                yield f"{index_path(self.root, name)}: other bytes than were written (sha256 differs)."
        for number, shard in enumerate(self.about["shards"]):
            path = shard_path(self.root, number)
            if not path.is_file():
                yield f"{path}: missing."
            elif (found := path.stat().st_size) != shard["bytes"]:
                yield f"{path}: {found} bytes instead of {shard['bytes']}."
            elif _sha256(path) != shard["sha256"]:
                yield f"{path}: other bytes than were written (sha256 differs)."
        yield from self._outside()

    def _outside(self) -> Iterator[str]:
        """Videos whose index entries leave their shard, or whose cuts leave the video."""
        known = np.array([shard["bytes"] for shard in self.about["shards"]], dtype=np.int64)
        offsets, sizes = self._index["offsets"], self._index["sizes"]
        room = np.repeat(known[self._index["shards"]], self.lengths)
        bad = (offsets < 0) | (sizes <= 0) | (sizes > room) | (offsets > room - sizes)
        of = np.searchsorted(self._index["frame_ends"], np.flatnonzero(bad), side="right")
        for video in np.unique(of).tolist():
            yield f"{self.shard_of(video)}: the index of video {self.names[video]} points outside the file."
        videos, frames = self.all_cuts()
        wrong = (frames <= 0) | (frames >= self.lengths[videos])
        for video in np.unique(videos[wrong]).tolist():
            yield f"{index_path(self.root, 'cuts')}: a cut of video {self.names[video]} is outside the video."

    def _shard(self, number: int) -> "_Shard":
        """An open shard; the least recently used one goes when there are too many."""
        shard = self._open.pop(number, None)
        if shard is None:
            shard = _Shard(shard_path(self.root, number), self.about["shards"][number]["bytes"])
        self._open[number] = shard
        if len(self._open) > OPEN_SHARDS:
            self._open.popitem(last=False)
        return shard

    def _check_index(self) -> None:
        """Refuse an index that does not fit together; each frame is looked at when it is read."""
        index, root = self._index, self.root
        videos = len(index["shards"])
        if videos == 0 or any(len(index[name]) != videos for name in PER_VIDEO):
            raise _broken(root, "arrays of different lengths")
        for ends, rows in ENDS.items():
            steps = np.diff(index[ends], prepend=0)
            if int(steps.min()) < (ends != "cut_ends") or int(index[ends][-1]) != len(index[rows]):
                raise _broken(root, f"{ends} do not fit {rows}")
        if len(index["sizes"]) != len(index["offsets"]):
            raise _broken(root, "sizes do not fit offsets")
        shards = index["shards"]
        if int(shards.min()) < 0 or int(shards.max()) >= len(self.about["shards"]):
            raise _broken(root, "a video in a shard that is not there")
        if int(index["heights"].min()) < 1 or int(index["widths"].min()) < 1:
            raise _broken(root, "a frame without pixels")

    def __getstate__(self) -> dict[str, Any]:
        # Another process maps the index and opens the shards itself.
        return {"root": self.root}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["root"])  # type: ignore[misc]


class Names(Sequence[str]):
    """Names of videos, decoded when they are asked for."""

    def __init__(self, data: np.ndarray, ends: np.ndarray) -> None:
        self._data, self._ends = data, ends

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        place = index + len(self) if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError(f"video {index} of {len(self)}")
        first = int(self._ends[place - 1]) if place else 0
        return os.fsdecode(self._data[first : int(self._ends[place])].tobytes())

    def __iter__(self) -> Iterator[str]:
        data, first = self._data.tobytes(), 0
        for end in self._ends.tolist():
            yield os.fsdecode(data[first:end])
            first = end

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


class _Shard:
    """One open tar file; it closes when nobody holds it, so that no thread reads from a closed one."""

    def __init__(self, path: Path, expected: int) -> None:
        self._fd = -1
        self.path, self.bytes = path, expected
        try:
            self._fd = os.open(path, os.O_RDONLY)
            found = os.fstat(self._fd).st_size
        except OSError as error:
            raise InputError(f"cannot read shard {path}: {error.strerror}.") from error
        if found != expected:
            raise self._cut_off(found)

    def read(self, offset: int, size: int) -> bytes:
        """Bytes from anywhere; no position is kept, so forked processes can share the file."""
        try:
            data = os.pread(self._fd, size, offset)
            while len(data) < size and (more := os.pread(self._fd, size - len(data), offset + len(data))):
                data += more
        except OSError as error:
            raise InputError(f"cannot read shard {self.path}: {error.strerror}.") from error
        if len(data) < size:
            raise self._cut_off(offset + len(data))
        return data

    def _cut_off(self, found: int) -> InputError:
        what = "cut off" if found < self.bytes else "not the file that was written"
        return InputError(
            f"shard {self.path} is {what}: {found} bytes instead of {self.bytes}; copy or prepare it anew."
        )

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


def _read_about(root: Path) -> dict[str, Any]:
    """What store.json says, after a look at whether it can be true."""
    path = root / STORE
    about = read_json(path)
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        found = about.get("format") if isinstance(about, dict) else about
        raise InputError(f"{path} is no store that this version reads: format {found!r}, need {FORMAT!r}.")
    fps, shards, index = about.get("fps"), about.get("shards"), about.get("index")
    fine = (
        "fps" in about
        and (fps is None or (isinstance(fps, int | float) and 0 < fps < 1e9))
        and about.get("kind") in KINDS
        and isinstance(index, dict)
        and isinstance(shards, list)
        and all(isinstance(s, dict) and _is_size(s.get("bytes")) and "sha256" in s for s in shards)
    )
    if not fine:
        raise InputError(f"{path} is damaged: copy it again, or prepare the store anew.")
    return about


def _is_size(value: Any) -> bool:
    """Whether a value can be the size of a file."""
    return isinstance(value, int) and 0 <= value < 2**62


def _load(root: Path, name: str) -> np.ndarray:
    """One array of the index, mapped into memory."""
    path = index_path(root, name)
    try:
        # Very small files may hold no element at all, which cannot be mapped.
        mapped = None if path.stat().st_size < 4096 else "r"
        array = np.load(path, mmap_mode=mapped)  # type: ignore[arg-type]
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}.") from error
    except Exception as error:  # a header that is no header can raise anything
        why = str(error).partition("\n")[0] or type(error).__name__
        raise InputError(f"{path} is damaged ({why}): copy it again, or prepare the store anew.") from error
    if not isinstance(array, np.ndarray) or array.dtype != INDEX[name] or array.ndim != 1:
        raise _broken(root, f"{name} is not a row of {INDEX[name]}")
    return np.asarray(array)  # a plain view: single elements come faster than from np.memmap


def _broken(root: Path, why: str) -> InputError:
    return InputError(f"the index of {root} is damaged ({why}): copy it again, or prepare the store anew.")


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return error.strerror or "unreadable"
