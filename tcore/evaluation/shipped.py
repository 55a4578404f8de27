"""The encoder that comes with the package: found by the word `default`, made from a run in half precision."""

import importlib.resources
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save
from torch import Tensor

from tcore.errors import InputError
from tcore.evaluation.checkpoints import read_file
from tcore.evaluation.encoder import Encoder
from tcore.evaluation.export import sizes_of
from tcore.files import read_json, write_bytes, write_text
from tcore.model.vit import VisionTransformer
from tcore.model.weights import CARD_FORMAT

DEFAULT = "default"  # the word; a folder of that name is ./default
FOLDER = Path(str(importlib.resources.files("tcore"))) / "encoders"
WEIGHTS, CARD, MATCHING = "default.safetensors", "default.json", "default-matching.safetensors"


class Shipped(NamedTuple):
    """Files of an encoder that comes with the package."""

    weights: Path
    card: Path
    matching: Path
    """Student backbone and matching module; not every encoder has them."""


def shipped(folder: Path | None = None) -> Shipped | None:
    """The encoder of this installation; None where it came without one."""
    place = folder or FOLDER
    found = Shipped(place / WEIGHTS, place / CARD, place / MATCHING)
    return found if found.weights.is_file() and found.card.is_file() else None


def need_shipped() -> Shipped:
    """The same; an installation without one is told what to do."""
    found = shipped()
    if found is None:
        raise InputError(
            f"this installation came without a default encoder ({FOLDER / WEIGHTS} is not there): train one "
            "with tcore quickstart and give runs/quickstart, or any other encoder."
        )
    return found


def ship(encoder: Encoder, source: str | Path, folder: Path) -> list[Path]:
    """Write an encoder as the default one: weights in half precision, card, matching module of its run.

    A file in the way is refused; each is written at once or not at all, the weights last.
    """
    if source == DEFAULT:
        raise InputError(
            f"{DEFAULT} is in that form already: copy {FOLDER}; a run folder of that name is ./{DEFAULT}."
        )
    vit, run = encoder.backbone, _run_of(Path(source))
    if not isinstance(vit, VisionTransformer):
        raise InputError(f"encoder {encoder.name} runs in the code of another package: it cannot be shipped.")
    there = [folder / name for name in (WEIGHTS, CARD, MATCHING) if (folder / name).exists()]
    if there:
        raise InputError(f"{there[0]} exists: remove it, or choose another folder.")
    weights = half(vit.state_dict(), encoder.name)
    card = _card(Path(source), run) | {"format": CARD_FORMAT, "vit": sizes_of(vit), "precision": "fp16"}
    written = []
    matching = None if run is None else run / "matching.safetensors"
    if matching is not None and matching.is_file():
        tensors = {name: x for name, x in read_file(matching).items() if isinstance(x, Tensor)}
        write_bytes(folder / MATCHING, save(half(tensors, str(matching))))
        written.append(folder / MATCHING)
        # The module is that of the run's end, whichever step the encoder is of.
        card["matching_step"] = read_json(run / "encoder.json").get("step") if run is not None else None
    write_text(folder / CARD, json.dumps(card, indent=2) + "\n")
    write_bytes(folder / WEIGHTS, save(weights))
    return [folder / WEIGHTS, folder / CARD, *written]


def half(weights: dict[str, Tensor], source: str) -> dict[str, Tensor]:
    """Weights in half precision; one that does not fit into it is refused."""
    found = {name: value.detach().cpu().to(torch.float16).contiguous() for name, value in weights.items()}
    for name, value in found.items():
        if not torch.isfinite(value).all():
            largest = float(weights[name].abs().max())
            raise InputError(f"{name} of {source} reaches {largest:g}: half precision ends at 65504.")
    return found


def _run_of(source: Path) -> Path | None:
    """The run that an encoder is from: the folder itself, or where its file lies."""
    if not source.exists():  # random:vitti16
        return None
    for folder in (source, source.parent, source.parent.parent):
        if (folder / "config.json").is_file() and (folder / "encoder.safetensors").is_file():
            return folder
    return None


def _card(source: Path, run: Path | None) -> dict[str, Any]:
    """What is known of the encoder: the card that lies beside its file, or that of its run."""
    cards = [source.with_suffix(".json")] if source.is_file() else []
    cards += [run / "encoder.json"] if run is not None else []
    for card in cards:
        if card.is_file():
            values: dict[str, Any] = dict(read_json(card))
            if kept := re.fullmatch(r"step-(\d+)", source.stem):  # kept along the way, without a card
                values["step"] = int(kept[1])
            return values
    return {}
