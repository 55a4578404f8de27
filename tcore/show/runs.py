"""A run folder, read for figures and reports, and how its training went: losses, health and scores."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from tcore.config import Config, load_config
from tcore.errors import InputError
from tcore.evaluation.benchmarks import find_benchmark
from tcore.evaluation.card import check_card
from tcore.evaluation.trajectory import CHECKPOINTS, FOLDER, read_checkpoints
from tcore.files import misfit, number_or_nan, read_json, whole
from tcore.methods.match_quality import CROSS
from tcore.show.plotting import COLORS, FAINT, GRID, drawing
from tcore.text import list_some, to_stderr
from tcore.training.journal import ENVIRONMENT, METRICS, parse_metrics

GRADIENT_NORM = "gradient_norm_"
STYLES = ("-", (0, (4, 2)), (0, (1, 1.5)))
COLUMNS = 4
NOISY = 60  # a longer series is drawn faintly, with its means over it
SPARSE = 12  # a shorter one has a mark for each value
GROUPED = ("rank", "cosine")  # health figures that share a panel, by the last word of their name
# What a line of metrics holds, and the results of a quickstart.
LINE = {"step": whole, "health?": {str: lambda value: _can_draw(value)}, str: lambda value: _can_draw(value)}
QUICKSTART = {
    "heldout_videos": whole,
    "scores": {str: dict.fromkeys(("region", "boundary", "part_iou", "pck"), number_or_nan)},
}
SCORES, CYCLE = "scores of checkpoints, percent", "cycle: labels that return, percent"
MATCHING = "matching module, times chance"
PLACES = {"place": "true place", "moved": "patches that moved"}

Series = dict[int, float]
"""One figure of a run by step."""


@dataclass(frozen=True)
class Run:
    """What a folder says of a run; missing parts are empty."""

    name: str
    path: Path
    config: Config | None
    metrics: list[dict[str, Any]]
    environment: dict[str, Any]
    cards: dict[str, Any]
    """Score cards by the folder that holds them, relative to the run."""
    quickstart: dict[str, Any]
    """The results of the quickstart, if the run is one."""
    checkpoints: dict[int, dict[str, Any]]

    def series(self, name: str) -> Series:
        """A figure over the steps; the names of health figures start with `health.`."""
        group, _, last = name.rpartition(".")
        lines = {line["step"]: (line.get(group, {}) if group else line).get(last) for line in self.metrics}
        return {step: float(x) for step, x in lines.items() if isinstance(x, int | float)}

    def losses(self) -> list[str]:
        """The names of the run's losses: what a line of metrics lists between total and gradient norms."""
        names = list(self.metrics[-1]) if self.metrics else []
        after = names[names.index("total") + 1 :] if "total" in names else []
        return list(itertools.takewhile(lambda name: not name.startswith(GRADIENT_NORM), after))

    def seconds(self) -> float | None:
        """The time that all steps took."""
        if self.config is None or not self.metrics:
            return None
        speeds = self.series("samples_per_second").values()
        return float(sum(self.config.optim.samples / speed for speed in speeds if speed > 1e-9))


def read_run(path: str | Path) -> Run:
    """Read a run folder, or a folder with a score card."""
    folder = Path(path)
    if not folder.is_dir():
        raise InputError(f"run {folder} does not exist, or is not a folder.")
    config = load_config(folder / "config.json") if (folder / "config.json").is_file() else None
    cards, quickstart = read_cards(folder)
    if config is None and not cards:
        raise InputError(f"{folder} is not a run: it holds neither config.json nor results.json.")
    table = folder / FOLDER / CHECKPOINTS
    return Run(
        name=folder.name or folder.resolve().name,
        path=folder,
        config=config,
        metrics=read_metrics(folder / METRICS),
        environment=_read_environment(folder / ENVIRONMENT),
        cards=cards,
        quickstart=quickstart,
        checkpoints=read_checkpoints(table) if table.exists() else {},
    )


