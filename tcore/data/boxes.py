"""Boxes of views without colors: drawn in one try, from a list, or inside of another; and which frames."""

import math

import numpy as np
from jaxtyping import Bool, Int64

from tcore.data.views import ASPECT, NO_JITTER, Range, Size, ViewPlan

SCALES = (1.0, 0.875, 0.75, 0.66)  # of the short side, for boxes from a list
NEAR = 3  # sides that differ from the wanted one by less than this become the wanted one

Box = tuple[int, int, int, int]  # top, left, height, width


def one_try_shape(size: Size, share: float, aspect: float) -> Size:
    """Height and width of a box of this share of the area, cut off where the frame ends."""
    height, width = size
    area = share * height * width
    return (min(height, round(math.sqrt(area / aspect))), min(width, round(math.sqrt(area * aspect))))


def one_try_box(size: Size, area: Range, rng: np.random.Generator) -> Box:
    """Draw a box in one try: share of the area uniform, aspect log-uniform."""
    share, aspect, *place = rng.random(4)
    low, high = (math.log(bound) for bound in ASPECT)
    height, width = one_try_shape(
        size, area[0] + (area[1] - area[0]) * share, math.exp(low + (high - low) * aspect)
    )
    top, left = (int(u * (side - own + 1)) for u, side, own in zip(place, size, (height, width), strict=True))
    return top, left, max(1, height), max(1, width)


def multi_scale_shapes(size: Size, wanted: int) -> list[Size]:
    """Heights and widths that VideoMAE chooses from (arXiv:2203.12602): neighbors in a list of sides."""
    sides = [int(min(size) * scale) for scale in SCALES]
    sides = [wanted if abs(side - wanted) < NEAR else side for side in sides]
    places = range(len(sides))
    return [(sides[h], sides[w]) for h in places for w in places if abs(h - w) <= 1]


def multi_scale_places(size: Size, box: Size) -> list[tuple[int, int]]:
    """Tops and lefts that a box is put at: corners, center, middles of the edges, quarter points."""
    down, across = ((side - own) // 4 for side, own in zip(size, box, strict=True))
    steps = [(0, 0), (0, 4), (4, 0), (4, 4), (2, 2), (2, 0), (2, 4), (4, 2), (0, 2)]
    steps += [(1, 1), (1, 3), (3, 1), (3, 3)]
    return [(y * down, x * across) for y, x in steps]


def multi_scale_box(size: Size, wanted: int, rng: np.random.Generator) -> Box:
    """Draw one of these shapes, and one of its places."""
    shapes = multi_scale_shapes(size, wanted)
    shape = shapes[rng.integers(len(shapes))]
    places = multi_scale_places(size, shape)
    return (*places[rng.integers(len(places))], *shape)


def inside(outer: Box, inner: Box, side: int) -> Box:
    """A box of the view that shows `outer` at this side, as a box of the frame, in whole pixels.

    >>> inside((10, 20, 112, 224), (56, 0, 112, 112), 224)
    (38, 20, 56, 112)
    """
    edges = []
    for axis in range(2):
        scale = outer[2 + axis] / side
        first = outer[axis] + inner[axis] * scale
        edges.append((round(first), round(first + inner[2 + axis] * scale)))
    (top, bottom), (left, right) = edges
    return top, left, max(1, bottom - top), max(1, right - left)


def plain_views(frame: Int64[np.ndarray, "n"], boxes: list[Box], flip: Bool[np.ndarray, "n"]) -> ViewPlan:
    """Views of these boxes, colors left alone."""
    n = len(frame)
    none = np.zeros(n, dtype=bool)
    return ViewPlan(
        frame=frame,
        box=np.array(boxes, dtype=np.int64).reshape(n, 4),
        flip=flip,
        jitter=np.tile(NO_JITTER, (n, 1)),
        order=np.tile(np.arange(4), (n, 1)),
        gray=none,
        blur=np.zeros(n),
        solarize=none,
        wide_blur=none,
    )


# Which frames of a video. Numbers are drawn here; the rules are those of the released code.


def one_frame(length: int, stretch: Range, rng: np.random.Generator) -> int:
    """A frame, uniform over this stretch of the video."""
    first, last = (int(share * length) for share in stretch)
    return int(rng.integers(first, max(first + 1, last)))


def gap_first(length: int, gap: tuple[int, int], rng: np.random.Generator) -> tuple[int, int]:
    """Two frames: the gap is drawn, then where it fits (SiamMAE as released with CropMAE)."""
    low, high = (min(bound, length - 1) for bound in gap)
    apart = int(rng.integers(low, high, endpoint=True))
    first = int(rng.integers(length - apart))
    return first, first + apart


def room_first(length: int, gap: tuple[int, int], rng: np.random.Generator) -> tuple[int, int]:
    """Two frames: the first has room for the largest gap; in short videos any two in order (RSP)."""
    low, high = gap
    if length > high:
        first = int(rng.integers(length - high))
        return first, first + int(rng.integers(low, high, endpoint=True))
    first, second = np.sort(rng.choice(length, size=2, replace=length < 2)).tolist()
    return first, second


def start_first(length: int, gap: tuple[int, int], rng: np.random.Generator) -> tuple[int, int]:
    """Two frames: the first is drawn, then one within reach (DropMAE)."""
    low, high = (min(bound, length - 1) for bound in gap)
    first = int(rng.integers(length - low))
    return first, int(rng.integers(first + low, min(first + high, length - 1), endpoint=True))


def strided_clip(length: int, frames: int, stride: int, start: int) -> list[int]:
    """Every `stride`-th frame; steps that would reach the last frame are not made (VideoMAE)."""
    found = [start]
    for _ in range(frames - 1):
        onward = found[-1] + stride
        found.append(onward if onward < length - 1 else found[-1])
    return found


def num_starts(length: int, frames: int, stride: int) -> int:
    """How many starts such a clip has."""
    return max(1, length - frames * stride + 1)


def spread_clip(length: int, frames: int, clip: float, uniform: float) -> list[int]:
    """Frames spread evenly over a clip of `clip` frames (MAE-ST); beyond the end the last repeats."""
    start = max(length - clip, 0) * uniform
    spread = np.linspace(start, start + clip - 1, frames)
    return np.clip(spread, 0, length - 1).astype(np.int64).tolist()
