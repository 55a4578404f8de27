"""The machine that a command runs on: its device, its processes under torchrun, cores, memory and signals."""

import os
import re
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tcore.errors import InputError


class World(NamedTuple):
    """Which process this is, and of how many."""

    rank: int = 0
    size: int = 1
    here: int = 1
    """Processes on this machine."""
    place: int = 0
    """Which of them this is."""

    @property
    def first(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0


ALONE = World()


def world() -> World:
    """Which of the processes of torchrun this is; without torchrun there is one."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_RANK")
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return ALONE
    return World(*(int(os.environ[name]) for name in names))


def choose_device(name: str = "auto", setting: str = "runtime.device=") -> torch.device:
    """A device by its name; auto is CUDA where there is one. Under torchrun each process has its own GPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        not_here = " (training does not run on mps)" if name == "mps" else ""
        raise InputError(f"{setting}{name}: use auto, cpu, cuda or cuda:1{not_here}.")
    device = torch.device(name)
    if device.type == "cpu":
        return device
    found = torch.cuda.device_count()
    if not torch.cuda.is_available():
        raise InputError(f"{setting}{name}: no CUDA device here; use auto or cpu.")
    if world().size > 1:
        return _own_gpu(device, found)
    if (device.index or 0) >= found:
        raise InputError(f"{setting}{name}: there are {found} CUDA devices here.")
    return device


def encoder_device(name: str = "auto") -> torch.device:
    """The device of a command that trains nothing; Apple's GPU (mps) is taken where it is named."""
    if name != "mps":
        return choose_device(name, "--device ")
    if not torch.backends.mps.is_available():
        raise InputError("--device mps: torch finds no Apple GPU here; use auto or cpu.")
    return torch.device(name)


def _own_gpu(device: torch.device, found: int) -> torch.device:
    """The GPU of this process among those of its machine."""
    here = world().here
    if device.index is not None:
        raise InputError(f"runtime.device={device} under torchrun: each process takes its own; use cuda.")
    if here > found:
        raise InputError(
            f"{here} processes for {found} CUDA devices here: use torchrun --nproc-per-node {found}."
        )
    own = torch.device("cuda", world().place)
    torch.cuda.set_device(own)
    return own


def send(x: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device; to a GPU from pinned memory: any other copy waits for all work before it."""
    pinned = device.type == "cuda" and not x.is_cuda
    return x.pin_memory().to(device, non_blocking=True) if pinned else x.to(device)


def choose_dtype(precision: str, device: torch.device) -> torch.dtype:
    """Arithmetic of the networks: auto is bf16 on CUDA and fp32 elsewhere."""
    if precision == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if precision == "bf16" else torch.float32


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def on_signals(names: Iterable[str], handler: Any) -> Iterator[None]:
    """Handle signals, where there are such, until the block ends; only the main thread of a program can."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
        before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            # None: the handler was not installed from Python, and cannot be from here.
            signal.signal(number, signal.SIG_DFL if old is None else old)


def peak_memory_gib(device: torch.device) -> float:
    """Largest memory use so far: of the GPU, or of this process (0 where the system does not say)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    try:
        import resource
    except ImportError:
        return 0.0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
