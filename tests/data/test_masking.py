"""Which patches of which crops the student does not see."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import Bool, Int

from tcore.data.masking import sample_masks, sample_step_masks
from tcore.methods.settings_groups import MaskingConfig, MaskKind

GRID = 14
KINDS: list[MaskKind] = ["block", "random"]


def masked_patches(masks: Bool[np.ndarray, "crops n"]) -> Int[np.ndarray, "masked"]:
    """Masked patches of the crops that have some, in rising order."""
    counts = masks.sum(axis=1)
    return np.sort(counts[counts > 0])


def neighbor_pairs(masks: Bool[np.ndarray, "crops n"]) -> int:
    """Pairs of masked patches that share a side."""
    grid = masks.reshape(len(masks), GRID, GRID)
    return int((grid[:, 1:] & grid[:, :-1]).sum() + (grid[:, :, 1:] & grid[:, :, :-1]).sum())


def is_rectangle(mask: Bool[np.ndarray, "n"]) -> bool:
    rows, columns = np.nonzero(mask.reshape(GRID, GRID))
    return (np.ptp(rows) + 1) * (np.ptp(columns) + 1) == len(rows)


@pytest.mark.parametrize("kind", KINDS)
def test_counts_are_the_whole_part_of_the_drawn_share(kind: MaskKind) -> None:
    # A range without width leaves no choice: int(196 * 0.25) = 49, and no rounding: int(196 * 0.3) = 58.
    for share, count in [(0.25, 49), (0.3, 58), (0.5, 98), (0.0, 1), (0.004, 1), (1.0, 196)]:
        masks = sample_masks(
            np.random.default_rng(2), 6, GRID, MaskingConfig(ratio=(share, share), kind=kind)
        )
        assert masked_patches(masks).tolist() == [count] * 3


def test_shares_are_uniform_between_their_edges() -> None:
    counts = [
        int(
            masked_patches(sample_masks(np.random.default_rng(seed), 2, GRID, MaskingConfig(kind="random")))[
                0
            ]
        )
        for seed in range(800)
    ]
    # int(196 U(.1, .5)) takes the values 19..98.
    assert 19 <= min(counts) <= 21
    assert 96 <= max(counts) <= 98
    assert abs(np.mean(counts) - 58.3) < 4 * 22.6 / np.sqrt(800)


def test_random_patches_are_independent() -> None:
    masks = sample_masks(np.random.default_rng(4), 800, GRID, MaskingConfig(ratio=(0.3, 0.3), kind="random"))
    masks = masks[masks.any(axis=1)]
    # 2 * 14 * 13 pairs, both masked with probability 58 * 57 / (196 * 195).
    assert neighbor_pairs(masks) / len(masks) == pytest.approx(364 * 58 * 57 / (196 * 195), rel=0.03)
    assert np.all(np.abs(masks.mean(axis=0) - 58 / 196) < 5 * np.sqrt(0.296 * 0.704 / len(masks)))


def test_blocks_have_no_largest_size_but_stay_below_the_side_of_the_grid() -> None:
    share = 70.5 / 196  # 7 x 10, or 5 x 14, whose aspect would be allowed
    masks = sample_masks(
        np.random.default_rng(5), 600, GRID, MaskingConfig(ratio=(share, share), probability=1.0)
    )
    whole = [mask.reshape(GRID, GRID) for mask in masks if is_rectangle(mask)]
    assert {int(mask.any(axis=0).sum()) for mask in whole} == {7, 10}


def test_blocks_reach_every_patch_alike_on_both_sides() -> None:
    share = sample_masks(np.random.default_rng(6), 600, GRID, MaskingConfig(probability=1.0)).mean(axis=0)
    grid = share.reshape(GRID, GRID)
    assert grid.min() > 0.02  # the corners, where few blocks lie
    for other in (grid[::-1], grid[:, ::-1], grid.T):
        deviation = np.sqrt((grid + other) / 600)
        assert np.all(np.abs(grid - other) <= 4.5 * deviation)


def test_shapes_of_small_blocks_follow_a_log_uniform_aspect() -> None:
    share = 4.5 / 196
    masks = sample_masks(
        np.random.default_rng(7), 600, GRID, MaskingConfig(ratio=(share, share), probability=1.0)
    )
    squares = sum(is_rectangle(m) and m.reshape(GRID, GRID).any(axis=0).sum() == 2 for m in masks)
    # With area 4 the sides round to 2 x 2 for |ln aspect| < ln(25 / 16), to 3 x 1 from ln(16 / 9) on,
    # to 4 x 1 from ln(49 / 16) on, and to 3 x 2, which is too large, in between; it ends at ln(1 / .3).
    accepted = math.log(25 / 16) + math.log(1 / 0.3) - math.log(16 / 9)
    expected = math.log(25 / 16) / accepted
    assert abs(squares / 600 - expected) < 4 * math.sqrt(expected * (1 - expected) / 600)


@given(
    st.integers(2, 4),
    st.integers(1, 12),
    st.floats(0, 1),
    st.tuples(st.floats(0, 1), st.floats(0, 1)).map(sorted),
    st.sampled_from(KINDS),
    st.integers(0, 2**32),
)
@settings(max_examples=150, deadline=None)
def test_tiny_grids_get_their_exact_counts(
    grid: int, crops: int, probability: float, ratio: list[float], kind: MaskKind, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    bounds = (ratio[0], ratio[1])
    masks = sample_masks(rng, crops, grid, MaskingConfig(probability=probability, ratio=bounds, kind=kind))
    assert masks.shape == (crops, grid * grid)
    num_masked = int(crops * probability)
    edges = np.linspace(*bounds, num_masked + 1)
    counts = masked_patches(masks)
    assert len(counts) == num_masked
    assert all(c >= max(1, int(grid * grid * low)) for c, low in zip(counts, edges[:-1], strict=True))
    assert all(c <= max(1, int(grid * grid * high)) for c, high in zip(counts, edges[1:], strict=True))


def test_patches_that_no_block_covers_are_filled_uniformly() -> None:
    # On a 2 x 2 grid blocks have one patch each, so three of four is any three, all equally often.
    masks = sample_masks(
        np.random.default_rng(8), 2000, 2, MaskingConfig(probability=1.0, ratio=(0.75, 0.75))
    )
    assert np.all(np.abs((~masks).sum(axis=0) - 500) < 5 * np.sqrt(500 * 0.75))


def step_masks(seed: tuple[int, ...], videos: int, grid: int = GRID, **masking: Any) -> np.ndarray:
    return sample_step_masks(seed, videos, grid, MaskingConfig(**masking))


def test_masks_are_shuffled_over_the_crops() -> None:
    masks = [step_masks((9, step), 4, 4, probability=0.5) for step in range(400)]
    carried = np.stack([m.any(axis=2) for m in masks])
    assert np.all(np.abs(carried.mean(axis=0) - 0.5) < 5 * 0.5 / np.sqrt(400))
    assert len({m.tobytes() for m in carried}) > 50  # of the 70 ways to choose 4 of 8 crops
    # The ratio is not tied to the place either.
    heaviest = np.stack([m.sum(axis=2).ravel().argmax() for m in masks])
    assert set(heaviest.tolist()) == set(range(8))


@pytest.mark.parametrize("kind", KINDS)
def test_masks_of_a_group_depend_on_seed_and_group_alone(kind: MaskKind) -> None:
    one, again, later, other = (
        step_masks(seed, 12, 4, group=4, kind=kind) for seed in [(0, 7), (0, 7), (0, 8), (1, 7)]
    )
    assert np.array_equal(one, again)
    for different in (later[:, :4], other[:, :4], one[:, 4:8]):
        assert not np.array_equal(one[:, :4], different)
    # A batch smaller than a group is one group.
    assert np.array_equal(step_masks((4,), 6, 4, group=32), step_masks((4,), 6, 4, group=6))


def test_each_group_has_its_exact_share_and_its_own_strata() -> None:
    masks = step_masks((3,), 10, group=4, probability=0.7)
    for first, size in [(0, 4), (4, 4), (8, 2)]:  # the last group is what remains
        group = masks[:, first : first + size].reshape(2 * size, -1)
        num_masked = int(2 * size * 0.7)
        counts, edges = masked_patches(group), np.linspace(0.1, 0.5, num_masked + 1)
        assert len(counts) == num_masked
        assert np.all(counts >= [int(196 * low) for low in edges[:-1]])
        assert np.all(counts <= [int(196 * high) for high in edges[1:]])
