"""A tiny training in a process of its own, to be stopped, killed and starved."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.data.clips import write_clip
from tests.tiny import TINY

ROOT = Path(__file__).parent.parent.parent


def start(
    run: Path, settings: dict[str, Any], *, frames: Path | None = None, before: str = "", pause: float = 0.0
) -> subprocess.Popen[str]:
    """Begin a training through the command line's own error handling; `before` is code that goes first."""
    code = f"""
import time, torch, tcore, tcore.cli
from tcore.training import loop
torch.set_num_threads(1)
config = tcore.recipe("quickstart", {TINY | settings!r})
frames = {str(frames) if frames else None!r}
step = loop.Trainer.step
loop.Trainer.step = lambda *a: (time.sleep({pause}), step(*a))[1]
{before}
tcore.cli.VERBS["train"] = lambda argv: tcore.train(config, {str(run)!r}, frames)
tcore.cli.main(["train"])
"""
    return subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen[str], seconds: float = 120) -> tuple[int, str]:
    """Exit code and what was said, once it is over; one that hangs is an error."""
    try:
        _, said = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, said


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 60) -> None:
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
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid: int) -> bool:
    """Whether a process is there, and not only its entry."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False
