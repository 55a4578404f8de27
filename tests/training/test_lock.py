"""Two jobs, one run folder."""

import errno
import fcntl
import json
import multiprocessing
import os
import platform
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tcore import InputError
from tcore.training.lock import lock_run
from tests.training.faults import (
    finish,
    holds,
    start,
    steps_of,
    wait_for,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signals, limits and /proc of Linux")


def lock_elsewhere(run: str, answers: Any) -> None:
    try:
        with lock_run(Path(run)):
            answers.put("got it")
    except InputError as error:
        answers.put(str(error))


def test_a_second_process_does_not_get_the_lock_and_is_told_who_holds_it(tmp_path: Path) -> None:
    processes = multiprocessing.get_context("fork")

    def ask() -> str:
        answers = processes.Queue()
        other = processes.Process(target=lock_elsewhere, args=(str(tmp_path), answers))
        other.start()
        answer = str(answers.get(timeout=30))
        other.join()
        return answer

    with lock_run(tmp_path):
        said = ask()
        assert f"is being trained by process {os.getpid()} on {platform.node()}: wait for it" in said
    assert ask() == "got it"


@pytest.mark.long
def test_a_second_job_on_a_run_folder_is_told_who_is_there(tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = start(run, {"optim.steps": 5000}, pause=0.05)
    wait_for(lambda: len(steps_of(run)) >= 1, first)
    code, said = finish(start(run, {"optim.steps": 5000}))
    assert code == 2
    assert said == (
        f"tcore: error: run {run} is being trained by process {first.pid} on {platform.node()}: "
        "wait for it or stop it, or give another --run.\n"
    )
    first.kill()
    first.communicate()
    assert steps_of(run) == list(range(1, len(steps_of(run)) + 1))
    # What the killed job left is no lock.
    assert json.loads((run / "lock.json").read_text())["pid"] == first.pid
    third = start(run, {"optim.steps": 5000})
    wait_for(partial(holds, run, third), third)
    third.kill()
    third.communicate()


def test_without_locks_of_the_file_system_the_note_of_the_holder_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    over = subprocess.Popen([sys.executable, "-c", ""])
    over.wait()
    notes = {
        over.pid: (platform.node(), True),
        os.getppid(): (platform.node(), False),
        1: ("elsewhere", False),
    }
    for pid, (host, free) in notes.items():
        (tmp_path / "lock.json").write_text(json.dumps({"pid": pid, "host": host}))
        if free:
            with lock_run(tmp_path):
                pass
        else:
            with pytest.raises(InputError, match=f"process {pid} on {host}"), lock_run(tmp_path):
                pass
    for text in ("", "nonsense", "[[", '{"pid": "x"}', '{"pid": -1}'):
        (tmp_path / "lock.json").write_text(text)
        with lock_run(tmp_path):
            pass
