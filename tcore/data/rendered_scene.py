"""Geometry of the rendered videos: where everything is, as a function of the frame number.

Points are complex numbers x + iy in units of the image width, y down, so that a similarity (turn, scale
and shift) is `turn * z + shift` and two of them compose by plain arithmetic.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Complex, Float, Float32, Int

JOINT_NAMES = (
    "neck", "belly", "face", "right_shoulder", "left_shoulder", "right_hip", "left_hip", "right_elbow",
    "left_elbow", "right_knee", "left_knee", "right_wrist", "left_wrist", "right_ankle", "left_ankle",
)  # fmt: skip
PART_NAMES = (
    "background", "head", "chest", "belly", "right_upper_arm", "left_upper_arm", "right_forearm",
    "left_forearm", "right_thigh", "left_thigh", "right_shin", "left_shin", "right_foot", "left_foot",
)  # fmt: skip
# Pairs of joints to draw a line between.
LIMBS = (
    (0, 1), (0, 2), (0, 3), (0, 4), (3, 7), (7, 11), (4, 8), (8, 12),
    (1, 5), (1, 6), (5, 9), (9, 13), (6, 10), (10, 14),
)  # fmt: skip
# The parts that hold each joint: a joint is visible where one of them is on top.
JOINT_PARTS = (
    (1, 2), (2, 3), (1,), (2, 4), (2, 5), (3, 8), (3, 9), (4, 6),
    (5, 7), (8, 10), (9, 11), (6,), (7,), (10, 12), (11, 13),
)  # fmt: skip

MIDDLE = 0.5 + 0.5j
Times = Float[np.ndarray, " time"]
Path = Complex[np.ndarray, " time"]
Plane = Float32[np.ndarray, "time height width"]
Line = Float32[np.ndarray, " n"]


class Similarity(NamedTuple):
    """One similarity per frame: z becomes turn * z + shift."""

    turn: Path
    shift: Path

    def after(self, inner: "Similarity") -> "Similarity":
        """Apply `inner` first, then this one."""
        return Similarity(self.turn * inner.turn, self.turn * inner.shift + self.shift)


@dataclass(frozen=True)
class Slab:
    """A box with rounded corners; without height a capsule."""

    half_width: float
    half_height: float
    radius: float

    @property
    def reach(self) -> float:
        """Largest distance from the origin."""
        return float(np.hypot(self.half_width, self.half_height)) + self.radius

    def depth(self, x: Plane, y: Plane) -> Plane:
        """How far inside the slab points are."""
        beyond_x = np.maximum(np.abs(x) - np.float32(self.half_width), 0)
        beyond_y = np.maximum(np.abs(y) - np.float32(self.half_height), 0)
        return np.float32(self.radius) - np.sqrt(beyond_x * beyond_x + beyond_y * beyond_y)


@dataclass(frozen=True)
class Radial:
    """An outline given as radius by angle, possibly with a hole of the same outline."""

    radii: Float32[np.ndarray, " angles"]
    hole: float

    @property
    def reach(self) -> float:
        """Largest distance from the origin."""
        return float(self.radii.max())

    def depth(self, x: Plane, y: Plane) -> Plane:
        """How far inside the outline points are, measured along the ray from the origin."""
        steps = np.float32(len(self.radii) / (2 * np.pi))
        outline = self.radii.take((np.arctan2(y, x) * steps).astype(np.intp), mode="wrap")
        distance = np.sqrt(x * x + y * y)
        inside = outline - distance
        return np.minimum(inside, distance - np.float32(self.hole) * outline) if self.hole else inside


Shape = Slab | Radial


@dataclass(frozen=True)
class Wave:
    """A value that oscillates smoothly about its middle."""

    middle: float
    swing: float
    speed: float
    start: float

    def at(self, t: Times) -> Times:
        """The value at each frame."""
        return self.middle + self.swing * np.sin(self.speed * t + self.start)


def draw_wave(rng: np.random.Generator, middle: float, swing: float, speed: tuple[float, float]) -> Wave:
    """Draw a wave of at most this swing and with a speed (radians per frame) in this range."""
    return Wave(middle, swing * rng.uniform(0.5, 1), rng.uniform(*speed), rng.uniform(0, 2 * np.pi))


@dataclass(frozen=True)
class Journey:
    """A smooth trajectory: a wobbling ellipse, turning and growing on the way."""

    center: complex
    radii: tuple[float, float]
    tilt: float
    start: float
    speed: float
    wobble: Wave
    angle: Wave
    spin: float
    log_scale: Wave

    def at(self, t: Times) -> Similarity:
        """Position, rotation and scale at each frame."""
        phase = self.start + self.speed * t
        round_trip = self.radii[0] * np.cos(phase) + 1j * self.radii[1] * np.sin(phase)
        shift = (
            self.center + np.exp(1j * self.tilt) * round_trip + self.wobble.at(t) * np.exp(1j * self.tilt * 3)
        )
        turn = np.exp(self.log_scale.at(t) + 1j * (self.angle.at(t) + self.spin * t))
        return Similarity(turn, shift)


@dataclass(frozen=True)
class Figure:
    """A person of 15 joints: the limbs swing, one arm may wave."""

    height: float
    facing: int
    near: int
    pace: float
    start: float
    stride: float
    splay: tuple[float, float]
    raised: tuple[float, float]

    def joints(self, t: Times) -> tuple[list[Path], list[Path]]:
        """The 15 joints and the 2 tips of the feet, relative to the belly."""
        gait = self.pace * t + self.start
        joints: list[Path] = [np.full(len(t), z * self.height, complex) for z in (-0.25j, 0j, -0.385j)]
        pairs: list[list[Path]] = []
        for side in (1, -1):  # the right side is on the left of the image: the figure looks at us
            swing = side * np.sin(gait)
            raised = self.raised[0 if side == 1 else 1]
            wave = 0.5 * raised * np.sin(1.7 * gait)
            upper_arm = side * (self.splay[0] + 2.1 * raised + wave) + (1 - raised) * self.stride * swing
            forearm = (
                upper_arm
                + side * raised * 0.4
                - (1 - raised) * self.facing * (0.5 - 0.4 * self.facing * swing)
            )
            thigh = side * self.splay[1] - self.stride * swing
            shin = thigh + self.facing * self.stride * (0.8 + 0.8 * np.sin(gait + side * np.pi / 2 + 0.6))
            shoulder = np.full(len(t), (-0.125 * side - 0.215j) * self.height, complex)
            hip = np.full(len(t), (-0.07 * side + 0.11j) * self.height, complex)
            elbow = shoulder + self._bone(upper_arm, 0.18)
            knee = hip + self._bone(thigh, 0.22)
            ankle = knee + self._bone(shin, 0.2)
            tip = ankle + self._bone(shin - self.facing * 1.3, 0.09)
            pairs.append([shoulder, hip, elbow, knee, elbow + self._bone(forearm, 0.17), ankle, tip])
        for right, left in zip(*pairs, strict=True):
            joints += [right, left]
        return joints[:15], joints[15:]

    def _bone(self, angle: Times, length: float) -> Path:
        """The vector of a bone; at angle 0 it hangs down."""
        return np.asarray(1j * np.exp(1j * angle) * length * self.height)

    def parts(self, t: Times) -> list[tuple[int, Shape, Similarity]]:
        """Part number, shape and placement of every body part, from back to front."""
        joints, tips = self.joints(t)
        upright = np.ones(len(t), complex)
        h = self.height
        trunk: list[tuple[int, Shape, Similarity]] = [
            (3, Slab(0.05 * h, 0.06 * h, 0.055 * h), Similarity(upright, joints[1] + 0.04j * h)),
            (2, Slab(0.07 * h, 0.06 * h, 0.065 * h), Similarity(upright, joints[1] - 0.15j * h)),
            (1, Slab(0.0, 0.03 * h, 0.09 * h), Similarity(upright, joints[2])),
        ]
        limbs: list[list[tuple[int, Shape, Similarity]]] = []
        for side in (0, 1):
            shoulder, hip, elbow, knee, wrist, ankle = joints[3 + side :: 2]
            bones = ((12, ankle, tips[side], 0.048), (10, knee, ankle, 0.056), (8, hip, knee, 0.065),
                     (4, shoulder, elbow, 0.056), (6, elbow, wrist, 0.052))  # fmt: skip
            limbs.append([(part + side, *_capsule(a, b, radius * h)) for part, a, b, radius in bones])
        return limbs[1 - self.near] + trunk + limbs[self.near]


def _capsule(a: Path, b: Path, radius: float) -> tuple[Shape, Similarity]:
    """A capsule from a to b, whose distance never changes."""
    length = float(np.abs(b[0] - a[0]))
    return Slab(length / 2, 0.0, radius), Similarity((b - a) / length, (a + b) / 2)


# One shape as the camera sees it: object id, part id, shape, placement.
Layer = tuple[int, int, Shape, Similarity]


@dataclass(frozen=True)
class Scene:
    """All that moves in a video, from back to front; the figure has the last object id."""

    camera: Journey
    shapes: tuple[Shape, ...]
    journeys: tuple[Journey, ...]
    figure: Figure
    order: tuple[int, ...]

    def view(self, t: Times) -> Similarity:
        """From the scene to the image."""
        turn, pan = self.camera.at(t)
        return Similarity(turn, MIDDLE - turn * pan)

    def layers(self, t: Times) -> list[Layer]:
        """All shapes from back to front, in image coordinates."""
        view, layers = self.view(t), list[Layer]()
        for index in self.order:
            place = view.after(self.journeys[index].at(t))
            if index < len(self.shapes):
                layers.append((index + 1, 0, self.shapes[index], place))
            else:
                layers += [
                    (index + 1, part, shape, place.after(s)) for part, shape, s in self.figure.parts(t)
                ]
        return layers

    def joints(self, t: Times) -> Complex[np.ndarray, "time joints"]:
        """The joints in image coordinates."""
        place = self.view(t).after(self.journeys[-1].at(t))
        return np.stack([place.turn * joint + place.shift for joint in self.figure.joints(t)[0]], 1)


def to_local(
    place: Similarity, columns: Int[np.ndarray, "time width"], rows: Int[np.ndarray, "time height"], size: int
) -> tuple[Plane, Plane]:
    """Local coordinates, before `place`, of the pixels in these columns and rows."""
    dx = ((columns + 0.5) / size - place.shift.real[:, None])[:, None, :]
    dy = ((rows + 0.5) / size - place.shift.imag[:, None])[:, :, None]
    back = (1 / place.turn)[:, None, None]
    x = (back.real * dx).astype(np.float32) - (back.imag * dy).astype(np.float32)
    y = (back.imag * dx).astype(np.float32) + (back.real * dy).astype(np.float32)
    return x, y


def cover(shape: Shape, place: Similarity, size: int) -> tuple[Int[np.ndarray, " n"], Line, Line, Line]:
    """The pixels of a layer: flat index into (time, row, column), local x and y, depth in pixels.

    They are searched only in a box around it in every frame.
    """
    scale = np.abs(place.turn).astype(np.float32)
    side = min(size, 2 * int(np.ceil(shape.reach * scale.max() * size + 1)) + 1)
    corner = place.shift * size - (side / 2) * (1 + 1j)
    left, top = (np.clip(np.rint(c), 0, size - side).astype(np.intp) for c in (corner.real, corner.imag))
    columns, rows = left[:, None] + np.arange(side), top[:, None] + np.arange(side)
    x, y = to_local(place, columns, rows, size)
    depth = shape.depth(x, y) * (scale * size)[:, None, None]
    # Half a pixel outside the outline still takes part of the color.
    near = np.flatnonzero(depth > -0.5)
    frames = np.arange(len(scale))[:, None, None]
    index = ((frames * size + rows[:, :, None]) * size + columns[:, None, :]).ravel()[near]
    return index, x.ravel()[near], y.ravel()[near], depth.ravel()[near]
