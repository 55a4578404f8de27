"""Where the time of loading goes: `python benchmarks/loader.py [--frames STORE] [--workers N]`.

Without a store, it writes a small one of rendered videos, 340x256 JPEG, in a temporary folder.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from PIL import Image

from tcore.config import Config
from tcore.data.frames import FolderStore, Frame, FrameStore
from tcore.data.loader import RawBatch, Source, load, render_batch, step_masks
from tcore.data.packed import PackedStore
from tcore.data.synthetic import render_video
from tcore.recipes import recipe

SIZE = (340, 256)  # width, height: what Kinetics is usually stored at
SAMPLES = 1024  # read to measure one figure, at least


class Timed(FrameStore):
    """A store that counts the seconds spent in it, and notes which frames were asked for."""

    def __init__(self, store: FrameStore) -> None:
        self.store, self.names, self.lengths, self.fps = store, store.names, store.lengths, store.fps
        self.seconds = 0.0
        self.asked: list[tuple[int, Sequence[int]]] = []

    def read(self, video: int, frames: Sequence[int]) -> list[Frame]:
        """Read, and time it."""
        started = time.perf_counter()
        read = self.store.read(video, frames)
        self.seconds += time.perf_counter() - started
        self.asked.append((video, frames))
        return read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", help="frame store (default: rendered videos, written for this)")
    parser.add_argument("--workers", type=int, default=1, help="reading processes (default: 1)")
    parser.add_argument("--recipe", nargs="*", default=["quickstart", "vits16-k400"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        store = FrameStore.open(arguments.frames or write_store(Path(folder) / "store"))
        for name in arguments.recipe:
            measure(name, recipe(name), store, arguments.workers)


def write_store(root: Path, videos: int = 64, frames: int = 20) -> Path:
    for index in range(videos):
        folder = root / f"video{index:03d}"
        folder.mkdir(parents=True)
        for number, frame in enumerate(render_video(0, index, num_frames=frames, size=256).frames):
            Image.fromarray(frame).resize(SIZE).save(folder / f"{number:05d}.jpg", quality=90)
    return root


def measure(name: str, config: Config, store: FrameStore, workers: int) -> None:
    timed = Timed(store)
    source = Source(timed, config)
    batch = config.optim.batch
    steps = max(2, SAMPLES // batch)
    source.read(0, 0)  # files into the cache of the system
    timed.seconds, timed.asked = 0.0, []
    whole = seconds(lambda: [source.read(step, 0) for step in range(steps)])
    per_sample = 1e3 / (steps * batch)
    read_bytes = seconds(lambda: fetch(store, timed.asked))
    masks = seconds(lambda: [step_masks(config, step) for step in range(steps)])
    rows = {
        "open and read bytes": read_bytes,
        "decode": timed.seconds - read_bytes,
        "masks": masks,
        "sandwich, views, collate": whole - timed.seconds - masks,
    }
    frames = sum(len(asked) for _, asked in timed.asked) / (steps * batch)
    print(f"\n{name}: batch {batch}, {frames:.2f} frames a sample")
    print(f"  {'in the reading process':26}{'ms/sample':>10}{'share':>8}")
    for row, value in rows.items():
        print(f"  {row:26}{value * per_sample:10.3f}{value / whole:8.0%}")
    print(f"  {'together':26}{whole * per_sample:10.3f}  {steps * batch / whole:8.1f} samples/s on a core")
    measure_hand_over(config, store, workers, steps)


def measure_hand_over(config: Config, store: FrameStore, workers: int, steps: int) -> None:
    """What comes out of the loader, and what the training process does with it."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = replace(config, runtime=replace(config.runtime, workers=workers))
    batches = load(Source(store, config), 0, steps + 1, device)
    raw = next(batches)  # the processes start, and read ahead
    started = time.perf_counter()
    for _ in range(steps):
        raw = next(batches)
    spent = time.perf_counter() - started
    batch = config.optim.batch
    pin = seconds(lambda: replace(raw).pin_memory()) if device.type == "cuda" else None
    drawn = seconds(lambda: drawn_batch(raw, config, device))
    print(f"  {'in the training process':26}{'ms/sample':>10}")
    if pin is not None:
        print(f"  {'pin':26}{1e3 * pin / batch:10.3f}")
    print(f"  {f'copy and render ({device.type})':26}{1e3 * drawn / batch:10.3f}")
    print(f"  {workers} workers hand over {steps * batch / spent:.1f} samples/s (no training beside)")


def drawn_batch(raw: RawBatch, config: Config, device: torch.device) -> None:
    render_batch(raw, config, device)
    if device.type == "cuda":
        torch.cuda.synchronize()


def fetch(store: FrameStore, asked: list[tuple[int, Sequence[int]]]) -> None:
    for video, frames in asked:
        if isinstance(store, PackedStore):
            store.read_bytes(video, frames)
        elif isinstance(store, FolderStore):
            for frame in frames:
                store.path(video, frame).read_bytes()


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
