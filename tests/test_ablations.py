"""Every row of the paper's four ablation tables, by flags of the ablation recipe, trained for two steps."""

import math
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tcore import train
from tcore.cli.train import parse_train
from tcore.config import Config, override
from tcore.lab.ablation import TABLES
from tcore.lab.runs import Row
from tcore.recipes import recipe
from tests.runs import metrics
from tests.tiny import TINY

SIZES: dict[str, Any] = {
    "views.global_size": 32,
    "views.local_size": 16,
    "views.num_local": 1,
    "head.prototypes": 64,
    "optim.steps": 2,
    "rendered.frames": 20,
}


@cache
def config_of(flags: str) -> Config:
    """The ablation recipe with some flags."""
    return parse_train(["vits16-k400-100ep", *flags.split()]).config


def train_tiny(flags: str, run: Path) -> list[dict[str, Any]]:
    """What two steps of it say, in small."""
    sizes = {name: value for name, value in (TINY | SIZES).items() if f"--{name} " not in flags}
    return metrics(train(override(config_of(flags), sizes), run, quiet=True))


def expected(table: str, row: Row) -> set[str]:
    """The losses that a row has."""
    if table == "alignment" or row.name == "none":
        return ALONE
    return {"past": PAST, "future": FUTURE}.get(row.name, ALL)


FOUR = {"dino", "koleo", "past_teacher", "future_teacher"}
ALL = FOUR | {"past_future"}
ALONE = {"dino", "koleo", "patch_teacher"}
PAST, FUTURE = {"dino", "koleo", "past_teacher"}, {"dino", "koleo", "future_teacher"}

ROWS = {f"{table} {row.name}": (row, expected(table, row)) for table, rows in TABLES.items() for row in rows}
# Rows that differ in numbers alone are trained once, and so is one that is in two tables.
SIMILAR = r"offsets \.[12]|masks .* \.[1357]$|masks ratio .3|alignment both"
TRAINED = [row for row in ROWS if not re.search(SIMILAR, row)]


@pytest.mark.parametrize("row", TRAINED)
def test_ablation_row_trains_two_steps(row: str, tmp_path: Path) -> None:
    (_, flags, _), losses = ROWS[row]
    lines = train_tiny(flags, tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert {name for name in ALL | ALONE if name in line} == losses
        assert all(math.isfinite(line[name]) for name in losses)
    assert (tmp_path / "run" / "matching.safetensors").exists() == (losses != ALONE)
    patch_terms = losses - {"dino", "koleo", "past_future"}
    assert all(lines[0][name] > 0 for name in patch_terms), "no crop was masked"


def test_rows_differ_from_one_another() -> None:
    configs = [config_of(row.flags) for row, _ in ROWS.values()]
    assert configs[4] == recipe("vits16-k400-100ep")
    # Three rows of the tables are the reference itself, and one is in two tables.
    assert len(set(map(str, configs))) == len(ROWS) - 3


@pytest.mark.parametrize(
    "flags",
    [
        "--masking.kind random --matching.num-blocks 2 --matching.temperature 0.5 --loss.form paper",
        "--teacher.targets sinkhorn --head.no-train-gains --vit.no-auxiliary-drop-path --vit.num-registers 0",
        "--sandwich.offset-seconds 1 2 --sandwich.cuts split",
        "--sandwich.short-videos repeat --rendered.frames 5 --optim.batch 1",
        "--optim.layer-decay 0.9 --optim.patch-embed-lr 0.2 --masking.probability 0",
        "--optim.steps None --optim.epochs 2 --optim.warmup-epochs 1 --teacher.temperature-epochs 1 "
        "--optim.freeze-last-layer-epochs 1",
    ],
)
def test_every_other_setting_trains_too(flags: str, tmp_path: Path) -> None:
    lines = train_tiny(flags, tmp_path / "run")
    assert len(lines) == 2
    assert all(math.isfinite(line["total"]) for line in lines)
