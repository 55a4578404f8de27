"""Training: the loop around the step."""

import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from tcore import methods
from tcore.config import Config, validate
from tcore.data.loader import holds_frames, load, missing_killed_workers
from tcore.data.neighbors import ImageSource, check_neighbors, find_neighbors, load_neighbors
from tcore.data.source import RawBatch, Source
from tcore.data.stores import FrameStore, open_images, open_mixture
from tcore.device import choose_device, choose_dtype, world
from tcore.errors import DivergedError, InputError, PeerError
from tcore.files import LOCKS, lock
from tcore.text import count
from tcore.training import distributed
from tcore.training.checkpoint import (
    Init,
    apply_init,
    check_run,
    has_checkpoint,
    keep_encoder,
    load_checkpoint,
    open_run,
    record_init,
    save_checkpoint,
)
from tcore.training.guard import StopRequest, StopRequested, explaining, heartbeat
from tcore.training.journal import (
    BadSamples,
    DataWait,
    Journal,
    TooManyUnreadableError,
    check_log,
    note_environment,
    open_tracker,
)
from tcore.training.optim import build_schedule
from tcore.training.step import Outcome, Timing, Trainer
from tcore.training.wrapping import compiles

OnStep = Callable[[int], None]


class ScoreNow(NamedTuple):
    """What the first process hands over to have its encoder scored during training."""

    step: int
    weights: Mapping[str, Tensor]
    """Of the encoder, on the device or the CPU."""
    config: Config
    run: Path
    device: torch.device
    extras: Mapping[str, Mapping[str, Tensor]]
    """Weights of what the method saves beside its encoder, by name."""
    stopped: Callable[[], bool]
    """Whether a stop is requested; call it often: it also tells the other processes that work continues."""
    say: Callable[[str], None]


@runtime_checkable
class Scoring(Protocol):
    """Scores encoders during training."""

    @property
    def every(self) -> int:
        """Steps between two scores; the last step is scored as well."""

    def check(self, patch_size: int) -> None:
        """Refuse what could not be scored, before anything is trained."""

    def __call__(self, now: ScoreNow) -> None:
        """Score an encoder; whatever fails is printed, and never ends a run."""


def train_run(
    config: Config,
    run: Path,
    frames: str | Path | None = None,
    *,
    neighbors: str | Path | None = None,
    read_init: Callable[[Config], Init | None] = lambda config: None,
    scoring: Scoring | None = None,
    quiet: bool = False,
    on_step: OnStep | None = None,
) -> Path:
    """Train in a run folder, or resume there; tcore/pretrain.py has what users call."""
    with distributed.guarded(config.runtime.device, config.runtime.patience) as guard:
        config = distributed.together(lambda: resolve(config))
        source = distributed.together(lambda: open_source(config, frames, neighbors))
        distributed.together(lambda: holds_frames(source))
        # A run that resumes has its weights in the checkpoint; what it began with is not read again.
        resumes = distributed.on_first(lambda: has_checkpoint(run))
        init = None if resumes else distributed.together(lambda: read_init(config))
        distributed.on_first(lambda: check_run(run, config))
        if scoring is not None:
            distributed.on_first(partial(scoring.check, config.vit.patch_size))
        # A process that has lost another one says so before it handles torchrun's SIGTERM.
        with StopRequest() as stop, explaining(guard), lock_run(run), missing_killed_workers():
            distributed.on_first(lambda: open_run(run, config))
            return Run(config, run, source, frames, scoring, stop, on_step).train(init, quiet)


