"""Several processes look after one another: one that hangs, or is gone, is named in one line.

A thread in each process tells the others, through the store at which they met, how far this one has come, and
looks how far they are. It needs no collective and no GPU, so it sees the same whatever carries the tensors.
Processes pass the same points in the same order, and count them: whoever hangs, the others wait for it at a
later point. So the process that is furthest behind is the one to look at. It hangs when it has not stirred
for `runtime.patience` seconds; passing a point is stirring, and so is every piece of a checkpoint written.
What takes long and cannot stir comes before the second step (opening a store, reading a checkpoint,
compilation): until then the patience is `START` times longer.
"""

import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from tcore.errors import EchoError, InputError
from tcore.files import is_alive

START = 6  # times the patience, up to the second step
LOOKS = 20  # at the others within the patience ...
LONGEST, SHORTEST = 5.0, 0.1  # ... this many seconds apart
GRACE = 3.0  # seconds for a process to leave by itself
AT_WORK, LEFT, FAILED, CUT_OFF = "at work", "left", "failed", "cut off"
PACKAGE = Path(__file__).parents[1]

# What gloo, NCCL and the store say when the other side of a connection is gone.
BROKEN = re.compile(r"gloo|nccl|connection (was )?(closed|reset|refused)|broken pipe|socket", re.IGNORECASE)


class LostPeerError(InputError):
    """Another process of the job hangs or is gone."""

    exit_code = 1


@dataclass
class Progress:
    """How far this process has come: points passed, the same in every process, and other signs of work."""

    points: int = 0
    signs: int = 0
    step: int = 0
    begun: int = 0
    """Steps that were begun since the start of the process."""


progress = Progress()


def reached(step: int | None = None) -> None:
    """Pass a point that every process passes, such as the begin of a step."""
    progress.points += 1
    if step is not None:
        progress.step, progress.begun = step, progress.begun + 1


def stirred() -> None:
    """Give a sign of work that other processes need not have."""
    progress.signs += 1


@dataclass(frozen=True)
class Report:
    """What a process tells the others."""

    rank: int
    host: str
    pid: int
    state: str
    points: int
    signs: int
    step: int
    begun: int
    place: str
    beat: int

    def named(self, of: int) -> str:
        """Which process this is."""
        return f"process {self.rank} of {of} on {self.host} (pid {self.pid})"


class Since:
    """What was seen last, and how long ago it changed."""

    def __init__(self) -> None:
        self._values: dict[object, tuple[object, float]] = {}

    def note(self, key: object, value: object, now: float) -> float:
        """Seconds for which a value has been as it is."""
        before = self._values.get(key)
        if before is None or before[0] != value:
            self._values[key] = before = (value, now)
        return now - before[1]


def hanging(reports: list[Report], since: Since, now: float, patience: float) -> str | None:
    """A line that names the processes that hang, if any: those furthest behind, where none of them stirs."""
    still = {r.rank: since.note(r.rank, (r.points, r.signs, r.state), now) for r in reports}
    silent = {r.rank: since.note((r.rank, "beat"), r.beat, now) for r in reports}
    there = [r for r in reports if r.state == AT_WORK]
    behind = [r for r in there if r.points == min(r.points for r in there)]
    seconds = min((still[r.rank] for r in behind), default=0.0)
    if seconds <= patience * (START if any(r.begun < 2 for r in behind) else 1):
        return None
    # Who gives no sign of life is the one, if anybody is: the others wait for it.
    behind = [r for r in behind if silent[r.rank] > patience / 2] or behind
    places = [r.place for r in behind]
    behind.sort(key=lambda r: (places.count(r.place), r.rank))  # the odd one out first
    told = []
    for r in behind[:4]:
        alive = "" if silent[r.rank] <= patience / 2 else "gives no sign of life, "
        told.append(f"{r.named(len(reports))} {alive}last in step {r.step}, at {r.place}")
    more = f"; and {len(behind) - 4} more" if len(behind) > 4 else ""
    whom = "a process hangs" if len(behind) == 1 else f"{len(behind)} processes wait for one another"
    return (
        f"{whom}, nothing has moved for {seconds:.0f} s (runtime.patience={patience:g}): "
        f"{'; '.join(told)}{more}; "
        "the same command goes on from the last checkpoint (with more patience, if it is only slow)."
    )


