"""How the processes of a job find one another; a process that does not arrive is named."""

import secrets
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from tcore.errors import InputError, PeerError, first_line

PAUSE = 0.02  # seconds between two looks at the store


class LostPeerError(InputError):
    """Another process of the job hangs or is gone."""

    exit_code = 1


def meet(rank: int, size: int, patience: float) -> Any:
    """A store that all processes of this attempt share, once every one of them has arrived.

    torchrun keeps one store while it restarts processes, so keys of an earlier attempt are still there, such
    as addresses of processes that are gone; and its restart count differs between machines. So the first
    process names this attempt, and sends the name to each of the others in answer to a word that they have
    just made up.
    """
    try:
        store, _, _ = next(iter(rendezvous("env://", rank, size, timeout=timedelta(seconds=patience))))
        name = _invite(store, size, patience) if rank == 0 else _follow(store, rank, size, patience)
    except RuntimeError as error:
        raise LostPeerError(
            f"process {rank} of {size} cannot reach the others ({first_line(error)})."
        ) from error
    return PrefixStore(name, store)


def _invite(store: Any, size: int, patience: float) -> str:
    """The first process: answer all the others until each has confirmed the name."""
    name, missing = secrets.token_hex(8), list(range(1, size))

    def all_confirmed() -> bool:
        for rank in missing.copy():
            if _read(store, f"confirmed/{rank}") == name:
                missing.remove(rank)
            elif word := _read(store, f"word/{rank}"):
                store.set(f"answer/{rank}", f"{word} {name}")
        return not missing

    if not _wait(all_confirmed, patience):
        raise _absent(missing, size, patience)
    store.set(f"all/{name}", "here")
    return name


def _follow(store: Any, rank: int, size: int, patience: float) -> str:
    """Another process: ask the first one for the name, and wait for all the others."""
    word = secrets.token_hex(8)
    store.set(f"word/{rank}", word)
    if not _wait(lambda: _read(store, f"answer/{rank}").startswith(word), patience):
        raise _absent([0], size, patience)
    name = _read(store, f"answer/{rank}").split()[1]
    store.set(f"confirmed/{rank}", name)
    if not _wait(lambda: store.check([f"all/{name}"]), patience):
        raise PeerError("the first process says who is missing", LostPeerError.exit_code)
    return name


def _read(store: Any, key: str) -> str:
    """The value of a key, or nothing."""
    return store.get(key).decode() if store.check([key]) else ""


def _wait(holds: Callable[[], bool], patience: float) -> bool:
    """Whether something comes true in time."""
    deadline = time.monotonic() + patience
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(PAUSE)
    return True


def _absent(missing: list[int], size: int, patience: float) -> LostPeerError:
    who = ", ".join(map(str, missing))
    return LostPeerError(f"process {who} of {size} did not arrive within {patience:g} s (runtime.patience).")
