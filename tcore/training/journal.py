"""What a run says of itself: metrics.jsonl, a tracker of curves, and a progress line."""

import contextlib
import json
import platform
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tcore.data.neighbors import ImageSource
from tcore.data.source import Source
from tcore.device import world
from tcore.errors import InputError
from tcore.files import list_some, parse_line, read_bytes, read_json, write_bytes, write_text
from tcore.methods.health import Health
from tcore.text import format_seconds, printable
from tcore.training.trackers import Tracker

METRICS = "metrics.jsonl"
LARGEST_METRICS = 2**32  # bytes
ENVIRONMENT = "environment.json"
# What may change the last bits of a step.
BITS = ("torch", "device", "gpu", "processes", "threads")


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
        """Figures for the tracker; where it fails, whatever the reason, the run goes on without it."""
        if self._tracker is None:
            return
        named = {**metrics, **{f"health/{k}": v for k, v in health.logged().items()}}
        try:
            self._tracker.log({k: v for k, v in named.items() if isinstance(v, int | float)}, step)
        except Exception as error:
            said = getattr(error, "strerror", None) or " ".join(str(error).split())
            self.say(f"warning: step {step}: {self._tracker.name} fails ({said}); going on without it.")
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


def forget_after(path: Path, last_step: int) -> str:
    """Drop lines of steps that the checkpoint has not seen: they are made again. A warning of bad lines."""
    if not path.exists():
        return ""
    try:
        text = read_bytes(path, largest=LARGEST_METRICS)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; move it away to resume.") from error
    kept, bad = [], []
    for number, line in enumerate(text.split(b"\n"), 1):
        found = parse_line(line, {"step": int})
        if found is None:
            bad += [number] if line else []
        elif found["step"] <= last_step:
            kept.append(line + b"\n")
    if bad == [text.count(b"\n") + 1]:
        bad = []  # the last line, cut off by a kill: its step is made again
    copy = path.with_name(f"{path.stem}.damaged{path.suffix}")
    if bad:
        write_bytes(copy, text)
    write_bytes(path, b"".join(kept))
    left_out = f"cannot read line {list_some(bad)}; left out, a copy is kept in {copy.name}"
    return f"warning: {path}: {left_out}." if bad else ""


def note_environment(
    run: Path, source: Source, device: torch.device, frames: str | Path | None, resumes: bool
) -> str:
    """Write down versions, machine and data of a run; returns a line about changes since it was stopped."""
    before: Any = {}
    with contextlib.suppress(InputError):
        before = read_json(run / ENVIRONMENT) if resumes and (run / ENVIRONMENT).exists() else {}
    made_with = {
        "tcore": version("tcore-video"),
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
    write_text(run / ENVIRONMENT, json.dumps(made_with, indent=2) + "\n")
    if not isinstance(before, dict):
        return ""
    changed = [
        f"{k} {before[k]} -> {made_with[k]}" for k in BITS if before.get(k, made_with[k]) != made_with[k]
    ]
    last_bits = "the last bits of its losses may differ from a run without the change"
    return f"resumed with {', '.join(changed)}: {last_bits}." if changed else ""


def version(package: str) -> str:
    """The installed version of a package; a checkout that is not installed has none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