class Guard:
    """Tells the other processes how far this one is, and ends it when one of them hangs."""

    def __init__(self, store: Any, name: str, rank: int, size: int, patience: float) -> None:
        self._store, self._name, self._rank, self._size = store, name, rank, size
        self._patience, self._state, self._beat = patience, AT_WORK, 0
        self._worker = threading.get_ident()  # the thread that trains
        self._over, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._look_after, name="guard", daemon=True)
        progress.points = progress.signs = progress.step = progress.begun = 0

    def begin(self) -> None:
        """Look after the others from now on."""
        self._tell()
        self._thread.start()

    def end(self, error: BaseException | None) -> None:
        """Look after nobody any more; the others hear how it ended."""
        self._over.set()
        leaves = error is None or isinstance(error, SystemExit)
        for _ in range(2):  # once more: word of a killed reading process may come up anywhere, here too
            with suppress(RuntimeError):  # nobody to tell
                self._tell(LEFT if leaves else FAILED)
                break
        self._thread.join(GRACE)

    def _tell(self, state: str | None = None) -> None:
        with self._lock:  # a store answers one thread at a time
            self._state, self._beat = state or self._state, self._beat + 1
            who, p = (socket.gethostname(), os.getpid(), self._state), progress
            own = (*who, p.points, p.signs, p.step, p.begun, place_of(self._worker), self._beat)
            self._store.set(f"{self._name}/{self._rank}", json.dumps(own))

    def _reports(self) -> list[Report]:
        """What the processes say that have said something."""
        keys = [f"{self._name}/{rank}" for rank in range(self._size)]
        with self._lock:
            if not self._store.check(keys):
                return []
            values = self._store.multi_get(keys)
        return [Report(rank, *json.loads(value)) for rank, value in enumerate(values)]

    def _speaks(self) -> bool:
        """Whether this process is the one to say what all have seen: who asks first."""
        with self._lock:
            return bool(self._store.add(f"{self._name}/said", 1) == 1)

    def _look_after(self) -> None:
        since = Since()
        pause = min(LONGEST, max(SHORTEST, self._patience / LOOKS))
        while not self._over.wait(pause):
            try:
                self._tell()
                reports = self._reports()
                if any(r.state == FAILED for r in reports):
                    self._leave("")  # it says itself why
                if line := hanging(reports, since, time.monotonic(), self._patience):
                    self._leave(line if self._speaks() else "")
            except RuntimeError as error:
                reason = str(error).split("\n")[0]
                self._leave(
                    f"process {self._rank} of {self._size} has lost torchrun, or whoever keeps the store of "
                    f"the job ({reason[:120]}); the same command goes on from the last checkpoint."
                )

    def _leave(self, line: str) -> None:
        """End this process from a thread beside the one that trains, which may never answer again."""
        if not line:  # the speaker first: torchrun ends all processes with the first that stops
            if self._over.wait(GRACE):
                return
        elif not self._over.is_set():
            print(f"tcore: error: {line}", file=sys.stderr, flush=True)
        if not self._over.is_set():
            os._exit(LostPeerError.exit_code)

    def explain(self, error: RuntimeError) -> NoReturn:
        """Say which process is gone when a collective has failed; another error is left as it is."""
        if not (isinstance(error, dist.DistError) or BROKEN.search(str(error))):
            raise error
        gone: list[Report] = []
        with suppress(RuntimeError):
            self._tell(CUT_OFF)
            deadline = time.monotonic() + GRACE
            while time.monotonic() < deadline:
                reports = self._reports()
                if any(r.state == FAILED for r in reports):
                    raise EchoError("another process has failed", LostPeerError.exit_code) from error
                missing = [r for r in reports if r.state == AT_WORK]
                gone = [r for r in missing if r.host == socket.gethostname() and not is_alive(r.pid)]
                gone = gone or (missing if time.monotonic() > deadline - 0.2 else [])
                if gone or not missing:
                    break
                time.sleep(0.05)
            if not self._speaks():
                raise EchoError("another process has said it", LostPeerError.exit_code) from error
        who = ", ".join(f"{r.named(self._size)} is gone, last in step {r.step}" for r in gone)
        reason = " ".join(str(error).split())[:160]
        raise LostPeerError(
            f"{who or f'the processes have lost one another ({reason})'}; "
            "the same command goes on from the last checkpoint."
        ) from error


@contextmanager
def explaining(guard: Guard | None) -> Iterator[None]:
    """Turn the word of a broken connection into one line that names the process that is gone."""
    try:
        yield
    except RuntimeError as error:
        if guard is None:
            raise
        guard.explain(error)


def place_of(thread: int) -> str:
    """Where a thread is: the innermost line of this package."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE) and path != Path(__file__):
            return f"{path.relative_to(PACKAGE.parent)}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown place"
