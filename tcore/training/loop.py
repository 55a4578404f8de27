"""Training: the loop around the step."""

import json
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from tcore.config import Config
from tcore.data.loader import load
from tcore.data.neighbors import ImageSource, check_neighbors, find_neighbors, load_neighbors
from tcore.data.samples import Share, Source
from tcore.data.stores import FrameStore, open_images, open_mixture
from tcore.data.workers import missing_killed_workers
from tcore.device import choose_device, choose_dtype, world
from tcore.errors import DivergedError, InputError, PeerError
from tcore.files import LOCKS, lock, write_text
from tcore.model.tcore import TCoRe
from tcore.training import distributed, generations
from tcore.training.build import build_schedule, compiles
from tcore.training.checkpoint import (
    CHECKPOINT,
    check_run,
    keep_encoder,
    load_checkpoint,
    open_run,
    save_checkpoint,
)
from tcore.training.guard import StopRequest, StopRequested, explaining
from tcore.training.init import Init, apply_init, read_init, record_init
from tcore.training.journal import Journal, Silence, environment
from tcore.training.monitor import BadSamples, DataWait, UnreadableError
from tcore.training.step import Outcome, Trainer
from tcore.training.watch import Watch, Watcher
from tcore.validation import validate


def train(
    config: Config,
    run: str | Path,
    frames: str | Path | None = None,
    *,
    neighbors: str | Path | None = None,
    watch: Watch | None = None,
    quiet: bool = False,
    on_step: Callable[[int], None] | None = None,
) -> Path:
    """Train in a run folder, or resume there; without `frames` on rendered videos.

    Neighbors of images are found inside or beside their store, unless `neighbors` is another file.
    `on_step` is called with the number of steps done, before each step.
    With a `watch` the encoder is scored along the way, and the best is kept; what is trained stays the same.

    >>> import tempfile, tcore
    >>> config = tcore.recipe("quickstart", {"optim.steps": 1, "optim.batch": 2, "rendered.videos": 2})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = tcore.train(config, folder + "/run", quiet=True)
    ...     sorted(path.name for path in run.glob("encoder*"))
    ['encoder.json', 'encoder.safetensors', 'encoders']
    """
    run = Path(run)
    with distributed.guarded(config.runtime.device, config.runtime.patience) as guard:
        config = distributed.together(lambda: resolve(config))
        source = distributed.together(lambda: open_source(config, frames, neighbors))
        # A run that goes on has its weights in the checkpoint; what it began with is not read again.
        resumes = distributed.on_first(lambda: generations.exists(run / CHECKPOINT))
        init = None if resumes else distributed.together(lambda: read_init(config))
        distributed.on_first(lambda: check_run(run, config))
        if watch is not None:
            eyes = watch
            distributed.on_first(lambda: eyes.check(config.vit.patch_size))
        # A process that has lost another one says so before it handles torchrun's SIGTERM.
        with StopRequest() as stop, explaining(guard), lock_run(run), missing_killed_workers():
            return _train(config, run, source, frames, init, watch, stop, quiet, on_step)


