"""The files of a row of methods: what to do, how fast it is, what it cost, what it scored."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args

from tcore.config import Config, differences, from_dict
from tcore.errors import InputError
from tcore.evaluation.benchmarks import find_benchmark
from tcore.evaluation.card import interval
from tcore.evaluation.protocols import TCORE, Precision, protocol
from tcore.files import number, number_or_nan, read_json, whole
from tcore.lab.runs import DONE, refuse_changed
from tcore.show.comparison import GRIDS

WORK, COST, SCORES, SPEED = "job.json", "cost.json", "scores.json", "speed.json"
# Defaults for what job.json omits.
NO_WORK: dict[str, Any] = {
    "baseline": None,
    "patch_size": 16,
    "recipe": "",
    "frames": None,
    "datasets": [],
    "precision": "fp32",
}
# What is read of the files of a run.
WORK_SHAPE = {
    "config": dict,
    "baseline?": lambda value: value is None or isinstance(value, str),
    "patch_size?": whole,
    "recipe?": str,
    "frames?": lambda value: value is None or isinstance(value, str),
    "datasets?": [lambda value: isinstance(value, list) and [*map(type, value)] == [str, str, bool]],
    "precision?": lambda value: value in get_args(Precision),
}
SPEED_SHAPE = {
    "config": dict,
    "device?": str,
    "samples_per_second": lambda value: number(value) and value > 0,
    "gib": number,
    "wait?": number,
}
COST_SHAPE = {"at_a_time": whole, "device": str}
RESULT_SHAPE = {
    "main": str,
    "truth?": str,
    "scores": {str: number_or_nan},
    "interval": {str: interval},
    "clips?": {str: {str: number_or_nan}},  # not in labs of earlier versions
}


class Dataset(NamedTuple):
    """What encoders are scored on: a benchmark's name, and its folder or a number of rendered videos."""

    kind: str
    source: str
    binary: bool = False

    @property
    def label(self) -> str:
        """A short name for the table."""
        return Path(self.source).resolve().name if self.kind != "rendered" else "rendered"

    def grids(self, patch_size: int) -> tuple[str, ...]:
        """The protocols that it is scored with: one where both have the same grid, as with patches of 8."""
        sizes = {protocol(grid).input_size((480, 854), patch_size) for grid in GRIDS}
        return tuple(GRIDS)[:1] if self.kind == "rendered" or len(sizes) == 1 else tuple(GRIDS)

    def check(self) -> None:
        """Refuse what could not be scored."""
        find_benchmark(self.kind).open(self.source, TCORE, binary=self.binary).check()


def read_work(folder: Path) -> dict[str, Any]:
    """The settings of a run: how to train and score it."""
    found: dict[str, Any] = read_json(folder / WORK, "what to do from ", WORK_SHAPE, "remove it")
    return NO_WORK | found


def scored_by(work: Mapping[str, Any]) -> tuple[object, ...]:
    """How a run is scored, comparable with others: the same path may be spelled in several ways."""
    datasets = [
        (kind, source if kind == "rendered" else Path(source).resolve(), binary)
        for kind, source, binary in work["datasets"]
    ]
    return datasets, work["precision"], work["patch_size"]


def read_speed(folder: Path, config: Config | None = None) -> dict[str, Any] | None:
    """A row's measured speed; None if not measured. One measured with other settings is refused."""
    if not (folder / SPEED).exists():
        return None
    found: dict[str, Any] = read_json(folder / SPEED, shape=SPEED_SHAPE, remedy="remove it")
    if config is not None:
        refuse_changed(differences(from_dict(found["config"]), config), folder)
    return found


def read_scores(run: Path) -> dict[str, dict[str, Any]]:
    """The scores of a run by dataset and grid."""
    remedy = f"remove {run / DONE}, and the next call scores this run again"
    found: dict[str, dict[str, Any]] = read_json(run / SCORES, "", {str: {str: RESULT_SHAPE}}, remedy)
    for result in (result for grids in found.values() for result in grids.values()):
        if result["main"] not in result["scores"]:
            raise InputError(f"cannot read {run / SCORES}: no score {result['main']!r}; {remedy}.")
    return found
