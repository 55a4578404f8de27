"""Loading an encoder: from a run, a file, the package itself, timm, transformers or torch.hub."""

import importlib
import importlib.resources
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tcore.config import Reach, Resize, VitSpec, from_dict
from tcore.data.render import MEAN, STD
from tcore.device import encoder_device
from tcore.errors import InputError, first_line, import_package
from tcore.evaluation.checkpoints import (
    RESIZES,
    Checkpoint,
    NetworkName,
    from_hf,
    load_strictly,
    read_file,
    refuse_problems,
    translate,
)
from tcore.evaluation.encoder import Adapted, Encoder, load_control
from tcore.files import number, read_json, row_of
from tcore.model.vit import CARD_FORMAT, VisionTransformer, build_vit
from tcore.recipes import VIT_B, VIT_L, VIT_S, VIT_TI
from tcore.text import did_you_mean, to_stderr

HUB_FILES = ("config.json", "model.safetensors")  # of a folder that is written for the Hugging Face Hub
DEFAULT = "default"  # the encoder that comes with the package; a folder of that name is ./default
FOLDER = Path(str(importlib.resources.files("tcore"))) / "encoders"
SIZES = {"vitti16": VIT_TI, "vits16": VIT_S, "vitb16": VIT_B, "vitl16": VIT_L}
RESNET = re.compile(r"(wide_)?(resnet|resnext)\d+")  # of timm
# Where Vision Transformers keep their blocks.
BLOCKS = ("blocks", "encoder.layer", "encoder.layers", "layers", "layer", "model.layer", "model.layers")


class Shipped(NamedTuple):
    """Files of the encoder that comes with the package."""

    weights: Path
    card: Path
    matching: Path
    """Student backbone and matching module of a run of T-CoRe, for figures of attention."""
    matching_card: Path
    """How that run was trained, which need not be the run of the encoder."""


def shipped(folder: Path | None = None) -> Shipped:
    """The files of the default encoder in this installation or another folder; they need not exist."""
    names = (f"default{middle}.{kind}" for middle in ("", "-matching") for kind in ("safetensors", "json"))
    return Shipped(*((folder or FOLDER) / name for name in names))


def load_encoder(
    spec: str | Path,
    layer: int = -1,
    reach: Reach = None,
    positions: Resize | None = None,
    *,
    heads: int | None = None,
    network: NetworkName = "teacher",
) -> Encoder:
    """The encoder of a run, a checkpoint, `default`, timm:NAME, hf:NAME_OR_DIR or hub:REPO:NAME.

    untrained:RUN is the network of a run before its training, to compare the run with; random:SIZE is one of
    a published size.
    `layer` is the block whose output, after the final norm, makes the features; `reach` is how many patches
    away attention goes, where it should differ from training; `positions` is how positions get to other
    grids: to their size, by a factor, or exactly; `heads` is the number of attention heads of a checkpoint,
    where it is not what its weights suggest; `network` is which one is meant of a file that holds both;
    `report` says what was found.

    >>> import tempfile, tcore
    >>> config = tcore.recipe("quickstart", {"optim.steps": 1, "optim.batch": 2, "rendered.videos": 2})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = tcore.train(config, folder + "/run", quiet=True)
    ...     encoder = tcore.load_encoder(run)
    >>> encoder(torch.zeros(2, 64, 96, 3, dtype=torch.uint8)).shape
    torch.Size([2, 96, 8, 12])
    """
    if spec == "control:colour":
        spec = "control:color"
        to_stderr(f"tcore: control:colour is now called {spec}.")
    kind, _, name = str(spec).partition(":")
    if spec == DEFAULT:
        encoder = _load_path(shipped().weights, heads, network)
        encoder.name = DEFAULT
    elif kind in KINDS and (name or not Path(spec).exists()):
        load, example = KINDS[kind]
        if not name:
            raise InputError(f"encoder {str(spec)!r} needs a name, as in {example}.")
        if heads is not None or network != "teacher":
            raise InputError(f"heads and network are for checkpoint files, not for {spec}: leave them out.")
        encoder = load(name)
    else:
        encoder = _load_path(Path(spec), heads, network)
    choose_layer(encoder, layer)
    choose_reach(encoder, reach)
    choose_positions(encoder, positions)
    return encoder


