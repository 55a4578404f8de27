"""Our weights in the names and settings of timm and of transformers, and back."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tcore.data.render import MEAN, STD
from tcore.errors import InputError

Weights = dict[str, Tensor]

# Beginnings of names, ours to transformers'; inside a block, see BLOCK_NAMES.
OUTER_NAMES = {
    "cls_token": "embeddings.cls_token",
    "pos_embed": "embeddings.position_embeddings",
    "register_tokens": "embeddings.register_tokens",
    "mask_token": "embeddings.mask_token",
    "patch_embed.proj.weight": "embeddings.patch_embeddings.projection.weight",
    "patch_embed.proj.bias": "embeddings.patch_embeddings.projection.bias",
    "norm.weight": "layernorm.weight",
    "norm.bias": "layernorm.bias",
}
BLOCK_NAMES = {
    "norm1.weight": "norm1.weight",
    "norm1.bias": "norm1.bias",
    "attn.proj.weight": "attention.output.dense.weight",
    "attn.proj.bias": "attention.output.dense.bias",
    "ls1.gamma": "layer_scale1.lambda1",
    "norm2.weight": "norm2.weight",
    "norm2.bias": "norm2.bias",
    "mlp.fc1.weight": "mlp.fc1.weight",
    "mlp.fc1.bias": "mlp.fc1.bias",
    "mlp.fc2.weight": "mlp.fc2.weight",
    "mlp.fc2.bias": "mlp.fc2.bias",
    "ls2.gamma": "layer_scale2.lambda1",
}
QKV = ("query", "key", "value")


def to_timm(state: Mapping[str, Tensor]) -> Weights:
    """Weights for timm, whose positions are those of the grid alone: that of CLS goes into its token."""
    named = {name: value for name, value in state.items() if name not in ("mask_token", "register_tokens")}
    named["cls_token"] = state["cls_token"] + state["pos_embed"][:, :1]
    named["pos_embed"] = state["pos_embed"][:, 1:]
    if state["register_tokens"].shape[1]:  # without registers timm has no such parameter
        named["reg_token"] = state["register_tokens"]
    return named


def timm_config(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a timm folder; `model_args` are the arguments of timm's VisionTransformer."""
    return {
        "architecture": "vit_small_patch16_224",  # any plain one: model_args say all that differs
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


def to_transformers(state: Mapping[str, Tensor]) -> Weights:
    """Weights for Dinov2WithRegistersModel, in the names of its published checkpoints."""
    named: Weights = {}
    for name, value in state.items():
        if name in OUTER_NAMES:
            named[OUTER_NAMES[name]] = value
            continue
        _, number, inner = name.split(".", 2)
        prefix = f"encoder.layer.{number}."
        if inner in BLOCK_NAMES:
            named[prefix + BLOCK_NAMES[inner]] = value
        else:  # attn.qkv.weight or attn.qkv.bias: three projections in one
            last = inner.rpartition(".")[2]
            for which, part in zip(QKV, value.chunk(3), strict=True):
                named[f"{prefix}attention.attention.{which}.{last}"] = part
    return named


def from_transformers(named: Mapping[str, Tensor], source: str) -> Weights:
    """The weights that `to_transformers` named."""
    outer = {theirs: ours for ours, theirs in OUTER_NAMES.items()}
    inner = {theirs: ours for ours, theirs in BLOCK_NAMES.items()}
    state: Weights = {}
    parts: dict[str, Weights] = {}
    for name, value in named.items():
        match = re.fullmatch(r"encoder\.layer\.(\d+)\.(.+)", name)
        split = (
            re.fullmatch(r"attention\.attention\.(query|key|value)\.(weight|bias)", match[2])
            if match
            else None
        )
        if name in outer:
            state[outer[name]] = value
        elif match and match[2] in inner:
            state[f"blocks.{match[1]}.{inner[match[2]]}"] = value
        elif match and split:
            parts.setdefault(f"blocks.{match[1]}.attn.qkv.{split[2]}", {})[split[1]] = value
        else:
            raise InputError(f"{source} holds {name}, which is no weight of an exported encoder.")
    for name, found in parts.items():
        if len(found) < len(QKV):
            raise InputError(f"{source} holds only {', '.join(sorted(found))} of {name}.")
        state[name] = torch.cat([found[which] for which in QKV])
    return state


def transformers_config(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a transformers folder."""
    return {
        "architectures": ["Dinov2WithRegistersModel"],
        "model_type": "dinov2_with_registers",
        "hidden_size": sizes["dim"],
        "num_hidden_layers": sizes["depth"],
        "num_attention_heads": sizes["num_heads"],
        "mlp_ratio": 4,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "layer_norm_eps": 1e-6,
        "image_size": sizes["image_size"],
        "patch_size": sizes["patch_size"],
        "num_channels": 3,
        "qkv_bias": True,
        "layerscale_value": 1.0,
        "drop_path_rate": 0.0,
        "use_swiglu_ffn": False,
        "num_register_tokens": sizes["num_registers"],
        "torch_dtype": "float32",
    }


def transformers_preprocessor() -> dict[str, Any]:
    """The preprocessor_config.json: scale and normalize; the size is the caller's, in whole patches."""
    return {
        "image_processor_type": "BitImageProcessor",
        "do_convert_rgb": True,
        "do_resize": False,
        "do_center_crop": False,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(MEAN),
        "image_std": list(STD),
    }