class Run:
    """One job in a run folder that no other job writes to."""

    def __init__(
        self,
        config: Config,
        run: Path,
        source: Source,
        frames: str | Path | None,
        scoring: Scoring | None,
        stop: StopRequest,
        on_step: OnStep | None,
    ) -> None:
        self.config, self.run, self.source, self.frames = config, run, source, frames
        self.scoring, self.stop, self.on_step = scoring, stop, on_step
        self.trainer = Trainer(config)
        self.schedule = build_schedule(config, self.trainer.method, source.steps_per_epoch)
        self.fingerprint = distributed.agree("--frames", source.fingerprint())
        self.saved = self.done = 0
        self.unread: list[Outcome] = []
        """Outcomes of steps that are not recorded yet."""

    def train(self, init: Init | None, quiet: bool) -> Path:
        """Train from the last checkpoint to the end."""
        config, run, source, trainer = self.config, self.run, self.source, self.trainer
        if init is not None:
            distributed.on_first(lambda: record_init(init, run))
            apply_init(init, trainer.method)
        notes: list[str] = []
        self.saved = self.done = first_step = load_checkpoint(
            run, trainer.method, trainer.optimizer, self.fingerprint, notes.append
        )
        made = (run, source, trainer.device, self.frames, first_step > 0)
        notes.append(distributed.on_first(lambda: note_environment(*made)))
        num_steps = self.schedule.num_steps
        journal = distributed.only_first(
            lambda: Journal(run, first_step, num_steps, quiet, open_tracker(config, run, first_step))
        )
        record = Recorder(
            journal, DataWait(source), BadSamples(config.runtime.bad_samples), config.optim.samples
        )
        notes += introduce(source, trainer, num_steps, first_step)
        record.say("\n".join(filter(None, (*notes, *(init.lines if init else ())))))
        parts = load(source, first_step, num_steps, trainer.device)
        try:
            with self._saving(record):
                self._loop(first_step, parts, record)
        except (DivergedError, TooManyUnreadableError) as error:
            if not trainer.world.first:  # all processes raise it, the first one prints it
                raise PeerError(str(error), error.exit_code) from error
            if isinstance(error, TooManyUnreadableError):
                raise
            kept = f"the checkpoint of step {self.saved} is kept" if self.saved else "no checkpoint yet"
            raise DivergedError(
                f"{error} In {run}: {kept}; try a lower --optim.base-lr in a new run."
            ) from error
        finally:
            parts.close()  # ends the reading processes now, not when the exception is garbage-collected
            if journal is not None:
                journal.close()
        return run

    def _loop(self, first_step: int, parts: Iterator[RawBatch], record: "Recorder") -> None:
        """Step by step: train, record, save, score, and stop where that is requested."""
        config, num_steps, trainer, unread = self.config, self.schedule.num_steps, self.trainer, self.unread
        if self._score_due(first_step):  # a run killed while scoring scores now; a score on disk is reused
            self._score(first_step, record.say)
        for step in range(first_step, num_steps):
            done, last = step + 1, step + 1 == num_steps
            if self.on_step is not None:
                self.on_step(step)
            look = done % config.runtime.log_every == 0 or last
            keep = last or keeps(done, num_steps, config.keep_every)
            unread.append(trainer.step(parts, step, self.schedule.at(step), look))
            self.done = done
            leave = None if last else stop_requested(self.stop, look)
            score = self._score_due(done)
            save = last or score or done % config.checkpoint_every == 0 or leave is not None
            # The GPU runs this step while the numbers of the one before are read; a saved step is read first.
            while len(unread) > (0 if look or keep or save else 1):
                record(unread[0])
                unread.pop(0)
            if keep:
                keep_encoder(self.run, done, trainer.method)
            if save:
                self._save()
            if score and leave is None:  # after the checkpoint: if scoring is killed, no step is lost
                self._score(done, record.say)
                leave = None if last else stop_requested(self.stop, True)
            if leave is not None:
                record.say(f"{leave}: saved step {done} of {num_steps}; rerun the same command to resume.")
                raise StopRequested(leave)

    def _save(self) -> None:
        method, optimizer = self.trainer.method, self.trainer.optimizer
        save_checkpoint(self.run, self.done, method, optimizer, self.config, self.fingerprint)
        self.saved = self.done

    @contextmanager
    def _saving(self, record: "Recorder") -> Iterator[None]:
        """Save the last whole step when an error ends the run, unless it has diverged.

        One of several processes cannot: the others may be elsewhere. They resume from the last checkpoint.
        """
        try:
            yield
        except DivergedError:
            raise
        except Exception:
            if distributed.alone() and self.trainer.whole and self.done > self.saved:
                with suppress(Exception):  # what ended the run matters more
                    for outcome in self.unread:
                        record(outcome)  # a step that diverged is noticed here, too
                    self._save()
                    record.say(f"an error ends the run: saved step {self.done} of {self.schedule.num_steps}.")
            raise

    def _score_due(self, step: int) -> bool:
        """Whether the encoder of this step is to be scored."""
        if self.scoring is None or step < 1:
            return False
        return step == self.schedule.num_steps or step % self.scoring.every == 0

    def _score(self, step: int, say: Callable[[str], None]) -> None:
        """Score the encoder on the first process, while others wait."""
        trainer, scoring = self.trainer, self.scoring
        assert scoring is not None  # otherwise never due
        weights = distributed.whole(trainer.method.encoder().state_dict())
        extras = {
            name: distributed.whole(module.state_dict()) for name, module in trainer.method.extras().items()
        }

        def stopped() -> bool:
            heartbeat()  # the other processes wait: scoring takes long, and is no hang
            return self.stop.name is not None

        now = ScoreNow(step, weights, self.config, self.run, trainer.device, extras, stopped, say)
        distributed.on_first(lambda: scoring(now))
        # The next step's time begins now.
        trainer.timing = Timing(trainer.device)


