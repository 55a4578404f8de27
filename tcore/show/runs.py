"""A run folder, read for figures and reports: settings, metrics, scores, environment; nothing is changed."""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from tcore.config import Config, flatten, load_config
from tcore.errors import InputError
from tcore.evaluation.card import rename_old
from tcore.evaluation.trajectory import CHECKPOINTS, FOLDER, read_checkpoints
from tcore.training.journal import METRICS

GRADIENT_NORM = "gradient_norm_"


@dataclass(frozen=True)
class Series:
    """One figure over the steps of a run."""

    steps: Float[np.ndarray, " n"]
    values: Float[np.ndarray, " n"]

    @staticmethod
    def of(values: Mapping[int, float]) -> "Series":
        """Values by step."""
        steps, found = (np.array(list(x), dtype=np.float64) for x in (values, values.values()))
        return Series(steps, found)

    def smoothed(self, points: int) -> "Series":
        """Means over about equal stretches."""
        parts = (np.array_split(array, points) for array in (self.steps, self.values))
        return Series(*(np.array([part.mean() for part in split]) for split in parts))


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
        return Series.of({step: float(x) for step, x in lines.items() if isinstance(x, int | float)})

    def losses(self) -> list[str]:
        """The names of the run's losses: what a line of metrics lists between total and gradient norms."""
        names = list(self.metrics[-1]) if self.metrics else []
        after = names[names.index("total") + 1 :] if "total" in names else []
        return list(itertools.takewhile(lambda name: not name.startswith(GRADIENT_NORM), after))

    def settings(self) -> dict[str, Any]:
        """Every setting by its dotted name."""
        return {} if self.config is None else flatten(self.config)

    def seconds(self) -> float | None:
        """The time that all steps took."""
        if self.config is None or not self.metrics:
            return None
        speeds = [line["samples_per_second"] for line in self.metrics if line.get("samples_per_second")]
        return float(sum(self.config.optim.batch / speed for speed in speeds))


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
        environment=_read_json(folder / "environment.json") or {},
        cards=cards,
        quickstart=quickstart,
        checkpoints=read_checkpoints(table) if table.is_file() else {},
    )


def read_runs(paths: Sequence[str | Path]) -> list[Run]:
    """Read runs, and give them distinct names."""
    runs = [read_run(path) for path in paths]
    if not runs:
        raise InputError("give one run folder or more.")
    names = [run.name for run in runs]
    if len(set(names)) == len(names):
        return runs
    return [Run(**{**vars(run), "name": str(run.path)}) for run in runs]


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl, without a last line that is still being written."""
    if not path.is_file():
        return []
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found


def read_cards(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Score cards in a folder or one folder below it, and the results of a quickstart."""
    cards, quickstart = {}, {}
    for file in [folder / "results.json", *sorted(folder.glob("*/results.json"))]:
        values = _read_json(file)
        if not isinstance(values, dict):
            continue
        if "benchmarks" in values:
            values["benchmarks"] = rename_old(values["benchmarks"])
            cards[str(file.parent.relative_to(folder))] = values
        elif "heldout_videos" in values:
            quickstart = values
    return cards, quickstart


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
