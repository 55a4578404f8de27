"""Rows of an ablation table, trained and scored one after another or over several GPUs, as one table."""

import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from tcore.errors import InputError
from tcore.files import check_writable, read_json, write_text
from tcore.lab_processes import Processes
from tcore.lab_table import (
    CURVES,
    DONE,
    HEALTH,
    TABLE,
    collect,
    draw_curves,
    markdown,
    read_begun,
    read_done,
)
from tcore.show.tables import TABLES, Row
from tcore.text import did_you_mean

BEGUN = "commands.json"  # of a run that need not be finished
PLACES = ("--run", "--out", "evaluate")  # what the lab itself calls its folders: they may be moved

Said = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """What is common to all rows: where to start from, on which data, for how long, scored on what."""

    recipe: str
    frames: str | None
    budget: int | None
    """Steps of a run; the recipe's own length without it."""
    davis: Path | None
    """Scored on these clips, otherwise on held-out rendered videos."""
    binary: bool
    size: tuple[int, int] | None
    videos: int = 24
    """Held-out rendered videos."""
    extra: tuple[str, ...] = ()
    """More flags for every training."""


@dataclass(frozen=True)
class Job:
    """One row with one seed, in a folder of its own."""

    row: Row
    seed: int
    folder: Path

    def commands(self, plan: Plan) -> list[list[str]]:
        """Train, then score."""
        run = self.folder / "run"
        common = ["--seed", str(self.seed)]
        common += ["--frames", plan.frames] if plan.frames else []
        common += ["--optim.steps", str(plan.budget)] if plan.budget else []
        common += plan.extra
        score = ["evaluate", str(run), "--out", str(self.folder / "scores")]
        score += ["--davis", str(plan.davis)] if plan.davis else ["--synthetic", "--videos", str(plan.videos)]
        score += ["--binary"] if plan.binary else []
        score += ["--size", *map(str, plan.size)] if plan.size else []
        own = split_flags(self.row.flags, f"flags of row {self.row.name!r}")
        return [["train", plan.recipe, "--run", str(run), *without(common, own), *own], score]


def split_flags(text: str, what: str) -> list[str]:
    """The words of a line of flags, as a shell makes them."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise InputError(f"{what}, {text!r}: {str(error).lower()}; close it.") from error


def without(flags: Sequence[str], own: Sequence[str]) -> list[str]:
    """Flags with their values, but for those that a row gives itself.

    >>> without(["--optim.steps", "9", "--teacher.momentum", "0.9", "1", "--x=2"], ["--optim.steps", "5"])
    ['--teacher.momentum', '0.9', '1', '--x=2']
    """
    given = {flag_name(word) for word in own if word.startswith("--")}
    kept, keeps = [], True
    for word in flags:
        keeps = flag_name(word) not in given if word.startswith("--") else keeps
        kept += [word] if keeps else []
    return kept


def flag_name(flag: str) -> str:
    """A flag without its value, spelled with hyphens."""
    return flag.partition("=")[0].replace("_", "-")


def read_table(name: str) -> list[Row]:
    """A table of the paper by its name, or rows of one's own from a JSON file."""
    if name in TABLES:
        return list(TABLES[name])
    path = Path(name)
    if not path.is_file():
        known = ", ".join(TABLES)
        raise InputError(
            f"no table {name!r}: there are {known}, or give a JSON file.{did_you_mean(name, TABLES)}"
        )
    said = read_json(path, "rows from ")
    if not isinstance(said, list) or not all(isinstance(row, dict) and "name" in row for row in said):
        raise InputError(
            f'{path} is no table: need a list such as [{{"name": "fast", "flags": "--optim.base-lr 0.004"}}].'
        )
    for row in said:
        if unknown := sorted(set(row) - {"name", "flags"}):
            raise InputError(f"{path}: row {row['name']!r} has {unknown[0]!r}; a row has a name and flags.")
        if not isinstance(flags := row.get("flags", ""), str):
            raise InputError(
                f"{path}: flags of row {row['name']!r} are {json.dumps(flags)}; need one text, as in "
                '"--vit.depth 24 --seed 1".'
            )
    rows = [Row(str(row["name"]), row.get("flags", "")) for row in said]
    if not rows or len({row.name for row in rows}) < len(rows):
        raise InputError(f"{path} has {len(rows)} rows: need at least one, each with a name of its own.")
    names: dict[str, str] = {}
    for row in rows:
        if row.folder in (DONE, CURVES, TABLE, HEALTH):
            raise InputError(f"{path}: row {row.name!r} has the name of a file of the lab: rename it.")
        if (other := names.setdefault(row.folder, row.name)) != row.name:
            raise InputError(
                f"{path}: rows {other!r} and {row.name!r} share a folder, {row.folder}: rename one."
            )
    return rows


