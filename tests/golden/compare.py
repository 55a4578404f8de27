"""What the checks of golden files share: deviations, names, a step of the optimizer, schedules."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tcore import methods
from tcore.config import OptimConfig
from tcore.methods.method import Method
from tcore.recipes import recipe
from tcore.training import optim

Arrays = Mapping[str, np.ndarray[Any, Any]]


class Deviation(NamedTuple):
    """How far one array is from its golden twin, and how far it may be."""

    name: str
    value: float
    tolerance: float


def deviation(name: str, ours: Any, golden: Any, tolerance: float = 1e-5) -> Deviation:
    """Largest difference relative to the largest golden value; another shape or NaN is infinitely far."""
    a = np.asarray(ours.detach() if isinstance(ours, Tensor) else ours, dtype=np.float64)
    b = np.asarray(golden, dtype=np.float64)
    if a.shape != b.shape:
        return Deviation(f"{name} has shape {a.shape}, golden {b.shape}", float("inf"), tolerance)
    if a.size == 0:
        return Deviation(name, 0.0, tolerance)
    scale = np.abs(b).max() or 1.0
    value = float(np.abs(a - b).max() / scale)
    return Deviation(name, value if np.isfinite(value) else float("inf"), tolerance)


def compare(arrays: Arrays, ours: Mapping[str, Any], tolerance: float = 1e-5) -> Iterator[Deviation]:
    """Several arrays beside the golden ones of the same names."""
    for name, values in ours.items():
        yield deviation(name, values, arrays[name], tolerance)


def same_names(what: str, golden: Iterable[str], ours: Iterable[str]) -> Deviation:
    """A golden set that leaves something out, or holds something else, does not agree."""
    odd = sorted(set(golden) ^ set(ours))
    return Deviation(f"{what} lacks or adds {odd[:3]}" if odd else what, float("inf") if odd else 0.0, 0.0)


def tensors(arrays: Arrays, prefix: str) -> dict[str, Tensor]:
    """The arrays under a prefix as tensors, without it."""
    return {k[len(prefix) :]: torch.from_numpy(v) for k, v in arrays.items() if k.startswith(prefix)}


def read_settings(arrays: Arrays) -> dict[str, Any]:
    """The settings that a file was made with."""
    found: dict[str, Any] = json.loads(str(arrays["settings"]))
    return found


def encoder_sizes(settings: Mapping[str, Any], **own: Any) -> dict[str, Any]:
    """Arguments of the frame encoder of a file: no registers, no LayerScale."""
    names = {"num_heads": "heads", "patch_size": "patch", "image_size": "image"}
    sizes = {ours: settings[theirs] for ours, theirs in (names | {"dim": "dim", "depth": "depth"}).items()}
    return sizes | {"num_registers": 0, "layer_scale": None} | own


class Check(NamedTuple):
    """How a golden file is compared."""

    compare: Callable[[Any], Iterator[Deviation]]
    key: str = ""
    """A key that tells the file from others of its name."""
    left_out: str = ""
    """What of it is not compared."""


def take_step(
    model: Method, settings: Mapping[str, Any], rates: dict[str, float], last: bool = True, **own: Any
) -> None:
    """Clip and AdamW with the golden settings; where not `last`, prototypes stay."""
    betas, eps = tuple(settings["betas"]), settings["eps"]
    adamw = OptimConfig(clip=settings["clip"], betas=betas, eps=eps, **own)
    optimizer = optim.Optimizer(model.parts(), adamw, settings["depth"])
    optimizer.clip()
    lr = settings["lr"]
    every = dict.fromkeys(("backbone", "head", "last_layer"), lr) | rates
    optimizer.step(optim.StepValues(lr, every, last, settings["weight_decay"], {}))


SMALL = {"vit.dim": 16, "vit.depth": 1, "vit.num_heads": 1, "head.hidden": 8, "head.prototypes": 8}


def logged_values(
    name: str, changes: dict[str, Any], steps_per_epoch: int, count: int
) -> list[dict[str, float]]:
    """What a recipe, its networks made small by the changes, logs of its first steps."""
    config = recipe(name, changes)
    schedule = optim.build_schedule(config, methods.build(config), steps_per_epoch=steps_per_epoch)
    return [schedule.at(step).logged() for step in range(count)]
