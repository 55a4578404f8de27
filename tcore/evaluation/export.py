"""Encoders for elsewhere: a file or folder for torch, timm, transformers, the hub or an ONNX runtime."""

import copy
import io
import json
import logging
import re
import warnings
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tcore.data.render import MEAN, STD, resampling_matrix
from tcore.errors import InputError, import_package
from tcore.evaluation.checkpoints import read_file, to_hf, to_timm
from tcore.evaluation.encoder import Encoder
from tcore.evaluation.encoders import DEFAULT, find_card, shipped
from tcore.evaluation.hub import check_license, write_hub
from tcore.files import atomic, new_folder, read_json, write_bytes, write_json
from tcore.model.attention import tokens_seen
from tcore.model.vit import CARD_FORMAT, VisionTransformer, save_safetensors
from tcore.text import format_size

Format = Literal["safetensors", "torch", "timm", "hf", "hub", "onnx"]
FORMATS: tuple[Format, ...] = get_args(Format)
# Formats that are a file, by its ending; the others are a folder.
ENDINGS: dict[str, Format] = {".safetensors": "safetensors", ".pth": "torch", ".pt": "torch", ".onnx": "onnx"}
# A line of Python that loads what was written.
LOAD: dict[Format, str] = {
    "safetensors": 'import tcore; encoder = tcore.load_encoder("{}")',
    "torch": 'import tcore; encoder = tcore.load_encoder("{}")',
    "timm": 'import timm; model = timm.create_model("local-dir:{}", pretrained=True)',
    "hf": 'from transformers import AutoModel; model = AutoModel.from_pretrained("{}")',
    "hub": 'import tcore; encoder = tcore.from_pretrained("{}")',
    "onnx": 'import onnxruntime; session = onnxruntime.InferenceSession("{}")',
}
# Of an ONNX graph.
INPUT, OUTPUTS = "images", ("features", "frame")
TOLERANCE = 1e-4  # rounding errors by which two runtimes may differ, relative to the largest feature
LARGEST = 1.999  # GiB of weights: a protocol buffer holds less than 2, graph included
# Scale and normalize; the caller resizes to whole patches.
HF_PREPROCESSOR = {
    "image_processor_type": "BitImageProcessor",
    "do_resize": False,
    "do_center_crop": False,
    "image_mean": list(MEAN),
    "image_std": list(STD),
}


class Exported(NamedTuple):
    """What was written: its size, how to load it elsewhere, and what was checked or lost."""

    path: Path
    size: int
    load: str
    notes: tuple[str, ...]


