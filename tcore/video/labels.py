"""Labels that people have: mask images of any kind, with blended edges repaired, and tables of points."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, UInt8
from numpy.lib.stride_tricks import sliding_window_view
from torch.nn.functional import max_pool2d

from tcore.data.arrays import as_array
from tcore.data.images import BAD_IMAGE, Frame, image_problem, open_image
from tcore.errors import InputError
from tcore.evaluation.masks import VOID, Ids, davis_palette
from tcore.files import read_csv, read_json
from tcore.text import Say, silent

# Gray values up to this one are ids; a mask with 255 and values between holds shades of white.
LARGEST_GRAY_ID = 31
SPECK = 4  # a color with this many pixels or fewer is part of an edge
REACH = 3  # pixels around an edge in which the colors that it blends are searched for
# Blending in linear light bends the path from one color to the other by up to a quarter of its length.
BEND = 0.25
CLOSE = 64.0  # sharpening filters overshoot a color by this much along its edges
SAME, RARE = 32.0, 20  # a color this close to another one, and this many times rarer, belongs to it
DARK = 31  # a mask without a brighter value holds ids in its channels, not colors
NAMED = 32  # ids whose colors in the benchmarks' palette are recognized
LISTED = 8  # colors that a message lists
NEEDED = "need a frame (0, 1, 2, ...), a name, and x and y in pixels, both empty where a point is hidden"


@dataclass(frozen=True)
class Masks:
    """Ids of the annotated frames, by frame number; 0 is background."""

    frames: dict[int, Ids]


@dataclass(frozen=True)
class Points:
    """Points (x, y in pixels) of the annotated frames, by frame number and name; NaN where one is hidden."""

    names: tuple[str, ...]
    frames: dict[int, dict[str, tuple[float, float]]]


def read_labels(
    paths: Sequence[Path], stems: Mapping[str, int], say: Say = silent, first: int = 0
) -> Masks | Points:
    """Labels of any frames: PNG masks, or CSV or JSON tables of points.

    A mask belongs to the frame with the same name (`stems`), to the one whose number is its name, or, as
    the first of the list, to frame `first`. Frames are numbered from 0. Every repair is a line for `say`.
    """
    kinds = {path.suffix.lower() for path in paths}
    if not kinds or not (kinds == {".png"} or kinds <= {".csv", ".json"}):
        found = ", ".join(map(str, paths)) or "none"
        raise InputError(f"labels {found}: need PNG masks, or CSV or JSON tables of points.")
    return read_masks(paths, stems, say, first) if kinds == {".png"} else read_points(paths)


def read_masks(paths: Sequence[Path], stems: Mapping[str, int], say: Say, first: int = 0) -> Masks:
    """Ids of some masks; a color means the same object in all of them."""
    files: dict[int, Path] = {}
    for position, path in enumerate(paths):
        frame = frame_number(path, position, stems, first)
        if frame in files:
            raise InputError(f"labels {files[frame]} and {path} are both for frame {frame}.")
        files[frame] = path
    ids = {frame: load_mask(path) for frame, path in files.items()}
    colored = {}
    for frame, image in ids.items():
        if image.ndim == 3:
            colored[frame], repairs = repair_edges(image, files[frame])
            if repairs:
                say(f"mask {files[frame]}: {repairs}.")
    if colored:
        numbered, legend = colors_to_ids(colored)
        ids |= numbered
        say(f"mask {paths[0]}: {legend}.")
    return Masks({frame: without_void(ids[frame], files[frame], say) for frame in sorted(ids)})


def frame_number(path: Path, position: int, stems: Mapping[str, int], first: int = 0) -> int:
    """The frame that a mask belongs to."""
    if path.stem in stems:
        return stems[path.stem]
    digits = re.search("[0-9]+$", path.stem)
    if position == 0 and (digits is None or digits.group() != path.stem):
        return first
    if digits is None:
        raise InputError(f"labels {path}: the name has no frame number; call it 00012.png for frame 12.")
    return int(digits.group())


def load_mask(path: Path) -> UInt8[np.ndarray, "height width *channels"]:
    """Ids of a palette or gray image, or the colors of a colored or shaded one."""
    try:
        with open_image(path) as image:
            image.load()
            if image.mode in ("P", "1"):
                return np.asarray(image).astype(np.uint8)
            if image.mode == "L" or image.mode.startswith("I"):
                return _gray(np.asarray(image), path)
            pixels = np.asarray(image.convert("RGBA"))
    except BAD_IMAGE as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"cannot read mask {path}: {image_problem(error)}.") from error
    colors = np.where(pixels[..., 3:] < 128, 0, pixels[..., :3]).astype(np.uint8)
    return _gray(colors[..., 0], path) if (colors == colors[..., :1]).all() else colors


def _gray(values: np.ndarray, path: Path) -> UInt8[np.ndarray, "height width *channels"]:
    """Gray values as ids, or as colors where they are the soft edges of objects painted white."""
    found = np.unique(values)
    if found[-1] > VOID or found[0] < 0:
        raise InputError(f"mask {path} holds {found[-1]}: ids are at most 254.")
    between = found[(found > LARGEST_GRAY_ID) & (found < VOID)]
    shades = len(between) > 0 and (VOID in found or len(found) > LARGEST_GRAY_ID + 1)
    values = values.astype(np.uint8)
    return np.repeat(values[..., None], 3, axis=2) if shades else values


def without_void(ids: Ids, path: Path, say: Say) -> Ids:
    """Ids without 255: the only object of a mask of 0 and 255, otherwise void, which becomes background."""
    void = ids == VOID
    if not void.any():
        return ids
    if (ids[~void] == 0).all():
        say(f"mask {path} holds only 0 and 255: 255 is taken as object 1.")
        return void.astype(np.uint8)
    say(f"mask {path}: {int(void.sum())} pixels of id 255 (void) count as background.")
    return np.where(void, 0, ids).astype(np.uint8)


def repair_edges(image: Frame, path: Path) -> tuple[Frame, str]:
    """Assign the pixels of anti-aliased edges to the nearest main color around them, and say how many.

    A main color fills a block of 3x3 pixels somewhere. A mask has smooth edges where it has more other colors
    than main ones: of those, the ones that blend two main colors, are close to one, or are rare are edges.
    Wide edges are narrowed from both sides, step by step.
    """
    codes = _codes(image)
    values, index, counts = np.unique(codes, return_inverse=True, return_counts=True)
    index = index.reshape(codes.shape)
    blocks = sliding_window_view(np.pad(codes, 1, constant_values=-1), (3, 3))
    main = np.zeros(len(values), dtype=bool)
    main[index[(blocks == codes[..., None, None]).all(axis=(2, 3))]] = True
    if not main.any() or image.max() <= DARK or (~main).sum() <= main.sum():
        _few_enough(len(values), path)
        return image, ""
    _few_enough(int(main.sum()), path, most=1000)
    colors = np.stack([values >> 16, (values >> 8) & 255, values & 255], axis=1).astype(np.float64)
    # A color nearly the same as a far more frequent one is part of it.
    near = np.linalg.norm(colors[main, None] - colors[main], axis=2) <= SAME
    main[main] = ~(near & (counts[main] >= RARE * counts[main, None])).any(axis=1)
    _few_enough(int(main.sum()), path)
    distance = np.linalg.norm(colors[:, None] - colors[main], axis=2)
    main |= ~(_blended(colors, colors[main]) | (distance <= CLOSE).any(axis=1) | (counts <= SPECK))
    _few_enough(int(main.sum()), path)
    mains, pixels = np.flatnonzero(main), int(counts[~main].sum())
    distance = np.linalg.norm(colors[:, None] - colors[main], axis=2)
    while (thin := ~main[index]).any():
        around = np.stack([_dilated(index == color)[thin] for color in mains], axis=1)
        far = np.where(around, distance[index[thin]], np.inf)
        index[thin] = np.where(around.any(axis=1), mains[far.argmin(axis=1)], index[thin])
    moved = f"{pixels} pixels of {len(values) - len(mains)} blended edge colors were assigned to the nearest"
    return colors[index].astype(np.uint8), f"{moved} of its {len(mains)} main colors"


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


def as_labels(labels: Any, number: Callable[[int], int] = int) -> Masks | Points:
    """Labels of the first frame, or of any frames by number: masks of any kind, or points as x and y.

    `number` is what a frame is called, by its place among the frames; labels come back by their place.
    """
    every = number(1) - number(0)
    named = labels if isinstance(labels, Mapping) else {number(0): labels}
    off = [
        frame
        for frame in named
        if not isinstance(frame, int) or (frame - number(0)) % every or frame < number(0)
    ]
    if not named or off:
        raise InputError(f"labels for frames {[*named]}: need one or more, numbered from {number(0)} on.")
    given = {(frame - number(0)) // every: _as_label(frame, value) for frame, value in named.items()}
    masks = {frame: values for frame, values in given.items() if isinstance(values, np.ndarray)}
    if len(masks) == len(given):
        return Masks(masks)
    rows = {frame: values for frame, values in given.items() if not isinstance(values, np.ndarray)}
    counts = {len(values) for values in rows.values()}
    if masks or len(counts) > 1:
        raise InputError(
            "labels differ in kind or number: give masks of ids, or the same points, for all frames."
        )
    names = tuple(map(str, range(counts.pop())))
    return Points(names, {frame: dict(zip(names, row, strict=True)) for frame, row in rows.items()})


def _as_label(frame: int, value: Any) -> Ids | list[tuple[float, float]]:
    """A mask of ids, or points."""
    if isinstance(value, (str, Path)):
        read = read_labels([Path(value)], {})
        if isinstance(read, Masks):
            return next(iter(read.frames.values()))
        raise InputError(f"labels {value}: from Python, give points as [[x, y], ...].")
    values = as_array(value)
    shape = "x".join(map(str, values.shape))
    listed = isinstance(value, Sequence) and values.ndim == 2 and values.shape[1] == 2
    if values.dtype.kind == "f" or (listed and values.dtype.kind in "iu"):
        if values.ndim != 2 or values.shape[1] != 2 or len(values) == 0:
            raise InputError(
                f"labels of frame {frame} are {shape} of {values.dtype}: need ids, or x and y each."
            )
        return [(float(x), float(y)) for x, y in values.tolist()]
    if values.ndim != 2 or values.dtype.kind not in "biu":
        raise InputError(f"labels of frame {frame} are {shape} of {values.dtype}: need ids, or x and y each.")
    low, high = int(values.min(initial=0)), int(values.max(initial=0))
    if low < 0 or high > VOID:
        raise InputError(f"labels of frame {frame} span {low} to {high}: ids go from 0 to 255.")
    return values.astype(np.uint8)


def read_points(paths: Sequence[Path]) -> Points:
    """Points of some tables together; empty coordinates mean that a point is hidden."""
    names: dict[str, None] = {}
    frames: dict[int, dict[str, tuple[float, float]]] = {}
    for path in paths:
        for where, row in _rows(path):
            try:
                frame, x, y = (_number(row[column]) for column in ("frame", "x", "y"))
                name = str("" if row["name"] is None else row["name"]).strip()
                if not name or frame < 0 or frame != int(frame) or math.isnan(x) != math.isnan(y):
                    raise ValueError(row)
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                raise InputError(f"{where}: {row!r} is not a point; {NEEDED}.") from error
            points = frames.setdefault(int(frame), {})
            if name in points:
                raise InputError(f"{where}: a second row for point {name!r} of frame {frame:g}.")
            names[name], points[name] = None, (x, y)
    if not frames:
        raise InputError(f"labels {paths[0]} hold no points.")
    return Points(tuple(names), frames)


def _rows(path: Path) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Rows of a table, each with its place in the file."""
    if path.suffix.lower() != ".json":
        yield from read_csv(path, "labels ")
        return
    for number, row in enumerate(read_json(path, "labels ", list), start=1):
        yield f"labels {path}, entry {number}", row


def _number(value: object) -> float:
    """A finite number; NaN where a cell is empty."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return math.nan
    if isinstance(value, bool) or not isinstance(value, (str, int, float)) or math.isinf(float(value)):
        raise ValueError(value)
    return float(value)
