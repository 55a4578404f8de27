"""Masks painted in colors: blended edges are repaired, colors become ids."""

from collections.abc import Mapping
from itertools import combinations
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.lib.stride_tricks import sliding_window_view
from torch.nn.functional import max_pool2d

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


def repair_edges(image: Frame, path: Path) -> tuple[Frame, str]:
    """Assign the pixels of anti-aliased edges to the nearest main color around them, and say how many.

    A main color fills a block of 3x3 pixels somewhere, or is not a blend of main colors around it. In a
    mask with smooth edges (more blended colors than main ones), specks and colors close to a main color
    beside them count as edges, too. Wide edges are narrowed from both sides, step by step.
    """
    pixels = blended = 0
    smooth: bool | None = None
    while True:
        colors, index, counts, main = _find_colors(image)
        if smooth is None:
            smooth = bool((~main).sum() > main.sum() and image.max() > DARK)
        edge = np.zeros_like(main)
        if main.any() and not main.all():
            _few_enough(int(main.sum()), path, most=1000)
            if smooth:  # a color nearly the same as a far more frequent one is part of it
                near = np.linalg.norm(colors[main, None] - colors[main], axis=2) <= SAME
                main[main] = ~(near & (counts[main] >= RARE * counts[main, None])).any(axis=1)
            _few_enough(int(main.sum()), path)
            edge = _assign_edges(colors, index, counts, main, smooth)
        if not edge.any():
            _few_enough(len(colors), path)
            moved = f"{pixels} pixels of {blended} blended edge colors were assigned to the nearest"
            return image, f"{moved} of its {len(colors)} main colors" if pixels else ""
        pixels, blended = pixels + int(counts[edge].sum()), blended + int(edge.sum())
        image = colors[index].astype(np.uint8)


def _find_colors(
    image: Frame,
) -> tuple[
    Float[np.ndarray, "colors 3"],
    Int[np.ndarray, "height width"],
    Int[np.ndarray, " colors"],
    Bool[np.ndarray, " colors"],
]:
    """The colors of a mask, which pixel has which, how often each occurs, and which fill a block."""
    codes = _codes(image)
    values, index, counts = np.unique(codes, return_inverse=True, return_counts=True)
    index = index.reshape(codes.shape)
    blocks = sliding_window_view(np.pad(codes, 1, constant_values=-1), (3, 3))
    solid = np.zeros(len(values), dtype=bool)
    solid[index[(blocks == codes[..., None, None]).all(axis=(2, 3))]] = True
    colors = np.stack([values >> 16, (values >> 8) & 255, values & 255], axis=1).astype(np.float64)
    return colors, index, counts, solid


def _assign_edges(
    colors: Float[np.ndarray, "colors 3"],
    index: Int[np.ndarray, "height width"],
    counts: Int[np.ndarray, " colors"],
    main: Bool[np.ndarray, " colors"],
    smooth: bool,
) -> Bool[np.ndarray, " colors"]:
    """Give the pixels of edge colors, which are returned, the index of the nearest main color, in place."""
    thin = ~main[index]
    here = index[thin]
    around = np.stack([_dilated(index == color)[thin] for color in np.flatnonzero(main)], axis=1)
    distance = np.linalg.norm(colors[:, None] - colors[main], axis=2)
    sign = _blended(colors, colors[main])[here] & (around.sum(axis=1) >= 2)
    if smooth:
        sign |= (around & (distance <= CLOSE)[here]).any(axis=1) | (counts <= SPECK)[here]
    edge = ~main & (np.bincount(here, weights=sign, minlength=len(colors)) > counts / 2)
    far = np.where(around | ~around.any(axis=1, keepdims=True), distance[here], np.inf)
    index[thin] = np.where(edge[here], np.flatnonzero(main)[far.argmin(axis=1)], here)
    return np.asarray(edge)


def _dilated(mask: Bool[np.ndarray, "height width"]) -> Bool[np.ndarray, "height width"]:
    """Pixels with a pixel of the mask within REACH along both axes."""
    pooled = max_pool2d(torch.from_numpy(mask)[None].float(), 2 * REACH + 1, stride=1, padding=REACH)
    return np.asarray(pooled[0] > 0)


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


def _few_enough(count: int, path: Path, most: int = VOID) -> None:
    if count > most:
        raise InputError(f"mask {path} holds {count} colors: paint every object in one flat color.")


def colors_to_ids(images: Mapping[int, Frame]) -> tuple[dict[int, Ids], str]:
    """Number the colors of some masks, alike in all of them, and describe the numbering.

    Background is black or, without black, the most frequent color along the border of the first mask.
    Colors of the benchmarks' palette keep their ids; others are numbered in the order of their codes.
    """
    codes = {frame: _codes(image) for frame, image in images.items()}
    values = np.unique(np.concatenate([np.unique(code) for code in codes.values()]))
    first = codes[min(codes)]
    border = np.concatenate([first[0], first[-1], first[:, 0], first[:, -1]])
    along, often = np.unique(border, return_counts=True)
    ground = 0 if 0 in values else int(along[often.argmax()])
    objects = values[values != ground].tolist()
    if len(objects) >= VOID:
        raise InputError(f"the masks hold {len(objects)} colors together; ids are at most {VOID - 1}.")
    palette = _codes(np.array(davis_palette(), dtype=np.uint8).reshape(1, 256, 3))[0].tolist()
    ids = {palette[number]: number for number in (*range(NAMED), VOID)}
    if ground != 0 or not ids.keys() >= set(objects):
        ids = {value: number for number, value in enumerate(objects, start=1)}
    table = np.array([ids.get(value, 0) for value in values.tolist()], dtype=np.uint8)
    legend = [f"background is #{ground:06x}", *(f"#{value:06x} is {ids[value]}" for value in objects)]
    legend[1 + LISTED :] = [f"{len(objects) - LISTED} more"] if len(objects) > LISTED else []
    found = {frame: table[np.searchsorted(values, code)] for frame, code in codes.items()}
    return found, ", ".join(legend)


def _codes(image: Frame) -> Int[np.ndarray, "height width"]:
    red, green, blue = np.moveaxis(image.astype(np.int64), 2, 0)
    return (red << 16) | (green << 8) | blue
