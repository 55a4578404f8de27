"""Rows of an ablation table, trained and scored one after another or over several GPUs, as one table."""

import json
import math
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

from tcore.errors import InputError, did_you_mean
from tcore.files import write_text
from tcore.show.tables import TABLES, Row

Said = Callable[[str], None]
DONE = "lab.json"
BOOTSTRAP = 1000
# Two-sided 95% quantiles of Student's t for 1, 2, ... degrees of freedom.
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)


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
        train = ["train", plan.recipe, "--run", str(run), "--seed", str(self.seed)]
        train += ["--frames", plan.frames] if plan.frames else []
        train += ["--optim.steps", str(plan.budget)] if plan.budget else []
        score = ["evaluate", str(run), "--out", str(self.folder / "scores")]
        score += ["--davis", str(plan.davis)] if plan.davis else ["--synthetic", "--videos", str(plan.videos)]
        score += ["--binary"] if plan.binary else []
        score += ["--size", *map(str, plan.size)] if plan.size else []
        return [[*train, *plan.extra, *self.row.flags.split()], score]


def read_table(name: str) -> list[Row]:
    """A table of the paper by its name, or rows of one's own from a JSON file."""
    if name in TABLES:
        return list(TABLES[name])
    path = Path(name)
    if not path.is_file():
        known = ", ".join(TABLES)
        raise InputError(
            f"no table {name!r}{did_you_mean(name, list(TABLES))}: there are {known}, or give a JSON file."
        )
    try:
        rows = [
            Row(str(row["name"]), str(row.get("flags", ""))) for row in json.loads(path.read_text("utf-8"))
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f'cannot read {path}: need a list such as [{{"name": "fast", "flags": "--optim.base-lr 0.004"}}].'
        ) from error
    if not rows or len({row.name for row in rows}) < len(rows):
        raise InputError(f"{path} has {len(rows)} rows: need at least one, each with a name of its own.")
    return rows


def run_jobs(jobs: Sequence[Job], plan: Plan, devices: Sequence[str], say: Said) -> None:
    """Run what is not done yet, as many at a time as there are devices; the first failure ends it."""
    free: SimpleQueue[str] = SimpleQueue()
    for device in devices:
        free.put(device)

    def work(job: Job) -> None:
        device = free.get()
        try:
            run_job(job, plan, device, say)
        finally:
            free.put(device)

    waiting = [job for job in jobs if not is_done(job, plan)]
    say(f"{len(jobs)} runs, {len(jobs) - len(waiting)} of them done before; {len(devices)} at a time")
    with ThreadPoolExecutor(len(devices)) as pool:
        for finished in [pool.submit(work, job) for job in waiting]:
            finished.result()


def run_job(job: Job, plan: Plan, device: str, say: Said) -> None:
    """Train and score one row with one seed, each in a process of its own; what they say is kept."""
    job.folder.mkdir(parents=True, exist_ok=True)
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": device} if device else {})
    seconds = []
    for number, command in enumerate(job.commands(plan)):
        begun = time.perf_counter()
        with (job.folder / ("train.log", "evaluate.log")[number]).open("a") as log:
            code = subprocess.run(
                [sys.executable, "-m", "tcore", *command],
                env=environment,
                stdout=log,
                stderr=log,
                check=False,
            ).returncode
        if code:
            last = (Path(log.name).read_text(errors="replace").strip().splitlines() or [""])[-1]
            raise InputError(
                f"{job.row.name}, seed {job.seed}: `tcore {shlex.join(command)}` ended with {code}: {last}"
            )
        seconds.append(round(time.perf_counter() - begun, 1))
    write_text(
        job.folder / DONE, json.dumps({"commands": job.commands(plan), "seconds": seconds}, indent=1) + "\n"
    )
    say(f"{job.row.name}, seed {job.seed}: trained in {seconds[0]:.0f} s, scored in {seconds[1]:.0f} s")


def is_done(job: Job, plan: Plan) -> bool:
    """Whether these very commands were carried out; other ones in their place are refused."""
    path = job.folder / DONE
    if not path.is_file():
        return False
    before = json.loads(path.read_text(encoding="utf-8"))["commands"]
    if before != job.commands(plan):
        raise InputError(
            f"{job.folder} was made by other commands, `tcore {shlex.join(before[0])}`: give another --out."
        )
    return True


