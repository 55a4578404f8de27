"""How the cost of a step grows: samples/s and peak memory, one setting at a time around vits16-k400.

`python benchmarks/cost.py --out docs/cost.png` on a GPU; without one, around a small model. Every point is a
process of its own; lines are printed in turn, and the picture is drawn anew, so that a run
that is cut off keeps what it has; with `--keep FILE.json` the next one measures only what is missing there.
`--points batch K` chooses axes. Several processes compile at a time (`--at-a-time`), and one is timed.
"""

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parent))
from step import NoiseStore, now, pinned

from tcore import methods
from tcore.config import Config, flatten
from tcore.device import peak_memory_gib
from tcore.files import read_json, write_text
from tcore.lab.worker import among_others
from tcore.recipes import recipe
from tcore.training.loop import resolve
from tcore.training.optim import build_schedule
from tcore.training.step import Trainer

WARMUP = 4  # two compile, the third is recorded as a CUDA graph
LIMIT = 300  # seconds for a point, compilation included

SIZES: dict[str, dict[str, Any]] = {
    "Ti": {"vit.dim": 192, "vit.num_heads": 3},
    "S": {"vit.dim": 384, "vit.num_heads": 6},
    "B": {"vit.dim": 768, "vit.num_heads": 12},
    "L": {"vit.dim": 1024, "vit.depth": 24, "vit.num_heads": 16},
}
# The first value of an axis is where all axes meet. ViT-B and L at half and a quarter of the batch. A point
# takes 15 s, and 30 s more where shapes are new and are compiled: 11 processes.
GPU_AXES: dict[str, list[dict[str, Any]]] = {
    "batch": [{"optim.batch": batch} for batch in (256, 512, 64, 128)],
    "K": [{"head.prototypes": count} for count in (65536, 8192, 131072)],
    "locals": [{"views.num_local": count} for count in (8, 2, 4)],
    "size": [
        SIZES["S"],
        SIZES["Ti"],
        SIZES["B"] | {"optim.batch": 128},
        SIZES["L"] | {"optim.batch": 64},
    ],
}
SMALL: dict[str, Any] = {
    "vit.dim": 96,
    "vit.depth": 3,
    "vit.num_heads": 3,
    "views.global_size": 64,
    "views.local_size": 32,
    "views.num_local": 4,
    "head.hidden": 256,
    "head.bottleneck": 64,
    "head.prototypes": 2048,
    "optim.batch": 8,
}
CPU_AXES: dict[str, list[dict[str, Any]]] = {
    "batch": [{"optim.batch": batch} for batch in (8, 4, 16)],
    "K": [{"head.prototypes": count} for count in (2048, 512, 8192)],
    "locals": [{"views.num_local": count} for count in (4, 2, 8)],
    "size": [{"vit.dim": 96}, {"vit.dim": 48}, {"vit.dim": 192}],
}


class Point(NamedTuple):
    """What one setting costs."""

    axis: str
    value: int
    batch: int
    samples_per_second: float
    measured_gib: float

    def row(self) -> str:
        """A line of the Markdown table."""
        return (
            f"| {self.axis} {self.value:,} | {self.batch} | {self.samples_per_second:,.1f} | "
            f"{self.measured_gib:.2f} |"
        )


HEADER = """\
| setting | batch | samples/s | peak GiB |
|---|---|---|---|"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    on_gpu = torch.cuda.is_available()
    axes = GPU_AXES if on_gpu else CPU_AXES
    parser.add_argument("--points", nargs="+", choices=list(axes), default=list(axes), help="axes")
    parser.add_argument("--steps", type=int, default=20, help="timed steps of a point")
    parser.add_argument("--compile", choices=("auto", "on", "off"), default="auto")
    parser.add_argument(
        "--seconds", type=float, default=470, help="points that are not done by then are left out"
    )
    parser.add_argument("--out", type=Path, help="a picture (needs matplotlib)")
    parser.add_argument("--keep", type=Path, help="points so far, as JSON: taken from there, added to it")
    parser.add_argument("--at-a-time", type=int, default=4, help="processes that compile at a time")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # settings of a point, as JSON
    parser.add_argument("--lock", type=Path, help="a lock file to share with other benchmarks")
    options = parser.parse_args()
    base = {"runtime.compile": options.compile} | ({} if on_gpu else SMALL)
    if options.one:
        config = recipe("vits16-k400", base | json.loads(options.one))
        print(json.dumps(measure(config, options.steps, options.lock)))
        return
    began = time.perf_counter()
    gpu = torch.cuda.get_device_name() if on_gpu else "CPU, a small model"
    measured_by = {"device": gpu, "compile": options.compile, "steps": options.steps}
    kept = read_kept(options.keep, measured_by)
    print(f"cost of a step around vits16-k400, {gpu}, compile {options.compile}\n\n{HEADER}", flush=True)
    points: list[Point] = []
    chosen = {name: axes[name] for name in options.points}
    deadline = began + options.seconds
    for point in measure_axes(chosen, kept, options, deadline):
        points.append(point)
        print(point.row(), flush=True)
        if options.keep:
            write_text(options.keep, json.dumps(measured_by | {"points": kept}, indent=1) + "\n")
        if options.out:
            draw(points, options.out)
    print(f"\n{len(points)} points in {time.perf_counter() - began:.0f} s")


def read_kept(path: Path | None, wanted: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Figures by their settings, of a run before that measured in the same way."""
    if path is None or not path.exists():
        return {}
    found = read_json(path)
    for name, value in wanted.items():
        if found.get(name) != value:
            raise SystemExit(f"--keep {path} is of {name} {found.get(name)}, not {value}: name another file.")
    points: dict[str, dict[str, float]] = found["points"]
    return points


