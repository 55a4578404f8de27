"""How the processes of a job find one another; one that does not come is named."""

import secrets
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from tcore.errors import EchoError
from tcore.training.guard import LostPeerError

PAUSE = 0.02  # seconds between two looks


def meet(rank: int, size: int, patience: float) -> Any:
    """A store that all processes of this attempt share, once every one of them has come.

    torchrun keeps one store while it starts the processes again and again: what an earlier attempt wrote is
    still there, addresses of processes that are gone among it. So the first process makes up a name for this
    attempt, and hands it to each of the others in answer to a word that they have just made up.
    """
    try:
        store, _, _ = next(iter(rendezvous("env://", rank, size, timeout=timedelta(seconds=patience))))
        name = _invite(store, size, patience) if rank == 0 else _follow(store, rank, size, patience)
    except RuntimeError as error:
        reason = str(error).split("\n")[0]
        raise LostPeerError(f"process {rank} of {size} does not get to the others ({reason}).") from error
    return PrefixStore(name, store)


def _invite(store: Any, size: int, patience: float) -> str:
    """The first process: answer all the others until they have understood."""
    name = secrets.token_hex(8)
    missing = list(range(1, size))

    def answered() -> bool:
        for rank in missing.copy():
            if _read(store, f"understood/{rank}") == name:
                missing.remove(rank)
            elif word := _read(store, f"word/{rank}"):
                store.set(f"answer/{rank}", f"{word} {name}")
        return not missing

    if not _wait(answered, patience):
        raise LostPeerError(_absent(missing, size, patience))
    store.set(f"all/{name}", "here")
    return name


def _follow(store: Any, rank: int, size: int, patience: float) -> str:
    """Another process: ask the first one for the name, and wait for all the others."""
    word = secrets.token_hex(8)
    store.set(f"word/{rank}", word)
    if not _wait(lambda: _read(store, f"answer/{rank}").startswith(word), patience):
        raise LostPeerError(_absent([0], size, patience))
    name = _read(store, f"answer/{rank}").split()[1]
    store.set(f"understood/{rank}", name)
    if not _wait(lambda: store.check([f"all/{name}"]), patience):
        raise EchoError("the first process says who is missing", LostPeerError.exit_code)
    return name


def _read(store: Any, key: str) -> str:
    """What is written in a store; nothing where nothing is."""
    return store.get(key).decode() if store.check([key]) else ""


def _wait(holds: Callable[[], bool], patience: float) -> bool:
    """Whether something comes true in time."""
    deadline = time.monotonic() + patience
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(PAUSE)
    return True


def _absent(missing: list[int], size: int, patience: float) -> str:
    who = ", ".join(map(str, missing))
    return f"process {who} of {size} has not come within {patience:g} s (runtime.patience)."
