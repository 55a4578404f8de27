"""Checkpoint files read safely, and their key names: from other projects to ours, and from ours to others."""

import argparse
import json
import math
import re
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn

from tcore.data.render import MEAN, STD
from tcore.errors import InputError
from tcore.files import open_regular
from tcore.model.clips import absorb, fold_tube
from tcore.model.positions import grid_positions, line_positions
from tcore.text import list_some

Weights = dict[str, Tensor]
NetworkName = Literal["teacher", "student"]

# Entries of a file that hold the weights, the better choice first.
ENTRIES = ("teacher", "state_dict", "model", "student")
# What parallel and compiled training inserts into names, and what it puts in front of them.
WRAPPING = re.compile(r"(_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)\.")
PREFIX = re.compile(r"^((module|teacher|student|backbone|base_encoder)\.)+")
# Parts of a checkpoint that no encoder needs; anything else that is not ours is an error.
NOT_NEEDED = re.compile(
    r"(head|dino_head|ibot_head|momentum_encoder|predictor)\.|decoder_|to_(prior|posterior)\.|"
    r"(\w+_loss\.)?cent(er|re)\w*$"
)
# Names of iBOT and timm that differ from ours.
RENAMED = {
    r"(^|\.)masked_embed$": r"\1mask_token",
    r"(^|\.)reg_token$": r"\1register_tokens",
    r"\.gamma_([12])$": r".ls\1.gamma",
}
BLOCK = re.compile(r"blocks\.(?:(\d+)\.)?(\d+)\.(?=\D)")
# Heads are 64 wide, but for ViT-H: 16 heads of 80. Weights do not tell; MoCo v3's ViT-S has 12 heads of 32.
HEADS = {1280: 16}
MOCO_HEADS = {384: 12}
# Our names in the published checkpoints of transformers' DINOv2; other names inside a block are the same.
HF_NAMES = (
    ("cls_token", "embeddings.cls_token"),
    ("pos_embed", "embeddings.position_embeddings"),
    ("register_tokens", "embeddings.register_tokens"),
    ("mask_token", "embeddings.mask_token"),
    ("patch_embed.proj.", "embeddings.patch_embeddings.projection."),
    ("blocks.", "encoder.layer."),
    (".attn.proj.", ".attention.output.dense."),
    (".attn.qkv.", ".attention.attention.query."),
    (".ls1.gamma", ".layer_scale1.lambda1"),
    (".ls2.gamma", ".layer_scale2.lambda1"),
    ("norm.", "layernorm."),
)
RESIZES = {
    "size": "bicubic with antialias, as in our own encoder",
    "factor": "bicubic by a factor without antialias, as their authors evaluate",
    "exact": "by their formula",
}


class Checkpoint(NamedTuple):
    """A translated checkpoint: arguments of VisionTransformer, its weights, and what was found."""

    sizes: dict[str, Any]
    state: Weights
    report: str


def read_file(path: Path) -> dict[str, Any]:
    """Tensors and plain values of a file; one that would have to run code is refused."""
    try:
        if path.suffix == ".safetensors":
            return _read_safetensors(path)
        _refuse_compression(path)
        # Training scripts store their command line beside the weights, as a Namespace of plain values.
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with open_regular(path) as file:
                loaded = torch.load(file, map_location="cpu", weights_only=True)
    except InputError:
        raise
    except (SafetensorError, RuntimeError, OSError) as error:
        raise InputError(f"cannot read {path}: {str(error).partition('. ')[0].rstrip('.')}.") from error
    except Exception as error:  # a file that is not a checkpoint can raise anything
        if found := re.search(r"GLOBAL ([\w.]+)", str(error)):
            raise InputError(
                f"{path} holds Python objects ({found[1]}) that could run code, so it is not opened: "
                "if you trust it, save its weights alone with torch.save(model.state_dict(), ...)."
            ) from error
        raise InputError(f"{path} is not a checkpoint, or truncated: torch.load cannot read it.") from error
    if not isinstance(loaded, Mapping):
        raise InputError(f"{path} holds a {type(loaded).__name__}, not a dict of weights.")
    return dict(loaded)


