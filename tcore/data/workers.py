"""Reading processes: they die with their parent, leave signals to it, and are missed when killed."""

import ctypes
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from tcore.errors import InputError

PR_SET_PDEATHSIG = 1
WORD = 1.0  # seconds within which PyTorch says that a reading process is gone
DEAD = re.compile(r"DataLoader worker \(pid\(?s?\)? ([\d, ]+)\)")  # what PyTorch says of it
KILLED = (
    "was killed, as the system does when memory runs out: use fewer --runtime.workers, or give the job more "
    "memory (of /dev/shm too); the same command goes on from the last checkpoint."
)


def start_worker(number: int) -> None:
    """What a reading process does first."""
    # A scheduler signals every process of a job; whether to leave is for the training process to decide.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if sys.platform == "linux":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_heed_parent, daemon=True).start()
    die_with_parent()


def _heed_parent() -> None:
    """End this process when SIGTERM comes from its parent, which waits for it; from others it is ignored."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)


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

    It comes up anywhere in the training process, not only where data is waited for: whatever was being done
    may have turned it into an error of its own.
    """
    try:
        yield
    except Exception as error:
        try:
            _explain(error)
        except RuntimeError as late:  # it comes up anywhere: here too
            _explain(late)
            raise
        raise


def _explain(error: Exception) -> None:
    """Raise the line for people where a reading process that was killed is behind an error."""
    cause: BaseException | None = error
    while cause is not None:
        if found := DEAD.search(str(cause)):
            raise LostWorkerError(f"reading process {found[1].strip()} {KILLED}") from error
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, ConnectionResetError | ConnectionRefusedError | EOFError):
        # It went while it handed over a batch, and nobody knew yet that it was gone. PyTorch says so a
        # moment later, wherever this process is then: it is to be here, not where the others are told.
        with suppress(RuntimeError):
            time.sleep(WORD)
        raise LostWorkerError(f"a reading process {KILLED}") from error


class LostWorkerError(InputError):
    """A reading process was killed from outside."""

    exit_code = 1
