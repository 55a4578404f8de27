"""How training went: losses, health and scores over the steps of one or several runs."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from tcore.errors import InputError
from tcore.evaluation.benchmarks import find_benchmark
from tcore.show.plotting import COLORS, FAINT, GRID, drawing
from tcore.show.runs import GRADIENT_NORM, Run, Series

STYLES = ("-", (0, (4, 2)), (0, (1, 1.5)))
COLUMNS = 4
NOISY = 60  # a longer series is drawn faintly, with its means over it
SPARSE = 12  # a shorter one has a mark for each value
GROUPED = ("rank", "cosine")  # health figures that share a panel, by the last word of their name
SCORES, CYCLE = "scores of checkpoints, percent", "cycle: labels that return, percent"


class Line(NamedTuple):
    """One curve of a panel; the label sets it apart from other curves of its run and may be empty."""

    run: str
    label: str
    color: int
    style: int
    series: Series

    @property
    def name(self) -> str:
        """The run, and the label if there is one."""
        return f"{self.run} {self.label}".strip()


class Panel(NamedTuple):
    """Some curves under one title."""

    title: str
    lines: list[Line]


def words(name: str) -> str:
    """The name of a figure without underscores."""
    return name.replace("_", " ")


def curves(run: Run) -> dict[str, dict[str, Series]]:
    """Everything that a run recorded over its steps: by the title of its panel, then by label."""
    found: dict[str, dict[str, Series]] = {}

    def add(title: str, label: str, series: Series) -> None:
        if len(series.steps):
            found.setdefault(title, {})[label] = series

    for name in run.losses():
        add(f"loss: {words(name)}", "", run.series(name))
    for name in dict.fromkeys(name for line in run.metrics for name in line.get("health", {})):
        first, _, last = name.rpartition("_")
        title, label = (last, words(first)) if last in GROUPED else (words(name), "")
        add(f"health: {title}", label, run.series(f"health.{name}"))
    for name in (name for name in run.metrics[-1] if name.startswith(GRADIENT_NORM)):
        add("gradient norm", words(name.removeprefix(GRADIENT_NORM)), run.series(name))
    add("samples per second", "", run.series("samples_per_second"))
    scores: dict[str, dict[int, float]] = {}
    for step, row in run.checkpoints.items():
        for benchmark, values in row["scores"].items():
            score = find_benchmark(benchmark).score_names[0]
            scores.setdefault(f"{benchmark} {score}", {})[step] = 100 * values[score]
    for label, values in scores.items():
        add(SCORES, label, Series.of(values))
    cycles = {step: 100 * row["cycle"] for step, row in run.checkpoints.items() if "cycle" in row}
    add(CYCLE, "", Series.of(cycles))
    return found


def panels(runs: Sequence[Run]) -> list[Panel]:
    """A panel for every title that some run has; a color for each run, or for each curve of a single run."""
    recorded = {run.name: curves(run) for run in runs if run.metrics}
    if not recorded:
        raise InputError("none of these runs has a metrics.jsonl: train first.")
    several = len(recorded) > 1
    found = []
    for title in dict.fromkeys(title for own in recorded.values() for title in own):
        shown = {name: own.get(title, {}) for name, own in recorded.items()}
        styles = {label: n for n, label in enumerate(dict.fromkeys(itertools.chain(*shown.values())))}
        lines = [
            Line(name, label, number if several else styles[label], styles[label], series)
            for number, (name, own) in enumerate(shown.items())
            for label, series in own.items()
        ]
        found.append(Panel(title, lines))
    return found


def draw_panel(axes: Axes, panel: Panel) -> None:
    """Draw the curves of a panel; the legend names labels, not runs."""
    labeled: set[str] = set()
    for line in panel.lines:
        color, series = COLORS[line.color % len(COLORS)], line.series
        if len(series.steps) > NOISY:
            axes.plot(series.steps, series.values, color=color, alpha=0.22, linewidth=0.7)
            series = series.smoothed(NOISY // 2)
        axes.plot(
            series.steps,
            series.values,
            color=color,
            linewidth=1.7,
            linestyle=STYLES[line.style % len(STYLES)],
            marker="o" if len(series.steps) <= SPARSE else "",
            markersize=3,
            label=None if line.label in labeled else line.label,
        )
        labeled.add(line.label)
    axes.margins(x=0.02)
    if any(labeled):
        axes.legend(fontsize=7.5, loc="best", labelcolor=FAINT)
    axes.tick_params(labelsize=7.5, length=2.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    axes.ticklabel_format(axis="y", useOffset=False)
    axes.grid(axis="y", color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)


def dynamics_figure(runs: Sequence[Run], out: Path, *, title: str = "") -> None:
    """Draw a panel for every loss and health figure, and for scores and cycles of evaluated checkpoints."""
    shown = panels(runs)
    rows = -(-len(shown) // COLUMNS)
    with drawing(out, (11.2, 2.15 * rows + 0.8), title) as figure:
        for index, panel in enumerate(shown):
            axes = figure.add_subplot(rows, COLUMNS, index + 1)
            axes.set_title(panel.title, loc="left", fontweight="bold")
            draw_panel(axes, panel)
        names = [run.name for run in runs if run.metrics]
        if len(names) > 1:
            lines = [Line2D([], [], color=COLORS[i % len(COLORS)], linewidth=2) for i in range(len(names))]
            figure.legend(lines, names, loc="outside lower left", ncols=min(4, len(names)))