def _read_safetensors(path: Path) -> dict[str, Any]:
    # Read, not mapped: a mapped file that is cut off while its weights are in use ends the process (SIGBUS).
    with open_regular(path) as file:
        data = file.read()
    tensors = dict(sorted(load(data).items()))
    about = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]).get("__metadata__", {})
    if "num_heads" not in about:
        return tensors
    return tensors | {"vit": {"num_heads": int(about["num_heads"])} | json.loads(about.get("vit", "{}"))}


def _refuse_compression(path: Path) -> None:
    """Refuse an archive that unpacks to more than its own size: torch never compresses."""
    if path.is_file() and zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            inside = sum(part.file_size for part in archive.infolist())
        if inside > path.stat().st_size:
            raise InputError(f"{path} is smaller than the {inside} bytes it would unpack to: not opened.")


def translate(
    loaded: Mapping[str, Any],
    source: str,
    card: Mapping[str, Any] | None = None,
    *,
    heads: int | None = None,
    network: NetworkName = "teacher",
) -> Checkpoint:
    """Translate a checkpoint to our names; unknown names stay, and strict loading refuses them.

    Sizes come from the shapes of the weights, and from what the file or a card beside it declares. Weights
    do not tell the number of `heads`. `network` is which one is wanted of a file that holds two.
    """
    entry, weights = _find_weights(loaded, source, network)
    _refuse_hollow(weights, source)
    moco = any("base_encoder." in name for name in weights)
    bare = _bare_names(encoder_part(weights), source, network)
    left_out, weights = len(weights) - len(bare), _number_blocks(bare, source)
    weights, known, notes = unify(weights)
    vit = loaded.get("vit") if card is None else card
    declared = dict(vit) if isinstance(vit, Mapping) else {}
    if heads is not None and heads != declared.get("num_heads", heads):
        raise InputError(f"heads {heads} of {source}: it was trained with {declared['num_heads']}.")
    dim = weights["cls_token"].shape[-1] if "cls_token" in weights else 0
    if heads is None and moco and "num_heads" not in declared and dim in MOCO_HEADS:
        heads = MOCO_HEADS[dim]
        notes.append(f"{heads} heads, as MoCo v3's ViT-S: weights do not tell, --heads sets another number")
    if not declared and _resized_by_factor(weights):
        known = {"position_resize": "factor"} | known
    sizes = _sizes(weights, known | declared | ({} if heads is None else {"num_heads": heads}), source)
    state = {name: value.float() for name, value in weights.items()}
    filled = _fill_in(state, sizes)
    stored = {str(value.dtype).removeprefix("torch.") for value in weights.values()} - {"float32"}
    found = {
        f"weights{f' of {entry}' if entry else ''}": [f"{name} {value}" for name, value in sizes.items()],
        "left out": [f"{left_out} keys of heads, decoder or another network"] if left_out else [],
        "not in the file": filled,
        "converted to float32 from": sorted(stored),
        "of its method": notes,
        "positions on other grids": [RESIZES[sizes.get("position_resize", "size")]],
    }
    report = "\n".join(f"{title}: {', '.join(items)}" for title, items in found.items() if items)
    return Checkpoint(sizes, state, report)


def load_strictly(module: nn.Module, state: dict[str, Tensor], source: Path) -> None:
    """Load weights; missing, unexpected or misshapen ones are an error that lists and counts them."""
    expected = {name: tuple(value.shape) for name, value in module.state_dict().items()}
    found = {name: tuple(value.shape) for name, value in state.items()}
    problems = [f"missing {name}" for name in expected if name not in found]
    problems += [f"unexpected {name}" for name in found if name not in expected]
    problems += [
        f"{name} is {shape}, expected {expected[name]}"
        for name, shape in found.items()
        if shape != expected.get(name, shape)
    ]
    refuse_problems(problems, str(source))
    module.load_state_dict(state)


def refuse_problems(problems: Sequence[str], source: str) -> None:
    """Refuse weights if some of them do not fit."""
    if problems:
        raise InputError(
            f"weights of {source} do not fit, {len(problems)} keys: {list_some(problems, 10, '; ')}."
        )


def _resized_by_factor(weights: Weights) -> bool:
    """Whether authors evaluate with positions resized by a factor, as of DINO, iBOT, CrOC and DINOv2.

    With registers (T-CoRe, later DINOv2) they go to the size with antialias, as timm's, which leave out CLS.
    """
    positions = weights.get("pos_embed")
    own_class = positions is not None and math.isqrt(positions.shape[-2]) ** 2 != positions.shape[-2]
    return own_class and "register_tokens" not in weights


