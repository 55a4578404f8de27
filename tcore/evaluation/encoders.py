"""Encoders for evaluation: our runs, foreign checkpoints, models of timm, transformers and torch.hub."""

import difflib
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tcore.config import Reach
from tcore.errors import InputError
from tcore.evaluation.adapters import EXAMPLES, attribute, load_hub, load_timm, load_transformers, reason
from tcore.evaluation.checkpoints import listing, read_file, refuse_hollow, translate
from tcore.evaluation.controls import load_control
from tcore.evaluation.encoder import Adapted, Encoder
from tcore.evaluation.export_names import from_transformers
from tcore.evaluation.shipped import DEFAULT, need_shipped
from tcore.files import read_json
from tcore.model.vit import VisionTransformer
from tcore.model.weights import CARD_FORMAT

# Width, depth and heads of the usual sizes.
SIZES = {"vitti16": (192, 12, 3), "vits16": (384, 12, 6), "vitb16": (768, 12, 12), "vitl16": (1024, 24, 16)}
SIZE_NAMES = (
    "dim",
    "depth",
    "num_heads",
    "patch_size",
    "image_size",
    "num_registers",
    "layer_scale",
    "reach",
)
WHAT_WOULD_DO = (
    "give a run folder, a checkpoint (.safetensors, .pth, .pt), an exported folder, default, random:vits16, "
    "timm:NAME, hf:NAME_OR_DIR or hub:REPO:NAME"
)
# Where Vision Transformers keep their blocks.
BLOCKS = ("blocks", "encoder.layer", "encoder.layers", "layers", "layer", "model.layer", "model.layers")


def load_encoder(spec: str | Path, layer: int = -1, reach: Reach = None) -> Encoder:
    """The encoder of a run, a checkpoint, `default`, random:SIZE, timm:NAME, hf:NAME_OR_DIR or hub:REPO:NAME.

    `layer` is the block whose output, after the final norm, makes the features; `reach` is how far patches
    look, where it is not to be as trained; `report` says what matched.

    >>> import tempfile, tcore
    >>> config = tcore.recipe("quickstart", {"optim.steps": 1, "optim.batch": 2, "rendered.videos": 2})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = tcore.train(config, folder + "/run", quiet=True)
    ...     encoder = tcore.load_encoder(run)
    >>> encoder(torch.zeros(2, 64, 96, 3, dtype=torch.uint8)).shape
    torch.Size([2, 96, 8, 12])
    """
    if spec == DEFAULT:
        return _load_shipped(layer, reach)
    kind, colon, name = str(spec).partition(":")
    loaders = {
        "random": _load_random,
        "control": load_control,
        "timm": load_timm,
        "hf": load_transformers,
        "hub": load_hub,
    }
    if kind in loaders and (not name or not colon) and not Path(spec).exists():
        raise InputError(f"encoder {str(spec)!r} needs a name, as in {EXAMPLES[kind]}.")
    encoder = loaders[kind](name) if kind in loaders and colon else _load_file(Path(spec))
    choose_layer(encoder, layer)
    choose_reach(encoder, reach)
    return encoder


def _load_shipped(layer: int, reach: Reach) -> Encoder:
    """The encoder that comes with the package."""
    encoder = _load_file(need_shipped().weights)
    encoder.name = DEFAULT
    choose_layer(encoder, layer)
    choose_reach(encoder, reach)
    return encoder


def choose_layer(encoder: Encoder, layer: int) -> None:
    """Drop the blocks after one, so that the final norm sees its output; negative counts from the end."""
    model = encoder.backbone.model if isinstance(encoder.backbone, Adapted) else encoder.backbone
    found = (attribute(model, path) for path in BLOCKS)
    blocks = next((x for x in found if isinstance(x, nn.ModuleList | nn.Sequential)), None)
    if blocks is None or getattr(model, "chunked_blocks", False):
        if layer == -1:
            return
        raise InputError(f"layer {layer} of {encoder.name}: its blocks are not known, only -1 can be used.")
    depth = len(blocks)
    if not -depth <= layer < depth:
        raise InputError(f"layer {layer} of {encoder.name}: it has {depth} blocks, {-depth} to {depth - 1}.")
    kept = layer % depth + 1
    if kept < depth:
        del blocks[kept:]
        if isinstance(model, VisionTransformer):
            model.depth = kept
        encoder.report += f"\nfeatures: block {kept} of {depth}, after the final norm"


