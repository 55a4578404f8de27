"""Where the label of a patch comes from: its sources in the frames that propagation holds."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from tcore.errors import InputError
from tcore.evaluation.encoder import Encoder
from tcore.evaluation.propagate import LabelSource
from tcore.evaluation.protocols import TCORE, Protocol
from tcore.show.attention import choose_patches
from tcore.show.clips import Clip, encode_clip
from tcore.show.plotting import COLORS, Cell, caption, new_figure, outline, save_figure, show_picture, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDEST = 6  # pictures in a row


@dataclass(frozen=True)
class Correspondence:
    """Patches of a frame, and the sources of each: indices into the frames that were given."""

    frame: int
    patches: tuple[Cell, ...]
    sources: tuple[tuple[LabelSource, ...], ...]


def correspond(
    encoder: Encoder,
    clip: Clip,
    *,
    patches: Sequence[Cell] = (),
    count: int = 3,
    protocol: Protocol = TCORE,
) -> Correspondence:
    """Sources of some patches of the last frame of a clip, as propagation from the first one finds them."""
    last = len(clip.frames) - 1
    if last < 1:
        raise InputError("frame 0 has no sources: its labels are given; choose a later --frame.")
    # The context reaches no further back than this; frames before it, but for the first, are gone.
    kept = [0, *range(max(1, last - protocol.context), last + 1)]
    features = encode_clip(encoder, clip.frames[kept])
    grid = (features.shape[2], features.shape[3])
    cells = tuple(patches) or choose_patches(clip.frames[last], np.ones(grid, dtype=bool), count)
    propagator = protocol.propagator()
    propagator.start(features[0], torch.zeros(*grid, 1))
    for frame in features[1:-1]:
        propagator.step(frame)
    found = tuple(
        tuple(s._replace(frame=kept[s.frame]) for s in propagator.sources(features[-1], *cell))
        for cell in cells
    )
    return Correspondence(last, cells, found)


@styled
def correspondence_figure(
    clip: Clip, found: Correspondence, out: Path, *, patch_size: int, protocol: Protocol, title: str = ""
) -> None:
    """Draw the frame with its patches, then the frames that hold their sources."""
    weights: dict[int, float] = {}
    for source in (source for sources in found.sources for source in sources):
        weights[source.frame] = weights.get(source.frame, 0.0) + source.weight / len(found.patches)
    heaviest = sorted(weights, key=lambda frame: -weights[frame])[: 2 * WIDEST - 1]
    shown = sorted(heaviest)
    columns = min(WIDEST, len(shown) + 1)
    rows = -(-(len(shown) + 1) // columns)
    height, width = clip.frames.shape[1:3]
    figure = new_figure(2.1 * columns + 0.3, rows * (2.1 * height / width + 0.2) + 0.6)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for place in axes[len(shown) + 1 :]:
        place.set_visible(False)
    show_picture(axes[0], clip.frames[found.frame], f"{clip.names[found.frame]}: asks")
    for index, cell in enumerate(found.patches):
        outline(axes[0], cell, patch_size, COLORS[index % len(COLORS)])
    for place, frame in zip(axes[1:], shown, strict=False):
        show_picture(place, clip.frames[frame], f"{clip.names[frame]}: {weights[frame]:.0%}")
        for index, sources in enumerate(found.sources):
            _mark(place, [s for s in sources if s.frame == frame], patch_size, COLORS[index % len(COLORS)])
    rest = 1 - sum(weights[frame] for frame in shown)
    text = (
        f"Top-{protocol.topk} sources of each patch (same color), protocol {protocol.name}. Disks: area is "
        "the share in the label. Percent: share of all patches' labels that comes from this frame"
        + (f"; {rest:.0%} from frames not shown." if rest > 0.005 else ".")
    )
    caption(figure, text)
    save_figure(figure, out, title)


def _mark(axes: "Axes", sources: list[LabelSource], patch: int, color: str) -> None:
    """A disk on every source, its area the share."""
    if sources:
        x = [(source.column + 0.5) * patch for source in sources]
        y = [(source.row + 0.5) * patch for source in sources]
        sizes = [30 + 400 * source.weight for source in sources]
        axes.scatter(x, y, s=sizes, c=color, alpha=0.75, edgecolors="white", linewidths=0.9)
