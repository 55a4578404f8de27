"""Masks painted in colors: blended edges are repaired, colors become ids."""

from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from tcore.data.images import Frame
from tcore.errors import InputError
from tcore.evaluation.masks import VOID, Ids, davis_palette

SPECK = 4  # a color with this many pixels or fewer is part of an edge, wherever it lies
REACH = 3  # pixels around an edge in which the colors that it blends are searched for
# Blending in linear light bends the path from one color to the other by up to a quarter of its length.
BEND = 0.25
CLOSE = 64.0  # sharpening filters overshoot a color by this much along its edges
SAME, RARE = 32.0, 20  # a color this close to another one, and this many times rarer, belongs to it
DARK = 31  # a mask without a brighter value holds ids in its channels, not colors
NAMED = 32  # ids whose colors in the benchmarks' palette are recognized
LISTED = 8  # colors that a message lists


class Repaired(NamedTuple):
    """A mask of flat colors; how many pixels and colors changed, and how many colors are left."""

    image: Frame
    pixels: int
    blended: int
    main: int


def repair_edges(image: Frame, path: Path) -> Repaired:
    """Assign the pixels of anti-aliased edges to the nearest main color around them.

    A main color fills a block of 3x3 pixels somewhere, or is not a blend of main colors around it. In a
    mask with smooth edges (more blended colors than main ones), specks and colors close to a main color
    beside them count as edges, too. Wide edges are narrowed from both sides, step by step.
    """
    pixels = blended = 0
    found = _find_colors(image)
    smooth = bool((~found.solid).sum() > found.solid.sum() and image.max() > DARK)
    while True:
        image, moved, gone, main = _repair_once(image, found, smooth, path)
        pixels, blended = pixels + moved, blended + gone
        if moved == 0:
            _few_enough(main, path)
            return Repaired(image, pixels, blended, main)
        found = _find_colors(image)


class Colors(NamedTuple):
    """Colors of a mask: how often each occurs, which pixel has which, and which fill a block."""

    colors: Float[np.ndarray, "colors 3"]
    often: Int[np.ndarray, " colors"]
    which: Int[np.ndarray, "height width"]
    solid: Bool[np.ndarray, " colors"]


def _find_colors(image: Frame) -> Colors:
    codes = _codes(image)
    values, index, counts = np.unique(codes, return_inverse=True, return_counts=True)
    index = index.reshape(codes.shape)
    solid = np.zeros(len(values), dtype=bool)
    solid[np.unique(index[1:-1, 1:-1][_blocks(codes)])] = True
    return Colors(_colors(values), counts, index, solid)


def _repair_once(image: Frame, found: Colors, smooth: bool, path: Path) -> Repaired:
    colors, counts, index, solid = found
    if solid.all() or not solid.any():
        return Repaired(image, 0, 0, len(colors))
    _few_enough(int(solid.sum()), path, most=1000)
    if smooth:
        solid[solid] = ~_shadowed(colors[solid], counts[solid])
    _few_enough(int(solid.sum()), path)
    thin = ~solid[index]
    around = np.stack([_dilated(index == color)[thin] for color in np.flatnonzero(solid)], axis=1)
    distance = np.linalg.norm(colors[:, None] - colors[solid], axis=2)
    here = index[thin]
    sign = _blended(colors, colors[solid])[here] & (around.sum(axis=1) >= 2)
    if smooth:
        sign |= (around & (distance <= CLOSE)[here]).any(axis=1) | (counts <= SPECK)[here]
    signs = np.bincount(here, weights=sign, minlength=len(colors))
    edge = ~solid & (signs > counts / 2)
    far = np.where(around | ~around.any(axis=1, keepdims=True), distance[here], np.inf)
    nearest = np.flatnonzero(solid)[far.argmin(axis=1)]
    index[thin] = np.where(edge[here], nearest, here)
    repaired = colors[index].astype(np.uint8)
    return Repaired(repaired, int(edge[here].sum()), int(edge.sum()), int((~edge).sum()))


def _shadowed(
    colors: Float[np.ndarray, "mains 3"], counts: Int[np.ndarray, " mains"]
) -> Bool[np.ndarray, " mains"]:
    """Colors that are nearly the same as a far more frequent one."""
    near = np.linalg.norm(colors[:, None] - colors, axis=2) <= SAME
    return np.asarray((near & (counts >= RARE * counts[:, None])).any(axis=1))