def as_encoder(encoder: Encoder | str | Path) -> Encoder:
    """An encoder, or the one of a name, on the best device of this machine."""
    if isinstance(encoder, Encoder):
        return encoder
    if isinstance(encoder, (str, Path)):
        return load_encoder(encoder).to(encoder_device())
    kind = type(encoder).__name__
    raise InputError(f"encoder is a {kind}: give a name such as 'default', or what load_encoder returns.")


def choose_layer(encoder: Encoder, layer: int) -> None:
    """Drop the blocks after one, so that the final norm sees its output; negative counts from the end."""
    model = encoder.backbone.model if isinstance(encoder.backbone, Adapted) else encoder.backbone
    found = (_attribute(model, path) for path in BLOCKS)
    blocks = next((x for x in found if isinstance(x, nn.ModuleList | nn.Sequential)), None)
    if blocks is None or getattr(model, "chunked_blocks", False):
        if layer == -1:
            return
        raise InputError(f"layer {layer} of {encoder.name}: its blocks are unknown, use -1.")
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
    """Let patches attend to those up to `reach` away, or everywhere; None leaves the encoder unchanged."""
    if reach is None:
        return
    vit = encoder.backbone
    if not isinstance(vit, VisionTransformer):
        raise InputError(f"reach {reach} of {encoder.name}: it runs in the code of another package.")
    if reach != "everywhere" and reach < 1:
        raise InputError(f"reach {reach} of {encoder.name}: need 1 or more patches, or everywhere.")
    vit.reach = None if reach == "everywhere" else reach
    encoder.report += f"\nattention: {reach if vit.reach is None else f'patches up to {reach} away'}"


def choose_positions(encoder: Encoder, how: Resize | None) -> None:
    """Bring positions to other grids in this way; None leaves the encoder unchanged."""
    if how is None:
        return
    vit = encoder.backbone
    if not isinstance(vit, VisionTransformer):
        raise InputError(f"positions {how} of {encoder.name}: it runs in the code of another package.")
    if how == "exact" and vit.position_kind == "learned":
        raise InputError(
            f"positions exact of {encoder.name}: learned ones have no formula; use size or factor."
        )
    if how != vit.position_resize:
        encoder.variant = f"positions {how}"
    vit.position_resize = how
    kept = [line for line in encoder.report.splitlines() if not line.startswith("positions on other grids")]
    encoder.report = "\n".join([*kept, f"positions on other grids: {RESIZES[how]}"])


