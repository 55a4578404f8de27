"""Work for several processes: runs that stop and go on, and gradients of a first step.

`torchrun --nproc-per-node 2 -m tests.training.jobs '[...]'` does a list of jobs; a test may do one itself.
"""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from tcore import Watch, device, train
from tcore.data import render
from tcore.evaluation.sharing import leave
from tcore.training import distributed
from tcore.training.optim import Optimizer
from tcore.training.step import Trainer
from tests.tiny import tiny

ROOT = Path(__file__).parents[2]

# What is the same on any number of processes: no stochastic depth, and neighbors among all videos.
SAME: dict[str, Any] = {
    "vit__drop_path": 0.0,
    "loss__koleo_global": True,
    "optim__batch": 8,
    "optim__steps": 10,
    "optim__base_lr": 2e-3,
    "rendered__videos": 9,
    "teacher__temperature_epochs": 0,
    "keep_every": 5,
}


class StoppedError(Exception):
    """Stands for whatever ends a run from outside."""


def work(
    run: Path,
    stop: int | None = None,
    gradients: bool = False,
    watch: int | None = None,
    **changes: Any,
) -> None:
    """Train in a run folder, up to some step; on demand the first gradients are written beside it."""
    step, clip = Trainer.step, Optimizer.clip
    written: list[bool] = []

    def interrupted(self: Trainer, parts: Any, index: int, *rest: Any) -> Any:
        if index == stop:
            raise StoppedError
        return step(self, parts, index, *rest)

    def noted(self: Optimizer) -> Any:
        if gradients and not written:
            written.append(True)
            write_gradients(self, run.with_suffix(".pt"))
        return clip(self)

    try:
        Trainer.step = interrupted  # type: ignore[assignment, method-assign]
        Optimizer.clip = noted  # type: ignore[method-assign]
        eyes = None if watch is None else Watch(watch, clips=1)
        train(tiny(**SAME | changes), run, quiet=True, watch=eyes)
    except StoppedError:
        pass
    finally:
        Trainer.step, Optimizer.clip = step, clip  # type: ignore[method-assign]


def write_gradients(optimizer: Optimizer, path: Path) -> None:
    found = {
        f"{part} {index}": distributed.plain(parameter.grad)
        for part, parameters in optimizer.parameters.items()
        for index, parameter in enumerate(parameters)
        if parameter.grad is not None
    }
    distributed.on_first(lambda: torch.save(found, path))


def torchrun(processes: int, *command: str, timeout: float = 600) -> "subprocess.CompletedProcess[str]":
    """Run a module on several processes of this machine."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    return subprocess.run(
        [*launch, str(processes), "-m", *command],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def work_together(processes: int, jobs: list[dict[str, Any]], *ways: str) -> None:
    """Do some jobs on several processes, one after the other."""
    done = torchrun(processes, "tests.training.jobs", json.dumps(jobs), *ways)
    assert done.returncode == 0, done.stderr


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


WAYS = {
    "exchanging": exchange_though_alone,
    "sharing a GPU": share_a_gpu,
    "exact pixels": render_exactly,
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for way in sys.argv[2:]:
        WAYS[way]()
    for job in json.loads(sys.argv[1]):
        work(Path(job.pop("run")), **job)
    leave()