def lock_run(run: Path) -> AbstractContextManager[None]:
    """Keep other jobs from a run folder; of several processes, the first one holds it."""
    first = world().first
    return lock(run / LOCKS[0], f"run {run}", "give another --run") if first else nullcontext()


class Recorder(NamedTuple):
    """Records the outcome of each step; the first process alone has a journal."""

    journal: Journal | None
    wait: DataWait
    bad: BadSamples
    batch: int

    def __call__(self, outcome: Outcome) -> None:
        """Read the numbers of a step, and record them."""
        step, metrics, health = outcome.step + 1, outcome.metrics(), outcome.health()
        if self.journal is not None:
            self.journal.record(step, metrics, health)
        if slow := self.wait.note(step, metrics, health is not None):
            self.say(slow)
        if unreadable := self.bad.note(step, outcome.all_bad(), self.batch):
            self.say(unreadable)

    def say(self, text: str) -> None:
        """Print something, on the first process."""
        if self.journal is not None:
            self.journal.say(text)


def stop_requested(stop: StopRequest, look: bool) -> str | None:
    """The signal that requests a stop; several processes exchange it where they `look`, to stop together."""
    if distributed.alone():
        return stop.name
    if look and distributed.largest([stop.name is not None])[0]:
        return stop.name or "a signal to another process"
    return None


def resolve(config: Config) -> Config:
    """Checked settings, with what depends on the machine filled in."""
    config = validate(config)
    check_log(config.log)
    if platform.system() == "Windows":
        raise InputError(
            "training does not run on Windows, where no signal asks a run to save itself; use WSL or Linux. "
            "propagate, evaluate, demo and export run here."
        )
    batch, accumulate, processes = config.optim.samples, config.optim.accumulate, world().size
    if batch % (processes * accumulate):
        raise InputError(
            f"optim.batch={config.optim.batch} ({batch} samples) cannot be shared equally by {processes} "
            f"processes in optim.accumulate={accumulate} parts: need a multiple of {processes * accumulate}."
        )
    dtype = choose_dtype(config.optim.precision, choose_device(config.runtime.device))
    precision: Literal["bf16", "fp32"] = "bf16" if dtype == torch.bfloat16 else "fp32"
    return replace(config, optim=replace(config.optim, precision=precision))


