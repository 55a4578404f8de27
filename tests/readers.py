"""Every reader of files from outside, with a small valid file for each, and ways to spoil such a file."""

import io
import json
import struct
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file

from tcore.config import load_config, save_config
from tcore.data.images import decode_image
from tcore.data.neighbors import Neighbors, check_neighbors, load_neighbors
from tcore.data.packed import INDEX, index_path, shard_path
from tcore.data.stores import PackedStore
from tcore.evaluation.benchmarks.benchmark import read_list
from tcore.evaluation.benchmarks.jhmdb import read_joints, read_mat
from tcore.evaluation.encoder import Encoder
from tcore.evaluation.encoders import load_encoder
from tcore.evaluation.export import export
from tcore.evaluation.masks import read_ids
from tcore.model.vit import VisionTransformer
from tcore.training.checkpoint import load_newest, sha256
from tcore.training.journal import forget_after
from tcore.video.labels import load_mask, read_points
from tests.data.packing import pack
from tests.tiny import tiny

EXTREMES = (0, 1, 127, 128, 255, 256, 32767, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1)
WORDS = (*b'null NaN 1e999 -1 99999999999999999999 " [ { } , ../'.split(), b"\n", b"\0")
IMAGES = (("jpeg", "RGB"), ("png", "P"), ("png", "RGBA"), ("webp", "RGB"), ("gif", "P"), ("bmp", "L"))
SIZES: dict[str, Any] = {
    "dim": 64,
    "depth": 1,
    "num_heads": 1,
    "patch_size": 4,
    "image_size": 8,
    "num_registers": 1,
}


class Reader(NamedTuple):
    """A file that is spoilt, and the function that reads it (or the folder that it lies in)."""

    name: str
    file: Path
    read: Callable[[], object]


def spoil(data: bytes, rng: np.random.Generator) -> bytes:
    """Some other bytes: mostly a few changes, now and then nothing but noise."""
    if rng.random() < 0.1:
        return rng.bytes(int(rng.integers(0, 200)))
    spoilt = bytearray(data)
    for _ in range(int(rng.integers(1, 5))):
        at, some = int(rng.integers(0, len(spoilt) + 1)), int(rng.integers(1, 64))
        number, size = int(rng.choice(len(EXTREMES))), int(rng.choice([1, 2, 4, 8]))
        order = "little" if rng.random() < 0.5 else "big"
        stop, other = [
            (at + 1, rng.bytes(1)),
            (len(spoilt), b""),
            (at + some, b""),
            (at, spoilt[at : at + some]),
            (at, rng.bytes(some)),
            (at + size, (EXTREMES[number] % 256**size).to_bytes(size, order)),
            (at + some % 8, WORDS[int(rng.integers(0, len(WORDS)))]),
        ][int(rng.integers(0, 7))]
        spoilt[at:stop] = other
    return bytes(spoilt)


def image_bytes(format: str, mode: str) -> bytes:
    """A small image of noise."""
    noise = np.random.default_rng(0).integers(0, 4, (12, 16, 3), dtype=np.uint8) * 60
    buffer = io.BytesIO()
    Image.fromarray(noise).convert(mode).save(buffer, format)
    return buffer.getvalue()


def read_frame(file: Path) -> None:
    """Decode a frame."""
    decode_image(file.read_bytes(), "frame")


def mat_bytes(compressed: bool) -> bytes:
    """A MATLAB 5 file with one matrix, pos_img."""
    values = np.zeros((2, 15, 3)).tobytes()

    def element(kind: int, body: bytes) -> bytes:
        return struct.pack("<II", kind, len(body)) + body + bytes(-len(body) % 8)

    body = element(6, struct.pack("<II", 6, 0)) + element(5, struct.pack("<3i", 2, 15, 3))
    matrix = element(14, body + element(1, b"pos_img") + element(9, values))
    if compressed:
        packed = zlib.compress(matrix)
        matrix = struct.pack("<II", 15, len(packed)) + packed
    return b"MATLAB 5.0".ljust(124) + struct.pack("<H", 0x0100) + b"IM" + matrix


def small_encoder() -> Encoder:
    """An encoder of a few thousand weights."""
    return Encoder(VisionTransformer(**SIZES), "small")


