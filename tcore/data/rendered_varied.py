"""Varied rendered videos, for training alone: the scenes of rendered.py, made to look more like recordings.

Clutter between the objects, photographic textures (noise with the spectrum of photographs over dead leaves,
arXiv:2106.05963), bending shapes, motion blur and defocus. A video is a function of (seed, video) alone.
"""

from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Float32, UInt8

from tcore.data.rendered import (
    PART_NAMES,
    SENSOR_NOISE,
    develop,
    draw_journey,
    draw_light,
    draw_scene,
    draw_shape,
    paint,
)
from tcore.data.rendered_scene import Radial, Scene
from tcore.data.rendered_textures import Stamp, Tile, draw_texture, make_stamp

KEY = 2  # beside the two splits of rendered.py
MOST_CLUTTER = 12
PHOTOGRAPHIC = 0.75  # share of the surfaces; the others keep the patterns of rendered.py


def render_varied(
    seed: int, video: int, *, num_frames: int = 20, size: int = 256
) -> UInt8[np.ndarray, "time height width 3"]:
    """The frames of one video."""
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(KEY, video)))
    scene = add_clutter(draw_scene(rng), rng)
    stamps, light = draw_stamps(rng, len(scene.shapes), size), draw_light(rng)
    noise = rng.standard_normal((3, 2 * size * size), np.float32)
    noise *= np.float32(255 * SENSOR_NOISE * rng.uniform(0.2, 1.5))
    starts = (rng.random(num_frames) * size * size).astype(int)
    # The shutter is open for a part of the time between two frames.
    instants = np.linspace(0, rng.uniform(0.1, 0.8), 3) if rng.random() < 0.5 else np.zeros(1)
    frames = np.empty((len(instants), num_frames, size, size, 3), np.uint8)
    ids = np.zeros((2, num_frames, size, size), np.uint8)  # not used
    for exposed, instant in zip(frames, instants, strict=True):
        t = np.arange(num_frames) + instant
        develop(paint(scene, stamps, t, ids[0], ids[1]), light, t, noise, starts, exposed)
    return bend_and_blur(frames.mean(axis=0, dtype=np.float32), rng)


def add_clutter(scene: Scene, rng: np.random.Generator) -> Scene:
    """Up to a dozen more objects of all sizes, in any order of depth; the figure stays last."""
    count = int(rng.integers(0, MOST_CLUTTER + 1))
    shapes = [draw_shape(rng) for _ in range(count)]
    sizes = 0.2 * rng.uniform(0.12, 1, count) ** -0.8  # small ones are more frequent
    shapes = [
        Radial(shape.radii * np.float32(size), shape.hole) for shape, size in zip(shapes, sizes, strict=True)
    ]
    journeys = [draw_journey(rng, rng.uniform(0, 2 * np.pi), figure=False) for _ in shapes]
    wide = [replace(one, center=complex(*rng.uniform(0.1, 0.9, 2))) for one in journeys]
    together = (*scene.journeys[:-1], *wide, scene.journeys[-1])
    order = tuple(int(i) for i in rng.permutation(len(together)))
    return replace(scene, shapes=(*scene.shapes, *shapes), journeys=together, order=order)


def draw_stamps(rng: np.random.Generator, count: int, size: int) -> dict[tuple[int, int], Stamp]:
    """A surface for the ground, every object and every part of the figure; any colors, often alike."""
    ground = rng.uniform(0.2, 0.8) + 0.1 * rng.standard_normal(3)
    alike = rng.uniform(0.05, 0.3)

    def surface(side: int) -> Stamp:
        mean = ground + alike * (rng.standard_normal() + 0.5 * rng.standard_normal(3))
        photographic = rng.random() < PHOTOGRAPHIC
        return make_stamp(
            (draw_photograph if photographic else draw_texture)(rng, side, np.clip(mean, 0.05, 0.95)), size
        )

    stamps = {(0, 0): surface(256)} | {(index, 0): surface(128) for index in range(1, count + 1)}
    return stamps | {(count + 1, part): surface(64) for part in range(1, len(PART_NAMES))}


def draw_photograph(rng: np.random.Generator, side: int, mean: Float[np.ndarray, "3"]) -> Tile:
    """A tile of leaves of all sizes that hide one another, under noise whose power falls with frequency."""
    tile = np.broadcast_to(mean.astype(np.float32)[:, None, None], (3, side, side)).copy()
    y, x = np.mgrid[:side, :side].astype(np.float32)
    for radius in sorted(side * 0.02 * rng.uniform(0.05, 1, rng.integers(0, 60)) ** -0.8, reverse=True):
        off = [np.abs((axis - rng.uniform(0, side) + side / 2) % side - side / 2) for axis in (x, y)]
        leaf = np.hypot(off[0], off[1] * rng.uniform(0.6, 1.6)) < radius
        tile[:, leaf] = (mean + 0.12 * rng.standard_normal(3)).astype(np.float32)[:, None]
    power = rng.uniform(0.7, 1.6)
    radii = np.hypot(np.fft.fftfreq(side)[:, None], np.fft.rfftfreq(side)[None, :])
    gain = np.where(radii > 0, np.maximum(radii, 1 / side) ** -power, 0)
    fields = np.fft.irfft2(np.fft.rfft2(rng.standard_normal((3, side, side))) * gain, (side, side))
    fields /= fields.std(axis=(1, 2), keepdims=True)
    # Light and dark first, two faint hues after it.
    mixing = np.array([[1, 1, 1], [1, 0, -1], [0.5, -1, 0.5]]).T * [rng.uniform(0.04, 0.16), 0.03, 0.03]
    return tile + np.einsum("ck,kyx->cyx", mixing, fields).astype(np.float32)


def bend_and_blur(
    frames: Float32[np.ndarray, "time size size 3"], rng: np.random.Generator
) -> UInt8[np.ndarray, "time size size 3"]:
    """Everything bends smoothly over time, and the focus drifts."""
    count, size = frames.shape[:2]
    t = np.arange(count)[:, None, None, None]
    phase, speed = rng.uniform(0, 2 * np.pi, (1, 2, 5, 5)), rng.uniform(0.05, 0.3)
    knots = torch.from_numpy(rng.uniform(0, 0.08) * np.sin(speed * t + phase)).float()
    bend = F.interpolate(knots, size=(size, size), mode="bicubic", align_corners=True)
    plain = F.affine_grid(torch.eye(2, 3).expand(count, 2, 3), [count, 1, size, size], align_corners=False)
    planes = torch.from_numpy(frames).permute(0, 3, 1, 2)
    planes = F.grid_sample(
        planes, plain + bend.movedim(1, -1), padding_mode="reflection", align_corners=False
    )
    middle, swing = rng.uniform(0, 1.2) * size / 256, rng.uniform(0, 1)
    sigma = torch.from_numpy(np.maximum(0.05, middle * (1 + swing * np.sin(speed * t[:, 0, 0, 0])))).float()
    kernel = torch.exp(-0.5 * (torch.arange(-5, 6) / sigma[:, None]) ** 2)
    kernel = (kernel / kernel.sum(1, keepdim=True)).repeat_interleave(3, 0)
    flat = F.pad(planes.flatten(0, 1)[None], (5,) * 4, mode="reflect")
    flat = F.conv2d(flat, kernel[:, None, :, None], groups=3 * count)
    flat = F.conv2d(flat, kernel[:, None, None, :], groups=3 * count)
    found = flat[0].unflatten(0, (count, 3)).permute(0, 2, 3, 1).clamp(0, 255).round()
    return found.to(torch.uint8).numpy()
