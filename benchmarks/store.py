"""A store of the size of Kinetics-400: time and memory to open, random triples per second.

`python benchmarks/store.py` makes it in a temporary folder, of shards that are holes: 100 MB on disk.
"""

import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from tcore.data.packed import PackedVideo, Shard, write_index
from tcore.data.stores import PackedStore, list_clips

VIDEOS, FRAMES, PER_SHARD, SIZE = 240_000, 20, 256, 20_000
MEMBER = 512 + -(-SIZE // 512) * 512


def make(root: Path) -> None:
    """Shards of holes: only the index is written out."""
    (root / "shards").mkdir(parents=True)
    shards: list[Shard] = []
    for first in range(0, VIDEOS, PER_SHARD):
        videos = []
        for number in range(first, min(first + PER_SHARD, VIDEOS)):
            start = (number - first) * FRAMES * MEMBER + 512
            offsets = [start + frame * MEMBER for frame in range(FRAMES)]
            videos.append(
                PackedVideo(
                    f"class-{number % 400:03d}/video-{number:08d}", 256, 340, offsets, [SIZE] * FRAMES, [9]
                )
            )
        size = len(videos) * FRAMES * MEMBER + 1024
        with (root / "shards" / f"{len(shards):06d}.tar").open("wb") as file:
            file.truncate(size)
        shards.append(Shard(size, "", videos))
    write_index(root, shards, "videos", 2.0, {})


def resident_mb() -> float:
    """Memory that this process holds now; the peak that getrusage knows may be the parent's."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def measure(root: Path) -> None:
    """Open and read, in a process that did nothing else."""
    before = resident_mb()
    started = time.perf_counter()
    store = PackedStore(root)
    opened = time.perf_counter() - started
    memory = resident_mb()
    print(f"open {len(store):,} videos: {opened:.2f} s (wanted: 3)")
    print(f"memory: {memory:.0f} MB (wanted: 300), of which {before:.0f} MB were there before (torch)")
    for name, function in (
        ("fingerprint", store.fingerprint),
        ("clips split at cuts", lambda: list_clips(store, split_at_cuts=True)),
    ):
        started = time.perf_counter()
        function()
        print(f"{name}: {time.perf_counter() - started:.2f} s")
    rng = np.random.default_rng(0)
    videos = rng.integers(0, len(store), 20_000).tolist()
    frames = np.sort(rng.integers(0, FRAMES, (len(videos), 3))).tolist()
    for _ in range(2):  # the second time from the page cache
        started = time.perf_counter()
        for video, three in zip(videos, frames, strict=True):
            store.read_bytes(video, three)
        rate = len(videos) / (time.perf_counter() - started)
    print(f"random triples of {SIZE:,} bytes on one core: {rate:,.0f}/s (wanted: 5,000)")


def main() -> None:
    if len(sys.argv) == 2:
        measure(Path(sys.argv[1]))
        return
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder) / "store")
        subprocess.run([sys.executable, __file__, str(Path(folder) / "store")], check=True)


if __name__ == "__main__":
    main()
