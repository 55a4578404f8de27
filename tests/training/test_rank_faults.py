"""What clusters do to jobs of several processes, done to real ones."""

import json
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.faults import (
    KILLED_RUN,
    assert_one_line,
    busy_cores,
    children_of,
    family_of,
    finish,
    gone,
    kill_again_and_again,
    make_store,
    start,
    steps_of,
    wait_for,
)
from tests.training.jobs import torchrun
from tests.training.rank_jobs import CHAIN
from tests.training.test_loop import assert_same_run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signals, limits and /proc of Linux")


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, "subprocess.CompletedProcess[str]"]:
    """Two processes that met one fault after the other, and what was said."""
    root = tmp_path_factory.mktemp("faults")
    return root, torchrun(2, "tests.training.rank_jobs", str(root))


def ended(root: Path, job: str) -> list[dict[str, Any]]:
    """How a job ended, in each process."""
    return [json.loads((root / f"{job}-{rank}.json").read_text()) for rank in range(2)]


def test_a_gradient_that_is_not_finite_in_one_process_stops_both_before_the_update(launch: Any) -> None:
    root, _ = launch
    first, other = ended(root, "nan")
    assert (first["kind"], first["code"]) == ("DivergedError", 1)
    assert first["text"].startswith("gradient norm of backbone=nan at step 4: stopped")
    assert (other["kind"], other["code"]) == ("EchoError", 1)  # it says nothing
    assert [job["kind"] for job in ended(root, "nan-again")] == ["", ""]


def test_a_full_disk_ends_both_processes_and_keeps_the_last_checkpoint(launch: Any) -> None:
    root, _ = launch
    first, other = ended(root, "full")
    assert (first["kind"], first["code"]) == ("OSError", 2)
    assert "No space left on device" in first["text"]
    assert (other["kind"], other["code"]) == ("EchoError", 2)
    assert [job["kind"] for job in ended(root, "full-again")] == ["", ""]
    assert_same_run(root / "full", root / "nan")  # both went on to the end
    assert steps_of(root / "full") == list(range(1, 9))


def test_a_signal_to_one_process_lets_both_save_and_leave(launch: Any) -> None:
    root, done = launch
    assert [(job["kind"], job["code"]) for job in ended(root, "asked")] == [("Preempted", 0)] * 2
    assert "a signal to another process: saved step 4 of 8; the same command goes on." in done.stderr
    assert_same_run(root / "asked", root / "nan")


def test_an_image_that_one_process_cannot_read_is_said_once_and_ends_both(launch: Any) -> None:
    root, _ = launch
    first, other = ended(root, "spoilt")
    assert (first["kind"], first["code"]) == ("UnreadableError", 2)
    assert "more than runtime.bad_samples=0 allows" in first["text"]
    assert "video-3" in first["text"]
    assert (other["kind"], other["code"]) == ("EchoError", 2)


def test_a_killed_reading_process_of_one_process_is_one_line_and_ends_both(launch: Any) -> None:
    _, done = launch
    assert done.returncode == 1
    assert_one_line(done.stderr, f"tcore: error (process 1 on {socket.gethostname()}): ")
    assert "reading process" in done.stderr
    assert "was killed, as the system does when memory runs out" in done.stderr


# What the processes do at some steps of each attempt: rank 1 hangs, then rank 0 is killed.
TROUBLE = """
attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
smooth = loop.Trainer.step
def rough(self, parts, index, *rest):
    if (attempt, rank, index) == (0, 1, 4): time.sleep(600)
    if (attempt, rank, index) == (1, 0, 7): os.kill(os.getpid(), signal.SIGKILL)
    return smooth(self, parts, index, *rest)
loop.Trainer.step = rough
"""