def choose_rows(rows: Sequence[Row], table: str, only: Sequence[str]) -> list[Row]:
    """Rows of a table; some of them, where names are given."""
    names = [row.name for row in rows]
    for name in only:
        if name not in names:
            raise InputError(
                f"no row {name!r} in {table}: there are {', '.join(names)}.{did_you_mean(name, names)}"
            )
    return [row for row in rows if not only or row.name in only]


def run_jobs(
    jobs: Sequence[Job], plan: Plan, devices: Sequence[str], say: Said, note: Callable[[], object]
) -> list[InputError]:
    """Run what is not done yet, as many at a time as there are devices; a failure does not end the others."""
    free: SimpleQueue[str] = SimpleQueue()
    for device in devices:
        free.put(device)
    waiting = [job for job in jobs if not is_done(job, plan)]
    say(f"{len(jobs)} runs, {len(jobs) - len(waiting)} of them done before; {len(devices)} at a time")
    failed = []
    # A GPU has room for the next training while a run is scored; cores have not.
    pool = ThreadPoolExecutor(sum(2 if device else 1 for device in devices))
    with Processes() as processes:
        try:
            begun = [pool.submit(run_job, job, plan, free, say, processes) for job in waiting]
            for finished in as_completed(begun):
                try:
                    finished.result()
                    note()
                except InputError as error:
                    say(f"failed: {error}")
                    failed.append(error)
        except KeyboardInterrupt:
            processes.ask()  # also whoever waits for a device, and would begin now
            raise
        finally:
            pool.shutdown(cancel_futures=True)  # who interrupts it does not want the next run either
    return failed


def run_job(job: Job, plan: Plan, free: "SimpleQueue[str]", say: Said, processes: Processes) -> None:
    """Train one row with one seed on a free device, then score it; each in a process of its own."""
    train, score = job.commands(plan)
    device = free.get()
    try:
        try:
            processes.go_on()
            write_text(job.folder / BEGUN, json.dumps([train, score], indent=1) + "\n")
            trained = run_command(train, job, "train.log", device, processes)
        finally:
            free.put(device)
        scored = run_command(score, job, "evaluate.log", device, processes)
        done = {"commands": [train, score], "seconds": [trained, scored]}
        write_text(job.folder / DONE, json.dumps(done, indent=1) + "\n")
    except OSError as error:  # a full disk, a file where the folder should be: the other rows go on
        where = f"{error.filename}: " if error.filename else ""
        raise InputError(f"{job.row.name}, seed {job.seed}: {where}{error.strerror or error}.") from error
    say(f"{job.row.name}, seed {job.seed}: trained in {trained:.0f} s, scored in {scored:.0f} s")


def run_command(command: Sequence[str], job: Job, log_name: str, device: str, processes: Processes) -> float:
    """Carry out a command for a job, keep what it says, and return how many seconds it took."""
    job.folder.mkdir(parents=True, exist_ok=True)
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": device} if device else {})
    begun, log = time.perf_counter(), job.folder / log_name
    before = log.stat().st_size if log.exists() else 0
    code = processes.run([sys.executable, "-m", "tcore", *command], environment, log)
    said = log.read_bytes()[before:].decode(errors="replace").strip().splitlines() or [""]
    # Asked to leave, a training saves its step and ends with 0; only a whole one names its encoder.
    if code or (command[0] == "train" and not any(line.startswith("encoder: ") for line in said)):
        raise InputError(
            f"{job.row.name}, seed {job.seed}: `tcore {shlex.join(command)}` ended with {code}: {said[-1]}"
        )
    return round(time.perf_counter() - begun, 1)


