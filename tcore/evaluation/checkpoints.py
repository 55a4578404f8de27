"""Checkpoints of other projects: recognize them by their key names and translate them to ours."""

import argparse
import json
import math
import re
import warnings
import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tcore.errors import InputError

# Where files keep the weights, the better choice first.
ENTRIES = ("teacher", "state_dict", "model", "student")
# What parallel and compiled training puts into names, anywhere; then what stands in front of them.
WRAPPING = re.compile(r"(_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)\.")
PREFIX = re.compile(r"(module|teacher|student|backbone)\.")
# Parts of a checkpoint that no encoder needs; anything else that is not ours is an error.
DISPENSABLE = {
    "projection heads": re.compile(r"(head|dino_head|ibot_head)\."),
    "decoder": re.compile(r"decoder_"),
    "prior and posterior": re.compile(r"to_(prior|posterior)\."),
    "centers": re.compile(r"(\w+_loss\.)?cent(er|re)\w*$"),
}
BLOCK = re.compile(r"blocks\.(?:(\d+)\.)?(\d+)\.(?=\D)")
RENAMED = {
    "masked_embed": "mask_token",
    "reg_token": "register_tokens",
    "gamma_1": "ls1.gamma",
    "gamma_2": "ls2.gamma",
}
# The one usual width whose heads are not 64 wide: ViT-H has 16 heads of 80.
HEADS = {1280: 16}
LAYER_SCALE = "LayerScale (1)"
LISTED = 10

Weights = dict[str, Tensor]


class Checkpoint(NamedTuple):
    """A translated checkpoint: arguments of VisionTransformer, its weights, and what was made of the file."""

    sizes: dict[str, Any]
    state: Weights
    report: str


def read_checkpoint(path: Path, num_heads: int | None = None) -> Checkpoint:
    """Read and translate a .pth, .pt or .safetensors file of any known format."""
    return translate(read_file(path), str(path), num_heads)


def read_file(path: Path) -> dict[str, Any]:
    """What a file holds: tensors and plain values; one that would have to run code is refused."""
    try:
        if path.suffix == ".safetensors":
            with safe_open(str(path), framework="pt") as file:
                about = file.metadata() or {}
                heads = {"num_heads": int(about["num_heads"])} if "num_heads" in about else {}
                known = {"vit": heads | json.loads(about.get("vit", "{}"))} if heads else {}
                return {name: file.get_tensor(name) for name in file.keys()} | known  # noqa: SIM118
        _refuse_compression(path)
        # Training scripts store their command line beside the weights, as a Namespace of plain values.
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except InputError:
        raise
    except (SafetensorError, RuntimeError, OSError) as error:
        raise InputError(f"cannot read {path}: {str(error).partition('. ')[0].rstrip('.')}.") from error
    except Exception as error:  # what is no checkpoint can raise anything
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        if found is not None:
            raise InputError(
                f"{path} holds Python objects ({found[1]}) that could run code, and is not opened: "
                "where you trust it, save its weights alone with torch.save(model.state_dict(), ...)."
            ) from error
        raise InputError(f"{path} is no checkpoint, or cut short: torch.load cannot read it.") from error
    if not isinstance(loaded, Mapping):
        raise InputError(f"{path} holds a {type(loaded).__name__}, not a dict of weights.")
    return dict(loaded)


def _refuse_compression(path: Path) -> None:
    """Refuse an archive whose parts are larger than it: torch never compresses, and a bomb is all of that."""
    if path.is_file() and zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            inside = sum(part.file_size for part in archive.infolist())
        if inside > path.stat().st_size:
            raise InputError(f"{path} is smaller than the {inside} bytes it would unpack to: not opened.")


def refuse_hollow(weights: Mapping[str, Any], source: str) -> None:
    """Refuse tensors that announce more numbers than the file holds, or are stored in an unusual way."""
    for name, value in weights.items():
        if isinstance(value, Tensor) and (
            value.layout != torch.strided
            or value.is_quantized
            or value.numel() * value.element_size() > value.untyped_storage().nbytes()
        ):
            raise InputError(f"{source}: {name} of shape {tuple(value.shape)} holds fewer numbers than that.")


