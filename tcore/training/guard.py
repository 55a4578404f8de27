"""What ends a run from outside: another process that hangs or is gone, or a signal.

torch's own time-outs do not say who hangs: gloo's error names no process, and torchrun blames the healthy one
that gave up first. So a thread in each process reports its progress to the others through the store at which
they met, which needs no collective and no GPU. All processes pass the same points in the same order; one that
hangs keeps the others waiting at a later point, so the one furthest behind is to blame. It hangs when it has
made no progress for `runtime.patience` seconds; until the second step (opening a store, reading a checkpoint,
compiling) the patience is `START` times longer.
"""

import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch.distributed as dist

from tcore.errors import PeerError
from tcore.files import is_alive
from tcore.rendezvous import LostPeerError
from tcore.text import list_some, print_error

START = 6  # times the patience, up to the second step
LOOKS = 20  # at the others within the patience ...
LONGEST, SHORTEST = 5.0, 0.1  # ... this many seconds apart
GRACE = 3.0  # seconds for a process to end by itself
NAMED = 4  # processes that one line names at most
WORKING, LEFT, FAILED, CUT_OFF = "working", "left", "failed", "cut off"
PACKAGE = Path(__file__).parents[1]
RESUME = "rerun the same command to resume from the last checkpoint"

# Sent by an operator (Ctrl-C is SIGINT) or a scheduler: SLURM sends one before it takes the machine away.
SIGNALS = tuple(one for one in signal.Signals if one.name in ("SIGTERM", "SIGUSR1", "SIGINT"))
# What gloo, NCCL and the store say when the other side of a connection is gone.
BROKEN = re.compile(r"gloo|nccl|connection (was )?(closed|reset|refused)|broken pipe|socket", re.IGNORECASE)


class StopRequested(SystemExit):
    """A run saved itself and ends because a signal requested it; not caught, the exit code is 0 or 130."""

    def __init__(self, name: str = "") -> None:
        super().__init__(130 if name == signal.SIGINT.name else 0)  # 130: what a shell expects of Ctrl-C


