"""A run folder: checkpoints from which the run resumes exactly, and the encoders that others use.

The newest checkpoints are kept (`keep_last`), with their SHA-256: where one is damaged, another is used.
`--init` starts a run from the weights of an encoder; `init.json` notes which.
"""

import dataclasses
import hashlib
import os
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from tcore.config import Config, VitSpec, differences, load_config, save_config, to_dict
from tcore.errors import InputError, first_line
from tcore.files import LOCKS, TEMPORARY, atomic, open_regular, read_json, sha256, write_json
from tcore.methods.method import Method
from tcore.model.vit import CARD_FORMAT, save_safetensors
from tcore.text import short_path
from tcore.training import distributed
from tcore.training.guard import heartbeat
from tcore.training.optim import Optimizer
from tcore.training.wrapping import load_moments, load_weights

T = TypeVar("T")

CHECKPOINT, CONFIG = "checkpoint.pt", "config.json"
ENCODER, ENCODER_CARD = "encoder.safetensors", "encoder.json"
RECORD = "init.json"


def check_run(run: Path, config: Config) -> None:
    """Refuse a folder that is not a run, or a run with other settings; writes nothing."""
    if (run / CONFIG).is_file():
        found = differences(load_config(run / CONFIG), config)
        if found:
            listed = "; ".join(f"{name} {was} -> {now}" for name, (was, now) in found.items())
            raise InputError(
                f"run {run} was made with other settings ({listed}): "
                "give the same settings to resume it, or another --run."
            )
        return
    # A run that was killed before it began leaves locks and temporary files.
    leftovers = (*LOCKS, TEMPORARY)
    if run.exists() and not (run.is_dir() and all(path.name.endswith(leftovers) for path in run.iterdir())):
        raise InputError(f"{run} exists and is not a run folder (it has no {CONFIG}): choose another --run.")


def open_run(run: Path, config: Config) -> None:
    """Create a run folder, or check that an existing one has the same settings."""
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

    The first process gathers and writes it, so the file does not depend on the number of processes.
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
        write_generation(run / CHECKPOINT, lambda path: save_tensors(state, path), config.keep_last)

    distributed.on_first(write)


def read_state(path: Path, device: torch.device | str) -> Any:
    """What a checkpoint holds: tensors and plain values, nothing that would run."""
    return torch.load(path, map_location=device, weights_only=True)


def load_checkpoint(
    run: Path, method: Method, optimizer: Optimizer, fingerprint: str, say: Callable[[str], None]
) -> int:
    """Restore the last intact checkpoint; returns the number of steps done, 0 without a checkpoint."""
    # The first of several processes reads it and sends the tensors to the others.
    device = next(method.parameters()).device if distributed.alone() else "cpu"

    def read() -> Any:
        state = load_newest(run / CHECKPOINT, lambda path: read_state(path, device), say)
        if state is not None and state["fingerprint"] != fingerprint:
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
    """Read or use a checkpoint; any failure becomes a one-line error."""
    try:
        return use()
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"cannot read checkpoint {path}: {first_line(error)}; remove it to start the run over."
        ) from error


def export(run: Path, step: int, exported: Mapping[str, Mapping[str, Tensor]], config: Config) -> None:
    """Write the encoder for users, its card, and what else the method exports, by file name."""
    for name, weights in exported.items():
        save_safetensors(weights, run / name)
    write_json(run / ENCODER_CARD, encoder_card(config, step), indent=2)


def keep_encoder(run: Path, step: int, method: Method) -> None:
    """Keep the encoder of this step beside the others."""
    weights = distributed.whole(method.encoder().state_dict())
    path = run / "encoders" / f"step-{step:06d}.safetensors"
    distributed.on_first(lambda: save_safetensors(weights, path))


def encoder_card(config: Config, step: int) -> dict[str, Any]:
    """What is needed to build the encoder again, and where it comes from."""
    vit, usual = dataclasses.asdict(config.vit), VitSpec()
    built = ["dim", "depth", "num_heads", "patch_size", "num_registers", "layer_scale"]
    others = ("reach", "position_resize", "positions", "class_token")
    built += [name for name in others if vit[name] != getattr(usual, name)]
    return {
        "format": CARD_FORMAT,
        "vit": {name: vit[name] for name in built} | {"image_size": config.views.global_size},
        "step": step,
        "config": to_dict(config) | {"init": config.init and short_path(config.init)},
        **({"notes": list(config.method.notes)} if config.method.notes else {}),
    }


def save_tensors(state: dict[str, Any], path: Path) -> str:
    """Save with torch, and give the SHA-256; a failed write is an OSError that names its cause."""
    failed: list[OSError] = []
    digest = hashlib.sha256()

    class Sink:
        """Writes to the file, counts the SHA-256, and remembers errors, which torch would hide."""

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


# The newest checkpoints.


