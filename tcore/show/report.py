"""`tcore report`: runs side by side in one file, HTML or Markdown."""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tcore.config import Config
from tcore.config_file import OPERATIONAL, flatten
from tcore.errors import InputError
from tcore.evaluation.card import MAIN_SCORE
from tcore.evaluation.published import COLUMNS, OFFICIAL_CLIPS, PUBLISHED
from tcore.files import write_text
from tcore.show.chart import Chart, Line
from tcore.show.document import Block, Charts, Document, Picture, Section, Table, Text, Value
from tcore.show.dynamics import cycles_of, panels, scores_of
from tcore.show.report_figures import draw_figures, find_pictures
from tcore.show.report_html import to_html
from tcore.show.report_markdown import to_markdown
from tcore.show.runs import Run, Series, read_runs
from tcore.text import format_seconds

FORMATS = (".html", ".htm", ".md")
WORST = 10


def write_report(
    paths: Sequence[str | Path],
    out: Path,
    *,
    draw: bool = True,
    say: Callable[[str], None] = lambda line: None,
) -> Path:
    """Write a report of some runs; with `draw`, figures that are missing or old are drawn into the runs."""
    if out.suffix.lower() not in FORMATS:
        raise InputError(f"--out {out}: the ending says what is written, .html or .md.")
    runs = read_runs(paths)
    if draw:
        for run in runs:
            draw_figures(run, say)
    document = describe(runs)
    write_text(out, to_markdown(document, out.parent) if out.suffix.lower() == ".md" else to_html(document))
    return out


def describe(runs: Sequence[Run]) -> Document:
    """Everything that a report says."""
    sections = [
        Section("Runs", [_overview(runs)]),
        Section("Settings", list(_settings(runs))),
        Section("Training", list(_curves(runs))),
        Section("Scores", list(_scores(runs))),
        Section("Checkpoints", list(_checkpoints(runs))),
        Section("Figures", [picture for run in runs for picture in _pictures(run)]),
        Section("Worst clips", list(_worst(runs))),
        Section("Environment and cost", list(_environment(runs))),
    ]
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    return Document(title, ", ".join(str(run.path) for run in runs), [s for s in sections if s.blocks])


def _overview(runs: Sequence[Run]) -> Table:
    rows: list[tuple[Value, ...]] = []
    for run in runs:
        last: dict[str, Any] = run.metrics[-1] if run.metrics else {}
        health: dict[str, Any] = next(
            (line["health"] for line in reversed(run.metrics) if "health" in line), {}
        )
        seconds = run.seconds()
        rows.append(
            (
                run.name,
                last.get("step"),
                last.get("total"),
                last.get("dino"),
                health.get("state"),
                health.get("patch_rank"),
                None if seconds is None else format_seconds(seconds),
                run.environment.get("frames"),
            )
        )
    head = ("run", "steps", "total", "dino", "state", "patch rank", "training time", "frames")
    return Table(head, rows, digits=3)


def _settings(runs: Sequence[Run]) -> Iterator[Block]:
    """What differs between the runs, or from the default where there is one; then everything."""
    known = [run for run in runs if run.config is not None]
    if not known:
        return
    every = {run.name: run.settings() for run in known}
    names = list(every[known[0].name])
    learned = [name for name in names if not name.startswith(OPERATIONAL)]
    rows: list[tuple[str, ...]]
    if len(known) == 1:
        usual = flatten(Config())
        own = every[known[0].name]
        rows = [(name, plain(usual[name]), plain(own[name])) for name in learned if own[name] != usual[name]]
        yield Table(("setting", "default", known[0].name), rows, "Differences from the default settings.")
    else:
        different = [name for name in learned if len({plain(every[run][name]) for run in every}) > 1]
        rows = [(name, *(plain(every[run][name]) for run in every)) for name in different]
        if rows:
            yield Table(("setting", *every), rows, "Settings in which the runs differ.")
        else:
            yield Text("The runs have the same settings.")
    rows = [(name, *(plain(every[run][name]) for run in every)) for name in names]
    yield Table(("setting", *every), rows, "All settings.", folded=True)


