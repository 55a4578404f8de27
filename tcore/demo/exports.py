"""Downloads: the formats of `tcore propagate` at the size of the original frames, and a video."""

import secrets
import zipfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path, PurePath
from threading import Event

import numpy as np
from jaxtyping import Float
from PIL import Image

from tcore.data.images import encode_jpeg
from tcore.data.video import h264_encoder, video_writer
from tcore.demo.job import RUNNING, Job
from tcore.errors import InputError
from tcore.evaluation.masks import Ids
from tcore.video.formats import About, choose_format, write_files
from tcore.video.labels import Points
from tcore.video.tracked import paint_labels

JPEG_QUALITY = 95


def write_export(job: Job, name: str, stop: Event, largest_mb: float) -> Path:
    """Write a file beside the folder of the clip; setting `stop` gives it up, and so does its size."""
    if name not in EXPORTS:
        raise InputError(f"no download {name!r}: there are {', '.join(EXPORTS)}.")
    if job.state == "running":
        raise InputError(RUNNING)
    if not job.found:
        raise InputError("there is nothing to download yet: run the propagation first.")

    def frames() -> Iterator[int]:
        for index in range(job.done):
            if stop.is_set():
                raise InputError("the download was given up.")
            if path.exists() and path.stat().st_size > largest_mb * 10**6:
                raise InputError(f"the download takes more than {largest_mb:g} MB: use a shorter video.")
            yield index

    path = job.clip.folder.with_name(f"{secrets.token_hex(8)}-{name}")  # it outlives the clip
    try:
        EXPORTS[name](job, frames(), path)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return path


def write_file(form: str, job: Job, frames: Iterable[int], path: Path) -> None:
    """One file of a format of `tcore propagate`, or a zip of all."""
    assert job.given is not None
    chosen = choose_format(form, job.given)
    about = About(job.given, job.clip.original, job.clip.file_name)
    read = _points if isinstance(job.given, Points) else _ids
    files = chosen.write(about, ((index, read(job, index)) for index in frames))
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in files:
                archive.writestr(PurePath(name).name, content)
    else:
        write_files(path.parent, ((path.name, content) for _, content in files))


def write_coco_with_frames(job: Job, frames: Iterable[int], path: Path) -> None:
    """A zip of coco.json and the frames that it names, both at the size of the page: no others are kept."""
    assert job.given is not None
    about = About(job.given, job.clip.size, lambda index: f"{index:05d}.jpg")
    with zipfile.ZipFile(path, "w") as archive:

        def labeled() -> Iterator[tuple[int, np.ndarray]]:
            for index in frames:
                archive.writestr(about.file_name(index), encode_jpeg(job.clip.frame(index), JPEG_QUALITY))
                yield index, job.labels(index)

        content = b"".join(part for _, part in choose_format("coco", job.given).write(about, labeled()))
        archive.writestr("coco.json", content, zipfile.ZIP_DEFLATED)


def write_overlay(job: Job, frames: Iterable[int], path: Path) -> None:
    """An mp4 of the frames with their labels over them, at the size of the page."""
    if h264_encoder() is None:
        raise InputError("no video can be written here: it needs PyAV with an H.264 encoder.")
    with video_writer(path, job.clip.rate, job.clip.size) as write:
        for index in frames:
            write(paint_labels(job.clip.frame(index), job.labels(index)))


EXPORTS: dict[str, Callable[[Job, Iterable[int], Path], None]] = {
    "masks.zip": partial(write_file, "davis"),
    "tracks.csv": partial(write_file, "tracks"),
    "coco.json": partial(write_file, "coco"),
    "coco.zip": write_coco_with_frames,
    "yolo.zip": partial(write_file, "yolo"),
    "cvat.xml": partial(write_file, "cvat"),
    "dlc.csv": partial(write_file, "dlc"),
    "overlay.mp4": write_overlay,
}


def _ids(job: Job, index: int) -> Ids:
    """Ids of a frame at the size of the original."""
    size = job.clip.original[::-1]
    return np.asarray(Image.fromarray(job.labels(index)).resize(size, Image.Resampling.NEAREST))


def _points(job: Job, index: int) -> Float[np.ndarray, "points 3"]:
    """Points of a frame in pixels of the original, whose centers lie at whole numbers."""
    (height, width), (rows, columns) = job.clip.original, job.clip.size
    x, y, confidence = job.labels(index).T
    return np.column_stack([(x + 0.5) * width / columns - 0.5, (y + 0.5) * height / rows - 0.5, confidence])
