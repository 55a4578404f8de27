"""Every loss against a plain formula, and parts of a step against the whole."""

import math

import pytest
import torch
from torch import Tensor

from tcore.model.losses import (
    centering_targets,
    cross_entropy,
    dino_loss,
    koleo_loss,
    past_future_output_distance,
    past_future_probability_distance,
    patch_loss,
    sinkhorn_targets,
)

VIDEOS, LOCALS, PROTOTYPES, PATCHES = 4, 3, 7, 9
TEMPERATURE = 0.1


def outputs(count: int, seed: int) -> Tensor:
    """Raw outputs of a head: numbers from -1 to 1."""
    return torch.rand(count, PROTOTYPES, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def probabilities(count: int, seed: int) -> Tensor:
    return (outputs(count, seed) / 0.3).softmax(dim=-1)


def slow_softmax(row: Tensor, temperature: float) -> list[float]:
    exponentials = [math.exp(value / temperature) for value in row.tolist()]
    return [value / sum(exponentials) for value in exponentials]


def slow_cross_entropy(target: Tensor, output: Tensor) -> float:
    predicted = slow_softmax(output, TEMPERATURE)
    return -sum(t * math.log(p) for t, p in zip(target.tolist(), predicted, strict=True))


def some_masks() -> Tensor:
    """Masks of eight crops: five carry one, of 1 to 6 patches."""
    mask = torch.zeros(2 * VIDEOS, PATCHES, dtype=torch.bool)
    for crop, patches in ((0, [4]), (2, [0, 1, 8]), (3, [2, 3, 4, 5, 6, 7]), (5, [8, 7]), (7, [1, 3, 5, 7])):
        mask[crop, patches] = True
    return mask


def weights_of(mask: Tensor) -> Tensor:
    """1 / (masked patches of its crop) for each masked patch."""
    return torch.cat([torch.full((int(n),), 1 / int(n)) for n in mask.sum(dim=1) if n])


def rows_of_crops(mask: Tensor) -> list[list[int]]:
    """For each masked crop the rows of its masked patches among all of them."""
    rows, first = [], 0
    for crop in mask:
        if count := int(crop.sum()):
            rows.append(list(range(first, first + count)))
            first += count
    return rows


def test_cross_entropy_follows_the_formula_row_by_row() -> None:
    targets, out = probabilities(5, 0), outputs(5, 1)
    expected = [slow_cross_entropy(t, o) for t, o in zip(targets, out, strict=True)]
    torch.testing.assert_close(cross_entropy(targets, out, TEMPERATURE), torch.tensor(expected))


def test_dino_is_the_mean_over_all_pairs_of_different_views() -> None:
    targets = probabilities(2 * VIDEOS, 0)
    global_, local = outputs(2 * VIDEOS, 1), outputs(LOCALS * VIDEOS, 2)
    of_videos = []
    for video in range(VIDEOS):
        pairs = []
        for teacher in range(2):
            target = targets[teacher * VIDEOS + video]
            pairs += [slow_cross_entropy(target, local[c * VIDEOS + video]) for c in range(LOCALS)]
            pairs += [
                slow_cross_entropy(target, global_[c * VIDEOS + video]) for c in range(2) if c != teacher
            ]
        assert len(pairs) == 2 * LOCALS + 2
        of_videos.append(sum(pairs) / len(pairs))
    got = dino_loss(targets, global_, local, TEMPERATURE, VIDEOS)
    assert got.item() == pytest.approx(sum(of_videos) / VIDEOS, rel=1e-5)


@pytest.mark.parametrize("divisor", [5, 2 * VIDEOS])
def test_patch_loss_is_a_mean_within_each_crop(divisor: int) -> None:
    mask = some_masks()
    crops = rows_of_crops(mask)
    assert len(crops) == 5
    targets, out = probabilities(int(mask.sum()), 0), outputs(int(mask.sum()), 1)
    expected = sum(sum(slow_cross_entropy(targets[r], out[r]) for r in crop) / len(crop) for crop in crops)
    got = patch_loss(targets, out, weights_of(mask), TEMPERATURE, divisor)
    assert got.item() == pytest.approx(expected / divisor, rel=1e-5)


def test_past_future_as_printed_is_a_distance_of_probabilities() -> None:
    mask = some_masks()
    crops = rows_of_crops(mask)
    past, future = outputs(int(mask.sum()), 0), outputs(int(mask.sum()), 1)

    def distance(row: int) -> float:
        p, q = slow_softmax(past[row], TEMPERATURE), slow_softmax(future[row], TEMPERATURE)
        return sum((a - b) ** 2 for a, b in zip(p, q, strict=True))

    expected = sum(sum(distance(row) for row in crop) / len(crop) for crop in crops) / len(crops)
    weights = weights_of(mask)
    got = past_future_probability_distance(past, future, weights, TEMPERATURE, len(crops))
    assert got.item() == pytest.approx(expected, rel=1e-5)
    assert past_future_probability_distance(past, past, weights, TEMPERATURE, len(crops)) == 0


def test_past_future_as_released_is_a_mean_over_tokens_and_prototypes() -> None:
    past, future = outputs(11, 0), outputs(11, 1)
    squares = [
        (a - b) ** 2
        for p, q in zip(past.tolist(), future.tolist(), strict=True)
        for a, b in zip(p, q, strict=True)
    ]
    got = past_future_output_distance(past, future, 11)
    assert got.item() == pytest.approx(sum(squares) / (11 * PROTOTYPES), rel=1e-5)
    assert past_future_output_distance(past, past, 11) == 0


def frame_tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("count", [2, 3, 8])
def test_koleo_looks_at_the_nearest_other_frame(count: int) -> None:
    frames = frame_tokens(count)
    units = [[value / math.hypot(*row) for value in row] for row in frames.tolist()]
    logs = [
        math.log(min(math.dist(units[i], units[j]) for j in range(count) if j != i) + 1e-8)
        for i in range(count)
    ]
    assert koleo_loss(frames, count).item() == pytest.approx(-sum(logs) / count, rel=1e-4)


def test_losses_of_half_precision_arithmetic_are_computed_in_full() -> None:
    targets, out = probabilities(5, 0), outputs(5, 1).bfloat16()
    frames = frame_tokens(1, seed=1) + 1e-2 * frame_tokens(8)  # cosines that bf16 cannot distinguish
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = (cross_entropy(targets, out, TEMPERATURE), koleo_loss(frames, 8))
    exact = (cross_entropy(targets, out.float(), TEMPERATURE), koleo_loss(frames, 8))
    torch.testing.assert_close(found, exact, rtol=0, atol=0)


def test_koleo_of_a_part_counts_by_its_share_of_the_step() -> None:
    frames = frame_tokens(3)
    torch.testing.assert_close(koleo_loss(frames, 12), koleo_loss(frames, 3) / 4)


def test_koleo_of_one_video_is_zero_with_a_graph() -> None:
    frames = frame_tokens(1).requires_grad_()
    loss = koleo_loss(frames, 1)
    assert loss.item() == 0
    loss.backward()
    assert frames.grad is not None
    assert (frames.grad == 0).all()


def test_koleo_of_equal_frames_is_large_with_a_finite_gradient() -> None:
    frames = frame_tokens(1).expand(4, -1).clone().requires_grad_()
    loss = koleo_loss(frames, 4)
    assert 15 < loss.item() <= -math.log(1e-8)
    loss.backward()
    assert frames.grad is not None
    assert frames.grad.isfinite().all()


def test_koleo_of_opposite_frames_does_not_take_a_frame_for_its_own_neighbor() -> None:
    frames = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    assert koleo_loss(frames, 2).item() == pytest.approx(-math.log(2))


def test_centering_targets_follow_the_formula() -> None:
    out, center = outputs(5, 0), outputs(1, 1)[0]
    got = centering_targets(out, center, 0.05)
    for row in range(5):
        torch.testing.assert_close(got[row], torch.tensor(slow_softmax(out[row] - center, 0.05)))


def slow_sinkhorn(out: Tensor, temperature: float) -> list[list[float]]:
    n, k = out.shape
    q = [[math.exp(value / temperature) for value in row] for row in out.tolist()]
    total = sum(map(sum, q))
    q = [[value / total for value in row] for row in q]
    for _ in range(3):
        columns = [sum(row[j] for row in q) for j in range(k)]
        q = [[row[j] / columns[j] / k for j in range(k)] for row in q]
        q = [[value / sum(row) / n for value in row] for row in q]
    return [[value * n for value in row] for row in q]


@pytest.mark.parametrize("count", [1, 5, 40])
def test_sinkhorn_targets_follow_the_formula(count: int) -> None:
    out = outputs(count, 0)
    torch.testing.assert_close(sinkhorn_targets(out, 0.05), torch.tensor(slow_sinkhorn(out, 0.05)))


def test_sinkhorn_neither_overflows_nor_fails_on_nothing() -> None:
    assert sinkhorn_targets(100 * outputs(6, 0), 0.5).isfinite().all()
    assert sinkhorn_targets(torch.zeros(0, PROTOTYPES), 0.04).shape == (0, PROTOTYPES)
