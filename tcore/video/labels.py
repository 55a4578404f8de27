"""Labels that people have: mask images of any kind, and tables of points."""

import csv
import io
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
COLUMNS = ("frame", "name", "x", "y")


@dataclass(frozen=True)
class Masks:
    """Ids of the annotated frames, by frame number; 0 is background."""

    frames: dict[int, Ids]
    files: Mapping[int, Path] = field(default_factory=dict)
    """The files that they were read from, if any."""

    def describe(self, frame: int) -> str:
        """The mask of a frame, for a message."""
        return f"the mask for frame {frame}" + (f" ({self.files[frame]})" if frame in self.files else "")


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
    if not paths:
        raise InputError("no labels: give a mask PNG, or a CSV or JSON of points.")
    for path in paths:
        if path.suffix.lower() not in (".png", ".csv", ".json"):
            raise InputError(f"labels {path}: unknown file type {path.suffix!r}; give a .png, .csv or .json.")
        if not path.is_file():
            raise InputError(f"labels {path}: no such file; give a mask PNG, or a CSV or JSON of points.")
    masks = [path for path in paths if path.suffix.lower() == ".png"]
    if masks and len(masks) < len(paths):
        other = next(path for path in paths if path not in masks)
        raise InputError(f"labels {masks[0]} is a mask, {other} is not: give masks or points, not both.")
    labels = read_masks(masks, stems, say) if masks else read_points(paths)
    if 0 not in labels.frames:
        raise InputError(f"no labels for frame 0, only for {', '.join(map(str, sorted(labels.frames)))}.")
    return labels


def read_masks(paths: Sequence[Path], stems: Mapping[str, int], say: Say) -> Masks:
    """Ids of some masks; a color means the same object in all of them."""
    frames: dict[int, Path] = {}
    for position, path in enumerate(paths):
        frame = frame_number(path, position, stems)
        if frame in frames:
            raise InputError(f"labels {frames[frame]} and {path} are both for frame {frame}.")
        frames[frame] = path
    found = {frame: load_mask(path) for frame, path in frames.items()}
    colored = {frame: image for frame, image in found.items() if image.ndim == 3}
    for frame, image in colored.items():
        repaired = repair_edges(image, frames[frame])
        colored[frame] = repaired.image
        if repaired.pixels:
            say(
                f"mask {frames[frame]}: {repaired.pixels} pixels of {repaired.blended} blended edge colors "
                f"were assigned to the nearest of its {repaired.main} main colors."
            )
    ids = {frame: image for frame, image in found.items() if image.ndim == 2}
    if colored:
        numbered, legend = colors_to_ids(colored)
        ids |= numbered
        say(f"mask {paths[0]}: {legend}.")
    return Masks({frame: without_void(ids[frame], frames[frame], say) for frame in sorted(ids)}, frames)


def frame_number(path: Path, position: int, stems: Mapping[str, int]) -> int:
    """The frame that a mask belongs to."""
    if path.stem in stems:
        return stems[path.stem]
    if re.fullmatch("[0-9]+", path.stem):
        return int(path.stem)
    if position == 0:
        return 0
    digits = re.search("[0-9]+$", path.stem)
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
            missing = [column for column in COLUMNS if column not in row]
            if missing:
                raise InputError(f"{where}: no {', '.join(missing)}; need {','.join(COLUMNS)}.")
            frame, x, y = (_number(row[column], f"{where}: {column}") for column in ("frame", "x", "y"))
            name = "" if row["name"] is None else str(row["name"]).strip()
            if not (frame >= 0 and frame == int(frame)):
                raise InputError(f"{where}: frame is {row['frame']!r}; frames are numbered 0, 1, 2, ...")
            if not name:
                raise InputError(f"{where}: the point has no name.")
            if math.isnan(x) != math.isnan(y):
                raise InputError(f"{where}: only one of x and y is given; leave both empty if it is hidden.")
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
        rows = None if path.suffix.lower() == ".csv" else json.loads(text)
    except OSError as error:
        raise InputError(f"cannot read labels {path}: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"cannot read labels {path}: not a table ({error}).") from error
    if rows is None:
        yield from _csv_rows(path, text)
    elif not isinstance(rows, list):
        raise InputError(f"labels {path}: need a list of objects with {', '.join(COLUMNS)}.")
    else:
        for number, row in enumerate(rows, start=1):
            where = f"labels {path}, entry {number}"
            if not isinstance(row, dict):
                raise InputError(f"{where}: {row!r} is not an object with {', '.join(COLUMNS)}.")
            yield where, row


def _csv_rows(path: Path, text: str) -> Iterator[tuple[str, Mapping[str, object]]]:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    header: list[str] = []
    try:
        for cells in reader:
            where = f"labels {path}, line {reader.line_num}"
            if not any(cell.strip() for cell in cells):
                continue
            if not header:
                header = [cell.strip().lower() for cell in cells]
            elif len(cells) != len(header):
                raise InputError(f"{where}: {len(cells)} cells, the header has {len(header)}.")
            else:
                yield where, dict(zip(header, cells, strict=True))
    except csv.Error as error:
        raise InputError(f"labels {path}, line {reader.line_num}: {error}.") from error


def _number(value: object, where: str) -> float:
    """A finite number; NaN where a cell is empty."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return math.nan
    try:
        number = float(value) if isinstance(value, (str, int, float)) else math.inf
    except (ValueError, OverflowError):
        number = math.inf
    if math.isinf(number) or isinstance(value, bool):
        raise InputError(f"{where} is {value!r}, not a number.")
    return number
