"""CVAT's tracking function, asked as its agent asks; with the real SDK where it is installed."""

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tcore.errors import InputError
from tcore.video import cvat
from tcore.video.propagate import propagate
from tests.evaluation.clips import tiny_encoder

FRAMES = np.full((4, 64, 96, 3), 60, np.uint8)
for _index in range(4):
    FRAMES[_index, 16:40, 16 + 8 * _index : 40 + 8 * _index] = (220, 40, 40)
FIRST = (FRAMES[0, :, :, 0] > 100).astype(np.uint8)


@pytest.fixture(params=["recorded", "real"])
def sdk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The SDK, or the two classes of it that a tracking function meets."""
    if request.param == "real":
        return pytest.importorskip("cvat_sdk.auto_annotation", reason="cvat-sdk is not installed")
    recorded = SimpleNamespace(TrackingFunctionSpec=SimpleNamespace, TrackableShape=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "cvat_sdk", SimpleNamespace(auto_annotation=recorded))
    return recorded


def tracked(sdk: Any, kind: str, points: list[float]) -> list[Any]:
    """The numbers of a shape on every later frame, by the calls of CVAT's agent."""
    function, context = cvat.Tracker(tiny_encoder(), "fine"), SimpleNamespace(original_shape_type=kind)
    images = [function.preprocess_image(None, Image.fromarray(frame)) for frame in FRAMES]
    shape = sdk.TrackableShape(type=kind, points=points)
    state = function.init_tracking_state(context, images[0], shape)
    found = [function.track(context, image, state) for image in images[1:]]
    assert all(one.type == kind for one in found)
    return [one.points for one in found]


def test_masks_and_polygons_are_tracked_as_by_tcore_propagate(sdk: Any) -> None:
    expected = list(propagate(tiny_encoder(), FRAMES, FIRST, detail="fine"))[1:]
    for kind in ("mask", "polygon"):
        points = cvat.write_shape(kind, FIRST > 0)
        assert points is not None
        found = tracked(sdk, kind, points)
        for numbers, ids in zip(found, expected, strict=True):
            mask, wanted = cvat.read_shape(kind, numbers, (64, 96)), np.asarray(ids) > 0
            # A polygon leaves out corners of less than a pixel.
            assert (mask & wanted).sum() >= (1 if kind == "mask" else 0.97) * (mask | wanted).sum() > 0


def test_boxes_and_points_are_tracked(sdk: Any) -> None:
    boxes = tracked(sdk, "rectangle", [10, 10, 46, 46])
    assert all(len(box) == 4 and box[0] < box[2] and box[1] < box[3] for box in boxes)
    places = tracked(sdk, "points", [28.5, 28.5, 60.5, 50.5])
    assert all(len(place) == 4 for place in places)


def test_numbers_of_masks_are_those_of_the_sdk() -> None:
    mask = np.random.default_rng(0).random((20, 30)) > 0.6
    points = cvat.write_shape("mask", mask)
    assert points is not None
    np.testing.assert_array_equal(cvat.read_shape("mask", points, mask.shape), mask)
    assert cvat.write_shape("mask", mask & False) is None
    masks = pytest.importorskip("cvat_sdk.masks", reason="cvat-sdk is not installed")
    assert masks.encode_mask(mask) == points


def test_a_missing_sdk_and_a_damaged_mask_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cvat_sdk", None)
    with pytest.raises(InputError, match="pip install cvat-sdk"):
        cvat.Tracker(tiny_encoder(), "fine")
    with pytest.raises(InputError, match="fill its box"):
        cvat.read_shape("mask", [3, 1, 0, 0, 4, 4], (8, 8))
