"""Patch features as colors: three principal components that all frames share."""

from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tcore.evaluation.encoder import Encoder
from tcore.show.clips import Clip, encode_clip
from tcore.show.plotting import caption, hide_axes, new_figure, save_figure, show_picture, styled


def pca_colors(
    features: Float[Tensor, "time channels rows columns"],
) -> tuple[Float[np.ndarray, "time rows columns 3"], float]:
    """Colors in [0, 1] from the first three components of all patches, and their share of the variance.

    The 1st and 99th percentile of a component are its ends; its sign is that of its largest loading.
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


@styled
def pca_figure(encoder: Encoder, clip: Clip, out: Path, *, title: str = "") -> float:
    """Draw frames above their features in colors; returns the share of the variance that is shown."""
    colors, explained = pca_colors(encode_clip(encoder, clip.frames))
    count, (height, width) = len(clip.frames), clip.frames.shape[1:3]
    figure = new_figure(1.8 * count + 0.3, 3.5 * height / width + 0.85)
    axes = figure.subplots(2, count, squeeze=False)
    for column in range(count):
        show_picture(axes[0, column], clip.frames[column], clip.names[column])
        axes[1, column].imshow(colors[column], interpolation="nearest", aspect="equal")
        hide_axes(axes[1, column])
    text = f"Colors: first three principal components over all frames, {explained:.0%} of the variance."
    caption(figure, text)
    save_figure(figure, out, title)
    return explained
