"""Trainings in processes of their own, alone or several, that meet faults.

`python -m tests.training.jobs '[{"run": ...}]'` does a list of jobs, also under torchrun; or call `work`.
"""

import errno
import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import lru_cache, partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.nn.modules.module import register_module_forward_hook

import tcore.cli.main
import tcore.cli.train
from tcore import Scoring, device, train
from tcore.data import render, stores
from tcore.data.rendered import render_video
from tcore.evaluation.evaluate import leave
from tcore.training import distributed
from tcore.training.optim import Optimizer
from tests.tiny import shrunk, tiny

ROOT = Path(__file__).parents[2]

# What is the same on any number of processes: no stochastic depth, and neighbors among all videos.
SAME: dict[str, Any] = {
    "vit__drop_path": 0.0,
    "loss__koleo_global": True,
    "optim__batch": 8,
    "optim__steps": 3,
    "optim__base_lr": 2e-3,
    "rendered__videos": 9,
    "teacher__temperature_epochs": 0,
    "keep_every": 3,
    "checkpoint_every": 3,
}


class StoppedError(Exception):
    """Stands for whatever ends a run from outside."""


class Fault(NamedTuple):
    """Something that happens to one process before a step; before step -1 it has not met the others yet."""

    step: int
    act: str
    rank: int = 0
    attempt: int = 0


def place() -> tuple[int, int]:
    """Which process of a job this is, and for the how manieth time it was started."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


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


@contextmanager
def no_file_beyond(size: int) -> Iterator[None]:
    """Let no file grow beyond some bytes: the kernel refuses the write."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


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
    "limit": lambda undo: undo.enter_context(no_file_beyond(100)),  # metrics, events and checkpoints
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
    davis: str | None = None,
    quiet: bool = True,
    recipe: str | None = None,
    **changes: Any,
) -> None:
    """Train in a run folder and meet faults; on demand the first gradients are written beside it.

    With a dataset in DAVIS's layout the encoder is scored on it every second step.
    """
    config = tiny(**changes) if recipe is None else shrunk(recipe, **changes)
    ours = [fault for fault in (Fault(*fault) for fault in faults) if fault[2:] == place()]
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
        scoring = None
        if davis is not None:
            scoring = Scoring(2, davis, size=(32, 48), clips=1, cycle_frames=f"{davis}/JPEGImages/480p")
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
    path.with_name(f"{path.name}-{place()[0]}.json").write_text(
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


def work_together(processes: int, jobs: list[dict[str, Any]], *ways: str) -> None:
    """Do some jobs on several processes: forked from this one, or started by torchrun if a way is named."""
    if not ways and not torch.cuda.is_available():
        with tempfile.TemporaryDirectory() as folder:
            code, said = fork_together(processes, lambda: do(jobs, ()), Path(folder) / "log")
    else:
        words = command(jobs, *(ways or ["together"]), processes=processes)
        done = subprocess.run(words, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=600)
        code, said = done.returncode, done.stderr
    assert code == 0, said


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


def do(jobs: list[dict[str, Any]], ways: Sequence[str]) -> None:
    """Do the jobs of this attempt; one to be noted writes how it ended, the others end as a command does."""
    torch.set_num_threads(1)
    vars(stores)["render_video"] = lru_cache(64)(render_video)  # jobs train on the same videos
    for way in ways:
        WAYS[way]()
    for job in jobs:
        run, note = Path(job.pop("run")), job.pop("note", False)
        if job.pop("attempt", place()[1]) != place()[1]:
            continue
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


def do_forked(place: dict[str, str], work: Callable[[], None], log: Path) -> None:
    """What one of several processes does that were forked from a test."""
    os.environ.update(place)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        setattr(sys, name, os.fdopen(number, "w", buffering=1))
    warnings.resetwarnings()
    work()


def fork_together(processes: int, work: Callable[[], None], log: Path, restarts: int = 0) -> tuple[int, str]:
    """As torchrun does work on several processes, without the seconds in which each of them imports torch.

    One that fails ends the others, and all are started again; the store outlives them.
    """
    fork, store = multiprocessing.get_context("fork"), TCPStore("127.0.0.1", 0, is_master=True)
    address = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    ranks: list[Any] = []
    for attempt in range(restarts + 1):
        shared = address | dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(processes))
        shared["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
        places = [shared | dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)) for rank in range(processes)]
        ranks = [fork.Process(target=do_forked, args=(place, work, log)) for place in places]
        for rank in ranks:
            rank.start()
        # Asked once: a process that ends between two questions would leave nothing to wait for.
        while (alive := [rank for rank in ranks if rank.is_alive()]) and not any(r.exitcode for r in ranks):
            wait([rank.sentinel for rank in alive], timeout=600)
        for rank in ranks:
            rank.terminate()
            rank.join(30)
            rank.kill()
            rank.join()
        if not any(rank.exitcode for rank in ranks):
            break
    return int(any(rank.exitcode for rank in ranks)), log.read_text()


if __name__ == "__main__":
    do(json.loads(sys.argv[1]), sys.argv[2:])
