"""What a run says of itself: metrics.jsonl, curves, the progress line, and warnings about its data."""

import contextlib
import importlib
import importlib.util
import json
import platform
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tcore import __version__
from tcore.config import Config, flatten
from tcore.data.images import simplejpeg
from tcore.data.loader import num_workers
from tcore.data.neighbors import ImageSource
from tcore.data.source import Source
from tcore.data.stores import PackedStore, RenderedStore
from tcore.device import num_cores, world
from tcore.errors import InputError, reason
from tcore.files import Shape, parse_line, read_bytes, read_json, write_bytes, write_json
from tcore.methods.health import Health
from tcore.text import format_seconds, list_some, printable

METRICS = "metrics.jsonl"
LARGEST_METRICS = 2**32  # bytes
ENVIRONMENT = "environment.json"
# What may change the last bits of a step.
BITS = ("torch", "device", "gpu", "processes", "threads")


# Where figures go besides metrics.jsonl: TensorBoard, trackio, or Weights & Biases.


PROJECT = "tcore"  # under which trackio and Weights & Biases list a run


class Tracker(NamedTuple):
    """A tool that draws curves: its name, and how to log the figures of a step."""

    name: str
    log: Callable[[Mapping[str, float], int], object]
    close: Callable[[], object]


def check_log(name: str) -> None:
    """Refuse a tracker whose package is not installed, before anything is trained or written."""
    if name not in ("auto", "off") and importlib.util.find_spec(name) is None:
        raise InputError(f"log={name} needs the package {name}: pip install {name}, or use --log off.")


def open_tracker(config: Config, run: Path, first_step: int) -> Tracker | None:
    """The tracker that `config.log` names; auto is TensorBoard where it is installed."""
    if config.log == "off":
        return None
    try:
        if config.log in ("auto", "tensorboard"):
            return _tensorboard(run / "tensorboard", first_step)
        return _service(config, run)
    except OSError:
        raise
    except Exception as error:  # theirs can raise anything: no login, no network
        if config.log == "auto" and isinstance(error, ImportError | RuntimeError):
            return None  # not installed, or not for this version of torch
        said = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"log={config.log} cannot start: {said}. --log off trains without it.") from error


def _tensorboard(folder: Path, first_step: int) -> Tracker:
    from torch.utils.tensorboard import SummaryWriter

    _quieten_writer_threads()
    # Events of steps that are made again, also of a run that was killed before its first checkpoint.
    writer: Any = SummaryWriter(str(folder), purge_step=first_step + 1)

    def log(figures: Mapping[str, float], step: int) -> None:
        for name, value in figures.items():
            writer.add_scalar(name, value, step)

    return Tracker("TensorBoard", log, writer.close)


def _service(config: Config, run: Path) -> Tracker:
    """trackio, which knows a run by its name, or Weights & Biases, which knows it by an id."""
    package: Any = importlib.import_module(config.log)
    name, known = "trackio", {"name": _identity(run)}
    if config.log == "wandb":
        name, known = "Weights & Biases", {"name": run.name, "id": _identity(run), "dir": str(run)}
    package.init(project=PROJECT, config=flatten(config), resume="allow", **known)
    return Tracker(name, lambda figures, step: package.log(dict(figures), step=step), package.finish)


def _identity(run: Path) -> str:
    """The same name for the same folder, so that a resumed run continues its own curve."""
    return f"{run.name}-{zlib.crc32(str(run.resolve()).encode()):08x}"


def _quieten_writer_threads() -> None:
    """Keep TensorBoard's writer thread from printing a traceback where the disk is full."""
    usual = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        if not (args.exc_type is not None and issubclass(args.exc_type, OSError)):
            usual(args)

    if getattr(usual, "__name__", "") != "hook":
        threading.excepthook = hook


# The journal itself.


