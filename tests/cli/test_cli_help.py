"""Help: every flag, what it wants, what it is for, and the value that holds."""

import dataclasses
import importlib
import re
from pathlib import Path
from typing import Any

import pytest

import tcore
from tcore.cli.help import help_text
from tcore.cli.main import QuickstartCommand, main
from tcore.cli.parsing import _flags
from tcore.cli.train import TrainCommand
from tcore.recipes import recipe


def commands() -> list[type]:
    names = [path.stem for path in Path(tcore.__file__).parent.glob("cli*.py")]
    modules = [importlib.import_module(f"tcore.{name}") for name in names]
    found = {
        kind
        for module in modules
        for kind in vars(module).values()
        if isinstance(kind, type)
        and dataclasses.is_dataclass(kind)
        and kind.__module__.startswith("tcore.cli.main")
    }
    return sorted(found, key=lambda kind: kind.__name__)


def test_all_commands_are_found() -> None:
    assert len(commands()) >= 18
    assert {TrainCommand, QuickstartCommand} <= set(commands())


@pytest.mark.parametrize("kind", commands(), ids=lambda kind: kind.__name__)
def test_help_names_every_flag_and_says_what_it_is_for(kind: Any) -> None:
    default = kind()
    lines = help_text(default, "tcore verb").splitlines()
    shown = {}
    for line, below in zip(lines, [*lines[1:], ""], strict=True):
        if found := re.match(r"  (--)?([\w.\[\]-]+)", line):
            said = line[34:] or below[34:]
            shown[found[2].replace("[no-]", "").lower()] = said
    positionals = {word.lower().rstrip(".") for word in lines[0].split()[3:-1]}
    for flag in _flags(default):
        name = flag.removeprefix("--").replace(".no-", ".").removeprefix("no-")
        if name in positionals or name in ("help", "config"):
            continue
        assert name in shown, flag
        assert shown[name].strip(), f"{flag} is not explained"


def test_help_shows_kinds_values_and_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = help_text(TrainCommand("vitb16-k400", config=recipe("vitb16-k400")), "tcore train")
    assert text.startswith("usage: tcore train RECIPE [flags]\n")
    assert "\noptim: Length, batch and optimizer.\n" in text
    assert re.search(r"  --optim\.batch INT +Videos per step, over all processes\. \[128\]\n", text)
    assert re.search(r"  --auxiliary none\|past\|future\|both\n +Sides", text)
    assert re.search(r"  --head\.\[no-\]train-gains +Train the prototypes' gains.* \[on\]\n", text)
    assert "None" not in text
    assert max(map(len, text.splitlines())) <= 100


def test_help_goes_before_everything_else(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["propagate", "--help", "no such encoder"])
    assert stop.value.code == 0
    assert "usage: tcore propagate ENCODER VIDEO [flags]" in capsys.readouterr().out
