"""`tcore train ... --plan`: what a run takes, measured in a few real steps at two sizes of a batch.

Memory and time grow in a straight line with the samples that are in memory at a time, whatever the method:
two sizes give the line, and the line tells which --optim.accumulate fits a given GPU.
"""

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from tcore.config import Config
from tcore.data.loader import load, num_workers
from tcore.data.source import Source
from tcore.data.stores import RenderedStore
from tcore.device import choose_device, peak_memory_gib, world
from tcore.errors import InputError
from tcore.text import format_seconds
from tcore.training import distributed
from tcore.training.checkpoint import Init, apply_init
from tcore.training.loop import describe_run, open_source, resolve
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
        config = distributed.together(lambda: resolve(config))
        device = choose_device(config.runtime.device)
        if device.type == "cuda":
            gpu_gib = gpu_gib or torch.cuda.get_device_properties(device).total_memory / 2**30
        elif gpu_gib is not None:
            raise InputError(f"--plan-memory {gpu_gib:g} measures real steps on a GPU; there is none here.")
        init = distributed.together(lambda: read_init(config))
        costs = _measure_two(config, lambda size: _measure(size, frames, neighbors, init))
        source = distributed.together(lambda: open_source(config, frames, neighbors))
    return _report(config, source, init, *costs, gpu_gib)


def _report(
    config: Config, source: Source, init: Init | None, small: Cost, large: Cost, gpu_gib: float | None
) -> str:
    """What was measured at two sizes, and what that means for the run."""
    processes, batch = world().size, config.optim.samples
    num_steps = run_length(config, source.steps_per_epoch).num_steps
    memory = Line.through((small.at_a_time, small.gib), (large.at_a_time, large.gib))
    seconds = Line.through((small.samples, small.seconds), (large.samples, large.seconds))
    step = large.seconds if large.samples == batch else seconds.at(batch)
    each = " in each process" if processes > 1 else ""
    counts = ", ".join(f"{part} {count:,}" for part, count in large.parameters.items())
    rows = {
        "run": describe_run(source, num_steps),
        "starts from": "; ".join(line.strip().removeprefix("starts from ") for line in init.lines)
        if init
        else "random weights",
        "parameters": f"{sum(large.parameters.values()):,} trained ({counts})",
        "memory": f"{memory.at(_at_a_time(config)):.2f} GiB at the peak{each}: {memory.start:.2f} plus "
        f"{1024 * memory.slope:.1f} MiB for each sample at a time (measured at {small.at_a_time} and "
        f"{large.at_a_time})",
        **({} if gpu_gib is None else {"fits": verdict(config, processes, memory, gpu_gib)}),
        "a step": f"{step:.3f} s, {batch / step:.1f} samples/s, "
        f"{large.wait:.0%} of the time waiting for data (mean of {TIMED_STEPS} steps)",
        "duration": f"{format_seconds(step * num_steps)} at that speed",
        "first losses": ", ".join(f"{name} {value:.4f}" for name, value in large.losses.items()),
    }
    width = max(map(len, rows))
    return "\n".join(f"{name:{width}}  {value}" for name, value in rows.items())


def _at_a_time(config: Config) -> int:
    """Samples that one process has in memory at a time."""
    return config.optim.samples // (world().size * config.optim.accumulate)


def _measure_two(config: Config, measure: Callable[[Config], Cost]) -> tuple[Cost, Cost]:
    """The costs of half of the samples at a time and of the run's own; smaller, where memory runs out."""
    full, processes = _at_a_time(config), world().size

    def with_samples(count: int) -> Config:
        batch = max(1, count // config.optim.repeat) * processes
        return replace(config, optim=replace(config.optim, batch=batch, accumulate=1))

    small = measure(with_samples(full // 2))
    try:
        return small, measure(config)
    except torch.OutOfMemoryError:
        if processes > 1:
            raise  # the others may have continued
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
    losses = {name: x for name, x in outcomes[0][0].items() if not name.startswith("gradient_norm")}
    counts = {part: sum(p.numel() for p in own) for part, own in trainer.optimizer.parameters.items()}
    return Cost(
        at_a_time=_at_a_time(config),
        samples=config.optim.samples,
        gib=gib,
        seconds=seconds / TIMED_STEPS,
        wait=waited / seconds,
        losses=losses,
        parameters=counts,
    )


class Speed(NamedTuple):
    """How fast a run trains once it is under way."""

    samples_per_second: float
    steps: int
    """Steps that were timed."""
    gib: float
    wait: float
    """Share of their time in which training waited for frames."""


def measure_speed(
    config: Config,
    frames: str | Path | None,
    *,
    seconds: float = 10.0,
    alone: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Speed:
    """The steady speed of a run in this process: real steps with real data, without what the first ones cost.

    What compiles and warms up may share the machine; the timed steps are made inside of `alone()`.
    """
    config = resolve(config)
    source = open_source(config, frames)
    trainer = Trainer(config)
    schedule = build_schedule(config, trainer.method, source.steps_per_epoch)
    parts = load(source, 0, 10**9, trainer.device)
    at = schedule.at(0)  # a learning rate near 0, so that nothing diverges

    done = 0

    def make_steps(least: int, seconds: float = 0.0) -> tuple[int, float, float]:
        """Make at least this many steps, for at least this long: their number, time, and time of waiting."""
        nonlocal done
        begun, first, before, waited = time.perf_counter(), done, None, 0.0
        while done < first + least or time.perf_counter() < begun + seconds:
            now = trainer.step(parts, done, at)
            if before is not None:  # one step behind, as in training: the GPU is never waited for
                before.check()
                waited += before.timing.read()[1]
            before, done = now, done + 1
        if before is not None:
            before.check()
            waited += before.timing.read()[1]
        return done - first, time.perf_counter() - begun, waited

    # Rendered videos are rendered once, in the first epoch.
    rendered = isinstance(source.store, RenderedStore)
    try:
        make_steps(source.steps_per_epoch if rendered else WARMUP_STEPS)
        with alone():
            make_steps(2 * num_workers(source) + 1)  # what was read ahead while other runs shared the machine
            count, took, waited = make_steps(TIMED_STEPS, seconds)
    finally:
        parts.close()
    return Speed(count * config.optim.samples / took, count, peak_memory_gib(trainer.device), waited / took)


def verdict(config: Config, processes: int, memory: Line, gpu_gib: float) -> str:
    """Whether a step fits into a GPU's memory and, if not, in how many parts it would.

    >>> from tcore import recipe
    >>> verdict(recipe("vits16-k400"), 1, Line(2.0, 0.125), 24.0)
    'no: batch 256 needs 34.0 of 24.0 GiB, 10% kept free; add --optim.accumulate 2 (18.0 GiB)'
    """
    batch, room = config.optim.samples, (1 - KEPT_FREE) * gpu_gib

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
