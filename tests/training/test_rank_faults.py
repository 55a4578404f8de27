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

from tests.runs import assert_same_run
from tests.training.faults import (
    KILLED_RUN,
    assert_one_line,
    busy_cores,
    family_of,
    finish,
    gone,
    kill_again_and_again,
    make_store,
    popen,
    start,
    steps_of,
    wait_for_step,
)
from tests.training.jobs import children_of, command, do, fork_together

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signals, limits and /proc of Linux")

HOST = socket.gethostname()
SHORT: dict[str, Any] = {"optim__steps": 5, "keep_every": 5, "runtime__workers": 0}


def launched(jobs: list[dict[str, Any]], root: Path) -> tuple[int, str]:
    """Exit code and words of two processes that torchrun starts up to three times."""
    return finish(popen(command(jobs, processes=2, restarts=2)), 600)


def forked(jobs: list[dict[str, Any]], root: Path) -> tuple[int, str]:
    """The same, faster."""
    return fork_together(2, lambda: do(jobs, ()), root / "log", restarts=2)


@pytest.fixture(scope="module", params=[forked, pytest.param(launched, marks=pytest.mark.long)])
def launch(request: Any, whole: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, str]:
    """Two processes that met one fault after the other and were started again twice; what they said.

    What training imports is there before the fork, because a whole run was trained.
    """
    root = tmp_path_factory.mktemp("faults")
    store, spoilt = (str(make_store(root / name)) for name in ("store", "spoilt"))
    for path in Path(spoilt, "video-3").iterdir():
        path.write_bytes(path.read_bytes()[:100])

    def job(name: str, attempt: int | None = 0, **changes: Any) -> dict[str, Any]:
        found = {"run": str(root / name), "frames": store, **SHORT, **changes}
        return found if attempt is None else {"attempt": attempt, **found}

    jobs = []
    for act, rank in (("nan", 1), ("full", 0), ("term", 1)):
        jobs.append(job(act, faults=[(3, act, rank)], note=True, quiet=False))
        jobs.append(job(act))
    jobs.append(job("bad", note=True, frames=spoilt, runtime__bad_samples=0.0))
    # A process reports its step every quarter of a second: it must not die before.
    patient = {"pause": 0.1, "runtime__patience": 5.0, "runtime__workers": 1}
    jobs.append(job("chain", None, faults=[(3, "hang", 1, 0), (4, "kill", 0, 1)], **patient))
    starve = [(3, "starve", 1, 2)]
    jobs.append(job("starved", 2, faults=starve, runtime__workers=1, optim__steps=500))
    return root, *request.param(jobs, root)


def errors(said: str) -> list[str]:
    """What was printed as an error, one line for each of the three times that the job ended."""
    lines = [line for line in said.splitlines() if line.startswith("tcore: error")]
    assert len(lines) == 3, said
    assert 'loop.py", line' not in said  # torchrun shows its own stack, we do not
    return lines


def ended(root: Path, job: str) -> list[tuple[str, int, str]]:
    """How a job ended, in each process: kind of error, exit code, text."""
    found = [json.loads((root / f"{job}-{rank}.json").read_text()) for rank in range(2)]
    return [(end["kind"], end["code"], end["text"]) for end in found]


def test_a_number_that_is_not_finite_in_one_process_stops_both_before_the_update(launch: Any) -> None:
    root, *_ = launch
    first, other = ended(root, "nan")
    assert first[:2] == ("DivergedError", 1)
    assert "=nan at step 4: stopped" in first[2]
    assert other[:2] == ("PeerError", 1)  # it prints nothing
    assert steps_of(root / "nan") == list(range(1, 6))  # resumed by the same command


def test_a_full_disk_ends_both_processes_and_keeps_the_last_checkpoint(launch: Any) -> None:
    root, *_ = launch
    first, other = ended(root, "full")
    assert first[:2] == ("OSError", 2)
    assert "No space left on device" in first[2]
    assert other[:2] == ("PeerError", 2)
    assert_same_run(root / "full", root / "nan")  # both were resumed to the end


def test_a_signal_to_one_process_lets_both_save_and_stop(launch: Any) -> None:
    root, _, said = launch
    assert [end[:2] for end in ended(root, "term")] == [("StopRequested", 0)] * 2
    assert "a signal to another process: saved step 4 of 5" in said
    assert_same_run(root / "term", root / "nan")


def test_an_image_that_one_process_cannot_read_is_said_once_and_ends_both(launch: Any) -> None:
    root, *_ = launch
    first, other = ended(root, "bad")
    assert first[:2] == ("TooManyUnreadableError", 2)
    assert "runtime.bad_samples=0 " in first[2]
    assert "video-3" in first[2]
    assert other[:2] == ("PeerError", 2)


def test_a_job_names_who_hangs_and_who_is_gone_and_resumes_by_itself(launch: Any) -> None:
    root, _, said = launch
    hung, lost, _ = errors(said)
    assert re.search(r"no progress for 5 s \(runtime.patience=5\): process 1 of 2 on .* \(pid \d+\)", hung)
    assert re.search(r"last in step 3, at tcore/training/loop.py:\d+;", hung)
    assert lost.startswith(f"tcore: error (process 1 on {HOST}): process 0 of 2 on {HOST} (pid ")
    assert re.search("is gone, last in step [34];", lost)  # what it last reported
    # The same bits, whoever hung or was killed.
    assert_same_run(root / "chain", root / "nan")


def test_a_killed_reading_process_of_one_process_is_one_line_and_ends_both(launch: Any) -> None:
    _, code, said = launch
    line = errors(said)[2]
    assert code == 1
    assert line.startswith(f"tcore: error (process 1 on {HOST}): ")
    assert "reading process" in line


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
