"""Reading processes: they die with their parent, leave signals to it, and are missed when killed."""

import ctypes
import multiprocessing
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tcore.errors import InputError

PR_SET_PDEATHSIG = 1


def start_worker(number: int) -> None:
    """What a reading process does first."""
    # A scheduler signals every process of a job; whether to leave is for the training process to decide.
    for ignored in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(ignored, signal.SIG_IGN)
    die_with_parent()


def die_with_parent() -> None:
    """Ask the kernel (Linux) to kill this process when its parent is gone, however it went."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():  # it went before the kernel knew
        os._exit(1)


@contextmanager
def missing_killed_workers() -> Iterator[None]:
    """Turn PyTorch's word on a reading process that was killed into one line for people.

    It can come up anywhere in the training process, not only where data is waited for.
    """
    try:
        yield
    except RuntimeError as error:
        found = re.search(r"DataLoader worker \(pid\(?s?\)? ([\d, ]+)\)(.*)", str(error))
        if found is None:
            raise
        how = " by SIGKILL, as the system does when memory runs out" if "Killed" in found[2] else ""
        raise LostWorkerError(
            f"reading process {found[1].strip()} was killed{how}: use fewer --runtime.workers, or give the "
            "job more memory (of /dev/shm too); the same command goes on from the last checkpoint."
        ) from error


class LostWorkerError(InputError):
    """A reading process was killed from outside."""

    exit_code = 1
