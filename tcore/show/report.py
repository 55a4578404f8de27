"""`tcore report`: runs side by side in one file, HTML or Markdown."""

import base64
import io
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, NamedTuple
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from PIL import Image

from tcore.config import OPERATIONAL, Config, flatten
from tcore.errors import InputError
from tcore.evaluation.benchmarks import find_benchmark
from tcore.evaluation.card import PUBLISHED
from tcore.evaluation.encoders import load_encoder
from tcore.files import write_text
from tcore.show.attention import attend, attention_figure
from tcore.show.clips import Times, evenly, open_clip
from tcore.show.dynamics import Panel, draw_panel, panels, words
from tcore.show.failures import failures_figure, find_failures
from tcore.show.features import pca_figure
from tcore.show.matcher import load_matcher
from tcore.show.plotting import check_out, new_figure, styled, to_svg
from tcore.show.propagation import label_rendered, propagation_figure
from tcore.show.runs import Run, read_runs
from tcore.text import Say, format_seconds, silent

FORMATS = (".html", ".htm", ".md")
FIGURES = "figures"  # folder of a run
PICTURES = (".png", ".jpg", ".jpeg")
WIDEST = 1400  # pixels of an embedded picture
WORST = 10  # clips that are listed before all others


class Score(NamedTuple):
    """A score in percent, with its 95% interval if there is one."""

    value: float
    interval: tuple[float, float] | None = None


Value = str | float | int | Score | None


class Cell(NamedTuple):
    """A value of a table as text."""

    text: str
    note: str = ""
    number: bool = False


@dataclass(frozen=True)
class Table:
    """Rows below a head."""

    kind: ClassVar = "table"
    head: tuple[str, ...]
    rows: Sequence[tuple[Value, ...]]
    caption: str = ""
    digits: int = 1
    """Digits of a number after the point."""
    folded: bool = False
    """Closed until somebody opens it."""
    marked: int = 0
    """This many rows at the top are ours; the others are there for comparison."""

    def cells(self) -> Iterator[list[Cell]]:
        """The rows as text."""
        return ([self._cell(value) for value in row] for row in self.rows)

    def _cell(self, value: Value) -> Cell:
        if value is None or isinstance(value, str):
            return Cell("-" if value is None else value)
        if isinstance(value, Score):
            note = "" if value.interval is None else "({:.1f}-{:.1f})".format(*value.interval)
            return Cell(f"{value.value:.1f}", note, number=True)
        return Cell(f"{value:.{self.digits}f}" if isinstance(value, float) else str(value), number=True)


@dataclass(frozen=True)
class Charts:
    """Curves; with several runs, one legend for all."""

    kind: ClassVar = "charts"
    panels: list[Panel]
    legend: list[str]


@dataclass(frozen=True)
class Picture:
    """A picture on disk and what it shows."""

    kind: ClassVar = "picture"
    path: Path
    caption: str


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    kind: ClassVar = "text"
    text: str


Block = Table | Charts | Picture | Text


def write_report(paths: Sequence[str | Path], out: Path, *, draw: bool = True, say: Say = silent) -> Path:
    """Write a report of runs; with `draw`, missing or outdated figures are drawn into the run folders."""
    check_out(out, FORMATS)
    runs = read_runs(paths)
    if draw:
        for run in runs:
            draw_figures(run, say)
    kind = "md" if out.suffix.lower() == ".md" else "html"
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=kind == "html",
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "anchor": lambda title: re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-"),
        "svg": panel_svg,
        "jpeg": picture_data,
        "plain": escape_markdown,
        "link": lambda path: quote(os.path.relpath(path, out.parent).replace(os.sep, "/")),
    }
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    subtitle = ", ".join(str(run.path) for run in runs)
    template = environment.get_template(f"report.{kind}.j2")
    write_text(out, template.render(title=title, subtitle=subtitle, sections=describe(runs)))
    return out


