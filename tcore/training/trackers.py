"""Where the figures of a run go besides metrics.jsonl: TensorBoard, trackio, or Weights & Biases."""

import importlib
import importlib.util
import threading
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tcore.config import Config, flatten
from tcore.errors import InputError

PROJECT = "tcore"  # under which trackio and Weights & Biases list a run


class Tracker(NamedTuple):
    """A tool that draws curves: what it calls itself, and how it is told the figures of a step."""

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
        return (_trackio if config.log == "trackio" else _wandb)(config, run)
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


def _trackio(config: Config, run: Path) -> Tracker:
    trackio: Any = importlib.import_module("trackio")
    trackio.init(project=PROJECT, name=_identity(run), config=flatten(config), resume="allow")
    return Tracker("trackio", lambda figures, step: trackio.log(dict(figures), step=step), trackio.finish)


def _wandb(config: Config, run: Path) -> Tracker:
    wandb: Any = importlib.import_module("wandb")
    made = wandb.init(
        project=PROJECT,
        name=run.name,
        id=_identity(run),
        resume="allow",
        dir=str(run),
        config=flatten(config),
    )
    return Tracker("Weights & Biases", lambda figures, step: made.log(dict(figures), step=step), made.finish)


def _identity(run: Path) -> str:
    """The same name for the same folder, so that a resumed run goes on in its own curve."""
    return f"{run.name}-{zlib.crc32(str(run.resolve()).encode()):08x}"


def _quieten_writer_threads() -> None:
    """Keep TensorBoard's writer thread from printing a traceback where the disk is full."""
    usual = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        if not (args.exc_type is not None and issubclass(args.exc_type, OSError)):
            usual(args)

    if getattr(usual, "__name__", "") != "hook":
        threading.excepthook = hook