def read_runs(paths: Sequence[str | Path]) -> list[Run]:
    """Read runs, and give them distinct names."""
    runs = [read_run(path) for path in paths]
    if not runs:
        raise InputError("give one run folder or more.")
    names = [run.name for run in runs]
    if len(set(names)) == len(names):
        return runs
    return [replace(run, name=str(run.path)) for run in runs]


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl, without a last line that is still being written."""
    if not path.exists():
        return []
    lines, bad = parse_metrics(path, LINE)
    if bad:
        to_stderr(f"tcore: {path}: cannot read line {list_some(bad)}; left out.")
    return [found for _, found in lines]


def _can_draw(value: Any) -> bool:
    """Whether a value is a number for a figure, or no number at all."""
    return isinstance(value, bool) or not isinstance(value, int | float) or number_or_nan(value)


def read_cards(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Score cards in a folder or one folder below it, and the results of a quickstart."""
    cards, quickstart = {}, {}
    for file in [folder / "results.json", *sorted(folder.glob("*/results.json"))]:
        values = read_json(file, "results ", remedy="remove it or evaluate again") if file.exists() else None
        if not isinstance(values, dict):
            continue
        if "benchmarks" in values:
            cards[str(file.parent.relative_to(folder))] = check_card(values, file)
        elif "heldout_videos" in values:
            quickstart = values
            if wrong := misfit(values, QUICKSTART):
                raise InputError(f"{file} is damaged ({wrong}): run tcore quickstart again, or remove it.")
    return cards, quickstart


def _read_environment(path: Path) -> dict[str, Any]:
    """What the run was made with; without it a report only says less."""
    try:
        return dict(read_json(path, shape=dict)) if path.exists() else {}
    except InputError as error:
        to_stderr(f"tcore: {error} It is left out.")
        return {}


class Line(NamedTuple):
    """One curve of a panel; the label sets it apart from other curves of its run and may be empty."""

    name: str
    label: str
    color: int
    style: int
    steps: list[int]
    values: list[float]


def words(name: str) -> str:
    """The name of a figure without underscores."""
    return name.replace("_", " ")


def curves(run: Run) -> dict[str, dict[str, Series]]:
    """Everything that a run recorded over its steps: by the title of its panel, then by label."""
    found: dict[str, dict[str, Series]] = {}

    def add(title: str, label: str, series: Series) -> None:
        if series:
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
        add(SCORES, label, values)
    add(CYCLE, "", {step: 100 * row["cycle"] for step, row in run.checkpoints.items() if "cycle" in row})
    for name, label in PLACES.items():
        shares = {step: row.get("matching", {}).get(CROSS) for step, row in run.checkpoints.items()}
        add(MATCHING, label, {step: x[name] / x[f"{name}_chance"] for step, x in shares.items() if x})
    return found


def panels(runs: Sequence[Run]) -> dict[str, list[Line]]:
    """Curves by the title of their panel; a color for each run, or for each curve of a single run."""
    recorded = {run.name: curves(run) for run in runs if run.metrics}
    if not recorded:
        raise InputError("none of these runs has a metrics.jsonl: train first.")
    found: dict[str, list[Line]] = {}
    styles: dict[str, dict[str, int]] = {}
    for number, (name, own) in enumerate(recorded.items()):
        for title, labeled in own.items():
            known = styles.setdefault(title, {})
            for label, series in labeled.items():
                style = known.setdefault(label, len(known))
                color = number if len(recorded) > 1 else style
                line = Line(f"{name} {label}".strip(), label, color, style, [*series], [*series.values()])
                found.setdefault(title, []).append(line)
    return found


def draw_panel(axes: Axes, lines: Sequence[Line]) -> None:
    """Draw some curves; the legend names labels, not runs."""
    labeled: set[str] = set()
    for line in lines:
        color, steps, values = COLORS[line.color % len(COLORS)], np.array(line.steps), np.array(line.values)
        if len(steps) > NOISY:
            axes.plot(steps, values, color=color, alpha=0.22, linewidth=0.7)
            parts = (np.array_split(array, NOISY // 2) for array in (steps, values))
            steps, values = (np.array([part.mean() for part in split]) for split in parts)
        axes.plot(
            steps,
            values,
            color=color,
            linewidth=1.7,
            linestyle=STYLES[line.style % len(STYLES)],
            marker="o" if len(steps) <= SPARSE else "",
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
        for place, (name, lines) in enumerate(shown.items(), start=1):
            axes = figure.add_subplot(rows, COLUMNS, place)
            axes.set_title(name, loc="left", fontweight="bold")
            draw_panel(axes, lines)
        names = [run.name for run in runs if run.metrics]
        if len(names) > 1:
            keys = [Line2D([], [], color=COLORS[i % len(COLORS)], linewidth=2) for i in range(len(names))]
            figure.legend(keys, names, loc="outside lower left", ncols=min(4, len(names)))