def _find_weights(loaded: Mapping[str, Any], source: str, network: NetworkName) -> tuple[str, Weights]:
    """The entry that holds the weights, and those weights."""
    entry, inner = "", loaded
    wanted = ENTRIES if network == "teacher" else ENTRIES[::-1]
    while not any(str(name).endswith("patch_embed.proj.weight") for name in inner):
        nested = next((name for name in wanted if isinstance(inner.get(name), Mapping)), None)
        if nested is None:
            raise InputError(
                f"{source} holds no weights of a Vision Transformer (no patch_embed.proj.weight), but "
                f"{list_some(list(inner), 10) or 'nothing'}."
            )
        entry, inner = f"{entry}.{nested}".lstrip("."), inner[nested]
    if network == "student" and "student" not in entry and not any("student." in str(x) for x in inner):
        raise InputError(f"{source} holds no student beside its teacher: leave --network out.")
    return entry, {str(name): value for name, value in inner.items() if isinstance(value, Tensor)}


def _refuse_hollow(weights: Weights, source: str) -> None:
    """Refuse tensors that announce more numbers than the file holds, or are stored in an unusual way."""
    for name, value in weights.items():
        if (
            value.layout != torch.strided
            or value.is_quantized
            or value.numel() * value.element_size() > value.untyped_storage().nbytes()
        ):
            raise InputError(f"{source}: {name} of shape {tuple(value.shape)} holds fewer numbers than that.")


def _bare_names(weights: Weights, source: str, network: NetworkName) -> Weights:
    """The weights that an encoder needs, by their names within it."""
    bare: Weights = {}
    unwrapped = [(WRAPPING.sub("", name).removeprefix("module."), value) for name, value in weights.items()]
    other = "student." if network == "teacher" else "teacher."
    has_both = any(name.startswith(f"{network}.") for name, _ in unwrapped)
    for full, value in unwrapped:
        name = PREFIX.sub("", full)
        for theirs, ours in RENAMED.items():
            name = re.sub(theirs, ours, name)
        # The mask token of an MAE belongs to its decoder; ours, of the encoder's width, has two dimensions.
        mae = name == "mask_token" and value.ndim == 3
        if mae or NOT_NEEDED.match(name) or (has_both and full.startswith(other)):
            continue
        if name in bare:
            raise InputError(f"{source} holds {name} twice, under different names.")
        bare[name] = value
    return bare


def _number_blocks(weights: Weights, source: str) -> Weights:
    """Undo chunked names: in blocks.CHUNK.i, i counts on over the chunks or starts again in each."""
    matches = {name: match for name in weights if (match := BLOCK.match(name))}
    places = {(int(match[1] or 0), int(match[2])) for match in matches.values()}
    size = 1 + max((i for _, i in places), default=-1)
    starts_again = len({i for _, i in places}) < len(places)
    number = {(chunk, i): chunk * size + i if starts_again else i for chunk, i in places}
    if not places or sorted(number.values()) != list(range(len(places))):
        raise InputError(f"{source} has blocks {list_some(sorted(number.values()), 10)}: some are missing.")
    return {
        f"blocks.{number[int(match[1] or 0), int(match[2])]}.{name[match.end() :]}"
        if (match := matches.get(name))
        else name: value
        for name, value in weights.items()
    }


