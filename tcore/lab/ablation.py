"""Ablation tables: rows of flags, each trained and scored by the commands that a user would type."""

import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tcore.config import Config, differences, flatten, load_config
from tcore.errors import InputError
from tcore.evaluation.card import interval
from tcore.evaluation.intervals import clip_scores, difference, mean_scores
from tcore.files import check_writable, number, number_or_nan, read_json
from tcore.lab.runs import (
    DONE,
    PICTURE,
    STARTED,
    TABLE,
    Job,
    Row,
    finished,
    refuse_changed,
    run_table,
    write_table,
)
from tcore.show.comparison import DIFFERENCE, INTERVALS, difference_cell, spread
from tcore.show.runs import dynamics_figure, read_run
from tcore.text import Say, did_you_mean, markdown_table

LOCATIONS = ("--run", "--out", "evaluate")  # flags that hold paths of the lab itself, which may be moved
# What is read of the scores of a run, and of its note.
SCORED = {
    "benchmarks": {
        str: {
            "scores": {"J&F": number_or_nan, "J": number_or_nan, "F": number_or_nan},
            "interval?": {str: interval},
            "truth?": str,
            "clips": {str: {"J&F": number_or_nan}},
        }
    }
}
NOTED = {"seconds": lambda value: isinstance(value, list) and len(value) > 0 and number(value[0])}


ALONE, BRANCH = "--auxiliary none", "--auxiliary both"
# The masking setting that a row does not vary is the published one, not the recipe's.
PROBABILITY, RATIO = "--masking.probability 0.5", "--masking.ratio 0.1 0.5"

# The T-CoRe paper's ablation tables: ViT-S/16, 100 epochs, DAVIS-2017.
TABLES: dict[str, tuple[Row, ...]] = {
    "branch": (
        Row("none", ALONE, (61.9, 59.7, 64.0)),
        Row("past", "--auxiliary past", (63.4, 61.4, 65.3)),
        Row("future", "--auxiliary future", (63.0, 61.0, 65.1)),
        Row("both", f"{BRANCH} --loss.past-future 0", (63.5, 62.0, 65.0)),
        Row("all", BRANCH, (64.4, 63.0, 65.9)),
    ),
    "alignment": (
        Row("nothing", f"{ALONE} --views.no-fixed-space --views.no-fixed-time", (55.6, 53.4, 57.7)),
        Row("space", f"{ALONE} --views.no-fixed-time", (57.9, 55.4, 60.4)),
        Row("time", f"{ALONE} --views.no-fixed-space", (57.9, 55.5, 60.3)),
        Row("both", ALONE, (61.9, 59.7, 64.0)),
    ),
    "offsets": (
        Row(".05-.15", f"{BRANCH} --sandwich.offset 0.05 0.15", (64.0, 62.3, 65.7)),
        Row(".10-.20", f"{BRANCH} --sandwich.offset 0.10 0.20", (64.2, 62.4, 66.0)),
        Row(".15-.25", f"{BRANCH} --sandwich.offset 0.15 0.25", (64.4, 63.0, 65.9)),
        Row(".20-.30", f"{BRANCH} --sandwich.offset 0.20 0.30", (62.8, 61.1, 64.5)),
        Row("both past", f"{BRANCH} --sandwich.frames past-past", (63.4, 61.7, 65.1)),
        Row("both future", f"{BRANCH} --sandwich.frames future-future", (63.3, 61.3, 65.3)),
    ),
    "masks": (
        Row("probability .1", f"--masking.probability 0.1 {RATIO}", (60.1, 58.1, 62.2)),
        Row("probability .3", f"--masking.probability 0.3 {RATIO}", (63.5, 61.8, 65.3)),
        Row("probability .5", f"--masking.probability 0.5 {RATIO}", (64.4, 63.0, 65.9)),
        Row("probability .7", f"--masking.probability 0.7 {RATIO}", (62.7, 61.3, 64.2)),
        Row("ratio .2-.6", f"{PROBABILITY} --masking.ratio 0.2 0.6", (64.1, 62.3, 65.9)),
        Row("ratio .3-.7", f"{PROBABILITY} --masking.ratio 0.3 0.7", (63.7, 61.9, 65.5)),
    ),
}


@dataclass(frozen=True)
class Plan:
    """What all rows share, as the words of their two commands."""

    recipe: str
    train: tuple[str, ...] = ()
    score: tuple[str, ...] = ()
    settings: Callable[[list[str]], Config] | None = None
    """Reads the settings off the words of a training; without it, words alone are compared."""


def commands_of(job: Job, plan: Plan) -> list[list[str]]:
    """Train, then score; a row's own flags come last and override those of all rows."""
    run = str(job.folder / "run")
    own = split_flags(job.row.flags, f"flags of row {job.row.name!r}")
    train = ["train", plan.recipe, "--run", run, "--seed", str(job.seed), *plan.train, *own]
    return [train, ["evaluate", run, "--out", str(job.folder / "scores"), *plan.score]]


