"""The outline of a mask as one polygon: along the edges of its pixels, simplified, holes and parts joined."""

from collections import defaultdict

import numpy as np
from jaxtyping import Bool, Float

Polygon = Float[np.ndarray, "_ 2"]  # x, y; the first pixel reaches from 0 to 1

TOLERANCE = 0.6  # pixels by which a simplified outline may leave the middles of the edges of its pixels
SMALL = 400.0  # square pixels: outlines of smaller parts and holes stay exact
MOST = 64  # parts and holes that are joined, the largest ones: no editor is of use with more


def bounds(mask: Bool[np.ndarray, "height width"]) -> tuple[int, int, int, int]:
    """The first row and column of a mask, and those after its last.

    >>> bounds(np.array([[0, 0, 0], [0, 1, 1]], dtype=bool))
    (1, 1, 2, 3)
    """
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    return int(rows[0]), int(columns[0]), int(rows[-1]) + 1, int(columns[-1]) + 1


def outline(mask: Bool[np.ndarray, "height width"], tolerance: float = TOLERANCE) -> Polygon:
    """One polygon around everything that is in the mask; filled by the even-odd rule, it is the mask.

    Holes and separate parts are joined by bridges without width: some formats have one polygon per object.
    """
    rings = sorted(trace(mask), key=lambda ring: -abs(_area(ring)))[:MOST]
    joined, *others = (_simplified(ring, tolerance) for ring in rings)
    for ring in others:
        far = np.square(joined[:, None] - ring[None]).sum(axis=2)
        here, there = divmod(int(far.argmin()), len(ring))
        bridge = (joined[: here + 1], ring[there:], ring[: there + 1], joined[here:])
        joined = np.concatenate(bridge)
    return joined


def trace(mask: Bool[np.ndarray, "height width"]) -> list[Polygon]:
    """The closed rings of pixel edges that separate a mask from the rest: outer ones and holes."""
    padded = np.pad(mask, 1).astype(np.int8)
    # Where the mask begins (1) or ends (-1), downward and to the right: the mask is always on the same side.
    steps: dict[tuple[int, ...], list[tuple[int, ...]]] = defaultdict(list)
    for change, axis in ((np.diff(padded, axis=0)[:, 1:-1], 0), (np.diff(padded, axis=1)[1:-1], 1)):
        rows, columns = np.nonzero(change)
        begins = change[rows, columns] == 1
        along = np.array([1, 0] if axis == 0 else [0, 1])
        low = np.column_stack([columns, rows])
        forward = (begins if axis == 0 else ~begins)[:, None]
        start, end = np.where(forward, low, low + along), np.where(forward, low + along, low)
        for corner, next_one in zip(map(tuple, start.tolist()), map(tuple, end.tolist()), strict=True):
            steps[corner].append(next_one)
    rings = []
    while steps:
        begin = here = next(iter(steps))
        ring = []
        while True:
            ring.append(here)
            there = steps[here].pop()
            if not steps[here]:
                del steps[here]
            here = there
            if here == begin:
                break
        rings.append(np.array(ring, dtype=np.float64))
    return rings


def _corners(ring: Polygon) -> Polygon:
    """The places of a ring where its direction changes."""
    before, after = ring - np.roll(ring, 1, axis=0), np.roll(ring, -1, axis=0) - ring
    return ring[(before != after).any(axis=1)]


def _area(ring: Polygon) -> float:
    x, y = ring.T
    return float(x @ np.roll(y, -1) - y @ np.roll(x, -1)) / 2


def _simplified(ring: Polygon, tolerance: float) -> Polygon:
    """Fewer corners (Douglas and Peucker 1973): none that is left out is farther away than the tolerance."""
    if not tolerance or abs(_area(ring)) < SMALL:
        return _corners(ring)
    ring = (ring + np.roll(ring, -1, axis=0)) / 2  # steps of a slope become a line
    closed = np.concatenate([ring, ring[:1]])
    middle = int(np.square(ring - ring[0]).sum(axis=1).argmax())
    kept, waiting = {0, middle}, [(0, middle), (middle, len(ring))]
    while waiting:
        first, last = waiting.pop()
        between, chord = closed[first + 1 : last] - closed[first], closed[last] - closed[first]
        if not len(between):
            continue
        length = float(np.hypot(*chord))
        across = np.abs(between[:, 0] * chord[1] - between[:, 1] * chord[0]) / max(length, 1e-9)
        far = across if length else np.hypot(*between.T)
        if far.max() > tolerance:
            split = first + 1 + int(far.argmax())
            kept.add(split)
            waiting += [(first, split), (split, last)]
    return ring[sorted(kept)]
