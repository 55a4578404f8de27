"""Packed videos on disk: frames in tar files under `shards/`, arrays under `index/`.

`store.json` describes both and is written last: where it is, the store is complete.
"""

import hashlib
import io
import os
import tarfile
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64

from tcore.errors import InputError, reason
from tcore.files import atomic, misfit, open_regular, read_json, sha256, whole, write_bytes, write_json

STORE = "store.json"
FORMAT = "tcore frames 1"
KINDS = ("videos", "frames", "images", "rendered")
OPEN_SHARDS = 64  # kept open by each process

# Names, frames and cuts of all videos are concatenated; the "ends" say where each video's entries stop.
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


class PackedVideos:
    """Packed videos, opened for reading: names, lengths and cuts from the index, frames as stored bytes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.about = _read_about(root)
        self._index = {name: _load(root, name) for name in INDEX}
        self._check_index()
        fps = self.about["fps"]
        self.fps = None if fps is None else float(fps)
        text, ends = self._index["names"].tobytes(), self._index["name_ends"].tolist()
        self.names: Sequence[str] = [os.fsdecode(text[a:b]) for a, b in pairwise([0, *ends])]
        self.lengths = np.diff(self._index["frame_ends"], prepend=0)
        sizes = [shard["bytes"] for shard in self.about["shards"]]
        # The least recently used shard is closed when there are too many.
        self._shard = lru_cache(OPEN_SHARDS)(lambda n: _OpenShard(shard_path(root, n), sizes[n]))

    @property
    def kind(self) -> str:
        """What it was made from: videos, frames (folders of them), images (one frame each) or rendered."""
        return str(self.about["kind"])

    def read_bytes(self, video: int, frames: Sequence[int]) -> list[bytes]:
        """Some frames of one video as they are stored."""
        if not 0 <= video < len(self.names):
            raise IndexError(f"video {video} of {len(self.names)}")
        first, end = self._range("frame_ends", video)
        shard = self._shard(int(self._index["shards"][video]))
        offsets, sizes = self._index["offsets"], self._index["sizes"]
        read = []
        for frame in frames:
            row = first + frame
            if not first <= row < end:
                raise IndexError(f"frame {frame} of {end - first} of video {self.names[video]}")
            offset, size = int(offsets[row]), int(sizes[row])
            if offset < 0 or size <= 0 or offset + size > shard.bytes:
                raise InputError(
                    f"store {self.root}: the index points outside {shard.path}; prepare it again."
                )
            read.append(shard.read(offset, size))
        return read

    def sizes(self, video: int) -> tuple[int, ...]:
        """Sizes in bytes of the frames of a video."""
        first, end = self._range("frame_ends", video)
        return tuple(self._index["sizes"][first:end].tolist())

    def cuts(self, video: int) -> tuple[int, ...]:
        """Frames that begin a new shot."""
        first, end = self._range("cut_ends", video)
        return tuple(self._index["cuts"][first:end].tolist())

    def all_cuts(self) -> tuple[Int64[np.ndarray, " cuts"], Int64[np.ndarray, " cuts"]]:
        """Video and frame of every cut."""
        counts = np.diff(self._index["cut_ends"], prepend=0)
        videos = np.repeat(np.arange(len(self.names), dtype=np.int64), counts)
        return videos, self._index["cuts"].astype(np.int64)

    def verify(self, full: bool = True) -> list[str]:
        """A line for each file that is missing or not as it was written; `full` compares every byte."""
        problems, whole = [], list[tuple[Path, str]]()
        for number, shard in enumerate(self.about["shards"]):
            path = shard_path(self.root, number)
            found = path.stat().st_size if path.is_file() else 0
            if found == shard["bytes"]:
                whole.append((path, shard["sha256"]))
            else:
                problems.append(f"{path}: {found} bytes instead of {shard['bytes']}.")
        whole += [(index_path(self.root, name), self.about["index"].get(name)) for name in INDEX]
        changed = [path for path, digest in whole if full and sha256(path) != digest]
        return problems + [f"{path}: changed since it was written (sha256 differs)." for path in changed]

    def _range(self, ends: str, video: int) -> tuple[int, int]:
        """First and last (exclusive) entry of a video."""
        return int(self._index[ends][video - 1]) if video else 0, int(self._index[ends][video])

    def _check_index(self) -> None:
        """Refuse an inconsistent index; frame positions are checked when they are read."""
        index = self._index
        shards, videos = index["shards"], len(index["shards"])
        fine = (
            videos > 0
            and all(len(index[name]) == videos for name in PER_VIDEO)
            and all(int(index[ends][-1]) == len(index[rows]) for ends, rows in ENDS.items())
            and len(index["sizes"]) == len(index["offsets"])
            # Every video has a name and frames, but not every one has cuts.
            and all(int(np.diff(index[ends], prepend=0).min()) >= (ends != "cut_ends") for ends in ENDS)
            and 0 <= int(shards.min()) <= int(shards.max()) < len(self.about["shards"])
            and min(int(index[name].min()) for name in ("heights", "widths")) > 0
        )
        if not fine:
            raise _damaged_index(self.root, "its arrays do not fit each other")

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process reads the index and opens the shards itself.
        return type(self), (self.root,)


class _OpenShard:
    """One open tar file; it closes with its last reference, so no thread reads from a closed one."""

    def __init__(self, path: Path, expected: int) -> None:
        self.path, self.bytes = path, expected
        try:
            file = open_regular(path)
        except OSError as error:
            raise InputError(f"cannot read shard {path}: {reason(error)}.") from error
        self._fd = file.fileno()
        weakref.finalize(self, file.close)
        self._check_size(os.fstat(self._fd).st_size)

    def read(self, offset: int, size: int) -> bytes:
        """Bytes from anywhere; without a file position, so that forked processes can share the file."""
        try:
            data = os.pread(self._fd, size, offset)
        except OSError as error:
            raise InputError(f"cannot read shard {self.path}: {reason(error)}.") from error
        if len(data) < size:
            self._check_size(offset + len(data))
        return data

    def _check_size(self, found: int) -> None:
        if found != self.bytes:
            what = "cut off" if found < self.bytes else "not the file that was written"
            sizes = f"{found} bytes instead of {self.bytes}"
            raise InputError(f"shard {self.path} is {what}: {sizes}; copy or prepare it again.")


def _read_about(root: Path) -> dict[str, Any]:
    """The contents of store.json, validated."""
    path = root / STORE
    about = read_json(path)
    try:
        fps = about["fps"]
        fine = (
            about["format"] == FORMAT
            and (fps is None or (isinstance(fps, int | float) and 0 < fps < 1e9))
            and about["kind"] in KINDS
            and not misfit(about, {"made": dict, "index": dict, "shards": [{"bytes": whole, "sha256": str}]})
        )
    except (LookupError, TypeError):
        fine = False
    if not fine:
        raise InputError(
            f"{path} is damaged, or not a store this version reads ({FORMAT!r}): copy or prepare it again."
        )
    return dict(about)


def _load(root: Path, name: str) -> np.ndarray:
    """One array of the index; not mapped: a file that is cut off while in use would end the process."""
    path = index_path(root, name)
    try:
        with open_regular(path) as file:
            array = np.load(file)
    except Exception as error:  # a broken header can raise anything
        raise _damaged_index(root, f"{path.name}: {str(error).partition(chr(10))[0]}") from error
    if not isinstance(array, np.ndarray) or array.dtype != INDEX[name] or array.ndim != 1:
        raise _damaged_index(root, f"{name} is not a row of {INDEX[name]}")
    return array


def _damaged_index(root: Path, why: str) -> InputError:
    return InputError(f"the index of {root} is damaged ({why}): copy or prepare the store again.")


@dataclass(frozen=True)
class PackedVideo:
    """One video in a shard: where its frames are, their size, and its cuts."""

    name: str
    height: int
    width: int
    offsets: list[int]
    sizes: list[int]
    cuts: list[int]


@dataclass(frozen=True)
class Shard:
    """One finished tar file."""

    bytes: int
    sha256: str
    videos: list[PackedVideo]


class ShardWriter:
    """A tar file that grows frame by frame; a video that fails can be taken back."""

    def __init__(self, file: io.BufferedRandom) -> None:
        self._file = file
        self.videos: list[PackedVideo] = []
        self._end = 0
        self.begin()

    def begin(self) -> None:
        """Start a video, or start it over: what was added since the last `finish` is removed."""
        start = self.videos[-1].offsets[-1] + _padded(self.videos[-1].sizes[-1]) if self.videos else 0
        self._file.seek(start)
        self._file.truncate()
        self._end = start
        self._offsets: list[int] = []
        self._sizes: list[int] = []

    def add(self, name: str, data: bytes) -> None:
        """Append the next frame of the current video, a JPEG or PNG file."""
        suffix = ".png" if data[:4] == b"\x89PNG" else ".jpg"
        member = tarfile.TarInfo(f"{name}/{len(self._sizes):05d}{suffix}")
        member.size, member.mode = len(data), 0o644  # the header depends on nothing else
        head = member.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")
        self._file.write(head + data + bytes(_padded(len(data)) - len(data)))
        self._offsets.append(self._end + len(head))
        self._sizes.append(len(data))
        self._end += len(head) + _padded(len(data))

    def finish(self, name: str, size: tuple[int, int], cuts: Sequence[int]) -> None:
        """End the current video, which must have frames, of this height and width."""
        self.videos.append(PackedVideo(name, *size, self._offsets, self._sizes, list(cuts)))
        self.begin()

    def close(self) -> Shard:
        """End the tar file."""
        self._file.write(bytes(2 * tarfile.BLOCKSIZE))
        size = self._file.tell()
        self._file.seek(0)
        return Shard(size, hashlib.file_digest(self._file, "sha256").hexdigest(), self.videos)


@contextmanager
def shard_writer(root: Path, number: int) -> Iterator[ShardWriter]:
    """A writer whose file becomes shard `number` when the block succeeds; close it inside the block."""
    with atomic(shard_path(root, number)) as temporary, temporary.open("wb+") as file:
        yield ShardWriter(file)


def write_index(
    root: Path, shards: Sequence[Shard], kind: str, fps: float | None, made: dict[str, Any]
) -> None:
    """Write the index, then store.json, which completes the store."""
    rows = [(number, video) for number, shard in enumerate(shards) for video in shard.videos]
    videos = [video for _, video in rows]
    names = [os.fsencode(video.name) for video in videos]
    columns: dict[str, Any] = {
        "names": np.frombuffer(b"".join(names), np.uint8),
        "name_ends": np.cumsum([len(name) for name in names]),
        "frame_ends": np.cumsum([len(video.sizes) for video in videos]),
        "cut_ends": np.cumsum([len(video.cuts) for video in videos]),
        "shards": [number for number, _ in rows],
        "heights": [video.height for video in videos],
        "widths": [video.width for video in videos],
        "offsets": np.concatenate([video.offsets for video in videos]),
        "sizes": np.concatenate([video.sizes for video in videos]),
        "cuts": np.concatenate([video.cuts for video in videos]),
    }
    digests = {}
    for name, dtype in INDEX.items():
        buffer = io.BytesIO()
        np.save(buffer, np.asarray(columns[name], dtype=dtype))
        write_bytes(index_path(root, name), buffer.getvalue())
        digests[name] = hashlib.sha256(buffer.getbuffer()).hexdigest()
    about = {
        "format": FORMAT,
        "kind": kind,
        "fps": fps,
        "videos": len(videos),
        "frames": int(columns["frame_ends"][-1]),
        "made": made,
        "index": digests,
        "shards": [{"bytes": shard.bytes, "sha256": shard.sha256} for shard in shards],
    }
    write_json(root / STORE, about)


def _padded(size: int) -> int:
    return -(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
