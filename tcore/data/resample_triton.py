"""Boxes of frames cut out and resized on a GPU: the twin of render.crop_and_resize, without its matrices.

A program makes one tile of a view: it weighs the few source pixels that the tile needs along one axis, cuts
the result off as 8-bit images would be, and adds it up along the other axis, block by block.
"""

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

TILE, BLOCK, WARPS = 32, 64, 4
FILTERS = {"bicubic": 0, "bilinear": 1, "sharp": 2}


@triton.jit
def _weights(first, targets, length, scale, FILTER: tl.constexpr, BLOCK: tl.constexpr):
    """What each source pixel of a block, from `first` on, adds to each target pixel, not normalized."""
    place = first + tl.arange(0, BLOCK)
    center = (targets.to(tl.float32) + 0.5) * scale
    wide = tl.maximum(scale, 1.0)
    if FILTER == 2:
        center = tl.minimum(tl.maximum(center, 0.5), length - 0.5)
        wide = 1.0
    distance = tl.abs(place.to(tl.float32)[:, None] + 0.5 - center[None, :]) / wide
    if FILTER == 0:  # Keys' kernel with a = -1/2
        near, far = tl.minimum(distance, 1.0), tl.minimum(tl.maximum(distance, 1.0), 2.0)
        found = (1.5 * near - 2.5) * near * near + 1 + (((-0.5 * far + 2.5) * far - 4) * far + 2)
    else:
        found = tl.maximum(1 - distance, 0.0)
    inside = (place >= 0) & (place < length)
    return _round(tl.where(inside[:, None], found, 0.0))


@triton.jit
def _round(x):
    """To the 10 bits of mantissa that products have, which would cut off the others."""
    bits = (x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _range(first_target, length, scale, FILTER: tl.constexpr, TILE: tl.constexpr):
    """Source pixels that a tile of targets needs: the first, and the one after the last."""
    reach = 2.0 * tl.maximum(scale, 1.0) + 1.0
    if FILTER == 2:
        reach = 2.0
    begin = tl.floor((first_target + 0.5) * scale - reach).to(tl.int32)
    end = tl.ceil((first_target + TILE - 0.5) * scale + reach).to(tl.int32)
    if FILTER == 2:  # the centers of the border are held inside
        begin = tl.minimum(begin, length - 2)
        end = tl.maximum(end, 2)
    return tl.maximum(begin, 0), tl.minimum(end, length)


@triton.jit
def _unit(x):
    return tl.minimum(tl.maximum(x, 0.0), 255.0)


@triton.jit
def _kernel(
    frames, plans, images, height, width, size,
    FILTER: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    view = tl.program_id(0).to(tl.int64)
    frame = tl.load(plans + 6 * view).to(tl.int64)
    top, left = tl.load(plans + 6 * view + 1), tl.load(plans + 6 * view + 2)
    tall, broad = tl.load(plans + 6 * view + 3), tl.load(plans + 6 * view + 4)
    down_first = tl.load(plans + 6 * view + 5)
    y, x = tl.program_id(1) * TILE + tl.arange(0, TILE), tl.program_id(2) * TILE + tl.arange(0, TILE)
    down, across = tall.to(tl.float32) / size, broad.to(tl.float32) / size
    row_begin, row_end = _range(tl.program_id(1) * TILE, tall, down, FILTER, TILE)
    column_begin, column_end = _range(tl.program_id(2) * TILE, broad, across, FILTER, TILE)
    origin = frames + ((frame * height + top) * width + left) * 3
    inside = (y < size)[:, None] & (x < size)[None, :]
    for channel in tl.static_range(3):
        total = tl.zeros([TILE, TILE], tl.float32)
        if down_first == 0:
            norm = tl.zeros([TILE], tl.float32)
            for row in range(row_begin, row_end, BLOCK):
                rows = row + tl.arange(0, BLOCK)
                narrow = tl.zeros([BLOCK, TILE], tl.float32)
                narrow_norm = tl.zeros([TILE], tl.float32)
                for column in range(column_begin, column_end, BLOCK):
                    columns = column + tl.arange(0, BLOCK)
                    there = (rows < tall)[:, None] & (columns < broad)[None, :]
                    offsets = (rows[:, None] * width + columns[None, :]) * 3 + channel
                    pixels = tl.load(origin + offsets, there, 0).to(tl.float32)
                    weights = _weights(column, x, broad, across, FILTER, BLOCK)
                    narrow += tl.dot(pixels, weights, input_precision="tf32")
                    narrow_norm += tl.sum(weights, 0)
                narrow = _round(_unit(narrow / narrow_norm[None, :]))
                weights = _weights(row, y, tall, down, FILTER, BLOCK)
                total += tl.dot(tl.trans(weights), narrow, input_precision="tf32")
                norm += tl.sum(weights, 0)
            total = total / norm[:, None]
        else:
            norm = tl.zeros([TILE], tl.float32)
            for column in range(column_begin, column_end, BLOCK):
                columns = column + tl.arange(0, BLOCK)
                short = tl.zeros([TILE, BLOCK], tl.float32)
                short_norm = tl.zeros([TILE], tl.float32)
                for row in range(row_begin, row_end, BLOCK):
                    rows = row + tl.arange(0, BLOCK)
                    there = (rows < tall)[:, None] & (columns < broad)[None, :]
                    offsets = (rows[:, None] * width + columns[None, :]) * 3 + channel
                    pixels = tl.load(origin + offsets, there, 0).to(tl.float32)
                    weights = _weights(row, y, tall, down, FILTER, BLOCK)
                    short += tl.dot(tl.trans(weights), pixels, input_precision="tf32")
                    short_norm += tl.sum(weights, 0)
                short = _round(_unit(short / short_norm[:, None]))
                weights = _weights(column, x, broad, across, FILTER, BLOCK)
                total += tl.dot(short, weights, input_precision="tf32")
                norm += tl.sum(weights, 0)
            total = total / norm[None, :]
        place = images + ((view * 3 + channel) * size + y[:, None]) * size + x[None, :]
        tl.store(place, _unit(total) / 255, inside)


def resize(frames: Tensor, boxes: np.ndarray[Any, Any], size: int, filter_: str) -> Tensor:
    """Views of [frame, top, left, height, width, whether rows come first], one of each row of `boxes`."""
    numbers = torch.from_numpy(np.ascontiguousarray(boxes, dtype=np.int32))
    if frames.is_cuda:  # a copy from memory that is not pinned would wait for the step before
        numbers = numbers.pin_memory().to(frames.device, non_blocking=True)
    images = torch.empty((len(boxes), 3, size, size), device=frames.device)
    tiles = triton.cdiv(size, TILE)
    if len(boxes):
        _, height, width, _ = frames.shape
        _kernel[(len(boxes), tiles, tiles)](
            frames.contiguous(),
            numbers,
            images,
            height,
            width,
            size,
            FILTER=FILTERS[filter_],
            TILE=TILE,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return images
