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
    family_of,
    finish,
    gone,
    kill_again_and_again,
    make_store,
    start,
    steps_of,
    wait_for_step,
)
from tests.training.jobs import ENVIRONMENT, ROOT, children_of, command
from tests.training.test_loop import assert_same_run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signals, limits and /proc of Linux")

CHAIN: dict[str, Any] = {"optim__steps": 12, "keep_every": 12, "runtime__workers": 1}
HOST = socket.gethostname()


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, "subprocess.CompletedProcess[str]"]:
    """Two processes that met one fault after the other, and what was printed."""
    root = tmp_path_factory.mktemp("faults")
    store, spoilt = (make_store(root / name) for name in ("store", "spoilt"))
    for path in (spoilt / "video-3").iterdir():
        path.write_bytes(path.read_bytes()[:100])
    short = {"frames": str(store), "runtime__workers": 0, "optim__steps": 8, "keep_every": 8}
    jobs: list[dict[str, Any]] = [{"run": str(root / "never"), "frames": str(store), "note": True, **CHAIN}]
    for act, rank in (("nan", 1), ("full", 0), ("term", 1)):
        jobs.append(
            {"run": str(root / act), "faults": [(3, act, rank)], "note": True, "quiet": False, **short}
        )
        jobs.append({"run": str(root / act), **short})
    strict = short | {"frames": str(spoilt), "runtime__bad_samples": 0.0}
    jobs.append({"run": str(root / "bad"), "note": True, **strict})
    starved = short | {"faults": [(3, "starve", 1)], "runtime__workers": 1, "optim__steps": 500}
    jobs.append({"run": str(root / "starved"), **starved})
    done = subprocess.run(
        command(jobs, processes=2), cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=600
    )
    return root, done


def ended(root: Path, job: str) -> list[tuple[str, int, str]]:
    """How a job ended, in each process: kind of error, exit code, text."""
    found = [json.loads((root / f"{job}-{rank}.json").read_text()) for rank in range(2)]
    return [(end["kind"], end["code"], end["text"]) for end in found]


def test_a_number_that_is_not_finite_in_one_process_stops_both_before_the_update(launch: Any) -> None:
    root, _ = launch
    first, other = ended(root, "nan")
    assert first[:2] == ("DivergedError", 1)
    assert "=nan at step 4: stopped" in first[2]
    assert other[:2] == ("PeerError", 1)  # it prints nothing
    assert steps_of(root / "nan") == list(range(1, 9))  # resumed by the same command


def test_a_full_disk_ends_both_processes_and_keeps_the_last_checkpoint(launch: Any) -> None:
    root, _ = launch
    first, other = ended(root, "full")
    assert first[:2] == ("OSError", 2)
    assert "No space left on device" in first[2]
    assert other[:2] == ("PeerError", 2)
    assert_same_run(root / "full", root / "nan")  # both were resumed to the end


def test_a_signal_to_one_process_lets_both_save_and_stop(launch: Any) -> None:
    root, done = launch
    assert [end[:2] for end in ended(root, "term")] == [("StopRequested", 0)] * 2
    assert "a signal to another process: saved step 4 of 8" in done.stderr
    assert_same_run(root / "term", root / "nan")


def test_an_image_that_one_process_cannot_read_is_said_once_and_ends_both(launch: Any) -> None:
    root, _ = launch
    first, other = ended(root, "bad")
    assert first[:2] == ("UnreadableError", 2)
    assert "runtime.bad_samples=0 " in first[2]
    assert "video-3" in first[2]
    assert other[:2] == ("PeerError", 2)


def test_a_killed_reading_process_of_one_process_is_one_line_and_ends_both(launch: Any) -> None:
    _, done = launch
    assert done.returncode == 1
    assert_one_line(done.stderr, f"tcore: error (process 1 on {HOST}): ")
    assert "reading process" in done.stderr


