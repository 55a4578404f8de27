"""Released checkpoints of methods that reconstruct pixels, as encoders of frames.

MAE, RC-MAE, SiamMAE, CropMAE and RSP have the names of a Vision Transformer; DropMAE has vectors of time
and no class token; VideoMAE and MAE-ST have tubes, which fold exactly: a frame is repeated over the first.
"""

import re
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tcore.data.render import MEAN, STD
from tcore.model.clips import absorb, fold_tube
from tcore.model.positions import grid_positions, line_positions

Weights = dict[str, Tensor]

IMAGE_SIZE = 224  # that all of them are released for; VideoMAE's positions are not in its files
MAE_ST = (0.45, 0.225)  # mean and deviation of the pixels, of all channels
TIME = ("temporal_pos_embed_x", "temporal_pos_embed_z")  # DropMAE's vectors of the first and the second frame
SPACE = ("pos_embed_class", "pos_embed_spatial", "pos_embed_temporal")  # MAE-ST's positions


class Unified(NamedTuple):
    """Weights by the names of a frame encoder, what follows for its sizes, and what was done."""

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
