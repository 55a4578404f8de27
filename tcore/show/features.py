"""What patch features show: their principal components as colors, and where propagated labels come from."""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tcore.evaluation.encoder import Encoder
from tcore.evaluation.propagate import LabelSource, label_sources
from tcore.evaluation.protocols import TCORE, Protocol
from tcore.show.attention import choose_patches
from tcore.show.clips import Clip, encode_clip
from tcore.show.plotting import COLORS, Cell, drawing, hide_axes, outline, show_picture, title_of

WIDEST = 6  # pictures in a row


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


def find_sources(encoder: Encoder, clip: Clip, patches: Sequence[Cell], protocol: Protocol) -> Sources:
    """The sources of some patches of the last frame, as propagation from the first frame finds them."""
    features = encode_clip(encoder, clip.frames)
    grid = (features.shape[2], features.shape[3])
    cells = tuple(patches) or choose_patches(clip.frames[-1], np.ones(grid, dtype=bool), 3)
    return dict(zip(cells, label_sources(features, cells, protocol), strict=True))


def correspondence_figure(
    encoder: Encoder,
    clip: Clip,
    out: Path,
    *,
    patches: Sequence[Cell] = (),
    protocol: Protocol = TCORE,
) -> Sources:
    """Draw the last frame with its patches, then the frames that hold their sources."""
    found = find_sources(encoder, clip, patches, protocol)
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