def _draw(spec: VitSpec, image_size: int) -> VisionTransformer:
    """A network with weights drawn from seed 0; the random state of the caller stays as it is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build_vit(spec, image_size)


def _load_random(name: str) -> Encoder:
    if name not in SIZES:
        raise InputError(f"no encoder random:{name}: use {', '.join(SIZES)}.{did_you_mean(name, SIZES)}")
    return Encoder(
        _draw(SIZES[name], 224), f"random:{name}", f"untrained {name} at the published initialization, seed 0"
    )


def _load_untrained(name: str) -> Encoder:
    """The untrained twin of a run: the same network, its weights drawn anew."""
    path = Path(name)
    _load_path(path, None, "teacher")  # refuses what is no run, and sizes that its weights do not have
    card = find_card(path / "encoder.safetensors")
    if card is None or not path.is_dir():
        raise InputError(f"encoder untrained:{name}: give the folder of a run.")
    sizes = dict(_sizes_in(read_json(card), card))
    image_size = sizes.pop("image_size")
    vit = _draw(from_dict({"vit": sizes}, "").vit, image_size)
    return Encoder(vit, f"untrained:{name}", f"the network of {name} before training, seed 0")


def _load_path(path: Path, heads: int | None, network: NetworkName) -> Encoder:
    """The encoder of a run folder, of an exported file or folder, or of a foreign checkpoint."""
    if path.suffix == ".onnx":
        raise InputError(f"{path} is for ONNX runtimes: give the encoder that it was exported from.")
    config = path / "config.json"
    if (path / "model.safetensors").is_file() and config.is_file():
        loaded, about = _read_folder(path), read_json(config).get("tcore")
        sizes, notes = _sizes_in(about, config), _notes_in(about)
    else:
        file = path / "encoder.safetensors" if path.is_dir() else path
        if not file.is_file():
            raise InputError(f"encoder {path} {_what_is_wrong(path)}")
        if file.name == "checkpoint.pt" and file.with_name("encoder.json").is_file():
            raise InputError(f"{file} is the state of a training: give its run folder, {file.parent}.")
        loaded, sizes, notes = read_file(file), None, []
        # What a file says about itself takes precedence over what is beside it.
        if file.suffix == ".safetensors" and "vit" not in loaded:
            card = find_card(file)
            if card is None and file.name == "encoder.safetensors":
                raise InputError(f"no encoder.json beside {file}: it says how the encoder is built.")
            if card is not None:
                about = read_json(card)
                sizes, notes = _sizes_in(about, card), _notes_in(about)
    found = translate(loaded, str(path), sizes, heads=heads, network=network)
    encoder = Encoder(_build(found, path), str(path), "\n".join([found.report, *notes]))
    encoder.notes = notes
    return encoder


def find_card(file: Path) -> Path | None:
    """The card that says how weights are built: their own, or that of the run that they are from."""
    own = file.with_suffix(".json")
    if own.is_file():
        with suppress(InputError, AttributeError):  # a JSON file of something else
            if read_json(own).get("format") == CARD_FORMAT:
                return own
    runs = (file.with_name("encoder.json"), file.parent.parent / "encoder.json")
    return next((path for path in runs if path.is_file()), None)


def _sizes_in(values: Any, source: Path) -> dict[str, Any]:
    """The sizes that a card holds."""
    sizes = values.get("vit") if isinstance(values, dict) else None
    if not isinstance(sizes, dict):
        raise InputError(f'cannot read {source}: no sizes under "vit".')
    return sizes


def _notes_in(values: Any) -> list[str]:
    """What a card says about how the encoder was trained."""
    notes = values.get("notes")
    return [str(note) for note in notes] if isinstance(notes, list) else []


def from_pretrained(
    name: str | Path,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
) -> Encoder:
    """An encoder that `tcore export --format hub` wrote: a folder, or a repository of the Hugging Face Hub.

    The arguments are those of `PyTorchModelHubMixin.from_pretrained`; a repository needs huggingface_hub.
    """
    folder = Path(name)
    if not folder.is_dir():
        hub = import_package("huggingface_hub", f"encoder {str(name)!r}, which is no folder here,")
        with _foreign_code(f"hf:{name}"):
            found = hub.snapshot_download(
                str(name),
                revision=revision,
                token=token,
                cache_dir=cache_dir,
                local_files_only=local_files_only,
                allow_patterns=list(HUB_FILES),
            )
        folder = Path(found)
    encoder = _load_path(folder, None, "teacher")
    encoder.name = f"hf:{name}"
    return encoder


def _written_for_hub(name: str) -> bool:
    """Whether `tcore export --format hub` wrote what has this name; transformers cannot load that."""
    config = Path(name) / HUB_FILES[0]
    if not config.is_file():
        with suppress(Exception):  # no such package, repository or network: transformers says what is wrong
            config = Path(importlib.import_module("huggingface_hub").hf_hub_download(name, HUB_FILES[0]))
    with suppress(InputError):
        found = read_json(config)
        return isinstance(found, dict) and "tcore" in found and "model_type" not in found
    return False


def _read_folder(path: Path) -> dict[str, Any]:
    """A folder that was exported for timm or transformers; others need the code of their package."""
    config = read_json(path / "config.json")
    if not isinstance(config, dict) or "tcore" not in config:
        kind = "timm:local-dir:" if isinstance(config, dict) and "architecture" in config else "hf:"
        raise InputError(f"{path} is a model of another package: give {kind}{path}, which runs its code.")
    loaded = read_file(path / "model.safetensors")
    return from_hf(loaded) if "model_type" in config else loaded


def _build(found: Checkpoint, source: Path) -> VisionTransformer:
    """The network of a checkpoint; sizes that do not fit its weights are refused before memory is taken."""
    sizes = dict(found.sizes)
    image_size = sizes.pop("image_size")
    try:
        spec = from_dict({"vit": sizes}, "").vit
        other = 3 * spec.patch_size**2 + (image_size // spec.patch_size) ** 2 + spec.num_registers
        needed = spec.dim * (12 * spec.dim * spec.depth + other)
        held = sum(value.numel() for value in found.state.values())
        if needed > 2 * held + 10**8 or spec.depth > len(found.state):
            raise InputError(f"{needed:,} weights are needed, {held:,} found")
        if spec.dim % spec.num_heads or spec.reach == 0:
            raise InputError(str(found.sizes))
        vit = _draw(spec, image_size)
    except (TypeError, ValueError, RuntimeError, ZeroDivisionError) as error:
        raise InputError(f"no encoder can be built for {source}: {first_line(error)}.") from error
    load_strictly(vit, found.state, source)
    return vit


def _what_is_wrong(path: Path) -> str:
    """Why a path is not an encoder, with a guess at what was meant."""
    if path.is_dir():
        return f"holds no encoder.safetensors; a folder of transformers is hf:{path}."
    if path.exists():
        return "is a pipe or a device, not a file."
    name = str(path).partition(":")[2]
    known = [DEFAULT, *(f"random:{size}" for size in SIZES), *(f"{kind}:{name}" for kind in KINDS if name)]
    specs = "a run, a file, default, random:SIZE, untrained:RUN, timm:NAME, hf:NAME_OR_DIR or hub:REPO:NAME"
    return f"does not exist: give {specs}.{did_you_mean(str(path), known)}"


@contextmanager
def _foreign_code(spec: str) -> Iterator[None]:
    """Whatever goes wrong in the code of another package is one line: it can raise anything."""
    try:
        yield
    except Exception as error:
        raise InputError(f"cannot load {spec}: {first_line(error)}.") from error


def load_timm(name: str, pretrained: bool = True) -> Encoder:
    """A model of timm by its name, with its weights; a ResNet has features of stride 16, NAME@8 of 8."""
    timm = import_package("timm", f"timm:{name}")
    if RESNET.match(name):
        return _load_resnet(timm, name, pretrained)
    with _foreign_code(f"timm:{name}"):
        model = timm.create_model(name, pretrained=pretrained, num_classes=0, dynamic_img_size=True)
    return adapt(model, f"timm:{name}")


def _load_resnet(timm: Any, name: str, pretrained: bool) -> Encoder:
    """The third stage of a ResNet, of stride 16, or of stride 8 by dilated convolutions."""
    bare, _, stride = name.partition("@")
    if stride not in ("", "8", "16"):
        raise InputError(
            f"encoder timm:{name}: a ResNet has features of stride 16 or 8, as in timm:{bare}@8."
        )
    side = int(stride or 16)
    with _foreign_code(f"timm:{name}"):
        options = {"features_only": True, "out_indices": (3,), "output_stride": side}
        model = timm.create_model(bare, pretrained=pretrained, **options)
    known = getattr(model, "pretrained_cfg", None) or {}
    mean, std = known.get("mean", MEAN), known.get("std", STD)

    def read(images: Tensor) -> Tensor:
        features: Tensor = model(images)[0]
        return features

    adapted = Adapted(model, read, patch_size=side, num_prefix=0, mean=mean, std=std)
    report = f"third stage of a ResNet, stride {side}{' by dilation' if side == 8 else ''}"
    return Encoder(adapted, f"timm:{name}", report)


def load_transformers(name: str) -> Encoder:
    """A model of transformers by its name or from a folder, or one of ours that was written for the hub."""
    if _written_for_hub(name):
        return from_pretrained(name)
    transformers = import_package("transformers", f"hf:{name}")
    with _foreign_code(f"hf:{name}"):
        model, info = transformers.AutoModel.from_pretrained(name, output_loading_info=True)
    # Heads are not part of an encoder: neither those in the file nor those that it lacks matter.
    head = re.compile(r"(.*\.)?(pooler|classifier|head|decoder)\.")
    problems = [
        f"{kind} {key}"
        for kind in ("missing", "unexpected", "mismatched")
        for key in sorted(map(str, info[f"{kind}_keys"]))
        if kind == "mismatched" or not head.match(key)
    ]
    refuse_problems(problems, f"hf:{name}")
    known = {}
    with suppress(Exception):  # many models have no such file, and the report says what is used instead
        known = read_normalization(Path(transformers.utils.cached_file(name, "preprocessor_config.json")))
    encoder = adapt(model, f"hf:{name}", known.get("image_mean", MEAN), known.get("image_std", STD))
    if info["unexpected_keys"]:
        encoder.report += f"\nleft out: heads ({len(info['unexpected_keys'])} keys)"
    return encoder


def read_normalization(path: Path) -> dict[str, list[float]]:
    """Means and deviations of the colors, as preprocessor_config.json of transformers has them."""
    return dict(read_json(path, "", dict.fromkeys(("image_mean?", "image_std?"), row_of(3, number))))


def load_hub(name: str) -> Encoder:
    """An entry of a torch.hub repository: REPO:NAME."""
    repo, _, entry = name.rpartition(":")
    if not repo or not entry:
        raise InputError(f"encoder hub:{name} needs a repository and a name, as in {KINDS['hub'][1]}.")
    source = "local" if Path(repo).is_dir() else "github"
    with _foreign_code(f"hub:{name}"):
        model = torch.hub.load(repo, entry, source=source, trust_repo="check", verbose=False)
    return adapt(model, f"hub:{name}")


def adapt(model: Any, name: str, mean: Sequence[float] = MEAN, std: Sequence[float] = STD) -> Encoder:
    """An encoder around a Vision Transformer: of timm, transformers, DINO, DINOv2 or the like, or ours."""
    if isinstance(model, Encoder | VisionTransformer):
        vit = model.backbone if isinstance(model, Encoder) else model
        return Encoder(vit, name, getattr(model, "report", "encoder of this project"))
    size = _patch_size(model, name)
    accepted = inspect.signature(model.forward).parameters
    resizes = "interpolate_pos_encoding" in accepted
    options: dict[str, Any] = {"interpolate_pos_encoding": True} if resizes else {}
    masks = "noise" in accepted  # an MAE of transformers: drops patches, and shuffles the others by noise
    if masks:
        model.config.mask_ratio = 0.0
    # Models of timm that pool by averaging keep their final norm behind the pooling.
    norm = model.fc_norm if isinstance(getattr(model, "norm", None), nn.Identity) else nn.Identity()

    def read(images: Tensor) -> Tensor:
        if masks:
            patches = (images.shape[-2] // size) * (images.shape[-1] // size)
            options["noise"] = torch.arange(patches, device=images.device).float().expand(len(images), -1)
        if hasattr(model, "forward_features"):
            found = model.forward_features(images)
        elif hasattr(model, "get_intermediate_layers"):
            found = model.get_intermediate_layers(images, 1)[0]
        else:
            found = model(pixel_values=images, **options) if "pixel_values" in accepted else model(images)
        found = getattr(found, "last_hidden_state", found)
        found = found.get("x_norm_patchtokens") if isinstance(found, dict) else found
        if not isinstance(found, Tensor):
            raise InputError(f"encoder {name} returns a {type(found).__name__}, not tokens.")
        return norm(found)

    registers = _attribute(model, "config.num_register_tokens")
    prefix = getattr(model, "num_prefix_tokens", None if registers is None else 1 + registers)
    known = getattr(model, "pretrained_cfg", None) or {}  # of timm
    mean, std = known.get("mean", mean), known.get("std", std)
    adapted = Adapted(model, read, patch_size=size, num_prefix=prefix, mean=mean, std=std)
    normal = "as the model was trained" if adapted.renormalizes else "as ImageNet"
    report = f"patch {size}; {'all' if prefix is None else prefix} tokens before the patches are dropped"
    report += f"\nimages normalized {normal}\npositions on other grids: by the code of the model"
    return Encoder(adapted, name, report)


# Encoders that are named by a kind and a name: how to load one, and an example.
KINDS: dict[str, tuple[Callable[[str], Encoder], str]] = {
    "random": (_load_random, "random:vits16"),
    "untrained": (_load_untrained, "untrained:runs/mine"),
    "control": (load_control, "control:color"),
    "timm": (load_timm, "timm:vit_small_patch16_224.dino"),
    "hf": (load_transformers, "hf:facebook/dinov2-small"),
    "hub": (load_hub, "hub:facebookresearch/dinov2:dinov2_vits14"),
}


def _patch_size(model: Any, name: str) -> int:
    """The side of a patch, wherever the model says it."""
    found = (
        _attribute(model, path) for path in ("config.patch_size", "patch_size", "patch_embed.patch_size")
    )
    size = next((value for value in found if value is not None), None)
    sides = set(size) if isinstance(size, tuple | list) else {size}
    side = sides.pop()
    if sides or not isinstance(side, int):
        raise InputError(f"encoder {name} has patch size {size}: need a Vision Transformer, square patches.")
    return side


def _attribute(thing: Any, path: str) -> Any:
    """What is at a dotted path, or None."""
    for name in path.split("."):
        thing = getattr(thing, name, None)
    return thing
