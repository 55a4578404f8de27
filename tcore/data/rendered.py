"""Rendered videos with exact masks, body parts and joints: data that needs no download.

A video is a function of (seed, split, video) alone. Objects differ from the ground by texture and by a
moderate step in color, light and shading drift, and everything moves, so neither color nor position
identifies an object.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float, Float32, Int, UInt8, UInt32

from tcore.data.rendered_scene import (
    JOINT_NAMES,
    JOINT_PARTS,
    LIMBS,
    PART_NAMES,
    Figure,
    Journey,
    Radial,
    Scene,
    Wave,
    cover,
    draw_wave,
    to_local,
)
from tcore.data.rendered_textures import Stamp, blend, draw_backdrop, draw_texture, make_stamp
from tcore.errors import InputError

__all__ = ["JOINT_NAMES", "LIMBS", "PART_NAMES", "RenderedVideo", "render_video"]

Split = Literal["train", "heldout"]
SPLITS: tuple[Split, ...] = ("train", "heldout")
# Long videos are painted in pieces: the arrays of a piece stay in the cache.
PIECE = 10
SENSOR_NOISE = 0.015


@dataclass(frozen=True)
class RenderedVideo:
    """Frames and their exact labels.

    Object 0 is the ground and the last object is the figure; part 0 is all that is not the figure.
    Joints are x, y in pixels (pixel centers at whole numbers) and 1 where visible, 0 where hidden or outside.
    """

    frames: UInt8[np.ndarray, "time height width 3"]
    objects: UInt8[np.ndarray, "time height width"]
    parts: UInt8[np.ndarray, "time height width"]
    joints: Float[np.ndarray, "time joints 3"]


@dataclass(frozen=True)
class Light:
    """Brightness, contrast and tint that drift, and a shading that moves over the image."""

    brightness: Wave
    contrast: Wave
    tint: tuple[Wave, Wave, Wave]
    shading: float
    direction: complex
    speed: float
    start: float


def render_video(
    seed: int, video: int, *, split: Split = "train", num_frames: int = 20, size: int = 128
) -> RenderedVideo:
    """Render one video; its content does not depend on `size`, nor a frame on `num_frames`."""
    if min(seed, video) < 0 or num_frames < 1 or size < 32:
        raise InputError(
            f"rendered video {video} of seed {seed}, {num_frames} frames of {size} pixels: need a seed and a "
            "number from 0, 1 frame or more, of 32 pixels or more."
        )
    key, rng = (SPLITS.index(split), video), _scene_rng(seed, video, split)
    scene = draw_scene(rng)
    stamps, light = _draw_stamps(rng, len(scene.shapes), size), draw_light(rng)
    noise_rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(*key, 1)))
    noise = noise_rng.standard_normal((3, 2 * size * size), np.float32) * np.float32(255 * SENSOR_NOISE)
    starts = (noise_rng.random(num_frames) * size * size).astype(int)

    frames = np.empty((num_frames, size, size, 3), np.uint8)
    objects, parts = (np.zeros((num_frames, size, size), np.uint8) for _ in range(2))
    for first in range(0, num_frames, PIECE):
        piece = slice(first, min(first + PIECE, num_frames))
        t = np.arange(piece.start, piece.stop, dtype=float)
        colors = paint(scene, stamps, t, objects[piece], parts[piece])
        develop(colors, light, t, noise, starts[piece], frames[piece])
    return RenderedVideo(frames, objects, parts, _joints(scene, parts))


def _scene_rng(seed: int, video: int, split: Split) -> np.random.Generator:
    # The split is part of the key, so that held-out videos are never training videos.
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(SPLITS.index(split), video, 0)))


def find_scene(seed: int, video: int, *, split: Split = "train") -> Scene:
    """What moves in a rendered video, and how."""
    return draw_scene(_scene_rng(seed, video, split))


def follow(
    scene: Scene, video: RenderedVideo, source: int, target: int, points: Float[np.ndarray, "n 2"]
) -> Float[np.ndarray, "n 2"]:
    """Where pixels (x, y) of one frame are in another; NaN where they are hidden or outside."""
    size, t = video.frames.shape[1], np.array([source, target], float)
    placed = {(0, 0): scene.view(t)} | {(o, part): place for o, part, _, place in scene.layers(t)}
    ids = np.stack([video.objects, video.parts], -1)
    found = np.full(points.shape, np.nan)
    for index, (x, y) in enumerate(points):
        own = ids[source, round(y), round(x)]
        turn, shift = placed[int(own[0]), int(own[1])]
        local = (complex(x + 0.5, y + 0.5) / size - shift[0]) / turn[0]
        there = (turn[1] * local + shift[1]) * size - (0.5 + 0.5j)
        column, row = round(there.real), round(there.imag)
        if 0 <= row < size and 0 <= column < size and (ids[target, row, column] == own).all():
            found[index] = there.real, there.imag
    return found


def paint(
    scene: Scene,
    stamps: dict[tuple[int, int], Stamp],
    t: Float[np.ndarray, " time"],
    objects: UInt8[np.ndarray, "time size size"],
    parts: UInt8[np.ndarray, "time size size"],
) -> UInt32[np.ndarray, "time size size"]:
    """Paint the ground and every layer over it, and record the ids of what is on top."""
    size = objects.shape[1]
    every = np.tile(np.arange(size), (len(t), 1))
    x, y = to_local(scene.view(t), every, every, size)
    colors = stamps[0, 0].at(x.ravel(), y.ravel())
    for object_id, part_id, shape, place in scene.layers(t):
        index, x, y, depth = cover(shape, place, size)
        color = stamps[object_id, part_id].at(x, y)
        # Smooth edges: a pixel on the outline takes part of either color, but has one label.
        edge = np.flatnonzero(depth < 0.5)
        color[edge] = blend(colors[index[edge]], color[edge], depth[edge] + np.float32(0.5))
        colors[index] = color
        inside = index[depth > 0]
        objects.reshape(-1)[inside] = object_id
        parts.reshape(-1)[inside] = part_id
    return colors.reshape(objects.shape)


def develop(
    colors: UInt32[np.ndarray, "time size size"],
    light: Light,
    t: Float[np.ndarray, " time"],
    noise: Float32[np.ndarray, "3 pixels"],
    starts: Int[np.ndarray, " time"],
    frames: UInt8[np.ndarray, "time size size 3"],
) -> None:
    """Turn packed colors into frames under this light; noise is read from another start in every frame."""
    size = colors.shape[1]
    grid = (np.arange(size) + 0.5) / size
    columns, rows = light.direction.real * grid, light.direction.imag * grid + light.start
    contrast, brightness = light.contrast.at(t), light.brightness.at(t)
    tint = np.stack([wave.at(t) for wave in light.tint], 1)
    for i in range(len(t)):
        phase = (columns + rows[:, None] + light.speed * t[i]).astype(np.float32)
        shade = np.float32(brightness[i]) * (1 + np.float32(light.shading) * np.sin(phase))
        for c in range(3):
            plane = (colors[i] >> 8 * c & 255).astype(np.float32)
            plane *= np.float32(contrast[i] * tint[i, c])
            plane += np.float32(127.5 * (1 - contrast[i]) * tint[i, c])
            plane *= shade
            plane += noise[c, starts[i] : starts[i] + size * size].reshape(size, size)
            frames[i, :, :, c] = np.clip(plane, 0, 255)


def _joints(scene: Scene, parts: UInt8[np.ndarray, "time size size"]) -> Float32[np.ndarray, "time joints 3"]:
    """Place the joints in pixels; one is visible where a part that holds it is on top."""
    size = parts.shape[1]
    pixels = scene.joints(np.arange(len(parts), dtype=float)) * size - (0.5 + 0.5j)
    column, row = np.rint(pixels.real).astype(int), np.rint(pixels.imag).astype(int)
    within = (column >= 0) & (column < size) & (row >= 0) & (row < size)
    frame = np.arange(len(parts))[:, None]
    top = np.where(within, parts[frame, row.clip(0, size - 1), column.clip(0, size - 1)], 0)
    visible = np.stack([np.isin(top[:, j], holders) for j, holders in enumerate(JOINT_PARTS)], 1)
    return np.stack([pixels.real, pixels.imag, visible], 2).astype(np.float32)


def draw_scene(rng: np.random.Generator) -> Scene:
    """Draw scenes until every object is well visible at the start and often enough later."""
    size, t = 32, np.array([0.0, 5.0, 10.0, 15.0, 19.0])
    while True:
        count = int(rng.integers(2, 5))
        scene = _draw_candidate(rng, count)
        ids = np.zeros(len(t) * size * size, np.uint8)
        for object_id, _, shape, place in scene.layers(t):
            index, _, _, depth = cover(shape, place, size)
            ids[index[depth > 0]] = object_id
        area = (ids.reshape(len(t), -1, 1) == np.arange(1, count + 2)).mean(1)
        if area[0].min() > 0.036 and ((area > 0.015).mean(0) > 0.7).all():
            return scene


def _draw_candidate(rng: np.random.Generator, count: int) -> Scene:
    """Draw a scene of `count` objects and the figure, spread about the middle at the start."""
    camera = Journey(
        center=0.5 + 0.5j,
        radii=(rng.uniform(0.04, 0.1), rng.uniform(0.04, 0.1)),
        tilt=rng.uniform(0, np.pi),
        start=rng.uniform(0, 2 * np.pi),
        speed=rng.choice((-1, 1)) * rng.uniform(0.08, 0.16),
        wobble=Wave(0.0, 0.0, 0.0, 0.0),
        angle=draw_wave(rng, 0.0, 0.22, (0.06, 0.14)),
        spin=0.0,
        log_scale=draw_wave(rng, 0.0, 0.14, (0.06, 0.14)),
    )
    around = rng.uniform(0, 2 * np.pi)
    journeys = tuple(
        draw_journey(rng, around + 2 * np.pi * k / (count + 1), figure=k == count) for k in range(count + 1)
    )
    waving = rng.integers(-1, 2)
    figure = Figure(
        height=rng.uniform(0.66, 0.8),
        facing=int(rng.choice((-1, 1))),
        near=int(rng.integers(2)),
        pace=rng.uniform(0.25, 0.45),
        start=rng.uniform(0, 2 * np.pi),
        stride=rng.uniform(0.35, 0.6),
        splay=(rng.uniform(0.3, 0.6), rng.uniform(0.05, 0.2)),
        raised=(float(waving == 0), float(waving == 1)),
    )
    shapes = tuple(draw_shape(rng) for _ in range(count))
    return Scene(camera, shapes, journeys, figure, tuple(int(i) for i in rng.permutation(count + 1)))


def draw_journey(rng: np.random.Generator, start: float, *, figure: bool) -> Journey:
    """Draw a trajectory; the figure stays upright and closer to the middle."""
    wide, tall = ((0.18, 0.26), (0.05, 0.09)) if figure else ((0.24, 0.34), (0.2, 0.3))
    tilt = rng.uniform(-0.3, 0.3) if figure else rng.uniform(0, np.pi)
    return Journey(
        center=complex(*rng.uniform(0.46, 0.54, 2)),
        radii=(rng.uniform(*wide), rng.uniform(*tall)),
        tilt=tilt,
        start=start - tilt + rng.uniform(-0.4, 0.4),
        speed=rng.choice((-1, 1)) * rng.uniform(0.07, 0.13),
        wobble=draw_wave(rng, 0.0, 0.03, (0.2, 0.35)),
        angle=draw_wave(rng, 0.0, 0.2, (0.1, 0.2))
        if figure
        else draw_wave(rng, rng.uniform(0, 6), 0.3, (0.1, 0.2)),
        spin=0.0 if figure else rng.choice((-1, 1)) * rng.uniform(0.01, 0.07),
        log_scale=draw_wave(rng, 0.0, 0.15 if figure else 0.32, (0.1, 0.2)),
    )


def draw_shape(rng: np.random.Generator) -> Radial:
    """Draw an ellipse, rounded box, polygon, star, blob or ring of 4.5 to 9 hundredths of the image."""
    angle = np.arange(2048) * (2 * np.pi / 2048)
    kind = rng.choice(("ellipse", "box", "polygon", "star", "blob", "ring"))
    hole = rng.uniform(0.3, 0.5) if kind == "ring" else 0.0
    if kind in ("ellipse", "box"):
        power, aspect = 2.0 if kind == "ellipse" else rng.uniform(4, 8), rng.uniform(0.5, 0.9)
        radii = (np.abs(np.cos(angle)) ** power + np.abs(np.sin(angle) / aspect) ** power) ** (-1 / power)
    elif kind == "polygon":
        corners = int(rng.integers(3, 7))
        radii = 1 / np.cos(np.mod(angle, 2 * np.pi / corners) - np.pi / corners)
    elif kind == "star":
        points = int(rng.integers(4, 8))
        radii = 1 - rng.uniform(0.4, 0.55) * np.abs(np.mod(angle * points / np.pi, 2) - 1)
    else:
        waves = rng.normal(0, 0.13, (4, 2))
        radii = np.ones_like(angle)
        for k, (a, b) in enumerate(waves, start=2):
            radii += a * np.cos(k * angle) + b * np.sin(k * angle)
        radii = radii.clip(0.4, 1.8)
    area = np.pi * np.mean(radii**2) * (1 - hole**2)
    return Radial((radii * np.sqrt(rng.uniform(0.05, 0.09) / area)).astype(np.float32), hole)


def _draw_stamps(rng: np.random.Generator, count: int, size: int) -> dict[tuple[int, int], Stamp]:
    """Draw a texture for the ground, every object and every part of the figure, by object and part.

    Mean colors differ moderately, sometimes hardly, from the ground's.
    """
    ground = rng.uniform(0.4, 0.6) + rng.uniform(-0.08, 0.08, 3)

    def near(mean: Float[np.ndarray, "3"], low: float, high: float) -> Float[np.ndarray, "3"]:
        direction = rng.standard_normal(3)
        return mean + direction / np.linalg.norm(direction) * rng.uniform(low, high)

    tiles = {(0, 0): draw_backdrop(rng, 256, ground)}
    for index in range(1, count + 1):
        tiles[index, 0] = draw_texture(rng, 128, near(ground, 0.03, 0.2))
    skin = near(ground, 0.05, 0.15)
    for part in range(1, len(PART_NAMES)):
        tiles[count + 1, part] = draw_texture(rng, 64, near(skin, 0.08, 0.28))
    return {ids: make_stamp(tile, size) for ids, tile in tiles.items()}


def draw_light(rng: np.random.Generator) -> Light:
    """Draw how the light changes."""
    tint = (draw_wave(rng, 1.0, 0.08, (0.05, 0.2)) for _ in range(3))
    return Light(
        brightness=draw_wave(rng, 1.0, 0.2, (0.05, 0.25)),
        contrast=draw_wave(rng, 0.9, 0.2, (0.05, 0.25)),
        tint=(next(tint), next(tint), next(tint)),
        shading=rng.uniform(0.1, 0.22),
        direction=complex(rng.uniform(3, 6) * np.exp(1j * rng.uniform(0, 2 * np.pi))),
        speed=rng.choice((-1, 1)) * rng.uniform(0.1, 0.25),
        start=rng.uniform(0, 2 * np.pi),
    )
