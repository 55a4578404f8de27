"""Flip, jitter and gray on a GPU: what render.py does row by row, one program for each view.

The contrast needs the mean of the gray image as it is when its turn comes: a first pass over the view makes
what comes before it and adds up the gray values, a second pass makes all of it and writes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tcore.data.photometry import GRAY

PIXELS, WARPS = 1024, 8
RED, GREEN, BLUE = (tl.constexpr(share) for share in GRAY)


@triton.jit
def _unit(x):
    return tl.minimum(tl.maximum(x, 0.0), 1.0)


@triton.jit
def _luma(r, g, b):
    return RED * r + GREEN * g + BLUE * b


@triton.jit
def _share(hue, corner):
    """How empty a channel is at a hue, in sixths of a turn from its corner."""
    sixth = hue + corner
    sixth = sixth - 6.0 * tl.floor(sixth / 6.0)
    return _unit(tl.minimum(sixth, 4.0 - sixth))


@triton.jit
def _hue(r, g, b, turns):
    value = tl.maximum(tl.maximum(r, g), b)
    chroma = value - tl.minimum(tl.minimum(r, g), b)
    safe = tl.maximum(chroma, 1e-12)
    blue_or_green = tl.where(value == g, 2 + (b - r) / safe, 4 + (r - g) / safe)
    hue = tl.where(value == r, (g - b) / safe, blue_or_green) + 6.0 * turns
    return (
        _unit(value - chroma * _share(hue, 5.0)),
        _unit(value - chroma * _share(hue, 3.0)),
        _unit(value - chroma * _share(hue, 1.0)),
    )


@triton.jit
def _operate(r, g, b, number, amount, mean):
    """Brightness, contrast, saturation or hue."""
    if number == 0:
        r, g, b = _unit(r * amount), _unit(g * amount), _unit(b * amount)
    elif number == 1:
        r = _unit(mean + amount * (r - mean))
        g = _unit(mean + amount * (g - mean))
        b = _unit(mean + amount * (b - mean))
    elif number == 2:
        gray = _luma(r, g, b)
        r = _unit(gray + amount * (r - gray))
        g = _unit(gray + amount * (g - gray))
        b = _unit(gray + amount * (b - gray))
    elif number == 3:
        r, g, b = _hue(r, g, b, amount)
    return r, g, b


@triton.jit
def _colors_kernel(images, made, flip, jitter, turns, gray, width, AREA: tl.constexpr, PIXELS: tl.constexpr):
    view = tl.program_id(0).to(tl.int64)
    source, target = images + view * 3 * AREA, made + view * 3 * AREA
    lanes = tl.arange(0, PIXELS)
    # Operations by their turn; -1 where there is none.
    n0, n1 = tl.load(turns + view * 4), tl.load(turns + view * 4 + 1)
    n2, n3 = tl.load(turns + view * 4 + 2), tl.load(turns + view * 4 + 3)
    a0, a1 = tl.load(jitter + view * 4 + tl.maximum(n0, 0)), tl.load(jitter + view * 4 + tl.maximum(n1, 0))
    a2, a3 = tl.load(jitter + view * 4 + tl.maximum(n2, 0)), tl.load(jitter + view * 4 + tl.maximum(n3, 0))
    mean = 0.0
    if (n0 == 1) | (n1 == 1) | (n2 == 1) | (n3 == 1):
        total = tl.zeros([PIXELS], tl.float32)
        for start in range(0, AREA, PIXELS):
            pixel = start + lanes
            inside = pixel < AREA
            r = tl.load(source + pixel, inside, 0.0)
            g = tl.load(source + AREA + pixel, inside, 0.0)
            b = tl.load(source + 2 * AREA + pixel, inside, 0.0)
            if n0 != 1:
                r, g, b = _operate(r, g, b, n0, a0, mean)
                if n1 != 1:
                    r, g, b = _operate(r, g, b, n1, a1, mean)
                    if n2 != 1:
                        r, g, b = _operate(r, g, b, n2, a2, mean)
            total += tl.where(inside, _luma(r, g, b), 0.0)
        mean = tl.sum(total, 0) / AREA
    mirrored, grayed = tl.load(flip + view), tl.load(gray + view)
    for start in range(0, AREA, PIXELS):
        pixel = start + lanes
        inside = pixel < AREA
        r = tl.load(source + pixel, inside, 0.0)
        g = tl.load(source + AREA + pixel, inside, 0.0)
        b = tl.load(source + 2 * AREA + pixel, inside, 0.0)
        r, g, b = _operate(r, g, b, n0, a0, mean)
        r, g, b = _operate(r, g, b, n1, a1, mean)
        r, g, b = _operate(r, g, b, n2, a2, mean)
        r, g, b = _operate(r, g, b, n3, a3, mean)
        if grayed != 0:
            r = _luma(r, g, b)
            g, b = r, r
        column = pixel % width
        place = tl.where(mirrored != 0, pixel - column + (width - 1 - column), pixel)
        tl.store(target + place, r, inside)
        tl.store(target + AREA + place, g, inside)
        tl.store(target + 2 * AREA + place, b, inside)


def colors(
    images: Tensor, flip: Tensor, jitter: Tensor, order: Tensor, wanted: Tensor, gray: Tensor
) -> Tensor:
    """Flip, jitter (in this order, where wanted) and gray."""
    made = torch.empty_like(images)
    turns = torch.where(wanted.gather(1, order), order, -1).int()
    count, _, height, width = images.shape
    if count:
        _colors_kernel[(count,)](
            images.contiguous(),
            made,
            flip.to(torch.int8),
            jitter.contiguous(),
            turns,
            gray.to(torch.int8),
            width,
            AREA=height * width,
            PIXELS=PIXELS,
            num_warps=WARPS,
        )
    return made
