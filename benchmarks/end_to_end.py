"""Training fed from JPEGs: `python benchmarks/end_to_end.py vits16-k400 --steps 200`.

Reads a packed store (`--frames STORE`), or one of rendered videos (340x256, quality 90) that is made first in
a temporary folder. Prints samples/s over the steps after the warm-up, how long the GPU waited for data, and
how long the host was busy with a step; `--host 15` names what it did.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from step import now, print_events

from tcore import methods
from tcore.config import Config
from tcore.data.loader import load, num_workers
from tcore.data.prepare import prepare
from tcore.data.rendered import render_video
from tcore.data.stores import FrameStore
from tcore.device import peak_memory_gib
from tcore.recipes import recipe
from tcore.training.loop import resolve
from tcore.training.optim import build_schedule
from tcore.training.step import Trainer

WIDTH, HEIGHT = 340, 256
WARMUP = 10
LOOKED_AT = 3  # steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("recipe", nargs="?", default="vits16-k400" if on_gpu else "quickstart")
    parser.add_argument("--frames", type=Path, help="a store of tcore prepare")
    parser.add_argument(
        "--videos", type=int, default=160 if on_gpu else 32, help="rendered, without --frames"
    )
    parser.add_argument("--batch", type=int, help="videos per step (default: the recipe's)")
    parser.add_argument("--steps", type=int, default=200 if on_gpu else 10)
    parser.add_argument("--workers", type=int, help="reading processes (default: one per core up to 16)")
    parser.add_argument("--host", type=int, default=0, help="name so many calls that keep the host busy")
    options = parser.parse_args()
    config = recipe(options.recipe)
    batch = options.batch or config.optim.batch
    config = replace(
        config,
        optim=replace(config.optim, batch=batch),
        runtime=replace(config.runtime, workers=options.workers),
    )
    with tempfile.TemporaryDirectory() as folder:
        store = options.frames or rendered_store(Path(folder), options.videos)
        report(resolve(config), options.recipe, store, options.steps, options.host)


def report(config: Config, name: str, store: Path, steps: int, calls: int = 0) -> None:
    """Train for some steps and print the figures."""
    source = methods.build_source(FrameStore.open(store), config)
    trainer = Trainer(config)
    schedule = build_schedule(config, trainer.method, 1000)
    parts = load(source, 0, WARMUP + steps + LOOKED_AT * (calls > 0), trainer.device)
    waited, host, unread = 0.0, list[float](), list[Any]()
    for step in range(WARMUP + steps):
        if step == WARMUP:
            while unread:
                unread.pop(0).metrics()
            started = now(trainer)
        begun = time.perf_counter()
        unread.append(trainer.step(parts, step, schedule.at(step)))
        host.append(time.perf_counter() - begun - unread[-1].timing.waited)
        if len(unread) > 1:
            waited += note(unread.pop(0))
    waited += note(unread.pop(0))
    seconds = now(trainer) - started
    gpu = torch.cuda.get_device_name() if trainer.device.type == "cuda" else "CPU"
    frames = int(source.store.lengths.sum())
    print(
        f"{name}, batch {config.optim.batch}, {config.optim.precision}, {gpu}, {num_workers(source)} workers"
    )
    print(
        f"fed from {len(source.store)} videos, {frames} JPEGs: {config.optim.batch * steps / seconds:.1f} "
        f"samples/s over {steps} steps, data wait {waited / seconds:.1%}, "
        f"peak memory {peak_memory_gib(trainer.device):.2f} GiB"
    )
    low, middle, high = (1000 * float(np.quantile(host[WARMUP:], q)) for q in (0.1, 0.5, 0.9))
    print(f"the host is busy with a step for {middle:.0f} ms (10% to 90%: {low:.0f} to {high:.0f})")
    if calls > 0:
        print_calls(lambda: trainer.step(parts, steps, schedule.at(steps)).metrics(), calls)


def print_calls(step: Callable[[], Any], count: int) -> None:
    """What the host does most of a step with: operations, and calls of the GPU's driver."""
    with torch.profiler.profile() as seen:
        for _ in range(LOOKED_AT):
            step()
    what, events = "the host in a step, while it is looked at", list(seen.key_averages())
    print_events(what, events, lambda event: float(event.self_cpu_time_total), count, LOOKED_AT)


def note(outcome: Any) -> float:
    """Seconds that a step waited for data."""
    outcome.metrics()
    return float(outcome.timing.read()[1]) if outcome.step >= WARMUP else 0.0


def rendered_store(folder: Path, videos: int) -> Path:
    """A packed store of rendered videos."""
    with ProcessPoolExecutor() as pool:
        list(pool.map(write_video, [folder / "frames"] * videos, range(videos)))
    prepare(folder / "frames", folder / "store")
    return folder / "store"


def write_video(root: Path, index: int) -> None:
    video = render_video(0, index, num_frames=20, size=WIDTH)
    target = root / f"{index:05d}"
    target.mkdir(parents=True)
    for number, frame in enumerate(video.frames):
        Image.fromarray(frame[:HEIGHT]).save(target / f"{number:05d}.jpg", quality=90)


if __name__ == "__main__":
    main()
