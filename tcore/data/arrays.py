"""Frames, masks and points of Python callers, converted to arrays."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, UInt8
from PIL import Image
from torch import Tensor

from tcore.data.images import Frame, read_image
from tcore.errors import InputError
from tcore.text import format_size

FrameLike = Any
"""A uint8 array or tensor of rows x columns x RGB (or RGB first), gray, a PIL image, or an image file."""


def as_array(value: Any) -> np.ndarray:
    """An array, tensor, PIL image or nested list as an array."""
    try:
        if isinstance(value, Tensor):
            return value.detach().cpu().numpy()
        return np.asarray(value)
    except (TypeError, ValueError) as error:
        raise InputError(f"cannot read a {type(value).__name__} as an array: {error}.") from error


def as_frame(value: FrameLike) -> Frame:
    """One frame: uint8, rows x columns x RGB."""
    if isinstance(value, (str, Path)):
        return read_image(Path(value))
    if isinstance(value, Image.Image):
        return np.asarray(value.convert("RGB"))
    pixels = as_array(value)
    shape = "x".join(map(str, pixels.shape))
    if pixels.dtype != np.uint8:
        raise InputError(
            f"a frame is {shape} of {pixels.dtype}: need uint8 from 0 to 255 "
            "(from floats in 0 to 1: (255 * frame).astype('uint8'))."
        )
    if pixels.ndim == 3 and pixels.shape[2] not in (1, 3, 4) and pixels.shape[0] in (1, 3):
        pixels = pixels.transpose(1, 2, 0)  # colors first, as torch has them
    if pixels.ndim == 2:
        pixels = pixels[..., None]
    if pixels.ndim != 3 or pixels.shape[2] not in (1, 3, 4) or 0 in pixels.shape:
        raise InputError(f"a frame is {shape}: need rows x columns x 3 (RGB).")
    colors = pixels[..., :3] if pixels.shape[2] >= 3 else pixels.repeat(3, axis=2)
    return np.ascontiguousarray(colors)


def as_clip(frames: Any) -> UInt8[Tensor, "time height width 3"]:
    """Frames of one size, together: time x height x width x RGB; a single frame is a clip of one."""
    if (
        isinstance(frames, Tensor)
        and frames.dtype == torch.uint8
        and frames.ndim == 4
        and frames.shape[3] == 3
    ):
        return frames
    return torch.from_numpy(stack(list(as_frames(frames)), "one clip"))


def as_frames(frames: Any) -> Iterator[Frame]:
    """Frames one after another; a single image is a video of one."""
    shape = getattr(frames, "shape", None)
    if (shape is not None and len(shape) in (2, 3)) or isinstance(frames, (str, Path, Image.Image)):
        frames = [frames]
    try:
        incoming = iter(frames)
    except TypeError:
        what = type(frames).__name__
        raise InputError(f"frames is a {what}: give a video, an array, or frames to iterate over.") from None
    return map(as_frame, incoming)


def stack(frames: Sequence[Frame], of: str) -> UInt8[np.ndarray, "time height width 3"]:
    """Frames together; an error calls them frames `of` this."""
    sizes = {frame.shape for frame in frames}
    if len(sizes) != 1:
        listed = ", ".join(sorted(format_size(*size[:2]) for size in sizes)) or "none"
        raise InputError(f"frames of {of} must have one size, found {listed}.")
    return np.stack(frames)


def as_mask(value: Any) -> Bool[np.ndarray, "rows columns"]:
    """Pixels that are set."""
    mask = as_array(value)
    if mask.ndim != 2:
        raise InputError(f"a mask is {'x'.join(map(str, mask.shape))}: need rows x columns.")
    return mask != 0


def as_points(name: str, value: Any, numbers: int = 2) -> list[tuple[float, ...]]:
    """Rows of some numbers each, such as x and y of points; a single row may come without its list."""
    rows = as_array(value)
    if rows.size == 0:
        return []
    rows = rows[None] if rows.ndim == 1 else rows
    if (
        rows.ndim != 2
        or rows.shape[1] != numbers
        or rows.dtype.kind not in "iuf"
        or not np.isfinite(rows).all()
    ):
        raise InputError(f"{name} is {value!r}: need {numbers} numbers each, all finite.")
    return [tuple(map(float, row)) for row in rows.tolist()]
