"""Small packed stores."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from PIL import Image

from tcore.data.packed import shard_writer, write_index


def jpeg(color: tuple[int, int, int], size: tuple[int, int] = (8, 6)) -> bytes:
    """One image of a single color, (width, height) pixels."""
    buffer = io.BytesIO()
    Image.new("RGB", size, color).save(buffer, "jpeg", quality=95)
    return buffer.getvalue()


def pack(
    root: Path, shards: Sequence[Sequence[tuple[str, int]]], cuts: Mapping[str, Sequence[int]] | None = None
) -> Path:
    """A packed store of (name, number of frames); frame f of video v has one color, (10 v, 9 f, 0)."""
    written, video = [], 0
    for number, videos in enumerate(shards):
        with shard_writer(root, number) as write:
            for name, length in videos:
                for frame in range(length):
                    write.add(name, jpeg((10 * video, 9 * frame, 0)))
                write.finish(name, (6, 8), (cuts or {}).get(name, []))
                video += 1
            written.append(write.close())
    write_index(root, written, "videos", 2.0, {})
    return root
