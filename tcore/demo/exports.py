"""Downloads: masks, tracks, COCO JSON at the size of the original frames, and a video."""

import csv
import json
import math
import secrets
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
from jaxtyping import Bool, Float
from PIL import Image

from tcore.data.video import h264_encoder, video_writer
from tcore.demo.job import Job
from tcore.demo.messages import run_lengths
from tcore.errors import InputError
from tcore.evaluation.masks import Ids, encode_ids
from tcore.video.labels import Points
from tcore.video.tracked import POINT_COLUMNS, paint_labels, point_rows

Mask = Bool[np.ndarray, "height width"]
OBJECT_COLUMNS = ("frame", "object", "x", "y", "left", "top", "width", "height", "area")


def write_export(job: Job, name: str, stop: Event) -> Path:
    """Write a file beside the folder of the clip; setting `stop` gives it up."""
    if name not in EXPORTS:
        raise InputError(f"no download {name!r}: there are {', '.join(EXPORTS)}.")
    if job.state == "running":
        raise InputError("a run is in progress: cancel it, or wait until it is done.")
    if not job.found:
        raise InputError("there is nothing to download yet: run the propagation first.")

    def frames() -> Iterator[int]:
        for index in range(job.done):
            if stop.is_set():
                raise InputError("the download was given up.")
            yield index

    path = job.clip.folder.with_name(f"{secrets.token_hex(8)}-{name}")  # it outlives the clip
    try:
        EXPORTS[name](job, frames(), path)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return path


def write_masks(job: Job, frames: Iterable[int], path: Path) -> None:
    """A zip of palette PNGs, one per frame."""
    if isinstance(job.given, Points):
        raise InputError("points have no masks: download the tracks.")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for index in frames:
            archive.writestr(f"{index:05d}.png", encode_ids(_ids(job, index)))


def write_tracks(job: Job, frames: Iterable[int], path: Path) -> None:
    """A row per point and frame, or the center, box and area of each object and frame."""
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(POINT_COLUMNS if isinstance(job.given, Points) else OBJECT_COLUMNS)
        for index in frames:
            if isinstance(job.given, Points):
                table.writerows(point_rows(index, job.given.names, _points(job, index)))
                continue
            for label, mask in _objects(job, index):
                rows, columns = np.nonzero(mask)
                center = f"{columns.mean():.3f}", f"{rows.mean():.3f}"
                table.writerow((index, label, *center, *_box(mask), len(rows)))


def write_coco(job: Job, frames: Iterable[int], path: Path) -> None:
    """COCO: a run-length mask per object and frame, or the points of a frame as keypoints."""
    height, width = job.clip.original
    images, categories = [], {}
    annotations: list[dict[str, Any]] = []
    for index in frames:
        images.append({"id": index + 1, "file_name": f"{index:05d}.png", "height": height, "width": width})
        if isinstance(job.given, Points):
            found = [(1, _keypoints(job, index))]
            categories[1] = {"name": "points", "keypoints": list(job.given.names), "skeleton": []}
        else:
            found = [(label, _segment(mask)) for label, mask in _objects(job, index)]
            categories |= {label: {"name": f"object {label}"} for label, _ in found}
        for label, values in found:
            ids = {"id": len(annotations) + 1, "image_id": index + 1, "category_id": label}
            annotations.append(ids | values)
    named = [{"id": label} | categories[label] for label in sorted(categories)]
    content = {"images": images, "annotations": annotations, "categories": named}
    path.write_text(json.dumps(content), encoding="utf-8")


def write_overlay(job: Job, frames: Iterable[int], path: Path) -> None:
    """An mp4 of the frames with their labels over them, at the size of the page."""
    if h264_encoder() is None:
        raise InputError("no video can be written here: it needs PyAV with an H.264 encoder.")
    with video_writer(path, job.clip.rate, job.clip.size) as write:
        for index in frames:
            write(paint_labels(job.clip.frame(index), job.labels(index)))


EXPORTS: dict[str, Callable[[Job, Iterable[int], Path], None]] = {
    "masks.zip": write_masks,
    "tracks.csv": write_tracks,
    "coco.json": write_coco,
    "overlay.mp4": write_overlay,
}


def _segment(mask: Mask) -> dict[str, Any]:
    lengths, values = run_lengths(mask.T)  # COCO counts down the columns, and starts with zeros
    return {
        "segmentation": {"size": list(mask.shape), "counts": int(values[0]) * [0] + lengths.tolist()},
        "area": int(mask.sum()),
        "bbox": list(_box(mask)),
        "iscrowd": 1,  # COCO reads run lengths only for crowds
    }


def _keypoints(job: Job, index: int) -> dict[str, Any]:
    points = _points(job, index).round(2)
    visible = points[~np.isnan(points[:, 0]), :2]
    flat = [value for x, y, _ in points.tolist() for value in ((0, 0, 0) if math.isnan(x) else (x, y, 2))]
    low, high = (visible.min(axis=0), visible.max(axis=0)) if len(visible) else np.zeros((2, 2))
    width, height = (high - low).round(2).tolist()
    box = {"bbox": [*low.tolist(), width, height], "area": round(width * height, 2), "iscrowd": 0}
    return {"keypoints": flat, "num_keypoints": len(visible)} | box


def _box(mask: Mask) -> tuple[int, int, int, int]:
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    return int(columns[0]), int(rows[0]), int(np.ptp(columns)) + 1, int(np.ptp(rows)) + 1


def _objects(job: Job, index: int) -> Iterator[tuple[int, Mask]]:
    """Id and mask of every object of a frame."""
    ids = _ids(job, index)
    for label in np.unique(ids[ids > 0]).tolist():
        yield label, ids == label


def _ids(job: Job, index: int) -> Ids:
    """Ids of a frame at the size of the original."""
    size = job.clip.original[::-1]
    return np.asarray(Image.fromarray(job.labels(index)).resize(size, Image.Resampling.NEAREST))


def _points(job: Job, index: int) -> Float[np.ndarray, "points 3"]:
    """Points of a frame in pixels of the original, whose centers lie at whole numbers."""
    (height, width), (rows, columns) = job.clip.original, job.clip.size
    x, y, confidence = job.labels(index).T
    return np.column_stack([(x + 0.5) * width / columns - 0.5, (y + 0.5) * height / rows - 0.5, confidence])
