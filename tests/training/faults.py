"""A tiny training in a process of its own, or in several, to be stopped, killed and starved."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tcore.files import LOCKS, is_alive
from tcore.training import generations
from tcore.training.step import Trainer
from tests.data.clips import write_clip
from tests.tiny import TINY

ROOT = Path(__file__).parent.parent.parent


def start(
    run: Path,
    settings: dict[str, Any],
    *,
    frames: Path | None = None,
    before: str = "",
    pause: float = 0.0,
    processes: int = 1,
    restarts: int = 0,
) -> subprocess.Popen[str]:
    """Begin a training through the command line's own error handling; `before` is code that goes first."""
    code = f"""
import os, signal, time, torch, tcore, tcore.cli.main
from tcore.evaluation.sharing import leave
from tcore.training import loop
torch.set_num_threads(1)
config = tcore.recipe("quickstart", {TINY | settings!r})
frames = {str(frames) if frames else None!r}
step = loop.Trainer.step
loop.Trainer.step = lambda *a: (time.sleep({pause}), step(*a))[1]
{before}
def verb(argv):
    try:
        tcore.train(config, {str(run)!r}, frames)
    except SystemExit:
        leave()
        raise
    leave()
tcore.cli.main.VERBS["train"] = verb
tcore.cli.main.main(["train"])
"""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python"]
    launch += ["--nproc-per-node", str(processes), "--max-restarts", str(restarts)]
    return subprocess.Popen(
        [*(launch if processes > 1 else []), sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str], seconds: float = 120) -> tuple[int, str]:
    """Exit code and what was said, once it is over; one that hangs is an error."""
    try:
        _, said = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, said


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 120) -> None:
    """Wait until something has happened in a process that is still there."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, f"it ended too early: {process.communicate()[1]}"
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


def steps_of(run: Path) -> list[int]:
    """Steps in the metrics, whole lines only."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return []
    return [
        json.loads(line)["step"] for line in path.read_text().splitlines(keepends=True) if line[-1] == "\n"
    ]


def make_store(root: Path, videos: int = 8, frames: int = 10) -> Path:
    """A folder of frame folders."""
    for video in range(videos):
        write_clip(root / f"video-{video}", frames, seed=video)
    return root


def children_of(pid: int) -> list[int]:
    """Processes that a process has started."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


class Kills(NamedTuple):
    """What came of killing a run again and again."""

    most_lost: int
    """Steps that were noted and had to be made again."""
    in_writing: int
    """Kills that hit a file being written."""
    kinds: dict[str, int]
    """How often what was killed."""
    seconds: float


KILLED_RUN: dict[str, Any] = {"checkpoint_every": 2, "runtime.workers": 2, "runtime.log_every": 4}


def kill_again_and_again(
    run: Path, store: Path, kills: int, steps: int, seed: int, processes: int = 1
) -> Kills:
    """Kill a training at random moments: all of it, or one of its processes; then let it come to its end."""
    rng, began = random.Random(seed), time.monotonic()
    settings = KILLED_RUN | {"optim.steps": steps, "keep_every": steps}
    kinds = ("one rank", "all ranks", "torchrun") if processes > 1 else ("the run",)
    most_lost, in_writing, done = 0, 0, dict.fromkeys(kinds, 0)
    for _ in range(kills):
        process = start(run, settings, frames=store, processes=processes)
        wait_for(partial(holds, run, process), process)
        # Some are killed before their first step, most in the middle of one or of a checkpoint.
        reached = rng.randint(0, 12) + (steps_of(run) or [0])[-1]
        wait_for(partial(is_at, run, reached), process)
        time.sleep(rng.uniform(0, 0.1))
        assert process.poll() is None, "it was over before it could be killed"
        kind = rng.choice(kinds)
        done[kind] += 1
        kill(process, kind, rng)
        before = steps_of(run)
        in_writing += bool(list(run.rglob("*.tmp")))
        notes: list[str] = []
        place = generations.newest_intact(run / "checkpoint.pt", notes.append)
        assert not any("damaged" in note for note in notes), notes
        saved = 0 if place is None else torch.load(place, weights_only=True)["step"]
        most_lost = max(most_lost, (before[-1] if before else 0) - saved)
        lived = time.monotonic() - began
        print(
            f"{sum(done.values())} kills in {lived:.0f} s, at step {saved}, {most_lost} lost at most",
            flush=True,
        )
    code, said = finish(start(run, settings, frames=store, processes=processes), 600)
    assert code == 0, said
    assert steps_of(run) == list(range(1, steps + 1))
    return Kills(most_lost, in_writing, done, time.monotonic() - began)


def kill(process: subprocess.Popen[str], kind: str, rng: random.Random) -> None:
    """Kill a run, or some of its processes, and see that nothing of it stays behind."""
    family = family_of(process)
    ranks = children_of(process.pid)
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
    """Of all processes of a job, one has spoken, and without a stack of ours."""
    lines = [line for line in said.splitlines() if line.startswith("tcore: error")]
    assert len(lines) == 1, said
    assert what in lines[0], said
    assert 'loop.py", line' not in said, said


def family_of(process: subprocess.Popen[str]) -> list[int]:
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


def is_at(run: Path, step: int) -> bool:
    """Whether a run has noted a step."""
    return (steps_of(run) or [0])[-1] >= step


def holds(run: Path, process: subprocess.Popen[str]) -> bool:
    """Whether a process, or one that it started, says that it holds a run."""
    path = run / LOCKS[1]
    text = path.read_text() if path.exists() else ""
    return text.endswith("\n") and json.loads(text)["pid"] in (process.pid, *children_of(process.pid))


def gone(processes: list[int]) -> None:
    """Wait for processes to be gone."""
    deadline = time.monotonic() + 10
    while any(map(is_alive, processes)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(is_alive, processes))


def during_step(monkeypatch: pytest.MonkeyPatch, number: int, act: Callable[[], None]) -> None:
    """Do something in the middle of a step of a real run."""
    step = Trainer.step

    def acting(self: Trainer, parts: Any, index: int, *rest: Any) -> Any:
        if index == number:
            act()
        return step(self, parts, index, *rest)

    monkeypatch.setattr(Trainer, "step", acting)


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "truncated":
        data = data[: len(data) // 2]
    elif how == "empty":
        data = bytearray()
    else:
        data[len(data) // 2] ^= 0x10
    path.write_bytes(data)