def translate(loaded: Mapping[str, Any], source: str, num_heads: int | None = None) -> Checkpoint:
    """Turn the contents of a foreign checkpoint into our names; unknown keys stay, to be refused."""
    entry, weights, beside = _find_weights(loaded, source)
    refuse_hollow(weights, source)
    weights, left_out = _bare_names(weights, source)
    names = tuple(weights)
    weights = _number_blocks({_renamed(name): value for name, value in weights.items()}, source)
    if len(weights) < len(names):
        raise InputError(f"{source} holds some weights twice, in the names of two formats.")
    # The mask token of an MAE belongs to its decoder; ours, of the encoder's width, has two dimensions.
    if "mask_token" in weights and weights["mask_token"].ndim == 3:
        left_out["mask token of the decoder"] = ["mask_token"]
        del weights["mask_token"]
    sizes = _sizes(weights, num_heads or _declared(loaded, "num_heads"), source)
    if (reach := _declared(loaded, "reach")) is not None:
        sizes["reach"] = reach
    state = {name: value.float() for name, value in weights.items()}
    filled = _fill_in(state, sizes)
    stored = {str(value.dtype).removeprefix("torch.") for value in weights.values()} - {"float32"}
    lines = {
        "left out": [f"{kind} ({len(found)} keys)" for kind, found in left_out.items()],
        "not read": beside,
        "not in the file": filled,
        "turned into float32 from": sorted(stored),
        "positions on other grids": ["bicubic with antialias, whatever the original code does"],
    }
    what = _format(names, left_out, entry, weights)
    report = [_describe(what, entry, sizes, LAYER_SCALE not in filled)]
    report += [f"{title}: {', '.join(items)}" for title, items in lines.items() if items]
    return Checkpoint(sizes, state, "\n".join(report))


def listing(items: Iterable[str]) -> str:
    """The first items of a list, and how many more there are."""
    all_items = list(items)
    more = f"; and {len(all_items) - LISTED} more" if len(all_items) > LISTED else ""
    return "; ".join(all_items[:LISTED]) + more


def _find_weights(loaded: Mapping[str, Any], source: str) -> tuple[str, Weights, list[str]]:
    """The entry that holds the weights, those weights, and the names of all that lies beside them."""
    entry, beside, inner = "", list[str](), loaded
    while not any(str(name).endswith("patch_embed.proj.weight") for name in inner):
        nested = next((name for name in ENTRIES if isinstance(inner.get(name), Mapping)), None)
        if nested is None:
            raise InputError(
                f"{source} holds no weights of a Vision Transformer (no patch_embed.proj.weight), but "
                f"{listing(map(str, inner)) or 'nothing'}: known are the formats of T-CoRe, DINO, DINOv2, "
                "iBOT, MAE, CropMAE, RSP and timm."
            )
        beside += [str(name) for name in inner if name != nested]
        entry, inner = f"{entry}.{nested}".lstrip("."), inner[nested]
    weights = {str(name): value for name, value in inner.items() if isinstance(value, Tensor)}
    beside += [str(name) for name, value in inner.items() if not isinstance(value, Tensor)]
    return entry, weights, [name for name in beside if name != "vit"]


def _bare_names(weights: Weights, source: str) -> tuple[Weights, dict[str, list[str]]]:
    """Weights without the prefixes of their names, and the names of those that no encoder needs, by kind."""
    bare: Weights = {}
    left_out: dict[str, list[str]] = {}
    unwrapped = {WRAPPING.sub("", name).removeprefix("module."): value for name, value in weights.items()}
    if len(unwrapped) < len(weights):
        raise InputError(f"{source} holds some weights twice, with and without a prefix.")
    has_teacher = any(name.startswith("teacher.") for name in unwrapped)
    for full, value in unwrapped.items():
        name = full
        while prefix := PREFIX.match(name):
            name = name[prefix.end() :]
        kinds = (kind for kind, pattern in DISPENSABLE.items() if pattern.match(name))
        kind = "student" if has_teacher and full.startswith("student.") else next(kinds, None)
        if kind is not None:
            left_out.setdefault(kind, []).append(full)
        elif name in bare:
            raise InputError(f"{source} holds {name} twice, under different prefixes.")
        else:
            bare[name] = value
    return bare, left_out


def _renamed(name: str) -> str:
    parent, _, last = name.rpartition(".")
    return f"{parent}.{RENAMED[last]}".lstrip(".") if last in RENAMED else name


def _number_blocks(weights: Weights, source: str) -> Weights:
    """Undo chunked names: blocks.chunk.i counts on over the chunks, or anew in each."""
    found = {tuple(map(int, match.groups("-1"))) for name in weights if (match := BLOCK.match(name))}
    order = sorted(found)
    in_chunks = Counter(chunk for chunk, _ in order)
    anew = [(chunk, i) for chunk, count in sorted(in_chunks.items()) for i in range(count)]
    counted_on = [i for _, i in order] == list(range(len(order)))
    if not order or not (counted_on or (order == anew and list(in_chunks) == list(range(len(in_chunks))))):
        numbers = listing(".".join(str(n) for n in pair if n >= 0) for pair in order)
        raise InputError(f"{source} holds blocks {numbers or '(none)'}: some are missing.")
    number = {pair: i for i, pair in enumerate(order)}
    renamed: Weights = {}
    for name, value in weights.items():
        match = BLOCK.match(name)
        pair = tuple(map(int, match.groups("-1"))) if match else ()
        renamed[f"blocks.{number[pair]}.{name[match.end() :]}" if match else name] = value
    return renamed