def is_done(job: Job, plan: Plan) -> bool:
    """Whether these very commands were carried out; other ones in their place are refused."""
    done, begun = job.folder / DONE, job.folder / BEGUN
    if done.is_file():
        check_same(job, read_done(done)["commands"], plan, "give another --out")
    elif begun.is_file():
        check_same(job, read_begun(begun), plan, "give another --out, or remove this unfinished run")
    return done.is_file()


def check_same(job: Job, before: Sequence[Sequence[str]], plan: Plan, advice: str) -> None:
    """Refuse other commands than before, and name the first flag that differs."""
    for then, command in zip(before, job.commands(plan), strict=True):
        was, will = by_flag(then), by_flag(command)
        for name in was | will:
            if was.get(name) != will.get(name):
                raise InputError(
                    f"{job.folder} was made by other commands, `tcore {shlex.join(then)}` "
                    f"(now {will.get(name, f'without {name}')}): {advice}."
                )


def by_flag(command: Sequence[str]) -> dict[str, str]:
    """The flags of a command with their values, less the places that the lab gives it.

    >>> by_flag(["train", "quickstart", "--run", "lab/none", "--seed", "0", "--masking.ratio", ".1", ".5"])
    {'train': 'train quickstart', '--seed': '--seed 0', '--masking.ratio': '--masking.ratio .1 .5'}
    """
    found: dict[str, str] = {}
    for word in command:
        if word.startswith("--") or not found:
            name = word
        found[name] = f"{found[name]} {word}" if name in found else word
    return {name: words for name, words in found.items() if name not in PLACES}


def check_folder(out: Path, rows: Sequence[Row], table: str, plan: Plan) -> None:
    """Refuse a folder with runs of another table or of other commands: they would stand under our names."""
    known = {row.folder: row for row in rows}
    for folder in sorted(out.glob("*/seed-*")):
        if not any((folder / name).is_file() for name in (DONE, BEGUN)):
            continue
        row, seed = known.get(folder.parent.name), folder.name.removeprefix("seed-")
        if row is None:
            raise InputError(f"{folder.parent} is no row of {table}: give another --out.")
        if seed.isdecimal():
            is_done(Job(row, int(seed), folder), plan)


def lab(
    table: str, out: Path, plan: Plan, *, seeds: int, only: Sequence[str], devices: Sequence[str], say: Said
) -> list[str]:
    """Run a table and write lab.md and lab.json; rows of earlier calls in the same folder are kept."""
    rows = read_table(table)
    chosen = choose_rows(rows, table, only)
    check_writable(out)
    check_folder(out, rows, table, plan)
    jobs = [Job(row, seed, out / row.folder / f"seed-{seed}") for seed in range(seeds) for row in chosen]
    title = f"{Path(table).stem}, recipe {plan.recipe}"

    def note() -> list[dict[str, Any]]:
        """Write down what there is so far: who is cut off has that."""
        found = collect(out, rows)
        if found:
            write_text(out / DONE, json.dumps(found, indent=1) + "\n")
            write_text(out / TABLE, "\n".join(markdown(title, found)) + "\n")
        return found

    failed = run_jobs(jobs, plan, devices, say, note)
    found = note()
    lines = list(markdown(title, found))
    if found:
        lines += draw_curves(out, rows, title)
        write_text(out / TABLE, "\n".join(lines) + "\n")
    if failed:
        kept = f"; {out / TABLE} has the {len(found)} rows that there are" if found else ""
        raise InputError(f"{len(failed)} of {len(jobs)} runs failed{kept}. The first: {failed[0]}")
    return lines