def plain(value: Any) -> str:
    """A setting as a person would type it."""
    if isinstance(value, tuple | list):
        return " ".join(plain(x) for x in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _curves(runs: Sequence[Run]) -> Iterator[Block]:
    trained = [run for run in runs if run.metrics]
    if not trained:
        return
    charts = []
    for panel in panels(trained):
        lines = []
        for number, run in enumerate(trained):
            for index, (name, label) in enumerate(panel.figures.items()):
                series = run.series(name)
                if series is not None:
                    color = number if len(trained) > 1 else index
                    told = " ".join(x for x in (run.name if len(trained) > 1 else "", label) if x)
                    lines.append(Line(told or panel.title, color, index > 0, series))
        charts.append(Chart(panel.title, lines))
    scored = [
        Line(f"{run.name} {name}", number if len(trained) > 1 else index, index > 0, _series(*curve))
        for number, run in enumerate(trained)
        for index, (name, curve) in enumerate(scores_of(run).items())
    ]
    if scored:
        charts.append(Chart("scores of checkpoints, percent", scored))
    cycles = [
        Line(run.name, number, False, _series(*cycles_of(run)))
        for number, run in enumerate(trained)
        if cycles_of(run)[0]
    ]
    if cycles:
        charts.append(Chart("cycle: labels that return, percent", cycles))
    yield Charts(charts, [run.name for run in trained] if len(trained) > 1 else [])


def _series(steps: list[int], values: list[float]) -> Series:
    import numpy as np

    return Series(np.array(steps, dtype=np.float64), np.array(values, dtype=np.float64))


def _scores(runs: Sequence[Run]) -> Iterator[Block]:
    yield from _official(runs)
    rendered = [
        (name, card["benchmarks"]["synthetic"])
        for name, card in _cards(runs)
        if "synthetic" in card["benchmarks"]
    ]
    if rendered:
        columns = list(rendered[0][1]["scores"])
        rows = [(name, *(_cell(result, column) for column in columns)) for name, result in rendered]
        caption = "Held-out rendered videos, in percent, with 95% intervals over clips."
        yield Table(("encoder", *columns), rows, caption, marked=len(rows))
    for run in runs:
        if run.quickstart:
            names = {"region": "J", "boundary": "F", "part_iou": "part mIoU", "pck": "PCK@0.2"}
            rows = [
                (
                    features,
                    50 * (scores["region"] + scores["boundary"]),
                    *(100 * scores[name] for name in names),
                )
                for features, scores in run.quickstart["scores"].items()
            ]
            count = run.quickstart["heldout_videos"]
            caption = f"{run.name}: label propagation on {count} held-out rendered videos, in percent."
            yield Table(("features", "J&F", *names.values()), rows, caption)


def _cards(runs: Sequence[Run]) -> Iterator[tuple[str, Any]]:
    """Every score card and what to call it."""
    for run in runs:
        for where, card in run.cards.items():
            yield (run.name if where == "." else f"{run.name}/{where}"), card


def _official(runs: Sequence[Run]) -> Iterator[Block]:
    """Cards on public benchmarks beside all published rows."""
    cards = [(name, card) for name, card in _cards(runs) if set(card["benchmarks"]) & set(OFFICIAL_CLIPS)]
    if not cards:
        return
    found = {c for _, card in cards for b in OFFICIAL_CLIPS for c in _benchmark(card, b).get("scores", {})}
    columns = [column for column in COLUMNS if column in found]
    rows: list[tuple[Value, ...]] = []
    for name, card in cards:
        results = [_benchmark(card, b) for b in OFFICIAL_CLIPS]
        rows.append((name, *(next((x for r in results if (x := _cell(r, c))), None) for c in columns)))
    ours = len(rows)
    for row, numbers in PUBLISHED.items():
        named = dict(zip(COLUMNS, numbers, strict=True))
        rows.append((row, *(named[column] for column in columns)))
    caption = "In percent, ours with 95% intervals over clips; below: the T-CoRe paper's main table."
    yield Table(("encoder", *columns), rows, caption, marked=ours)
    for name, card in cards:
        for benchmark in OFFICIAL_CLIPS:
            if differs := _benchmark(card, benchmark).get("differs"):
                told = "; ".join(differs)
                yield Text(f"{name}, {benchmark}: not comparable with the published rows: {told}.")


def _benchmark(card: Any, name: str) -> dict[str, Any]:
    result: dict[str, Any] = card["benchmarks"].get(name, {})
    return result


def _cell(result: dict[str, Any], column: str) -> str | None:
    """A score with its interval."""
    if column not in result.get("scores", {}):
        return None
    text = f"{100 * result['scores'][column]:.1f}"
    if column in result.get("interval", {}):
        low, high = result["interval"][column]
        text += f" ({100 * low:.1f}-{100 * high:.1f})"
    return text


def _checkpoints(runs: Sequence[Run]) -> Iterator[Block]:
    for run in runs:
        if run.checkpoints:
            scores = next(iter(run.checkpoints.values()))["scores"]
            columns = [(benchmark, column) for benchmark in scores for column in scores[benchmark]]
            rows = [
                (step, *(_cell(_merged(row, b), c) for b, c in columns), _percent(row.get("cycle")))
                for step, row in run.checkpoints.items()
            ]
            head = ("step", *(f"{benchmark} {column}" for benchmark, column in columns), "cycle")
            yield Table(head, rows, f"{run.name}: encoders along the way, in percent.")


def _percent(value: float | None) -> str | None:
    return None if value is None else f"{100 * value:.1f}"


def _merged(row: dict[str, Any], benchmark: str) -> dict[str, Any]:
    return {"scores": row["scores"][benchmark], "interval": row["interval"].get(benchmark, {})}


def _pictures(run: Run) -> list[Block]:
    return [Picture(path, f"{run.name}: {path.stem.replace('_', ' ')}") for path in find_pictures(run.path)]


def _worst(runs: Sequence[Run]) -> Iterator[Block]:
    for name, card in _cards(runs):
        for benchmark, result in card["benchmarks"].items():
            score = MAIN_SCORE[benchmark]
            scored = [
                (clip, 100 * values[score], values.get("frames"))
                for clip, values in result["clips"].items()
                if score in values and not math.isnan(values[score])
            ]
            scored.sort(key=lambda row: row[1])
            head = ("clip", score, "frames")
            yield Table(head, [*scored[:WORST]], f"{name}, {benchmark}: the worst of {len(scored)} clips.")
            if len(scored) > WORST:
                yield Table(head, [*scored], f"{name}, {benchmark}: all clips.", folded=True)


def _environment(runs: Sequence[Run]) -> Iterator[Block]:
    names = list(dict.fromkeys(name for run in runs for name in run.environment))
    rows: list[tuple[Value, ...]] = [
        (name, *(run.environment.get(name, "") for run in runs)) for name in names
    ]
    rows += [(label, *(_cost(run).get(label, "") for run in runs)) for label in COSTS]
    for name, card in _cards(runs):
        yield Text(
            f"Evaluation {name}: {format_seconds(card['seconds'])} on {card['device']}, "
            + ", ".join(f"{key} {value}" for key, value in card["versions"].items())
            + "."
        )
    if any(run.environment or run.metrics for run in runs):
        yield Table(("", *(run.name for run in runs)), rows)


COSTS = ("training time", "samples", "samples/s, median", "waiting for data, median", "peak memory, GiB")


def _cost(run: Run) -> dict[str, str]:
    """What a training took."""
    seconds = run.seconds()
    if seconds is None or run.config is None:
        return {}
    middle = sorted(line["samples_per_second"] for line in run.metrics)[len(run.metrics) // 2]
    wait = sorted(line["data_wait"] for line in run.metrics)[len(run.metrics) // 2]
    memory = max(line["memory_gib"] for line in run.metrics)
    samples = f"{len(run.metrics) * run.config.optim.batch:,}"
    values = (format_seconds(seconds), samples, f"{middle:.1f}", f"{wait:.0%}", f"{memory:.2f}")
    return dict(zip(COSTS, values, strict=True))
