"""A stopped lab stops its processes, and scores no half training."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tcore.errors import InputError
from tcore.files import is_alive
from tcore.lab.ablation import commands_of
from tcore.lab.runs import DONE, Job, Processes, Row, run_command
from tests.lab.test_ablation import PLAN, TINY, run_lab, wait_for


@pytest.fixture
def endless(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """A lab whose training would take days."""
    words = f"lab branch --rows none --out {tmp_path} --budget 1000000 --videos 2"
    line = [sys.executable, "-m", "tcore", *words.split(), f"--extra={TINY}"]
    pipe = subprocess.PIPE
    with subprocess.Popen(line, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        yield process
        with suppress(ProcessLookupError):  # nobody is left
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.long
def test_a_signal_to_a_lab_stops_its_training_too(endless: "subprocess.Popen[str]", tmp_path: Path) -> None:
    """`kill` and schedulers know the lab alone; a training left behind would hold its run."""
    run = tmp_path / "none" / "seed-0" / "run"
    assert wait_for(run / "metrics.jsonl")
    training = json.loads((run / "lock.json").read_text())["pid"]
    endless.terminate()
    said = endless.communicate(timeout=60)[1]
    assert endless.returncode == 130
    assert "interrupted" in said
    assert not is_alive(training)
    assert "saved step" in (run.parent / "train.log").read_text()
    assert not (run.parent / "evaluate.log").exists(), "half a training was scored"
    assert not (run.parent / DONE).exists()


def test_a_process_of_a_lab_writes_its_log_and_returns_its_code(tmp_path: Path) -> None:
    code = "import os, sys; print(os.environ['WORD'], file=sys.stderr); sys.exit(3)"
    for _ in range(2):
        environment = os.environ | {"WORD": "hello"}
        assert Processes().run([sys.executable, "-c", code], environment, tmp_path / "log") == 3
    assert (tmp_path / "log").read_text() == "hello\n" * 2


class Printing(Processes):
    """Prints some lines and exits."""

    def __init__(self, text: str, code: int = 0) -> None:
        super().__init__()
        self.text, self.code = text, code

    def run(self, command: Any, environment: Any, log: Path) -> int:
        with log.open("a") as output:
            output.write(self.text)
        return self.code


def test_only_a_training_that_names_its_encoder_is_finished(tmp_path: Path) -> None:
    """One that was stopped exits with 0, as schedulers like it; an earlier attempt does not count."""
    job = Job(Row("none"), 0, tmp_path)
    train = commands_of(job, PLAN)[0]
    whole = "encoder: run/encoder.safetensors\nsemaphores were leaked\n"
    assert run_command(train, job, "train.log", "", Printing(whole), "tcore") >= 0
    with pytest.raises(InputError, match=r"ended with 0: SIGTERM: saved step 3 of 9"):
        run_command(train, job, "train.log", "", Printing("SIGTERM: saved step 3 of 9\n"), "tcore")
    with pytest.raises(InputError, match=r"none, seed 0: `tcore train .*` ended with 2: no such store"):
        run_command(train, job, "train.log", "", Printing(whole + "no such store\n", 2), "tcore")


def test_ctrl_c_ends_a_lab_whose_next_run_waits_for_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread waits for the GPU: it must not start when the run before it is interrupted."""
    started: list[str] = []
    here = threading.get_ident()

    def run(self: Processes, command: Any, environment: Any, log: Path) -> int:
        started.append(log.parent.parent.name)
        if len(started) == 1:
            signal.pthread_kill(here, signal.SIGINT)
        last = time.monotonic() + 10
        while time.monotonic() < last:
            self.check_stop()  # as a training, which exits when it is told to
            time.sleep(0.01)
        return 0

    monkeypatch.setattr(Processes, "run", run)
    # A shell that starts the tests in the background makes them ignore Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_lab(tmp_path, gpu="0")
    finally:
        signal.signal(signal.SIGINT, before)
    assert started == ["none"]
    assert not (tmp_path / "past").exists()
