import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tcore.errors import InputError
from tcore.evaluation.resize import grid_to_ids, ids_to_grid, normalize_images, resize_ids, resize_images


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 900), st.integers(1, 900))
def test_nearest_takes_the_floor_of_the_scaled_index(old: int, new: int) -> None:
    row = torch.arange(old)[None]
    expected = [[target * old // new for target in range(new)]]
    assert resize_ids(row, (1, new)).tolist() == expected
    assert resize_ids(row.T, (new, 1)).T.tolist() == expected


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 2**32 - 1))
def test_soft_labels_of_the_grid_are_distributions(seed: int) -> None:
    ids = torch.randint(0, 4, (37, 53), generator=torch.Generator().manual_seed(seed))
    labels = ids_to_grid(ids, input_size=(48, 64), grid=(3, 4), num_classes=5)
    assert labels.shape == (3, 4, 5)
    assert (labels >= 0).all()
    torch.testing.assert_close(labels.sum(dim=2), torch.ones(3, 4))


def test_equal_classes_go_to_the_lower_id() -> None:
    labels = torch.zeros(2, 3, 6)
    labels[:, :, 2] = labels[:, :, 4] = 0.5
    assert (grid_to_ids(labels, input_size=(32, 48), output_size=(31, 50)) == 2).all()


def test_an_id_without_a_class_is_refused() -> None:
    ids = torch.full((4, 4), 255, dtype=torch.uint8)
    with pytest.raises(InputError, match=r"255\.\.255"):
        ids_to_grid(ids, input_size=(32, 32), grid=(2, 2), num_classes=20)


def test_batches_of_images_are_resized_like_single_ones_and_normalized_per_channel() -> None:
    images = torch.randint(0, 256, (2, 10, 14, 3), dtype=torch.uint8)
    resized = resize_images(images, (16, 32))
    torch.testing.assert_close(resized[1], resize_images(images[1], (16, 32)))
    normal = normalize_images(resized)
    torch.testing.assert_close(normal[:, 1], (resized[:, 1] - 0.456) / 0.224)
    torch.testing.assert_close(normal[:, 2], (resized[:, 2] - 0.406) / 0.225)
