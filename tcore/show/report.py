"""`tcore report`: runs side by side in one file, HTML or Markdown."""

import base64
import io
import itertools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from PIL import Image

from tcore.config import OPERATIONAL, Config, differences, flatten
from tcore.data.images import read_image
from tcore.errors import InputError
from tcore.evaluation.benchmarks import find_benchmark
from tcore.evaluation.card import grid_lines, worst
from tcore.evaluation.encoders import load_encoder
from tcore.evaluation.intervals import clip_scores, comparable, difference
from tcore.evaluation.published import PUBLISHED, published_on
from tcore.files import write_text
from tcore.recipes import RECIPES
from tcore.show.clips import Clip, Times, evenly, open_clip, open_stored
from tcore.show.comparison import difference_cell
from tcore.show.features import attention_figure, correspondence_figure, load_matcher, pca_figure
from tcore.show.plotting import check_out, to_svg
from tcore.show.propagation import (
    failures_figure,
    find_failures,
    label_rendered,
    propagation_figure,
    with_truth,
)
from tcore.show.runs import Line, Run, draw_panel, panels, read_runs, words
from tcore.text import Say, count, format_seconds, short_path, silent

FORMATS = (".html", ".htm", ".md")
FIGURES = "figures"  # folder of a run
PICTURES = (".png", ".jpg", ".jpeg")
WIDEST = 1400  # pixels of an embedded picture
WORST = 10  # clips that are listed before all others


Value = str | float | int | tuple[float, str] | None
"""A cell of a table; a tuple is a number and a note beside it."""
Block = dict[str, Any]
"""A table, charts, a picture or a text: what the template needs to show it."""


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[Value]],
    caption: str = "",
    *,
    digits: int = 1,
    folded: bool = False,
    marked: int = 0,
) -> Block:
    """Rows below a head, the first `marked` ones ours; a folded table is closed until somebody opens it."""
    cells = [[_cell(value, digits) for value in row] for row in rows]
    # A column of numbers is aligned as one, also where a number is missing.
    for column in zip(*cells, strict=True):
        number = any(cell["number"] for cell in column)
        for cell in column:
            cell["number"] = number
    return {
        "kind": "table",
        "head": head,
        "rows": cells,
        "caption": caption,
        "folded": folded,
        "marked": marked,
    }


def _cell(value: Value, digits: int) -> Block:
    value, note = value if isinstance(value, tuple) else (value, "")
    number = isinstance(value, int | float)
    if isinstance(value, str) and Path(value).is_absolute():
        value = short_path(value)  # a report may be given to others
    text = f"{value:.{digits}f}" if isinstance(value, float) else "-" if value is None else str(value)
    return {"text": text, "note": note, "number": number}


def text(line: str) -> Block:
    """A paragraph."""
    return {"kind": "text", "text": line}


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
        # On one line, and nothing but itself in Markdown.
        "plain": lambda text: " ".join(re.sub(r"([\\|<`*\[\]])", r"\\\1", text).split()),
        "link": lambda path: quote(os.path.relpath(path, out.parent).replace(os.sep, "/")),
    }
    name = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    subtitle = ", ".join(short_path(run.path) for run in runs)
    blocks = {title: list(describe(runs)) for title, describe in SECTIONS.items()}
    sections = {title: found for title, found in blocks.items() if found}
    template = environment.get_template(f"report.{kind}.j2")
    write_text(out, template.render(title=name, subtitle=subtitle, sections=sections))
    return out


def panel_svg(lines: Sequence[Line], title: str) -> str:
    """A panel as an SVG element."""
    return to_svg(lambda axes: draw_panel(axes, lines), (3.4, 1.9), title)


