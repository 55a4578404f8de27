"""Training: a step, and the loop around it."""

import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from tcore.config import Config
from tcore.data.batch import Batch
from tcore.data.frames import FrameStore
from tcore.data.loader import Source, load, render_batch, stochastic_depth_seed
from tcore.errors import DivergedError
from tcore.files import write_text
from tcore.model.tcore import Glimpse, TCoRe
from tcore.training import health
from tcore.training.build import (
    build_model,
    build_optimizer,
    build_schedule,
    choose_device,
    choose_dtype,
    compile_blocks,
)
from tcore.training.checkpoint import (
    CHECKPOINT,
    keep_encoder,
    load_checkpoint,
    open_run,
    save_checkpoint,
)
from tcore.training.journal import Journal, environment, peak_memory_gib
from tcore.training.optim import Optimizer, StepValues
from tcore.training.wait import DataWait
from tcore.validation import validate


def train(config: Config, run: str | Path, frames: str | Path | None = None, *, quiet: bool = False) -> Path:
    """Train, or go on training, in a run folder; without `frames` on rendered videos.

    >>> import tempfile, tcore
    >>> config = tcore.recipe("quickstart", {"optim.steps": 1, "optim.batch": 2, "rendered.videos": 2})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = tcore.train(config, folder + "/run", quiet=True)
    ...     sorted(path.name for path in run.glob("encoder*"))
    ['encoder.json', 'encoder.safetensors', 'encoders']
    """
    run, config = Path(run), resolve(config)
    source = Source(open_store(config, frames), config)
    open_run(run, config)
    schedule = build_schedule(config, source.steps_per_epoch)
    trainer = Trainer(config)
    fingerprint = source.store.fingerprint()
    saved = first_step = load_checkpoint(run, trainer.model, trainer.optimizer, fingerprint)

    journal = Journal(run, first_step, schedule.num_steps, config.head.prototypes, quiet)
    made_with = environment(trainer.device) | {"frames": "rendered" if frames is None else str(frames)}
    write_text(run / "environment.json", json.dumps(made_with, indent=2) + "\n")
    for line in introduce(source, trainer, schedule.num_steps, first_step):
        journal.say(line)
    wait = DataWait(source)
    try:
        parts = load(source, first_step, schedule.num_steps, trainer.device)
        for step in range(first_step, schedule.num_steps):
            done, last = step + 1, step + 1 == schedule.num_steps
            look = done % config.runtime.log_every == 0 or last
            try:
                metrics = trainer.step(parts, step, schedule.at(step), look)
            except DivergedError as error:
                raise DivergedError(f"{error} {what_remains(run, saved)}") from error
            journal.record(done, metrics, trainer.health() if look else None)
            if slow := wait.note(done, metrics, look):
                journal.say(slow)
            if last or keeps(done, schedule.num_steps, config.keep_every):
                keep_encoder(run, done, trainer.model)
            if last or done % config.checkpoint_every == 0:
                save_checkpoint(run, done, trainer.model, trainer.optimizer, config, fingerprint)
                saved = done
    finally:
        journal.close()
    return run


def resolve(config: Config) -> Config:
    """Settings that can work, with what depends on the machine filled in; the others are refused."""
    config = validate(config)
    dtype = choose_dtype(config.optim.precision, choose_device(config.runtime.device))
    precision: Literal["bf16", "fp32"] = "bf16" if dtype == torch.bfloat16 else "fp32"
    return replace(config, optim=replace(config.optim, precision=precision))


def keeps(done: int, num_steps: int, keep_every: int | None) -> bool:
    """Whether the encoder of this step is kept: every so many steps, or 20 over the run."""
    if keep_every is not None:
        return done % keep_every == 0
    return done * 20 // num_steps != (done - 1) * 20 // num_steps


