"""Periodic texture tiles of the rendered videos: stripes, checks, dots, meshes and noise."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float32, UInt32

# Texels per unit of the scene, which is the width of the image: at 128 pixels a texel is a pixel.
DENSITY = 128
Tile = Float32[np.ndarray, "3 side side"]


def draw_pattern(rng: np.random.Generator, side: int) -> Float32[np.ndarray, "side side"]:
    """Draw a periodic oriented pattern with a period of 3 to 8 texels, mean 0 and deviation about 1."""
    period, angle = np.exp(rng.uniform(np.log(3.2), np.log(8.0))), rng.uniform(0, np.pi)
    kind = rng.choice(("stripes", "checks", "dots", "mesh", "noise"))
    if kind == "noise":
        field = _band_noise(rng, side, period, angle)
    else:
        # Whole numbers of waves per tile, so that the tile repeats without a seam.
        wave = np.exp(1j * angle) * side / period
        cross = 1j * wave * rng.uniform(0.55, 1.0)
        a, b = _phase(rng, side, wave), _phase(rng, side, cross)
        if kind == "stripes":
            field = np.sin(a + rng.uniform(0.0, 1.2) * np.sin(_phase(rng, side, cross / 4)))
        elif kind == "checks":
            field = 1.5 * np.sin(a) * np.sin(b)
        elif kind == "dots":
            field = np.cos(a) + np.cos(b) - 0.7
        else:
            field = np.maximum(np.cos(a), np.cos(b)) - 0.4
    field = np.tanh(rng.uniform(0.8, 2.5) * field)
    field -= field.mean()
    field /= field.std()
    return field.astype(np.float32)


def draw_texture(rng: np.random.Generator, side: int, mean: Float[np.ndarray, "3"]) -> Tile:
    """Draw a tile of the given mean color: one strong pattern and a fainter second one."""
    strong, faint = _color_step(rng, 0.08, 0.17), _color_step(rng, 0.02, 0.07)
    first, second = draw_pattern(rng, side), draw_pattern(rng, side)
    return _planes(mean) + _planes(strong) * first + _planes(faint) * second


def draw_backdrop(rng: np.random.Generator, side: int, mean: Float[np.ndarray, "3"]) -> Tile:
    """Draw a tile in which two textures share the ground in large soft-edged regions."""
    apart = _color_step(rng, 0.01, 0.06)
    first, second = draw_texture(rng, side, mean - apart), draw_texture(rng, side, mean + apart)
    region = np.zeros((side, side), np.float32)
    for turn in (0.4, 1.5, 2.6):
        region += np.sin(_phase(rng, side, rng.uniform(2, 5) * np.exp(1j * turn)))
    second -= first
    second *= 0.5 + 0.5 * np.tanh(6 * region)
    second += first
    return second


class Stamp(NamedTuple):
    """A tile prepared for lookup: twice as fine, a texel packed into one number, red lowest."""

    texels: UInt32[np.ndarray, " texels"]
    side: int
    density: float

    def at(self, x: Float32[np.ndarray, " n"], y: Float32[np.ndarray, " n"]) -> UInt32[np.ndarray, " n"]:
        """Look up packed colors at scene coordinates, the tile repeated without end."""
        # Truncation instead of floor: an offset of many tiles keeps the numbers positive.
        scale, offset = np.float32(self.density), np.float32(16 * self.side)
        column = (x * scale + offset).astype(np.int32) & (self.side - 1)
        row = (y * scale + offset).astype(np.int32) & (self.side - 1)
        return self.texels.take(row * self.side + column)


def make_stamp(tile: Tile, size: int) -> Stamp:
    """Average a tile down to what images of this size can show, refine it by two and pack it."""
    factor = 2 ** max(0, int(np.log2(DENSITY / size)))
    side = tile.shape[1] // factor
    if factor > 1:
        tile = tile.reshape(3, side, factor, side, factor).mean((2, 4), dtype=np.float32)
    levels = np.clip(tile * 255, 0, 255)
    fine = np.empty((3, side, 2, side, 2), np.float32)
    fine[:, :, 0, :, 0] = levels
    fine[:, :, 0, :, 1] = (levels + np.roll(levels, -1, 2)) / 2
    fine[:, :, 1] = (fine[:, :, 0] + np.roll(fine[:, :, 0], -1, 1)) / 2
    red, green, blue = (fine.reshape(3, -1) + 0.5).astype(np.uint32)
    return Stamp(red | green << 8 | blue << 16, 2 * side, 2 * DENSITY / factor)


def blend(
    under: UInt32[np.ndarray, " n"], over: UInt32[np.ndarray, " n"], share: Float32[np.ndarray, " n"]
) -> UInt32[np.ndarray, " n"]:
    """Mix packed colors: `share` is how much of the second shows."""
    shift = np.array([[0], [8], [16]], np.uint32)
    first, second = ((packed >> shift & 255).astype(np.float32) for packed in (under, over))
    red, green, blue = (first + share * (second - first) + 0.5).astype(np.uint32)
    return red | green << 8 | blue << 16


def _planes(color: Float[np.ndarray, "3"]) -> Float32[np.ndarray, "3 1 1"]:
    """Shape a color so that it multiplies a pattern."""
    return color.astype(np.float32)[:, None, None]


def _phase(rng: np.random.Generator, side: int, wave: complex) -> Float32[np.ndarray, "side side"]:
    """Phase of a plane wave with a whole number of periods per tile, at a random start."""
    steps = np.arange(side, dtype=np.float32) * np.float32(2 * np.pi / side)
    columns = round(wave.real) * steps + np.float32(rng.uniform(0, 2 * np.pi))
    return (columns[None, :] + (round(wave.imag) * steps)[:, None]).astype(np.float32)


def _band_noise(
    rng: np.random.Generator, side: int, period: float, angle: float
) -> Float[np.ndarray, "side side"]:
    """Noise of one period, with or without a preferred direction, of deviation 1."""
    fy, fx = np.fft.fftfreq(side)[:, None], np.fft.rfftfreq(side)[None, :]
    radius = np.hypot(fx, fy) * period
    along = np.cos(np.arctan2(fy, fx) - angle) ** 2
    gain = np.exp(-(((radius - 1) / rng.uniform(0.2, 0.5)) ** 2) - rng.choice((0.0, 2.0, 6.0)) * (1 - along))
    gain[0, 0] = 0
    field: Float[np.ndarray, "side side"] = np.fft.irfft2(
        np.fft.rfft2(rng.standard_normal((side, side))) * gain, (side, side)
    )
    return field / field.std()


def _color_step(rng: np.random.Generator, low: float, high: float) -> Float32[np.ndarray, "3"]:
    """Draw a step in color space: more often light against dark than hue against hue."""
    direction = rng.standard_normal(3) * 0.6 + rng.choice((-1.0, 1.0))
    step = direction / np.sqrt(np.mean(direction**2)) * rng.uniform(low, high)
    return step.astype(np.float32)
