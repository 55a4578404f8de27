"""Small frame folders on disk: moving, still, short, broken."""

from pathlib import Path

import numpy as np
from PIL import Image


def write_clip(folder: Path, frames: int, *, seed: int = 0, moving: bool = True, size: int = 32) -> Path:
    """A folder of JPEGs; each moving clip shows noise that slides sideways."""
    folder.mkdir(parents=True)
    coarse = np.random.default_rng(seed).integers(0, 255, (4, 8, 3), dtype=np.uint8)
    wide = np.asarray(Image.fromarray(coarse).resize((4 * size, size), Image.Resampling.BICUBIC))
    for index in range(frames):
        left = (3 * index) % (3 * size) if moving else 0
        Image.fromarray(wide[:, left : left + size]).save(folder / f"{index:05d}.jpg", quality=90)
    return folder


def break_jpeg(path: Path) -> None:
    """Cut a file in the middle."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
