"""`tcore check` on the command line: exit codes, one-line errors, files where they were asked for."""

import json
from pathlib import Path

import pytest
from PIL import Image

from tcore.cli.main import main
from tests.data.clips import break_jpeg, write_clip

TINY = "--recipe quickstart --runtime.workers 1 --optim.batch 4".split()


@pytest.fixture
def store(tmp_path: Path) -> Path:
    for number in range(3):
        write_clip(tmp_path / "store" / f"v{number}", 20, seed=number)
    return tmp_path / "store"


def exit_code(arguments: list[str]) -> int:
    try:
        main(arguments)
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def test_a_good_store_ends_with_0_and_draws_the_sheet(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sheet, report = tmp_path / "sheet.png", tmp_path / "report.json"
    assert exit_code(["check", str(store), *TINY, "--sheet", str(sheet), "--json", str(report)]) == 0
    printed = capsys.readouterr().out
    assert "3 of 3 videos can be used" in printed
    assert str(sheet) in printed
    with Image.open(sheet) as picture:
        assert picture.width > 1000
    assert json.loads(report.read_text())["videos"] == 3


def test_a_broken_frame_ends_with_1(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    break_jpeg(store / "v1" / "00010.jpg")
    assert exit_code(["check", str(store), *TINY]) == 1
    assert "error: 1 unreadable frame" in capsys.readouterr().out


def test_settings_are_the_flags_of_training(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(["check", str(store), *TINY, "--sandwich.offset-seconds", "9", "9"]) == 1
    assert "no usable video" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", "PATH"),
        ("/no/such/folder", "does not exist"),
        ("{store}/v0/00000.jpg", "is a file"),
        ("{store} --sandwich.offset 0.1 0.4", "reaches outside the video"),
        ("{store} --recipe quickstrat", "Did you mean quickstart?"),
        ("{store} --sandwich.ofset 0.1 0.2", "--sandwich.offset "),
        ("{store} --sample 0", "--sample 0"),
        ("{store} --sheet {store}/sheet.png", "nothing is written into a dataset"),
        ("{store} --json {store}/v0/report.json", "nothing is written into a dataset"),
        ("{store} --kind davis --kind nonsense", "nonsense"),
        ("{store}/empty", "no frames under"),
    ],
)
def test_bad_input_is_named_with_exit_code_2(
    arguments: str, expected: str, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (store / "empty").mkdir()
    assert exit_code(["check", *arguments.format(store=store).split()]) == 2
    assert expected in capsys.readouterr().err
