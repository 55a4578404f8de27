"""Where the time of loading goes: `python benchmarks/loader.py [--frames STORE] [--hold-gib GIB]`.

Without a store, it writes a small one of rendered videos, 340x256 JPEG, in a temporary folder.
"""

import argparse
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from tcore import methods
from tcore.config import Config
from tcore.data import stores
from tcore.data.loader import load, render_batch
from tcore.data.rendered import render_video
from tcore.data.source import FrameBuffer, RawBatch, Source
from tcore.data.stores import FrameStore, hold_frames, open_mixture
from tcore.device import num_cores
from tcore.methods import sampling
from tcore.recipes import recipe

SIZE = (340, 256)  # width, height: what Kinetics is usually stored at
SAMPLES, TRIES = 1024, 3  # samples read to measure a figure, and how often: the best counts


# Functions that a batch goes through in a reading process, and what a person calls them.
PARTS: dict[str, list[tuple[Any, str]]] = {
    "read": [(FrameStore, "read")],
    "decode": [(stores, "decode_image")],
    "masks": [(sampling, "sample_step_masks")],
    "sandwich": [(sampling, "sample_sandwich")],
    "views": [(sampling, "sample_views")],
    "copy into the batch": [(FrameBuffer, "add")],
    "collate": [(Source, "_collate")],
}


@contextmanager
def watched() -> Iterator[dict[str, float]]:
    """Seconds spent in each part while the block runs."""
    spent = dict.fromkeys(PARTS, 0.0)
    usual = [(owner, name, getattr(owner, name)) for parts in PARTS.values() for owner, name in parts]

    def watch(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                spent[part] += time.perf_counter() - started

        return timed

    try:
        for part, places in PARTS.items():
            for owner, name in places:
                setattr(owner, name, watch(part, getattr(owner, name)))
        yield spent
    finally:
        for owner, name, function in usual:
            setattr(owner, name, function)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", help="a store or a mixture (default: rendered videos, written for this)")
    parser.add_argument("--hold-gib", type=float, default=0.0, help="as --runtime.hold-gib of tcore train")
    parser.add_argument("--workers", type=int, default=1, help="reading processes (default: 1)")
    parser.add_argument("--recipe", nargs="*", default=["quickstart", "vits16-k400"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        store = open_mixture(arguments.frames or str(write_store(Path(folder) / "store")), 0)
        if arguments.hold_gib:
            started = time.perf_counter()
            store = hold_frames(store, arguments.hold_gib, num_cores())
            print(f"frames decoded and held in {time.perf_counter() - started:.1f} s")
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
    source, batch = methods.build_source(store, config), config.optim.batch
    steps = max(2, SAMPLES // batch)
    source.read(0, 0)  # files into the cache of the system
    best: tuple[float, dict[str, float]] = (float("inf"), {})
    for _ in range(TRIES):
        with watched() as spent:
            whole = seconds(lambda: [source.read(step, 0) for step in range(steps)])
        best = min(best, (whole, spent), key=lambda found: found[0])
    whole, spent = best
    spent["open and read bytes"] = spent.pop("read") - spent["decode"]
    spent["the rest"] = whole - sum(spent.values())
    count = steps * batch
    print(f"\n{name}: batch {batch}, best of {TRIES} x {count} samples")
    print(f"  {'in the reading process':26}{'ms/sample':>10}{'share':>8}")
    for part, value in sorted(spent.items(), key=lambda row: -row[1]):
        print(f"  {part:26}{1e3 * value / count:10.3f}{value / whole:8.0%}")
    print(f"  {'together':26}{1e3 * whole / count:10.3f}    {count / whole:.0f} samples/s on a core")
    measure_hand_over(config, store, workers, steps)


def measure_hand_over(config: Config, store: FrameStore, workers: int, steps: int) -> None:
    """What comes out of the loader, and what the training process does with it."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = replace(config, runtime=replace(config.runtime, workers=workers))
    batch = config.optim.batch
    wall = cpu = float("inf")
    for _ in range(TRIES):
        before, started = cpu_of_children(), time.perf_counter()
        *_, raw = load(methods.build_source(store, config), 0, steps, device)
        wall = min(wall, time.perf_counter() - started)
        cpu = min(cpu, cpu_of_children() - before)
    rows = {}
    if device.type == "cuda":
        rows["pin"] = seconds(lambda: replace(raw).pin_memory())
    rows[f"copy and render ({device.type})"] = min(
        seconds(lambda: drawn_batch(raw, config, device)) for _ in range(2)
    )
    count = steps * batch
    print(f"  {'in the training process':26}{'ms/sample':>10}")
    for name, value in rows.items():
        print(f"  {name:26}{1e3 * value / batch:10.3f}")
    print(f"  workers: {workers}; starting and handing over included, {count / wall:.0f} samples/s", end="")
    print(f"; {1e3 * cpu / count:.2f} ms CPU a sample, {count / cpu:.0f} samples/s of a core" if cpu else "")


def cpu_of_children() -> float:
    """CPU seconds of the reading processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def drawn_batch(raw: RawBatch, config: Config, device: torch.device) -> None:
    render_batch(raw, device)
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
