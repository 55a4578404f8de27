"""Writing a packed store: frames into tar files, one shard at a time, then the index over all of them."""

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tcore.data.packed import FORMAT, INDEX, STORE, index_path, shard_path
from tcore.files import atomic, write_text

BLOCK = tarfile.BLOCKSIZE


@dataclass(frozen=True)
class PackedVideo:
    """One video in a shard: where its frames are, and what is known about them."""

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
    """A tar file that grows frame by frame; a video that goes wrong can be taken back."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb+")
        self.videos: list[PackedVideo] = []
        self.begin()

    def begin(self) -> None:
        """Start a video, or start it again: what was added to it before is gone."""
        start = self.videos[-1].offsets[-1] + _padded(self.videos[-1].sizes[-1]) if self.videos else 0
        self._file.seek(start)
        self._file.truncate()
        self._end = start
        self._offsets: list[int] = []
        self._sizes: list[int] = []

    def add(self, name: str, data: bytes) -> None:
        """Append the next frame of the current video, a JPEG or PNG file."""
        suffix = ".png" if data[:4] == b"\x89PNG" else ".jpg"
        head = _header(f"{name}/{len(self._sizes):05d}{suffix}", len(data))
        self._file.write(head + data + bytes(_padded(len(data)) - len(data)))
        self._offsets.append(self._end + len(head))
        self._sizes.append(len(data))
        self._end += len(head) + _padded(len(data))

    def finish(self, name: str, size: tuple[int, int], cuts: Sequence[int]) -> PackedVideo:
        """End the current video, which must have frames."""
        video = PackedVideo(name, *size, self._offsets, self._sizes, list(cuts))
        self.videos.append(video)
        self.begin()
        return video

    def close(self) -> Shard:
        """End the tar file."""
        self._file.write(bytes(2 * BLOCK))
        self._file.flush()
        self._file.seek(0)
        digest = hashlib.file_digest(self._file, "sha256").hexdigest()
        size = self._file.seek(0, os.SEEK_END)
        self.abandon()
        return Shard(size, digest, self.videos)

    def abandon(self) -> None:
        """Let go of the file, whatever state it is in."""
        self._file.close()


@contextmanager
def shard_writer(root: Path, number: int) -> Iterator[ShardWriter]:
    """A writer whose file becomes shard `number` when the block ends well; close it inside the block."""
    with atomic(shard_path(root, number)) as temporary:
        writer = ShardWriter(temporary)
        try:
            yield writer
        finally:
            writer.abandon()


def write_index(
    root: Path, shards: Sequence[Shard], kind: str, fps: float | None, made: dict[str, Any]
) -> None:
    """Write the index, and store.json when all the rest is there."""
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
        "offsets": _join([video.offsets for video in videos]),
        "sizes": _join([video.sizes for video in videos]),
        "cuts": _join([video.cuts for video in videos]),
    }
    digests = {}
    for name, dtype in INDEX.items():
        buffer = io.BytesIO()
        np.save(buffer, np.asarray(columns[name], dtype=dtype))
        with atomic(index_path(root, name)) as temporary:
            temporary.write_bytes(buffer.getbuffer())
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
    write_text(root / STORE, json.dumps(about, indent=1) + "\n")


def to_json(shard: Shard) -> dict[str, Any]:
    """A shard as plain values."""
    return asdict(shard)


def from_json(values: dict[str, Any]) -> Shard:
    """A shard from plain values."""
    return Shard(values["bytes"], values["sha256"], [PackedVideo(**video) for video in values["videos"]])


def _join(rows: list[list[int]]) -> np.ndarray:
    """Rows behind one another, without a Python list of all of them."""
    return np.concatenate([np.asarray(row, np.int64) for row in rows]) if rows else np.zeros(0, np.int64)


def _header(name: str, size: int) -> bytes:
    """A tar header that depends on name and size alone."""
    member = tarfile.TarInfo(name)
    member.size, member.mode = size, 0o644
    return member.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK
