"""Readers of data: stores of frames, labels, videos, and what tcore prepare leaves."""

import contextlib
import io
import json
import os
import shutil
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from tcore import files
from tcore.data.check import same_bytes
from tcore.data.images import read_image
from tcore.data.neighbors import Neighbors, check_neighbors, load_neighbors
from tcore.data.packed import INDEX, index_path, shard_path
from tcore.data.packing import Item, Settings, Task, record_path, write_shard
from tcore.data.prepare import merge, prepare, summarize
from tcore.data.probe import probe
from tcore.data.stores import FolderStore, PackedStore
from tcore.data.video import FileVideo, SampledVideo
from tcore.errors import InputError
from tcore.evaluation.benchmarks.benchmark import Clip, fingerprint, read_joints, read_list
from tcore.evaluation.benchmarks.jhmdb import read_mat
from tcore.evaluation.benchmarks.points import read_keypoints
from tcore.evaluation.masks import read_ids
from tcore.evaluation.neighbors import encode_all
from tcore.video.both_ways import AHEAD
from tcore.video.labels import load_mask, read_points
from tcore.video.resume import CARD, DIGITS, UNFINISHED, DoneError, find_unfinished, keep_unfinished
from tests.data.clips import write_clip
from tests.data.packing import pack
from tests.evaluation.layouts import write_mat
from tests.readers.reader import Reader, small_encoder

IMAGES = (("jpeg", "RGB"), ("png", "P"), ("png", "RGBA"), ("webp", "RGB"), ("gif", "P"), ("bmp", "L"))


# A container, and a codec for it.
VIDEOS = {
    "mp4": "libx264",
    "mov": "mpeg4",
    "mkv": "libx264",
    "webm": "libvpx-vp9",
    "avi": "mjpeg",
    "ts": "mpeg2video",
    "ogg": "libvpx",
    "flv": "flv",
    "gif": "gif",
    "y4m": "wrapped_avframe",
    "wmv": "wmv2",
    "h264": "libx264",
}


FORMATS = {"y4m": "yuv4mpegpipe"}


PIXELS = {"gif": "rgb8", "mjpeg": "yuvj420p"}


def image_bytes(format: str, mode: str) -> bytes:
    """A small image of noise."""
    noise = np.random.default_rng(0).integers(0, 4, (12, 16, 3), dtype=np.uint8) * 60
    buffer = io.BytesIO()
    Image.fromarray(noise).convert(mode).save(buffer, format)
    return buffer.getvalue()


def store_readers(root: Path) -> list[Reader]:
    """Readers of packed stores, frames and neighbors."""
    store = pack(root / "packed", [[("a", 3), ("b", 2)], [("c", 4)]], {"a": [1]})

    def read_store() -> None:
        opened = PackedStore(store)
        opened.verify()
        list(opened.names)
        opened.all_cuts()
        for video in range(len(opened)):
            opened.read(video, [0, int(opened.lengths[video]) - 1])

    readers = [Reader(f"index {name}", index_path(store, name), read_store, share=0.3) for name in INDEX]
    readers += [Reader("store.json", store / "store.json", read_store, share=0.5)]
    readers += [Reader("shard", shard_path(store, 0), read_store, share=0.5)]
    for format, mode in IMAGES:
        file = root / f"{mode}.{format}"
        file.write_bytes(image_bytes(format, mode))
        readers.append(Reader(f"frame {format} {mode}", file, partial(read_image, file)))
    neighbors = root / "neighbors.safetensors"
    indices = np.arange(8, dtype=np.int32).reshape(4, 2) % 4
    Neighbors(indices, np.zeros((4, 2), np.float32), "encoder", "a", "b").save(neighbors)

    def read_neighbors() -> None:
        found = load_neighbors(neighbors)
        check_neighbors(found, neighbors, 4, "b")

    clips = [write_clip(root / "clips" / name, 2, size=16) for name in "ab"]
    features = root / "features"
    images = FolderStore(root / "clips")
    encoder = small_encoder()

    def read_features() -> None:
        encode_all(encoder, images, features)

    read_features()
    return [
        *readers,
        Reader("neighbors", neighbors, read_neighbors),
        Reader(
            "bytes of a frame",
            clips[0] / "00000.jpg",
            lambda: same_bytes(FolderStore(root / "clips"), 1),
            share=0.3,
        ),
        Reader("kept features", features, read_features, share=0.2),
    ]


