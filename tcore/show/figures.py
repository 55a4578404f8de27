"""Pictures of what the method does."""

from pathlib import Path

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageDraw

from tcore.data.rendered import RenderedVideo
from tcore.evaluation.rendered import Propagated
from tcore.files import atomic

# Distinct hues for object ids 1, 2, ...; id 0 is not painted.
PALETTE = np.array(
    [
        (0, 0, 0),
        (230, 57, 70),
        (42, 157, 143),
        (244, 162, 97),
        (69, 123, 229),
        (181, 101, 229),
        (233, 196, 106),
        (0, 180, 216),
        (128, 185, 24),
        (255, 112, 166),
        (112, 72, 60),
        (148, 210, 189),
        (94, 84, 142),
        (255, 214, 10),
        (173, 181, 189),
    ],
    dtype=np.uint8,
)
GAP, CAPTION = 4, 16


def overlay(
    frame: UInt8[np.ndarray, "height width 3"], ids: UInt8[np.ndarray, "height width"], opacity: float = 0.6
) -> UInt8[np.ndarray, "height width 3"]:
    """Paint ids over a frame."""
    colors = PALETTE[np.where(ids > 0, 1 + (ids.astype(np.int64) - 1) % (len(PALETTE) - 1), 0)]
    mixed = (1 - opacity) * frame + opacity * colors
    return np.where((ids > 0)[..., None], mixed, frame).astype(np.uint8)


def propagation_picture(
    video: RenderedVideo, rows: dict[str, Propagated], path: Path, *, columns: int = 6, zoom: int = 1
) -> None:
    """Masks over frames: the truth, then each way to propagate them, one row each."""
    times = np.linspace(0, len(video.frames) - 1, columns).round().astype(int)
    masks = {"truth": video.objects, **{name: found.objects for name, found in rows.items()}}
    side = video.frames.shape[1] * zoom
    sheet = Image.new("RGB", (columns * (side + GAP) + GAP, len(masks) * (side + CAPTION + GAP)), "white")
    draw = ImageDraw.Draw(sheet)
    for row, (name, ids) in enumerate(masks.items()):
        top = row * (side + CAPTION + GAP)
        draw.text((GAP, top + 2), name, fill="black")
        for column, time in enumerate(times):
            picture = Image.fromarray(overlay(video.frames[time], ids[time]))
            sheet.paste(
                picture.resize((side, side), Image.Resampling.NEAREST),
                (GAP + column * (side + GAP), top + CAPTION),
            )
    with atomic(path) as temporary:
        sheet.save(temporary, format="PNG")
