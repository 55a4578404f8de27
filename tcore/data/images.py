"""Image files: opened with care, decoded to RGB, encoded as JPEG.

Files may come from anywhere, so only a few formats are tried, and the number of pixels is limited.
"""

import io
import struct
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from jaxtyping import UInt8
from PIL import Image, UnidentifiedImageError

from tcore.errors import InputError, reason
from tcore.files import read_bytes

Frame = UInt8[np.ndarray, "height width 3"]
Item = TypeVar("Item")
Made = TypeVar("Made")

IMAGE_SUFFIXES = {".jpg", ".jpeg", ".png"}
THREADS = 4  # enough to read and write as fast as the fastest GPU computes
LARGEST = 2**26  # pixels: 8192 x 8192, 200 MB when decoded
# What photographs, frames and masks come as, whatever their suffix; other formats can be more than pixels.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF")
# All that opening and decoding a broken image can raise.
BOMB = (Image.DecompressionBombError, Image.DecompressionBombWarning)  # the warning where it is an error
BROKEN = (OSError, ValueError, LookupError, ArithmeticError, TypeError, SyntaxError, EOFError)
BAD_IMAGE = (*BROKEN, struct.error, zlib.error, *BOMB)


def open_image(source: Path | bytes) -> Image.Image:
    """Read the header of an image; raises one of BAD_IMAGE, also where it declares too many pixels."""
    data = source if isinstance(source, bytes) else read_bytes(source)
    image = Image.open(io.BytesIO(data), formats=FORMATS)
    if image.width * image.height > LARGEST:
        raise ValueError(f"it declares {image.width}x{image.height} pixels, more than {LARGEST:,}")
    return image


def image_problem(error: Exception) -> str:
    """What is wrong with an image, in few words, without the file's name."""
    if isinstance(error, UnidentifiedImageError):
        return "cannot identify image file"
    if isinstance(error, BOMB):
        return f"it declares more than {LARGEST:,} pixels"
    return reason(error)


def read_image(path: Path) -> Frame:
    """Decode one image file to RGB."""
    return decode_image(read_file(path), str(path))


def read_file(path: Path) -> bytes:
    """An image file as it is."""
    try:
        return read_bytes(path)
    except OSError as error:
        raise InputError(f"cannot read frame {path}: {reason(error)}.") from error


def decode_image(data: bytes, name: str) -> Frame:
    """Decode one image to RGB, in the orientation its pixels are stored in; errors call it `name`."""
    if (frame := decode_jpeg(data)) is not None:
        return frame
    try:
        with open_image(data) as image:
            if image.mode.startswith("I"):  # Pillow would clip 16 bits at 255
                gray = (np.asarray(image) >> 8).astype(np.uint8)
                return np.repeat(gray[:, :, None], 3, axis=2)
            if image.mode == "RGB":  # converting would copy it
                return np.asarray(image)
            with_alpha = image.mode == "P" and "transparency" in image.info
            return np.asarray((image.convert("RGBA") if with_alpha else image).convert("RGB"))
    except BAD_IMAGE as error:
        raise InputError(f"cannot read frame {name}: {image_problem(error)}.") from error


@lru_cache(maxsize=1)
def simplejpeg() -> Any:
    """The simplejpeg package (the pixels of Pillow, several times faster), or None without it."""
    try:
        import simplejpeg
    except (ImportError, RuntimeError):
        return None
    return simplejpeg


def decode_jpeg(data: bytes) -> Frame | None:
    """RGB pixels by simplejpeg; None where Pillow has to try: not a JPEG, broken, too large, or CMYK."""
    if data[:3] != b"\xff\xd8\xff" or (decoder := simplejpeg()) is None:
        return None
    try:
        height, width, colors, _ = decoder.decode_jpeg_header(data)
        if colors not in ("YCbCr", "Gray", "RGB") or height * width > LARGEST:
            return None
        return decoder.decode_jpeg(data, "RGB")
    except ValueError:
        return None


def shrink_size(height: int, width: int, short_side: int | None) -> tuple[int, int]:
    """Width and height of a frame whose short side is at most this long."""
    scale = min(1.0, (short_side or min(height, width)) / min(height, width))
    return max(1, round(width * scale)), max(1, round(height * scale))


def encode_jpeg(pixels: Frame, quality: int) -> bytes:
    """A frame as a JPEG file."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "jpeg", quality=quality)
    return buffer.getvalue()


def ahead(work: Callable[[Item], Made], items: Iterable[Item], threads: int = THREADS) -> Iterator[Made]:
    """What `work` makes of the items, in order, by threads ahead of its use; a few results are held."""
    pool = ThreadPoolExecutor(threads)
    waiting: deque[Future[Made]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > 2 * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
        pool.shutdown()
    finally:
        # Where it is given up, nobody waits for the threads: the garbage collector may close it while another
        # thread starts, and that one holds a lock which the end of every thread needs.
        pool.shutdown(wait=False, cancel_futures=True)
