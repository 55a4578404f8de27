"""Labels in files that others read: PNG masks, tables of tracks, COCO, YOLO, CVAT 1.1, DeepLabCut."""

import json
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Any, NamedTuple
from xml.sax.saxutils import escape, quoteattr

import numpy as np
from jaxtyping import Bool, Float, Int

from tcore.data.images import ahead
from tcore.errors import InputError
from tcore.evaluation.masks import encode_ids
from tcore.evaluation.resize import Size
from tcore.text import csv_text
from tcore.video.labels import Masks, Points
from tcore.video.outlines import Polygon, bounds, outline

Mask = Bool[np.ndarray, "height width"]
PointRows = Float[np.ndarray, "points 3"]  # x, y and confidence; x and y are NaN where a point is lost
Labeled = Iterable[tuple[int, np.ndarray]]  # frames in order: number, and ids or points
Files = Iterator[tuple[str, bytes]]  # name of a file, and its next bytes

POINT_COLUMNS = ("frame", "name", "x", "y", "confidence")
OBJECT_COLUMNS = ("frame", "object", "x", "y", "left", "top", "width", "height", "area")
SCORER = "tcore"


class About(NamedTuple):
    """What a writer knows of a video before its first frame."""

    given: Masks | Points
    size: Size
    file_name: Callable[[int], str]
    """The image file of a frame, by the number of the frame."""
    called: Mapping[int, str] = MappingProxyType({})
    """Names of objects by their ids, where they have one."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the points; none for masks."""
        return self.given.names if isinstance(self.given, Points) else ()

    @property
    def objects(self) -> tuple[int, ...]:
        """Ids of the objects; none for points."""
        if isinstance(self.given, Points):
            return ()
        return tuple(
            sorted({int(one) for ids in self.given.frames.values() for one in np.unique(ids) if one})
        )

    @property
    def in_words(self) -> tuple[str, ...]:
        """Every object or point, as it is spoken of."""
        if isinstance(self.given, Points):
            return tuple(f"point {name!r}" for name in self.names)
        named = {label: repr(name) for label, name in self.called.items()}
        return tuple(f"object {named.get(label, label)}" for label in self.objects)

    @property
    def classes(self) -> tuple[str, ...]:
        """What the objects are called, in the order of their ids."""
        return tuple(_plain(self.called.get(label, f"object {label}")) for label in self.objects)


class Format(NamedTuple):
    """How labels are written, and which of the two kinds there are."""

    write: Callable[[About, Labeled], Files]
    masks: bool = True
    points: bool = True


def choose_format(name: str | None, given: Masks | Points) -> Format:
    """A format by its name, or the one that suits the labels; one that cannot hold them is refused."""
    points = isinstance(given, Points)
    name = name or ("tracks" if points else "davis")
    fitting = [one for one, form in FORMATS.items() if (form.points if points else form.masks)]
    if name not in fitting:
        kind, there_are = ("points" if points else "masks"), ", ".join(fitting)
        why = f"cannot hold {kind}" if name in FORMATS else "is not known"
        raise InputError(f"format {name} {why}: for {kind} there are {there_are}.")
    return FORMATS[name]


def write_files(folder: Path, files: Files) -> None:
    """Write what a format makes into a folder, piece by piece."""
    for name, content in files:
        (folder / name).parent.mkdir(exist_ok=True)
        with (folder / name).open("ab") as file:
            file.write(content)


def write_davis(about: About, labeled: Labeled) -> Files:
    """Palette PNGs named like the frames."""

    def encode(one: tuple[int, np.ndarray]) -> tuple[str, bytes]:
        return f"masks/{PurePath(about.file_name(one[0])).stem}.png", encode_ids(one[1])

    yield from ahead(encode, labeled)


def write_tracks(about: About, labeled: Labeled) -> Files:
    """A row per point and frame, or the center, box and area of each object and frame."""
    yield "tracks.csv", _rows([POINT_COLUMNS if about.names else OBJECT_COLUMNS])
    for index, labels in labeled:
        yield (
            "tracks.csv",
            _rows(_point_rows(index, about.names, labels) if about.names else _object_rows(index, labels)),
        )


