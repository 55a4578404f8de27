"""A lock that keeps two jobs from writing one run folder."""

import errno
import fcntl
import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tcore.errors import InputError
from tcore.training.guard import is_alive

LOCK = "lock.json"
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # of some network file systems


@contextmanager
def lock_run(run: Path) -> Iterator[None]:
    """Hold a run folder for this process; another job that wants it is told who does.

    The lock is the kernel's: it goes when the process does, however it ends, so the file that stays behind
    locks nothing. Of the processes of one job, the first one holds it.
    """
    if int(os.environ.get("RANK", "0")) > 0:
        yield
        return
    run.mkdir(parents=True, exist_ok=True)
    with (run / LOCK).open("a+", encoding="utf-8") as file:
        file.seek(0)
        holder = _read(file.read())
        try:
            # Not flock: reading processes would inherit it, and hold it a moment longer than their parent.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise InputError(_refusal(run, holder)) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            if _at_work(holder):
                raise InputError(_refusal(run, holder)) from error
        file.truncate(0)
        file.write(json.dumps({"pid": os.getpid(), "host": platform.node()}) + "\n")
        file.flush()
        try:
            yield
        finally:
            with suppress(OSError):  # what ended the run matters more
                file.truncate(0)


def _read(text: str) -> dict[str, Any]:
    """Who holds the lock, or held it last; nobody where the file is empty or says something else."""
    with suppress(ValueError, RecursionError):
        holder = json.loads(text)
        if isinstance(holder, dict) and isinstance(holder.get("pid"), int) and holder["pid"] > 0:
            return holder
    return {}


def _at_work(holder: dict[str, Any]) -> bool:
    """Without locks of the kernel: whether the holder may still be there."""
    if not holder or holder.get("host") != platform.node():
        return bool(holder)
    return holder["pid"] != os.getpid() and is_alive(holder["pid"])


def _refusal(run: Path, holder: dict[str, Any]) -> str:
    who = f"process {holder['pid']} on {holder.get('host')}" if holder else "another process"
    return f"run {run} is being trained by {who}: wait for it or stop it, or give another --run."