def colors_to_ids(images: Mapping[int, Frame]) -> tuple[dict[int, Ids], str]:
    """Number the colors of some masks, alike in all of them, and describe the numbering.

    Background is black or, without black, the most frequent color along the border of the first mask.
    Colors of the benchmarks' palette keep their ids; others are numbered in the order of their codes.
    """
    codes = {frame: _codes(image) for frame, image in images.items()}
    values = np.unique(np.concatenate([np.unique(code) for code in codes.values()]))
    ground = 0 if 0 in values else _border_color(codes[min(codes)])
    palette = _codes(np.array(davis_palette(), dtype=np.uint8).reshape(1, 256, 3))[0]
    known = {int(palette[number]): number for number in (*range(NAMED), VOID)}
    objects = [int(value) for value in values if value != ground]
    if ground == 0 and all(value in known for value in objects):
        ids = {value: known[value] for value in objects}
    else:
        ids = {value: number for number, value in enumerate(objects, start=1)}
    if len(objects) >= VOID:
        raise InputError(f"the masks hold {len(objects)} colors together; ids are at most {VOID - 1}.")
    table = np.array([ids.get(int(value), 0) for value in values], dtype=np.uint8)
    listed = ", ".join(f"#{value:06x} is {ids[value]}" for value in objects[:LISTED])
    listed += f" and {len(objects) - LISTED} more" if len(objects) > LISTED else ""
    return (
        {frame: table[np.searchsorted(values, code)] for frame, code in codes.items()},
        f"background is #{ground:06x}" + (f", {listed}" if listed else ""),
    )


def _codes(image: Frame) -> Int[np.ndarray, "height width"]:
    red, green, blue = np.moveaxis(image.astype(np.int64), 2, 0)
    return (red << 16) | (green << 8) | blue


def _colors(codes: Int[np.ndarray, " colors"]) -> Float[np.ndarray, "colors 3"]:
    return np.stack([codes >> 16, (codes >> 8) & 255, codes & 255], axis=1).astype(np.float64)


def _blocks(codes: Int[np.ndarray, "height width"]) -> Bool[np.ndarray, "inner_height inner_width"]:
    """Inner pixels with the same color as all eight neighbors."""
    right = codes[:, 1:] == codes[:, :-1]
    rows = right[:, 1:] & right[:, :-1]
    down = codes[1:, 1:-1] == codes[:-1, 1:-1]
    return rows[:-2] & rows[1:-1] & rows[2:] & down[1:] & down[:-1]


def _dilated(mask: Bool[np.ndarray, "height width"]) -> Bool[np.ndarray, "height width"]:
    """Pixels with a pixel of the mask within REACH along both axes."""
    for axis in (0, 1):
        length = mask.shape[axis]
        total = np.insert(mask.cumsum(axis=axis), 0, 0, axis=axis)
        place = np.arange(length)
        high, low = np.minimum(place + REACH + 1, length), np.maximum(place - REACH, 0)
        mask = total.take(high, axis=axis) > total.take(low, axis=axis)
    return mask


def _blended(
    colors: Float[np.ndarray, "colors 3"], mains: Float[np.ndarray, "mains 3"]
) -> Bool[np.ndarray, " colors"]:
    """Colors between two main colors."""
    found = np.zeros(len(colors), dtype=bool)
    for start, end in combinations(mains, 2):
        way = end - start
        share = (colors - start) @ way / (way @ way)
        off = np.linalg.norm(colors - start - share[:, None] * way, axis=1)
        found |= (share > 0) & (share < 1) & (off <= BEND * np.linalg.norm(way))
    return found


def _border_color(codes: Int[np.ndarray, "height width"]) -> int:
    border = np.concatenate([codes[0], codes[-1], codes[:, 0], codes[:, -1]])
    values, counts = np.unique(border, return_counts=True)
    return int(values[counts.argmax()])


def _few_enough(count: int, path: Path, most: int = VOID) -> None:
    if count > most:
        raise InputError(f"mask {path} holds {count} colors: paint every object in one flat color.")
