"""The student of a run: the backbone that sees masked frames, and the module that matches patches."""

from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file

from tcore.config import from_dict, load_config
from tcore.errors import InputError
from tcore.evaluation.encoders import DEFAULT, load_strictly, shipped
from tcore.files import read_json
from tcore.methods.matching import PatchMatchingModule
from tcore.methods.settings import TCoReSettings
from tcore.methods.tcore import build_matching
from tcore.model.vit import VisionTransformer, build_vit
from tcore.training.checkpoint import CONFIG


class Matcher(NamedTuple):
    """Student backbone and matching module, for figures."""

    backbone: VisionTransformer
    match: PatchMatchingModule


def load_matcher(run: str | Path) -> Matcher | None:
    """Student backbone and matching module of a run folder, or of `default`; None if it has none."""
    if run == DEFAULT:
        file, card = shipped().matching, shipped().card
    else:
        file, card = Path(run) / "matching.safetensors", Path(run) / CONFIG
    if not file.is_file():
        return None
    config = from_dict(read_json(card)["config"], f"{card}: ") if run == DEFAULT else load_config(card)
    assert isinstance(config.method, TCoReSettings)  # no other method writes this file
    with torch.random.fork_rng(devices=[]):
        backbone = build_vit(config.vit, config.views.global_size)
        match = build_matching(config.method, config.vit.dim)
    try:
        weights = load_file(file)
    except Exception as error:
        raise InputError(f"cannot read {file}: {str(error).splitlines()[0]}.") from error
    for module, prefix in ((backbone, "backbone."), (match, "match.")):
        own = {k.removeprefix(prefix): v.float() for k, v in weights.items() if k.startswith(prefix)}
        load_strictly(module, own, file)
        module.eval().requires_grad_(False)
    return Matcher(backbone, match)