def choose_reach(encoder: Encoder, reach: Reach) -> None:
    """Let patches look so far, or everywhere; None leaves the encoder as it is."""
    if reach is None:
        return
    vit = encoder.backbone
    if not isinstance(vit, VisionTransformer):
        raise InputError(
            f"reach {reach} of {encoder.name}: only Vision Transformers that run in our own code have one."
        )
    if reach != "everywhere" and reach < 1:
        raise InputError(f"reach {reach} of {encoder.name}: need 1 or more patches, or everywhere.")
    vit.reach = None if reach == "everywhere" else reach
    encoder.report += f"\npatches look {reach if vit.reach is None else f'{reach} patches far'}"


def untrained(spec: str) -> Encoder:
    """A network at the published initialization, always the same one."""
    return _load_random(spec.removeprefix("random:"))


def _load_random(name: str) -> Encoder:
    if name not in SIZES:
        sizes = ", ".join(f"random:{size}" for size in SIZES)
        raise InputError(f"no encoder 'random:{name}': there are {sizes}.")
    dim, depth, num_heads = SIZES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        vit = VisionTransformer(dim=dim, depth=depth, num_heads=num_heads)
    return Encoder(vit, f"random:{name}", f"untrained {name} at the published initialization, seed 0")


def _load_file(path: Path) -> Encoder:
    """The encoder of a run folder, of a file or folder that was exported, or of a foreign checkpoint."""
    if path.suffix == ".onnx":
        raise InputError(f"{path} is for ONNX runtimes: give the encoder that it was exported from.")
    config = path / "config.json"
    if (path / "model.safetensors").is_file() and config.is_file():
        return _load_folder(path, config)
    file = path / "encoder.safetensors" if path.is_dir() else path
    if not file.is_file():
        raise InputError(f"encoder {path} {_what_is_wrong(path)}: {WHAT_WOULD_DO}.")
    if file.name == "checkpoint.pt" and file.with_name("encoder.json").is_file():
        raise InputError(f"{file} is the state of a training: give its run folder, {file.parent}.")
    card = _card_of(file)
    loaded = read_file(file)
    # What a file says of itself goes before what lies around it.
    by_itself = file.suffix != ".safetensors" or "vit" in loaded
    if by_itself or (card is None and file.name != "encoder.safetensors"):
        found = translate(loaded, str(file))
        return Encoder(_build(found.sizes, found.state, file), str(path), found.report)
    if card is None:
        raise InputError(f"no encoder.json beside {file}: it says how the encoder is built.")
    refuse_hollow(loaded, str(file))
    state = {name: x.float() for name, x in loaded.items() if isinstance(x, Tensor)}
    sizes = _read_card(card)
    report = f"encoder of this project, {', '.join(f'{key} {value}' for key, value in sizes.items())}"
    return Encoder(_build(sizes, state, file), str(path), report)


def _card_of(file: Path) -> Path | None:
    """The card of one of our files: its own, or that of the run that kept it."""
    own = file.with_suffix(".json")
    with suppress(InputError):
        values = read_json(own) if own.is_file() else None
        if isinstance(values, dict) and values.get("format") == CARD_FORMAT:
            return own
    shared = (file.with_name("encoder.json"), file.parent.parent / "encoder.json")
    return next((path for path in shared if path.is_file()), None)