def _sizes(weights: Weights, declared: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Arguments of VisionTransformer: as declared, the others from the shapes of the weights."""
    for name, ndim in {"patch_embed.proj.weight": 4, "pos_embed": 3}.items():
        if name not in weights or weights[name].ndim != ndim:
            found = f"has shape {tuple(weights[name].shape)}" if name in weights else "is missing"
            raise InputError(f"{source}: {name} {found}; an image encoder has one of {ndim} dimensions.")
    dim, channels, height, width = weights["patch_embed.proj.weight"].shape
    if channels != 3 or height != width:
        raise InputError(f"{source}: patches of {channels}x{height}x{width} are not square RGB patches.")
    if dim not in HEADS and dim % 64 and "num_heads" not in declared:
        raise InputError(f"{source}: the number of heads is unknown, width {dim} is not a multiple of 64.")
    positions = weights["pos_embed"].shape[1]
    # Some files give the CLS token no position of its own.
    grid = math.isqrt(positions)
    if positions not in (grid**2, grid**2 + 1):
        raise InputError(f"{source}: {positions} positions are not CLS and a square grid.")
    registers = weights.get("register_tokens")
    return {
        "dim": dim,
        "depth": 1 + max(int(match[2]) for name in weights if (match := BLOCK.match(name))),
        "num_heads": HEADS.get(dim, dim // 64),
        "patch_size": height,
        "image_size": grid * height,
        "num_registers": 0 if registers is None else registers.shape[1] if registers.ndim == 3 else 1,
        # Without LayerScale the gains are 1, and multiplying by 1 changes nothing.
        "layer_scale": 1.0,
    } | dict(declared)


def _fill_in(state: Weights, sizes: dict[str, Any]) -> list[str]:
    """Add what the format lacks, so that the result stays the same; say what was added."""
    dim, filled = state["patch_embed.proj.weight"].shape[0], []
    blocks = {match[0] for name in state if (match := BLOCK.match(name))}
    scaled = any(".ls1." in name or ".ls2." in name for name in state)
    if not scaled and sizes["layer_scale"] is not None:
        state.update({f"{block}ls{half}.gamma": torch.ones(dim) for block in blocks for half in (1, 2)})
        filled.append("LayerScale (1)")
    if "register_tokens" not in state:
        state["register_tokens"] = torch.zeros(1, 0, dim)
    if "mask_token" not in state:
        state["mask_token"] = torch.zeros(1, dim)
        filled.append("mask token (0)")
    positions = state["pos_embed"]
    if sizes.get("class_token", True) and math.isqrt(positions.shape[1]) ** 2 == positions.shape[1]:
        state["pos_embed"] = torch.cat([torch.zeros_like(positions[:, :1]), positions], dim=1)
        filled.append("position of CLS (0)")
    return filled


def to_timm(state: Mapping[str, Tensor]) -> Weights:
    """Weights for timm, whose positions are those of the grid alone: that of CLS is added to its token."""
    named = {name: value for name, value in state.items() if name not in ("mask_token", "register_tokens")}
    named["cls_token"] = state["cls_token"] + state["pos_embed"][:, :1]
    named["pos_embed"] = state["pos_embed"][:, 1:]
    if state["register_tokens"].shape[1]:  # without registers timm has no such parameter
        named["reg_token"] = state["register_tokens"]
    return named


def to_hf(state: Mapping[str, Tensor]) -> Weights:
    """Weights for transformers' Dinov2WithRegistersModel, which has three projections where we have one."""
    named: Weights = {}
    for name, value in state.items():
        for ours, theirs in HF_NAMES:
            name = name.replace(ours, theirs)
        parts = _projections(name) if ".query." in name else [name]
        named |= dict(zip(parts, value.chunk(len(parts)), strict=True))
    return named


def from_hf(named: Mapping[str, Any]) -> dict[str, Any]:
    """The weights that `to_hf` named; unknown names stay, and strict loading refuses them."""
    state = dict(named)
    for name in [name for name in named if ".query." in name]:
        parts = _projections(name)
        # What does not go together stays apart, to be listed by strict loading.
        if len({state[part].shape if part in state else None for part in parts}) == 1:
            state[name] = torch.cat([state.pop(part) for part in parts])
    for ours, theirs in reversed(HF_NAMES):
        state = {name.replace(theirs, ours): value for name, value in state.items()}
    return state


def _projections(name: str) -> list[str]:
    return [name.replace(".query.", f".{part}.") for part in ("query", "key", "value")]


# Released checkpoints of methods that reconstruct pixels, as encoders of frames. MAE, RC-MAE, SiamMAE,
# CropMAE and RSP have the names of a Vision Transformer; DropMAE has vectors of time and no class token;
# VideoMAE and MAE-ST have tubes, which fold exactly: a frame is repeated over the first.

IMAGE_SIZE = 224  # that all of them are released for; VideoMAE's positions are not in its files
MAE_ST = (0.45, 0.225)  # mean and deviation of the pixels, of all channels
TIME = ("temporal_pos_embed_x", "temporal_pos_embed_z")  # DropMAE's vectors of the first and the second frame
SPACE = ("pos_embed_class", "pos_embed_spatial", "pos_embed_temporal")  # MAE-ST's positions


class Unified(NamedTuple):
    """Weights by the names of a frame encoder, sizes that they imply, and notes on what was done."""

    weights: Weights
    sizes: dict[str, Any]
    notes: list[str]


def encoder_part(weights: Weights) -> Weights:
    """The encoder's weights of a file that holds encoder and decoder side by side (VideoMAE)."""
    inner = re.compile(r"^(module\.)?encoder\.")
    if not any(inner.sub("", name) == "patch_embed.proj.weight" for name in weights if inner.match(name)):
        return weights
    return {inner.sub("", name): value for name, value in weights.items() if inner.match(name)}


def unify(weights: Weights) -> Unified:
    """Fold tubes, time and separate projections into a plain frame encoder; others stay as they are."""
    weights, sizes, notes = _join_projections(weights), dict[str, Any](), list[str]()
    patches = weights.get("patch_embed.proj.weight")
    if patches is None or "blocks.0.norm1.weight" not in weights:
        return Unified(weights, sizes, notes)
    dim, tube = patches.shape[0], patches.ndim == 5
    if all(name in weights for name in SPACE):
        front, space, time = (weights.pop(name) for name in SPACE)
        weights = fold_tube(weights, torch.cat([front, space + time[:, :1]], dim=1))
        notes.append("tubes folded: a frame is repeated over the first one")
        mean, std = torch.tensor(MEAN), torch.tensor(STD)
        weights = absorb(weights, std / MAE_ST[1], (mean - MAE_ST[0]) / MAE_ST[1])
        notes.append(f"pixels normalized by {MAE_ST[0]} and {MAE_ST[1]}, as part of the patch embedding")
    elif tube and "pos_embed" not in weights:
        places = (IMAGE_SIZE // patches.shape[-1]) ** 2
        weights = fold_tube(weights, line_positions(places, dim)[None])
        notes.append("tubes folded: a frame is repeated over the first one, positions by their formula")
    if all(name in weights for name in TIME):
        first = weights.pop(TIME[0]).flatten()
        del weights[TIME[1]]
        weights["patch_embed.proj.bias"] = weights["patch_embed.proj.bias"] + first
        weights["pos_embed"] = weights["pos_embed"][:, 1:]
        notes.append("a frame is the first of two: its vector of time is part of the patch embedding")
    if "cls_token" not in weights and "pos_embed" in weights:
        weights["cls_token"] = torch.zeros(1, 0, dim)
        sizes["class_token"] = False
    for kind in ("grid", "sincos"):
        if _is_fixed(weights.get("pos_embed"), row_first=kind == "sincos"):
            sizes |= {"positions": kind, "position_resize": "factor"}
    return Unified(weights, sizes, notes)


def _join_projections(weights: Weights) -> Weights:
    """One projection of queries, keys and values in place of three, or of biases without the keys'."""
    joined = dict(weights)
    for name, value in weights.items():
        if match := re.fullmatch(r"(.*\.attn\.)q\.(weight|bias)", name):
            parts = [f"{match[1]}{part}.{match[2]}" for part in "qkv"]
            if all(part in joined for part in parts):
                joined[f"{match[1]}qkv.{match[2]}"] = torch.cat([joined.pop(part) for part in parts])
        elif name.endswith(".attn.q_bias") and f"{name[:-6]}v_bias" in joined:
            values = joined.pop(f"{name[:-6]}v_bias")
            del joined[name]
            joined[f"{name[:-6]}qkv.bias"] = torch.cat([value, torch.zeros_like(value), values])
    return joined


def _is_fixed(positions: Tensor | None, row_first: bool) -> bool:
    """Whether positions are the fixed ones of MAE, or of MoCo v3 with the row first."""
    if positions is None or positions.ndim != 3 or positions.shape[2] % 4:
        return False
    side = int(positions.shape[1] ** 0.5)
    if side < 2 or positions.shape[1] not in (side**2, side**2 + 1):
        return False
    fixed = grid_positions(side, side, positions.shape[2], row_first=row_first)
    return bool((positions[0, positions.shape[1] - side**2 :].float() - fixed).abs().max() < 1e-4)