class Journal:
    """Writes one line per step to metrics.jsonl, and tells a person how it goes."""

    def __init__(
        self, run: Path, first_step: int, num_steps: int, quiet: bool, tracker: Tracker | None = None
    ) -> None:
        self.first_step, self.num_steps = first_step, num_steps
        lost = forget_after(run / METRICS, first_step)
        self._file = (run / METRICS).open("a", encoding="utf-8")
        self._tracker = tracker
        self._console = Console(stderr=True, quiet=quiet)
        self._progress = self._start_progress() if self._console.is_terminal and not quiet else None
        self._since = (first_step, time.perf_counter())  # the step and time that the pace is counted from
        self._warned = False
        if lost:
            self.say(lost)

    def _start_progress(self) -> Progress:
        progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=8),
            TextColumn("{task.fields[said]}"),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=self._console,
        )
        progress.start()
        self._task = progress.add_task("", total=self.num_steps, completed=self.first_step, said="")
        return progress

    def record(self, step: int, metrics: Mapping[str, Any], health: Health | None) -> None:
        """Note step number `step` (the first one is 1)."""
        line = {"step": step, **metrics} | ({"health": health.logged()} if health else {})
        try:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._file.name) from error
        if health:
            self._track(step, metrics, health)
            self._tell(step, metrics, health)
        if step == self.first_step + 1:  # it compiles, and says nothing of the others
            self._since = (step, time.perf_counter())
        if self._progress:
            self._progress.update(self._task, completed=step)
        if health and health.warning and not self._warned:
            self._warned = True
            self.say(f"warning: step {step}: {health.warning}")

    def _tell(self, step: int, metrics: Mapping[str, Any], health: Health) -> None:
        """The line of a step for a person; in a terminal it stays above the progress bar."""
        before, then = self._since
        seconds = (time.perf_counter() - then) / (step - before)
        eta = format_seconds(seconds * (self.num_steps - step))
        said = describe(metrics, health)
        self.say(f"step {step}/{self.num_steps}  {said}" + ("" if self._progress else f"  ETA {eta}"))
        if self._progress:
            speed = f"{health.state} {metrics['samples_per_second']:.3g}/s wait {metrics['data_wait']:.0%}"
            self._progress.update(self._task, said=speed)

    def _track(self, step: int, metrics: Mapping[str, Any], health: Health) -> None:
        """Figures for the tracker; if it fails for any reason, the run continues without it."""
        if self._tracker is None:
            return
        named = {**metrics, **{f"health/{k}": v for k, v in health.logged().items()}}
        try:
            self._tracker.log({k: v for k, v in named.items() if isinstance(v, int | float)}, step)
        except Exception as error:
            self.say(
                f"warning: step {step}: {self._tracker.name} fails ({reason(error)}); continuing without it."
            )
            self._tracker = None

    def say(self, text: str) -> None:
        """Print a line for a person."""
        self._console.print(printable(text), highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Finish the files and the progress line."""
        if self._progress:
            self._progress.stop()
        if self._tracker:
            with contextlib.suppress(Exception):
                self._tracker.close()
        with contextlib.suppress(OSError):  # every line was flushed when it was written, or its error raised
            self._file.close()


def describe(metrics: Mapping[str, Any], health: Health) -> str:
    """The progress line: what is minimized, whether it learns, how fast."""
    return (
        f"total {metrics['total']:.3f}  {health.line}  "
        f"{metrics['samples_per_second']:.1f} samples/s  wait {metrics['data_wait']:.0%}"
        + (f"  unreadable {metrics['bad_samples']}" if metrics.get("bad_samples") else "")
    )


def parse_metrics(path: Path, shape: Shape) -> tuple[list[tuple[bytes, Any]], list[int]]:
    """Lines of metrics.jsonl with what they say, and the numbers of those that cannot be read.

    A last line that is being written, or was cut off by a kill, is left out: its step is made again.
    """
    try:
        lines = read_bytes(path, LARGEST_METRICS).split(b"\n")
    except OSError as error:
        raise InputError(f"cannot read {path}: {reason(error)}; move it away.") from error
    parsed = [(line, parse_line(line, shape)) for line in lines]
    bad = [number for number, (line, found) in enumerate(parsed[:-1], 1) if line and found is None]
    return [(line, found) for line, found in parsed if found is not None], bad


def forget_after(path: Path, last_step: int) -> str:
    """Drop lines of steps that the checkpoint has not seen: they are made again. A warning of bad lines."""
    if not path.exists():
        return ""
    lines, bad = parse_metrics(path, {"step": int})
    copy = path.with_name(f"{path.stem}.damaged{path.suffix}")
    if bad:
        write_bytes(copy, read_bytes(path, LARGEST_METRICS))
    kept = (line + b"\n" for line, found in lines if found["step"] <= last_step)
    write_bytes(path, b"".join(kept))
    left_out = f"cannot read line {list_some(bad)}; left out, a copy is kept in {copy.name}"
    return f"warning: {path}: {left_out}." if bad else ""


def note_environment(
    run: Path, source: Source, device: torch.device, frames: str | Path | None, resumes: bool
) -> str:
    """Write down versions, machine and data of a run; returns a line about changes since it was stopped."""
    before: dict[str, Any] = {}
    with contextlib.suppress(InputError):  # without it less can be said
        before = read_json(run / ENVIRONMENT, shape=dict) if resumes else {}
    made_with = {
        "tcore": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": str(device),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else "none",
        "frames": "rendered" if frames is None else str(frames),
        "processes": str(world().size),
        "threads": str(torch.get_num_threads()),
    }
    if isinstance(source, ImageSource):
        made_with["neighbors"] = f"{source.neighbors.fingerprint()}, by {source.neighbors.encoder}"
    write_json(run / ENVIRONMENT, made_with, indent=2)
    changed = [
        f"{k} {before[k]} -> {made_with[k]}" for k in BITS if before.get(k, made_with[k]) != made_with[k]
    ]
    last_bits = "the last bits of its losses may differ from a run without the change"
    return f"resumed with {', '.join(changed)}: {last_bits}." if changed else ""


# Warnings about the data: time spent waiting for it, and samples that cannot be read.


WAIT_SHARE = 0.1  # of the time: more of it spent waiting is worth a warning
WAIT_STEPS, WAIT_FEWEST = 50, 10  # steps that are averaged over, at most and at least
WAIT_PAUSE = 500  # steps until the next warning
BAD_SAMPLES = 1000  # samples that the share of bad ones is taken of
BAD_PAUSE = 100  # steps until the next warning


class TooManyUnreadableError(InputError):
    """More samples could not be read than the settings allow."""


class DataWait:
    """Averages the share of the time that steps wait for data, and warns now and then."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._steps: deque[tuple[float, float]] = deque(maxlen=WAIT_STEPS)
        self._first, self._quiet_until = True, 0

    def note(self, step: int, metrics: Mapping[str, Any], look: bool) -> str | None:
        """Count a step; where a line is printed anyway, return a warning if there was too much waiting."""
        if self._first or isinstance(self._source.store, RenderedStore):
            # The first step waits for the reading processes to start; rendered videos are kept in memory.
            self._first = False
            return None
        seconds = 1 / metrics["samples_per_second"]  # in units of a batch, which cancel out
        self._steps.append((metrics["data_wait"] * seconds, seconds))
        waited, spent = (sum(column) for column in zip(*self._steps, strict=True))
        due = look and len(self._steps) >= WAIT_FEWEST and step >= self._quiet_until
        if not due or waited <= WAIT_SHARE * spent:
            return None
        self._quiet_until = step + WAIT_PAUSE
        return (
            f"warning: step {step}: {waited / spent:.0%} of the last {len(self._steps)} steps was spent "
            f"waiting for data; {self._advice()}"
        )

    def _advice(self) -> str:
        """Settings that are left to try."""
        workers, cores = num_workers(self._source), num_cores()
        advice = []
        if workers < cores:
            advice.append(f"--runtime.workers {cores} reads with every core (now {workers})")
        if not isinstance(self._source.store, PackedStore):
            advice.append("tcore prepare packs the frames into few large files")
        if simplejpeg() is None:
            advice.append("pip install simplejpeg decodes several times faster")
        if not advice:
            advice.append("tcore prepare --short-side 256 makes smaller frames, which decode faster")
        if not self._source.config.runtime.hold_gib and sys.platform == "linux":
            advice.append("--runtime.hold-gib 4 keeps decoded frames in memory, up to 4 GiB")
        return ", ".join(advice) + "; benchmarks/loader.py shows where the time goes."


class BadSamples:
    """Counts samples that could not be read, and were replaced by others; too many of them end the run."""

    def __init__(self, limit: float) -> None:
        self.total, self._limit, self._quiet_until = 0, limit, 0
        self._steps: deque[tuple[int, int]] = deque()  # bad, read

    def note(self, step: int, bad: tuple[str, ...], read: int) -> str | None:
        """Count a step: a warning now and then, an error above the limit."""
        self._steps.append((len(bad), read))
        while len(self._steps) > 1 and sum(n for _, n in self._steps) - self._steps[0][1] >= BAD_SAMPLES:
            self._steps.popleft()
        if not bad:
            return None
        self.total += len(bad)
        recent, among = (sum(column) for column in zip(*self._steps, strict=True))
        if recent > self._limit * max(among, BAD_SAMPLES):
            raise TooManyUnreadableError(
                f"step {step}: {recent} of the last {max(among, BAD_SAMPLES)} samples could not be read, "
                f"more than runtime.bad_samples={self._limit:g} allows: find them with tcore check, repair "
                "the store or raise the setting, and rerun the same command to resume. "
                f"The last one: {bad[-1]}"
            )
        if step < self._quiet_until:
            return None
        self._quiet_until = step + BAD_PAUSE
        return (
            f"warning: step {step}: {len(bad)} unreadable, replaced by other clips "
            f"({self.total} since the start of this process): {bad[-1]}"
        )