def describe(runs: Sequence[Run]) -> dict[str, list[Block]]:
    """The sections of a report, by title."""
    sections: dict[str, list[Block]] = {
        "Runs": list(_overview(runs)),
        "Settings": list(_settings(runs)),
        "Training": list(_curves(runs)),
        "Scores": list(_scores(runs)),
        "Checkpoints": list(_checkpoints(runs)),
        "Figures": list(_pictures(runs)),
        "Worst clips": list(_worst(runs)),
        "Environment and cost": list(_environment(runs)),
    }
    return {title: blocks for title, blocks in sections.items() if blocks}


@styled
def panel_svg(panel: Panel) -> str:
    """A panel as an SVG element."""
    figure = new_figure(3.4, 1.9)
    draw_panel(figure.add_subplot(), panel)
    return to_svg(figure, panel.title)


def picture_data(path: Path) -> str:
    """A picture as a JPEG in base64, no wider than a page needs."""
    with Image.open(path) as image:
        rgb = image.convert("RGB")
    rgb.thumbnail((WIDEST, 4 * WIDEST), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    rgb.save(buffer, format="JPEG", quality=82, optimize=True)
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def escape_markdown(text: str) -> str:
    """Text on one line that means nothing but itself in Markdown."""
    return " ".join(re.sub(r"([\\|<`*\[\]])", r"\\\1", text).split())


def _overview(runs: Sequence[Run]) -> Iterator[Block]:
    rows: list[tuple[Value, ...]] = []
    ends: dict[str, dict[str, Any]] = {}
    for run in runs:
        last: dict[str, Any] = run.metrics[-1] if run.metrics else {}
        health: dict[str, Any] = next(
            (line["health"] for line in reversed(run.metrics) if "health" in line), {}
        )
        seconds = run.seconds()
        time = None if seconds is None else format_seconds(seconds)
        frames = run.environment.get("frames")
        rows.append((run.name, last.get("step"), last.get("total"), health.get("state"), time, frames))
        ends[run.name] = {name: last[name] for name in run.losses()} | health
    yield Table(("run", "steps", "total loss", "state", "training time", "frames"), rows, digits=3)
    figures = dict.fromkeys(name for end in ends.values() for name in end if name != "state")
    rows = [(words(name), *(end.get(name) for end in ends.values())) for name in figures]
    if rows:
        yield Table(("", *ends), rows, "Losses and health at the end.", digits=3)


def _settings(runs: Sequence[Run]) -> Iterator[Block]:
    """What differs between the runs, or from the defaults if there is one run; then everything."""
    every = {run.name: run.settings() for run in runs if run.config is not None}
    if not every:
        return
    names = list(dict.fromkeys(name for own in every.values() for name in own))
    compared = every if len(every) > 1 else {"default": flatten(Config()), **every}
    rows = [
        (name, *shown)
        for name in names
        if not name.startswith(OPERATIONAL)
        and len(set(shown := [setting_text(own.get(name)) for own in compared.values()])) > 1
    ]
    if rows:
        yield Table(("setting", *compared), rows, "Settings that differ.")
    else:
        yield Text("All settings are the same." if len(every) > 1 else "All settings are the defaults.")
    rows = [(name, *(setting_text(own.get(name)) for own in every.values())) for name in names]
    yield Table(("setting", *every), rows, "All settings.", folded=True)


def setting_text(value: Any) -> str:
    """A setting as a person would type it."""
    if isinstance(value, tuple | list):
        return " ".join(setting_text(x) for x in value)
    return f"{value:g}" if isinstance(value, float) else "-" if value is None else str(value)


def _curves(runs: Sequence[Run]) -> Iterator[Block]:
    names = [run.name for run in runs if run.metrics]
    if names:
        yield Charts(panels(runs), names if len(names) > 1 else [])


def _cards(runs: Sequence[Run]) -> Iterator[tuple[str, Any]]:
    """Every score card and what to call it."""
    for run in runs:
        for folder, card in run.cards.items():
            yield (run.name if folder == "." else f"{run.name}/{folder}"), card


def _score(scores: dict[str, float], intervals: dict[str, Any], column: str) -> Score | None:
    if column not in scores:
        return None
    low, high = intervals.get(column, (math.nan, math.nan))
    return Score(100 * scores[column], (100 * low, 100 * high) if column in intervals else None)


def _scores(runs: Sequence[Run]) -> Iterator[Block]:
    """Public benchmarks beside all published rows, every other benchmark in a table of its own."""
    cards = list(_cards(runs))
    names = dict.fromkeys(name for _, card in cards for name in card["benchmarks"])
    public = [name for name in names if find_benchmark(name).official_clips]
    if public:
        yield from _public_scores(cards, public)
    for benchmark in (name for name in names if name not in public):
        results = [(name, card["benchmarks"].get(benchmark)) for name, card in cards]
        found = [(name, result) for name, result in results if result is not None]
        columns = list(found[0][1]["scores"])
        rows = [(name, *(_score(r["scores"], r["interval"], c) for c in columns)) for name, r in found]
        caption = f"{benchmark}: {found[0][1]['clips_from']}, in percent, with 95% intervals over clips."
        yield Table(("encoder", *columns), rows, caption, marked=len(rows))
    for run in runs:
        if run.quickstart:
            shown = {"region": "J", "boundary": "F", "part_iou": "part mIoU", "pck": "PCK@0.2"}
            rows = [
                (features, 50 * (s["region"] + s["boundary"]), *(100 * s[name] for name in shown))
                for features, s in run.quickstart["scores"].items()
            ]
            count = run.quickstart["heldout_videos"]
            caption = f"{run.name}: label propagation on {count} held-out rendered videos, in percent."
            yield Table(("features", "J&F", *shown.values()), rows, caption)


def _public_scores(cards: Sequence[tuple[str, Any]], benchmarks: Sequence[str]) -> Iterator[Block]:
    """One table of all public benchmarks with the published rows, then what keeps ours from comparing."""
    rows: list[tuple[Value, ...]] = []
    notes = []
    named: dict[str, dict[str, Score | None]] = {}
    for name, card in cards:
        for benchmark in (b for b in benchmarks if b in card["benchmarks"]):
            result = card["benchmarks"][benchmark]
            own = {c: _score(result["scores"], result.get("interval", {}), c) for c in result["scores"]}
            named[name] = named.get(name, {}) | own
            if differs := "; ".join(result.get("differs", ())):
                notes.append(f"{name}, {benchmark}: not comparable with the published rows: {differs}.")
    columns = list(dict.fromkeys(column for own in named.values() for column in own))
    rows += [(name, *(own.get(column) for column in columns)) for name, own in named.items()]
    for row, numbers in PUBLISHED.items():
        rows.append((row, *(numbers.get(column) for column in columns)))
    caption = "In percent, ours with 95% intervals over clips; below: the T-CoRe paper's main table."
    yield Table(("encoder", *columns), rows, caption, marked=len(named))
    yield from (Text(note) for note in notes)


def _checkpoints(runs: Sequence[Run]) -> Iterator[Block]:
    for run in (run for run in runs if run.checkpoints):
        first = next(iter(run.checkpoints.values()))["scores"]
        columns = [(benchmark, column) for benchmark in first for column in first[benchmark]]
        rows: list[tuple[Value, ...]] = []
        for step, row in run.checkpoints.items():
            scores = [
                _score(row["scores"].get(b, {}), row["interval"].get(b, {}), column) for b, column in columns
            ]
            rows.append((step, *scores, Score(100 * row["cycle"]) if "cycle" in row else None))
        head = ("step", *(f"{benchmark} {column}" for benchmark, column in columns), "cycle")
        yield Table(head, rows, f"{run.name}: encoders of earlier steps, in percent.")


def _worst(runs: Sequence[Run]) -> Iterator[Block]:
    for name, card in _cards(runs):
        for benchmark, result in card["benchmarks"].items():
            score = find_benchmark(benchmark).main_score
            scored = [
                (clip, 100 * values[score], values.get("frames"))
                for clip, values in result["clips"].items()
                if score in values and not math.isnan(values[score])
            ]
            scored.sort(key=lambda row: row[1])
            head, what = ("clip", score, "frames"), f"{name}, {benchmark}"
            yield Table(head, scored[:WORST], f"{what}: the worst of {len(scored)} clips.")
            if len(scored) > WORST:
                yield Table(head, scored, f"{what}: all clips.", folded=True)


def _environment(runs: Sequence[Run]) -> Iterator[Block]:
    for name, card in _cards(runs):
        versions = ", ".join(f"{package} {version}" for package, version in card["versions"].items())
        yield Text(f"Evaluation {name}: {format_seconds(card['seconds'])} on {card['device']}, {versions}.")
    known = [run.environment | _cost(run) for run in runs]
    names = dict.fromkeys(name for own in known for name in own)
    rows = [(name, *(own.get(name, "") for own in known)) for name in names]
    if rows:
        yield Table(("", *(run.name for run in runs)), rows)


def _cost(run: Run) -> dict[str, str]:
    """What a training took."""
    seconds = run.seconds()
    if seconds is None or run.config is None:
        return {}
    return {
        "training time": format_seconds(seconds),
        "samples": f"{len(run.metrics) * run.config.optim.batch:,}",
        "samples/s, median": f"{median(line['samples_per_second'] for line in run.metrics):.1f}",
        "waiting for data, median": f"{median(line['data_wait'] for line in run.metrics):.0%}",
        "peak memory, GiB": f"{max(line['memory_gib'] for line in run.metrics):.2f}",
    }


def _pictures(runs: Sequence[Run]) -> Iterator[Block]:
    """The pictures in a run folder and in its figures."""
    for run in runs:
        for folder in (run.path, run.path / FIGURES):
            for path in sorted(folder.iterdir()) if folder.is_dir() else ():
                if path.suffix.lower() in PICTURES and not path.name.startswith("."):
                    yield Picture(path, f"{run.name}: {words(path.stem)}")


def draw_figures(run: Run, say: Say = silent) -> None:
    """Draw figures that a run lacks, or that are older than its encoder, on a held-out rendered video."""
    weights = run.path / "encoder.safetensors"
    if run.config is None or not weights.is_file():
        return
    for name, draw in {
        "attention": _attention,
        "pca": _pca,
        "propagation": _propagation,
        "failures": _failures,
    }.items():
        out = run.path / FIGURES / f"{name}.png"
        if out.is_file() and out.stat().st_mtime >= weights.stat().st_mtime:
            continue
        if (run.path / out.name).is_file():
            continue  # the quickstart's own
        try:
            draw(run, out)
        except InputError as error:
            say(f"{run.name}: {name} is not drawn: {error}")


def _attention(run: Run, out: Path) -> None:
    encoder = load_encoder(run.path)
    clip = open_clip((), Times(), encoder.patch_size)
    found = attend(encoder, clip, matcher=load_matcher(run.path))
    attention_figure(clip, found, out, patch_size=encoder.patch_size)


def _pca(run: Run, out: Path) -> None:
    encoder = load_encoder(run.path)
    pca_figure(encoder, open_clip((), evenly(5), encoder.patch_size), out)


def _propagation(run: Run, out: Path) -> None:
    propagation_figure(list(label_rendered(load_encoder(run.path), "rendered").values()), out)


def _failures(run: Run, out: Path) -> None:
    encoder = load_encoder(run.path)
    own = encoder.fingerprint()
    for card in run.cards.values():
        rendered = any(not find_benchmark(name).on_disk for name in card["benchmarks"])
        if rendered and card["encoder"]["weights"] == own:
            failures_figure(find_failures(card, encoder, {}), out)
            return
