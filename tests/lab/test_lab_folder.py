"""A folder holds the runs of one lab: the same commands go on there, wherever it lies, and no others."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tcore.cli.main import main
from tcore.errors import InputError
from tcore.files import write_text
from tcore.lab import BEGUN, Job, Plan, check_folder, is_done, lab, run_command
from tcore.lab_processes import Processes
from tcore.lab_table import DONE
from tcore.show.tables import Row
from tests.lab.test_lab import PLAN, finish


def test_other_commands_in_a_folder_are_refused(tmp_path: Path) -> None:
    job = Job(Row("none"), 0, tmp_path)
    assert not is_done(job, PLAN)
    finish(job, [0.1, 0.2])
    assert is_done(job, PLAN)
    with pytest.raises(InputError, match="made by other commands"):
        is_done(job, Plan("quickstart", None, 3, None, False, None))


def test_runs_of_another_table_or_length_do_not_stand_under_our_names(tmp_path: Path) -> None:
    """Also those that are not asked for now: the table would list them."""
    finish(Job(Row("both", "--vit.depth 2"), 1, tmp_path / "both" / "seed-1"), [0.5])
    for table, row in (("alignment", "space"), ("branch", "none")):
        with pytest.raises(
            InputError, match=r"both/seed-1 was made by other commands, `tcore train .*depth 2"
        ):
            lab(table, tmp_path, PLAN, seeds=1, only=(row,), devices=("",), say=lambda line: None)
    with pytest.raises(InputError, match=r"both is no row of masks: give another --out"):
        lab("masks", tmp_path, PLAN, seeds=1, only=(), devices=("",), say=lambda line: None)
    check_folder(tmp_path, [Row("both", "--vit.depth 2")], "mine.json", PLAN)
    with pytest.raises(InputError, match="made by other commands"):
        check_folder(tmp_path, [Row("both", "--vit.depth 2")], "mine.json", replace(PLAN, budget=3))


def test_a_damaged_note_of_a_run_is_named(tmp_path: Path) -> None:
    job = Job(Row("none"), 0, tmp_path)
    write_text(tmp_path / DONE, "{")
    with pytest.raises(InputError, match=r"lab\.json is damaged: remove it"):
        is_done(job, PLAN)


def begin(job: Job, plan: Plan) -> None:
    write_text(job.folder / BEGUN, json.dumps(job.commands(plan)))


def test_runs_that_only_began_bind_the_folder_too(tmp_path: Path) -> None:
    """Otherwise another length fails for this row, trains the next one, and bars the first command."""
    begin(
        Job(Row("none", "--auxiliary none"), 0, tmp_path / "none" / "seed-0"), replace(PLAN, budget=1000000)
    )
    words = r"none/seed-0 was made by .*1000000.* \(now --optim.steps 2\): give another --out, or remove this"
    with pytest.raises(InputError, match=words):
        lab("branch", tmp_path, PLAN, seeds=1, only=("all",), devices=("",), say=lambda line: None)
    assert not (tmp_path / "all").exists()
    write_text(tmp_path / "none" / "seed-0" / BEGUN, "[]")
    with pytest.raises(InputError, match=r"commands\.json is damaged: remove it"):
        check_folder(tmp_path, [Row("none")], "mine.json", PLAN)


def test_a_folder_may_be_moved_or_spelled_in_another_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    row = Row("none", "--auxiliary none")
    finish(Job(row, 0, Path("old/none/seed-0")), [0.5])
    Path("old").rename("new")
    assert is_done(Job(row, 0, tmp_path / "new" / "none" / "seed-0"), PLAN)


def test_the_flag_that_differs_is_named_also_where_it_is_one_of_scoring(tmp_path: Path) -> None:
    job = Job(Row("none"), 0, tmp_path)
    finish(job, [0.5])
    with pytest.raises(InputError, match=r"`tcore evaluate .*--videos 2` \(now --videos 3\)"):
        is_done(job, replace(PLAN, videos=3))
    with pytest.raises(InputError, match=r"\(now without --optim\.steps\)"):
        is_done(job, replace(PLAN, budget=None))


def test_a_place_that_cannot_be_written_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(SystemExit):
            main(["lab", "branch", "--budget", "2", "--out", str(out)])
        lines = capsys.readouterr().err.splitlines()
        assert lines == [f"tcore: error: cannot write to {out}: {tmp_path / 'file'} is a file."]


def test_a_row_whose_folder_cannot_be_made_costs_the_others_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], job: Job, log_name: str, device: str, processes: Any) -> float:
        write_text(job.folder / "scores" / "results.json", json.dumps({"benchmarks": {"davis": SCORES}}))
        return 1.0

    monkeypatch.setattr("tcore.lab.run_command", run)
    (tmp_path / "past").touch()
    with pytest.raises(InputError, match=r"1 of 5 runs failed; .* the 4 rows .*past, seed 0: .*past/seed-0"):
        lab("branch", tmp_path, PLAN, seeds=1, only=(), devices=("",), say=lambda line: None)
    assert "| all |" in (tmp_path / "lab.md").read_text()


SCORES = {"scores": {"J&F": 0.5, "J": 0.5, "F": 0.5}, "clips": {"clip": {"J&F": 0.5}}}


class Saying(Processes):
    """Ends well and says some lines."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    def run(self, line: Any, environment: Any, log: Path) -> int:
        with log.open("a") as said:
            said.write(self.text)
        return 0


def test_a_whole_training_is_known_by_its_encoder_whatever_is_said_after_it(tmp_path: Path) -> None:
    job = Job(Row("none"), 0, tmp_path)
    train = job.commands(PLAN)[0]
    whole = "encoder: run/encoder.safetensors\nsemaphores were leaked\n"
    assert run_command(train, job, "train.log", "", Saying(whole)) >= 0
    # What an earlier attempt said does not count.
    with pytest.raises(InputError, match=r"ended with 0: SIGTERM: saved step 3 of 9"):
        run_command(train, job, "train.log", "", Saying("SIGTERM: saved step 3 of 9\n"))
