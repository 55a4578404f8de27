"""Labels from the grid to pixels: the filters look at the frame, and mix what is around."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from experiments.edge_filter import save_filter
from experiments.learned_filter import EdgeFilter, load_filter
from tcore.evaluation.edges import around_borders, follow_colors, guided_labels, labels_to_ids
from tcore.evaluation.protocols import TCORE


def follow_plainly(image: Tensor, planes: Tensor, half: int, strength: float) -> Tensor:
    """The plain twin of the guided filter: least squares in every window, and their mean at a pixel."""
    height, width = image.shape[1:]
    windows = {
        (y, x): (slice(max(0, y - half), y + half + 1), slice(max(0, x - half), x + half + 1))
        for y in range(height)
        for x in range(width)
    }
    fits = {}
    for place, (rows, columns) in windows.items():
        colors, labels = image[:, rows, columns].flatten(1), planes[:, rows, columns].flatten(1)
        middle, label = colors.mean(1, keepdim=True), labels.mean(1, keepdim=True)
        spread = (colors - middle) @ (colors - middle).T / colors.shape[1] + strength * torch.eye(
            3, dtype=image.dtype
        )
        slope = torch.linalg.solve(spread, (colors - middle) @ (labels - label).T / colors.shape[1])
        fits[place] = (slope, label[:, 0] - middle[:, 0] @ slope)
    found = torch.zeros_like(planes)
    for (y, x), (rows, columns) in windows.items():
        near = [fits[a, b] for a in range(height)[rows] for b in range(width)[columns]]
        found[:, y, x] = torch.stack([image[:, y, x] @ slope + offset for slope, offset in near]).mean(0)
    return found


def shapes(rows: int, columns: int, classes: int = 3) -> Tensor:
    """Soft labels: rectangles with blurred borders on background."""
    labels = torch.zeros(classes, rows, columns)
    for number in range(1, classes):
        labels[number, rows // 2 - 1 : rows // 2 + 2, 5 * number : 5 * number + 3] = 1
    labels = torch.nn.functional.avg_pool2d(labels, 3, 1, 1)
    labels[0] = 1 - labels[1:].sum(0)
    return labels.movedim(0, -1)


def two_colors(height: int, width: int, edge: int) -> Tensor:
    """A frame that is dark left of a column and light right of it."""
    frame = torch.full((height, width, 3), 40, dtype=torch.uint8)
    frame[:, edge:] = 210
    return frame


@pytest.mark.parametrize("way", ["guided", "learned"])
def test_filtered_labels_are_shares_of_one_at_the_size_of_the_guide(way: str) -> None:
    labels = torch.rand(6, 8, 3, generator=torch.Generator().manual_seed(0)).softmax(dim=2)
    frame = torch.randint(0, 256, (96, 128, 3), dtype=torch.uint8)
    found = guided_labels(labels, frame) if way == "guided" else EdgeFilter(4, 4).refine(labels, frame)
    assert found.shape == (48, 64, 3)
    assert found.min() >= 0
    torch.testing.assert_close(found.sum(dim=2), torch.ones(48, 64), atol=1e-3, rtol=0)


@pytest.mark.parametrize("colors", [1, 3])
def test_guided_filter_equals_least_squares_in_every_window(colors: int) -> None:
    generator = torch.Generator().manual_seed(0)
    image = torch.rand(colors, 9, 11, generator=generator).expand(3, -1, -1)  # gray, or in color
    planes = torch.rand(2, 9, 11, generator=generator)
    fast = follow_colors(image[None], 2, 1e-5)(planes[None])[0]
    plain = follow_plainly(image.double(), planes.double(), 2, 1e-5).float()
    torch.testing.assert_close(fast, plain, atol=2e-3, rtol=0)


def test_filtering_around_borders_alone_equals_filtering_everywhere() -> None:
    labels = shapes(24, 40)
    frame = torch.randint(
        0, 256, (384, 640, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    assert around_borders(labels, 5) == (4, 21, 0, 20)
    part, whole = guided_labels(labels, frame, 1), guided_labels(labels, frame, 1, everywhere=True)
    torch.testing.assert_close(part, whole, atol=1e-5, rtol=0)


def test_labels_without_a_border_stay_as_they_are() -> None:
    labels = torch.tensor([0.3, 0.7]).expand(6, 8, 2)
    assert around_borders(labels, 5) is None
    frame = torch.randint(0, 256, (96, 128, 3), dtype=torch.uint8)
    torch.testing.assert_close(guided_labels(labels, frame), torch.tensor([0.3, 0.7]).expand(48, 64, 2))


def test_cells_keep_small_objects_that_smoothing_takes_from() -> None:
    # Two objects of one cell each, of 16 pixels, with the color of what is around them.
    frame, labels = two_colors(128, 128, 64), torch.zeros(8, 8, 2)
    labels[2, 2, 1] = labels[5, 6, 1] = 0.9
    labels[..., 0] = 1 - labels[..., 1]
    faded, kept = (guided_labels(labels, frame, keep=keep)[..., 1] > 0.5 for keep in (False, True))
    assert not faded.any()
    assert kept[16:24, 16:24].any()
    assert kept[40:48, 48:56].any()
    # That is what a coarse grid gets.
    ids = labels_to_ids(labels, frame.numpy(), (128, 128), (128, 128), replace(TCORE, edges="guided"))
    assert ids[32:48, 32:48].any()


def test_guided_filter_moves_a_blurred_border_to_the_edge_of_the_frame() -> None:
    # Cells of 16 pixels; the object begins at pixel 56, half way through cell 3.
    frame, labels = two_colors(96, 128, 56), torch.zeros(6, 8, 2)
    labels[:, :, 1] = torch.tensor([0, 0, 0.1, 0.5, 0.9, 1, 1, 1])
    labels[:, :, 0] = 1 - labels[:, :, 1]
    found = guided_labels(labels, frame, radius=1, strength=1e-4)[..., 1] > 0.5
    assert (found == (torch.arange(64) >= 28)).float().mean() > 0.97


def test_saved_filter_loads_with_its_sizes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    made, file = EdgeFilter(4, 6), tmp_path / "filter.safetensors"
    save_filter(made, file)
    loaded = load_filter(torch.device("cpu"), file)
    labels, frame = torch.rand(4, 5, 2), torch.randint(0, 256, (64, 80, 3), dtype=torch.uint8)
    torch.testing.assert_close(loaded.refine(labels, frame), made.refine(labels, frame), atol=2e-3, rtol=0)
