"""What is propagated through a video, masks or points: to the grid, back to frames, painted over them."""

import math
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image, ImageDraw
from torch import Tensor

from tcore.data.images import Frame
from tcore.errors import InputError
from tcore.evaluation.edges import Shot, labels_to_ids
from tcore.evaluation.masks import Ids
from tcore.evaluation.pose import Origin, locate_points, points_protocol, stamp_points
from tcore.evaluation.propagate import Features, Labels
from tcore.evaluation.protocols import Protocol
from tcore.evaluation.resize import Size, ids_to_grid
from tcore.text import format_size
from tcore.video.labels import Masks, Points

# Distinct hues for object ids 1, 2, ...; id 0 is not painted.
HUES = (
    "000000 e63946 2a9d8f f4a261 457be5 b565e5 e9c46a 00b4d8 80b918 ff70a6 70483c 94d2bd 5e548e ffd60a adb5bd"
)
PALETTE = np.array([tuple(bytes.fromhex(hue)) for hue in HUES.split()], dtype=np.uint8)
LOST = 0.5  # an object is lost below: on DAVIS-2016, 43% of such frames have J < .3, of the others 11%
LOST_POINT = 0.3  # on nine clips, 65% of such points are off by more than .2 of the box, of the others 45%


class Found(NamedTuple):
    """Labels of one frame: ids, or x, y and confidence of every point."""

    values: np.ndarray
    confidence: float
    """Mean of the winning soft label where something is labeled, or over the visible points."""
    share: float
    """Part of the pixels that is labeled, or of the points that are visible."""
    each: tuple[float, ...] = ()
    """Confidence of every object (in the order of their ids) or point: 0 where it is gone, 1 as given."""