def generation(path: Path, age: int) -> Path:
    """Path of a checkpoint: the newest has age 0.

    >>> [generation(Path("checkpoint.pt"), age).name for age in range(3)]
    ['checkpoint.pt', 'checkpoint.previous.pt', 'checkpoint.previous-2.pt']
    """
    name = {0: path.stem, 1: f"{path.stem}.previous"}.get(age, f"{path.stem}.previous-{age}")
    return path.with_name(f"{name}{path.suffix}")


def generations(path: Path) -> list[Path]:
    """The checkpoints that are there, the newest first."""
    ages = range(2 + len(list(path.parent.glob(f"{path.stem}.previous-*{path.suffix}"))))
    return [place for place in (generation(path, age) for age in ages) if place.exists()]


def checksums(path: Path) -> Path:
    """The file with the checksums of all checkpoints."""
    return path.with_suffix(".json")


def has_checkpoint(run: Path) -> bool:
    """Whether there is a checkpoint to resume from."""
    return bool(generations(run / CHECKPOINT))


def write_generation(path: Path, save: Callable[[Path], str], keep: int = 2) -> None:
    """Write a file with `save`, which returns its SHA-256; `keep` - 1 of the existing ones stay."""
    with atomic(path) as temporary:
        digest = save(temporary)
        # Checksums before files: whenever this is interrupted, every file present has its checksum listed.
        known = [digest, *_known(path)]
        write_json(checksums(path), {"sha256": known[: keep + 1]}, indent=2)
        for place in generations(path)[keep:]:
            place.unlink()
        for age in range(keep - 1, 0, -1):
            if generation(path, age - 1).exists():
                generation(path, age - 1).replace(generation(path, age))


def load_newest(path: Path, load: Callable[[Path], T], say: Callable[[str], None]) -> T | None:
    """What the newest intact checkpoint holds; None where there is none. `say` prints warnings.

    A checkpoint is intact if its SHA-256 is listed. Where the list itself is lost or wrong, and no checkpoint
    is listed, the checksums inside the files decide.
    """
    found, known, tried = generations(path), _known(path), []
    listed = [place for place in found if sha256(place) in known]
    for place in listed or found:
        try:
            if not listed:
                _check_zip(place)
            state = load(place)
        except InputError:
            raise
        except Exception as error:
            tried.append(f"{place} ({first_line(error)})")
            continue
        if not listed:
            say(f"warning: {checksums(path)} does not list {place}: verified by its own checksums instead.")
        if place != path:
            _put_aside(path, found, say, place)
        return state
    if found:
        raise InputError(
            f"cannot read checkpoint {' or '.join(tried)}: restore one from a copy, or move "
            f"{'it' if len(tried) == 1 else 'them'} away to start the run over."
        )
    return None


def _put_aside(path: Path, found: list[Path], say: Callable[[str], None], used: Path) -> None:
    """Say that an older checkpoint is used; damaged ones are renamed, so that they replace no intact one."""
    damaged = found[: found.index(used)]
    for place in damaged:
        with suppress(FileNotFoundError):
            place.replace(place.with_name(place.name.replace(path.stem, f"{path.stem}.damaged", 1)))
    what = f"{damaged[0]} is damaged (its checksum differs)" if damaged else f"{path} is missing"
    say(f"warning: {what}: resuming from {used}, an older checkpoint.")


def _check_zip(path: Path) -> None:
    """Refuse a file of torch whose parts do not have the checksums that it lists."""
    with open_regular(path) as file, zipfile.ZipFile(file) as archive:
        if (part := archive.testzip()) is not None:
            raise ValueError(f"{part} is damaged")


def _known(path: Path) -> list[str]:
    """Checksums of the checkpoints, the newest first."""
    try:
        return [str(digest) for digest in read_json(checksums(path))["sha256"]]
    except (InputError, KeyError, TypeError):
        return []


# Weights to start from.


class Init(NamedTuple):
    """Weights to start from, sized for the run, and what they are."""

    spec: str
    fingerprint: str
    state: dict[str, Tensor]
    lines: list[str]


def apply_init(init: Init, method: Method) -> None:
    """Copy the weights into every backbone of the method."""
    state = distributed.from_first(lambda: init.state)
    for backbone in method.backbones():
        load_weights(backbone, state)


def record_init(init: Init, run: Path) -> None:
    """Note in the run folder what it starts from; a restart before the first checkpoint needs the same."""
    path = run / RECORD
    if path.exists():
        was = read_json(path, shape={"fingerprint": str}, remedy=f"remove {run} to start over")["fingerprint"]
        if was != init.fingerprint:
            raise InputError(
                f"run {run} began with other weights of {init.spec} (fingerprint {was}, now "
                f"{init.fingerprint}): restore them, or give another --run."
            )
    write_json(path, {"encoder": init.spec, "fingerprint": init.fingerprint}, indent=2)