class StopRequest:
    """While entered, notes the first signal that requests a stop; the loop looks at it after every step.

    A second Ctrl-C stops at once.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self._before: dict[signal.Signals, Any] = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self.name == signal.SIGINT.name:
                raise KeyboardInterrupt
            os.write(2, b"\nCtrl-C: saves after this step; once more stops at once.\n")
        self.name = self.name or signal.Signals(number).name

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():  # Python allows it nowhere else
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if isinstance(error, LostPeerError):
            return  # torchrun sends SIGTERM to the other processes: the lost one is named first
        for number, handler in self._before.items():
            # None: the handler was not installed from Python, and cannot be from here.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@dataclass
class Progress:
    """How far this process has come: points passed, the same in every process, and other signs of work."""

    points: int = 0
    beats: int = 0
    step: int = 0
    begun: int = 0
    """Steps that were begun since the start of the process."""


progress = Progress()


def reached(step: int | None = None) -> None:
    """Pass a point that every process passes, such as the beginning of a step."""
    progress.points += 1
    if step is not None:
        progress.step, progress.begun = step, progress.begun + 1


def heartbeat() -> None:
    """Show that work continues where no point is passed, such as while a checkpoint is written."""
    progress.beats += 1


@dataclass(frozen=True)
class Report:
    """What a process tells the others; `count` grows with every report."""

    rank: int
    host: str
    pid: int
    state: str
    points: int
    beats: int
    step: int
    begun: int
    place: str
    count: int

    def named(self, of: int) -> str:
        """Which process this is."""
        return f"process {self.rank} of {of} on {self.host} (pid {self.pid})"


class Since:
    """For how long values have not changed."""

    def __init__(self) -> None:
        self._values: dict[object, tuple[object, float]] = {}

    def note(self, key: object, value: object, now: float) -> float:
        """Seconds for which a value has been as it is."""
        before = self._values.get(key)
        if before is None or before[0] != value:
            self._values[key] = before = (value, now)
        return now - before[1]


def hanging(reports: list[Report], since: Since, now: float, patience: float) -> str | None:
    """A line that names the processes that hang, if any: those furthest behind, if none progresses."""
    still = {r.rank: since.note(r.rank, (r.points, r.beats, r.state), now) for r in reports}
    silent = {r.rank for r in reports if since.note((r.rank, "count"), r.count, now) > patience / 2}
    working = [r for r in reports if r.state == WORKING]
    behind = [r for r in working if r.points == min(r.points for r in working)]
    seconds = min((still[r.rank] for r in behind), default=0.0)
    if seconds <= patience * (START if any(r.begun < 2 for r in behind) else 1):
        return None
    # One that no longer reports is to blame, if there is one: the others wait for it.
    behind = [r for r in behind if r.rank in silent] or behind
    places = [r.place for r in behind]
    behind.sort(key=lambda r: (places.count(r.place), r.rank))  # the odd one out first
    said = [
        f"{r.named(len(reports))}{' does not respond,' if r.rank in silent else ''} "
        f"last in step {r.step}, at {r.place}"
        for r in behind
    ]
    what = "a process hangs" if len(behind) == 1 else f"{len(behind)} processes wait for one another"
    return (
        f"{what}, no progress for {seconds:.0f} s (runtime.patience={patience:g}): "
        f"{list_some(said, NAMED, '; ')}; {RESUME} (with more patience, if it is only slow)."
    )


class Guard:
    """Reports the progress of this process to the others, and ends it when one of them hangs."""

    def __init__(self, store: Any, name: str, rank: int, size: int, patience: float) -> None:
        self._store, self._name, self._rank, self._size = store, name, rank, size
        self._patience, self._state, self._count = patience, WORKING, 0
        self._trainer = threading.get_ident()  # the thread that trains
        self._over, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="guard", daemon=True)
        progress.points = progress.beats = progress.step = progress.begun = 0

    def begin(self) -> None:
        """Watch the others from now on."""
        self._report()
        self._thread.start()

    def end(self, error: BaseException | None) -> None:
        """Stop watching; the others learn how it ended."""
        self._over.set()
        leaves = error is None or isinstance(error, SystemExit)
        for _ in range(2):  # once more: PyTorch may raise the death of a reading process anywhere, here too
            with suppress(RuntimeError):  # nobody to tell
                self._report(LEFT if leaves else FAILED)
                break
        self._thread.join(GRACE)

    def _report(self, state: str | None = None) -> None:
        with self._lock:  # a store answers one thread at a time
            self._state, self._count = state or self._state, self._count + 1
            who, p = (socket.gethostname(), os.getpid(), self._state), progress
            own = (*who, p.points, p.beats, p.step, p.begun, place_of(self._trainer), self._count)
            self._store.set(f"{self._name}/{self._rank}", json.dumps(own))

    def _reports(self) -> list[Report]:
        """The latest reports, once every process has made one."""
        keys = [f"{self._name}/{rank}" for rank in range(self._size)]
        with self._lock:
            if not self._store.check(keys):
                return []
            values = self._store.multi_get(keys)
        return [Report(rank, *json.loads(value)) for rank, value in enumerate(values)]

    def _speaks(self) -> bool:
        """Whether this process prints what all have seen: the first that asks."""
        with self._lock:
            return bool(self._store.add(f"{self._name}/said", 1) == 1)

    def _watch(self) -> None:
        since = Since()
        pause = min(LONGEST, max(SHORTEST, self._patience / LOOKS))
        while not self._over.wait(pause):
            try:
                self._report()
                reports = self._reports()
                if any(r.state == FAILED for r in reports):
                    self._leave("")  # it prints the reason itself
                if line := hanging(reports, since, time.monotonic(), self._patience):
                    self._leave(line if self._speaks() else "")
            except RuntimeError as error:
                reason = str(error).split("\n")[0][:120]
                who = f"process {self._rank} of {self._size}"
                self._leave(f"{who} has lost torchrun, or whoever keeps the store ({reason}); {RESUME}.")

    def _leave(self, line: str) -> None:
        """End this process from beside the thread that trains, which may never return."""
        if not line:  # the speaker first: torchrun ends all processes with the first that stops
            self._over.wait(GRACE)
        elif not self._over.is_set():
            print_error(line)
        if not self._over.is_set():
            os._exit(LostPeerError.exit_code)

    def explain(self, error: RuntimeError) -> NoReturn:
        """Say which process is gone when a collective has failed; another error is raised as it is."""
        if not (isinstance(error, dist.DistError) or BROKEN.search(str(error))):
            raise error
        gone: list[Report] = []
        with suppress(RuntimeError):
            self._report(CUT_OFF)
            gone = self._gone(error)
            if not self._speaks():
                raise PeerError("another process names it", LostPeerError.exit_code) from error
        who = ", ".join(f"{r.named(self._size)} is gone, last in step {r.step}" for r in gone)
        reason = " ".join(str(error).split())[:160]
        raise LostPeerError(f"{who or f'lost connection ({reason})'}; {RESUME}.") from error

    def _gone(self, error: RuntimeError) -> list[Report]:
        """Processes that are dead, or that have not noticed within the time of grace that one is."""
        deadline = time.monotonic() + GRACE
        while True:
            reports = self._reports()
            if any(r.state == FAILED for r in reports):
                raise PeerError("another process has failed", LostPeerError.exit_code) from error
            missing = [r for r in reports if r.state == WORKING]
            dead = [r for r in missing if r.host == socket.gethostname() and not is_alive(r.pid)]
            if dead or not missing or time.monotonic() > deadline:
                return dead or missing
            time.sleep(0.05)


@contextmanager
def explaining(guard: Guard | None) -> Iterator[None]:
    """Turn the error of a broken connection into one line that names the process that is gone."""
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