def _train(
    config: Config,
    run: Path,
    source: Source,
    frames: str | Path | None,
    init: Init | None,
    watch: Watch | None,
    stop: StopRequest,
    quiet: bool,
    on_step: Callable[[int], None] | None,
) -> Path:
    """Train in a run folder that no other job writes to."""
    distributed.on_first(lambda: open_run(run, config))
    schedule = build_schedule(config, source.steps_per_epoch)
    trainer = Trainer(config)
    begin_from(init, run, trainer.model)
    fingerprint = distributed.agree("--frames", source.fingerprint())
    notes: list[str] = []
    saved = first_step = load_checkpoint(run, trainer.model, trainer.optimizer, fingerprint, notes.append)
    distributed.on_first(lambda: note_environment(run, source, trainer, frames))
    journal = open_journal(run, first_step, schedule.num_steps, config.head.prototypes, quiet)
    notes += introduce(source, trainer, schedule.num_steps, first_step)
    journal.say("\n".join((*notes, *(init.lines if init else ()))))
    watcher = Watcher(watch, run, trainer, schedule.num_steps, stop, journal.say)
    noted = Noted(journal, DataWait(source), BadSamples(config.runtime.bad_samples), config.optim.batch)
    parts = load(source, first_step, schedule.num_steps, trainer.device)
    try:
        unread: list[Outcome] = []
        if watcher.due(first_step):  # the run may have ended while this was scored; if not, it is on disk
            watcher.look(first_step)
        for step in range(first_step, schedule.num_steps):
            done, last = step + 1, step + 1 == schedule.num_steps
            if on_step is not None:
                on_step(step)
            look = done % config.runtime.log_every == 0 or last
            keep = last or keeps(done, schedule.num_steps, config.keep_every)
            unread.append(trainer.step(parts, step, schedule.at(step), look))
            leave = None if last else asked_to_leave(stop, look)
            score = watcher.due(done)
            save = last or score or done % config.checkpoint_every == 0 or leave is not None
            # A GPU works on while the outcome of the step before is read; nothing is saved unread.
            while len(unread) > (0 if look or keep or save else 1):
                noted.note(unread.pop(0))
            if keep:
                keep_encoder(run, done, trainer.model)
            if save:
                save_checkpoint(run, done, trainer.model, trainer.optimizer, config, fingerprint)
                saved = done
            if score and leave is None:  # after the checkpoint: whatever ends it, no step is lost
                watcher.look(done)
                leave = None if last else asked_to_leave(stop, True)
            if leave is not None:
                journal.say(
                    f"{leave}: saved step {done} of {schedule.num_steps}; rerun the same command to resume."
                )
                raise StopRequested
    except (DivergedError, UnreadableError) as error:
        if not trainer.world.first:  # every process has met it
            raise PeerError(str(error), error.exit_code) from error
        if isinstance(error, UnreadableError):
            raise
        raise DivergedError(f"{error} {what_remains(run, saved)}") from error
    finally:
        parts.close()  # the reading processes go now, not when somebody lets go of an exception
        journal.close()
    return run


def lock_run(run: Path) -> AbstractContextManager[None]:
    """Keep other jobs from a run folder; of several processes, the first one holds it."""
    first = world().first
    return lock(run / LOCKS[0], f"run {run}", "give another --run") if first else nullcontext()


def open_journal(
    run: Path, first_step: int, num_steps: int, num_prototypes: int, quiet: bool
) -> Journal | Silence:
    """The journal of the first process; the others are silent."""
    return (
        distributed.only_first(lambda: Journal(run, first_step, num_steps, num_prototypes, quiet))
        or Silence()
    )


def begin_from(init: Init | None, run: Path, model: TCoRe) -> None:
    """Give a new run the weights that it starts from, where it starts from any, and note which ones."""
    if init is None:
        return
    distributed.on_first(lambda: record_init(init, run))
    apply_init(init, model)


class Noted(NamedTuple):
    """Where the outcome of a step is noted, and who has a word to say about it."""

    journal: Journal | Silence
    wait: DataWait
    bad: BadSamples
    batch: int

    def note(self, outcome: Outcome) -> None:
        """Read what came out of a step, and write it down."""
        step, metrics, health = outcome.step + 1, outcome.metrics(), outcome.health()
        self.journal.record(step, metrics, health)
        if slow := self.wait.note(step, metrics, health is not None):
            self.journal.say(slow)
        if unreadable := self.bad.note(step, outcome.all_bad(), self.batch):
            self.journal.say(unreadable)


def asked_to_leave(stop: StopRequest, look: bool) -> str | None:
    """The signal that asks the run to leave; of several processes, all must know, and ask where they look."""
    if distributed.alone():
        return stop.name
    if look and distributed.anyone(stop.name is not None):
        return stop.name or "a signal to another process"
    return None


def resolve(config: Config) -> Config:
    """Settings that can work, with what depends on the machine filled in; the others are refused."""
    config = validate(config)
    check_share(config.optim.batch, config.optim.accumulate)
    dtype = choose_dtype(config.optim.precision, choose_device(config.runtime.device))
    precision: Literal["bf16", "fp32"] = "bf16" if dtype == torch.bfloat16 else "fp32"
    return replace(config, optim=replace(config.optim, precision=precision))


def check_share(batch: int, accumulate: int) -> None:
    """Every process must get equally many videos of every part of a step."""
    processes = world().size
    if batch % (processes * accumulate):
        raise InputError(
            f"optim.batch={batch} cannot be shared equally by {processes} processes in "
            f"optim.accumulate={accumulate} parts: need a multiple of {processes * accumulate}."
        )


