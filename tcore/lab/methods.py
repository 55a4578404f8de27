"""Methods side by side: one set of clips, one budget, one way of scoring at two grids."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from tcore.config import Config, differences, from_dict, override, to_dict
from tcore.device import choose_device
from tcore.errors import InputError
from tcore.evaluation.card import device_name
from tcore.evaluation.protocols import Precision
from tcore.files import check_writable, write_json
from tcore.lab.record import COST, NO_WORK, SPEED, WORK, Dataset, read_speed, read_work, scored_by
from tcore.lab.results import write_rows
from tcore.lab.runs import (
    DONE,
    Job,
    Processes,
    Row,
    finished,
    refuse_changed,
    run_command,
    run_jobs,
    run_table,
)
from tcore.pretrain import check_training
from tcore.text import Say, count, silent
from tcore.training.checkpoint import ENCODER

WORKER = "tcore.lab.worker"
MEASURED = 10.0  # seconds of steps that tell the speed of a row
# Rows without learning, which a method should beat: labels of the first frame, mean color of a patch.
BASELINES = ("copy", "color")


@dataclass(frozen=True)
class Entry:
    """A row: its name, the recipe that it starts from, and its settings (the seed and the length follow)."""

    name: str
    recipe: str
    config: Config


@dataclass(frozen=True)
class Budget:
    """How long every row is trained, given in one of three ways; without any, as long as its recipe says."""

    steps: int | None = None
    samples: int | None = None
    minutes: float | None = None
    """Minutes of training on this device, at the steady speed that is measured first."""

    def __post_init__(self) -> None:
        given = {name: value for name, value in vars(self).items() if value is not None}
        if len(given) > 1 or not all(value > 0 for value in given.values()):
            said = ", ".join(f"{name}={value}" for name, value in given.items())
            raise InputError(f"budget of {said}: give one of steps, samples and minutes, above 0.")

    def steps_of(self, config: Config, samples_per_second: float | None) -> int | None:
        """The length of a run in steps."""
        if self.steps is not None:
            return self.steps
        samples = self.samples
        if self.minutes is not None:
            assert samples_per_second is not None  # measured before anything is trained
            samples = round(60 * self.minutes * samples_per_second)
        return config.optim.steps if samples is None else max(1, round(samples / config.optim.samples))


@dataclass(frozen=True)
class Shared:
    """What all rows share."""

    frames: str | None = None
    """Training data, as for `tcore train`; None: rendered videos."""
    datasets: tuple[Dataset, ...] = (Dataset("rendered", "24"),)
    precision: Precision = "fp32"
    """Arithmetic of scoring; bf16 is faster on a GPU."""

    def scoring(self) -> dict[str, Any]:
        """How rows are scored, for job.json."""
        return {"datasets": [list(each) for each in self.datasets], "precision": self.precision}

    def check(self) -> None:
        """Refuse data that could not be scored, before anything is trained."""
        labels = [dataset.label for dataset in self.datasets]
        for dataset in self.datasets:
            if labels.count(dataset.label) > 1:
                raise InputError(f"two datasets are called {dataset.label}: give one of them another name.")
            dataset.check()


def compare(
    entries: Sequence[Entry],
    out: Path,
    shared: Shared,
    *,
    baselines: Sequence[str] = (),
    budget: Budget = Budget(),
    seeds: int = 1,
    devices: Sequence[str] = ("",),
    measure: bool = False,
    seconds: float = MEASURED,
    say: Say = silent,
) -> list[str]:
    """Train and score what is missing; write lab.md, lab.json and lab.png. Rows of earlier calls are kept.

    `baselines` (`BASELINES`) are rows that are only scored, on the grid of the first entry. `measure` times
    every row alone even if the budget does not need it. `devices` are GPU numbers; one listed twice takes
    two runs at a time.
    """
    check_writable(out)
    shared.check()
    check_rows(entries, shared, seeds, baselines)
    runs = {
        Job(Row(entry.name), seed, out / entry.name / f"seed-{seed}"): entry
        for seed in range(seeds)
        for entry in entries
    }
    if measure or budget.minutes is not None:
        for job, entry in runs.items():  # refuses before anything is measured; the length is not known yet
            work = work_of(entry, shared, job.seed, entry.config.optim.steps)
            check_training_of(job.folder, work, {"optim.steps"})
        if budget.minutes is not None:
            check_measured_here(job.folder for job in runs if not (job.folder / DONE).is_file())
        measure_rows(entries, out, shared, devices, seconds, say)
    works: dict[Job, dict[str, Any]] = {}
    for job, entry in runs.items():
        speed = read_speed(out / entry.name, entry.config)
        steps = budget.steps_of(entry.config, None if speed is None else speed["samples_per_second"])
        works[job] = work_of(entry, shared, job.seed, steps)
    for name in baselines:
        job = Job(Row(name), 0, out / name / "seed-0")
        works[job] = baseline_work(name, entries[0].config.vit.patch_size, shared)
    todo = {job: is_missing(job, work) for job, work in works.items()}  # refuses before anything is written
    commands: dict[Job, list[list[str]] | None] = dict.fromkeys(works)
    for job, work in works.items():
        if todo[job]:
            (job.folder / DONE).unlink(missing_ok=True)
            trained = "baseline" in work or (job.folder / COST).is_file()
            train = [] if trained else [["train", str(job.folder), str(len(devices))]]
            commands[job] = [*train, ["score", str(job.folder)]]
        write_json(job.folder / WORK, work)
    write = partial(write_rows, out, [entry.name for entry in entries])
    return run_table(commands, out, devices, say, write, WORKER)


def check_rows(entries: Sequence[Entry], shared: Shared, seeds: int, baselines: Sequence[str]) -> None:
    """Refuse rows that could not be trained, before the first one is."""
    if seeds < 1 or not entries or set(baselines) - set(BASELINES):
        wanted = f"one row or more, one seed or more, and baselines out of {', '.join(BASELINES)}"
        raise InputError(f"rows={len(entries)}, seeds={seeds}, baselines={[*baselines]}: need {wanted}.")
    for entry in entries:
        if Row(entry.name).folder != entry.name:
            raise InputError(f"row {entry.name!r} cannot name a folder: use letters, digits, . _ and -.")
        try:
            check_training(entry.config, shared.frames)
        except InputError as error:
            raise InputError(f"row {entry.name}: {error}") from error


def measure_rows(
    entries: Sequence[Entry], out: Path, shared: Shared, devices: Sequence[str], seconds: float, say: Say
) -> None:
    """Measure the steady speed of every row that has none yet; several warm up at a time, one is timed."""
    missing = [entry for entry in entries if read_speed(out / entry.name, entry.config) is None]
    for entry in missing:
        work = {"config": to_dict(entry.config), "frames": shared.frames}
        write_json(out / entry.name / WORK, work)

    def run(job: Job, free: "SimpleQueue[str]", processes: Processes) -> None:
        device = free.get()
        try:
            run_command(["speed", str(job.folder), str(seconds)], job, "speed.log", device, processes, WORKER)
        finally:
            free.put(device)
        if (found := read_speed(job.folder)) is not None:
            wait = f"{found.get('wait', 0.0):.0%} of the time waiting for frames"
            say(
                f"{job.row.name}: {found['samples_per_second']:.1f} samples/s, {found['gib']:.1f} GiB, {wait}"
            )

    jobs = [Job(Row(entry.name), 0, out / entry.name) for entry in missing]
    say(f"measuring the speed of {count(len(jobs), 'row')}")
    if failed := run_jobs(jobs, run, devices, say, lambda: None):
        raise failed[0]


def work_of(entry: Entry, shared: Shared, seed: int, steps: int | None) -> dict[str, Any]:
    """What job.json says of a run: how to train and score it."""
    return {
        "recipe": entry.recipe,
        "frames": shared.frames,
        "config": to_dict(override(entry.config, {"optim.steps": steps, "seed": seed})),
        **shared.scoring(),
    }


def baseline_work(name: str, patch_size: int, shared: Shared) -> dict[str, Any]:
    """What job.json says of a baseline, which is only scored."""
    return {"config": {}, "baseline": name, "patch_size": patch_size, **shared.scoring()}


def is_missing(job: Job, work: dict[str, Any]) -> bool:
    """Whether a run is still to be trained or scored; refuses a folder that was made with other settings."""
    folder = job.folder
    if "baseline" not in work:
        check_training_of(folder, work)
    if not (folder / WORK).is_file() or not (folder / DONE).is_file():
        return True
    changed = scored_by(read_work(folder)) != scored_by(NO_WORK | work)
    if changed and "baseline" not in work and not (folder / "run" / ENCODER).is_file():
        raise InputError(
            f"{folder} has no {ENCODER} left that could be scored in another way: score it as before, give "
            "another --out, or remove this folder."
        )
    return changed


def check_training_of(folder: Path, work: Mapping[str, Any], but: Collection[str] = ()) -> None:
    """Refuse a run's folder if its data or settings differ, except the settings in `but`."""
    if not (folder / WORK).is_file():
        return
    before = read_work(folder)
    changed = differences(from_dict(before["config"]), from_dict(work["config"]))
    refuse_changed({name: pair for name, pair in changed.items() if name not in but}, folder)
    if before["frames"] != work["frames"]:
        raise InputError(
            f"{folder} was made with --frames {before['frames']}, now {work['frames']}: give another "
            "--out, or remove this folder."
        )


def check_measured_here(runs: Iterable[Path]) -> None:
    """Refuse to turn minutes into steps by the speed of another device."""
    for row in dict.fromkeys(run.parent for run in runs):
        found = read_speed(row) or {}
        here = device_name(choose_device(from_dict(found["config"]).runtime.device)) if found else ""
        if found.get("device", here) == here:
            continue
        remedy = f"give another --out, or remove {SPEED}"
        if done := finished(row):  # another speed would give the runs that follow another length
            optim = from_dict(read_work(done[0])["config"]).optim
            remedy = f"give --budget-samples {(optim.steps or 0) * optim.samples}, what its runs have seen"
        raise InputError(f"{row / SPEED} was measured on {found['device']}, this is {here}: {remedy}.")
