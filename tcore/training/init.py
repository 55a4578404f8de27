"""Starting a run from the weights of an encoder instead of random ones (`--init`)."""

import json
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tcore.config import Config
from tcore.errors import InputError
from tcore.evaluation.encoders import load_encoder
from tcore.files import read_json, write_text
from tcore.model.tcore import TCoRe
from tcore.model.vit import VisionTransformer
from tcore.training import distributed
from tcore.training.wrapping import load_weights

RECORD = "init.json"


class Init(NamedTuple):
    """Weights to start from, sized for the run, and what they are."""

    spec: str
    fingerprint: str
    state: dict[str, Tensor]
    lines: list[str]


def read_init(config: Config) -> Init | None:
    """The weights of `init`, checked against the sizes of the run; None where none is asked for."""
    if config.init is None:
        return None
    encoder = load_encoder(config.init)
    vit = encoder.backbone
    if not isinstance(vit, VisionTransformer):
        raise InputError(
            f"init={config.init} runs in the code of another package, whose weights are not ours to train: "
            "give a run, a checkpoint file or an exported folder."
        )
    _check_sizes(vit, config)
    state = dict(vit.state_dict())
    grid = config.views.global_size // config.vit.patch_size
    lines = [f"starts from {config.init} (weights {encoder.fingerprint()}), student and teacher"]
    lines += [f"  {line}" for line in encoder.report.splitlines() if line.startswith("not in the file")]
    if grid != vit.native_grid:
        with torch.no_grad():
            state["pos_embed"] = vit.positions(grid, grid).clone()
        was = vit.native_grid
        lines.append(f"  positions resized from {was}x{was} to {grid}x{grid}, as the encoder itself does")
    if vit.reach != config.vit.reach:
        both = (vit.reach, config.vit.reach)
        before, after = ("everywhere" if reach is None else f"{reach} patches far" for reach in both)
        lines.append(f"  its patches looked {before}, and will look {after} (--vit.reach)")
    return Init(config.init, encoder.fingerprint(), state, lines)


def _check_sizes(vit: VisionTransformer, config: Config) -> None:
    """Refuse an encoder of another size, with the settings that would fit it."""
    found = {
        "dim": vit.dim,
        "depth": vit.depth,
        "num_heads": vit.num_heads,
        "patch_size": vit.patch_size,
        "num_registers": vit.num_registers,
    }
    wanted = {name: getattr(config.vit, name) for name in found}
    differing = [name for name in found if found[name] != wanted[name]]
    if differing:
        listed = ", ".join(f"vit.{name} {found[name]} instead of {wanted[name]}" for name in differing)
        flags = " ".join(f"--vit.{name.replace('_', '-')} {found[name]}" for name in differing)
        raise InputError(f"init={config.init} does not fit, it has {listed}: add {flags}.")


def apply_init(init: Init, model: TCoRe) -> None:
    """Copy the weights into the backbones of student and teacher."""
    state = distributed.from_first(lambda: init.state)
    load_weights(model.student.backbone, state)
    load_weights(model.teacher.backbone, state)


def record_init(init: Init, run: Path) -> None:
    """Note in the run folder what it starts from; a run that was stopped at once begins with the same."""
    path = run / RECORD
    if path.is_file():
        try:
            was = read_json(path)["fingerprint"]
        except (InputError, KeyError, TypeError) as error:
            raise InputError(f"cannot read {path}: {error!r}; remove {run} to begin anew.") from error
        if was != init.fingerprint:
            raise InputError(
                f"run {run} began with other weights of {init.spec} (fingerprint {was}, now "
                f"{init.fingerprint}): restore them, or give another --run."
            )
    write_text(path, json.dumps({"encoder": init.spec, "fingerprint": init.fingerprint}, indent=2) + "\n")
