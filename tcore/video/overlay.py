"""Labels painted over frames."""

import math

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image, ImageDraw

from tcore.data.images import Frame
from tcore.evaluation.masks import Ids

# Distinct hues for object ids 1, 2, ...; id 0 is not painted.
HUES = (
    "000000 e63946 2a9d8f f4a261 457be5 b565e5 e9c46a 00b4d8 80b918 ff70a6 70483c 94d2bd 5e548e ffd60a adb5bd"
)
PALETTE = np.array([tuple(bytes.fromhex(hue)) for hue in HUES.split()], dtype=np.uint8)


def paint_ids(frame: Frame, ids: Ids, opacity: float = 0.6) -> Frame:
    """A frame with its ids over it, in the colors of the palette; 0 stays as it is."""
    colors = PALETTE[np.where(ids > 0, 1 + (ids.astype(np.int64) - 1) % (len(PALETTE) - 1), 0)]
    mixed = (1 - opacity) * frame + opacity * colors
    return np.where((ids > 0)[..., None], mixed, frame).astype(np.uint8)


def paint_points(frame: Frame, points: Float[np.ndarray, "points 3"]) -> UInt8[np.ndarray, "rows columns 3"]:
    """A frame with a dot on every point (x, y, confidence) that is not lost."""
    image = Image.fromarray(frame)
    draw, radius = ImageDraw.Draw(image), max(2, min(frame.shape[:2]) // 80)
    for number, (x, y, _) in enumerate(points.tolist()):
        if not math.isnan(x):
            color = tuple(PALETTE[1 + number % (len(PALETTE) - 1)].tolist())
            draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=color, outline="white")
    return np.asarray(image)
