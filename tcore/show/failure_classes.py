"""Why a clip may be hard: the paper's classes of failures, measured on the truth with plain thresholds."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float
from PIL import Image

from tcore.data.images import Frame
from tcore.show.carried import Carried

# An object whose outline runs along another object for this share of its length fits tightly.
TIGHT = 0.15
# Mean way of a mask's center per frame, in sides of a square of its area.
LARGE_MOTION = 0.10
# Mean way of the background per frame, as a share of the frame's long side.
CAMERA_MOTION = 0.005
SIDE = 128  # backgrounds are compared as gray pictures of this size
STRIDE = 3  # frames between the two that are compared: slow motion is less than a pixel per frame


class Difficulty(NamedTuple):
    """The measured figures of a clip; None where there is nothing to measure."""

    contact: float | None
    motion: float | None
    camera: float | None

    def classes(self) -> list[str]:
        """The paper's classes that apply."""
        figures = (
            (self.contact, TIGHT, "tightly fitting instances"),
            (self.motion, LARGE_MOTION, "large motion"),
            (self.camera, CAMERA_MOTION, "camera motion"),
        )
        return [name for value, least, name in figures if value is not None and value >= least]


def measure(carried: Carried) -> Difficulty:
    """Contact between objects, motion of objects and motion of the background, from the truth."""
    if carried.truth is None:
        return Difficulty(None, None, None)
    masks = [_objects(carried, index) for index in range(carried.length)]
    numbers = sorted({number for ids in masks for number in np.unique(ids).tolist()} - {0})
    contact = None
    if carried.kind == "objects" and len(numbers) > 1:
        contact = max(
            float(np.mean([share_in_contact(ids, number) for ids in masks if (ids == number).any()]))
            for number in numbers
        )
    ways = [way for number in numbers if (way := mean_way([ids == number for ids in masks])) is not None]
    return Difficulty(contact, max(ways) if ways else None, _background_way(carried, masks))


def _objects(carried: Carried, index: int) -> np.ndarray:
    """True objects of a frame; all body parts are one object, and so is the box around joints."""
    if carried.kind == "joints":
        shape = carried.read(index).shape[:2]
        return box_around(np.asarray(carried.truth)[:, :, index], shape)
    assert isinstance(carried.truth, list)
    ids = carried.truth[min(index, len(carried.truth) - 1)]
    return ids if carried.kind == "objects" else (ids > 0).astype(np.uint8)


def box_around(joints: Float[np.ndarray, "2 joints"], shape: tuple[int, int]) -> np.ndarray:
    """A mask of the box around the joints that are there."""
    mask = np.zeros(shape, dtype=np.uint8)
    there = joints[:, ~np.isnan(joints).any(axis=0)]
    if there.shape[1]:
        left, top = np.floor(there.min(axis=1)).astype(int).clip(0)
        right, bottom = np.ceil(there.max(axis=1)).astype(int).clip(0) + 1
        mask[top:bottom, left:right] = 1
    return mask


def share_in_contact(ids: np.ndarray, number: int) -> float:
    """Share of an object's outline whose pixels lie next to another object."""
    padded = np.pad(ids, 1)
    own = padded[1:-1, 1:-1] == number
    sides = [padded[1:-1, :-2], padded[1:-1, 2:], padded[:-2, 1:-1], padded[2:, 1:-1]]
    outline = own & np.any([side != number for side in sides], axis=0)
    touching = own & np.any([(side != number) & (side > 0) for side in sides], axis=0)
    return float(touching.sum() / max(1, outline.sum()))


def mean_way(masks: list[Bool[np.ndarray, "height width"]]) -> float | None:
    """Mean way of a mask's center from frame to frame, in sides of a square of its area."""
    ways, before = [], None
    for mask in masks:
        rows, columns = np.nonzero(mask)
        now = None if len(rows) == 0 else (np.array([rows.mean(), columns.mean()]), len(rows) ** 0.5)
        if now is not None and before is not None:
            ways.append(float(np.linalg.norm(now[0] - before[0]) / before[1]))
        before = now
    return float(np.mean(ways)) if ways else None


def _background_way(carried: Carried, masks: list[np.ndarray]) -> float | None:
    """Mean way of the background per frame, as a share of the long side."""
    stride = min(STRIDE, carried.length - 1)
    if stride < 1:
        return None
    ways = []
    for index in range(0, carried.length - stride, stride):
        one, other = (thumbnail(carried.read(i), masks[i]) for i in (index, index + stride))
        ways.append(translation(one, other) / SIDE / stride)
    return float(np.median(ways))


def thumbnail(frame: Frame, objects: np.ndarray) -> Float[np.ndarray, "side side"]:
    """A small gray picture, its objects taken out, faded toward its border."""
    gray = Image.fromarray(frame).convert("L").resize((SIDE, SIDE), Image.Resampling.BOX)
    cover = Image.fromarray(((objects > 0) * 255).astype(np.uint8)).resize((SIDE, SIDE), Image.Resampling.BOX)
    ground = 1 - np.asarray(cover, dtype=np.float64) / 255
    values = np.asarray(gray, dtype=np.float64)
    mean = float((values * ground).sum() / max(ground.sum(), 1e-9))
    fade = np.hanning(SIDE)
    return (values - mean) * ground * fade[:, None] * fade


def translation(one: Float[np.ndarray, "side side"], other: Float[np.ndarray, "side side"]) -> float:
    """By how many pixels a picture moved: the peak of the phase correlation."""
    product = np.fft.fft2(one) * np.conj(np.fft.fft2(other))
    # High frequencies are noise: a smooth weight keeps the coarse structure.
    frequency = np.fft.fftfreq(len(one))
    weight = np.exp(-(frequency[:, None] ** 2 + frequency**2) / (2 * 0.08**2))
    peak = np.fft.ifft2(weight * product / np.maximum(np.abs(product), 1e-12)).real
    row, column = np.unravel_index(int(peak.argmax()), peak.shape)
    down, right = (min(int(x), len(one) - int(x)) for x in (row, column))
    return float(np.hypot(down, right))
