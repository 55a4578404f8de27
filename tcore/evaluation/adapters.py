"""Models of timm, transformers and torch.hub as encoders; their packages are imported when asked for."""

import importlib
import inspect
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tcore.data.render import MEAN, STD
from tcore.errors import InputError
from tcore.evaluation.checkpoints import listing
from tcore.evaluation.encoder import Adapted, Encoder
from tcore.model.vit import VisionTransformer

# How a spec of each kind is written.
EXAMPLES = {
    "random": "random:vits16",
    "control": "control:color",
    "timm": "timm:vit_small_patch16_224.dino",
    "hf": "hf:facebook/dinov2-small",
    "hub": "hub:facebookresearch/dinov2:dinov2_vits14",
}


def load_timm(name: str) -> Encoder:
    """A model of timm by its name, with its weights."""
    timm = _import("timm", f"timm:{name}")
    try:
        model = timm.create_model(name, pretrained=True, num_classes=0, dynamic_img_size=True)
    except Exception as error:  # unknown names, no network and unfit models each raise their own
        raise InputError(f"cannot load timm:{name}: {reason(error)}.") from error
    return adapt_timm(model, f"timm:{name}")


def adapt_timm(model: Any, name: str) -> Encoder:
    """An encoder around a timm Vision Transformer."""
    # Models that pool by averaging keep their final norm behind the pooling.
    behind = getattr(model, "fc_norm", None) if isinstance(model.norm, nn.Identity) else None

    def read(images: Tensor) -> Tensor:
        tokens = model.forward_features(images)
        return tokens if behind is None else behind(tokens)

    known = getattr(model, "pretrained_cfg", None) or {}
    adapted = Adapted(
        model,
        read,
        patch_size=_patch_size(model, name),
        num_prefix=model.num_prefix_tokens,
        mean=known.get("mean", MEAN),
        std=known.get("std", STD),
    )
    return Encoder(adapted, name, _describe("timm model", adapted))


def load_transformers(name: str) -> Encoder:
    """A model of transformers by its name or from a folder."""
    transformers = _import("transformers", f"hf:{name}")
    try:
        model, info = transformers.AutoModel.from_pretrained(name, output_loading_info=True)
    except Exception as error:  # unknown names, no network and unfit folders each raise their own
        raise InputError(f"cannot load hf:{name}: {reason(error)}.") from error
    # Heads are no part of an encoder: those of the file are not needed, nor those that it lacks.
    head = re.compile(r"(.*\.)?(pooler|classifier|head|decoder)\.")
    problems = [f"missing {key}" for key in info["missing_keys"] if not head.match(key)]
    problems += [f"unexpected {key}" for key in info["unexpected_keys"] if not head.match(key)]
    problems += [f"misshapen {key}" for key in info["mismatched_keys"]]
    if problems:
        raise InputError(
            f"weights of hf:{name} do not fit, {len(problems)} keys: {listing(sorted(problems))}."
        )
    try:
        folder = Path(name).is_dir()
        file = (
            Path(name) if folder else Path(transformers.utils.cached_file(name, "preprocessor_config.json"))
        )
        known = json.loads(
            (file / "preprocessor_config.json" if folder else file).read_text(encoding="utf-8")
        )
    except Exception:  # many models have none, and the report says what is used instead
        known = {}
    encoder = adapt_transformers(
        model, f"hf:{name}", known.get("image_mean", MEAN), known.get("image_std", STD)
    )
    left_out = len(info["unexpected_keys"])
    encoder.report += f"\nleft out: heads ({left_out} keys)" if left_out else ""
    return encoder