def write_coco(about: About, labeled: Labeled) -> Files:
    """COCO: a compressed run-length mask per object and frame, or the points of a frame as keypoints."""
    name, written, numbers = "coco.json", 0, list[int]()
    yield name, b'{"annotations": ['
    for index, labels in labeled:
        numbers.append(index)
        if about.names:
            found = [(1, _keypoints(labels))]
        else:
            found = [(label, _segment(mask)) for label, mask in _objects(labels)]
        for label, values in found:
            written += 1
            ids = {"id": written, "image_id": index + 1, "category_id": label}
            yield name, b",\n"[2 * (written == 1) :] + json.dumps(ids | values).encode()
    height, width = about.size
    yield name, b'],\n"images": ['
    for place, index in enumerate(numbers):
        image = {"id": index + 1, "file_name": about.file_name(index), "height": height, "width": width}
        yield name, b",\n"[2 * (place == 0) :] + json.dumps(image).encode()
    named = zip(about.objects, about.classes, strict=True)
    categories: list[dict[str, Any]] = [{"id": label, "name": called} for label, called in named]
    if about.names:
        categories = [{"id": 1, "name": "points", "keypoints": list(about.names), "skeleton": []}]
    yield name, b'],\n"categories": ' + json.dumps(categories).encode() + b"}\n"


def write_yolo(about: About, labeled: Labeled) -> Files:
    """YOLO segmentation: a text file per frame, a line per object: its class and a polygon from 0 to 1."""
    yield "classes.txt", "".join(f"{called}\n" for called in about.classes).encode()
    scale = np.array(about.size[::-1], dtype=np.float64)
    for index, ids in labeled:
        lines = []
        for label, mask in _objects(ids):
            places = " ".join(f"{value:.6f}" for value in (outline(mask) / scale).ravel())
            lines.append(f"{about.objects.index(label)} {places}\n")
        yield f"labels/{PurePath(about.file_name(index)).stem}.txt", "".join(lines).encode()


def write_cvat(about: About, labeled: Labeled) -> Files:
    """CVAT 1.1 for video: a track of polygons for every object, or of points for every point."""
    labels = about.names or about.classes
    shapes: list[list[tuple[int, int]]] = [[] for _ in labels]
    last: list[Polygon | None] = [None] * len(labels)
    kind, done = "points" if about.names else "polygon", 0
    # Tracks follow one another in the file, but grow together: shapes wait on disk.
    with tempfile.TemporaryFile() as waiting:
        for index, values in labeled:
            done = index + 1
            found = _places(about, values)
            for track, (before, now) in enumerate(zip(last, found, strict=True)):
                last[track] = now
                shown = before if now is None else now
                if shown is not None:  # once more, as outside, where it disappears
                    shape = _shape(kind, index, shown, outside=now is None)
                    shapes[track].append((waiting.tell(), waiting.write(shape)))
        yield "annotations.xml", _cvat_head(about, labels, kind, done)
        for track, (label, pieces) in enumerate(zip(labels, shapes, strict=True)):
            opened = f'  <track id="{track}" label={quoteattr(_plain(label))} source="auto">\n'
            yield "annotations.xml", opened.encode()
            for start, length in pieces:
                waiting.seek(start)
                yield "annotations.xml", waiting.read(length)
            yield "annotations.xml", b"  </track>\n"
        yield "annotations.xml", b"</annotations>\n"


def write_dlc(about: About, labeled: Labeled) -> Files:
    """DeepLabCut: three rows of headers, then x, y and likelihood of every point, a row per frame."""
    coordinates = ("x", "y", "likelihood")
    names = [name for name in about.names for _ in coordinates]
    header = (
        ["scorer", *(SCORER for _ in names)],
        ["bodyparts", *names],
        ["coords", *coordinates * len(about.names)],
    )
    yield "dlc.csv", _rows(header)
    for index, points in labeled:
        cells = (cell for row in _point_rows(index, about.names, points) for cell in row[2:])
        yield "dlc.csv", _rows([(index, *cells)])


FORMATS: dict[str, Format] = {
    "davis": Format(write_davis, points=False),
    "tracks": Format(write_tracks),
    "coco": Format(write_coco),
    "yolo": Format(write_yolo, points=False),
    "cvat": Format(write_cvat),
    "dlc": Format(write_dlc, masks=False),
}

# Names of what they write into a folder.
FILES = ("masks", "tracks.csv", "coco.json", "labels", "classes.txt", "annotations.xml", "dlc.csv")


def run_lengths(labels: np.ndarray) -> tuple[Int[np.ndarray, " runs"], np.ndarray]:
    """Lengths and values of the runs of equal values, row by row.

    >>> run_lengths(np.array([[0, 3], [3, 3]]))
    (array([1, 3]), array([0, 3]))
    """
    flat = labels.ravel()
    starts = np.flatnonzero(np.diff(flat.astype(np.int64), prepend=-1))
    return np.diff(starts, append=flat.size), flat[starts]