def note_environment(run: Path, source: Source, trainer: Trainer, frames: str | Path | None) -> None:
    """Write down what the run is carried out with."""
    made_with = environment(trainer.device) | {
        "frames": "rendered" if frames is None else str(frames),
        "processes": str(trainer.world.size),
    }
    if isinstance(source, ImageSource):
        made_with["neighbors"] = f"{source.neighbors.fingerprint()}, by {source.neighbors.encoder}"
    write_text(run / "environment.json", json.dumps(made_with, indent=2) + "\n")


def keeps(done: int, num_steps: int, keep_every: int | None) -> bool:
    """Whether the encoder of this step is kept: every so many steps, or 20 over the run."""
    if keep_every is not None:
        return done % keep_every == 0
    return done * 20 // num_steps != (done - 1) * 20 // num_steps


def what_remains(run: Path, saved: int) -> str:
    """What a run that had to stop leaves behind."""
    kept = (
        f"The checkpoint of step {saved} is in {run / CHECKPOINT}" if saved else "There is no checkpoint yet"
    )
    return f"{kept}; try a lower --optim.base-lr in a new run."


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
    """Where the samples of a run come from: videos, or images and, for the auxiliary branch, neighbors."""
    if neighbors is not None and (config.source != "images" or config.auxiliary == "none"):
        raise InputError(
            f"--neighbors {neighbors} has no effect with source={config.source}, "
            f"auxiliary={config.auxiliary}: it goes with --source images --auxiliary past."
        )
    store, own = open_store(config, frames), world()
    share = Share(own.rank, own.size, own.here)
    if config.source == "videos" or config.auxiliary == "none":
        return Source(store, config, share)
    assert frames is not None  # images have a place
    path = Path(neighbors) if neighbors is not None else find_neighbors(frames)
    found = load_neighbors(path)
    check_neighbors(found, path, len(store), store.fingerprint())
    return ImageSource(store, config, found, share)


def introduce(source: Source, trainer: Trainer, num_steps: int, first_step: int) -> list[str]:
    """The first lines of a run: what it is, and what will not be as it seems."""
    config, world = source.config, trainer.world
    clips = len(source.clips.video)
    short = f" ({source.num_short} too short, left out)" if clips < len(source.all_clips.video) else ""
    begin = f"resumes at step {first_step} of" if first_step else "takes"
    what: str = config.source
    if isinstance(source, ImageSource):
        what += f" with {source.neighbors.k} neighbors each (by {source.neighbors.encoder})"
    each = ""
    if world.size > 1:
        how = "a share of the model each" if config.runtime.sharding == "shard" else "the whole model each"
        each = f" ({config.optim.batch // world.size} in each of {world.size} processes, {how})"
    plural = "s"[: source.steps_per_epoch > 1]
    lines = [
        f"{clips} {what}{short}, batch {config.optim.batch}{each}, "
        f"{source.steps_per_epoch} step{plural} an epoch; "
        f"{begin} {num_steps} steps on {trainer.device} in {config.optim.precision}; "
        f"ln K = {math.log(config.head.prototypes):.2f}"
    ]
    if compiles(config.runtime.compile, trainer.device):
        lines.append("the first step compiles the model, for up to a minute (--runtime.compile off: never)")
    frozen = config.optim.freeze_backbone_steps
    if frozen >= num_steps:
        lines.append(f"warning: optim.freeze_backbone_steps={frozen}: the backbone never moves in this run.")
    processes = 1 if config.loss.koleo_global else world.size
    if config.loss.koleo and config.optim.batch == config.optim.accumulate * processes:
        lines.append("warning: one video at a time has no neighbors: koleo is 0 throughout.")
    crops = 2 * min(config.masking.group, config.optim.batch)
    if config.masking.probability > 0 and int(crops * config.masking.probability) == 0:
        share = config.masking.probability
        lines.append(f"warning: masking.probability={share} of {crops} crops masks none: no patch losses.")
    if config.sandwich.cuts == "split" and len(source.all_clips.video) == len(source.store):
        lines.append("warning: sandwich.cuts=split, but this store knows no shot cuts.")
    return lines
