"""Faults that meet one process of several, one after the other in one launch; each process notes its end.

`torchrun --nproc-per-node 2 -m tests.training.rank_jobs ROOT` does them all; the last one ends the processes.
"""

import errno
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tcore.cli.main
from tcore import Config, train
from tcore.training import loop
from tcore.training.checkpoint import save_checkpoint
from tcore.training.step import Trainer
from tests.tiny import tiny
from tests.training.faults import children_of, make_store

RANK = int(os.environ.get("RANK", "0"))
CHAIN: dict[str, Any] = {"optim.steps": 12, "keep_every": 12, "runtime.workers": 1}

Act = Callable[[Trainer], None]


def note(root: Path, job: str, work: Callable[[], object]) -> None:
    """Do something, and write down how it ended in this process."""
    kind, text, code = "", "", 0
    try:
        work()
    except (Exception, SystemExit) as error:
        kind, text = type(error).__name__, str(error)
        code = getattr(error, "exit_code", getattr(error, "code", 2))
    (root / f"{job}-{RANK}.json").write_text(json.dumps({"kind": kind, "text": text, "code": code}))


def train_with(config: Config, run: Path, store: Path, rank: int, step: int, act: Act) -> None:
    """Train, and do something in one process at the begin of a step."""
    usual = Trainer.step

    def acting(self: Trainer, parts: Any, index: int, *rest: Any) -> Any:
        if (RANK, index) == (rank, step):
            act(self)
        return usual(self, parts, index, *rest)

    Trainer.step = acting  # type: ignore[assignment, method-assign]
    try:
        train(config, run, store)
    finally:
        Trainer.step = usual  # type: ignore[method-assign]


def spoil_gradient(trainer: Trainer) -> None:
    next(trainer.model.student.backbone.parameters()).register_hook(lambda gradient: gradient * float("nan"))


def fill_disk(trainer: Trainer) -> None:
    def refuse(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def save_on_a_full_disk(*arguments: Any) -> None:
        sync, os.fsync = os.fsync, refuse  # type: ignore[assignment]
        try:
            save_checkpoint(*arguments)
        finally:
            os.fsync = sync
            loop.save_checkpoint = save_checkpoint  # type: ignore[attr-defined]

    loop.save_checkpoint = save_on_a_full_disk  # type: ignore[attr-defined, assignment]


def ask_to_leave(trainer: Trainer) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def starve(trainer: Trainer) -> None:
    os.kill(children_of(os.getpid())[0], signal.SIGKILL)


def work(root: Path) -> None:
    """All faults."""
    stores = [root / name for name in ("store", "spoilt")]
    if RANK == 0:
        for store in stores:
            make_store(store)
        for path in (stores[1] / "video-3").iterdir():
            path.write_bytes(path.read_bytes()[:100])
        (root / "ready").touch()
    while not (root / "ready").exists():
        time.sleep(0.05)
    good, spoilt = stores
    config = tiny(runtime__workers=0, optim__steps=8, keep_every=8)
    faults: dict[str, tuple[int, int, Act]] = {
        "nan": (1, 3, spoil_gradient),
        "full": (0, 3, fill_disk),
        "asked": (1, 3, ask_to_leave),
    }
    chain = tiny(**{name.replace(".", "__"): value for name, value in CHAIN.items()})
    note(root, "chain", lambda: train(chain, root / "never", good))
    for job, (rank, step, act) in faults.items():
        run = root / job
        note(root, job, lambda run=run, fault=(rank, step, act): train_with(config, run, good, *fault))  # type: ignore[misc]
        note(root, f"{job}-again", lambda run=run: train(config, run, good, quiet=True))  # type: ignore[misc]
    strict = tiny(runtime__workers=0, optim__steps=8, runtime__bad_samples=0.0)
    note(root, "spoilt", lambda: train(strict, root / "spoilt-run", spoilt))
    reading = tiny(runtime__workers=1, optim__steps=500)
    tcore.cli.main.VERBS["train"] = lambda argv: train_with(reading, root / "starved", good, 1, 3, starve)
    tcore.cli.main.main(["train"])


if __name__ == "__main__":
    torch.set_num_threads(1)
    work(Path(sys.argv[1]))
