"""What an encoder sees: attention over past and future, features as colors, the sources of labels."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tcore.config import from_dict
from tcore.data.render import normalize
from tcore.errors import InputError, first_line
from tcore.evaluation.encoder import Encoder
from tcore.evaluation.encoders import DEFAULT, shipped
from tcore.evaluation.propagate import LabelSource, label_sources
from tcore.evaluation.protocols import TCORE, Protocol
from tcore.files import read_json
from tcore.methods.match_quality import Matcher as Matcher
from tcore.methods.match_quality import build_matcher, draw_mask
from tcore.methods.settings import TCoReSettings
from tcore.model.vit import VisionTransformer, load_safetensors
from tcore.show.clips import Clip, encode_clip
from tcore.show.plotting import (
    COLORS,
    Cell,
    drawing,
    hide_axes,
    mask_patches,
    outline,
    show_heat,
    show_picture,
    title_of,
)
from tcore.training.checkpoint import ENCODER_CARD

WIDEST = 6  # pictures in a row
MASKED = (0.25, 0.35)  # share of the current frame that is masked


def load_matcher(run: str | Path) -> Matcher | None:
    """Student backbone and matching module of a run folder, or of `default`; None if it has none."""
    if run == DEFAULT:
        file, card = shipped().matching, shipped().matching_card
        if not card.is_file():  # files of an earlier version: both are of one run
            card = shipped().card
    else:
        file, card = Path(run) / "matching.safetensors", Path(run) / ENCODER_CARD
    if not file.is_file():
        return None
    config = from_dict(read_json(card, shape={"config": dict})["config"], f"{card}: ")
    vit, grid = config.vit, config.views.global_size // config.vit.patch_size
    least = vit.dim * (12 * vit.dim * vit.depth + 3 * vit.patch_size**2 + grid**2)
    # No other method writes this file; a number of 16 bits or more for each weight.
    if not isinstance(config.method, TCoReSettings) or 2 * least > file.stat().st_size:
        raise InputError(f"{file} does not fit {card}: these are not of one run.")
    try:
        return build_matcher(config, {name: value.float() for name, value in load_safetensors(file).items()})
    except Exception as error:  # a damaged file, or weights of other names or shapes
        raise InputError(f"cannot read {file}: {first_line(error)}.") from error


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
def attend(encoder: Encoder, clip: Clip, matcher: Matcher | None, patches: Sequence[Cell]) -> Attention:
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
    mask = draw_mask(grid, np.random.default_rng(0), MASKED)
    for cell in patches:
        mask[cell] = True
    queries = tuple(patches) or choose_patches(clip.frames[1], mask, 4)
    rows = torch.tensor([row * grid[1] + column for row, column in queries])
    images = normalize(torch.from_numpy(clip.frames).permute(0, 3, 1, 2).float() / 255)
    if matcher is not None:
        masked = torch.from_numpy(mask.reshape(1, -1))
        current, scene = matcher.backbone(images[1:2], masked).patches, matcher.scene(masked, grid)
        others = (matcher.backbone(images[i : i + 1]).patches for i in (0, 2))
        maps = [matcher.match.cross_attention(current, other, scene)[0][:, rows] for other in others]
    else:
        unit = torch.nn.functional.normalize(encode_clip(encoder, clip.frames).flatten(2), dim=1)
        maps = [(unit[1].T[rows] @ unit[i])[None].clamp(min=0) for i in (0, 2)]
        mask[:] = False
    past, future = (_grid(m.transpose(0, 1), grid) for m in maps)
    frame_token = None
    # Of the network whose patches are asked: the module of `default` is of another run than its encoder.
    backbone = encoder.backbone if matcher is None else matcher.backbone
    if isinstance(backbone, VisionTransformer):
        frame_token = _grid(backbone.frame_attention(images), grid)
    return Attention(queries, mask, past, future, frame_token, matcher is not None)


def _grid(maps: Float[Tensor, "some heads n"], grid: tuple[int, int]) -> np.ndarray:
    return maps.float().cpu().unflatten(2, grid).numpy()


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


def attention_figure(
    encoder: Encoder,
    clip: Clip,
    out: Path,
    *,
    matcher: Matcher | None = None,
    patches: Sequence[Cell] = (),
    heads: Literal["mean", "each"] = "mean",
) -> Attention:
    """Draw past, current and future, with a column for each queried patch, or also for each of its heads."""
    found = attend(encoder, clip, matcher, patches)
    patch_size, title = encoder.patch_size, title_of(encoder.name, clip.source)
    last = found.past.shape[1] if heads == "each" else 0
    maps = [(index, head) for index in range(len(found.queries)) for head in range(-1, last)]
    frame_token = found.frame_token
    first = 1 + (frame_token is not None)
    height, width = clip.frames.shape[1:3]
    with drawing(
        out, (1.75 * (first + len(maps)) + 0.5, 1.75 * 3 * height / width + 0.95), title, text=_explain(found)
    ) as figure:
        axes = figure.subplots(3, first + len(maps), squeeze=False)
        masked = mask_patches(clip.frames[1], found.mask)
        for row, name in enumerate(("past", "current", "future")):
            show_picture(axes[row, 0], masked if row == 1 else clip.frames[row], f"{name}: {clip.names[row]}")
            if frame_token is not None:
                text = "frame token" if row == 0 else ""
                show_heat(axes[row, 1], clip.frames[row], frame_token[row].mean(axis=0), text)
        for column, (index, head) in enumerate(maps, start=first):
            cell, color = found.queries[index], COLORS[index % len(COLORS)]
            name = f"patch {cell[0]}, {cell[1]}: " if head < 0 else f"head {head + 1}: "
            for row, past_or_future in ((0, found.past), (2, found.future)):
                heat = past_or_future[index].mean(axis=0) if head < 0 else past_or_future[index, head]
                # Attention in multiples of uniform attention, or a cosine.
                peak = f"peak {heat.max() * heat.size:.1f}x" if found.matched else f"cosine {heat.max():.2f}"
                show_heat(axes[row, column], clip.frames[row], heat, name + peak if row == 0 else peak)
                highest = divmod(int(heat.argmax()), heat.shape[1])
                outline(axes[row, column], highest, patch_size, color, width=1.4)
            show_picture(axes[1, column], masked)
            outline(axes[1, column], cell, patch_size, color)
    return found


def _explain(found: Attention) -> str:
    """What the maps show."""
    text = "Feature similarity (cosine): this encoder has no patch matching module."
    if found.matched:
        text = "Cross-attention of the patch matching module for masked patches (hatched). "
        text += "Peak: highest attention, in multiples of uniform attention."
    text += " Squares: the queried patch, and the highest patch of each map. Each map has its own scale."
    token = " Frame token: attention of the last block, mean over heads."
    return text + ("" if found.frame_token is None else token)


def pca_colors(
    features: Float[Tensor, "time channels rows columns"],
) -> tuple[Float[np.ndarray, "time rows columns 3"], float]:
    """Colors in [0, 1] from the first three components of all patches, and their share of the variance.

    A component ranges from its 1st to its 99th percentile; its largest loading is positive.
    """
    time, channels, rows, columns = features.shape
    points = features.permute(0, 2, 3, 1).reshape(-1, channels).double()
    points = points - points.mean(dim=0)
    _, values, directions = torch.linalg.svd(points, full_matrices=False)
    kept = directions[:3]
    largest = kept.gather(1, kept.abs().argmax(dim=1, keepdim=True))
    scores = (points @ (kept * largest.sign()).T).numpy()
    low, high = np.percentile(scores, [1, 99], axis=0)
    colors = np.clip((scores - low) / np.maximum(high - low, 1e-12), 0, 1)
    if colors.shape[1] < 3:
        colors = np.pad(colors, ((0, 0), (0, 3 - colors.shape[1])), constant_values=0.5)
    total = float(values.square().sum())
    explained = float(values[:3].square().sum()) / total if total else 0.0
    return colors.reshape(time, rows, columns, 3), explained


def pca_figure(encoder: Encoder, clip: Clip, out: Path) -> float:
    """Draw frames above their features as colors; returns the share of the variance that is shown."""
    colors, explained = pca_colors(encode_clip(encoder, clip.frames))
    count, (height, width) = len(clip.frames), clip.frames.shape[1:3]
    text = f"Colors: first three principal components over all frames, {explained:.0%} of the variance."
    size, title = (1.8 * count + 0.3, 3.5 * height / width + 0.85), title_of(encoder.name, clip.source)
    with drawing(out, size, title, text=text) as figure:
        axes = figure.subplots(2, count, squeeze=False)
        for column in range(count):
            show_picture(axes[0, column], clip.frames[column], clip.names[column])
            axes[1, column].imshow(colors[column], interpolation="nearest", aspect="equal")
            hide_axes(axes[1, column])
    return explained


Sources = dict[Cell, list[LabelSource]]
"""Patches of the last frame of a clip, and the sources of each; their frames are indices into the clip."""


def correspondence_figure(
    encoder: Encoder, clip: Clip, out: Path, *, patches: Sequence[Cell] = (), protocol: Protocol = TCORE
) -> Sources:
    """Draw the last frame with its patches, then the frames that hold their sources."""
    features = encode_clip(encoder, clip.frames)
    grid = (features.shape[2], features.shape[3])
    cells = tuple(patches) or choose_patches(clip.frames[-1], np.ones(grid, dtype=bool), 3)
    found = dict(zip(cells, label_sources(features, cells, protocol), strict=True))
    patch_size, title = encoder.patch_size, title_of(encoder.name, clip.source)
    weights: dict[int, float] = {}
    for source in chain(*found.values()):
        weights[source.frame] = weights.get(source.frame, 0.0) + source.weight / len(found)
    shown = sorted(sorted(weights, key=lambda frame: -weights[frame])[: 2 * WIDEST - 1])
    columns = min(WIDEST, len(shown) + 1)
    rows = -(-(len(shown) + 1) // columns)
    height, width = clip.frames.shape[1:3]
    rest = 1 - sum(weights[frame] for frame in shown)
    text = (
        f"Top-{protocol.topk} sources of each patch (same color), protocol {protocol.name}. Area of a disk: "
        "share in the label. Percent: share of all patches' labels that comes from this frame"
        + (f"; {rest:.0%} from frames not shown." if rest > 0.005 else ".")
    )
    with drawing(
        out, (2.1 * columns + 0.3, rows * (2.1 * height / width + 0.2) + 0.6), title, text=text
    ) as figure:
        axes = figure.add_subplot(rows, columns, 1)
        show_picture(axes, clip.frames[-1], f"{clip.names[-1]}: patches")
        for index, cell in enumerate(found):
            outline(axes, cell, patch_size, COLORS[index % len(COLORS)])
        for place, frame in enumerate(shown, start=2):
            axes = figure.add_subplot(rows, columns, place)
            show_picture(axes, clip.frames[frame], f"{clip.names[frame]}: {weights[frame]:.0%}")
            for index, sources in enumerate(found.values()):
                own = [source for source in sources if source.frame == frame]
                axes.scatter(
                    [(source.column + 0.5) * patch_size for source in own],
                    [(source.row + 0.5) * patch_size for source in own],
                    s=[30 + 400 * source.weight for source in own],
                    c=COLORS[index % len(COLORS)],
                    alpha=0.75,
                    edgecolors="white",
                    linewidths=0.9,
                )
    return found
