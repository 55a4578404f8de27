"""What the loader feeds a run: the contact sheet of tcore check, with the run's own settings and frames."""

import json
from pathlib import Path

from tcore.config_file import load_config
from tcore.errors import InputError
from tcore.show.sheet import draw_sheet
from tcore.training.loop import open_store


def sandwich_figure(run: str | Path, out: Path, *, frames: str | None = None, rows: int = 4) -> int:
    """Draw samples of the first step of a run; returns how many there are."""
    run = Path(run)
    config = load_config(run / "config.json")
    if config.source == "images" and config.auxiliary != "none":
        raise InputError(
            f"run {run} trains on images: tcore figure neighbors shows what stands in for the past."
        )
    where = frames if frames is not None else _frames_of(run)
    store = open_store(config, None if where == "rendered" else where)
    return draw_sheet(store, config, out, f"{run.name}: {where}", rows)


def _frames_of(run: Path) -> str:
    """Where a run had its frames."""
    try:
        return str(json.loads((run / "environment.json").read_text(encoding="utf-8"))["frames"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{run / 'environment.json'} does not say where the frames were: give --frames."
        ) from error
