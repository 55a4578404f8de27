"""Rows of a comparison for people: tables of scores and cost, and scores against minutes of training."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from tcore.show.plotting import COLORS, FAINT, GRID, INK, drawing
from tcore.text import count, markdown_table

# The protocols of a comparison, with the input size of DAVIS for patches of 16 pixels.
GRIDS = {
    "tcore": " (480x880 pixels: 30x55 patches of 16, or 60x110 of 8)",
    "tcore-fine": " (60x110 patches: 960x1760 pixels for patches of 16)",
}

PUBLISHED_REMARK = (
    "The paper's numbers are on the benchmarks in the heading, after long training on many videos: "
    "compare only the row order."
)
# The paper's main scores, and the benchmarks that they are of.
PUBLISHED_ON = {"J&F": "DAVIS-2017", "mIoU": "VIP", "PCK@0.1": "JHMDB"}
INTERVALS = ("95% over seeds", "95% over clips")
# What stands below a table with differences.
DIFFERENCE = (
    "Differences are paired by clip, then averaged; scores are means over objects, points or pixels, so the "
    "two need not agree. ± is the 95% interval over seeds; in parentheses, the one over clips (Student's "
    "t). A single seed or clip has no interval. Bold: larger than both combined (root of the sum of "
    "squares). Each difference is tested by itself: expect 1 in 20 to be bold by chance."
)


def markdown(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The tables for people: scores at each grid beside the paper's, then what they cost."""
    labels = list(dict.fromkeys(label for row in rows for label in row["scores"]))
    yield from ("# Methods, one budget", "")
    for grid, size in GRIDS.items():
        own = [label for label in labels if any(at(row, label, grid) for row in rows)]
        if own:
            yield from grid_table(rows, own, grid, size if own[0] != "rendered" else "")
            yield from difference_table(rows, own, grid)
    if len(rows) > 1:
        yield from (DIFFERENCE, "")
    if any(row["published"] for row in rows):
        yield from (PUBLISHED_REMARK, "")
    for remark in remarks(rows):
        yield from (remark, "")
    columns = ("row", "samples", "minutes", "samples/s", "waiting for frames", "GiB", "device", "command")
    costs = []
    trained = [row for row in rows if row["train"] is not None]
    for row in trained:
        mark = "" if row["alone"] else "*"
        digits = 1 if row["minutes"] >= 1 else 2
        minutes, speed = f"{row['minutes']:.{digits}f}{mark}", f"{row['samples_per_second']:.0f}{mark}"
        wait = "-" if row["wait"] is None else f"{row['wait']:.0%}"
        cells = (row["row"], f"{row['samples']:,}", minutes, speed, wait, f"{row['gib']:.1f}")
        costs.append((*cells, row["device"], f"`{row['train']}`"))
    yield from ("## Cost", "", *markdown_table(columns, costs))
    if not all(row["alone"] for row in trained):
        yield from ("", "\\* The run shared its device with others: alone it is faster.")