def export(
    encoder: Encoder, out: str | Path, format: Format, license: str | None = None, results: Path | None = None
) -> Exported:
    """Write an encoder in a format of other software; an `out` that exists is refused.

    The model card of the format hub names the `license`, and has the scores of `results`, a results.json.

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
    if not vit.class_token and format in ("timm", "hf"):
        raise InputError(
            f"--format {format} has no encoder without a class token, as {encoder.name}: "
            "use safetensors, torch or onnx."
        )
    if format != "hub" and (license, results) != (None, None):
        raise InputError("--license and --results are for the model card of --format hub: leave them out.")
    if format == "hub":
        write_hub(encoder, vit, out, check_license(license, encoder.name), results)
        notes: tuple[str, ...] = ("a folder to upload: weights, sizes, and a model card to complete",)
    else:
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
            f"{', '.join(ENDINGS)}, a folder needs --format timm, hf or hub."
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
        return ()
    if format == "torch":
        buffer = io.BytesIO()
        torch.save({"vit": sizes, "state_dict": state}, buffer)
        write_bytes(out, buffer.getvalue())
        return ()
    if format == "onnx":
        with atomic(out) as temporary:
            return (write_onnx(copy.deepcopy(vit).cpu(), temporary, sizes),)
    weights, config = (
        (to_timm(state), timm_config(sizes)) if format == "timm" else (to_hf(state), hf_config(sizes))
    )
    with new_folder(out) as folder:
        save_safetensors(weights, folder / "model.safetensors", {"format": "pt"})
        # This entry identifies our own folders: other models have other code behind the same names.
        write_json(folder / "config.json", config | {"tcore": {"vit": sizes}}, indent=2)
        if format == "hf":
            write_json(folder / "preprocessor_config.json", HF_PREPROCESSOR, indent=2)
    timm_lacks = "left out: the mask token, which only training uses"
    return (timm_lacks if format == "timm" else "loads as Dinov2WithRegistersModel",)


def timm_config(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a timm folder; `model_args` are the arguments of timm's VisionTransformer."""
    side = sizes["image_size"]
    return {
        "architecture": "vit_small_patch16_224",  # any plain one: model_args override what differs
        "num_classes": 0,
        "num_features": sizes["dim"],
        "global_pool": "token",
        "model_args": {
            "img_size": side,
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
            "input_size": [3, side, side],
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
    weights = half(vit.state_dict(), encoder.name)
    card: dict[str, Any] = {}
    file = source / "encoder.safetensors" if source.is_dir() else source
    if file.is_file() and (known := find_card(file)):  # not so for random:vitti16
        card = dict(read_json(known, shape=dict))
        if kept := re.fullmatch(r"step-(\d+)", file.stem):  # kept during training, without a card
            card["step"] = int(kept[1])
    card |= {"format": CARD_FORMAT, "vit": vit.sizes(), "precision": "fp16"}
    written = [files.weights, files.card]
    matching = (file.with_name("matching.safetensors"), file.parent.parent / "matching.safetensors")
    if file.is_file() and (found := next(filter(Path.is_file, matching), None)):
        save_safetensors(half(read_file(found), str(found)), files.matching)
        # The module is from the end of the run, whichever step the encoder is from.
        whole = read_json(found.with_name("encoder.json"), shape=dict)
        write_json(files.matching_card, whole | {"precision": "fp16"}, indent=2)
        written += [files.matching, files.matching_card]
    write_json(files.card, card, indent=2)
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


def whole_matrix(before: int, after: int) -> Float[Tensor, "after before"]:
    """The weights with which a bicubic resize with antialias makes `after` samples of `before`."""
    return resampling_matrix(torch.zeros(1), torch.full((1,), float(before)), before, after)[0]


class GridEncoder(nn.Module):
    """The encoder with its positions resized by two matrix products, which every runtime supports."""

    def __init__(self, vit: VisionTransformer) -> None:
        super().__init__()
        self.vit = vit

    def forward(self, images: Float[Tensor, "b 3 height width"]) -> tuple[Tensor, Tensor]:
        """Features of the patches, as a grid, and of the frame, after the final norm."""
        vit = self.vit
        rows, columns = (side // vit.patch_size for side in images.shape[-2:])
        native, dim, prefix = vit.native_grid, vit.dim, vit.num_prefix
        down, across = (whole_matrix(native, side) for side in (rows, columns))
        grid = down @ vit.pos_embed[0, vit.num_class :].reshape(native, native * dim)
        grid = across @ grid.reshape(rows, native, dim)
        x = vit.patch_embed(images) + grid.reshape(1, rows * columns, dim)
        frame = (vit.cls_token + vit.pos_embed[:, : vit.num_class]).expand(x.shape[0], -1, -1)
        x = torch.cat([frame, vit.register_tokens.expand(x.shape[0], -1, -1), x], dim=1)
        seen = None if vit.reach is None else tokens_seen(vit.reach, rows, columns, prefix, images.device)
        for block in vit.blocks:
            x = block(x, seen=seen)
        x = vit.norm(x)
        return x[:, prefix:].transpose(1, 2).reshape(x.shape[0], dim, rows, columns), (
            x[:, 0] if vit.num_class else x[:, prefix:].mean(dim=1)
        )


def write_onnx(vit: VisionTransformer, path: Path, sizes: dict[str, Any]) -> str:
    """Write the graph to a temporary path and compare it with torch; returns a line about the result."""
    for package in ("onnx", "onnxscript"):
        import_package(package, "--format onnx")
    gib = 4 * sum(p.numel() for p in vit.parameters()) / 2**30
    if gib > LARGEST:
        raise InputError(
            f"an encoder of {gib:.1f} GiB exceeds the 2 GiB of an ONNX file: use another --format."
        )
    model = GridEncoder(vit).eval()
    batch, rows, columns = (torch.export.Dim(name, min=1) for name in ("batch", "rows", "columns"))
    patch, native = vit.patch_size, vit.native_grid
    before = logging.root.manager.disable
    # Without the exporter's warnings and messages about itself.
    with warnings.catch_warnings(action="ignore"), redirect_stdout(io.StringIO()):
        logging.disable(logging.WARNING)
        try:
            program = torch.onnx.export(
                model,
                (torch.zeros(2, 3, patch * (native + 2), patch * (native + 3)),),
                dynamo=True,
                dynamic_shapes={"images": {0: batch, 2: patch * rows, 3: patch * columns}},
                input_names=[INPUT],
                output_names=list(OUTPUTS),
                verbose=False,
            )
        finally:
            logging.disable(before)
    assert program is not None
    told = "images: RGB from 0 to 1, minus mean, over std; sides are multiples of the patch"
    about = {"vit": json.dumps(sizes), "input": told, "mean": json.dumps(MEAN), "std": json.dumps(STD)}
    program.model.metadata_props.update(about)
    program.save(str(path), external_data=False)
    return compare(model, path)


def compare(model: GridEncoder, path: Path) -> str:
    """Compare the file's features with torch's at two sizes; more than a rounding error is refused."""
    try:
        runtime = import_package("onnxruntime", "the check of an ONNX file")
    except InputError as missing:
        return f"not checked: {missing}"
    runtime.set_default_logger_severity(3)
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    patch, native = model.vit.patch_size, model.vit.native_grid
    checked, worst = [], 0.0
    # The native grid, and one that is smaller one way and larger the other; one image, then two.
    for number, (rows, columns) in enumerate(((native, native), (max(1, native // 2), native + 3)), start=1):
        size = format_size(patch * rows, patch * columns)
        generator = torch.Generator().manual_seed(number)
        images = torch.randn(number, 3, patch * rows, patch * columns, generator=generator)
        with torch.no_grad():
            tokens = model.vit(images)
        expected = (tokens.patches.transpose(1, 2).unflatten(2, (rows, columns)), tokens.frame)
        found = session.run(list(OUTPUTS), {INPUT: images.numpy()})
        for name, ours, theirs in zip(OUTPUTS, expected, found, strict=True):
            error = float((torch.from_numpy(theirs) - ours).abs().max() / ours.abs().max().clamp(min=1))
            if not error <= TOLERANCE:
                raise InputError(
                    f"onnxruntime {runtime.__version__} differs from torch by {error:.1e} in the {name} of "
                    f"images of {size}, more than {TOLERANCE:.0e}: nothing was written."
                )
            worst = max(worst, error)
        checked.append(size)
    return f"checked with onnxruntime {runtime.__version__} at {' and '.join(checked)}: within {worst:.1e}"
