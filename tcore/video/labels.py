"""Labels that people have: mask images of any kind, and tables of points."""

import csv
import io
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from tcore.data.images import BAD_IMAGE, image_problem, open_image
from tcore.errors import InputError
from tcore.evaluation.masks import VOID, Ids
from tcore.files import read_text
from tcore.text import Say, silent
from tcore.video.mask_colors import colors_to_ids, repair_edges

# Gray values up to this one are ids; a mask with 255 and values between holds shades of white.
LARGEST_GRAY_ID = 31
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


def read_labels(paths: Sequence[Path], stems: Mapping[str, int], say: Say = silent) -> Masks | Points:
    """Labels of frame 0 and of any later frames: PNG masks, or CSV or JSON tables of points.

    A mask belongs to the frame with the same name (`stems`), to the one whose number is its name, or, as
    the first of the list, to frame 0. Frames are numbered from 0. Every repair is a line for `say`.
    """
    kinds = {path.suffix.lower() for path in paths}
    if not kinds or not (kinds == {".png"} or kinds <= {".csv", ".json"}):
        found = ", ".join(map(str, paths)) or "none"
        raise InputError(f"labels {found}: need PNG masks, or CSV or JSON tables of points.")
    labels = read_masks(paths, stems, say) if kinds == {".png"} else read_points(paths)
    if 0 not in labels.frames:
        raise InputError(f"no labels for frame 0, only for {', '.join(map(str, sorted(labels.frames)))}.")
    return labels


def read_masks(paths: Sequence[Path], stems: Mapping[str, int], say: Say) -> Masks:
    """Ids of some masks; a color means the same object in all of them."""
    files: dict[int, Path] = {}
    for position, path in enumerate(paths):
        frame = frame_number(path, position, stems)
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


def frame_number(path: Path, position: int, stems: Mapping[str, int]) -> int:
    """The frame that a mask belongs to."""
    if path.stem in stems:
        return stems[path.stem]
    digits = re.search("[0-9]+$", path.stem)
    if position == 0 and (digits is None or digits.group() != path.stem):
        return 0
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
    try:
        text = read_text(path, "utf-8-sig")
        if path.suffix.lower() == ".json":
            for number, row in enumerate(json.loads(text), start=1):
                yield f"labels {path}, entry {number}", row
            return
        table = csv.reader(io.StringIO(text, newline=""), strict=True)
        filled = (cells for cells in table if any(map(str.strip, cells)))
        header = [cell.strip().lower() for cell in next(filled, [])]
        for cells in filled:
            where = f"labels {path}, line {table.line_num}"
            if len(cells) != len(header):
                raise InputError(f"{where}: {len(cells)} cells, the header has {len(header)}.")
            yield where, dict(zip(header, cells, strict=True))
    except OSError as error:
        raise InputError(f"cannot read labels {path}: {error.strerror or error}.") from error
    except (csv.Error, TypeError, ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"cannot read labels {path}: not a table ({error}).") from error


def _number(value: object) -> float:
    """A finite number; NaN where a cell is empty."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return math.nan
    if isinstance(value, bool) or not isinstance(value, (str, int, float)) or math.isinf(float(value)):
        raise ValueError(value)
    return float(value)
