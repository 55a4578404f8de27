"""How training went: losses, health and scores over the steps of one or several runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tcore.errors import InputError
from tcore.evaluation.card import MAIN_SCORE
from tcore.show.plotting import COLORS, FAINT, check_out, new_figure, save_figure, styled
from tcore.show.runs import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Panel(NamedTuple):
    """A diagram: its title, and the figures in it with what each is called."""

    title: str
    figures: dict[str, str]


HEALTH = (
    Panel("effective rank", {"health.patch_rank": "patches", "health.frame_rank": "frames"}),
    Panel(
        "targets, nats",
        {"health.target_entropy": "entropy of each", "health.target_information": "told apart"},
    ),
    Panel("prototypes in use", {"health.prototypes_used": ""}),
    Panel("cosine", {"health.past_future_cosine": "from past, from future", "health.frame_cosine": "frames"}),
)
STYLES = ("-", (0, (4, 2)), (0, (1, 1.5)))
REST = (
    Panel(
        "gradient norm",
        {
            "gradient_norm_backbone": "backbone",
            "gradient_norm_head": "head",
            "gradient_norm_match": "matching",
        },
    ),
    Panel("samples per second", {"samples_per_second": ""}),
)


def panels(runs: Sequence[Run]) -> list[Panel]:
    """The diagrams that some run has figures for."""
    losses = dict.fromkeys(name for run in runs for name in run.losses())
    shown = [Panel(f"loss: {name}", {name: ""}) for name in losses]
    others = [p for p in (*HEALTH, *REST) if any(run.series(name) for run in runs for name in p.figures)]
    return shown + others


def scores_of(run: Run) -> dict[str, tuple[list[int], list[float]]]:
    """Main scores over the evaluated checkpoints of a run, in percent, by benchmark."""
    found: dict[str, tuple[list[int], list[float]]] = {}
    for step, row in run.checkpoints.items():
        for benchmark, scores in row["scores"].items():
            steps, values = found.setdefault(f"{benchmark} {MAIN_SCORE[benchmark]}", ([], []))
            steps.append(step)
            values.append(100 * scores[MAIN_SCORE[benchmark]])
    return found


def cycles_of(run: Run) -> tuple[list[int], list[float]]:
    """Cycle consistency over the evaluated checkpoints of a run, in percent."""
    found = {step: 100 * row["cycle"] for step, row in run.checkpoints.items() if "cycle" in row}
    return list(found), list(found.values())


@styled
def dynamics_figure(runs: Sequence[Run], out: Path, *, title: str = "") -> None:
    """Draw a diagram for every loss, for health, and for scores and cycles of evaluated checkpoints."""
    check_out(out)
    runs = [run for run in runs if run.metrics]
    if not runs:
        raise InputError("none of these runs has a metrics.jsonl: train first.")
    shown = panels(runs)
    curves = [_draw_scores] if any(run.checkpoints for run in runs) else []
    curves += [_draw_cycles] if any(cycles_of(run)[0] for run in runs) else []
    count = len(shown) + len(curves)
    columns = 4
    rows = -(-count // columns)
    figure = new_figure(11.2, 2.15 * rows + 0.8)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for place, panel in zip(axes, shown, strict=False):
        _draw(place, panel, runs)
    for place, draw in zip(axes[len(shown) :], curves, strict=False):
        draw(place, runs)
    for place in axes[count:]:
        place.set_visible(False)
    if len(runs) > 1:
        from matplotlib.lines import Line2D

        lines = [Line2D([], [], color=COLORS[i % len(COLORS)], linewidth=2) for i in range(len(runs))]
        figure.legend(lines, [run.name for run in runs], loc="outside lower left", ncols=min(4, len(runs)))
    save_figure(figure, out, title)


def _draw(axes: "Axes", panel: Panel, runs: Sequence[Run]) -> None:
    """One diagram: a color for each run, or for each figure where there is one run."""
    labeled = set()
    for number, run in enumerate(runs):
        for index, (name, label) in enumerate(panel.figures.items()):
            series = run.series(name)
            if series is None:
                continue
            color = COLORS[(number if len(runs) > 1 else index) % len(COLORS)]
            style = STYLES[index % len(STYLES)]
            if len(series.steps) > 60:
                axes.plot(series.steps, series.values, color=color, alpha=0.22, linewidth=0.7)
                series = series.smoothed(30)
            axes.plot(
                series.steps,
                series.values,
                color=color,
                linewidth=1.7,
                linestyle=style,
                label=None if name in labeled else label,
            )
            labeled.add(name)
    axes.set_title(panel.title, loc="left", fontweight="bold")
    axes.margins(x=0.02)
    if any(panel.figures.values()):
        axes.legend(fontsize=7.5, loc="best", labelcolor=FAINT)
    axes.tick_params(labelsize=7.5, length=2.5)
    axes.ticklabel_format(axis="y", useOffset=False)
    axes.grid(axis="y", color="#e8e6e1", linewidth=0.7)
    axes.set_axisbelow(True)


def _draw_scores(axes: "Axes", runs: Sequence[Run]) -> None:
    marks = "osD^v"
    for number, run in enumerate(runs):
        for index, (name, (steps, values)) in enumerate(scores_of(run).items()):
            color = COLORS[(number if len(runs) > 1 else index) % len(COLORS)]
            label = name if number == 0 else None
            axes.plot(steps, values, f"{marks[index % 5]}-", color=color, markersize=4, label=label)
    axes.set_title("scores of checkpoints, percent", loc="left", fontweight="bold")
    axes.legend(fontsize=7.5, loc="best", labelcolor=FAINT)
    axes.tick_params(labelsize=7.5, length=2.5)
    axes.grid(axis="y", color="#e8e6e1", linewidth=0.7)


def _draw_cycles(axes: "Axes", runs: Sequence[Run]) -> None:
    for number, run in enumerate(runs):
        axes.plot(*cycles_of(run), "o-", color=COLORS[number % len(COLORS)], markersize=4)
    axes.set_title("cycle: labels that return, percent", loc="left", fontweight="bold")
    axes.tick_params(labelsize=7.5, length=2.5)
    axes.grid(axis="y", color="#e8e6e1", linewidth=0.7)
