"""`tcore train ... --plan`: what a run takes, measured in a few real steps at two sizes of a batch.

Memory and time grow in a straight line with the samples that are in memory at a time, whatever the method:
two sizes give the line, and the line tells which --optim.accumulate fits a given GPU.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from tcore.config import Config
from tcore.data.loader import load
from tcore.device import World, choose_device, peak_memory_gib, world
from tcore.errors import InputError
from tcore.text import format_seconds
from tcore.training import distributed
from tcore.training.init import Init, apply_init
from tcore.training.loop import open_source, resolve
from tcore.training.optim import build_schedule, run_length
from tcore.training.step import Trainer

WARMUP_STEPS, TIMED_STEPS = 2, 3
KEPT_FREE = 0.1  # of a GPU: the CUDA context and gaps between allocations


class Cost(NamedTuple):
    """What a step took at one size."""

    at_a_time: int
    """Samples in the memory of one process."""
    samples: int
    """Samples of the whole step."""
    gib: float
    seconds: float
    wait: float
    """Share of the time spent waiting for data."""
    losses: dict[str, float]
    parameters: dict[str, int]


class Line(NamedTuple):
    """A straight line through two measurements; through one, a constant."""

    start: float
    slope: float

    @classmethod
    def through(cls, a: tuple[float, float], b: tuple[float, float]) -> "Line":
        """The line through two points; noise does not make it fall."""
        slope = max(0.0, (b[1] - a[1]) / (b[0] - a[0])) if a[0] != b[0] else 0.0
        return cls(b[1] - slope * b[0], slope)

    def at(self, x: float) -> float:
        """Its value at a point."""
        return self.start + self.slope * x


def plan(
    config: Config,
    frames: str | Path | None,
    neighbors: str | Path | None = None,
    gpu_gib: float | None = None,
    read_init: Callable[[Config], Init | None] = lambda config: None,
) -> str:
    """Sizes, memory, speed, first losses and duration of a run; `gpu_gib` asks about another GPU's memory."""
    if gpu_gib is not None and not (math.isfinite(gpu_gib) and gpu_gib > 0):
        raise InputError(f"--plan-memory {gpu_gib}: need the GiB of a GPU, as in --plan-memory 24.")
    with distributed.guarded(config.runtime.device, config.runtime.patience):
        return _plan(config, frames, neighbors, gpu_gib, read_init)


def _plan(
    config: Config,
    frames: str | Path | None,
    neighbors: str | Path | None,
    gpu_gib: float | None,
    read_init: Callable[[Config], Init | None],
) -> str:
    own = world()
    config = distributed.together(lambda: resolve(config))
    device = choose_device(config.runtime.device)
    if gpu_gib is not None and device.type != "cuda":
        raise InputError(f"--plan-memory {gpu_gib:g} measures real steps on a GPU, and there is none here.")
    init = distributed.together(lambda: read_init(config))
    source = distributed.together(lambda: open_source(config, frames, neighbors))
    num_steps = run_length(config, source.steps_per_epoch).num_steps

    def measure(size: Config) -> Cost:
        return _measure(size, frames, neighbors, init)

    small, large = _measure_two(config, own, measure)
    memory = Line.through((small.at_a_time, small.gib), (large.at_a_time, large.gib))
    seconds = Line.through((small.samples, small.seconds), (large.samples, large.seconds))
    step = large.seconds if large.samples == config.optim.batch else seconds.at(config.optim.batch)
    if device.type == "cuda" and gpu_gib is None:
        gpu_gib = torch.cuda.get_device_properties(device).total_memory / 2**30
    each = " in each process" if own.size > 1 else ""
    rows = {
        **_start(init, config),
        config.source: f"{len(source.clips.video):,} usable of {len(source.all_clips.video):,}",
        "batch": _batch(config),
        **_processes(config, own),
        "steps": f"{num_steps:,} ({source.steps_per_epoch:,} an epoch)",
        "parameters": _parameters(large.parameters),
        "device": f"{device}, {config.optim.precision}",
        "memory": f"{memory.at(_at_a_time(config, own)):.2f} GiB at the peak{each}: {memory.start:.2f} and "
        f"{1024 * memory.slope:.1f} MiB for each sample at a time (measured at {small.at_a_time} and "
        f"{large.at_a_time})",
        **({} if gpu_gib is None else {"fits": verdict(config, own.size, memory, gpu_gib)}),
        "a step": f"{step:.3f} s, {config.optim.batch / step:.1f} samples/s, "
        f"{large.wait:.0%} of the time waiting for data (mean of {TIMED_STEPS} steps)",
        "the run": f"{format_seconds(step * num_steps)} at that speed",
        "first losses": ", ".join(f"{name} {value:.4f}" for name, value in large.losses.items()),
    }
    width = max(map(len, rows))
    return "\n".join(f"{name:{width}}  {value}" for name, value in rows.items())


def _at_a_time(config: Config, world: World) -> int:
    """Samples that one process has in memory at a time."""
    return config.optim.batch // (world.size * config.optim.accumulate)


