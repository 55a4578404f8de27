import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tcore.evaluation.pose import (
    annotated_pixels,
    grid_to_pixels,
    joint_label_map,
    read_out,
    rescale,
)

places = st.floats(-4, 26, allow_nan=False)


def slow_stamp(x: float, y: float, sigma: float, grid: tuple[int, int]) -> np.ndarray:
    size, stamp = int(6 * sigma + 1), np.zeros(grid)
    left, top = int(x - 3 * sigma), int(y - 3 * sigma)
    right, bottom = int(x + 3 * sigma + 1), int(y + 3 * sigma + 1)
    for row in range(max(top, 0), min(bottom, grid[0])):
        for column in range(max(left, 0), min(right, grid[1])):
            i, j = column - left - size // 2, row - top - size // 2
            stamp[row, column] = np.exp(-(i**2 + j**2) / (2 * sigma**2))
    return stamp


@settings(deadline=None, max_examples=50)
@given(places, places, st.sampled_from([0.5, 1.0]))
def test_stamps_agree_with_a_loop_over_cells(x: float, y: float, sigma: float) -> None:
    maps = joint_label_map(np.array([[x, y]]), (13, 20), sigma=sigma)
    np.testing.assert_allclose(maps[:, :, 1], slow_stamp(x, y, sigma, (13, 20)), atol=1e-12)


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
