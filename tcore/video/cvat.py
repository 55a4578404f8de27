"""A tracking function for CVAT: masks, polygons, boxes and points, through the interface of its SDK.

`cvat-cli function create-native` and `run-agent` call `create` with the values of `-p NAME=TYPE:VALUE`.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float
from PIL import Image
from torch import Tensor

from tcore.data.images import Frame
from tcore.device import choose_device
from tcore.errors import InputError
from tcore.evaluation.encoder import Encoder
from tcore.evaluation.encoders import load_encoder
from tcore.evaluation.propagate import Propagator
from tcore.evaluation.protocols import TCORE, Detail, Protocol
from tcore.evaluation.resize import Size
from tcore.evaluation.run_clip import encode
from tcore.video.detail import fit_size, suited
from tcore.video.formats import from_zeros
from tcore.video.labels import Masks, Points
from tcore.video.mark import Marker
from tcore.video.outlines import bounds, outline
from tcore.video.tracked import TrackedMasks, TrackedPoints, track_labels

SHAPES = ("mask", "polygon", "rectangle", "points")
Mask = Bool[np.ndarray, "height width"]


class Prepared(NamedTuple):
    """An image with its features: once for all shapes on it."""

    frame: Frame
    inside: Size
    features: Float[Tensor, "channels rows columns"]

    @property
    def size(self) -> Size:
        """Height and width of the image."""
        return self.frame.shape[0], self.frame.shape[1]


@dataclass
class Tracking:
    """A shape on its way through a video."""

    track: TrackedMasks | TrackedPoints
    propagator: Propagator
    index: int = 0


class Tracker:
    """What CVAT asks of a tracking function (`cvat_sdk.auto_annotation.TrackingFunction`)."""

    def __init__(self, encoder: Encoder, detail: Detail) -> None:
        encoder.need_features()
        self._sdk = import_sdk()
        self.spec = self._sdk.TrackingFunctionSpec(supported_shape_types=SHAPES)
        self._encoder, self._detail = encoder, detail

    def preprocess_image(self, context: Any, image: Image.Image) -> Prepared:
        """Features of an image."""
        frame = np.asarray(image.convert("RGB"))
        inside = fit_size((frame.shape[0], frame.shape[1]), self._encoder.patch_size, self._detail)
        precision = self._protocol(inside).precision
        return Prepared(frame, inside, encode(self._encoder, frame, inside, precision, smooth=True))

    def _protocol(self, inside: Size) -> Protocol:
        """That of `tcore propagate`."""
        return suited(replace(TCORE, edges="guided"), self._encoder, inside)

    def init_tracking_state(self, context: Any, pp_image: Prepared, shape: Any) -> Tracking:
        """Begin with a shape on an image."""
        protocol = self._protocol(pp_image.inside)
        labels = self._labels(pp_image, shape)
        track = track_labels(labels, pp_image.size, pp_image.inside, self._encoder.patch_size, protocol)
        given, propagator = track.given(0, None), Propagator(track.protocol)
        assert given is not None
        propagator.start(pp_image.features, given.to(pp_image.features.device))
        return Tracking(track, propagator)

    def track(self, context: Any, pp_image: Prepared, state: Tracking) -> Any:
        """The shape on the next image; None where it is lost."""
        state.index += 1
        soft = state.propagator.step(pp_image.features)
        found = state.track.read(state.index, soft, pp_image.frame).values
        points = read_points(found) if isinstance(state.track, TrackedPoints) else None
        if points is None and not isinstance(state.track, TrackedPoints):
            points = write_shape(context.original_shape_type, found > 0)
        if points is None:
            return None
        return self._sdk.TrackableShape(type=context.original_shape_type, points=points)

    def _labels(self, image: Prepared, shape: Any) -> Masks | Points:
        if shape.type == "points":
            places = np.array(shape.points, dtype=np.float64).reshape(-1, 2) - 0.5  # centers of pixels
            places = places.clip(0, np.array(image.size[::-1]) - 1)
            named = {str(number): (float(x), float(y)) for number, (x, y) in enumerate(places)}
            return Points(tuple(named), {0: named})
        if shape.type == "rectangle":
            left, top, right, bottom = shape.points
            marker = Marker(image.frame, self._encoder)
            mask = marker.mark(box=(left, top, max(1, right - left), max(1, bottom - top)))
            return Masks({0: mask.astype(np.uint8)})
        return Masks({0: read_shape(shape.type, shape.points, image.size).astype(np.uint8)})


def create(encoder: str = "default", detail: Detail = "fine") -> Tracker:
    """The tracking function, for any encoder that `tcore evaluate` takes."""
    return Tracker(load_encoder(encoder).to(choose_device("auto")), detail)


def import_sdk() -> Any:
    """The part of CVAT's SDK that such functions use."""
    try:
        from cvat_sdk import auto_annotation
    except ImportError as error:
        raise InputError("tracking for CVAT needs its SDK: pip install cvat-sdk.") from error
    return auto_annotation


