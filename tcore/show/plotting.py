"""What all figures share: one look, files by their ending, pictures without axes, heat maps, outlines."""

import io
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, UInt8
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from tcore.errors import InputError
from tcore.files import atomic

INK, FAINT, GRID = "#22252b", "#7a7f89", "#e8e6e1"
HATCH = ((150, 150, 150), (186, 186, 186))  # stripes of masked patches
# Colors that stay apart for most kinds of color blindness, in the order in which they are used.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#7f4fc9", "#666666")
FORMATS = (".png", ".pdf")
DPI = 130
LOOK: dict[Any, Any] = {
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.0,
    "axes.titlesize": 9.0,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "text.color": INK,
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "pdf.fonttype": 42,
    "svg.fonttype": "none",
}

Picture = UInt8[np.ndarray, "height width 3"]
Cell = tuple[int, int]  # row, column


def check_out(out: Path, formats: Sequence[str] = FORMATS) -> Path:
    """Refuse a file whose ending names no format that can be written."""
    if out.suffix.lower() not in formats:
        raise InputError(f"--out {out}: the file must end in {' or '.join(formats)}.")
    return out


@contextmanager
def drawing(out: Path, size: tuple[float, float], title: str = "", text: str = "") -> Iterator[Figure]:
    """A figure in our look, in inches, that is written as PNG or PDF when the block ends.

    Title above it, a faint text below it; no window, and the look of other figures stays as it was.
    """
    check_out(out)
    with rc_context(LOOK):
        figure = Figure(figsize=size, dpi=DPI, layout="constrained", facecolor="white")
        yield figure
        if title:
            figure.suptitle(title, x=0.008, ha="left", fontsize=11, fontweight="bold")
        if text:
            wrapped = textwrap.fill(text, width=max(40, int(size[0] * 16.5)))
            figure.supxlabel(wrapped, x=0.008, ha="left", fontsize=7.5, color=FAINT)
        with atomic(out) as temporary:
            figure.savefig(temporary, format=out.suffix.lower()[1:], facecolor="white")


def title_of(encoder: str, source: str) -> str:
    """The title of a figure: the last part of the encoder's name, and the clip."""
    name = encoder if ":" in encoder else Path(encoder).resolve().name
    return f"{name}, {source}" if source else name


def to_svg(draw: Callable[[Axes], None], size: tuple[float, float], salt: str) -> str:
    """A plot as an SVG element for an HTML page, whose CSS variables color it; `salt` keeps ids unique."""
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with rc_context(LOOK | {"svg.hashsalt": salt}):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure.add_subplot())
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"| id="[\w.]+_\d+"', "", svg)
    for index, color in enumerate(COLORS):
        svg = svg.replace(color, f"var(--c{index})")
    return svg.replace(INK, "var(--ink)").replace(FAINT, "var(--faint)").replace(GRID, "var(--rule)")


def to_picture(image: Float[Tensor, "3 height width"]) -> Picture:
    """An image of numbers between 0 and 1."""
    return (255 * image.clamp(0, 1)).round().byte().permute(1, 2, 0).numpy()


def show_picture(axes: Axes, picture: Picture, title: str = "") -> None:
    """A picture without ticks, in pixel coordinates from 0 at the edge."""
    height, width = picture.shape[:2]
    axes.imshow(picture, extent=(0, width, height, 0), aspect="equal")
    hide_axes(axes)
    if title:
        axes.set_title(title, loc="left", pad=3)


def hide_axes(axes: Axes) -> None:
    """Neither ticks nor a frame."""
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(False)


def show_heat(axes: Axes, picture: Picture, heat: Float[np.ndarray, "rows columns"], title: str = "") -> None:
    """A map over a grayed picture, scaled from its lowest value to its highest."""
    gray = picture.astype(np.float32).mean(axis=2, keepdims=True) * 0.55
    show_picture(axes, np.repeat(gray, 3, axis=2).astype(np.uint8), title)
    height, width = picture.shape[:2]
    low, top = float(heat.min()), float(heat.max())
    share = (heat - low) / (top - low) if top > low else np.zeros_like(heat)
    axes.imshow(
        share,
        extent=(0, width, height, 0),
        cmap="inferno",
        vmin=0,
        vmax=1,
        alpha=0.2 + 0.75 * share**0.7,
        interpolation="nearest",
        aspect="equal",
    )


def outline(axes: Axes, cell: Cell, patch: int, color: str, *, width: float = 1.6) -> None:
    """A square around a patch, with a light rim so that it shows on any picture."""
    margin = 0.12 * patch  # around the patch, not over it
    corner, side = (cell[1] * patch - margin, cell[0] * patch - margin), patch + 2 * margin
    for edge, thick in (("white", width + 1.2), (color, width)):
        square = Rectangle(corner, side, side, fill=False, edgecolor=edge, linewidth=thick)
        square.set_clip_on(False)
        axes.add_patch(square)


def mask_patches(picture: Picture, mask: Bool[np.ndarray, "rows columns"]) -> Picture:
    """The picture with its masked patches hatched, which shows on pale and on dark ground alike."""
    patch = picture.shape[0] // mask.shape[0]
    hidden = np.kron(mask, np.ones((patch, patch), dtype=bool))
    row, column = np.indices(hidden.shape)
    stripes = np.array(HATCH, dtype=np.uint8)[(row + column) // max(1, patch // 4) % 2]
    return np.where(hidden[..., None], stripes, picture)
