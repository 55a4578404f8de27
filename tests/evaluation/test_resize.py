import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tcore.errors import InputError
from tcore.evaluation.resize import grid_to_ids, ids_to_grid, resize_ids


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 900), st.integers(1, 900))
def test_nearest_takes_the_floor_of_the_scaled_index(old: int, new: int) -> None:
    row = torch.arange(old)[None]
    expected = [[target * old // new for target in range(new)]]
    assert resize_ids(row, (1, new)).tolist() == expected
    assert resize_ids(row.T, (new, 1)).T.tolist() == expected


def test_equal_classes_go_to_the_lower_id() -> None:
    labels = torch.zeros(2, 3, 6)
    labels[:, :, 2] = labels[:, :, 4] = 0.5
    assert (grid_to_ids(labels, input_size=(32, 48), output_size=(31, 50)) == 2).all()


def test_an_id_without_a_class_is_refused() -> None:
    ids = torch.full((4, 4), 255, dtype=torch.uint8)
    with pytest.raises(InputError, match=r"255\.\.255"):
        ids_to_grid(ids, input_size=(32, 32), grid=(2, 2), num_classes=20)