def _sizes(weights: Weights, num_heads: int | None, source: str) -> dict[str, Any]:
    """Arguments of VisionTransformer, from the shapes of the weights."""
    for name, ndim in {"patch_embed.proj.weight": 4, "pos_embed": 3}.items():
        if name not in weights or weights[name].ndim != ndim:
            found = f"has shape {tuple(weights[name].shape)}" if name in weights else "is missing"
            raise InputError(f"{source}: {name} {found}; an image encoder has one of {ndim} dimensions.")
    dim, channels, height, width = weights["patch_embed.proj.weight"].shape
    if channels != 3 or height != width:
        raise InputError(f"{source}: patches of {channels}x{height}x{width} are not square RGB patches.")
    if num_heads is None:
        num_heads = HEADS.get(dim, dim // 64)
        if dim not in HEADS and dim % 64:
            raise InputError(
                f"{source}: width {dim} is no multiple of 64, so the number of heads is not known."
            )
    if num_heads < 1 or dim % num_heads:
        raise InputError(f"{source}: width {dim} cannot be shared by {num_heads} heads.")
    positions = weights["pos_embed"].shape[1]
    # Some files give the CLS token no position of its own.
    grid = math.isqrt(positions - 1) if math.isqrt(positions) ** 2 != positions else math.isqrt(positions)
    if positions not in (grid**2, grid**2 + 1):
        raise InputError(f"{source}: {positions} positions are not CLS and a square grid.")
    registers = weights.get("register_tokens")
    return {
        "dim": dim,
        "depth": 1 + max(int(match[2]) for name in weights if (match := BLOCK.match(name))),
        "num_heads": num_heads,
        "patch_size": height,
        "image_size": grid * height,
        "num_registers": 0 if registers is None else registers.shape[1] if registers.ndim == 3 else 1,
        # Without LayerScale the gains are 1, and multiplying by 1 changes nothing.
        "layer_scale": 1.0,
    }


def _declared(loaded: Mapping[str, Any], name: str) -> int | None:
    """What weights cannot tell (heads, reach), where a file says it, as our own exports do."""
    vit = loaded.get("vit")
    value = vit.get(name) if isinstance(vit, Mapping) else None
    return value if isinstance(value, int) else None


def _fill_in(state: Weights, sizes: dict[str, Any]) -> list[str]:
    """Add what the format lacks, so that nothing is computed differently; say what."""
    dim, filled = sizes["dim"], []
    if not any(name.endswith((".ls1.gamma", ".ls2.gamma")) for name in state):
        gains = (f"blocks.{i}.ls{half}.gamma" for i in range(sizes["depth"]) for half in (1, 2))
        state.update({name: torch.ones(dim) for name in gains})
        filled.append(LAYER_SCALE)
    if "register_tokens" not in state:
        state["register_tokens"] = torch.zeros(1, 0, dim)
    if "mask_token" not in state:
        state["mask_token"] = torch.zeros(1, dim)
        filled.append("mask token (0)")
    grid = sizes["image_size"] // sizes["patch_size"]
    positions = state["pos_embed"]
    if positions.shape[1] == grid**2:
        state["pos_embed"] = torch.cat([torch.zeros_like(positions[:, :1]), positions], dim=1)
        filled.append("position of CLS (0)")
    return filled


def _format(names: Iterable[str], left_out: Mapping[str, list[str]], entry: str, weights: Weights) -> str:
    """The project whose key names these are."""
    last_names = {name.rpartition(".")[2] for name in names}
    if "prior and posterior" in left_out:
        return "RSP"
    if "decoder" in left_out:
        return "CropMAE" if any("multihead_attn" in name for name in left_out["decoder"]) else "MAE"
    if last_names & {"masked_embed", "gamma_1"}:
        return "iBOT"
    if (
        "reg_token" in last_names
        or math.isqrt(weights["pos_embed"].shape[1]) ** 2 == weights["pos_embed"].shape[1]
    ):
        return "timm"
    if any(name.endswith(".ls1.gamma") for name in weights):
        ours = "register_tokens" in weights and weights["patch_embed.proj.weight"].shape[-1] == 16
        return "T-CoRe" if ours else "DINOv2"
    # Plain encoders look alike, but the fixed positions of an MAE leave CLS at zero.
    if entry.endswith("model") or not weights["pos_embed"][:, 0].any():
        return "MAE"
    return "iBOT" if entry.endswith("state_dict") else "DINO"


def _describe(what: str, entry: str, sizes: dict[str, Any], scaled: bool) -> str:
    """Where the weights come from and how large the network is, in one line."""
    grid = sizes["image_size"] // sizes["patch_size"]
    where = f" under {entry}" if entry else ""
    return (
        f"{what} key names{where}: width {sizes['dim']}, {sizes['depth']} blocks, "
        f"{sizes['num_heads']} heads, patch {sizes['patch_size']}, {sizes['num_registers']} registers, "
        f"{'with' if scaled else 'without'} LayerScale, positions {grid}x{grid}"
    )