def adapt_transformers(
    model: Any, name: str, mean: Sequence[float] = MEAN, std: Sequence[float] = STD
) -> Encoder:
    """An encoder around a Vision Transformer of transformers."""
    size = _patch_size(model, name)
    accepted = inspect.signature(model.forward).parameters
    resized = {"interpolate_pos_encoding": True} if "interpolate_pos_encoding" in accepted else {}
    # An MAE hides patches and shuffles the rest by noise: hide none, and let the noise keep their order.
    hides = "noise" in accepted
    if hides:
        model.config.mask_ratio = 0.0

    def read(images: Tensor) -> Tensor:
        patches = (images.shape[-2] // size) * (images.shape[-1] // size)
        order = torch.arange(patches, dtype=torch.float32, device=images.device).expand(len(images), -1)
        return model(pixel_values=images, **resized, **({"noise": order} if hides else {})).last_hidden_state

    registers = getattr(model.config, "num_register_tokens", None)
    prefix = None if registers is None else 1 + registers
    adapted = Adapted(model, read, patch_size=size, num_prefix=prefix, mean=mean, std=std)
    return Encoder(adapted, name, _describe("transformers model", adapted))


def load_hub(name: str) -> Encoder:
    """An entry of a torch.hub repository: REPO:NAME."""
    repo, _, entry = name.rpartition(":")
    if not repo or not entry:
        raise InputError(f"encoder 'hub:{name}' needs a repository and a name, as in {EXAMPLES['hub']}.")
    source = "local" if Path(repo).is_dir() else "github"
    try:
        model = torch.hub.load(repo, entry, source=source, trust_repo="check", verbose=False)
    except Exception as error:  # the code of a repository can raise anything
        raise InputError(f"cannot load hub:{name}: {reason(error)}.") from error
    return adapt_hub(model, f"hub:{name}")


def adapt_hub(model: Any, name: str) -> Encoder:
    """An encoder around a Vision Transformer of DINO, DINOv2 or alike, or around one of ours."""
    if isinstance(model, Encoder):
        return Encoder(model.backbone, name, model.report)
    if isinstance(model, VisionTransformer):
        return Encoder(model, name, "encoder of this project")

    def read(images: Tensor) -> Tensor:
        if hasattr(model, "forward_features"):
            found = model.forward_features(images)
        elif hasattr(model, "get_intermediate_layers"):
            found = model.get_intermediate_layers(images, 1)[0]
        else:
            found = model(images)
        found = found.get("x_norm_patchtokens") if isinstance(found, dict) else found
        if not isinstance(found, Tensor):
            raise InputError(f"encoder {name} answers with a {type(found).__name__}, not with tokens.")
        return found

    adapted = Adapted(model, read, patch_size=_patch_size(model, name))
    return Encoder(adapted, name, _describe("torch.hub model", adapted))


def _describe(what: str, adapted: Adapted) -> str:
    prefix = "all" if adapted.num_prefix is None else str(adapted.num_prefix)
    lines = [f"{what}, patch {adapted.patch_size}; {prefix} tokens before the patches are dropped"]
    lines.append(f"images normalized {'as the model was trained' if adapted.renormalizes else 'as ImageNet'}")
    return "\n".join([*lines, "positions on other grids: by the code of the model"])


def _patch_size(model: Any, name: str) -> int:
    """The side of a patch, wherever the model says it."""
    found = (attribute(model, path) for path in ("config.patch_size", "patch_size", "patch_embed.patch_size"))
    size = next((value for value in found if value is not None), None)
    sides = set(size) if isinstance(size, tuple | list) else {size}
    side = sides.pop()
    if sides or not isinstance(side, int):
        raise InputError(
            f"encoder {name} has patch size {size}: only Vision Transformers of square patches do."
        )
    return side


def attribute(thing: Any, path: str) -> Any:
    """What lies at a dotted path, or None."""
    for name in path.split("."):
        thing = getattr(thing, name, None)
    return thing


def _import(package: str, spec: str) -> Any:
    """A package that only some encoders need."""
    try:
        return importlib.import_module(package)
    except (ImportError, RuntimeError) as error:  # beside another torch it can fail with either
        raise InputError(
            f"{spec} needs the package {package}, which does not import ({reason(error)}): "
            f"pip install {package}."
        ) from error


def reason(error: Exception) -> str:
    """The first line of what an exception says."""
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
