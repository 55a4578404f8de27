"""Frames per second on one core, beside a loop that only decodes: `python benchmarks/prepare.py VIDEOS`."""

import sys
import tempfile
import time
from pathlib import Path

import av

from tcore.data.packed import ShardWriter
from tcore.data.packing import Item, Settings, Task, pack_item
from tcore.data.prepare import list_source

ROUNDS = 3


def decode_only(path: Path) -> int:
    with av.open(str(path), metadata_errors="ignore") as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        return sum(1 for _ in container.decode(stream))


def pack(source: Path, item: Item, spool: Path) -> None:
    task = Task(source, spool.parent, Settings("videos", 2.0, 256, 90), 0, (item,))
    with spool.open("wb+") as file:
        writer = ShardWriter(file)
        note = pack_item(task, item, writer, lambda: None)
        writer.close()
    assert note is None, note


def main() -> None:
    source = Path(sys.argv[1])
    total = {"frames": 0, "decode": 0.0, "prepare": 0.0}
    with tempfile.TemporaryDirectory() as folder:
        for item in list_source(source, images=False)[2]:
            try:
                frames = decode_only(source / item.path)
            except av.FFmpegError:
                continue
            best = {"decode": float("inf"), "prepare": float("inf")}
            for _ in range(ROUNDS):
                started = time.process_time()
                decode_only(source / item.path)
                best["decode"] = min(best["decode"], time.process_time() - started)
                started = time.process_time()
                pack(source, item, Path(folder) / "video.tar")
                best["prepare"] = min(best["prepare"], time.process_time() - started)
            ratio = best["decode"] / best["prepare"]
            print(f"{item.name[:36]:36}  {frames:5} frames  {frames / best['prepare']:6.0f}/s  x {ratio:.2f}")
            total = {"frames": total["frames"] + frames} | {k: total[k] + best[k] for k in best}
    speed = {name: total["frames"] / total[name] for name in ("decode", "prepare")}
    print(
        f"one core: {speed['prepare']:.0f} frames/s prepared, {speed['decode']:.0f} frames/s only decoded: "
        f"{speed['prepare'] / speed['decode']:.2f} (wanted: 0.8)"
    )


if __name__ == "__main__":
    main()
