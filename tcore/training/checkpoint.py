"""A run on disk: its checkpoint, from which it goes on exactly, and the encoders that others use."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from tcore.config import Config, VitSpec, differences, load_config, save_config, to_dict
from tcore.errors import InputError
from tcore.files import LOCKS, TEMPORARY, write_text
from tcore.methods.method import Method
from tcore.model.weights import CARD_FORMAT, save_safetensors
from tcore.training import distributed
from tcore.training.generations import newest_intact, write_generation
from tcore.training.guard import heartbeat
from tcore.training.optim import Optimizer
from tcore.training.wrapping import load_moments, load_weights

T = TypeVar("T")

CHECKPOINT, CONFIG = "checkpoint.pt", "config.json"
ENCODER, ENCODER_CARD = "encoder.safetensors", "encoder.json"


def check_run(run: Path, config: Config) -> None:
    """Refuse a folder that is no run, or a run that was made with other settings; nothing is written."""
    if (run / CONFIG).is_file():
        found = differences(load_config(run / CONFIG), config)
        if found:
            listed = "; ".join(f"{name} {was} -> {now}" for name, (was, now) in found.items())
            raise InputError(
                f"run {run} was made with other settings ({listed}): "
                "give the same settings to go on with it, or another --run."
            )
    elif run.exists() and (not run.is_dir() or any(not _passing(path) for path in run.iterdir())):
        raise InputError(f"{run} exists and is no run folder (it has no {CONFIG}): choose another --run.")


def _passing(path: Path) -> bool:
    """Whether a file is what a run leaves that was killed before it began."""
    return path.name in LOCKS or path.name.endswith(TEMPORARY)


def open_run(run: Path, config: Config) -> None:
    """Make a run folder, or make sure that an existing one was made with the same settings."""
    check_run(run, config)
    run.mkdir(parents=True, exist_ok=True)
    for leftover in run.rglob(f".*{TEMPORARY}"):  # of a run that was killed while it wrote
        leftover.unlink()
    if not (run / CONFIG).is_file() or load_config(run / CONFIG) != config:
        save_config(config, run / CONFIG)


def save_checkpoint(
    run: Path, step: int, method: Method, optimizer: Optimizer, config: Config, fingerprint: str
) -> None:
    """Write everything that the next step depends on; encoders first, so that none is missing later.

    The file does not know how many processes there were: the first one writes it, from what all of them hold.
    """
    exported = {ENCODER: distributed.whole(method.encoder().state_dict())}
    for name, module in method.extras().items():
        exported[f"{name}.safetensors"] = distributed.whole(module.state_dict())
    state = {
        "step": step,
        "fingerprint": fingerprint,
        "model": distributed.whole(method.state_dict()),
        "optimizer": distributed.whole(optimizer.adamw.state_dict()),
    }

    def write() -> None:
        export(run, step, exported, config)
        write_generation(run / CHECKPOINT, lambda temporary: save_tensors(state, temporary))

    distributed.on_first(write)


def load_checkpoint(
    run: Path, method: Method, optimizer: Optimizer, fingerprint: str, say: Callable[[str], None]
) -> int:
    """Restore the last checkpoint that is intact; the number of steps it has seen, 0 where there is none."""
    # Processes hand the tensors on in memory.
    device = next(method.parameters()).device if distributed.alone() else "cpu"

    def read() -> Any:
        path = newest_intact(run / CHECKPOINT, say)
        if path is None:
            return None
        state = torch.load(path, map_location=device, weights_only=True)
        if state["fingerprint"] != fingerprint:
            raise InputError(
                f"run {run} was trained on other videos, images or neighbors ({state['fingerprint']}, "
                f"now {fingerprint}): give the same --frames (and neighbors), or another --run."
            )
        return state

    def restore() -> int:
        load_weights(method, state["model"])
        load_moments(optimizer.adamw, state["optimizer"])
        return int(state["step"])

    state = distributed.from_first(lambda: _readable(run / CHECKPOINT, read))
    return 0 if state is None else distributed.together(lambda: _readable(run / CHECKPOINT, restore))


def _readable(path: Path, use: Callable[[], T]) -> T:
    """Read or use a checkpoint; whatever is wrong with it is one line."""
    try:
        return use()
    except InputError:
        raise
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(
            f"cannot read checkpoint {path}: {reason}; remove it to begin the run anew."
        ) from error


def export(run: Path, step: int, exported: Mapping[str, Mapping[str, Tensor]], config: Config) -> None:
    """Write the encoder for users, its card, and what else the method exports, by file name."""
    for name, weights in exported.items():
        save_safetensors(weights, run / name)
    write_text(run / ENCODER_CARD, json.dumps(encoder_card(config, step), indent=2) + "\n")


def keep_encoder(run: Path, step: int, method: Method) -> None:
    """Keep the encoder of this step beside the others."""
    weights = distributed.whole(method.encoder().state_dict())
    path = run / "encoders" / f"step-{step:06d}.safetensors"
    distributed.on_first(lambda: save_safetensors(weights, path))


def encoder_card(config: Config, step: int) -> dict[str, Any]:
    """What is needed to build the encoder again, and where it comes from."""
    vit, usual = dataclasses.asdict(config.vit), VitSpec()
    built = ["dim", "depth", "num_heads", "patch_size", "num_registers", "layer_scale"]
    built += [name for name in ("reach", "position_resize") if vit[name] != getattr(usual, name)]
    return {
        "format": CARD_FORMAT,
        "vit": {name: vit[name] for name in built} | {"image_size": config.views.global_size},
        "step": step,
        "config": to_dict(config),
    }


def save_tensors(state: dict[str, Any], path: Path) -> str:
    """Save with torch, and give the SHA-256; a failed write is an OSError that names its cause."""
    failed: list[OSError] = []
    digest = hashlib.sha256()

    class Sink:
        """Hands bytes to the file and remembers why it could not."""

        def __init__(self, file: Any) -> None:
            self.file = file

        def write(self, data: Any) -> int:
            digest.update(data)
            heartbeat()  # a slow disk is no hang
            try:
                return int(self.file.write(data))
            except OSError as error:
                failed.append(error)
                raise

        def flush(self) -> None:
            self.file.flush()

    try:
        with path.open("wb") as file:
            torch.save(state, Sink(file))  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())
    except (RuntimeError, OSError) as error:
        if not failed:
            raise
        raise OSError(failed[0].errno, failed[0].strerror, str(path)) from error
    return digest.hexdigest()