def make_readers(root: Path) -> list[Reader]:
    """Valid files under a folder, and their readers."""
    stores, labels, weights = (root / name for name in ("store", "labels", "weights"))
    return [*store_readers(stores), *label_readers(labels), *weight_readers(weights)]


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

    readers = [Reader(f"index {name}", index_path(store, name), read_store) for name in INDEX]
    readers += [Reader("store.json", store / "store.json", read_store)]
    readers += [Reader("shard", shard_path(store, 0), read_store)]
    for format, mode in IMAGES:
        file = root / f"{mode}.{format}"
        file.write_bytes(image_bytes(format, mode))
        readers.append(Reader(f"frame {format} {mode}", file, partial(read_frame, file)))
    neighbors = root / "neighbors.safetensors"
    indices = np.arange(8, dtype=np.int32).reshape(4, 2) % 4
    Neighbors(indices, np.zeros((4, 2), np.float32), "encoder", "a", "b").save(neighbors)

    def read_neighbors() -> None:
        found = load_neighbors(neighbors)
        check_neighbors(found, neighbors, 4, "b")

    return [*readers, Reader("neighbors", neighbors, read_neighbors)]


def label_readers(root: Path) -> list[Reader]:
    """Readers of masks, points, joints and lists of clips."""
    root.mkdir(parents=True)
    mask, points, rows = root / "mask.png", root / "points.csv", root / "points.json"
    mat, packed, joints, names = (root / n for n in ("a.mat", "b.mat", "joints.npz", "val.txt"))
    mask.write_bytes(image_bytes("png", "P"))
    points.write_text("frame,name,x,y\n0,nose,1.5,2\n0,hand,,\n3,nose,4,5\n")
    rows.write_text(json.dumps([{"frame": frame, "name": "nose", "x": 1.5, "y": 2} for frame in (0, 3)]))
    mat.write_bytes(mat_bytes(compressed=False))
    packed.write_bytes(mat_bytes(compressed=True))
    np.savez(joints, joints=np.zeros((2, 15, 3)))
    names.write_text("bear\ncamel\n")
    return [
        Reader("mask ids", mask, lambda: read_ids(mask)),
        Reader("mask colors", mask, lambda: load_mask(mask)),
        Reader("points CSV", points, lambda: read_points([points])),
        Reader("points JSON", rows, lambda: read_points([rows])),
        Reader("mat file", mat, lambda: read_mat(mat)),
        Reader("mat file, compressed", packed, lambda: read_mat(packed)),
        Reader("joints.npz", joints, lambda: read_joints(joints, (2, 15, 3))),
        Reader("list of clips", names, lambda: read_list(names)),
    ]


def weight_readers(root: Path) -> list[Reader]:
    """Readers of settings, checkpoints and encoders, and of what a run folder holds."""
    root.mkdir(parents=True)
    encoder = small_encoder()
    run, folder, torch_file, config = root / "run", root / "timm", root / "small.pth", root / "config.json"
    run.mkdir()
    card = {"vit": SIZES | {"layer_scale": 1.0}}
    (run / "encoder.json").write_text(json.dumps(card))
    save_file(encoder.backbone.state_dict(), run / "encoder.safetensors")
    torch.save({"model": encoder.backbone.state_dict(), "epoch": 3}, torch_file)
    alone = export(encoder, root / "alone.safetensors", "safetensors").path
    export(encoder, folder, "timm")
    save_config(tiny(), config)
    checkpoint, metrics = root / "kept" / "checkpoint.pt", root / "metrics.jsonl"
    checkpoint.parent.mkdir()
    checkpoint.write_bytes(b"weights")
    sums = checkpoint.with_suffix(".json")
    sums.write_text(json.dumps({"sha256": [sha256(checkpoint)]}))
    metrics.write_text('{"step": 1, "total": 2.0}\n{"step": 2, "total": 1.5}\n')
    return [
        Reader("config.json", config, lambda: load_config(config)),
        Reader("encoder.json", run / "encoder.json", lambda: load_encoder(run)),
        Reader("encoder.safetensors", run / "encoder.safetensors", lambda: load_encoder(run)),
        Reader("exported safetensors", alone, lambda: load_encoder(alone)),
        Reader("exported config.json", folder / "config.json", lambda: load_encoder(folder)),
        Reader("torch checkpoint", torch_file, lambda: load_encoder(torch_file)),
        Reader(
            "checkpoint.json", sums, lambda: load_newest(checkpoint, lambda path: path, lambda line: None)
        ),
        Reader("metrics.jsonl", metrics, lambda: forget_after(metrics, 1)),
    ]
