"""Runs of a lab: every row and seed is trained and scored on some GPUs, in processes of their own."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from tcore.device import on_signals
from tcore.errors import InputError, reason
from tcore.files import read_bytes, write_json, write_text
from tcore.text import Say, count, format_seconds
from tcore.training.guard import SIGNALS

STARTED = "commands.json"  # written when a run starts
DONE = "lab.json"  # written when a run is trained and scored; beside the table: all rows
TABLE, PICTURE = "lab.md", "lab.png"
LARGEST_LOG = 2**32  # bytes


class Row(NamedTuple):
    """One row of a table: its name, the flags that define it, and what the paper reports (J&F, J, F)."""

    name: str
    flags: str = ""
    published: tuple[float, float, float] | None = None

    @property
    def folder(self) -> str:
        """The name as a folder."""
        return re.sub(r"[^A-Za-z0-9._-]+", "-", self.name).strip("-.") or "row"


@dataclass(frozen=True)
class Job:
    """One row with one seed, in its own folder."""

    row: Row
    seed: int
    folder: Path

    def __str__(self) -> str:
        return f"{self.row.name}, seed {self.seed}"


class Processes:
    """The processes of a lab; a stop is passed on, so that a training saves its step and exits."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[bytes]] = set()
        self._stopped = False

    def check_stop(self) -> None:
        """Start nothing once a stop was requested."""
        if self._stopped:
            raise KeyboardInterrupt

    def run(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> int:
        """Run a command, append its output to a log, and return its exit code."""
        self.check_stop()
        with log.open("a", encoding="utf-8") as output:
            process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        self._running.add(process)
        if self._stopped:  # started while the others were being stopped
            process.terminate()
        return process.wait()

    def stop(self) -> None:
        """Send SIGTERM to what is running, and start nothing more."""
        self._stopped = True
        for process in self._running.copy():
            process.terminate()  # nothing happens to one that has ended


Run = Callable[[Job, "SimpleQueue[str]", Processes], None]  # takes a device from the queue, and puts it back


def run_table(
    commands: Mapping[Job, Sequence[list[str]] | None],
    out: Path,
    devices: Sequence[str],
    say: Say,
    write: Callable[[bool], list[str]],
    module: str = "tcore",
) -> list[str]:
    """Run the commands of every job; None: it is done. Returns the lines of the table.

    `write` writes the rows known so far, so that an interrupted lab has its table; at the end it draws too.
    """
    todo = {job: words for job, words in commands.items() if words is not None}
    before = len(commands) - len(todo)
    write(False)  # a damaged file is found before anything is trained
    say(f"runs: {len(commands)}, {before} of them already done; {len(devices)} at a time")
    begun, ended = time.monotonic(), 0

    def run(job: Job, free: "SimpleQueue[str]", processes: Processes) -> None:
        run_job(job, todo[job], free, say, processes, module)

    def note_end() -> None:
        nonlocal ended
        ended += 1
        if left := len(todo) - ended:
            rest = format_seconds((time.monotonic() - begun) / ended * left)
            say(f"{before + ended} of {count(len(commands), 'run')} ended, about {rest} left")
        write(False)

    failed = run_jobs(list(todo), run, devices, say, note_end)
    lines = write(True)
    if failed:
        has = f"; {out / TABLE} has the finished ones" if (out / TABLE).is_file() else ""
        raise InputError(f"{len(failed)} of {len(commands)} runs failed{has}. The first: {failed[0]}")
    return lines


def run_jobs(
    jobs: Sequence[Job], run: Run, devices: Sequence[str], say: Say, note_end: Callable[[], object]
) -> list[InputError]:
    """Run jobs, one per device at a time; a failure does not stop the others."""
    free: SimpleQueue[str] = SimpleQueue()
    for device in devices:
        free.put(device)
    failed = []
    # A GPU can train the next run while one is scored; CPU cores cannot.
    pool, processes = ThreadPoolExecutor(sum(2 if device else 1 for device in devices)), Processes()
    # Ctrl-C in a terminal reaches all processes; a signal of a scheduler or of `kill` reaches only the lab.
    with on_signals((one.name for one in SIGNALS), signal.default_int_handler):
        try:
            futures = [pool.submit(run, job, free, processes) for job in jobs]
            for future in as_completed(futures):
                try:
                    future.result()
                except InputError as error:
                    say(f"failed: {error}")
                    failed.append(error)
                with suppress(InputError):  # a table that cannot be written is reported at the end
                    note_end()
        except KeyboardInterrupt:
            processes.stop()  # also jobs that wait for a device and would start now
            raise
        finally:
            pool.shutdown(cancel_futures=True)
    return failed


def run_job(
    job: Job,
    commands: Sequence[list[str]],
    free: "SimpleQueue[str]",
    say: Say,
    processes: Processes,
    module: str,
) -> None:
    """Train one row with one seed on a free device, then score it, each command in a process of its own."""
    *train, score = commands  # a row that is only scored has no training
    device = free.get()
    try:
        try:
            processes.check_stop()
            write_json(job.folder / STARTED, list(commands))
            trained = 0.0
            for words in train:
                say(f"{job}: training, {job.folder / 'train.log'} has its progress")
                trained += run_command(words, job, "train.log", device, processes, module)
        finally:
            free.put(device)
        say(f"{job}: scoring, {job.folder / 'evaluate.log'} has its progress")
        scored = run_command(score, job, "evaluate.log", device, processes, module)
        done = {"commands": list(commands), "seconds": [trained, scored]}
        write_json(job.folder / DONE, done)
    except OSError as error:  # a full disk, or a file in place of the folder: the other rows continue
        where = f"{error.filename}: " if error.filename else ""
        raise InputError(f"{job}: {where}{reason(error)}.") from error
    before = f"trained in {format_seconds(trained)}, " if train else ""
    say(f"{job}: {before}scored in {format_seconds(scored)}")


def run_command(
    command: Sequence[str], job: Job, log_name: str, device: str, processes: Processes, module: str
) -> float:
    """Run a command of a job, log its output, and return how many seconds it took."""
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": device} if device else {})
    started, log = time.perf_counter(), job.folder / log_name
    before = log.stat().st_size if log.exists() else 0
    code = processes.run([sys.executable, "-m", module, *command], environment, log)
    lines = read_bytes(log, LARGEST_LOG)[before:].decode(errors="replace").strip().splitlines() or [""]
    # A training that was stopped saves its step and exits with 0; only a finished one names its encoder.
    if code or (command[0] == "train" and not any(line.startswith("encoder: ") for line in lines)):
        raise InputError(f"{job}: `{module} {shlex.join(command)}` ended with {code}: {lines[-1]}")
    return round(time.perf_counter() - started, 1)


def write_table(out: Path, rows: Sequence[dict[str, Any]], lines: list[str]) -> list[str]:
    """Write the rows for programs and the lines for people; nothing where there is no row yet."""
    if rows:
        write_json(out / DONE, rows)
        write_text(out / TABLE, "\n".join(lines) + "\n")
    return lines


def finished(row: Path) -> list[Path]:
    """The runs of a row that are trained and scored."""
    return sorted(path.parent for path in row.glob(f"seed-*/{DONE}"))


def refuse_changed(changed: Mapping[str, tuple[Any, Any]], folder: Path) -> None:
    """Refuse a folder that was made with other settings: the table would mix them."""
    for name, (was, wanted) in changed.items():
        now = f"{wanted} (another budget)" if name == "optim.steps" else wanted
        raise InputError(
            f"{folder} was made with {name}={was}, now {now}: give another --out, or remove this folder."
        )
