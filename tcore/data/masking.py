"""Which patches of which crops the student does not see."""

import math

import numpy as np
from jaxtyping import Bool

from tcore.methods.settings_groups import MaskingConfig


def sample_masks(
    rng: np.random.Generator, num_crops: int, grid: int, masking: MaskingConfig
) -> Bool[np.ndarray, "crops n"]:
    """Masks of one group of crops.

    Stratified: an exact share of the crops, with stratified ratios, in random order. Independent: every crop
    draws for itself whether it has a mask, and how much of it is masked at most.
    """
    stratified, patches, share = masking.draw == "stratified", grid * grid, masking.probability
    num_masked = int(num_crops * share) if stratified else int(rng.binomial(num_crops, share))
    masks = np.zeros((num_crops, patches), dtype=bool)
    edges = np.linspace(*masking.ratio, num_masked + 1)
    for index, row in enumerate(masks[:num_masked]):
        if stratified:
            count: float = max(1, int(patches * rng.uniform(edges[index], edges[index + 1])))
        else:
            count = patches * rng.uniform(*masking.ratio)
        if masking.kind == "block":
            row[:] = block_mask(rng, grid, count, masking)
        else:
            row[rng.choice(patches, size=int(count), replace=False)] = True
    return masks[rng.permutation(num_crops)]


def block_mask(
    rng: np.random.Generator, grid: int, count: float, masking: MaskingConfig
) -> Bool[np.ndarray, "n"]:
    """Blocks of random area and aspect until `count` patches are masked, or 10 tries find no further one."""
    mask = np.zeros((grid, grid), dtype=bool)
    remaining, failures = count, 0
    while remaining > 0 and failures < 10:
        most = min(remaining, masking.largest_block or grid * grid)
        low, high = sorted((float(masking.smallest_block), float(most)))
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
        if 1 <= new <= most:
            block[:] = True
            remaining -= new
            failures = 0
    if masking.fill and remaining >= 1:  # no block fits any more: single patches fill the rest
        free = np.flatnonzero(~mask)
        mask.ravel()[rng.choice(free, size=int(remaining), replace=False)] = True
    return mask.ravel()


def sample_step_masks(
    seed: tuple[int, ...], num_videos: int, grid: int, masking: MaskingConfig
) -> Bool[np.ndarray, "two videos n"]:
    """Masks of a whole step, group by group: a function of the seed and the group alone."""
    groups = []
    for index, first in enumerate(range(0, num_videos, masking.group)):
        size = min(masking.group, num_videos - first)
        masks = sample_masks(np.random.default_rng((*seed, index)), 2 * size, grid, masking)
        groups.append(masks.reshape(2, size, grid * grid))
    return np.concatenate(groups, axis=1)
