"""Encoders for elsewhere: one file or folder that torch, timm, transformers or an ONNX runtime loads."""

import copy
import io
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from tcore.data.render import MEAN, STD
from tcore.errors import InputError
from tcore.evaluation.checkpoints import read_file, to_hf, to_timm
from tcore.evaluation.encoder import Encoder
from tcore.evaluation.encoders import DEFAULT, shipped
from tcore.evaluation.export_onnx import write_onnx
from tcore.files import TEMPORARY, atomic, read_json, write_bytes, write_text
from tcore.model.vit import VisionTransformer
from tcore.model.weights import CARD_FORMAT, save_safetensors

Format = Literal["safetensors", "torch", "timm", "hf", "onnx"]
FORMATS: tuple[Format, ...] = get_args(Format)
# Formats that are a file, by its ending; the others are a folder.
ENDINGS: dict[str, Format] = {".safetensors": "safetensors", ".pth": "torch", ".pt": "torch", ".onnx": "onnx"}
# A line of Python that loads what was written.
LOAD: dict[Format, str] = {
    "safetensors": 'import tcore; encoder = tcore.load_encoder("{}")',
    "torch": 'import tcore; encoder = tcore.load_encoder("{}")',
    "timm": 'import timm; model = timm.create_model("local-dir:{}", pretrained=True)',
    "hf": 'from transformers import AutoModel; model = AutoModel.from_pretrained("{}")',
    "onnx": 'import onnxruntime; session = onnxruntime.InferenceSession("{}")',
}


class Exported(NamedTuple):
    """What was written: its size, how to load it elsewhere, and what was checked or lost."""

    path: Path
    size: int
    load: str
    notes: tuple[str, ...]


def export(encoder: Encoder, out: str | Path, format: Format) -> Exported:
    """Write an encoder in a format of other software; an `out` that exists is refused.

    >>> import tempfile, tcore
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     done = export(tcore.load_encoder("random:vitti16"), folder + "/vit.safetensors", "safetensors")
    ...     tcore.load_encoder(done.path).backbone.num_heads
    3
    """
    out, vit = Path(out), _own_network(encoder)
    check_out(out, format)
    if vit.reach is not None and format in ("timm", "hf"):
        raise InputError(
            f"--format {format} has no attention limited to {vit.reach} patches, as in {encoder.name}: "
            "use safetensors, torch or onnx, or add --reach everywhere."
        )
    notes = _write(vit, out, format)
    files = [out] if out.is_file() else list(out.iterdir())
    return Exported(out, sum(path.stat().st_size for path in files), LOAD[format].format(out), notes)


def check_out(out: Path, name: str | None) -> Format:
    """The format of that name or ending; a place that does not suit it is refused."""
    by_ending = ENDINGS.get(out.suffix)
    format = next((known for known in FORMATS if known == (by_ending or name)), None)
    if format is None or name not in (None, format) or (format in ENDINGS.values()) != bool(by_ending):
        raise InputError(
            f"{out} {f'with --format {name}' if name else 'without --format'}: a file ends in "
            f"{', '.join(ENDINGS)}, a folder needs --format timm or hf."
        )
    if out.exists() or out.is_symlink():
        raise InputError(f"{out} exists: remove it, or choose another name.")
    return format


def _own_network(encoder: Encoder) -> VisionTransformer:
    if not isinstance(encoder.backbone, VisionTransformer):
        raise InputError(f"encoder {encoder.name} runs in the code of another package, which can save it.")
    return encoder.backbone


def _write(vit: VisionTransformer, out: Path, format: Format) -> tuple[str, ...]:
    """Write the file or folder; what a user should know about it."""
    state, sizes = {name: value.cpu() for name, value in vit.state_dict().items()}, vit.sizes()
    if format == "safetensors":
        about = {"format": "pt", "num_heads": str(sizes["num_heads"]), "vit": json.dumps(sizes)}
        save_safetensors(state, out, about)
    elif format == "torch":
        buffer = io.BytesIO()
        torch.save({"vit": sizes, "state_dict": state}, buffer)
        write_bytes(out, buffer.getvalue())
    elif format == "onnx":
        with atomic(out) as temporary:
            return (write_onnx(copy.deepcopy(vit).cpu(), temporary, sizes),)
    elif format == "timm":
        with new_folder(out) as folder:
            _write_folder(folder, to_timm(state), timm_config(sizes), sizes)
        return ("left out: the mask token, which only training uses",)
    else:
        with new_folder(out) as folder:
            _write_folder(folder, to_hf(state), hf_config(sizes), sizes)
            _write_json(folder / "preprocessor_config.json", hf_preprocessor())
        return ("loads as Dinov2WithRegistersModel",)
    return ()


def _write_folder(folder: Path, weights: dict[str, Tensor], config: dict[str, Any], sizes: Any) -> None:
    save_safetensors(weights, folder / "model.safetensors", {"format": "pt"})
    # This entry identifies our own folders: other models have other code behind the same names.
    _write_json(folder / "config.json", config | {"tcore": {"vit": sizes}})