class Trainer:
    """Model, optimiser and device of a run; `step` is one step of the method."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.device = choose_device(config.runtime.device)
        self.dtype = choose_dtype(config.optim.precision, self.device)
        self.model: TCoRe = build_model(config).to(self.device)
        if config.runtime.compile:
            compile_blocks(self.model)
        self.optimizer: Optimizer = build_optimizer(self.model, config)
        self.generator = torch.Generator(self.device)
        self.glimpses: list[Glimpse] = []

    def step(self, parts: Iterator[Any], step: int, values: StepValues, look: bool = False) -> dict[str, Any]:
        """One step: losses and gradients of its parts, clip, AdamW, teacher, centres."""
        clock = Clock()
        losses: dict[str, torch.Tensor] = {}
        self.model.watching, self.glimpses = look, []
        for part in range(self.config.optim.accumulate):
            with clock.waiting():
                raw = next(parts)
            batch = render_batch(raw, self.config, self.device)
            self.generator.manual_seed(stochastic_depth_seed(self.config.seed, step, part))
            for name, value in self._backward(batch, values).items():
                losses[name] = losses[name] + value if name in losses else value
            if look and self.model.glimpse is not None:
                self.glimpses.append(self.model.glimpse)
        stop_unless_finite("loss", losses, step)
        norms = self.optimizer.clip()
        stop_unless_finite("gradient norm of", norms, step)
        self.optimizer.step(values)
        self.model.update_teacher(values.momentum)
        self.model.update_centers()
        self.dino = float(losses["dino"])
        return self._metrics(losses, norms, values, clock)

    def _backward(self, batch: Batch, values: StepValues) -> dict[str, torch.Tensor]:
        """Losses of a part of the step; their gradients are added up."""
        with self._autocast():
            losses = self.model(batch, values.teacher_temperature, self.generator)
        total = losses.total(self.config.loss.weights())
        total.backward()
        return {name: value.detach() for name, value in {"total": total, **losses.named()}.items()}

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def _metrics(
        self,
        losses: Mapping[str, torch.Tensor],
        norms: Mapping[str, torch.Tensor],
        values: StepValues,
        clock: "Clock",
    ) -> dict[str, Any]:
        seconds = clock.seconds()
        return {
            **{name: float(value) for name, value in losses.items()},
            **values._asdict(),
            "student_temperature": self.config.loss.student_temperature,
            **{f"gradient_norm_{part}": float(norm) for part, norm in norms.items()},
            "samples_per_second": self.config.optim.batch / seconds,
            "data_wait": clock.waited / seconds,
            "memory_gib": peak_memory_gib(self.device),
        }

    def health(self) -> health.Health:
        """Health figures of the last step, which was looked at."""
        return health.measure(self.glimpses, self.dino)


@dataclass
class Clock:
    """How long a step took, and how much of it was spent waiting for data."""

    started: float = 0.0
    waited: float = 0.0

    def __post_init__(self) -> None:
        self.started = time.perf_counter()

    def waiting(self) -> "Clock":
        """Count the time of a with-block as waiting."""
        return self

    def __enter__(self) -> None:
        self._entered = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.waited += time.perf_counter() - self._entered

    def seconds(self) -> float:
        """Time since the step began."""
        return time.perf_counter() - self.started


def stop_unless_finite(what: str, named: Mapping[str, torch.Tensor], step: int) -> None:
    """Stop before a number that is not finite reaches the weights."""
    values = dict(zip(named, torch.stack(list(named.values())).tolist(), strict=True))
    bad = [
        f"{name}={value}" for name, value in values.items() if not math.isfinite(value) and name != "total"
    ]
    if bad:
        raise DivergedError(f"{what} {', '.join(bad)} at step {step + 1}: stopped before the update.")


def what_remains(run: Path, saved: int) -> str:
    """What a run that had to stop leaves behind."""
    kept = (
        f"The checkpoint of step {saved} is in {run / CHECKPOINT}" if saved else "There is no checkpoint yet"
    )
    return f"{kept}; try a lower --optim.base-lr in a new run."


def open_store(config: Config, frames: str | Path | None) -> FrameStore:
    """The store at a path, or rendered videos."""
    if frames is not None:
        return FrameStore.open(frames)
    rendered = config.rendered
    return FrameStore.rendered(
        videos=rendered.videos, frames=rendered.frames, size=rendered.size, seed=config.seed
    )


def introduce(source: Source, trainer: Trainer, num_steps: int, first_step: int) -> list[str]:
    """The first lines of a run: what it is, and what will not be as it seems."""
    config = source.config
    clips = len(source.clips.video)
    short = f" ({source.num_short} too short, left out)" if clips < len(source.all_clips.video) else ""
    begin = f"resumes at step {first_step} of" if first_step else "takes"
    lines = [
        f"{clips} videos{short}, batch {config.optim.batch}, {source.steps_per_epoch} steps an epoch; "
        f"{begin} {num_steps} steps on {trainer.device} in {config.optim.precision}; "
        f"ln K = {math.log(config.head.prototypes):.2f}"
    ]
    if config.loss.koleo and config.optim.batch == config.optim.accumulate:
        lines.append("warning: one video at a time has no neighbours: koleo is 0 throughout.")
    crops = 2 * min(config.masking.group, config.optim.batch)
    if config.masking.probability > 0 and int(crops * config.masking.probability) == 0:
        share = config.masking.probability
        lines.append(f"warning: masking.probability={share} of {crops} crops masks none: no patch losses.")
    if config.sandwich.cuts == "split" and len(source.all_clips.video) == len(source.store):
        lines.append("warning: sandwich.cuts=split, but this store knows no shot cuts.")
    return lines