def from_zeros(mask: Mask) -> list[int]:
    """Lengths of the runs of a mask by turns, beginning with pixels that are not set: maybe none."""
    lengths, values = run_lengths(mask)
    return int(values[0]) * [0] + lengths.tolist()


def compress_runs(counts: Sequence[int]) -> str:
    """Run lengths as COCO's text: differences to the length before last, five bits to a character.

    >>> compress_runs([6, 1, 40, 4, 5, 1])
    '61X13mNM'
    """
    text = []
    for place, count in enumerate(counts):
        rest, more = count - (counts[place - 2] if place > 2 else 0), True
        while more:
            bits = rest & 31
            rest >>= 5
            more = rest != (-1 if bits & 16 else 0)
            text.append(chr(48 + bits + 32 * more))
    return "".join(text)


def _rows(rows: Iterable[Sequence[Any]]) -> bytes:
    return csv_text(rows).encode()


def _point_rows(index: int, names: tuple[str, ...], points: PointRows) -> Iterator[tuple[int | str, ...]]:
    """Rows of one frame; coordinates are empty where a point is lost."""
    for name, (x, y, confidence) in zip(names, points.tolist(), strict=True):
        place = ("", "") if math.isnan(x) else (f"{x:.3f}", f"{y:.3f}")
        yield index, name, *place, f"{confidence:.4f}"


def _object_rows(index: int, ids: np.ndarray) -> Iterator[tuple[int | str, ...]]:
    for label, mask in _objects(ids):
        rows, columns = np.nonzero(mask)
        yield index, label, f"{columns.mean():.3f}", f"{rows.mean():.3f}", *_box(mask), len(rows)


def _objects(ids: np.ndarray) -> Iterator[tuple[int, Mask]]:
    """Id and mask of every object of a frame."""
    for label in np.unique(ids[ids > 0]).tolist():
        yield label, ids == label


def _box(mask: Mask) -> tuple[int, int, int, int]:
    top, left, bottom, right = bounds(mask)
    return left, top, right - left, bottom - top


def _segment(mask: Mask) -> dict[str, Any]:
    segment = {"size": list(mask.shape), "counts": compress_runs(from_zeros(mask.T))}  # down the columns
    return {"segmentation": segment, "area": int(mask.sum()), "bbox": list(_box(mask)), "iscrowd": 0}


def _keypoints(points: PointRows) -> dict[str, Any]:
    points = points.round(2)
    visible = points[~np.isnan(points[:, 0]), :2]
    flat = [value for x, y, _ in points.tolist() for value in ((0, 0, 0) if math.isnan(x) else (x, y, 2))]
    low, high = (visible.min(axis=0), visible.max(axis=0)) if len(visible) else np.zeros((2, 2))
    width, height = (high - low).round(2).tolist()
    box = {"bbox": [*low.tolist(), width, height], "area": round(width * height, 2), "iscrowd": 0}
    return {"keypoints": flat, "num_keypoints": len(visible)} | box


def _places(about: About, values: np.ndarray) -> list[Polygon | None]:
    """The polygon of every object, or the place of every point; None where there is none."""
    if about.names:  # CVAT measures from the corner of the image, not from the center of its first pixel
        return [None if math.isnan(x) else np.array([[x + 0.5, y + 0.5]]) for x, y, _ in values.tolist()]
    found = {label: outline(mask) for label, mask in _objects(values)}
    return [found.get(label) for label in about.objects]


def _shape(kind: str, index: int, places: Polygon, outside: bool) -> bytes:
    points = ";".join(f"{x:.2f},{y:.2f}" for x, y in places.tolist())
    state = f'frame="{index}" keyframe="1" outside="{outside:d}" occluded="0"'
    return f'    <{kind} {state} points="{points}" z_order="0"/>\n'.encode()


def _cvat_head(about: About, labels: Sequence[str], kind: str, count: int) -> bytes:
    named = "".join(
        f"<label><name>{escape(_plain(name))}</name><type>{kind}</type></label>" for name in labels
    )
    height, width = about.size
    return (
        '<?xml version="1.0" encoding="utf-8"?>\n<annotations>\n  <version>1.1</version>\n  <meta><task>'
        f"<size>{count}</size><mode>interpolation</mode><start_frame>0</start_frame>"
        f"<stop_frame>{max(0, count - 1)}</stop_frame><labels>{named}</labels>"
        f"<original_size><width>{width}</width><height>{height}</height></original_size></task></meta>\n"
    ).encode()


def _plain(name: str) -> str:
    """A name without line breaks and the other control characters that XML cannot hold."""
    return "".join(one if one.isprintable() else "?" for one in name)
