from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from tcore.evaluation.pose import (
    Origin,
    annotated_pixels,
    grid_to_pixels,
    joint_label_map,
    locate_points,
    points_protocol,
    read_out,
    rescale,
    stamp_points,
)
from tcore.evaluation.protocols import TCORE, protocol

places = st.floats(-4, 26, allow_nan=False)


def test_the_peak_is_at_the_nearest_cell_but_for_the_published_border() -> None:
    points = np.array([[5.4, 7.6], [5.5, 7.49], [0.2, 10.0]])
    for corrected in (False, True):
        maps = joint_label_map(points, corrected_border=corrected)
        assert maps[8, 5, 1] == maps[7, 6, 2] == maps[10, int(not corrected), 3] == 1


def test_background_is_where_no_joint_is_and_a_lost_joint_leaves_its_channel_empty() -> None:
    maps = joint_label_map(np.array([[5.0, 5.0], [np.nan, np.nan], [15.0, 3.0]]))
    assert maps.shape == (20, 20, 4)
    assert not maps[:, :, 2].any()
    np.testing.assert_array_equal(maps[:, :, 0] == 1, maps[:, :, 1:].sum(axis=2) == 0)
    assert maps[:, :, 0].sum() == 400 - 2 * 16


def test_the_read_out_weighs_the_strongest_cells_alone_and_marks_an_empty_channel() -> None:
    maps = torch.zeros(3, 4, 3)
    maps[0, 1, 1], maps[2, 3, 1], maps[1, 0, 1] = 3, 1, 0.5
    torch.testing.assert_close(read_out(maps, topk=2), torch.tensor([[1.5, -1], [0.5, -1]]))


def test_annotations_go_to_the_grid_and_back_to_pixels() -> None:
    annotation = np.array([[[33.0, -1.0]], [[25.0, -1.0]]])
    pixels = annotated_pixels(annotation)
    np.testing.assert_array_equal(pixels, [[[32, np.nan]], [[24, np.nan]]])
    cells = rescale(pixels, (240, 320), (20, 20))
    np.testing.assert_allclose(cells, [[[2, np.nan]], [[2, np.nan]]])
    np.testing.assert_allclose(grid_to_pixels(cells, (240, 320)), pixels)


def test_a_lost_read_out_is_lost_in_pixels_and_a_joint_left_of_the_frame_is_not() -> None:
    pixels = grid_to_pixels(np.array([[-1.0, 0.0, -1.0], [-1.0, 0.0, 4.0]]), (240, 320))
    assert np.isnan(pixels).tolist() == [[True, False, False], [True, False, False]]
    assert pixels[1, 2] == pytest.approx(48)


def test_points_are_read_out_where_they_were_stamped() -> None:
    rng = np.random.default_rng(0)
    places = np.concatenate(
        [rng.uniform(0, [11, 7], (40, 2)), [[0, 0], [11, 7], [5.5, 3.5], [np.nan, np.nan]]]
    )
    maps = stamp_points(places, (8, 12))
    assert float(maps.min()) >= -1e-6
    np.testing.assert_allclose(maps[:, :, 1:-1].sum(dim=(0, 1)), 1, atol=1e-6)
    found = locate_points(maps)
    np.testing.assert_allclose(found[:, :2], places, atol=1e-5)
    np.testing.assert_allclose(found[:-1, 2], 1, atol=1e-6)
    assert float(found[-1, 2]) == 0
    # What is far away does not move a point, and takes from its confidence only what is missing.
    here, there = (stamp_points(np.array([place]), (8, 12)) for place in ((1.3, 1.2), (9.0, 6.0)))
    np.testing.assert_allclose(locate_points(0.7 * here + 0.3 * there)[0], [1.3, 1.2, 0.7], atol=1e-5)


def test_protocol_of_points_is_narrower_unless_another_was_chosen() -> None:
    assert points_protocol(TCORE, (30, 53)).radius == 6
    fine = points_protocol(protocol("tcore-fine"), (60, 106))
    assert (fine.radius, fine.resize, fine.limit_first) == (12, "60x110", True)
    assert (fine.context, fine.topk, fine.temperature) == (7, 5, 0.1)
    assert points_protocol(protocol("dino"), (30, 53)) == protocol("dino")
    chosen = points_protocol(replace(TCORE, topk=1, radius=4, search="halved"), (30, 53))
    assert (chosen.topk, chosen.radius, chosen.context, chosen.search) == (1, 4, 7, "exact")


def test_a_point_leads_back_where_it_looks_as_it_did() -> None:
    features = torch.eye(144).reshape(144, 12, 12)  # no two cells look alike
    here, there = torch.tensor([[3.0, 4.0], [8.0, 2.0]]), torch.tensor([[3.0, 4.0], [2.0, 9.0]])
    origin = Origin(features, here)
    np.testing.assert_allclose(origin.returns(features, here), 1, atol=1e-3)
    np.testing.assert_allclose(origin.returns(features, there), [1, 0], atol=1e-3)
    moved = features.roll(2, dims=2)
    np.testing.assert_allclose(origin.returns(moved, here + torch.tensor([2.0, 0.0])), 1, atol=1e-3)
    half = origin.returns(features, torch.tensor([[5.0, 4.0], [8.5, 2.0]]))
    assert half[0] < 0.01 < 0.99 < half[1]  # two cells away, and between two cells that are both near
