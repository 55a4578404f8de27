"""Joints as label maps and back: the pose benchmark in grid cells and pixels."""

from collections.abc import Iterable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tcore.evaluation.resize import Size

Points = Float[np.ndarray, "2 *rest"]
Maps = Float[Tensor, "height width channels"]

LOST = -1.0
"""Annotations and read-outs mark a lost joint by this value in both coordinates."""


def annotated_pixels(annotation: Points) -> Points:
    """Turn 1-based annotated positions (x, y) into 0-based pixels, NaN where a joint is lost."""
    return np.where(_lost(annotation), np.nan, annotation - 1)


def rescale(points: Points, before: Size, after: Size) -> Points:
    """Scale points (x, y) of an image or grid (height, width) to another."""
    factors = np.array((after[1] / before[1], after[0] / before[0]))
    return points * factors.reshape(2, *(1,) * (points.ndim - 1))


def grid_to_pixels(cells: Points, image_size: Size, grid: Size = (20, 20)) -> Points:
    """Scale read-out cells (x, y) to pixels of an image (height, width), NaN where a joint is lost."""
    return np.where(_lost(cells), np.nan, rescale(cells, grid, image_size))


def joints_to_grid(
    joints: Float[np.ndarray, "2 joints"],
    image_size: Size,
    grid: Size,
    round_border: bool,
) -> Maps:
    """Label maps of joints in pixels."""
    maps = joint_label_map(rescale(joints, image_size, grid).T, grid, corrected_border=round_border)
    return torch.from_numpy(maps).float()


def joints_from_grid(
    maps: Iterable[Maps], image_size: Size, grid: Size
) -> Float[np.ndarray, "2 joints time"]:
    """Joints in pixels, from the label maps of every frame."""
    cells = np.stack([read_out(each.cpu()).double().numpy() for each in maps], axis=2)
    return grid_to_pixels(cells, image_size, grid)


def joint_label_map(
    points: Float[np.ndarray, "joints 2"],
    grid: Size = (20, 20),
    *,
    sigma: float = 0.5,
    corrected_border: bool = False,
) -> Float[np.ndarray, "height width channels"]:
    """Stamp a Gaussian for each joint (x, y in cells); channel 0 is 1 where there is no joint at all.

    A lost joint (NaN) leaves its channel empty. Near the top and left border the published protocol
    moves the stamp by one cell, because it truncates toward zero; `corrected_border` rounds down.
    """
    along_x = _axis_profile(points[:, 0], grid[1], sigma, corrected_border)
    along_y = _axis_profile(points[:, 1], grid[0], sigma, corrected_border)
    joints = along_y.T[:, None, :] * along_x.T[None, :, :]
    background = joints.sum(axis=2, keepdims=True) == 0
    return np.concatenate([background.astype(joints.dtype), joints], axis=2)


def read_out(label_maps: Maps, topk: int = 5) -> Float[Tensor, "2 channels-1"]:
    """Locate each joint (x, y in cells) by the weighted mean of its strongest cells; (-1, -1) if empty."""
    height, width, _ = label_maps.shape
    joints = label_maps[:, :, 1:].flatten(0, 1)
    values, cells = joints.topk(min(topk, height * width), dim=0)
    empty = joints.sum(dim=0) == 0
    weights = values / torch.where(empty, 1, values.sum(dim=0))
    x = (weights * (cells % width)).sum(dim=0)
    y = (weights * (cells // width)).sum(dim=0)
    return torch.where(empty, LOST, torch.stack([x, y]))


def _axis_profile(
    positions: Float[np.ndarray, " joints"], cells: int, sigma: float, corrected_border: bool
) -> Float[np.ndarray, "joints cells"]:
    size = int(6 * sigma + 1)
    whole = np.floor if corrected_border else np.trunc
    positions = positions.astype(np.float64)[:, None]
    low, high = whole(positions - 3 * sigma), whole(positions + 3 * sigma + 1)
    cell = np.arange(cells)
    # Comparisons with NaN are false, so that a lost joint stamps nothing.
    stamped = (cell >= low) & (cell < np.minimum(high, low + size))
    place = np.where(stamped, cell - low, 0)
    return np.where(stamped, np.exp(-((place - size // 2) ** 2) / (2 * sigma**2)), 0.0)


def _lost(points: Points) -> np.ndarray:
    return np.asarray((points == LOST).all(axis=0))