def split_flags(text: str, what: str) -> list[str]:
    """Split a line of flags as a shell does."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise InputError(f"{what}, {text!r}: {str(error).lower()}; close it.") from error


def by_flag(words: Sequence[str]) -> dict[str, list[str]]:
    """The values of a command by flag, spelled as today; the last of repeated flags counts.

    >>> by_flag(["train", "quickstart", "--masking.ratio", ".1", ".5", "--optim.base_lr=1"])
    {'train': ['quickstart'], '--masking.ratio': ['.1', '.5'], '--optim.base-lr': ['1']}
    """
    found: dict[str, list[str]] = {}
    values: list[str] = []
    for word in words:
        if word.startswith("--") or not found:
            name, equals, value = word.partition("=")
            # Earlier versions called the rendered videos synthetic.
            name = name.replace("_", "-").replace("--synthetic", "--rendered")
            values = found[name] = [value] if equals else []
        else:
            values.append(word)
    return found


def read_table(name: str, only: Sequence[str] = ()) -> list[Row]:
    """A table of the paper by its name, or rows from a JSON file; all rows, or those that are named."""
    if name in TABLES:
        rows = list(TABLES[name])
    elif not Path(name).is_file():
        known = ("methods", *TABLES)
        raise InputError(
            f"no table {name!r}: give {', '.join(known)}, or a JSON file.{did_you_mean(name, known)}"
        )
    else:
        rows = _read_rows(Path(name))
    names = [row.name for row in rows]
    for row in only:
        if row not in names:
            raise InputError(f"no row {row!r} in {name}: there are {', '.join(names)}.")
    return [row for row in rows if not only or row.name in only]


def _read_rows(path: Path) -> list[Row]:
    found = read_json(path, "rows from ")
    for entry in found if isinstance(found, list) and found else [found]:
        texts = isinstance(entry, dict) and all(isinstance(value, str) for value in entry.values())
        if not texts or not {"name"} <= set(entry) <= {"name", "flags"}:
            example = '[{"name": "fast", "flags": "--optim.base-lr 0.004"}]'
            raise InputError(f"{path}: row {json.dumps(entry)}: need a list of rows such as {example}.")
    rows = [Row(**entry) for entry in found]
    folders = [DONE, PICTURE, TABLE, *(row.folder for row in rows)]
    for row in rows:
        if folders.count(row.folder) > 1:
            raise InputError(f"{path}: row {row.name!r}: its folder {row.folder} is taken; rename the row.")
    return rows


def lab(
    table: str, out: Path, plan: Plan, *, seeds: int, only: Sequence[str], devices: Sequence[str], say: Say
) -> list[str]:
    """Run a table and write lab.md and lab.json; rows of earlier calls in the same folder are kept."""
    rows, chosen = read_table(table), read_table(table, only)
    check_writable(out)
    check_folder(out, rows, table, plan)
    jobs = [Job(row, seed, out / row.folder / f"seed-{seed}") for seed in range(seeds) for row in chosen]
    title = f"{Path(table).stem}, recipe {plan.recipe}"

    def write(draw: bool) -> list[str]:
        found = collect(out, rows)
        picture = draw_curves(out, rows, title) if draw else []
        return write_table(out, found, [*markdown(title, found), *picture])

    commands = {job: None if is_done(job, plan) else commands_of(job, plan) for job in jobs}
    return run_table(commands, out, devices, say, write)


def check_folder(out: Path, rows: Sequence[Row], table: str, plan: Plan) -> None:
    """Refuse a folder that holds runs of another table or of other commands: the table would list them."""
    known = {row.folder: row for row in rows}
    for folder in sorted({note.parent for note in out.glob("*/seed-*/*.json")}):
        if folder.parent.name not in known:
            raise InputError(f"{folder.parent} is not a row of {table}: give another --out.")
        seed = folder.name.removeprefix("seed-")
        if not (seed.isascii() and seed.isdecimal()):
            raise InputError(f"{folder} is not a run of {table}: give another --out.")
        is_done(Job(known[folder.parent.name], int(seed), folder), plan)


def is_done(job: Job, plan: Plan) -> bool:
    """Whether these commands have finished; other commands in the same folder are refused."""
    done = job.folder / DONE
    noted = done if done.is_file() else job.folder / STARTED
    if not noted.is_file():
        return False
    try:
        found = read_json(noted)
        before = [list(map(str, words)) for words in (found["commands"] if noted == done else found)]
        pairs = list(zip(before, commands_of(job, plan), strict=True))
    except (InputError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{noted} is damaged: remove it, then rerun the same command.") from error
    names, changed = run_settings(job, plan)
    for then, now in pairs:
        was, will = by_flag(then), by_flag(now)
        for name in was | will:
            # Other words may make the same settings: these are compared below.
            if name not in (*LOCATIONS, *names) and was.get(name) != will.get(name):
                value = shlex.join([name, *will[name]]) if name in will else f"without {name}"
                raise InputError(
                    f"{job.folder} was made by other commands, `tcore {shlex.join(then)}` (now {value}): "
                    "give another --out, or remove this run."
                )
    refuse_changed(changed, job.folder)  # perhaps by the same words, where a recipe has changed
    return done.is_file()


def run_settings(job: Job, plan: Plan) -> tuple[set[str], dict[str, tuple[Any, Any]]]:
    """Words of a training command that make its settings, and those settings in which its run differs.

    A run whose settings are not known has none.
    """
    config = job.folder / "run" / "config.json"
    if plan.settings is None or not config.is_file():
        return set(), {}
    ran = load_config(config)
    try:
        wanted = plan.settings(commands_of(job, plan)[0])
    except InputError as error:
        raise InputError(f"{job.folder}: {error}") from error
    changed = differences(ran, wanted)
    if wanted.optim.precision == "auto":  # a run notes what the machine made of it
        changed.pop("optim.precision", None)
    flags = {f"--{name.replace('_', '-')}" for name in flatten(wanted)}
    negated = {f"{flag.rpartition('.')[0]}.no-{flag.rpartition('.')[2]}" for flag in flags if "." in flag}
    return {"train", *flags, *negated}, changed


def collect(out: Path, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """What is known of every row that has a finished run."""
    found = [collect_row(row, runs) for row in rows if (runs := finished(out / row.folder))]
    for row in found[1:]:
        same = row["truth"] == found[0]["truth"]
        row["difference"] = difference((row["clips"], found[0]["clips"])) if same else None
    return found


def collect_row(row: Row, runs: Sequence[Path]) -> dict[str, Any]:
    """What is known of a row: mean over seeds, intervals over seeds and over clips, cost."""
    files = [run / "scores" / "results.json" for run in runs]
    cards = [read_json(file, "scores ", SCORED, f"remove {file.parents[1] / DONE}") for file in files]
    benchmarks: list[dict[str, Any]] = [
        next(iter(card["benchmarks"].values()), {"clips": {}}) for card in cards
    ]
    if not benchmarks[0]["clips"] or len({(*one["clips"], one.get("truth")) for one in benchmarks}) > 1:
        raise InputError(f"{files[0]} has no clips, or not those of the other seeds: remove it.")
    return {
        "row": row.name,
        "flags": row.flags,
        "seeds": len(runs),
        "benchmark": next(iter(cards[0]["benchmarks"])),
        **mean_scores(benchmarks, ("J&F", "J", "F"), "J&F"),
        "truth": benchmarks[0].get("truth"),
        "clips": clip_scores([b["clips"] for b in benchmarks], "J&F"),
        "minutes": float(np.mean([_training_seconds(run) for run in runs])) / 60,
        "published": row.published,
    }


def _training_seconds(folder: Path) -> float:
    """Seconds of all steps of a run, over all resumes; of its process if the run folder is gone."""
    steps = read_run(folder / "run").seconds() if (folder / "run").is_dir() else None
    return steps or float(read_json(folder / DONE, shape=NOTED, remedy="remove it")["seconds"][0])


def markdown(title: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    """The table for people; the paper's numbers are those of DAVIS-2017, whatever was scored here."""
    scored, paper = f"{rows[0]['benchmark']} J&F" if rows else "J&F", "paper's J&F (J / F) on DAVIS-2017"
    apart = [f"difference from {rows[0]['row']}"] if len(rows) > 1 else []
    columns = ("row", "flags", "seeds", scored, *INTERVALS, *apart, "J", "F", "minutes", paper)
    cells = [
        (
            row["row"],
            f"`{row['flags']}`" if row["flags"] else "-",
            str(row["seeds"]),
            *spread(row | {"main": "J&F"}),
            *(difference_cell(row.get("difference")) for _ in apart),
            f"{row['J']:.1f}",
            f"{row['F']:.1f}",
            f"{row['minutes']:.1f}",
            "-" if row["published"] is None else "{:.1f} ({:.1f} / {:.1f})".format(*row["published"]),
        )
        for row in rows
    ]
    below = ["", DIFFERENCE] if apart else []
    if others := [row["row"] for row in rows if row["truth"] != rows[0]["truth"]]:
        below += ["", f"**Scored on other true labels** than {rows[0]['row']}: {', '.join(others)}."]
    return [f"# {title}", "", *markdown_table(columns, cells), *below]


def draw_curves(out: Path, rows: Sequence[Row], title: str) -> list[str]:
    """Draw losses and health of the first seed of every row; returns the lines that show the picture."""
    folders = {row.name: out / row.folder / "seed-0" for row in rows}
    done = {name: folder / "run" for name, folder in folders.items() if (folder / DONE).is_file()}
    runs = [replace(read_run(run), name=name) for name, run in done.items() if run.is_dir()]
    if not any(run.metrics for run in runs):
        return []
    dynamics_figure(runs, out / PICTURE, title=title)
    return ["", f"![Losses and health of every row, first seed]({PICTURE})"]