class TrackedMasks:
    """Masks: one class for every id in use. Given masks are returned unchanged."""

    def __init__(self, masks: Masks, size: Size, inside: Size, patch_size: int, protocol: Protocol) -> None:
        for frame, ids in masks.frames.items():
            if ids.shape != size:
                found, wanted = format_size(*ids.shape), format_size(*size)
                raise InputError(f"the mask for frame {frame} is {found}, the frames are {wanted}.")
        if not any(ids.any() for ids in masks.frames.values()):
            raise InputError("all that is given is background: there is nothing to propagate.")
        self.grid = (inside[0] // patch_size, inside[1] // patch_size)
        self.frames = sorted(masks.frames)
        self._masks, self._size, self._inside, self.protocol = masks.frames, size, inside, protocol
        # Classes are the ids that occur, so that a lone id 200 does not cost 200 empty classes.
        self._ids = np.unique(np.concatenate([[0], *(np.unique(ids) for ids in masks.frames.values())]))

    def given(self, index: int, propagated: Labels | None) -> Labels | None:
        """Soft labels of an annotated frame."""
        if index not in self._masks:
            return None
        classes = np.searchsorted(self._ids, self._masks[index]).astype(np.uint8)
        return ids_to_grid(
            torch.from_numpy(classes),
            input_size=self._inside,
            grid=self.grid,
            num_classes=len(self._ids),
            nearest=self.protocol.labels == "nearest",
        )

    def watch(self, step: int, index: int, soft: Labels, features: Features) -> None:
        """The confidence of an object needs no more than its soft label."""

    def blend(self, index: int, forward: Labels, backward: Labels | None) -> Labels:
        """Labels from both sides, mixed in each cell by distance to the given frames and by confidence."""
        if backward is None:
            return forward
        backward, share = backward.to(forward), share_of_forward(index, self.frames)
        sure, other = (labels.amax(dim=2, keepdim=True) for labels in (forward, backward))
        return torch.lerp(backward, forward, mixed(share, sure, other))

    def read(self, index: int, soft: Labels, frame: Shot) -> Found:
        """Ids of a frame, and how confident they are."""
        best, winner = soft.max(dim=2)
        labeled = winner > 0
        confidence = float(best[labeled].mean()) if labeled.any() else 0.0
        if index in self._masks:
            ids: Ids = self._masks[index]
            each = (1.0,) * (len(self._ids) - 1)
        else:
            each = sharpness(soft)
            classes = labels_to_ids(soft, frame, min(self._inside, self._size), self._size, self.protocol)
            ids = self._ids[classes.cpu().numpy()].astype(np.uint8)
        return Found(ids, confidence, float((ids > 0).mean()), each)


class TrackedPoints:
    """Points: one class each, and one for the rest. Given points are returned unchanged."""

    def __init__(self, points: Points, size: Size, inside: Size, patch_size: int, protocol: Protocol) -> None:
        for frame, named in points.frames.items():
            for name, (x, y) in named.items():
                if not math.isnan(x) and not (-0.5 <= x < size[1] - 0.5 and -0.5 <= y < size[0] - 0.5):
                    raise InputError(
                        f"point {name!r} of frame {frame} lies at x {x:g}, y {y:g}, outside of the frames, "
                        f"which are {size[1]} wide and {size[0]} high."
                    )
        if all(math.isnan(x) for named in points.frames.values() for x, _ in named.values()):
            raise InputError("no point is visible in a given frame: there is nothing to propagate.")
        self.grid = (inside[0] // patch_size, inside[1] // patch_size)
        self.protocol = points_protocol(protocol, self.grid)
        self.frames = sorted(points.frames)
        self._names, self._points = points.names, points.frames
        self._named = [
            [frame for frame in self.frames if name in points.frames[frame]] for name in points.names
        ]
        self.sure: dict[tuple[int, int], Float[Tensor, " points"]] = {}
        """By pass (1 forward, -1 backward) and frame: how sure points still lead back, at least so far."""
        self._shares: dict[int, Float[Tensor, " points"]] = {}  # of forward, where two passes meet
        self._origins: dict[int, Origin] = {}  # of a pass: its last given frame
        self._limit = np.array([size[1] - 1, size[0] - 1], dtype=np.float64)
        self._cell = np.array([size[1] / self.grid[1], size[0] / self.grid[0]])

    def given(self, index: int, propagated: Labels | None) -> Labels | None:
        """Soft labels of an annotated frame; points that it does not name stay where they were propagated."""
        if index not in self._points:
            return None
        if propagated is None:
            propagated = torch.zeros(*self.grid, 1 + len(self._names))
        located = self._located(index, propagated)
        # The centers of pixels and of cells lie at whole numbers.
        stamped = stamp_points((located[:, :2] + 0.5) / self._cell - 0.5, self.grid)
        return stamped * torch.tensor([1.0, *located[:, 2]])

    def watch(self, step: int, index: int, soft: Labels, features: Features) -> None:
        """Note whether points still lead back to where the pass (1 forward, -1 backward) was given them."""
        places, origin = locate_points(soft)[:, :2], self._origins.get(step)
        if index in self._points:
            self._origins[step] = Origin(features, places)
        if (step, index) in self.sure:  # noted by an earlier run, which has left it
            return
        now = self.sure.get((step, index - step), torch.zeros(len(places)))
        if origin is not None:
            now = torch.minimum(now, origin.returns(features, places))
        named = torch.tensor([name in self._points.get(index, ()) for name in self._names])
        now = now.masked_fill(named, 1.0)
        self.sure[step, index] = torch.where(places[:, 0].isnan().cpu(), 0.0, now)

    def blend(self, index: int, forward: Labels, backward: Labels | None) -> Labels:
        """Labels from both sides, mixed for each point by distance to its given frames and by confidence."""
        if backward is None:
            return forward
        backward = backward.to(forward)
        share = forward.new_tensor([0.5, *(share_of_forward(index, frames) for frames in self._named)])
        share = mixed(share, forward.amax(dim=(0, 1)), backward.amax(dim=(0, 1)))
        self._shares[index] = share[1:].cpu()
        return torch.lerp(backward, forward, share)

    def read(self, index: int, soft: Labels, frame: Shot) -> Found:
        """Position and confidence of every point."""
        values = self._located(index, soft)
        forward, backward = (self.sure.get((step, index)) for step in (1, -1))
        if forward is not None and backward is not None and index in self._shares:
            forward = torch.lerp(backward, forward, self._shares[index])
        if (sure := backward if forward is None else forward) is not None:
            values[:, 2] = (values[:, 2] + sure.numpy()) / 2  # how sharp its label is, and where it came from
        seen = ~np.isnan(values[:, 0])
        confidence = float(values[seen, 2].mean()) if seen.any() else 0.0
        return Found(values, confidence, float(seen.mean()), tuple(values[:, 2].tolist()))

    def _located(self, index: int, soft: Labels) -> Float[np.ndarray, "points 3"]:
        """x, y and confidence of every point: as given, or from its soft label."""
        values = locate_points(soft).cpu().numpy()
        values[:, :2] = np.clip((values[:, :2] + 0.5) * self._cell - 0.5, 0, self._limit)
        for name, place in self._points.get(index, {}).items():
            values[self._names.index(name)] = (*place, 0.0 if math.isnan(place[0]) else 1.0)
        return values


def sharpness(soft: Labels) -> tuple[float, ...]:
    """How sharp the soft label of every class but the first is: its mean, weighted by itself.

    It falls where a label spreads over cells that others hold as well. An object that wins no cell has 0.
    """
    planes = soft.flatten(0, 1)
    mass = planes.sum(dim=0).clamp(min=1e-9)
    sharp = planes.square().sum(dim=0) / mass
    wins = torch.bincount(planes.argmax(dim=1), minlength=planes.shape[1]) > 0
    return tuple((sharp * wins)[1:].tolist())


def share_of_forward(index: int, given: list[int]) -> float:
    """How much the labels that come forward count at a frame, by the given frames before and after it."""
    before = max((frame for frame in given if frame <= index), default=None)
    after = min((frame for frame in given if frame > index), default=None)
    if before is None or after is None:
        return 0.0 if before is None and after is not None else 1.0
    return (after - index) / (after - before)


def mixed(share: float | Tensor, sure: Tensor, other: Tensor) -> Tensor:
    """The share of the first of two labels, given their confidence."""
    first, second = share * sure, (1 - share) * other
    total = first + second
    return torch.where(total > 0, first / torch.where(total > 0, total, 1), share)


def track_labels(
    labels: Masks | Points, size: Size, inside: Size, patch_size: int, protocol: Protocol
) -> TrackedMasks | TrackedPoints:
    """Labels of frames of `size` that go into the encoder at the size `inside`."""
    if isinstance(labels, Masks):
        return TrackedMasks(labels, size, inside, patch_size, protocol)
    return TrackedPoints(labels, size, inside, patch_size, protocol)


def paint_labels(frame: Frame, labels: np.ndarray) -> Frame:
    """A frame with its ids or its points (x, y, confidence) over it."""
    return paint_ids(frame, labels) if labels.dtype == np.uint8 else paint_points(frame, labels)


def paint_ids(frame: Frame, ids: Ids, opacity: float = 0.6) -> Frame:
    """A frame with its ids over it, in the colors of the palette; 0 stays as it is."""
    at, painted = ids > 0, frame.copy()
    colors = PALETTE[1 + (ids[at].astype(np.int64) - 1) % (len(PALETTE) - 1)]
    painted[at] = ((1 - opacity) * frame[at] + opacity * colors).astype(np.uint8)
    return painted


def paint_points(frame: Frame, points: Float[np.ndarray, "points 3"]) -> UInt8[np.ndarray, "rows columns 3"]:
    """A frame with a dot on every point (x, y, confidence) that is not lost."""
    image = Image.fromarray(frame)
    draw, radius = ImageDraw.Draw(image), max(2, min(frame.shape[:2]) // 80)
    for number, (x, y, _) in enumerate(points.tolist()):
        if not math.isnan(x):
            color = tuple(PALETTE[1 + number % (len(PALETTE) - 1)].tolist())
            draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=color, outline="white")
    return np.asarray(image)
