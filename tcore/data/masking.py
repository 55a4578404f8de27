"""Which patches of which crops the student does not see."""

import math

import numpy as np
from jaxtyping import Bool

from tcore.methods.settings import MaskingConfig, MaskKind


def sample_masks(
    rng: np.random.Generator,
    num_crops: int,
    grid: int,
    *,
    probability: float = 0.5,
    ratio: tuple[float, float] = (0.1, 0.5),
    kind: MaskKind = "block",
) -> Bool[np.ndarray, "crops n"]:
    """Masks of one group of crops: an exact share of the crops, with stratified ratios, in random order."""
    num_masked = int(num_crops * probability)
    masks = np.zeros((num_crops, grid * grid), dtype=bool)
    edges = np.linspace(*ratio, num_masked + 1)
    for row, low, high in zip(masks, edges[:-1], edges[1:], strict=False):
        count = max(1, int(grid * grid * rng.uniform(low, high)))
        if kind == "block":
            row[:] = _block_mask(rng, grid, count)
        else:
            row[rng.choice(grid * grid, size=count, replace=False)] = True
    return masks[rng.permutation(num_crops)]


def _block_mask(rng: np.random.Generator, grid: int, count: int) -> Bool[np.ndarray, "n"]:
    """Blocks of random area and aspect until exactly `count` patches are masked."""
    mask = np.zeros((grid, grid), dtype=bool)
    remaining, failures = count, 0
    while remaining and failures < 10:
        low, high = sorted((4.0, float(remaining)))
        area = rng.uniform(low, high)
        aspect = math.exp(rng.uniform(math.log(0.3), math.log(1 / 0.3)))
        height, width = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        failures += 1
        if height >= grid or width >= grid:
            continue
        top = int(rng.integers(0, grid - height + 1))
        left = int(rng.integers(0, grid - width + 1))
        block = mask[top : top + height, left : left + width]
        new = block.size - int(block.sum())
        if 1 <= new <= remaining:
            block[:] = True
            remaining -= new
            failures = 0
    if remaining:  # no block fits any more: single patches fill the rest
        free = np.flatnonzero(~mask)
        mask.ravel()[rng.choice(free, size=remaining, replace=False)] = True
    return mask.ravel()


def sample_step_masks(
    seed: tuple[int, ...], num_videos: int, grid: int, masking: MaskingConfig
) -> Bool[np.ndarray, "two videos n"]:
    """Masks of a whole step, group by group: a function of the seed and the group alone."""
    groups = []
    for index, first in enumerate(range(0, num_videos, masking.group)):
        size = min(masking.group, num_videos - first)
        masks = sample_masks(
            np.random.default_rng((*seed, index)),
            2 * size,
            grid,
            probability=masking.probability,
            ratio=masking.ratio,
            kind=masking.kind,
        )
        groups.append(masks.reshape(2, size, grid * grid))
    return np.concatenate(groups, axis=1)
