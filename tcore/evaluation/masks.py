"""Masks of ids in image files: read, checked, written with the palette of DAVIS."""

import io
from functools import cache
from pathlib import Path

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from tcore.data.images import BAD_IMAGE, image_problem, open_image
from tcore.errors import InputError
from tcore.evaluation.scores import VOID as VOID

Ids = UInt8[np.ndarray, "height width"]


def read_ids(path: Path) -> Ids:
    """Ids of a mask: indices of a palette image, values of a gray one."""
    try:
        with open_image(path) as image:
            if image.mode not in ("P", "L", "1"):
                raise InputError(
                    f"mask {path} is a {image.mode} image: need ids as a palette or 8-bit gray PNG."
                )
            return np.asarray(image).astype(np.uint8)
    except BAD_IMAGE as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"cannot read mask {path}: {image_problem(error)}.") from error


def as_binary(ids: Ids) -> Ids:
    """One object: everything above 0, 255 included."""
    return (ids > 0).astype(np.uint8)


def encode_ids(ids: Ids) -> bytes:
    """Ids as an indexed PNG with the palette of the benchmarks."""
    image, file = Image.fromarray(ids), io.BytesIO()
    image.putpalette(davis_palette())
    image.save(file, format="PNG")
    return file.getvalue()


@cache
def davis_palette() -> list[int]:
    """The palette of DAVIS: the bits of an id spread over red, green and blue."""
    colors = np.zeros((256, 3), dtype=np.uint8)
    ids = np.arange(256)
    for bit in range(8):
        for channel in range(3):
            colors[:, channel] |= (((ids >> (3 * bit + channel)) & 1) << (7 - bit)).astype(np.uint8)
    return colors.ravel().tolist()
