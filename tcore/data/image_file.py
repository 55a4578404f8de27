"""Opening image files that may be anything: few formats, a limit on the pixels that they declare."""

import io
import struct
import zlib
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from tcore.files import read_bytes

LARGEST = 2**26  # pixels: 8192 x 8192, 200 MB when decoded
# What photographs, frames and masks come as, whatever their names end with; others can be more than pixels.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF")
# All that opening and decoding a broken image can raise; a warning where warnings are errors.
BAD_IMAGE = (
    OSError,
    ValueError,
    SyntaxError,
    EOFError,
    IndexError,
    KeyError,
    TypeError,
    OverflowError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
    Image.DecompressionBombWarning,
)


def open_image(source: Path | bytes) -> Image.Image:
    """An image whose header was read; raises what BAD_IMAGE lists, also where it declares too many pixels."""
    data = source if isinstance(source, bytes) else read_bytes(source)
    image = Image.open(io.BytesIO(data), formats=FORMATS)
    if image.width * image.height > LARGEST:
        raise ValueError(f"it declares {image.width}x{image.height} pixels, more than {LARGEST:,}")
    return image


def image_problem(error: Exception, path: Path | None = None) -> str:
    """What is wrong with an image, in few words, without naming the file once more."""
    if isinstance(error, UnidentifiedImageError):
        return "cannot identify image file"
    if isinstance(error, Image.DecompressionBombError | Image.DecompressionBombWarning):
        return f"it declares more than {LARGEST:,} pixels"
    said = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return said.replace(repr(str(path)), "").strip() if path else said