def keeps(done: int, num_steps: int, keep_every: int | None) -> bool:
    """Whether the encoder of this step is kept: every `keep_every` steps, or 20 over the run."""
    if keep_every is not None:
        return done % keep_every == 0
    return done * 20 // num_steps != (done - 1) * 20 // num_steps


def open_store(config: Config, frames: str | Path | None) -> FrameStore:
    """The store at a path, a mixture of stores, or rendered videos."""
    if config.source == "images":
        if frames is None:
            raise InputError("source=images needs --frames IMAGES, a folder of images or a packed store.")
        return open_images(frames)
    if frames is not None:
        return open_mixture(str(frames), config.seed)
    rendered = config.rendered
    return FrameStore.rendered(
        videos=rendered.videos, frames=rendered.frames, size=rendered.size, seed=config.seed
    )


def open_source(config: Config, frames: str | Path | None, neighbors: str | Path | None = None) -> Source:
    """Where the samples of a run come from: videos, or images and, where the method needs them, neighbors."""
    needs_neighbors = config.source == "images" and config.method.needs_neighbors
    if neighbors is not None and not needs_neighbors:
        raise InputError(
            f"--neighbors {neighbors} has no effect with source={config.source} and these settings of "
            f"{config.method.name}: it goes with --source images --auxiliary past."
        )
    store = open_store(config, frames)
    if not needs_neighbors:
        return methods.build_source(store, config, world())
    assert frames is not None  # images have a place
    path = Path(neighbors) if neighbors is not None else find_neighbors(frames)
    found = load_neighbors(path)
    check_neighbors(found, path, len(store), store.fingerprint())
    return ImageSource(store, config, methods.build_sampling(config, store.fps), found, world())


def describe_run(source: Source, num_steps: int, first_step: int = 0) -> str:
    """What a run trains, on what and with how much of it at a time."""
    config, processes, optim = source.config, world().size, source.config.optim
    clips = len(source.clips.video)
    short = f" ({source.num_short} too short, left out)" if clips < len(source.all_clips.video) else ""
    what: str = config.source
    if isinstance(source, ImageSource):
        what += f" with {source.neighbors.k} neighbors each (by {source.neighbors.encoder})"
    each = f" with {optim.repeat} samples each" if optim.repeat > 1 else ""
    parts = f" in {optim.accumulate} parts" if optim.accumulate > 1 else ""
    if processes > 1:
        how = "a share of the model each" if config.runtime.sharding == "shard" else "the whole model each"
        parts += f" ({optim.samples // processes} in each of {processes} processes, {how})"
    begin = f"resumes at step {first_step} of" if first_step else "takes"
    if first_step == num_steps:
        begin = "has finished all"
    epoch = f"{count(source.steps_per_epoch, 'step')} an epoch"
    return (
        f"{clips:,} {what}{short}, batch {optim.batch}{each}{parts}, {epoch}; "
        f"{begin} {count(num_steps, 'step')} of {config.method.name} "
        f"on {choose_device(config.runtime.device)} in {optim.precision}"
    )


def introduce(source: Source, trainer: Trainer, num_steps: int, first_step: int) -> list[str]:
    """The first lines of a run: what it is, and warnings about its settings."""
    config, lines = source.config, [describe_run(source, num_steps, first_step)]
    if compiles(config.runtime.compile, trainer.device):
        lines.append("the first step compiles the model, for up to a minute (--runtime.compile off: never)")
    if holds_frames(source):
        room = f"as many videos as fit into {config.runtime.hold_gib:g} GiB are kept in memory"
        lines.append(f"{room}, decoded before the first step")
    if frozen := config.optim.freeze_backbone_steps:
        lines.append(f"the backbone is frozen for the first {frozen:,} of {num_steps:,} steps")
    lines += trainer.method.warnings(trainer.own_videos) + source.sampling.warnings()
    if source.sampling.split_at_cuts and len(source.all_clips.video) == len(source.store):
        lines.append("warning: cuts=split, but this store knows no shot cuts.")
    return lines