def label_readers(root: Path) -> list[Reader]:
    """Readers of masks, points, joints and lists of clips."""
    root.mkdir(parents=True)
    mask, points, rows = root / "mask.png", root / "points.csv", root / "points.json"
    mat, packed, joints, names = (root / n for n in ("a.mat", "b.mat", "joints.npz", "val.txt"))
    mask.write_bytes(image_bytes("png", "P"))
    points.write_text("frame,name,x,y\n0,nose,1.5,2\n0,hand,,\n3,nose,4,5\n")
    rows.write_text(json.dumps([{"frame": frame, "name": "nose", "x": 1.5, "y": 2} for frame in (0, 3)]))
    for path, compressed in ((mat, False), (packed, True)):
        write_mat(path, {"pos_img": np.zeros((2, 15, 3))}, compressed)
    np.savez(joints, joints=np.zeros((2, 15, 3)))
    names.write_text("bear\ncamel\n")
    clip = Clip("clip", 4 * (mask,), (root / "keypoints.csv",))
    clip.truth[0].write_text("frame,name,x,y,visible\n0,nose,1.5,2,1\n0,hand,,,0\n3,nose,4,5,1\n")
    stopped, done = root / "stopped" / UNFINISHED, root / "done" / CARD
    settings = {"encoder": "default", "edges": True}
    with keep_unfinished(stopped.parent, settings, "fine") as kept:
        kept.put(AHEAD, 0, torch.rand(2, 3, 4))
    done.parent.mkdir()
    done.write_text(json.dumps({"command": files.digest(settings, DIGITS)}))

    def resume() -> None:
        find_unfinished(stopped.parent, settings)
        with keep_unfinished(stopped.parent, settings, "fine") as kept:
            kept.get(AHEAD, 0)

    def repeat() -> None:
        with contextlib.suppress(DoneError):
            find_unfinished(done.parent, settings)

    return [
        Reader("unfinished propagation", stopped, resume),
        Reader("finished propagation", done, repeat, share=0.3),
        Reader("mask ids", mask, lambda: read_ids(mask)),
        Reader("mask colors", mask, lambda: load_mask(mask)),
        Reader("points CSV", points, lambda: read_points([points])),
        Reader("points JSON", rows, lambda: read_points([rows])),
        Reader("mat file", mat, lambda: read_mat(mat)),
        Reader("mat file, compressed", packed, lambda: read_mat(packed)),
        Reader("joints.npz", joints, lambda: read_joints(joints, (2, 15, 3))),
        Reader("keypoints.csv", clip.truth[0], lambda: read_keypoints(clip)),
        Reader("list of clips", names, lambda: read_list(names)),
        Reader("truth", names, lambda: fingerprint([names])),
    ]


def write_video(
    path: Path, codec: str, size: tuple[int, int] = (48, 64), frames: int = 8, pixels: str | None = None
) -> Path:
    """A small video of a square that moves over gray."""
    import av

    chosen = pixels or PIXELS.get(codec, "yuv420p")
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(os.fspath(path), "w", format=FORMATS.get(path.suffix[1:])) as container:
        stream: Any = container.add_stream(codec, rate=8)
        stream.height, stream.width, stream.pix_fmt = *size, chosen
        for index in range(frames):
            image = np.full((*size, 3), 20 * index, dtype=np.uint8)
            image[index : index + 9, index : index + 9] = 255
            frame = av.VideoFrame.from_ndarray(image, format="rgb24")
            container.mux(stream.encode(frame.reformat(format=chosen)))
        container.mux(stream.encode())
    return path


def read_video(path: Path) -> None:
    """Read a video as `propagate`, `prepare` and `check` do; only the last never refuses one."""
    probe(path.parent, path.name, full=False)
    with contextlib.suppress(InputError):
        list(SampledVideo(path, Fraction(2), 32))
    list(FileVideo(path))


def video_readers(root: Path) -> list[Reader]:
    """Readers of videos in many containers."""
    paths = [write_video(root / f"{codec}.{suffix}", codec) for suffix, codec in VIDEOS.items()]
    return [Reader(f"video {path.suffix[1:]}", path, partial(read_video, path), share=0.15) for path in paths]


def prepare_readers(root: Path) -> list[Reader]:
    """Readers of a store that is being prepared, and of what is said of a finished one."""
    for name in "ab":
        write_clip(root / "frames" / name, 2, size=16)
    store, whole, copy = root / "store", root / "whole", root / "copy"
    for number in (1, 2):
        prepare(root / "frames", store, part=(number, 2), engine="here")
    prepare(root / "frames", whole, engine="here")

    def finish() -> None:
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(store, copy, copy_function=link)
        prepare(root / "frames", copy, part=(1, 2), engine="here")
        summarize(merge(copy))

    task = Task(
        root / "frames",
        root / "alone",
        Settings("frames", None, None, 90),
        0,
        (Item("a", "a", ("00000.jpg",), 9),),
    )
    task.trying.parent.mkdir(parents=True)
    task.trying.write_text("0 0")

    def pack_again() -> None:
        shutil.rmtree(root / "again", ignore_errors=True)
        prepare(root / "frames" / "b", root / "again", images=True, engine="here")

    return [
        Reader("videos that killed a process", task.trying, lambda: write_shard(task), share=0.2),
        Reader("image that is packed", root / "frames" / "b" / "00001.jpg", pack_again, share=0.05),
        Reader("plan.json", store / "plan.json", finish, share=0.1),
        Reader("parts/*.json", record_path(store, 0), finish, share=0.1),
        Reader("skipped.csv", whole / "skipped.csv", lambda: summarize(PackedStore(whole)), share=0.5),
    ]


def link(source: str, target: str) -> None:
    """Make one file appear in two places, also a pipe."""
    os.link(source, target)
