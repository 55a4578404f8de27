"""Rendered videos written to disk in the official layouts of the three benchmarks."""

import struct
import zlib
from pathlib import Path

import numpy as np

from tcore.data.rendered import RenderedVideo, render_video
from tcore.evaluation.benchmarks.rendered import true_joints

# PNG whatever the folder is called: scores are compared exactly, and JPEG would change the pixels.
from tests.evaluation.clips import write_folder


def heldout_videos(count: int, *, num_frames: int, size: int) -> list[RenderedVideo]:
    return [render_video(0, i, split="heldout", num_frames=num_frames, size=size) for i in range(count)]


def write_davis(root: Path, videos: list[RenderedVideo]) -> Path:
    for number, video in enumerate(videos):
        write_folder(root / "JPEGImages" / "480p" / f"clip{number}", video.frames)
        write_folder(root / "Annotations" / "480p" / f"clip{number}", video.objects)
    return root


def write_vip(root: Path, videos: list[RenderedVideo]) -> Path:
    for number, video in enumerate(videos, start=1):
        write_folder(root / "Images" / f"videos{number}", video.frames)
        write_folder(root / "Annotations" / "Category_ids" / f"videos{number}", video.parts)
    (root / "lists").mkdir()
    (root / "lists" / "val_videos.txt").write_text("\n".join(f"videos{n + 1}" for n in range(len(videos))))
    return root


def write_jhmdb(root: Path, videos: list[RenderedVideo]) -> Path:
    (root / "splits").mkdir(parents=True)
    for number, video in enumerate(videos):
        name = f"clip{number}"
        write_folder(root / "Rename_Images" / "walk" / name, video.frames, first=1)
        joints = true_joints(video)
        folder = root / "joint_positions" / "walk" / name
        folder.mkdir(parents=True)
        write_mat(folder / "joint_positions.mat", {"pos_img": np.where(np.isnan(joints), -1, joints + 1)})
    lines = [f"clip{n}.avi 2" for n in range(len(videos))]
    (root / "splits" / "walk_test_split1.txt").write_text("\n".join([*lines, "other.avi 1"]))
    return root


def write_mat(path: Path, arrays: dict[str, np.ndarray], compressed: bool = True) -> None:
    """A MATLAB 5 file, by the description of its format."""
    header = b"MATLAB 5.0 MAT-file".ljust(124) + struct.pack("<H", 0x0100) + b"IM"
    body = b""
    for name, values in arrays.items():
        matrix = (
            _element(6, struct.pack("<II", 6, 0))
            + _element(5, struct.pack(f"<{values.ndim}i", *values.shape))
            + _element(1, name.encode())
            + _element(9, values.astype("<f8").tobytes(order="F"))
        )
        element = struct.pack("<II", 14, len(matrix)) + matrix
        if compressed:
            packed = zlib.compress(element)
            element = struct.pack("<II", 15, len(packed)) + packed
        body += element
    path.write_bytes(header + body)


def _element(kind: int, data: bytes) -> bytes:
    return struct.pack("<II", kind, len(data)) + data.ljust((len(data) + 7) // 8 * 8, b"\0")
