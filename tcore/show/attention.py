"""Attention of masked patches of the current frame over past and future, and of the frame token."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float
from matplotlib.axes import Axes
from torch import Tensor

from tcore.data.masking import sample_masks
from tcore.errors import InputError
from tcore.evaluation.encoder import Encoder
from tcore.evaluation.resize import normalize_images
from tcore.model.vit import VisionTransformer
from tcore.show.clips import Clip, encode_clip
from tcore.show.matcher import Matcher
from tcore.show.plotting import (
    COLORS,
    Cell,
    caption,
    check_out,
    hide_axes,
    mask_patches,
    new_figure,
    outline,
    save_figure,
    show_heat,
    show_picture,
    styled,
)

Heads = Literal["mean", "each"]
MASKED = (0.25, 0.35)  # share of the current frame that is masked


@dataclass(frozen=True)
class Attention:
    """A map over past and future for each queried patch, and the maps of the frame token."""

    queries: tuple[Cell, ...]
    mask: Bool[np.ndarray, "rows columns"]
    past: Float[np.ndarray, "queries heads rows columns"]
    future: Float[np.ndarray, "queries heads rows columns"]
    frame_token: Float[np.ndarray, "three frame_heads rows columns"] | None
    matched: bool
    """False if the encoder has no matching module: the maps are then similarities of features."""


@torch.no_grad()
def attend(
    encoder: Encoder,
    clip: Clip,
    *,
    matcher: Matcher | None = None,
    patches: Sequence[Cell] = (),
    count: int = 4,
    seed: int = 0,
) -> Attention:
    """Attention of masked patches of the middle one of three frames over the first and the last.

    Without `patches`, masked ones of high contrast are chosen, away from one another. Without a matching
    module, the maps are cosines of features, and no patch is masked.
    """
    if len(clip.frames) != 3:
        raise InputError(f"attention needs three frames, past, current and future; got {len(clip.frames)}.")
    grid = (clip.frames.shape[1] // encoder.patch_size, clip.frames.shape[2] // encoder.patch_size)
    for row, column in patches:
        if not (0 <= row < grid[0] and 0 <= column < grid[1]):
            raise InputError(f"--patch {row} {column}: the grid has {grid[0]}x{grid[1]} patches, from 0.")
    mask = draw_mask(grid, seed)
    for cell in patches:
        mask[cell] = True
    queries = tuple(patches) or choose_patches(clip.frames[1], mask, count)
    rows = torch.tensor([row * grid[1] + column for row, column in queries])
    images = normalize_images(clip.tensor().permute(0, 3, 1, 2).float() / 255)
    if matcher is not None:
        current = matcher.backbone(images[1:2], torch.from_numpy(mask.reshape(1, -1))).patches
        others = (matcher.backbone(images[i : i + 1]).patches for i in (0, 2))
        maps = [matcher.match.cross_attention(current, other)[0][:, rows] for other in others]
    else:
        unit = torch.nn.functional.normalize(encode_clip(encoder, clip.frames).flatten(2), dim=1)
        maps = [(unit[1].T[rows] @ unit[i])[None].clamp(min=0) for i in (0, 2)]
        mask[:] = False
    past, future = (_grid(m.transpose(0, 1), grid) for m in maps)
    frame_token = None
    if isinstance(encoder.backbone, VisionTransformer):
        frame_token = _grid(encoder.backbone.frame_attention(images), grid)
    return Attention(queries, mask, past, future, frame_token, matcher is not None)


def _grid(maps: Float[Tensor, "some heads n"], grid: tuple[int, int]) -> np.ndarray:
    return maps.float().cpu().unflatten(2, grid).numpy()


def draw_mask(grid: tuple[int, int], seed: int) -> Bool[np.ndarray, "rows columns"]:
    """Mask blocks as in training, on a grid of any shape."""
    side = max(grid)
    masks = sample_masks(np.random.default_rng(seed), 2, side, probability=0.5, ratio=MASKED)
    return masks[masks.any(axis=1)][0].reshape(side, side)[: grid[0], : grid[1]].copy()


def choose_patches(frame: np.ndarray, mask: Bool[np.ndarray, "rows columns"], count: int) -> tuple[Cell, ...]:
    """Masked patches of high contrast, at least a sixth of the grid apart if possible."""
    rows, columns = mask.shape
    patch = frame.shape[0] // rows
    gray = frame.astype(np.float32).mean(axis=2).reshape(rows, patch, columns, patch)
    contrast = np.where(mask, gray.std(axis=(1, 3)), -1.0)
    order = np.argsort(-contrast, axis=None)[: int(mask.sum())]
    cells = [(int(i) // columns, int(i) % columns) for i in order]
    chosen: list[Cell] = []
    for apart in (max(rows, columns) / 6, 0.0):
        for cell in cells:
            far = all(np.hypot(cell[0] - c[0], cell[1] - c[1]) > apart for c in chosen)
            if len(chosen) < count and far:
                chosen.append(cell)
    return tuple(chosen)


@styled
def attention_figure(
    clip: Clip, found: Attention, out: Path, *, patch_size: int, heads: Heads = "mean", title: str = ""
) -> None:
    """Draw the maps: a column for each queried patch, or a row for each and a column for each head."""
    check_out(out)
    if heads == "each":
        _draw_heads(clip, found, out, patch_size, title)
        return
    height, width = clip.frames.shape[1:3]
    frame_token = found.frame_token
    columns = 1 + (frame_token is not None) + len(found.queries)
    figure = new_figure(1.75 * columns + 0.5, 1.75 * 3 * height / width + 0.95)
    axes = figure.subplots(3, columns, squeeze=False)
    for row, name in enumerate(("past", "current", "future")):
        picture = clip.frames[row]
        seen = mask_patches(picture, found.mask) if row == 1 else picture
        show_picture(axes[row, 0], seen, f"{name}: {clip.names[row]}")
        if frame_token is not None:
            text = "frame token" if row == 0 else ""
            show_heat(axes[row, 1], picture, frame_token[row].mean(axis=0), text)
    for index, cell in enumerate(found.queries):
        color, column = COLORS[index % len(COLORS)], columns - len(found.queries) + index
        name = f"patch {cell[0]}, {cell[1]}"
        for row, maps in ((0, found.past), (2, found.future)):
            heat = maps[index].mean(axis=0)
            peak = _peak(heat, found.matched)
            show_heat(axes[row, column], clip.frames[row], heat, f"{name}: {peak}" if row == 0 else peak)
            mark_peak(axes[row, column], heat, patch_size, color)
        show_picture(axes[1, column], mask_patches(clip.frames[1], found.mask))
        outline(axes[1, column], cell, patch_size, color)
    caption(figure, _explain(found))
    save_figure(figure, out, title)


def _draw_heads(clip: Clip, found: Attention, out: Path, patch_size: int, title: str) -> None:
    """Two rows for each patch, past and future; a column for the mean and for every head."""
    count = found.past.shape[1]
    height, width = clip.frames.shape[1:3]
    rows = 2 * len(found.queries)
    figure = new_figure(1.3 * (count + 2) + 0.4, 1.4 * rows * height / width + 0.9)
    axes = figure.subplots(rows, count + 2, squeeze=False)
    for index, cell in enumerate(found.queries):
        color = COLORS[index % len(COLORS)]
        show_picture(
            axes[2 * index, 0], mask_patches(clip.frames[1], found.mask), f"patch {cell[0]}, {cell[1]}"
        )
        outline(axes[2 * index, 0], cell, patch_size, color)
        hide_axes(axes[2 * index + 1, 0])
        for row, (name, maps) in enumerate((("past", found.past), ("future", found.future))):
            picture = clip.frames[2 * row]
            for head in range(-1, count):
                heat = maps[index].mean(axis=0) if head < 0 else maps[index, head]
                text = f"{name}, mean" if head < 0 else f"head {head + 1}"
                place = axes[2 * index + row, head + 2]
                show_heat(place, picture, heat, text)
                mark_peak(place, heat, patch_size, color)
    caption(figure, _explain(found, per_head=True))
    save_figure(figure, out, title)


def _peak(heat: Float[np.ndarray, "rows columns"], matched: bool) -> str:
    """The highest value of a map: attention in multiples of uniform attention, or a cosine."""
    return f"peak {heat.max() * heat.size:.1f}x" if matched else f"cosine {heat.max():.2f}"


def mark_peak(axes: Axes, heat: Float[np.ndarray, "rows columns"], patch: int, color: str) -> None:
    """An outline around the highest patch of a map."""
    row, column = divmod(int(heat.argmax()), heat.shape[1])
    outline(axes, (row, column), patch, color, width=1.4)


def _explain(found: Attention, *, per_head: bool = False) -> str:
    """What the maps show."""
    squares = "Squares: the queried patch, and the highest patch of each map. Each map has its own scale."
    if not found.matched:
        text = f"Feature similarity (cosine): this encoder has no patch matching module. {squares}"
    else:
        text = f"Cross-attention of the patch matching module for masked patches (gray). {squares}"
        text += "" if per_head else " Peak: highest attention, in multiples of uniform attention."
    frame_token = " Frame token: attention of the last block, mean over heads."
    return text + ("" if per_head or found.frame_token is None else frame_token)
