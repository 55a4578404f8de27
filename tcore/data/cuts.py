"""Shot cuts: frames whose colors differ much from those of the frame before.

A frame is described by coarse color histograms of its four quarters. The difference of two frames is the
share of pixels that would have to change their color (0 to 1). A cut is a difference that is large, and
much larger than those around it: fast motion and flicker make many large ones in a row, a cut makes one.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float32, UInt8

LARGE = 0.3  # of the pixels
TIMES = 2.5  # as large as the typical difference nearby
NEARBY = 4  # differences on either side
STILL = 0.002  # a repeated frame says nothing about motion
LEVELS = 5  # of each color
BINS = 4 * LEVELS**3

Colors = Float32[np.ndarray, "500"]


def describe_colors(frame: UInt8[np.ndarray, "height width 3"]) -> Colors:
    """Histograms of the four quarters of a frame, which together sum to 1."""
    height, width = frame.shape[:2]
    step = max(1, min(height, width) // 64)
    small = frame[::step, ::step]
    rows, columns = np.ogrid[: small.shape[0], : small.shape[1]]
    # Dithered: an even surface spreads over two levels, and does not jump when it gets a little lighter.
    dither = ((37 * rows + 23 * columns) % 64).astype(np.uint16)
    level = (small + dither[:, :, None]) >> 6
    quarter = 2 * (2 * rows >= small.shape[0]) + (2 * columns >= small.shape[1])
    bins = ((quarter * LEVELS + level[..., 0]) * LEVELS + level[..., 1]) * LEVELS + level[..., 2]
    return (np.bincount(bins.ravel(), minlength=BINS) / bins.size).astype(np.float32)


class CutFinder:
    """Finds the cuts of a video while its frames pass by."""

    def __init__(self) -> None:
        self._differences: list[float] = []
        self._last: Colors | None = None

    def add(self, frame: UInt8[np.ndarray, "height width 3"], times: int = 1) -> None:
        """The next frame, which is shown `times` times."""
        colors = describe_colors(frame)
        if self._last is not None:
            # The share of pixels that would have to change.
            self._differences.append(float(np.abs(self._last - colors).sum() / 2))
        self._differences += [0.0] * (times - 1)
        self._last = colors

    def cuts(self) -> list[int]:
        """Frames that begin a new shot."""
        return find_cuts(self._differences)


def find_cuts(differences: Sequence[float]) -> list[int]:
    """Frames that begin a new shot; `differences[i]` lies between frame i and frame i + 1.

    >>> find_cuts([0.1, 0.1, 0.9, 0.1, 0.1])
    [3]
    >>> find_cuts([0.5, 0.6, 0.7, 0.6, 0.5])
    []
    """
    cuts = []
    for i, here in enumerate(differences):
        around = [*differences[max(0, i - NEARBY) : i], *differences[i + 1 : i + 1 + NEARBY]]
        moving = sorted(value for value in around if value > STILL)
        typical = moving[len(moving) // 2] if moving else 0.0
        if here > LARGE and here > TIMES * typical:
            cuts.append(i + 1)
    return cuts