def _measure_two(config: Config, world: World, measure: Callable[[Config], Cost]) -> tuple[Cost, Cost]:
    """The costs of half of the samples at a time and of the run's own; smaller, where memory runs out."""
    full = _at_a_time(config, world)

    def with_samples(count: int) -> Config:
        return replace(config, optim=replace(config.optim, batch=max(1, count) * world.size, accumulate=1))

    small = measure(with_samples(full // 2))
    try:
        return small, measure(config)
    except torch.OutOfMemoryError:
        if world.size > 1:
            raise  # the others may have gone on
    return measure(with_samples(full // 4)), small


def _measure(
    config: Config, frames: str | Path | None, neighbors: str | Path | None, init: Init | None
) -> Cost:
    """Make a few steps with these settings; on a CPU the memory is that of the whole process."""
    source = distributed.together(lambda: open_source(config, frames, neighbors))
    trainer = Trainer(config)
    schedule = build_schedule(config, trainer.method, source.steps_per_epoch)
    if trainer.device.type == "cuda":
        torch.compiler.reset()  # graphs of another size
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(trainer.device)
    if init is not None:
        apply_init(init, trainer.method)
    parts = load(source, 0, WARMUP_STEPS + TIMED_STEPS, trainer.device)
    outcomes = []
    for step in range(WARMUP_STEPS + TIMED_STEPS):
        outcome = trainer.step(parts, step, schedule.at(min(step, schedule.num_steps - 1)))
        outcomes.append((outcome.check(), outcome.timing.read()))
    parts.close()
    seconds, waited = (sum(column) for column in zip(*(t for _, t in outcomes[WARMUP_STEPS:]), strict=True))
    gib, seconds, waited = distributed.largest([peak_memory_gib(trainer.device), seconds, waited])
    first, _ = outcomes[0]
    losses = {name: value for name, value in first.items() if not name.startswith("gradient_norm")}
    parameters = {
        part: sum(p.numel() for p in parameters) for part, parameters in trainer.optimizer.parameters.items()
    }
    at_a_time = config.optim.batch // (trainer.world.size * config.optim.accumulate)
    wait = waited / seconds
    return Cost(at_a_time, config.optim.batch, gib, seconds / TIMED_STEPS, wait, losses, parameters)


def verdict(config: Config, processes: int, memory: Line, gpu_gib: float) -> str:
    """Whether a step fits into a GPU's memory and, if not, in how many parts it would.

    >>> from tcore import recipe
    >>> verdict(recipe("vits16-k400"), 1, Line(2.0, 0.125), 24.0)
    'no: batch 256 needs 34.0 of 24.0 GiB, 10% kept free; add --optim.accumulate 2 (18.0 GiB)'
    """
    batch, room = config.optim.batch, (1 - KEPT_FREE) * gpu_gib

    def needs(parts: int) -> float:
        return memory.at(batch // (processes * parts))

    now = config.optim.accumulate
    what = f"batch {batch}" + (f" in {now} parts" if now > 1 else "")
    said = f"{what} needs {needs(now):.1f} of {gpu_gib:.1f} GiB, {KEPT_FREE:.0%} kept free"
    if needs(now) <= room:
        return f"yes: {said}"
    for parts in range(now + 1, batch // processes + 1):
        if batch % (processes * parts) == 0 and needs(parts) <= room:
            return f"no: {said}; add --optim.accumulate {parts} ({needs(parts):.1f} GiB)"
    return f"no: {said}, and no --optim.accumulate helps: use a smaller encoder or a GPU with more memory"


def _start(init: Init | None, config: Config) -> dict[str, str]:
    """What the run starts from, where that is not random weights."""
    rows = {}
    if init is not None:
        rows["starts from"] = "; ".join(line.strip().removeprefix("starts from ") for line in init.lines)
    if config.optim.freeze_backbone_steps:
        rows["backbone"] = f"does not move for {config.optim.freeze_backbone_steps:,} steps"
    return rows


def _parameters(counts: dict[str, int]) -> str:
    listed = ", ".join(f"{part} {count:,}" for part, count in counts.items())
    return f"{sum(counts.values()):,} trained ({listed})"


def _batch(config: Config) -> str:
    optim = config.optim
    parts = f" in {optim.accumulate} parts" if optim.accumulate > 1 else ""
    return f"{optim.batch} {config.source}{parts}, peak learning rate {optim.peak_lr:.2e}"


def _processes(config: Config, world: World) -> dict[str, str]:
    """How the batch and the model are shared, where there are several processes."""
    if world.size == 1:
        return {}
    machines = world.size // world.here
    what = "a share of the model" if config.runtime.sharding == "shard" else "the whole model"
    return {
        "processes": f"{world.size} ({world.here} on each of {machines} machine{'s'[: machines > 1]})",
        "each process": f"{config.optim.batch // world.size} {config.source}, "
        f"{_at_a_time(config, world)} at a time, and {what}",
    }
