"""Scores of the encoders that a run kept along the way: each step's card, and one table of all."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tcore.errors import InputError
from tcore.evaluation.card import MAIN_SCORE, Card
from tcore.evaluation.encoder import Encoder
from tcore.evaluation.encoders import load_encoder
from tcore.evaluation.sharing import join
from tcore.files import write_text

CHECKPOINTS = "checkpoints.json"
FOLDER = "checkpoints"  # inside a run, where no other place was given

Scored = Callable[[Encoder, Path], Card]  # an encoder, and the folder for what is saved of it


def kept_encoders(run: Path) -> dict[int, Path]:
    """Files of the encoders that a run kept, by step."""
    found = {}
    for path in sorted((run / "encoders").glob("step-*.safetensors")):
        if step := re.fullmatch(r"step-(\d+)", path.stem):
            found[int(step[1])] = path
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
    say: Callable[[str], None] = lambda line: None,
) -> dict[int, dict[str, Any]]:
    """Score every kept encoder of a run; what was scored before is not scored again.

    Writes the card of each under `out`/step-N and one checkpoints.json; returns what that holds, by step.
    """
    run = Path(run)
    folder = Path(out) if out is not None else run / FOLDER
    found: dict[int, dict[str, Any]] = {}
    files = kept_encoders(run)
    for index, (step, file) in enumerate(files.items()):
        say(f"checkpoint {index + 1}/{len(files)}: step {step}")
        card = score(load_encoder(file, layer), folder / file.stem)
        found[step] = {
            "weights": card["encoder"]["weights"],
            "scores": {name: result["scores"] for name, result in card["benchmarks"].items()},
            "interval": {name: result["interval"] for name, result in card["benchmarks"].items()},
        }
        # After every encoder, so that a stop loses nothing.
        if join()[0] == 0:
            rows = [{"step": step, **row} for step, row in found.items()]
            content = json.dumps({"run": str(run), "checkpoints": rows}, indent=1)
            write_text(folder / CHECKPOINTS, content + "\n")
    return found


def read_checkpoints(path: Path) -> dict[int, dict[str, Any]]:
    """What `evaluate_checkpoints` wrote, by step."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["checkpoints"]
        return {int(row["step"]): row for row in rows}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"cannot read scores of checkpoints from {path}: {error!r}.") from error


def trajectory_table(found: dict[int, dict[str, Any]]) -> list[str]:
    """Steps and scores as lines for a person; the best main score of a benchmark has a star."""
    columns = [
        (name, score) for name, scores in next(iter(found.values()))["scores"].items() for score in scores
    ]
    best = {
        (name, score): max(row["scores"][name][score] for row in found.values())
        for name, score in columns
        if MAIN_SCORE[name] == score
    }
    lines = [f"{'step':>8}" + "".join(f"{f'{name} {score}':>20}" for name, score in columns)]
    for step, row in found.items():
        cells = []
        for column in columns:
            value = row["scores"][column[0]][column[1]]
            cells.append(f"{100 * value:.1f}{'*' if best.get(column) == value else ' '}")
        lines.append(f"{step:>8}" + "".join(f"{cell:>20}" for cell in cells))
    return lines
