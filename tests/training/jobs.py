"""Trainings in processes of their own, alone or several, that meet faults.

`python -m tests.training.jobs '[{"run": ...}]'` does a list of jobs, also under torchrun; or call `work`.
"""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

import tcore.cli.main
import tcore.cli.train
from tcore import Scoring, device, train
from tcore.data import render
from tcore.evaluation.evaluate import leave
from tcore.training import distributed
from tcore.training.optim import Optimizer
from tests.tiny import shrunk, tiny

ROOT = Path(__file__).parents[2]
RANK, ATTEMPT = (int(os.environ.get(name, "0")) for name in ("RANK", "TORCHELASTIC_RESTART_COUNT"))

# What is the same on any number of processes: no stochastic depth, and neighbors among all videos.
SAME: dict[str, Any] = {
    "vit__drop_path": 0.0,
    "loss__koleo_global": True,
    "optim__batch": 8,
    "optim__steps": 4,
    "optim__base_lr": 2e-3,
    "rendered__videos": 9,
    "teacher__temperature_epochs": 0,
    "keep_every": 2,
}


class StoppedError(Exception):
    """Stands for whatever ends a run from outside."""


class Fault(NamedTuple):
    """Something that happens to one process before a step; before step -1 it has not met the others yet."""

    step: int
    act: str
    rank: int = 0
    attempt: int = 0


def stop(undo: ExitStack) -> None:
    raise StoppedError


def hang(undo: ExitStack) -> None:
    time.sleep(600)


def send(number: signal.Signals, undo: ExitStack) -> None:
    os.kill(os.getpid(), number)


def starve(undo: ExitStack) -> None:
    """Kill a reading process."""
    os.kill(children_of(os.getpid())[0], signal.SIGKILL)


def spoil_numbers(undo: ExitStack) -> None:
    """Let the network return NaN."""

    def spoil(module: nn.Module, inputs: Any, output: Any) -> Any:
        return output * float("nan") if isinstance(module, nn.LayerNorm) else None

    undo.callback(register_module_forward_hook(spoil).remove)


def refuse_writes(number: int, undo: ExitStack) -> None:
    """Let the disk refuse whatever is written, at the system call."""
    undo.enter_context(patch("os.fsync", side_effect=OSError(number, os.strerror(number))))


def fill_disk(undo: ExitStack) -> None:
    """Write to the disk of the working folder until it is full."""
    try:
        with Path("filling").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(65536))
    except OSError:
        pass


ACTS: dict[str, Callable[[ExitStack], None]] = {
    "stop": stop,
    "hang": hang,
    "kill": partial(send, signal.SIGKILL),
    "term": partial(send, signal.SIGTERM),
    "starve": starve,
    "nan": spoil_numbers,
    "full": partial(refuse_writes, errno.ENOSPC),
    "fill": fill_disk,
}


def stopping_at(stop: int | None) -> Callable[[int], None]:
    """Ends a run before the step of this number (the first one is 0)."""

    def hook(step: int) -> None:
        if step == stop:
            raise StoppedError

    return hook


def work(
    run: Path,
    frames: str | None = None,
    *,
    faults: Sequence[Sequence[Any]] = (),
    pause: float = 0.0,
    gradients: bool = False,
    watch: int | None = None,
    quiet: bool = True,
    recipe: str | None = None,
    **changes: Any,
) -> None:
    """Train in a run folder and meet faults; on demand the first gradients are written beside it."""
    config = tiny(**changes) if recipe is None else shrunk(recipe, **changes)
    ours = [fault for fault in (Fault(*fault) for fault in faults) if fault[2:] == (RANK, ATTEMPT)]
    due = {fault.step: ACTS[fault.act] for fault in ours}
    clip = Optimizer.clip

    written: list[Path] = []

    def noted(self: Optimizer) -> Any:
        if not written:  # not by whether the file exists: the first process may have written it already
            written.append(run.with_suffix(".pt"))
            write_gradients(self, written[0])
        return clip(self)

    with ExitStack() as undo:

        def on_step(step: int) -> None:
            time.sleep(pause)
            if step in due:
                due[step](undo)

        if gradients:
            undo.enter_context(patch.object(Optimizer, "clip", noted))
        if -1 in due:
            due[-1](undo)
        scoring = None if watch is None else Scoring(watch, clips=1)
        with suppress(StoppedError):
            train(config, run, frames, quiet=quiet, scoring=scoring, on_step=on_step)


def write_gradients(optimizer: Optimizer, path: Path) -> None:
    found = {
        f"{part} {index}": distributed.plain(parameter.grad)
        for part, parameters in optimizer.parameters.items()
        for index, parameter in enumerate(parameters)
        if parameter.grad is not None
    }
    distributed.on_first(lambda: torch.save(found, path))


def note_end(job: Callable[[], None], path: Path) -> None:
    """Do a job, and write down how it ended in this process."""
    kind, text, code = "", "", 0
    try:
        job()
    except (Exception, SystemExit) as error:
        kind, text = type(error).__name__, str(error)
        code = getattr(error, "exit_code", getattr(error, "code", 2))
    path.with_name(f"{path.name}-{RANK}.json").write_text(
        json.dumps({"kind": kind, "text": text, "code": code})
    )


def command(jobs: list[dict[str, Any]], *ways: str, processes: int = 1, restarts: int = 0) -> list[str]:
    """The command that does some jobs one after the other, on so many processes."""
    launch = [sys.executable]
    if processes > 1 or ways:
        launch += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        launch += ["--max-restarts", str(restarts)]
    return [*launch, "-m", "tests.training.jobs", json.dumps(jobs), *ways]


def children_of(pid: int) -> list[int]:
    """Processes that a process has started."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def work_together(processes: int, jobs: list[dict[str, Any]], *ways: str) -> str:
    """Do some jobs on several processes; what they printed."""
    done = subprocess.run(
        command(jobs, *(ways or ["together"]), processes=processes),
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def exchange_though_alone() -> None:
    """Let a single process go through every collective, of which it gets back what it gave."""
    distributed.alone = lambda: False


def share_a_gpu() -> None:
    """Let several processes use one GPU, which NCCL refuses and gloo does not."""
    distributed.GPU_BACKEND = "cpu:gloo,cuda:gloo"
    device._own_gpu = lambda device, found: torch.device("cuda", 0)


def render_exactly() -> None:
    """Pixels without TensorFloat-32, whose last bits depend on how many views are made at once."""
    render.products_of_pixels = nullcontext  # type: ignore[assignment]


WAYS: dict[str, Callable[[], None]] = {
    "together": lambda: None,
    "exchanging": exchange_though_alone,
    "sharing a GPU": share_a_gpu,
    "exact pixels": render_exactly,
}


def main() -> None:
    """Do the jobs; one that is to be noted writes how it ended, the others end as a command does."""
    torch.set_num_threads(1)
    for way in sys.argv[2:]:
        WAYS[way]()
    for job in json.loads(sys.argv[1]):
        run, note = Path(job.pop("run")), job.pop("note", False)
        if note:
            note_end(partial(work, run, **job), run)
            continue

        def verb(argv: list[str], run: Path = run, job: dict[str, Any] = job) -> None:
            try:
                work(run, **job)
            except SystemExit:
                leave()
                raise

        tcore.cli.train.train = verb
        tcore.cli.main.main(["train"])
    leave()


if __name__ == "__main__":
    main()
