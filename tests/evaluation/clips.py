"""Small videos on disk: folders of frames and mp4 files."""

import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tcore.evaluation.encoder import Encoder
from tcore.model.vit import VisionTransformer

WHY_SKIPPED = "video files need PyAV, which is not installed"


def tiny_encoder() -> Encoder:
    torch.manual_seed(0)
    vit = VisionTransformer(dim=32, depth=1, num_heads=2, patch_size=8, image_size=64, layer_scale=0.5)
    return Encoder(vit, "tiny")


def need_av() -> None:
    pytest.importorskip("av", reason=WHY_SKIPPED)


def write_folder(folder: Path, frames: np.ndarray, first: int = 0) -> Path:
    folder.mkdir(parents=True)
    for index, frame in enumerate(frames, start=first):
        Image.fromarray(frame).save(folder / f"{index:05d}.png")
    return folder


def mask(path: Path, ids: np.ndarray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(ids).save(path)
    return path


def overlap(a: np.ndarray, b: np.ndarray) -> float:
    """Intersection over union."""
    return float((a & b).sum() / max(1, (a | b).sum()))


def write_file(path: Path, frames: np.ndarray, rate: int = 10) -> Path:
    """A nearly lossless video of frames that do not depend on each other."""
    import av

    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w", options={"movflags": "faststart"}) as container:
        stream = container.add_stream("libx264", rate=rate, options={"crf": "5", "g": "1"})
        stream.height, stream.width, stream.pix_fmt = *frames.shape[1:3], "yuv444p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return path


def cut(path: Path, share: float) -> Path:
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    return path


def turn(path: Path) -> Path:
    """Ask players to show an mp4 turned clockwise by 90 degrees, as telephones do."""
    data = bytearray(path.read_bytes())
    matrix = data.index(b"tkhd") + 4 + 4 + 20 + 8 + 8  # after version, times and layer, in version 0
    data[matrix : matrix + 36] = struct.pack(">9i", 0, 1 << 16, 0, -1 << 16, 0, 0, 64 << 16, 0, 1 << 30)
    path.write_bytes(bytes(data))
    return path