def read_shape(kind: str, points: list[float], size: Size) -> Mask:
    """The pixels of a mask (run lengths in a box, beginning with zeros) or of a polygon.

    >>> read_shape("mask", [1, 2, 1, 4, 2, 5, 3], (6, 8)).nonzero()
    (array([2, 3]), array([5, 4]))
    """
    if kind == "polygon":
        return fill(np.reshape(points, (-1, 2)), size)
    found = np.zeros(size, dtype=bool)
    *lengths, left, top, right, bottom = (int(value) for value in points)
    part = found[top : bottom + 1, left : right + 1]
    values = np.arange(len(lengths)) % 2 == 1
    if min(lengths, default=-1) < 0 or sum(lengths) != part.size:
        raise InputError(f"a mask of {sum(lengths)} pixels does not fill its box of {part.size}.")
    found[top : bottom + 1, left : right + 1] = np.repeat(values, lengths).reshape(part.shape)
    return found


def fill(corners: Float[np.ndarray, "_ 2"], size: Size) -> Mask:
    """The pixels whose centers are inside of a polygon, by the even-odd rule."""
    height, width = size
    crossed = np.zeros((height, width + 1), dtype=np.int64)  # how many edges begin to be passed at a column
    middle = np.arange(height) + 0.5
    for (x, y), (to_x, to_y) in zip(corners, np.roll(corners, -1, axis=0), strict=True):
        rows = np.flatnonzero((y <= middle) != (to_y <= middle))
        if len(rows):
            at = x + (middle[rows] - y) / (to_y - y) * (to_x - x)
            crossed[rows, np.clip(np.ceil(at - 0.5), 0, width).astype(int)] += 1
    inside: Mask = crossed.cumsum(axis=1)[:, :width] % 2 == 1
    return inside


def write_shape(kind: str, mask: Mask) -> list[float] | None:
    """The numbers of a mask, a polygon or a box around it; None where there is nothing.

    >>> write_shape("mask", read_shape("mask", [1, 2, 1, 4, 2, 5, 3], (6, 8)))
    [1, 2, 1, 4, 2, 5, 3]
    """
    if not mask.any():
        return None
    top, left, bottom, right = bounds(mask)
    if kind == "rectangle":
        return [left, top, right, bottom]
    if kind == "polygon":
        corners: list[float] = outline(mask).round(2).ravel().tolist()
        return corners
    return [*from_zeros(mask[top:bottom, left:right]), left, top, right - 1, bottom - 1]


def read_points(found: Float[np.ndarray, "points 3"]) -> list[float] | None:
    """Places of all points; None where one is lost, because a shape keeps its number of points."""
    if np.isnan(found[:, 0]).any():
        return None
    places: list[float] = (found[:, :2] + 0.5).round(2).ravel().tolist()
    return places
