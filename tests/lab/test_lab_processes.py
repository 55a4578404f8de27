"""A lab is asked to leave, and so are its processes."""

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
from tcore.lab import Job, lab, run_command
from tcore.lab_processes import Processes
from tcore.lab_table import DONE
from tcore.show.tables import Row
from tests.lab.test_lab import PLAN, TINY, wait_for


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


def test_who_ends_a_lab_by_a_signal_ends_its_training_too(
    endless: "subprocess.Popen[str]", tmp_path: Path
) -> None:
    """`kill` and schedulers know the lab alone; a training left behind would hold its run."""
    run = tmp_path / "none" / "seed-0" / "run"
    assert wait_for(run / "metrics.jsonl")
    training = json.loads((run / "lock.json").read_text())["pid"]
    endless.terminate()
    said = endless.communicate(timeout=60)[1]
    assert endless.returncode == 130
    assert "interrupted; the same command goes on" in said
    assert not is_alive(training)
    assert "SIGTERM: saved step" in (run.parent / "train.log").read_text()
    assert not (run.parent / "evaluate.log").exists(), "half a training was scored"
    assert not (run.parent / DONE).exists()


def test_a_training_that_was_asked_to_leave_is_not_scored(tmp_path: Path) -> None:
    """It ends with 0, as schedulers like it, and leaves an encoder of the step that it was at."""

    class Leaving(Processes):
        def run(self, line: Any, environment: Any, log: Path) -> int:
            log.write_text("SIGTERM: saved step 3 of 9; the same command goes on.\n")
            return 0

    job = Job(Row("none"), 0, tmp_path)
    with pytest.raises(InputError, match=r"ended with 0: SIGTERM: saved step 3 of 9"):
        run_command(job.commands(PLAN)[0], job, "train.log", "", Leaving())


@pytest.fixture
def heeded() -> Iterator[None]:
    """Ctrl-C works, also where the tests were started in the background, by a shell that ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeded")
def test_ctrl_c_ends_a_lab_whose_next_run_waits_for_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU has a thread that waits for it: it must not begin when the run before it is interrupted."""
    begun: list[str] = []
    here = threading.get_ident()

    def run(self: Processes, line: Any, environment: Any, log: Path) -> int:
        begun.append(log.parent.parent.name)
        if len(begun) == 1:
            signal.pthread_kill(here, signal.SIGINT)
        last = time.monotonic() + 10
        while time.monotonic() < last:
            self.go_on()  # as a training, which leaves when it is asked to
            time.sleep(0.01)
        return 0

    monkeypatch.setattr(Processes, "run", run)
    with pytest.raises(KeyboardInterrupt):
        lab("branch", tmp_path, PLAN, seeds=1, only=(), devices=("0",), say=lambda line: None)
    assert begun == ["none"]
    assert not (tmp_path / "past").exists()