def picture_data(path: Path) -> str:
    """A picture as a JPEG in base64, no wider than a page needs."""
    try:
        rgb = Image.fromarray(read_image(path))
    except InputError as error:
        raise InputError(f"{str(error).rstrip('.')}; remove this picture.") from error
    rgb.thumbnail((WIDEST, 4 * WIDEST), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    rgb.save(buffer, format="JPEG", quality=82, optimize=True)
    return base64.b64encode(buffer.getvalue()).decode("ascii")


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
        frames = short_path(run.environment.get("frames", "unknown"))
        state = health.get("state")
        rows.append((run.name, _recipe_words(run), last.get("step"), last.get("total"), state, time, frames))
        ends[run.name] = {name: last[name] for name in run.losses()} | health
    head = ("run", "recipe", "steps", "total loss", "state", "training time", "frames")
    yield table(head, rows, digits=3)
    figures = dict.fromkeys(name for end in ends.values() for name in end if name != "state")
    rows = [(words(name), *(end.get(name) for end in ends.values())) for name in figures]
    if rows:
        yield table(("", *ends), rows, "Losses and health at the end.", digits=3)


def nearest_recipe(config: Config) -> tuple[str, int]:
    """The recipe that a run began with, as far as its settings tell, and how many of them were changed."""
    found = {name: differences(config, recipe.config) for name, recipe in RECIPES.items()}
    changes = {name: sum(was != "auto" for _, was in ways.values()) for name, ways in found.items()}
    name = min(changes, key=lambda one: changes[one])
    return name, changes[name]


def _recipe_words(run: Run) -> str | None:
    if run.config is None:
        return None
    name, changed = nearest_recipe(run.config)
    return name + (f", {count(changed, 'setting')} changed" if changed else "")


def _settings(runs: Sequence[Run]) -> Iterator[Block]:
    """What differs between the runs, or from the recipe if there is one run; then everything."""
    every = {run.name: flatten(run.config) for run in runs if run.config is not None}
    if not every:
        return
    names = list(dict.fromkeys(name for own in every.values() for name in own))
    recipe = next(nearest_recipe(run.config)[0] for run in runs if run.config is not None)
    compared = every if len(every) > 1 else {f"recipe {recipe}": flatten(RECIPES[recipe].config), **every}
    rows = [
        (name, *shown)
        for name in names
        if not name.startswith(OPERATIONAL)
        and len(set(shown := [setting_text(own.get(name)) for own in compared.values()])) > 1
        and (len(every) > 1 or shown[0] != "auto")  # of a recipe: what the machine chose is no change
    ]
    if rows:
        yield table(("setting", *compared), rows, "Settings that differ.")
    else:
        yield text(f"All settings are {'the same' if len(every) > 1 else f'those of recipe {recipe}'}.")
    rows = [(name, *(setting_text(own.get(name)) for own in every.values())) for name in names]
    yield table(("setting", *every), rows, "All settings.", folded=True)


def setting_text(value: Any) -> str:
    """A setting as a person would type it."""
    if isinstance(value, tuple | list):
        return " ".join(setting_text(x) for x in value)
    return f"{value:g}" if isinstance(value, float) else "-" if value is None else str(value)


def _curves(runs: Sequence[Run]) -> Iterator[Block]:
    names = [run.name for run in runs if run.metrics]
    if names:
        yield {"kind": "charts", "panels": panels(runs), "legend": names if len(names) > 1 else []}


def _cards(runs: Sequence[Run]) -> Iterator[tuple[str, Any]]:
    """Every score card and what to call it."""
    for run in runs:
        for folder, card in run.cards.items():
            yield (run.name if folder == "." else f"{run.name}/{folder}"), card


def _percent(result: Any, column: str) -> tuple[float, str] | None:
    """A score with its interval."""
    if column not in result["scores"]:
        return None
    interval = result.get("interval", {}).get(column)
    note = "" if interval is None else "({:.1f}-{:.1f})".format(*(100 * bound for bound in interval))
    return 100 * result["scores"][column], note


def _differences(benchmark: str, found: dict[str, Any]) -> Iterator[Block]:
    """How far the main score of every encoder is above that of the first one, on the same clips."""
    (first, base), *others = found.items()
    main = find_benchmark(benchmark).score_names[0]
    rows: list[tuple[Value, ...]] = []
    for name, result in others:
        apart = difference((clip_scores([result["clips"]], main), clip_scores([base["clips"]], main)))
        if apart is not None and comparable(result, base):
            rows.append((name, difference_cell(apart)))
    if rows:
        how = "mean over clips, each compared with itself, in parentheses with its 95% interval over clips"
        caption = f"{benchmark}: difference from {first}, {how}."
        yield table(("encoder", f"{main}, points"), rows, caption)


def _scores(runs: Sequence[Run]) -> Iterator[Block]:
    """A table for each benchmark, with the published rows of a public one, after why ours may not compare."""
    cards = list(_cards(runs))
    all_found = [(b, name, result) for name, card in cards for b, result in card["benchmarks"].items()]
    for benchmark, lines in dict.fromkeys((b, grid_lines(b, result)) for b, _, result in all_found):
        found = {
            name: result for b, name, result in all_found if b == benchmark and grid_lines(b, result) == lines
        }
        columns = list(dict.fromkeys(column for result in found.values() for column in result["scores"]))
        rows = [(name, *(_percent(result, column) for column in columns)) for name, result in found.items()]
        source = next(iter(found.values())).get("clips_from", "clips")
        caption = f"{benchmark}: {source}, in percent"
        if any(result.get("interval") for result in found.values()):  # one clip has none
            caption += ", with 95% intervals over clips"
        published: list[tuple[Value, ...]] = []
        if find_benchmark(benchmark).official_clips:
            known = {name: PUBLISHED[name] for name in published_on(lines)}
            published = [
                (name, *(row.scores.get(column) for column in columns), row.protocol)
                for name, row in known.items()
                if any(map(row.scores.get, columns))
            ]
            caption += f"; grid of {lines} lines; below: published on such a grid" if published else ""
        if published:
            names = [result["protocol"].get("name", "") for result in found.values()]
            rows = [(*row, name) for row, name in zip(rows, names, strict=True)]
        for name, result in found.items():
            if differs := "; ".join(result.get("differs", ())):
                what = "not comparable with the published rows" if published else "not the official setting"
                yield text(f"{name}, {benchmark}: {what}: {differs}.")
        headings = ("encoder", *columns, *(("protocol",) if published else ()))
        yield table(headings, [*rows, *published], f"{caption}.", marked=len(rows))
        yield from _differences(benchmark, found)
    for run in (run for run in runs if run.quickstart):
        shown = {"region": "J", "boundary": "F", "part_iou": "part mIoU", "pck": "PCK@0.2"}
        rows = [
            (features, 50 * (s["region"] + s["boundary"]), *(100 * s[name] for name in shown))
            for features, s in run.quickstart["scores"].items()
        ]
        videos = count(run.quickstart["heldout_videos"], "held-out rendered video")
        caption = f"{run.name}: label propagation on {videos}, in percent."
        yield table(("features", "J&F", *shown.values()), rows, caption)


def _checkpoints(runs: Sequence[Run]) -> Iterator[Block]:
    for run in (run for run in runs if run.checkpoints):
        first = next(iter(run.checkpoints.values()))["scores"]
        columns = [(benchmark, column) for benchmark in first for column in first[benchmark]]
        rows: list[tuple[Value, ...]] = []
        for step, row in run.checkpoints.items():
            results = {
                b: {"scores": row["scores"].get(b, {}), "interval": row["interval"].get(b, {})} for b in first
            }
            cycle = 100 * row["cycle"] if "cycle" in row else None
            rows.append((step, *(_percent(results[b], column) for b, column in columns), cycle))
        head = ("step", *(f"{benchmark} {column}" for benchmark, column in columns), "cycle")
        yield table(head, rows, f"{run.name}: encoders of earlier steps, in percent.")


def _worst(runs: Sequence[Run]) -> Iterator[Block]:
    for name, card in _cards(runs):
        for benchmark in card["benchmarks"]:
            clips = [(clip, 100 * score) for clip, score in worst(card, benchmark)]
            head, what = ("clip", find_benchmark(benchmark).score_names[0]), f"{name}, {benchmark}"
            yield table(head, clips[:WORST], f"{what}: the worst of {count(len(clips), 'clip')}.")
            if len(clips) > WORST:
                yield table(head, clips, f"{what}: all clips.", folded=True)


def _environment(runs: Sequence[Run]) -> Iterator[Block]:
    for name, card in _cards(runs):
        if not card.keys() >= {"versions", "seconds", "device"}:
            continue
        versions = ", ".join(f"{package} {version}" for package, version in card["versions"].items())
        yield text(f"Evaluation {name}: {format_seconds(card['seconds'])} on {card['device']}, {versions}.")
    known = [run.environment | _cost(run) for run in runs]
    rows = [(name, *(own.get(name, "") for own in known)) for name in dict.fromkeys(itertools.chain(*known))]
    if rows:
        yield table(("", *(run.name for run in runs)), rows)


def _cost(run: Run) -> dict[str, str]:
    """What a training took."""
    seconds = run.seconds()
    if seconds is None or run.config is None:
        return {}
    found = {
        "training time": format_seconds(seconds),
        "samples": f"{len(run.metrics) * run.config.optim.samples:,}",
    }
    for name, column, of, digits in (
        ("samples/s, median", "samples_per_second", median, ".1f"),
        ("waiting for data, median", "data_wait", median, ".0%"),
        ("peak memory, GiB", "memory_gib", max, ".2f"),
    ):
        if values := run.series(column).values():
            found[name] = f"{of(values):{digits}}"
    return found


def _pictures(runs: Sequence[Run]) -> Iterator[Block]:
    """The pictures in a run folder and in its figures."""
    for run in runs:
        for folder in (run.path, run.path / FIGURES):
            for path in sorted(folder.iterdir()) if folder.is_dir() else ():
                if path.suffix.lower() in PICTURES and not path.name.startswith("."):
                    yield {"kind": "picture", "path": path, "caption": f"{run.name}: {words(path.stem)}"}


def draw_figures(run: Run, say: Say = silent) -> None:
    """Draw figures that a run lacks, or that are older than its encoder, on its own videos.

    Those are the longest video of its store or, where it has none, a held-out rendered one.
    """
    weights, folder = run.path / "encoder.safetensors", run.path / FIGURES
    if run.config is None or not weights.is_file():
        return
    encoder = load_encoder(run.path)
    patch, store = encoder.patch_size, run.environment.get("frames", "rendered")
    own_videos, seed = store != "rendered" and run.config.source == "videos", run.config.seed

    def clip(times: Times) -> Clip:
        return open_stored(store, seed, times, patch) if own_videos else open_clip((), times, patch)

    def attention(out: Path) -> None:
        attention_figure(encoder, clip(Times()), out, matcher=load_matcher(run.path))

    def failures(out: Path) -> None:
        own = [card for card in run.cards.values() if card["encoder"]["weights"] == encoder.fingerprint()]
        rendered = [card for card in own if not all(find_benchmark(b).on_disk for b in card["benchmarks"])]
        if rendered:
            failures_figure(find_failures(rendered[0], encoder, {}), out)

    figures: dict[str, Callable[[Path], object]] = {
        "attention": attention,
        "pca": lambda out: pca_figure(encoder, clip(evenly(5)), out),
        "failures": failures,
    }
    if own_videos:  # no labels are known there
        figures["correspondence"] = lambda out: correspondence_figure(encoder, clip(evenly(7)), out)
    else:
        figures["propagation"] = lambda out: propagation_figure(with_truth(label_rendered(encoder, 0)), out)
    for name, draw in figures.items():
        out = folder / f"{name}.png"
        if out.is_file() and out.stat().st_mtime >= weights.stat().st_mtime:
            continue
        if (run.path / out.name).is_file():
            continue  # the quickstart's own
        try:
            draw(out)
        except InputError as error:
            say(f"{run.name}: {name} is not drawn: {error}")


SECTIONS: dict[str, Callable[[Sequence[Run]], Iterator[Block]]] = {
    "Runs": _overview,
    "Training": _curves,
    "Scores": _scores,
    "Checkpoints": _checkpoints,
    "Figures": _pictures,
    "Worst clips": _worst,
    "Settings": _settings,
    "Environment and cost": _environment,
}
