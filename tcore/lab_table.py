"""What came out of the rows of an ablation table: means, intervals, cost and curves."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tcore.errors import InputError
from tcore.files import read_json
from tcore.show.dynamics import dynamics_figure
from tcore.show.runs import read_run
from tcore.show.tables import Row

DONE = "lab.json"
CURVES = "lab.png"
TABLE, HEALTH = "lab.md", "health.md"
BOOTSTRAP = 1000
# Two-sided 95% quantiles of Student's t for 1, 2, ... degrees of freedom.
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)


def collect(out: Path, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """What is known of every row: mean over seeds, interval over seeds and over clips, cost."""
    found = []
    for row in rows:
        folders = sorted((out / row.folder).glob("seed-*"))
        folders = [folder for folder in folders if (folder / DONE).is_file()]
        cards = [read_json(folder / "scores" / "results.json", "scores ") for folder in folders]
        if not cards:
            continue
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
                "minutes": float(np.mean([_training_seconds(folder) for folder in folders])) / 60,
                "published": row.published,
            }
        )
    return found


def read_done(path: Path) -> dict[str, Any]:
    """What was noted of a finished run: its commands, and the seconds they took."""
    try:
        found = read_json(path)
        return {"commands": _two_commands(found["commands"]), "seconds": found["seconds"]}
    except (InputError, KeyError, TypeError) as error:
        raise InputError(f"{path} is damaged: remove it, and the run is looked at again.") from error


def read_begun(path: Path) -> list[list[str]]:
    """What was noted of a run when it began: its commands."""
    try:
        return _two_commands(read_json(path))
    except (InputError, TypeError) as error:
        raise InputError(f"{path} is damaged: remove it, and the run goes on.") from error


def _two_commands(found: Any) -> list[list[str]]:
    """Train and score, if that is what was found."""
    train, score = found if isinstance(found, list) and len(found) == 2 else (None, None)
    if not all(isinstance(words, list) and words for words in (train, score)):
        raise TypeError(f"{found!r} are not two commands")
    return [[str(word) for word in words] for words in found]


def _training_seconds(folder: Path) -> float:
    """What all steps of a run took, those before a stop too; without its metrics, what its process took."""
    steps = read_run(folder / "run").seconds() if (folder / "run").is_dir() else None
    whole: float = read_done(folder / DONE)["seconds"][0]
    return whole if steps is None else steps


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
        flags = f"`{row['flags']}`" if row["flags"] else "-"
        there = "-" if row["published"] is None else "{:.1f} ({:.1f} / {:.1f})".format(*row["published"])
        yield (
            f"| {row['row']} | {flags} | {row['seeds']} | {row['J&F']:.1f} | {seeds} | {clips} | "
            f"{row['J']:.1f} | {row['F']:.1f} | {row['minutes']:.1f} | {there} |"
        )


def draw_curves(out: Path, rows: Sequence[Row], title: str) -> list[str]:
    """Losses and health of the first seed of every row in one picture, and the lines that show it."""
    folders = {row.name: out / row.folder / "seed-0" for row in rows}
    runs = [
        replace(read_run(folder / "run"), name=name)
        for name, folder in folders.items()
        if (folder / DONE).is_file() and (folder / "run").is_dir()
    ]
    try:
        dynamics_figure(runs, out / CURVES, title=title)
    except InputError as error:  # no matplotlib, or nothing to draw
        return ["", f"No curves: {error}"]
    return ["", f"![Losses and health of every row, first seed]({CURVES})"]