def _write_json(path: Path, values: dict[str, Any]) -> None:
    write_text(path, json.dumps(values, indent=2) + "\n")


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A temporary folder beside `path` that takes its name when the block ends without an error."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}{TEMPORARY}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        temporary.mkdir()
        yield temporary
        temporary.replace(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def timm_config(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a timm folder; `model_args` are the arguments of timm's VisionTransformer."""
    return {
        "architecture": "vit_small_patch16_224",  # any plain one: model_args override what differs
        "num_classes": 0,
        "num_features": sizes["dim"],
        "global_pool": "token",
        "model_args": {
            "img_size": sizes["image_size"],
            "patch_size": sizes["patch_size"],
            "embed_dim": sizes["dim"],
            "depth": sizes["depth"],
            "num_heads": sizes["num_heads"],
            "num_classes": 0,
            "reg_tokens": sizes["num_registers"],
            "no_embed_class": True,  # neither CLS nor registers have a position
            "init_values": 1.0,  # with LayerScale; its gains are in the file
            "dynamic_img_size": True,
        },
        "pretrained_cfg": {
            "input_size": [3, sizes["image_size"], sizes["image_size"]],
            "num_classes": 0,
            "mean": list(MEAN),
            "std": list(STD),
            "interpolation": "bicubic",
            "crop_pct": 1.0,
            "first_conv": "patch_embed.proj",
            "classifier": "head",
        },
    }


def hf_config(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a transformers folder; what it does not name is transformers' own default."""
    return {
        "architectures": ["Dinov2WithRegistersModel"],
        "model_type": "dinov2_with_registers",
        "hidden_size": sizes["dim"],
        "num_hidden_layers": sizes["depth"],
        "num_attention_heads": sizes["num_heads"],
        "image_size": sizes["image_size"],
        "patch_size": sizes["patch_size"],
        "num_register_tokens": sizes["num_registers"],
    }


def hf_preprocessor() -> dict[str, Any]:
    """The preprocessor_config.json: scale and normalize; the caller resizes to whole patches."""
    return {
        "image_processor_type": "BitImageProcessor",
        "do_resize": False,
        "do_center_crop": False,
        "image_mean": list(MEAN),
        "image_std": list(STD),
    }


def ship(encoder: Encoder, folder: Path) -> list[Path]:
    """Write an encoder as the default one: half-precision weights, card, matching module of its run.

    A file in the way is refused; each is written at once or not at all, the weights last.
    """
    if encoder.name == DEFAULT:
        raise InputError(f"{DEFAULT} is in that form already; a run folder of that name is ./{DEFAULT}.")
    vit, source, files = _own_network(encoder), Path(encoder.name), shipped(folder)
    for path in files:
        if path.exists():
            raise InputError(f"{path} exists: remove it, or choose another folder.")
    run = _run_of(source)
    weights = half(vit.state_dict(), encoder.name)
    card = _card(source, run) | {"format": CARD_FORMAT, "vit": vit.sizes(), "precision": "fp16"}
    written = [files.weights, files.card]
    if run is not None and (run / "matching.safetensors").is_file():
        tensors = read_file(run / "matching.safetensors")
        save_safetensors(half(tensors, str(run / "matching.safetensors")), files.matching)
        written.append(files.matching)
        # The module is from the end of the run, whichever step the encoder is from.
        card["matching_step"] = read_json(run / "encoder.json").get("step")
    _write_json(files.card, card)
    save_safetensors(weights, files.weights)
    return written


def half(weights: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """Weights in half precision; one beyond its range is refused."""
    found = {name: value.detach().to(torch.float16) for name, value in weights.items()}
    for name, value in found.items():
        if not torch.isfinite(value).all():
            largest = float(weights[name].abs().max())
            raise InputError(f"{name} of {source} reaches {largest:g}: half precision ends at 65504.")
    return found


def _run_of(source: Path) -> Path | None:
    """The run that an encoder is from: the folder itself, or one that its file is in."""
    if not source.exists():  # random:vitti16
        return None
    folders = (source, source.parent, source.parent.parent)
    files = ("config.json", "encoder.safetensors")
    return next((path for path in folders if all((path / name).is_file() for name in files)), None)


def _card(source: Path, run: Path | None) -> dict[str, Any]:
    """What is known about the encoder: the card beside its file, or that of its run."""
    cards = [source.with_suffix(".json")] if source.is_file() else []
    cards += [run / "encoder.json"] if run is not None else []
    card = next((path for path in cards if path.is_file()), None)
    values: dict[str, Any] = {} if card is None else dict(read_json(card))
    if values and (kept := re.fullmatch(r"step-(\d+)", source.stem)):  # kept during training, without a card
        values["step"] = int(kept[1])
    return values
