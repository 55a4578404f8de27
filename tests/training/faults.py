"""Jobs that are stopped, killed and starved from outside, and what is left of them."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tcore.files import LOCKS, is_alive
from tcore.training import checkpoint as checkpoints
from tests.data.clips import write_clip
from tests.training.jobs import ENVIRONMENT, ROOT, children_of, command

Process = subprocess.Popen[str]


def start(run: Path, *, processes: int = 1, restarts: int = 0, cwd: Path = ROOT, **job: Any) -> Process:
    """Begin a training in other processes, by the command line's own error handling."""
    job = {"run": str(run), "quiet": False, **job}
    return popen(command([job], processes=processes, restarts=restarts), cwd)


def popen(command: list[str], cwd: Path = ROOT) -> Process:
    """Begin a command whose output is read later."""
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=cwd, env=ENVIRONMENT, stdout=pipe, stderr=pipe, text=True)


def finish(process: Process, seconds: float = 120) -> tuple[int, str]:
    """Exit code and what was printed, once it is over; one that hangs is an error."""
    try:
        _, said = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, said


def wait_for(condition: Callable[[], bool], process: Process, seconds: float = 120) -> None:
    """Wait until something has happened in a process that is still there."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, f"it ended too early: {process.communicate()[1]}"
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


def wait_for_step(run: Path, step: int, process: Process) -> None:
    """Wait until a run has noted a step."""
    wait_for(lambda: (steps_of(run) or [0])[-1] >= step, process)


def steps_of(run: Path) -> list[int]:
    """Steps in the metrics, whole lines only."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line)["step"] for line in lines if line[-1] == "\n"]


def make_store(root: Path, videos: int = 8, frames: int = 10) -> Path:
    """A folder of frame folders."""
    for video in range(videos):
        write_clip(root / f"video-{video}", frames, seed=video)
    return root


KILLED_RUN: dict[str, Any] = {"checkpoint_every": 2, "runtime__workers": 2, "runtime__log_every": 4}


def kill_again_and_again(
    run: Path, store: Path, kills: int, steps: int, seed: int, processes: int = 1
) -> int:
    """Kill a training at random moments, all of it or one of its processes, then let it come to its end.

    Returns the most steps that were noted and had to be made again.
    """
    rng, most_lost = random.Random(seed), 0
    job = KILLED_RUN | {"optim__steps": steps, "keep_every": steps, "frames": str(store)}
    kinds = ("one rank", "all ranks", "torchrun") if processes > 1 else ("the run",)
    for _ in range(kills):
        process = start(run, processes=processes, **job)
        wait_for(lambda process=process: holds(run, process), process)  # type: ignore[misc]
        # Some are killed before their first step, most in the middle of one or of a checkpoint.
        wait_for_step(run, rng.randint(0, 12) + (steps_of(run) or [0])[-1], process)
        time.sleep(rng.uniform(0, 0.1))
        assert process.poll() is None, "it was over before it could be killed"
        kill(process, rng.choice(kinds), rng)
        before = steps_of(run)
        notes: list[str] = []
        place = checkpoints.load_newest(run / "checkpoint.pt", lambda path: path, notes.append)
        assert not any("damaged" in note for note in notes), notes
        saved = 0 if place is None else torch.load(place, weights_only=True)["step"]
        most_lost = max(most_lost, (before[-1] if before else 0) - saved)
    code, said = finish(start(run, processes=processes, **job), 600)
    assert code == 0, said
    assert steps_of(run) == list(range(1, steps + 1))
    return most_lost


def kill(process: Process, kind: str, rng: random.Random) -> None:
    """Kill a run, or some of its processes, and see that nothing of it stays behind."""
    family, ranks = family_of(process), children_of(process.pid)
    if kind in ("the run", "torchrun"):
        process.kill()
    else:
        for rank in ranks if kind == "all ranks" else [rng.choice(ranks)]:
            os.kill(rank, signal.SIGKILL)
    code, said = finish(process, 60)
    assert code == (1 if "rank" in kind else -signal.SIGKILL), said
    if kind == "one rank":
        assert_one_line(said, "is gone, last in step")
    gone(family)


def assert_one_line(said: str, what: str) -> None:
    """Of all processes of a job, one has printed an error, and without a stack of ours."""
    lines = [line for line in said.splitlines() if line.startswith("tcore: error")]
    assert len(lines) == 1, said
    assert what in lines[0], said
    assert 'loop.py", line' not in said, said


def family_of(process: Process) -> list[int]:
    """A process, those that it started, and those that they started."""
    children = children_of(process.pid)
    return [process.pid, *children, *(grandchild for child in children for grandchild in children_of(child))]


@contextmanager
def busy_cores() -> Iterator[None]:
    """Half of the cores have something else to do."""
    load = [
        subprocess.Popen([sys.executable, "-c", "while True: sum(range(100_000))"])
        for _ in range(max(1, (os.cpu_count() or 1) // 2))
    ]
    try:
        yield
    finally:
        for process in load:
            process.kill()
            process.wait()


def holds(run: Path, process: Process) -> bool:
    """Whether a process, or one that it started, holds the lock of a run."""
    path = run / LOCKS[1]
    text = path.read_text() if path.exists() else ""
    return text.endswith("\n") and json.loads(text)["pid"] in (process.pid, *children_of(process.pid))


def gone(processes: list[int]) -> None:
    """Wait for processes to be gone."""
    deadline = time.monotonic() + 60
    while any(map(is_alive, processes)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(is_alive, processes))


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "truncated":
        data = data[: len(data) // 2]
    elif how == "empty":
        data = bytearray()
    else:
        data[len(data) // 2] ^= 0x10
    path.write_bytes(data)
