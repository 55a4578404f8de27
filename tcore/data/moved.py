"""Photographs as videos: a camera that pans, zooms and turns smoothly over each of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from tcore.data.frames import Frame, FrameStore

FRAMES, FPS = 20, 2.0
# The frame shows this share of the photograph's sides, at the widest; the rest is room to move in.
WINDOW = 0.7
# Largest turn, zoom (as a factor, either way) and change of light (likewise) over a video.
TURN, ZOOM, LIGHT = math.radians(12), 1.25, 1.2


@dataclass(frozen=True)
class Pose:
    """Where the camera is: the center as shares of the room there is, the turn, the zoom, the light."""

    x: float
    y: float
    turn: float
    zoom: float
    light: float


class MovedStore(FrameStore):
    """A video for every photograph of a store; the camera's way follows from the seed and its number."""

    fps = FPS

    def __init__(self, photographs: FrameStore, seed: int, frames: int = FRAMES) -> None:
        self.photographs, self.seed = photographs, seed
        self.names = [f"moved-{seed}/{name}" for name in photographs.names]
        self.lengths = np.full(len(photographs), frames, dtype=np.int64)

    def read(self, video: int, frames: Sequence[int]) -> list[Frame]:
        """What the camera sees at some times; the photograph is decoded once."""
        photograph = Image.fromarray(self.photographs.read(video, [0])[0])
        length = int(self.lengths[video])
        return [look(photograph, pose(self.seed, video, frame / max(1, length - 1))) for frame in frames]


def pose(seed: int, video: int, time: float) -> Pose:
    """The pose at a time between 0 and 1: a drift and a slow swing, each with its own direction and phase."""
    rng = np.random.default_rng((seed, video))
    drift, swing, phase = rng.uniform(-1, 1, 5), rng.uniform(-1, 1, 5), rng.uniform(0, 2 * math.pi, 5)
    way = 0.7 * drift * (2 * time - 1) + 0.3 * swing * np.sin(2 * math.pi * time + phase)
    x, y, turn, zoom, light = (float(value) for value in way)
    return Pose(x, y, TURN * turn, ZOOM**zoom, LIGHT**light)


def look(photograph: Image.Image, camera: Pose) -> Frame:
    """The part of a photograph that a camera sees; its frame never leaves the photograph.

    >>> gray = Image.new("RGB", (100, 80), (100, 100, 100))
    >>> look(gray, Pose(1.0, -1.0, 0.2, 1.0, 1.0)).shape
    (56, 70, 3)
    """
    width, height = photograph.size
    frame = (max(1, round(WINDOW * width)), max(1, round(WINDOW * height)))
    cosine, sine = math.cos(camera.turn), math.sin(camera.turn)
    # Half the sides of the upright box around the turned frame, before zooming.
    reach = (
        (frame[0] * abs(cosine) + frame[1] * abs(sine)) / 2,
        (frame[0] * abs(sine) + frame[1] * abs(cosine)) / 2,
    )
    # A wide zoom and a turn together may see more than there is: then the zoom gives way.
    scale = min(1 / camera.zoom, width / 2 / reach[0], height / 2 / reach[1])
    center = (
        width / 2 + camera.x * (width / 2 - scale * reach[0]),
        height / 2 + camera.y * (height / 2 - scale * reach[1]),
    )
    across, down = (scale * cosine, scale * sine), (-scale * sine, scale * cosine)
    start = tuple(
        c - a * frame[0] / 2 - d * frame[1] / 2 for c, a, d in zip(center, across, down, strict=True)
    )
    numbers = (across[0], down[0], start[0], across[1], down[1], start[1])
    seen = photograph.transform(frame, Image.Transform.AFFINE, numbers, Image.Resampling.BICUBIC)
    lit = np.asarray(seen, dtype=np.float32) * camera.light
    return np.clip(np.rint(lit), 0, 255).astype(np.uint8)
