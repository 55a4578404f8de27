"""Encoders for elsewhere: one file or folder that torch, timm, transformers or an ONNX runtime loads."""

import copy
import io
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from safetensors.torch import save
from torch import Tensor

from tcore.errors import InputError
from tcore.evaluation import export_names
from tcore.evaluation.encoder import Encoder
from tcore.files import TEMPORARY, atomic, write_bytes, write_text
from tcore.model.vit import VisionTransformer
from tcore.text import did_you_mean

Format = Literal["safetensors", "torch", "timm", "hf", "onnx"]
FORMATS: tuple[Format, ...] = get_args(Format)
# Formats that are a file say so in its name; the others are a folder.
ENDINGS: dict[Format, tuple[str, ...]] = {
    "safetensors": (".safetensors",),
    "torch": (".pth", ".pt"),
    "onnx": (".onnx",),
}
CONFIG, WEIGHTS = "config.json", "model.safetensors"


class Exported(NamedTuple):
    """What was written: its size, how to load it elsewhere, and what was made sure of or lost."""

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
    out = Path(out)
    vit = encoder.backbone
    if not isinstance(vit, VisionTransformer):
        raise InputError(
            f"encoder {encoder.name} runs in the code of another package, which saves it itself: "
            "export takes runs, checkpoints and random:SIZE."
        )
    check_out(out, check_format(format))
    if vit.reach is not None and format in ("timm", "hf"):
        raise InputError(
            f"patches of {encoder.name} look {vit.reach} patches far, and --format {format} lets them look "
            "everywhere: use safetensors, torch or onnx, or add --reach everywhere."
        )
    state = {name: value.detach().cpu().contiguous() for name, value in vit.state_dict().items()}
    sizes = sizes_of(vit)
    notes = _write(vit, state, sizes, out, format)
    files = [out] if out.is_file() else [path for path in out.iterdir() if path.is_file()]
    return Exported(out, sum(path.stat().st_size for path in files), how_to_load(out, format), notes)


def check_format(name: str) -> Format:
    """The format of that name."""
    for format in FORMATS:
        if format == name:
            return format
    raise InputError(f"no format {name!r}: use {', '.join(FORMATS)}.{did_you_mean(name, FORMATS)}")


def check_out(out: Path, format: Format) -> None:
    """Refuse a place or a name that does not go with the format."""
    endings = ENDINGS.get(format)
    if endings and out.suffix not in endings:
        raise InputError(f"{out}: --format {format} is a file that ends in {' or '.join(endings)}.")
    if not endings and any(out.suffix in known for known in ENDINGS.values()):
        raise InputError(f"{out}: --format {format} is a folder, not a {out.suffix} file.")
    if out.exists() or out.is_symlink():
        raise InputError(f"{out} exists: remove it, or choose another name.")


def format_of(out: Path) -> Format:
    """The format that the name of a file stands for."""
    found = next((format for format, endings in ENDINGS.items() if out.suffix in endings), None)
    if found is None:
        raise InputError(f"{out} does not say its format: add --format {'|'.join(FORMATS)}.")
    return found


def sizes_of(vit: VisionTransformer) -> dict[str, int]:
    """The arguments with which VisionTransformer builds this network again."""
    sizes = {
        "dim": vit.dim,
        "depth": vit.depth,
        "num_heads": vit.num_heads,
        "patch_size": vit.patch_size,
        "image_size": vit.native_grid * vit.patch_size,
        "num_registers": vit.num_registers,
    }
    return sizes if vit.reach is None else sizes | {"reach": vit.reach}


def how_to_load(out: Path, format: Format) -> str:
    """One line of Python."""
    if format in ("safetensors", "torch"):
        return f'import tcore; encoder = tcore.load_encoder("{out}")'
    if format == "timm":
        return f'import timm; model = timm.create_model("local-dir:{out}", pretrained=True)'
    if format == "hf":
        return f'from transformers import AutoModel; model = AutoModel.from_pretrained("{out}")'
    return f'import onnxruntime; session = onnxruntime.InferenceSession("{out}")'


def _write(
    vit: VisionTransformer, state: dict[str, Tensor], sizes: dict[str, int], out: Path, format: Format
) -> tuple[str, ...]:
    """Write the file or folder; what a user should know about it."""
    if format == "safetensors":
        about = {"format": "pt", "num_heads": str(sizes["num_heads"]), "vit": json.dumps(sizes)}
        write_bytes(out, save(state, metadata=about))
    elif format == "torch":
        buffer = io.BytesIO()
        torch.save({"vit": sizes, "state_dict": state}, buffer)
        write_bytes(out, buffer.getvalue())
    elif format == "onnx":
        from tcore.evaluation.export_onnx import write_onnx

        with atomic(out) as temporary:
            return (write_onnx(copy.deepcopy(vit).cpu(), temporary, sizes),)
    elif format == "timm":
        with new_folder(out) as folder:
            _write_folder(folder, export_names.to_timm(state), export_names.timm_config(sizes), sizes)
        return ("left out: the mask token, which only training uses",)
    else:
        with new_folder(out) as folder:
            named, config = export_names.to_transformers(state), export_names.transformers_config(sizes)
            _write_folder(folder, named, config, sizes)
            _write_json(folder / "preprocessor_config.json", export_names.transformers_preprocessor())
        return ("loads as Dinov2WithRegistersModel",)
    return ()


def _write_folder(folder: Path, weights: dict[str, Tensor], config: dict[str, Any], sizes: Any) -> None:
    plain = {name: value.contiguous() for name, value in weights.items()}
    write_bytes(folder / WEIGHTS, save(plain, metadata={"format": "pt"}))
    # By this entry we know our own folder again: other models have other code behind the same names.
    _write_json(folder / CONFIG, config | {"tcore": {"vit": sizes}})


def _write_json(path: Path, values: dict[str, Any]) -> None:
    write_text(path, json.dumps(values, indent=2) + "\n")


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A temporary folder beside `path` that takes its name when the block ends well."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}{TEMPORARY}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        temporary.mkdir()
        yield temporary
        temporary.replace(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
