"""`tcore train ... --plan`: what a run would take, from the settings and a few real steps."""

import math
import time
from pathlib import Path

from tcore.config import Config
from tcore.data.loader import load
from tcore.data.samples import Source
from tcore.device import World, choose_device, world
from tcore.errors import InputError
from tcore.text import format_seconds
from tcore.training import distributed
from tcore.training.build import build_schedule
from tcore.training.fit import GPU_CONTEXT, Place, free_memory, verdict
from tcore.training.init import Init, apply_init, read_init
from tcore.training.loop import check_share, open_source, resolve
from tcore.training.memory import FRAME_PIXELS, GIB
from tcore.training.optim import Schedule
from tcore.training.step import Trainer
from tcore.validation import validate

WARMUP_STEPS, TIMED_STEPS = 1, 3
LOOKED_AT = 8  # frames, for their size


def plan(config: Config, frames: str | Path | None, neighbors: str | Path | None = None) -> str:
    """Sizes, memory, speed and first losses of a run, as a table for a person.

    Where the estimate says that a step does not fit into memory, none is made.
    """
    with distributed.guarded(config.runtime.device, config.runtime.patience):
        return _plan(config, frames, neighbors)


def _plan(config: Config, frames: str | Path | None, neighbors: str | Path | None) -> str:
    """The table, measured by processes that look after one another."""
    own = world()
    config = distributed.together(lambda: resolve(config))
    init = distributed.together(lambda: read_init(config))
    source = distributed.together(lambda: open_source(config, frames, neighbors))
    schedule = build_schedule(config, source.steps_per_epoch)
    place = _here(config, own, source)
    if not place.has_room(config):
        return _table(_sizes(config, source, schedule, init, own) | _estimate(config, place))
    trainer = Trainer(config)
    if init is not None:
        apply_init(init, trainer.model)
    parts = load(source, 0, WARMUP_STEPS + TIMED_STEPS, trainer.device)
    first = trainer.step(parts, 0, schedule.at(0)).metrics()
    started = time.perf_counter()
    for step in range(WARMUP_STEPS, WARMUP_STEPS + TIMED_STEPS):
        last = trainer.step(parts, step, schedule.at(min(step, schedule.num_steps - 1))).metrics()
    seconds = (time.perf_counter() - started) / TIMED_STEPS
    each = " in each process" if own.size > 1 else ""
    rows = {
        **_sizes(config, source, schedule, init, own),
        "parameters": _parameters(trainer),
        "device": f"{trainer.device}, {config.optim.precision}",
        "weights, teacher, AdamW": f"{_state_gib(trainer):.2f} GiB{each}",
        "memory": f"{last['memory_gib']:.2f} GiB at the peak{each}, measured",
        **_estimate(config, place),
        "a step": f"{seconds:.3f} s, {config.optim.batch / seconds:.1f} samples/s (mean of {TIMED_STEPS})",
        "the run": f"{format_seconds(seconds * schedule.num_steps)} at that speed",
    }
    return "\n".join([_table(rows), "", *_first_losses(first, config)])


def plan_memory(config: Config, gib: float) -> str:
    """What would fit into the memory of another machine's GPU; no step is made, no data needed."""
    if not (math.isfinite(gib) and gib > 0):
        raise InputError(f"--plan-memory {gib}: need the GiB of a GPU, as in --plan-memory 24.")
    config = validate(config)
    check_share(config.optim.batch, config.optim.accumulate)
    if config.runtime.device.split(":")[0] not in ("auto", "cpu", "cuda"):
        raise InputError(f"runtime.device={config.runtime.device} is no device: use auto, cpu or cuda.")
    device = "cpu" if config.runtime.device.startswith("cpu") else "cuda"
    room = gib * GIB - (GPU_CONTEXT if device == "cuda" else 0.0)
    place = Place(max(0.0, room), device, world().size)
    return _table({"batch": _batch(config)} | _estimate(config, place))