def measure_axes(
    axes: dict[str, list[dict[str, Any]]],
    kept: dict[str, dict[str, float]],
    options: argparse.Namespace,
    deadline: float,
) -> Iterator[Point]:
    """Measure every point that is not kept, in a fresh process; the one where axes meet, once."""
    wanted = [
        (axis, json.dumps(change) if index else "center", change)
        for axis, changes in axes.items()
        for index, change in enumerate(changes)
    ]
    missing = {name: change for _, name, change in wanted if name not in kept}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.at_a_time) as pool:
        lock = options.lock or Path(folder) / "lock"
        found = {
            name: pool.submit(in_fresh_process, change, options.steps, options.compile, lock, deadline)
            for name, change in missing.items()
        }
        try:
            for axis, name, _ in wanted:
                result = kept.get(name) or found[name].result()
                if result is not None:
                    kept[name] = result
                    numbers = (result[figure] for figure in ("speed", "memory"))
                    yield Point(axis, int(result[axis]), int(result["batch"]), *numbers)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def in_fresh_process(
    change: dict[str, Any], steps: int, wish: str, lock: Path, deadline: float
) -> dict[str, float] | None:
    """What a point costs, or none where it fails or comes too late; the others go on."""
    command = [sys.executable, __file__, "--one", json.dumps(change), "--steps", str(steps)]
    command += ["--compile", wish, "--lock", str(lock)]
    left = min(LIMIT, deadline - time.perf_counter())
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=max(0, left))
    except subprocess.TimeoutExpired:
        print(f"{change}: not done in time, left out", file=sys.stderr, flush=True)
        return None
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["no word"])[-1]
        print(f"{change}: failed, left out: {why}", file=sys.stderr, flush=True)
        return None
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def measure(config: Config, steps: int, lock: Path) -> dict[str, float]:
    """Speed and memory of a step in this process; it is timed while no other one works."""
    with among_others(lock) as alone:
        return measure_after_warmup(config, steps, alone)


def measure_after_warmup(
    config: Config, steps: int, alone: Callable[[], AbstractContextManager[None]]
) -> dict[str, float]:
    """Compile, then measure alone."""
    config = resolve(config)
    source = methods.build_source(NoiseStore(2 * config.optim.batch), config)
    trainer = Trainer(config)
    schedule = build_schedule(config, trainer.method, 1000)
    raws = [pinned(source[index], trainer.device) for index in range(2 * config.optim.accumulate)]
    feed = itertools.cycle(raws)
    for step in range(WARMUP):
        trainer.step(feed, step, schedule.at(step)).metrics()
    with alone():
        started, unread = now(trainer), list[Any]()
        for step in range(WARMUP, WARMUP + steps):
            unread.append(trainer.step(feed, step, schedule.at(step)))
            if len(unread) > 1:
                unread.pop(0).metrics()
        unread.pop(0).metrics()
        seconds = (now(trainer) - started) / steps
    return {
        "batch": config.optim.batch,
        "K": flatten(config)["head.prototypes"],
        "locals": config.views.num_local,
        "size": config.vit.dim,
        "speed": config.optim.batch / seconds,
        "memory": peak_memory_gib(trainer.device),  # on a CPU of the whole process, libraries included
    }


def draw(points: list[Point], path: Path) -> None:
    """Memory and speed against each setting."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    axes = list(dict.fromkeys(point.axis for point in points))
    figure, grid = pyplot.subplots(
        2, len(axes), figsize=(3.2 * len(axes), 5), layout="constrained", squeeze=False, sharex="col"
    )
    labels = {"batch": "batch", "K": "prototypes K", "locals": "local crops", "size": "width of the encoder"}
    for column, axis in enumerate(axes):
        own = sorted((point for point in points if point.axis == axis), key=lambda point: point.value)
        values = [point.value for point in own]
        speed, memory = grid[0, column], grid[1, column]
        speed.plot(values, [point.samples_per_second for point in own], "o-", color="C0")
        memory.plot(values, [point.measured_gib for point in own], "o-", color="C3")
        memory.set_xlabel(labels[axis])
        memory.set_xscale("log", base=2)
        memory.set_xticks(values, [f"{value:,}" for value in values], minor=False)
        memory.minorticks_off()
        if axis == "size":
            for point in own:
                where = (point.value, point.samples_per_second)
                speed.annotate(
                    f"batch {point.batch}", where, (0, 6), textcoords="offset points", ha="center", fontsize=7
                )
        for panel in (speed, memory):
            panel.margins(0.12)
            panel.set_ylim(0, 1.1 * panel.get_ylim()[1])
    grid[0, 0].set_ylabel("samples/s")
    grid[1, 0].set_ylabel("GiB at the peak")
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