def collect(out: Path, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """What is known of every row: mean over seeds, interval over seeds and over clips, cost."""
    found = []
    for row in rows:
        folders = sorted((out / row.folder).glob("seed-*"))
        cards = [
            json.loads((f / "scores" / "results.json").read_text("utf-8"))
            for f in folders
            if (f / DONE).is_file()
        ]
        if not cards:
            continue
        seconds = [
            json.loads((f / DONE).read_text("utf-8"))["seconds"][0] for f in folders if (f / DONE).is_file()
        ]
        benchmarks = [next(iter(card["benchmarks"].values())) for card in cards]
        scores = {name: [100 * b["scores"][name] for b in benchmarks] for name in ("J&F", "J", "F")}
        clips = np.array([[100 * clip["J&F"] for clip in b["clips"].values()] for b in benchmarks])
        found.append(
            {
                "row": row.name,
                "flags": row.flags,
                "seeds": len(cards),
                **{name: float(np.mean(values)) for name, values in scores.items()},
                "over_seeds": over_seeds(scores["J&F"]),
                "over_clips": over_clips(clips.mean(axis=0)),
                "minutes": float(np.mean(seconds)) / 60,
                "published": row.published,
            }
        )
    return found


def over_seeds(values: Sequence[float]) -> float | None:
    """Half the 95% interval of the mean by Student's t; None from one seed."""
    if len(values) < 2:
        return None
    quantile = STUDENT[min(len(values) - 1, len(STUDENT)) - 1]
    return float(quantile * np.std(values, ddof=1) / math.sqrt(len(values)))


def over_clips(values: np.ndarray) -> list[float] | None:
    """95% interval of the mean over resampled clips."""
    if len(values) < 2:
        return None
    rng = np.random.default_rng(0)
    means = values[rng.integers(len(values), size=(BOOTSTRAP, len(values)))].mean(axis=1)
    return [float(x) for x in np.percentile(means, [2.5, 97.5])]


def markdown(title: str, rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The table for people."""
    yield f"# {title}"
    yield ""
    columns = (
        "row",
        "flags",
        "seeds",
        "J&F",
        "95% over seeds",
        "95% over clips",
        "J",
        "F",
        "minutes",
        "published",
    )
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for row in rows:
        seeds = "-" if row["over_seeds"] is None else f"± {row['over_seeds']:.1f}"
        clips = (
            "-" if row["over_clips"] is None else f"{row['over_clips'][0]:.1f} to {row['over_clips'][1]:.1f}"
        )
        there = "-" if row["published"] is None else "{:.1f} ({:.1f} / {:.1f})".format(*row["published"])
        yield (
            f"| {row['row']} | `{row['flags']}` | {row['seeds']} | {row['J&F']:.1f} | {seeds} | {clips} | "
            f"{row['J']:.1f} | {row['F']:.1f} | {row['minutes']:.1f} | {there} |"
        )


def lab(
    table: str, out: Path, plan: Plan, *, seeds: int, only: Sequence[str], devices: Sequence[str], say: Said
) -> list[str]:
    """Run a table and write lab.md and lab.json; rows of earlier calls in the same folder are kept."""
    rows = read_table(table)
    names = [row.name for row in rows]
    for name in only:
        if name not in names:
            raise InputError(
                f"no row {name!r} in {table}{did_you_mean(name, names)}: there are {', '.join(names)}."
            )
    chosen = [row for row in rows if not only or row.name in only]
    jobs = [Job(row, seed, out / row.folder / f"seed-{seed}") for seed in range(seeds) for row in chosen]
    run_jobs(jobs, plan, devices, say)
    found = collect(out, rows)
    lines = list(markdown(f"{Path(table).stem}, recipe {plan.recipe}", found))
    write_text(out / "lab.json", json.dumps(found, indent=1) + "\n")
    write_text(out / "lab.md", "\n".join(lines) + "\n")
    return lines
