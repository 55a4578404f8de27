import contextlib
import importlib.util
import json
import os
import re
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tcore import InputError, train
from tcore.methods.health import Health
from tcore.training import journal
from tcore.training.journal import Journal, forget_after, open_tracker
from tests.runs import metrics
from tests.tiny import tiny
from tests.training.jobs import StoppedError, stopping_at

LINE = {"total": 1.0, "dino": 1.0, "samples_per_second": 1.0, "data_wait": 0.0}
HEALTH = Health("learning", {"frame_rank": 9.0}, "dino 1.000")


@pytest.mark.parametrize("last", ['{"step": 3}', '{"ste', "[3]"])
def test_lines_after_the_checkpoint_and_lines_cut_off_are_forgotten(last: str, tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    assert forget_after(path, 2) == ""
    assert not path.exists()
    path.write_text('{"step": 1}\n{"step": 2}\n' + last)
    assert forget_after(path, 2) == ""
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_bad_line_in_the_middle_is_left_out_alone_with_a_warning_and_a_copy(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    lines = [b'{"step": 1}', b'{"st\xff', *(b'{"step": %d}' % step for step in range(3, 51))]
    path.write_bytes(b"\n".join(lines) + b"\n")
    warning = forget_after(path, 40)
    assert "line 2" in warning
    assert "m.damaged.jsonl" in warning
    assert path.read_bytes().splitlines() == [lines[0], *lines[2:40]]
    assert (tmp_path / "m.damaged.jsonl").read_bytes().splitlines() == lines


def test_a_run_that_resumes_with_other_threads_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(tiny(optim__steps=2), tmp_path / "run", quiet=True)
    for threads, said in ((torch.get_num_threads(), False), (7, True)):
        made = json.loads((run / "environment.json").read_text()) | {"threads": str(threads)}
        (run / "environment.json").write_text(json.dumps(made))
        train(tiny(optim__steps=2), run)
        assert ("resumed with threads 7 -> 1" in capsys.readouterr().err) is said
    (run / "environment.json").write_text("[]")  # what cannot be read is written anew
    train(tiny(optim__steps=2), run, quiet=True)
    assert json.loads((run / "environment.json").read_text())["threads"] == "1"


def test_time_left_is_told_by_the_steps_after_the_first_which_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([0.0, 50.0, 50.0, 52.0])  # made; the first step told and taken as the start; the second told
    monkeypatch.setattr(journal, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    told = Journal(tmp_path, first_step=4, num_steps=10, quiet=False)
    told.record(5, LINE, HEALTH)
    told.record(6, LINE, HEALTH)
    told.close()
    assert [line.split("ETA ")[1] for line in capsys.readouterr().err.splitlines()] == ["4:10", "8.0 s"]


def test_terminal_of_80_columns_shows_step_loss_state_speed_wait_and_eta(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pty, printed = pytest.importorskip("pty"), list[bytes]()
    master, slave = pty.openpty()

    def listen() -> None:
        with contextlib.suppress(OSError):  # the terminal is gone when the training has ended
            while chunk := os.read(master, 4096):
                printed.append(chunk)

    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    listener = threading.Thread(target=listen)
    with os.fdopen(slave, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        listener.start()
        train(tiny(), tmp_path / "run")
        monkeypatch.undo()
    listener.join()
    os.close(master)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", b"".join(printed).decode())
    last = [line for line in text.replace("\r", "\n").splitlines() if line.startswith("step")][-1]
    assert re.search(r"6/6 .* (learning|plateau|collapse) .*/s wait \d+% ETA 0:00:00", last)
    assert len(last.rstrip()) <= 80
    assert re.search(r"step 4/6  total \d.*distinguished", text)


def test_tensorboard_of_a_resumed_run_has_losses_and_health_of_every_step_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run, config = tmp_path / "run", tiny(runtime__log_every=1)
    with pytest.raises(StoppedError):
        train(config, run, quiet=True, on_step=stopping_at(5))
    train(config, run, quiet=True)
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    logged = events.Scalars("total")
    assert [event.step for event in logged] == [1, 2, 3, 4, 5, 6]
    totals = [line["total"] for line in metrics(run)]
    assert [event.value for event in logged] == pytest.approx(totals, rel=1e-5)
    assert "health/frame_rank" in events.Tags()["scalars"]


class StandIn:
    """A package that keeps what it is told: trackio, and the run that wandb.init returns."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.begun: list[dict[str, Any]] = []
        self.logged: dict[int, dict[str, float]] = {}
        self.closed, self.fails_at = 0, fails_at

    def init(self, **settings: Any) -> "StandIn":
        self.begun.append(settings)
        return self

    def log(self, figures: dict[str, float], step: int) -> None:
        if step == self.fails_at:
            raise RuntimeError("no connection")
        self.logged[step] = figures

    def finish(self) -> None:
        self.closed += 1


@pytest.mark.parametrize("name", ["trackio", "wandb"])
def test_a_named_tracker_gets_losses_and_health_and_the_same_identity_on_resume(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, config = StandIn(), tiny(log=name, runtime__log_every=1)
    monkeypatch.setitem(sys.modules, name, package)
    for step in (1, 2):
        tracker = open_tracker(config, tmp_path, first_step=step - 1)
        journal = Journal(tmp_path, step - 1, 2, quiet=True, tracker=tracker)
        journal.record(step, LINE | {"total": step / 2, "note": "no figure"}, HEALTH)
        journal.close()
    assert {step: figures["total"] for step, figures in package.logged.items()} == {1: 0.5, 2: 1.0}
    assert package.logged[2].keys() >= {"health/frame_rank", "samples_per_second"}
    assert "note" not in package.logged[2]
    first, second = package.begun
    assert first == second
    assert first["resume"] == "allow"
    assert first["config"]["optim.steps"] == 6
    assert package.closed == 2
    assert not (tmp_path / "tensorboard").exists()


def test_a_tracker_that_fails_costs_a_warning_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = StandIn(fails_at=4)
    monkeypatch.setitem(sys.modules, "trackio", package)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    run = train(tiny(log="trackio"), tmp_path / "run")
    assert list(package.logged) == [2]
    assert capsys.readouterr().err.count("step 4: trackio fails (no connection); continuing without it") == 1
    assert len(metrics(run)) == 6


def test_a_tracker_that_is_missing_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    if importlib.util.find_spec("wandb") is not None:
        pytest.skip("wandb is installed")
    with pytest.raises(InputError, match="pip install wandb"):
        train(tiny(log="wandb"), tmp_path / "run")
    assert not (tmp_path / "run").exists()
