"""What a visitor takes home: masks, tracks, COCO JSON, a video; at the size of the original frames."""

import csv
import io
import json
import math
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tcore.data.video import h264_encoder, video_writer
from tcore.demo.work import Work
from tcore.errors import InputError
from tcore.evaluation.masks import Ids, davis_palette
from tcore.files import atomic
from tcore.video.labels import Masks, Points
from tcore.video.tracked import TrackedMasks, TrackedPoints


def write_export(work: Work, name: str) -> Path:
    """A file in the folder of the clip, written anew."""
    writers = {
        "masks.zip": write_masks,
        "tracks.csv": write_tracks,
        "coco.json": write_coco,
        "overlay.mp4": write_overlay,
    }
    if name not in writers:
        raise InputError(f"no download {name!r}: there are {', '.join(writers)}.")
    if work.running:
        raise InputError("a run is under way: cancel it, or wait until it is done.")
    if not work.found:
        raise InputError("there is nothing to download yet: run the propagation first.")
    path = work.folder / name
    with atomic(path) as temporary:
        writers[name](work, temporary)
    return path


def write_masks(work: Work, path: Path) -> None:
    """A zip of indexed PNGs with the palette of the benchmarks, one for each frame."""
    if not isinstance(work.given, Masks):
        raise InputError("points have no masks: download the tracks.")
    palette = davis_palette()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for index in range(work.done):
            image = Image.fromarray(_ids(work, index), mode="P")
            image.putpalette(palette)
            png = io.BytesIO()
            image.save(png, format="PNG")
            archive.writestr(f"{index:05d}.png", png.getvalue())


def write_tracks(work: Work, path: Path) -> None:
    """A row for each point and frame, or the center and box of each object and frame."""
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        if isinstance(work.given, Points):
            table.writerow(("frame", "name", "x", "y", "confidence"))
            for index in range(work.done):
                for name, (x, y, confidence) in zip(work.given.names, _points(work, index), strict=True):
                    place = ("", "") if math.isnan(x) else (f"{x:.3f}", f"{y:.3f}")
                    table.writerow((index, name, *place, f"{confidence:.4f}"))
            return
        table.writerow(("frame", "object", "x", "y", "left", "top", "width", "height", "area"))
        for index in range(work.done):
            ids = _ids(work, index)
            for label in np.unique(ids[ids > 0]).tolist():
                rows, columns = np.nonzero(ids == label)
                box = _box(ids == label)
                table.writerow((index, label, f"{columns.mean():.3f}", f"{rows.mean():.3f}", *box, len(rows)))


def write_coco(work: Work, path: Path) -> None:
    """COCO: an annotation for each object and frame, as runs; or the points of a frame as keypoints."""
    height, width = work.clip.original
    images = [
        {"id": index + 1, "file_name": f"{index:05d}.png", "height": height, "width": width}
        for index in range(work.done)
    ]
    if isinstance(work.given, Points):
        categories: list[dict[str, Any]] = [
            {"id": 1, "name": "points", "keypoints": list(work.given.names), "skeleton": []}
        ]
        annotations = [_keypoints(work, index) for index in range(work.done)]
    else:
        annotations, labels = [], set()
        for index in range(work.done):
            ids = _ids(work, index)
            for label in np.unique(ids[ids > 0]).tolist():
                labels.add(label)
                annotations.append(_segment(ids == label) | {"image_id": index + 1, "category_id": label})
        categories = [{"id": label, "name": f"object {label}"} for label in sorted(labels)]
    for number, annotation in enumerate(annotations, start=1):
        annotation["id"] = number
    content = {"images": images, "annotations": annotations, "categories": categories}
    path.write_text(json.dumps(content), encoding="utf-8")


def write_overlay(work: Work, path: Path) -> None:
    """An mp4 of the frames with their labels over them, at the size of the page."""
    if h264_encoder() is None:
        raise InputError("no video can be written here: PyAV with an H.264 encoder is not there.")
    clip, patch_size = work.clip, work.engine.encoder.patch_size
    track: TrackedMasks | TrackedPoints
    if isinstance(work.given, Points):
        track = TrackedPoints(work.given, clip.size, work.inside, patch_size)
    else:
        assert work.given is not None
        track = TrackedMasks(work.given, clip.size, work.inside, patch_size, work.protocol)
    with video_writer(path, clip.rate, clip.size) as write:
        for index in range(work.done):
            write(track.paint(np.asarray(clip.frames[index]), work.found[index]))


def runs(mask: np.ndarray) -> list[int]:
    """Lengths of runs of 0 and 1 in turn, down the columns, as COCO counts them.

    >>> runs(np.array([[0, 1], [1, 1]], dtype=bool)), runs(np.array([[1, 0]], dtype=bool))
    ([1, 3], [0, 1, 1])
    """
    flat = mask.ravel(order="F")
    changes = np.flatnonzero(np.diff(flat.astype(np.int8))) + 1
    lengths = np.diff([0, *changes.tolist(), flat.size]).tolist()
    return [0, *lengths] if flat[0] else lengths


def _segment(mask: np.ndarray) -> dict[str, Any]:
    return {
        "segmentation": {"size": list(mask.shape), "counts": runs(mask)},
        "area": int(mask.sum()),
        "bbox": list(_box(mask)),
        "iscrowd": 1,  # COCO reads runs of crowds only
    }


def _keypoints(work: Work, index: int) -> dict[str, Any]:
    points = _points(work, index)
    seen = [(x, y) for x, y, _ in points if not math.isnan(x)]
    flat = [
        value
        for x, y, _ in points
        for value in ((0, 0, 0) if math.isnan(x) else (round(x, 2), round(y, 2), 2))
    ]
    left, top = (min(values) for values in zip(*seen, strict=True)) if seen else (0.0, 0.0)
    right, bottom = (max(values) for values in zip(*seen, strict=True)) if seen else (0.0, 0.0)
    box = [round(value, 2) for value in (left, top, right - left, bottom - top)]
    return {
        "image_id": index + 1,
        "category_id": 1,
        "keypoints": flat,
        "num_keypoints": len(seen),
        "bbox": box,
        "area": round(box[2] * box[3], 2),
        "iscrowd": 0,
    }


def _box(mask: np.ndarray) -> tuple[int, int, int, int]:
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    return int(columns[0]), int(rows[0]), int(np.ptp(columns)) + 1, int(np.ptp(rows)) + 1


def _ids(work: Work, index: int) -> Ids:
    """Ids of a frame at the size of the original."""
    ids, (height, width) = np.asarray(work.found[index].values), work.clip.original
    if ids.shape == (height, width):
        return ids
    return np.asarray(Image.fromarray(ids).resize((width, height), Image.Resampling.NEAREST))


def _points(work: Work, index: int) -> list[tuple[float, float, float]]:
    """Points of a frame in pixels of the original, whose centers lie at whole numbers."""
    (height, width), (rows, columns) = work.clip.original, work.clip.size
    return [
        ((x + 0.5) * width / columns - 0.5, (y + 0.5) * height / rows - 0.5, confidence)
        for x, y, confidence in work.found[index].values.tolist()
    ]
