"""Shards written side by side: by processes of this machine, or by the tasks of a Ray cluster."""

import multiprocessing
import multiprocessing.connection
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

from tcore.data.packing import STALL_S, Task, write_shard
from tcore.errors import InputError

BEAT_S = 1.0  # between signs of life
SILENCE_S = STALL_S + 60  # a process that says nothing for longer is ended

Tell = Callable[[str, int], None]


def run_here(tasks: Sequence[Task], tell: Tell) -> None:
    """One shard after the other, in this process."""
    for task in tasks:
        write_shard(task, tell)


def run_processes(tasks: Sequence[Task], workers: int, tell: Tell) -> None:
    """Several processes, a shard at a time each; one that dies is replaced, and its shard begun again."""
    waiting = list(reversed(tasks))
    with _hire(min(workers, len(tasks))) as crew:
        while waiting or any(worker.task for worker in crew):
            for worker in crew:
                if worker.task is None and waiting:
                    worker.give(waiting.pop())
            for worker in crew:
                worker.check_silence()
            busy = {worker.connection: worker for worker in crew if worker.task}
            for connection in multiprocessing.connection.wait(list(busy), timeout=BEAT_S):
                busy[connection].listen(tell)  # type: ignore[index]


class _Worker:
    """A process, the shard it works on, and when it was last heard of."""

    def __init__(self) -> None:
        self.task: Task | None = None
        self.deaths: Counter[int] = Counter()
        self._said: list[tuple[str, int]] = []
        self._start()

    def _start(self) -> None:
        # Neither torch nor PyAV survives a fork in any state; a fork server is clean, and imports them once.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tcore.data.packing"])
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs,))
        with _without_main():
            self.process.start()
        theirs.close()

    def give(self, task: Task) -> None:
        """Begin a shard."""
        self.task, self._said, self._heard = task, [], time.monotonic()
        with suppress(BrokenPipeError):  # a process that is gone is noticed when it is listened to
            self.connection.send(task)

    def listen(self, tell: Tell) -> None:
        """Take one message, or notice that the process is gone."""
        assert self.task is not None
        try:
            what, value = self.connection.recv()
        except (EOFError, OSError):
            self._replace(tell)
            return
        self._heard = time.monotonic()
        if what == "done":
            self.task = None
        elif what == "failed":
            raise value
        else:
            self._said.append((what, value))
            tell(what, value)

    def check_silence(self) -> None:
        """End a process that hangs; its video will be tried once more by itself."""
        if self.task is not None and time.monotonic() - self._heard > SILENCE_S:
            self.process.kill()

    def _replace(self, tell: Tell) -> None:
        """A new process for the same shard."""
        assert self.task is not None
        self.stop()
        number = self.task.number
        self.deaths[number] += 1
        if self.deaths[number] > len(self.task.items) + 2:
            raise InputError(
                f"the process for shard {number} died {self.deaths[number]} times (exit code "
                f"{self.process.exitcode}): too little memory? Try fewer --workers; the same command goes on."
            )
        for what, frames in self._said:  # these videos come once more
            tell(f"not {what}", frames)
        self._start()
        self.give(self.task)

    def stop(self) -> None:
        """End the process."""
        self.connection.close()
        self.process.terminate()
        self.process.join()


@contextmanager
def _without_main() -> Iterator[None]:
    """Let a new process leave the caller's script alone, which it would run once more otherwise."""
    main = sys.modules["__main__"]
    names: list[str] = [name for name in ("__file__", "__spec__") if name in vars(main)]
    before = {name: vars(main).pop(name) for name in names}
    main.__spec__ = None
    try:
        yield
    finally:
        vars(main).update(before)


@contextmanager
def _hire(number: int) -> Iterator[list[_Worker]]:
    crew: list[_Worker] = []
    try:
        crew.extend(_Worker() for _ in range(number))
        yield crew
    finally:
        for worker in crew:
            worker.stop()


class _OrphanedError(Exception):
    """The process that gave the work is gone."""


def _work(connection: Connection) -> None:
    """What a process does: shards, until there are no more or nobody listens."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    last = 0.0

    def tell(what: str, frames: int) -> None:
        nonlocal last
        now = time.monotonic()
        if what == "frame" and now - last < BEAT_S:
            return
        last = now
        try:
            connection.send((what, frames))
        except OSError as error:
            raise _OrphanedError from error

    with suppress(EOFError, OSError):
        while True:
            task = connection.recv()
            try:
                write_shard(task, tell)
            except _OrphanedError:
                return
            except Exception as error:  # a full disk, or a fault of the program: the parent says so
                if not isinstance(error, OSError | InputError):
                    error.add_note(traceback.format_exc())
                connection.send(("failed", error))
            else:
                connection.send(("done", 0))


def run_ray(tasks: Sequence[Task], tell: Tell) -> None:
    """A Ray task per shard; the store must lie on a file system that all machines see."""
    try:
        import ray
    except ImportError as error:
        raise InputError(
            f"--engine ray needs Ray, which cannot be imported ({error}): pip install ray."
        ) from error
    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    remote: Any = ray.remote(max_retries=0)(_count_shard)
    pending = {remote.remote(task): task for task in tasks}
    deaths: Counter[int] = Counter()
    while pending:
        (done,), _ = ray.wait(list(pending), num_returns=1)
        task = pending.pop(done)
        try:
            for outcome, frames in ray.get(done):
                tell(outcome, frames)
        except ray.exceptions.WorkerCrashedError as error:
            deaths[task.number] += 1
            if deaths[task.number] > len(task.items) + 2:
                raise InputError(f"the Ray task for shard {task.number} died again and again.") from error
            pending[remote.remote(task)] = task
        except ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, OSError | InputError) else error from None


def _count_shard(task: Task) -> list[tuple[str, int]]:
    """Write a shard; return what became of its videos."""
    said: list[tuple[str, int]] = []
    write_shard(task, lambda what, frames: said.append((what, frames)) if what != "frame" else None)
    return said