def _load_folder(path: Path, config: Path) -> Encoder:
    """The encoder of a folder that was exported for timm or transformers; others need their own code."""
    try:
        values: dict[str, Any] = read_json(config)
        num_heads = values["tcore"]["vit"]["num_heads"] if "tcore" in values else None
    except (KeyError, TypeError) as error:
        raise InputError(f"cannot read {config}: {error!r}.") from error
    if num_heads is not None and not (type(num_heads) is int and 0 < num_heads < 2**20):
        raise InputError(f"{config}: num_heads={num_heads!r} is no number of heads.")
    if num_heads is None:
        spec = f"timm:local-dir:{path}" if "architecture" in values else f"hf:{path}"
        raise InputError(f"{path} is a model of another project: give {spec}, which runs its own code.")
    loaded = read_file(path / "model.safetensors")
    named = from_transformers(loaded, str(path)) if "model_type" in values else loaded
    found = translate(named, str(path), num_heads)
    return Encoder(_build(found.sizes, found.state, path), str(path), found.report)


def _build(sizes: dict[str, Any], state: dict[str, Tensor], source: Path) -> VisionTransformer:
    _check_sizes(sizes, state, source)
    try:
        # The weights that are drawn here, to be overwritten, must not move the random state of the caller.
        with torch.random.fork_rng(devices=[]):
            vit = VisionTransformer(**sizes)
    except (TypeError, RuntimeError, ZeroDivisionError) as error:
        raise InputError(f"no encoder can be built for {source}: {reason(error)}.") from error
    load_strictly(vit, state, source)
    return vit


def _check_sizes(sizes: dict[str, Any], state: dict[str, Tensor], source: Path) -> None:
    """Refuse sizes that need far more weights than there are, before memory is taken for them."""
    for name, value in sizes.items():
        kinds = (int, float) if name == "layer_scale" else (int,)
        low = 0 if name in ("layer_scale", "num_registers") else 1
        if name not in SIZE_NAMES or type(value) not in kinds or not low <= value < 2**20:
            raise InputError(f"no encoder can be built for {source}: {name}={value!r} is no size that fits.")
    dim, patch = sizes.get("dim", 384), sizes.get("patch_size", 16)
    tokens = (sizes.get("image_size", 224) // patch) ** 2 + sizes.get("num_registers", 4)
    announced = dim * (12 * dim * sizes.get("depth", 12) + 3 * patch**2 + tokens)
    held = sum(value.numel() for value in state.values())
    if announced > 2 * held + 10**8:
        raise InputError(
            f"no encoder can be built for {source}: it announces {announced:,} weights and holds {held:,}."
        )


def load_strictly(module: nn.Module, state: dict[str, Tensor], source: Path) -> None:
    """Load weights; missing, unexpected or misshapen ones are an error that lists and counts them."""
    expected = {name: tuple(value.shape) for name, value in module.state_dict().items()}
    found = {name: tuple(value.shape) for name, value in state.items()}
    problems = [f"missing {name}" for name in expected if name not in found]
    problems += [f"unexpected {name}" for name in found if name not in expected]
    problems += [
        f"{name} is {found[name]}, expected {expected[name]}"
        for name in expected
        if name in found and found[name] != expected[name]
    ]
    if problems:
        raise InputError(f"weights in {source} do not fit, {len(problems)} keys: {listing(problems)}.")
    module.load_state_dict(state)


def _read_card(card: Path) -> dict[str, Any]:
    """Sizes of the encoder."""
    try:
        vit: dict[str, Any] = dict(read_json(card)["vit"])
        return vit
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"cannot read {card}: {error!r}.") from error


def _what_is_wrong(path: Path) -> str:
    """Why a path is no encoder, with a guess at what was meant."""
    if path.is_dir():
        return f"holds no encoder.safetensors (a folder of transformers is hf:{path})"
    word = difflib.get_close_matches(str(path).lower(), [DEFAULT], n=1)
    size = difflib.get_close_matches(str(path), SIZES, n=1)
    kind, colon, name = str(path).partition(":")
    scheme = difflib.get_close_matches(kind.lower(), EXAMPLES, n=1) if colon else []
    guesses = [*word, *(f"random:{x}" for x in size), *(f"{x}:{name}" for x in scheme)]
    return "does not exist" + (f" (did you mean {guesses[0]}?)" if guesses else "")