def test_a_job_names_who_hangs_and_who_is_gone_and_resumes_by_itself(launch: Any, tmp_path: Path) -> None:
    root, _ = launch
    job = start(
        tmp_path / "run",
        processes=2,
        restarts=2,
        frames=str(root / "store"),
        faults=[(4, "hang", 1, 0), (7, "kill", 0, 1)],
        pause=0.1,  # a process reports its step every quarter of a second: it must not die before
        runtime__patience=5.0,
        **CHAIN,
    )
    code, said = finish(job, 400)
    assert code == 0, said
    hung, lost = [line for line in said.splitlines() if line.startswith("tcore: error")]
    assert re.search(r"no progress for 5 s \(runtime.patience=5\): process 1 of 2 on .* \(pid \d+\)", hung)
    assert re.search(r"last in step 4, at tcore/training/loop.py:\d+;", hung)
    assert lost.startswith(f"tcore: error (process 1 on {HOST}): process 0 of 2 on {HOST} (pid ")
    assert re.search("is gone, last in step [567];", lost)  # what it last reported
    assert "Traceback" not in said
    # The same bits, whoever hung or was killed.
    assert_same_run(tmp_path / "run", root / "never")


@pytest.mark.long
@pytest.mark.parametrize(("kills", "steps"), [(3, 60), (50, 1000)])
def test_two_processes_killed_at_random_under_load_equal_two_that_never_were(
    kills: int, steps: int, tmp_path: Path
) -> None:
    store = make_store(tmp_path / "store")
    with busy_cores():
        assert kill_again_and_again(tmp_path / "run", store, kills, steps, seed=2, processes=2) <= 2
    job = KILLED_RUN | {"optim__steps": steps, "keep_every": steps, "frames": str(store)}
    code, said = finish(start(tmp_path / "never", processes=2, **job), 600)
    assert code == 0, said
    assert_same_run(tmp_path / "run", tmp_path / "never")


@pytest.mark.long
def test_torchrun_that_gets_sigterm_is_gone_within_thirty_seconds(tmp_path: Path) -> None:
    store, run = make_store(tmp_path / "store"), tmp_path / "run"
    job: dict[str, Any] = {"frames": str(store), "runtime__workers": 1, "optim__steps": 20}
    job |= {"checkpoint_every": 100}
    process = start(run, processes=2, pause=0.3, keep_every=20, **job)
    wait_for_step(run, 2, process)
    family, asked = family_of(process), time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, said = finish(process, 30)  # torchrun itself ends with 1, whatever its processes do
    assert time.monotonic() - asked < 30
    assert f"SIGTERM: saved step {steps_of(run)[-1]} of 20" in said
    assert "tcore: error" not in said
    gone(family)
    assert torch.load(run / "checkpoint.pt", weights_only=True)["step"] == steps_of(run)[-1] < 20
    for name in ("run", "never"):
        code, said = finish(start(tmp_path / name, processes=2, keep_every=20, **job))
        assert code == 0, said
    assert_same_run(run, tmp_path / "never")


@pytest.mark.long
def test_a_frozen_process_is_named_and_torchrun_ends_it(tmp_path: Path) -> None:
    job = start(tmp_path / "run", processes=2, optim__steps=5000, runtime__patience=4.0)
    wait_for_step(tmp_path / "run", 3, job)
    family = family_of(job)
    subprocess.run(["kill", "-STOP", str(children_of(job.pid)[1])], check=True)
    code, said = finish(job, 60)
    assert code == 1
    assert_one_line(said, f"process 1 of 2 on {HOST} (pid {family[2]}) does not respond")
    gone(family)


@pytest.mark.long
def test_a_process_that_does_not_arrive_is_named(tmp_path: Path) -> None:
    job = start(tmp_path / "run", processes=2, faults=[(-1, "hang", 1)], runtime__patience=3.0)
    code, said = finish(job, 60)
    assert code == 1
    assert_one_line(said, "process 1 of 2 did not arrive within 3 s (runtime.patience)")
