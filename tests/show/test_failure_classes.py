"""Difficulties are measured on clips whose difficulty is known."""

import numpy as np
from jaxtyping import UInt8

from tcore.show.carried import Carried, score_frames
from tcore.show.failure_classes import mean_way, measure, share_in_contact

SIDE = 96


def make(ids: list[np.ndarray], frames: UInt8[np.ndarray, "time side side 3"] | None = None) -> Carried:
    pictures = np.zeros((len(ids), SIDE, SIDE, 3), dtype=np.uint8) if frames is None else frames
    return Carried("clip", "objects", len(ids), lambda index: pictures[index], list(ids), list(ids))


def squares(*boxes: tuple[int, int, int]) -> UInt8[np.ndarray, "side side"]:
    """Squares of 20 pixels: top, left, id."""
    ids = np.zeros((SIDE, SIDE), dtype=np.uint8)
    for top, left, number in boxes:
        ids[top : top + 20, left : left + 20] = number
    return ids


def test_objects_side_by_side_touch_along_a_side_of_four() -> None:
    beside, apart = squares((10, 10, 1), (10, 30, 2)), squares((10, 10, 1), (10, 60, 2))
    assert abs(share_in_contact(beside, 1) - 20 / 76) < 0.01
    assert share_in_contact(apart, 1) == 0
    assert measure(make([beside] * 4)).classes() == ["tightly fitting instances"]
    assert measure(make([apart] * 4)).classes() == []


def test_a_square_that_moves_by_half_its_side_moves_a_lot() -> None:
    masks = [squares((10, 10 + 10 * step, 1)) for step in range(5)]
    assert mean_way([ids == 1 for ids in masks]) == 0.5
    assert measure(make(masks)).classes() == ["large motion"]


def test_a_background_that_drifts_is_camera_motion_and_a_still_one_is_not() -> None:
    rng = np.random.default_rng(0)
    scene = np.kron(rng.integers(0, 255, (24, 24)), np.ones((8, 8))).astype(np.uint8)
    moved = np.stack([scene[20 : 20 + SIDE, 2 * t : 2 * t + SIDE] for t in range(10)])
    still = np.repeat(moved[:1], 10, axis=0)
    masks = [squares((10, 10, 1))] * 10
    found = measure(make(masks, np.repeat(moved[..., None], 3, axis=3)))
    assert found.camera is not None
    assert abs(found.camera - 2 / SIDE) < 0.005
    assert found.classes() == ["camera motion"]
    assert measure(make(masks, np.repeat(still[..., None], 3, axis=3))).camera == 0


def test_frames_are_scored_by_the_overlap_of_their_objects() -> None:
    truth = [squares((10, 10, 1)), squares((10, 10, 1))]
    found = [truth[0], squares((10, 20, 1))]
    clip = Carried("clip", "objects", 2, lambda index: np.zeros((SIDE, SIDE, 3), np.uint8), found, truth)
    np.testing.assert_allclose(score_frames(clip), [1, 200 / 600])
