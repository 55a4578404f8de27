"""Scores of the encoders that a run kept: the card of each step, and one table of all."""

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tcore.config import Reach, Resize
from tcore.data.images import Frame
from tcore.errors import InputError
from tcore.evaluation.benchmarks import find_benchmark
from tcore.evaluation.card import Card, interval, rename_old
from tcore.evaluation.cycle import cycle_consistency
from tcore.evaluation.encoder import Encoder
from tcore.evaluation.encoders import load_encoder
from tcore.evaluation.evaluate import join
from tcore.files import digest, number_or_nan, read_json, whole, write_json
from tcore.text import Say, silent

CHECKPOINTS = "checkpoints.json"
FOLDER = "checkpoints"  # inside a run, where no other place was given

# Shares of attention on the true place, of all patches and of those that moved; NaN where there is none.
SHARES = {"place": number_or_nan, "moved": number_or_nan} | dict.fromkeys(
    ("place_chance", "moved_chance"), lambda value: number_or_nan(value) and value != 0
)
# What checkpoints.json holds.
TABLE = {
    "checkpoints": [
        {
            "step": whole,
            "scores": {str: {str: number_or_nan}},
            "interval": {str: {str: interval}},
            "cycle?": number_or_nan,
            "matching?": {str: SHARES},
        }
    ]
}
Scored = Callable[[Encoder, Path], Card]  # an encoder, and the folder for what is saved of it
Row = dict[str, Any]


def kept_encoders(run: Path) -> dict[int, Path]:
    """Files of the encoders that a run kept, by step."""
    files = (run / "encoders").glob("step-*.safetensors")
    found = {int(path.stem[5:]): path for path in files if path.stem[5:].isdecimal()}
    if not found:
        raise InputError(
            f"run {run} kept no encoders: train with --keep-every STEPS, or evaluate {run} itself."
        )
    return dict(sorted(found.items()))


def evaluate_checkpoints(
    run: str | Path,
    score: Scored,
    out: str | Path | None = None,
    *,
    layer: int = -1,
    reach: Reach = None,
    positions: Resize | None = None,
    say: Say = silent,
) -> dict[int, Row]:
    """Score every kept encoder of a run; those that were scored before are not scored again.

    Writes the card of each under `out`/step-N and one checkpoints.json; returns what that holds, by step.
    """
    run = Path(run)
    folder = Path(out) if out is not None else run / FOLDER
    found: dict[int, Row] = {}
    files = kept_encoders(run)
    for index, (step, file) in enumerate(files.items()):
        say(f"checkpoint {index + 1}/{len(files)}: step {step}")
        row = score_step(load_encoder(file, layer, reach, positions), folder / file.stem, score)
        # After every encoder, so that a stop loses nothing.
        found = add_row(folder, run, step, row, write=join()[0] == 0)
    return found


def score_step(
    encoder: Encoder,
    folder: Path,
    score: Scored,
    clips: Iterable[Sequence[Frame]] | None = None,
    clips_of: str = "rendered",
) -> Row:
    """Scores of the encoder of one step, with its cycle consistency on some clips, as the table has them."""
    card = score(encoder, folder)
    return {
        "weights": card["encoder"]["weights"],
        "way": way_of(card, clips_of),
        "scores": {name: result["scores"] for name, result in card["benchmarks"].items()},
        "interval": {name: result["interval"] for name, result in card["benchmarks"].items()},
        "cycle": cycle_consistency(encoder, clips),
    }


def way_of(card: Card, cycle_clips: str = "") -> str:
    """A short name for how a card was scored: numbers scored in another way are not comparable."""
    ways: dict[str, Any] = {
        find_benchmark(name).old_name or name: [
            result["protocol"],
            result["binary"],
            result["truth"],
            {clip: values.get("input") for clip, values in result["clips"].items()},
        ]
        for name, result in card["benchmarks"].items()
    } | {"cycle": cycle_clips}
    return digest(ways, 12)


def main_score(row: Row) -> tuple[str, str, float]:
    """The benchmark that comes first, the name of its main score, and that score."""
    name, scores = next(iter(row["scores"].items()))
    main = find_benchmark(name).score_names[0]
    return name, main, float(scores[main])


def add_row(folder: Path, run: Path, step: int, row: Row, *, write: bool = True) -> dict[int, Row]:
    """Add the row of a step; returns the rows that were scored in the same way (others stay in the file)."""
    table = folder / CHECKPOINTS
    rows = _read_rows(table) if table.is_file() else []
    rows = [r for r in rows if (int(r["step"]), r.get("way")) != (step, row["way"])]
    rows.append({"step": step, **row})
    if write:
        write_json(table, {"run": str(run), "checkpoints": rows})
    return _of_last_way(rows)


def read_checkpoints(path: Path) -> dict[int, Row]:
    """Rows by step, of the way of scoring that was used last: others are not comparable."""
    return _of_last_way(_read_rows(path))


def _of_last_way(rows: list[Row]) -> dict[int, Row]:
    last = rows[-1].get("way") if rows else None
    return dict(sorted((int(row["step"]), row) for row in rows if row.get("way") == last))


def _read_rows(path: Path) -> list[Row]:
    """What `add_row` wrote, in that order."""
    rows: list[Row] = read_json(path, "scores of checkpoints from ", TABLE, "remove it")["checkpoints"]
    for row in rows:
        row["scores"], row["interval"] = rename_old(row["scores"]), rename_old(row["interval"])
    names = [{name: [*row["scores"][name]] for name in row["scores"]} for row in _of_last_way(rows).values()]
    if any(
        own != names[0] or any(find_benchmark(name).score_names[0] not in own[name] for name in own)
        for own in names
    ):
        raise InputError(f"cannot read scores of checkpoints from {path}: scores are missing; remove it.")
    return rows


def trajectory_table(found: dict[int, Row]) -> list[str]:
    """Steps and scores as lines for a person; the best main score of a benchmark has a star."""
    columns = [(name, score) for name, row in next(iter(found.values()))["scores"].items() for score in row]
    head = "".join(f"{f'{name} {score}':>20}" for name, score in columns)
    lines = [f"{'step':>8}{head}{'cycle':>10}"]
    for step, row in found.items():
        cells = ""
        for name, score in columns:
            value, main = row["scores"][name][score], find_benchmark(name).score_names[0]
            best = score == main and value == max(each["scores"][name][score] for each in found.values())
            cells += f"{f'{100 * value:.1f}' + ('*' if best else ' '):>20}"
        lines.append(f"{step:>8}{cells}{100 * row.get('cycle', math.nan):>9.1f} ")
    return lines