def remarks(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Ways in which the rows of a table are not comparable."""
    for what, key in (("training data", "frames"), ("precision of scoring", "precision")):
        values: dict[Any, list[str]] = {}
        for row in rows:
            if key in row:
                values.setdefault(row[key] or "rendered videos", []).append(row["row"])
        if len(values) > 1:
            said = "; ".join(f"{value} ({', '.join(names)})" for value, names in values.items())
            yield f"**Rows differ in {what}**: {said}."
    trained = [row for row in rows if row["train"] is not None]
    if all(_apart([row[budget] for row in trained]) for budget in ("samples", "minutes")):
        seen = "; ".join(f"{count(row['samples'], 'sample')} ({row['row']})" for row in trained)
        yield f"**Rows differ in budget**: {seen}."
    for row in rows:
        if left_out := row.get("left_out"):
            remedy = f"rerun with --seeds {row['seeds'] + left_out}"
            yield f"**{row['row']}: {count(left_out, 'seed')} left out**, scored in another way: {remedy}."
        if others := row.get("other_clips"):
            where = f"than {rows[0]['row']}: {', '.join(others)}"
            yield f"**{row['row']} was scored on other clips** or true labels {where}."


def _apart(values: Sequence[float]) -> bool:
    """Whether budgets differ by more than rounding to whole steps."""
    return max(values, default=0) > 1.05 * min(values, default=0)


def grid_table(
    rows: Sequence[Mapping[str, Any]], labels: Sequence[str], grid: str, size: str
) -> Iterator[str]:
    """The scores at one grid; the first dataset has its intervals."""
    mains = [next(filter(None, (at(row, label, grid) for row in rows)))["main"] for label in labels]
    names = [f"{label} {main}" for label, main in zip(labels, mains, strict=True)]
    papers = {main: where for main, where in PUBLISHED_ON.items() if main == "J&F" or main in mains}
    known = " / ".join(f"{main} on {where}" for main, where in papers.items())
    columns = ("row", "seeds", names[0], *INTERVALS, *names[1:], f"paper's {known}, protocol")
    table = []
    for row in rows:
        first, *rest = (at(row, label, grid) for label in labels)
        paper = row["published"]
        cells = (
            row["row"],
            str(row["seeds"]),
            *(spread(first) if first else ("-", "-", "-")),
            *(f"{percent(one)}{plus_minus(one)}" if one else "-" for one in rest),
            f"{' / '.join(str(paper[main]) for main in papers)}, {paper['protocol']} ({paper['name']})"
            if paper
            else "-",
        )
        table.append(cells)
    yield from (f"## Protocol {grid}{size}", "", *markdown_table(columns, table), "")


def difference_table(rows: Sequence[Mapping[str, Any]], labels: Sequence[str], grid: str) -> Iterator[str]:
    """How far every row is above the first one, on each dataset and on all of them."""
    if len(rows) < 2:
        return
    every = len(labels) > 1
    columns = ("row", *labels, *([f"mean of these {len(labels)}"] if every else []))
    cells = []
    for row in rows[1:]:
        apart = [at(row, label, grid).get("difference") for label in labels]
        apart += [row["difference"][grid]] if every else []
        cells.append((row["row"], *map(difference_cell, apart)))
    yield from (f"Difference from {rows[0]['row']}:", "", *markdown_table(columns, cells), "")


def difference_cell(apart: Mapping[str, Any] | None) -> str:
    """How far a row is above the first one, with its intervals."""
    if apart is None:
        return "-"
    seeds = "" if apart["over_seeds"] is None else f" ± {apart['over_seeds']:.1f}"
    clips = "" if apart["over_clips"] is None else f" (± {apart['over_clips']:.1f})"
    mark = "**" if apart["sure"] else ""
    missing = f", without {count(apart['left_out'], 'clip')}" if apart["left_out"] else ""
    return f"{mark}{apart['points']:+z.1f}{mark}{seeds}{clips}{missing}"


def at(row: Mapping[str, Any], label: str, grid: str) -> dict[str, Any]:
    """The scores of a row on one dataset at one grid; empty where there are none."""
    found: dict[str, Any] = row["scores"].get(label, {}).get(grid, {})
    return found


def spread(found: Mapping[str, Any]) -> tuple[str, str, str]:
    """The main score and its two intervals, as cells."""
    ends = found["over_clips"]
    clips = "-" if ends is None or any(map(math.isnan, ends)) else "{:.1f} to {:.1f}".format(*ends)
    return percent(found), plus_minus(found).strip() or "-", clips


def percent(found: Mapping[str, Any]) -> str:
    """The main score; "-" where there was nothing to score."""
    score = found[found["main"]]
    return "-" if math.isnan(score) else f"{score:.1f}"


def plus_minus(found: Mapping[str, Any]) -> str:
    """The interval over seeds, if there are several."""
    seeds = found["over_seeds"]
    return "" if seeds is None or math.isnan(seeds) else f" ± {seeds:.1f}"


def draw_scores(rows: Sequence[Mapping[str, Any]], out: Path, title: str) -> None:
    """The main score of the first dataset at each grid, against minutes; bars are intervals over seeds."""
    label, grids = next(iter(next(row for row in rows if row["scores"])["scores"].items()))
    bars = "Bars: 95% intervals over seeds. " if any(row["seeds"] > 1 for row in rows) else ""
    lines = "Dashed: baselines without learning." if any(row["train"] is None for row in rows) else ""
    with drawing(out, (6.0 * len(grids), 4.2), title, text=bars + lines) as figure:
        panels = figure.subplots(1, len(grids), squeeze=False)[0]
        for axes, grid in zip(panels, grids, strict=True):
            shown = [row for row in rows if at(row, label, grid)]
            axes.set_title(f"{label}, protocol {grid}", loc="left")
            axes.set_ylabel(shown[0]["scores"][label][grid]["main"])
            _points(axes, [(row["row"], row.get("minutes"), row["scores"][label][grid]) for row in shown])


def _points(axes: Axes, points: Sequence[tuple[str, float | None, Mapping[str, Any]]]) -> None:
    axes.set_xlabel("minutes of training")
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for index, (name, minutes, found) in enumerate(points):
        color, score = COLORS[index % len(COLORS)], found[found["main"]]
        if minutes is None:  # nothing was trained: what the others should beat
            axes.axhline(score, color=FAINT, linewidth=1, linestyle="--")
            axes.annotate(name, (0, score), (3, 3), textcoords="offset points", fontsize=8, color=INK)
            continue
        bar = found["over_seeds"] or 0.0
        axes.errorbar([minutes], [score], [bar], fmt="o", color=color, ecolor=FAINT, capsize=2, markersize=5)
        axes.annotate(name, (minutes, score), (5, 3), textcoords="offset points", fontsize=8, color=INK)
    longest = max((minutes for _, minutes, _ in points if minutes), default=1.0)
    axes.set_xlim(0, 1.25 * longest)
