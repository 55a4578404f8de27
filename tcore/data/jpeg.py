"""JPEG by simplejpeg where it is installed: the pixels of Pillow, several times faster."""

from functools import lru_cache
from typing import Any

import numpy as np
from jaxtyping import UInt8

from tcore.data.image_file import LARGEST

START = b"\xff\xd8\xff"


@lru_cache(maxsize=1)
def simplejpeg() -> Any:
    """The package, or None where it is not installed."""
    try:
        import simplejpeg
    except (ImportError, RuntimeError):
        return None
    return simplejpeg


def decode_jpeg(data: bytes) -> UInt8[np.ndarray, "height width 3"] | None:
    """RGB pixels; None where Pillow has to look: no JPEG, broken, too large, or colors of print."""
    if data[:3] != START or (decoder := simplejpeg()) is None:
        return None
    try:
        height, width, colors, _ = decoder.decode_jpeg_header(data)
        if colors not in ("YCbCr", "Gray", "RGB") or height * width > LARGEST:
            return None
        return decoder.decode_jpeg(data, "RGB")
    except ValueError:
        return None
