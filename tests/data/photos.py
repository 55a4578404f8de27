"""Small images of a few kinds, whose colors say which one they are."""

from pathlib import Path

import numpy as np
from PIL import Image

from tcore.data.neighbors import Neighbors


def save_images(folder: Path, number: int, *, size: tuple[int, int] = (40, 40), seed: int = 0) -> Path:
    """A folder of images in subfolders: noise about a color of their own each."""
    rng = np.random.default_rng(seed)
    for index in range(number):
        place = folder / f"class{index % 3}" / f"image{index}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 255, 3) + rng.normal(0, 40, (*size, 3))
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(place)
    return folder


def ring(number: int, k: int, store_fingerprint: str, first: int = 1) -> Neighbors:
    """Neighbors of which everybody knows the answer: the next k images, from the first-next one on."""
    indices = (np.arange(number)[:, None] + np.arange(first, first + k)) % number
    cosines = np.tile(np.linspace(0.9, 0.5, k, dtype=np.float32), (number, 1))
    return Neighbors(indices.astype(np.int32), cosines, "a ring", "0" * 16, store_fingerprint)