def _here(config: Config, world: World, source: Source) -> Place:
    """The memory at hand: the least of all processes, which share a machine's where they have no GPU."""
    device = choose_device(config.runtime.device)
    free = free_memory(device) / (1 if device.type == "cuda" else world.here)
    return Place(min(distributed.gather_objects(free)), device.type, world.size, _frame_pixels(source))


def _frame_pixels(source: Source) -> int:
    """Pixels of a frame: the most of some, since those of a step are padded to the largest."""
    videos = source.clips.video[:: max(1, len(source.clips.video) // LOOKED_AT)]
    try:
        frames = [source.store.read(int(video), range(1))[0] for video in videos]
        return max(frame.shape[0] * frame.shape[1] for frame in frames)
    except InputError:  # unreadable: training will say so
        return FRAME_PIXELS


def _estimate(config: Config, place: Place) -> dict[str, str]:
    """Memory from the settings alone, and what follows from it."""
    return {"memory, estimated": place.needs(config).in_gib(), "room": verdict(config, place)}


def _sizes(
    config: Config, source: Source, schedule: Schedule, init: Init | None, world: World
) -> dict[str, str]:
    """What is known before a step is made."""
    return _start(init, config) | {
        config.source: f"{len(source.clips.video):,} usable of {len(source.all_clips.video):,}",
        "batch": _batch(config),
        **_processes(config, world),
        "steps": f"{schedule.num_steps:,} ({source.steps_per_epoch:,} an epoch)",
    }


def _table(rows: dict[str, str]) -> str:
    width = max(map(len, rows))
    return "\n".join(f"{name:{width}}  {value}" for name, value in rows.items())


def _start(init: Init | None, config: Config) -> dict[str, str]:
    """What the run starts from, where that is not random weights."""
    rows = {}
    if init is not None:
        first, *others = (line.strip().removeprefix("starts from ") for line in init.lines)
        rows["starts from"] = "; ".join([first, *others])
    if config.optim.freeze_backbone_steps:
        rows["backbone"] = f"does not move for {config.optim.freeze_backbone_steps:,} steps"
    return rows


def _parameters(trainer: Trainer) -> str:
    counts = {part: sum(p.numel() for _, p in named) for part, named in trainer.model.parts().items()}
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
    own = config.optim.batch // world.size
    what = "a share of the model" if config.runtime.sharding == "shard" else "the whole model"
    return {
        "processes": f"{world.size} ({world.here} on each of {machines} machine{'s'[: machines > 1]})",
        "each process": f"{own} {config.source}, {own // config.optim.accumulate} at a time, and {what}",
    }


def _state_gib(trainer: Trainer) -> float:
    """Weights, gradients and two moments of what is trained, and the teacher, in fp32, of one process."""
    trained = sum(p.numel() for named in trainer.model.parts().values() for _, p in named)
    teacher = sum(p.numel() for p in trainer.model.teacher.parameters())
    shares = trainer.world.size if trainer.config.runtime.sharding == "shard" else 1
    return 4 * (4 * trained + teacher) / shares / 2**30


def _first_losses(first: dict[str, float], config: Config) -> list[str]:
    """Losses of the first step beside what an untrained network should give."""
    uniform = math.log(config.head.prototypes)
    # The released form counts masked crops among all crops.
    share = config.masking.probability if config.loss.form == "release" else 1.0
    expected = {
        "dino": uniform,
        "past_teacher": share * uniform,
        "future_teacher": share * uniform,
        "patch_teacher": share * uniform,
        "past_future": 0.0,
    }
    lines = [f"{'first losses':16}{'measured':>10}{'expected':>10}"]
    for name, value in expected.items():
        if name in first:
            lines.append(f"{name:16}{first[name]:10.4f}{value:10.4f}")
    return [
        *lines,
        f"expected: uniform predictions over K = {config.head.prototypes:,} prototypes, ln K = {uniform:.2f}",
        "(the centers start at 0: the first few losses can lie some percent below; sharp targets lie above)",
    ]
