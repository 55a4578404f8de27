"""Raw batches from reading processes, and their pixels on the training device.

Reading processes die with their parent, leave signals to it, and are reported when they are killed.
"""

import copy
import ctypes
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import warnings
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tcore.data.render import PLAIN, Kernels, normalize, render_pixels
from tcore.data.source import RawBatch, Source, pad
from tcore.data.stores import RenderedStore, can_hold, hold_frames
from tcore.data.views import ViewPlan
from tcore.device import num_cores
from tcore.errors import InputError


def render_batch(raw: RawBatch, device: torch.device, kernels: Kernels = PLAIN) -> Any:
    """The method's batch, with the pixels of every view made on the training device."""
    sides = raw.sampling.sides
    frames = pad(raw.pixels.to(device, non_blocking=True), raw.sizes)
    crops: dict[str, Tensor] = {}
    for side in dict.fromkeys(sides.values()):
        # All crops of one size at once: launching one kind after another takes longer than a GPU's work.
        plans = {name: raw.plans[name] for name in sides if sides[name] == side}
        together = ViewPlan.concatenate(list(plans.values()))
        made = normalize(render_pixels(frames, together, side, kernels, raw.sampling.filter))
        crops |= dict(zip(plans, made.split([len(plan) for plan in plans.values()]), strict=True))
    return raw.sampling.batch(crops, raw)


class Carrier(Dataset[RawBatch | InputError]):
    """Returns bad input from a reading process as a value; raised there, it would become a traceback."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def __getitem__(self, index: int) -> RawBatch | InputError:
        try:
            return self.source[index]
        except InputError as error:
            return error


def num_workers(source: Source) -> int:
    """Reading processes of a source."""
    if source.config.runtime.workers is not None:
        return source.config.runtime.workers
    return 0 if isinstance(source.store, RenderedStore) else max(1, min(16, num_cores() // source.share.here))


def holds_frames(source: Source) -> bool:
    """Whether frames are decoded once and kept; refused where every reading process would copy them."""
    gib = source.config.runtime.hold_gib
    if not gib or not can_hold(source.store):
        return False
    if sys.platform != "linux" and num_workers(source):
        raise InputError(
            f"runtime.hold_gib={gib:g}: reading processes share frames on Linux alone; add "
            "--runtime.workers 0, or leave it out."
        )
    return True


def with_frames_held(source: Source) -> Source:
    """The source with frames decoded and in memory, where that is wanted."""
    if not holds_frames(source):
        return source
    held, threads = copy.copy(source), max(1, num_cores() // source.share.here)
    held.store = hold_frames(source.store, source.config.runtime.hold_gib, threads)
    return held


def load(
    source: Source, first_step: int, num_steps: int, device: torch.device
) -> Generator[RawBatch, None, None]:
    """Parts of steps `first_step` to `num_steps` - 1, in order, read ahead by worker processes."""
    source, accumulate = with_frames_held(source), source.config.optim.accumulate
    indices = range(first_step * accumulate, num_steps * accumulate)
    workers = num_workers(source)
    with warnings.catch_warnings():
        # The user set more processes than there are cores: PyTorch would warn about it twice.
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        loader = DataLoader(
            Carrier(source),
            batch_size=None,
            sampler=indices,
            num_workers=workers,
            pin_memory=device.type == "cuda",
            prefetch_factor=2 if workers else None,
            worker_init_fn=start_worker,
            # Children of this process, which end with it; Python 3.14 would fork them from another one.
            multiprocessing_context="fork" if workers and sys.platform == "linux" else None,
        )
        items = iter(loader)
    for item in items:
        if isinstance(item, InputError):
            raise item
        yield item


# The reading processes.


PR_SET_PDEATHSIG = 1
NOTICE_S = 1.0  # seconds within which PyTorch reports a dead reading process
DEAD = re.compile(r"DataLoader worker \(pid\(?s?\)? ([\d, ]+)\)")  # in PyTorch's report
KILLED = (
    "was killed, as the system does when memory runs out: use fewer --runtime.workers, or give the job more "
    "memory (of /dev/shm too); rerun the same command to resume from the last checkpoint."
)


class LostWorkerError(InputError):
    """A reading process was killed from outside."""

    exit_code = 1


def start_worker(number: int) -> None:
    """What a reading process does first."""
    # A scheduler and Ctrl-C signal every process of a job; the training process decides whether to stop.
    for one in signal.Signals:
        if one.name in ("SIGUSR1", "SIGINT"):
            signal.signal(one, signal.SIG_IGN)
    if sys.platform == "linux":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_obey_parent, daemon=True).start()
    die_with_parent()


def _obey_parent() -> None:
    """End this process on a SIGTERM from its parent, which waits for it; ignore those from others."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)


def die_with_parent() -> None:
    """End this process when the one that asked for it ends, however that happens (Linux)."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    parent = multiprocessing.parent_process()
    # The kernel watches the process that forked this one: a fork server lives as long as its children do,
    # and a parent may have ended before the kernel knew.
    if parent is not None and parent.pid != os.getppid():
        threading.Thread(target=_end_after, args=(parent,), daemon=True).start()


def _end_after(parent: Any) -> None:
    parent.join()
    os._exit(1)


@contextmanager
def missing_killed_workers() -> Iterator[None]:
    """Turn PyTorch's report of a killed reading process into a one-line error.

    PyTorch raises it anywhere in the training process, not only where data is read; other errors may hide it.
    """
    try:
        yield
    except Exception as error:
        try:
            _explain(error)
        except RuntimeError as late:  # it can be raised here, too
            _explain(late)
            raise
        raise


def _explain(error: Exception) -> None:
    """Raise the one-line error if a killed reading process is the cause of this one."""
    cause: BaseException | None = error
    while cause is not None:
        if found := DEAD.search(str(cause)):
            raise LostWorkerError(f"reading process {found[1].strip()} {KILLED}") from error
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, ConnectionResetError | ConnectionRefusedError | EOFError):
        # The process died while it handed over a batch. PyTorch reports that a moment later, wherever this
        # process then is: wait for it here.
        with suppress(RuntimeError):
            time.sleep(NOTICE_S)
        raise LostWorkerError(f"a reading process {KILLED}") from error