def test_a_job_names_who_hangs_and_who_is_gone_and_goes_on_by_itself(launch: Any, tmp_path: Path) -> None:
    root, _ = launch
    job = start(
        tmp_path / "run",
        CHAIN | {"runtime.patience": 5.0},
        frames=root / "store",
        before=TROUBLE,
        pause=0.1,  # a process tells its step every quarter of a second: it must not die before
        processes=2,
        restarts=2,
    )
    code, said = finish(job, 400)
    assert code == 0, said
    hung, lost = [line for line in said.splitlines() if line.startswith("tcore: error")]
    host = socket.gethostname()
    assert "a process hangs, nothing has moved for 5 s (runtime.patience=5): process 1 of 2" in hung
    assert f"on {host} (pid " in hung
    assert re.search("last in step 4, at tcore/training/loop.py:[0-9]+; the same command", hung)
    assert lost.startswith(f"tcore: error (process 1 on {host}): process 0 of 2 on {host} (pid ")
    assert re.search("is gone, last in step [567]; the same command goes on", lost)  # what it last told
    assert "Traceback" not in said
    # The same bits, whoever hung or was killed.
    assert_same_run(tmp_path / "run", root / "never")


@pytest.mark.long
def test_two_processes_killed_fifty_times_under_load_equal_two_that_never_were(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store")
    with busy_cores():
        killed = kill_again_and_again(tmp_path / "run", store, kills=50, steps=1000, seed=2, processes=2)
    print(f"50 kills: {killed}")
    assert killed.most_lost <= 2
    settings = KILLED_RUN | {"optim.steps": 1000, "keep_every": 1000}
    code, said = finish(start(tmp_path / "never", settings, frames=store, processes=2), 600)
    assert code == 0, said
    assert_same_run(tmp_path / "run", tmp_path / "never")


@pytest.mark.long
def test_two_processes_killed_three_times_leave_nothing_behind(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store")
    killed = kill_again_and_again(tmp_path / "run", store, kills=3, steps=60, seed=0, processes=2)
    assert killed.most_lost <= 2


@pytest.mark.long
def test_torchrun_that_is_asked_to_leave_is_gone_within_thirty_seconds(tmp_path: Path) -> None:
    store, settings = make_store(tmp_path / "store"), {"runtime.workers": 1, "optim.steps": 20}
    settings |= {"checkpoint_every": 100, "keep_every": 20}
    run = tmp_path / "run"
    job = start(run, settings, frames=store, processes=2, pause=0.3)
    wait_for(lambda: len(steps_of(run)) >= 2, job)
    family, asked = family_of(job), time.monotonic()
    job.send_signal(signal.SIGTERM)
    _, said = finish(job, 30)  # torchrun itself ends with 1, whatever its processes do
    assert time.monotonic() - asked < 30
    assert f"SIGTERM: saved step {steps_of(run)[-1]} of 20; the same command goes on." in said
    assert "tcore: error" not in said
    gone(family)
    assert torch.load(run / "checkpoint.pt", weights_only=True)["step"] == steps_of(run)[-1] < 20
    for name in ("run", "never"):
        code, said = finish(start(tmp_path / name, settings, frames=store, processes=2))
        assert code == 0, said
    assert_same_run(run, tmp_path / "never")


@pytest.mark.long
def test_a_frozen_process_is_named_and_torchrun_ends_it(tmp_path: Path) -> None:
    job = start(tmp_path / "run", {"optim.steps": 5000, "runtime.patience": 4.0}, processes=2)
    wait_for(lambda: len(steps_of(tmp_path / "run")) >= 3, job)
    family = family_of(job)
    subprocess.run(["kill", "-STOP", str(children_of(job.pid)[1])], check=True)
    code, said = finish(job, 60)
    assert code == 1
    assert_one_line(said, f"process 1 of 2 on {socket.gethostname()} (pid {family[2]}) gives no sign of life")
    gone(family)


@pytest.mark.long
def test_a_process_that_does_not_come_is_named(tmp_path: Path) -> None:
    late = "if os.environ['RANK'] == '1': time.sleep(600)"
    job = start(tmp_path / "run", {"runtime.patience": 3.0}, before=late, processes=2)
    code, said = finish(job, 60)
    assert code == 1
    assert_one_line(said, "process 1 of 2 has not come within 3 s (runtime.patience)")
