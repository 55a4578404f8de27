"""Joints and points as label maps and back: in grid cells and pixels."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from tcore.evaluation.propagate import Features
from tcore.evaluation.protocols import TCORE, Protocol
from tcore.evaluation.resize import Size, doubled

Points = Float[np.ndarray, "2 *rest"]
Maps = Float[Tensor, "height width channels"]

POINT_REACH = 2  # cells around the strongest one that a point is the mean of
POINT_RADIUS = 0.2  # of the shorter side of the grid
RETURN_RADIUS, RETURN_TEMPERATURE = 1 / 8, 0.05  # of the shorter side; docs/propagate.md
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
    joints: Float[np.ndarray, "2 joints"], image_size: Size, grid: Size, round_border: bool
) -> Maps:
    """Label maps of joints in pixels."""
    maps = joint_label_map(rescale(joints, image_size, grid).T, grid, corrected_border=round_border)
    return torch.from_numpy(maps).float()


def joints_from_grid(
    maps: Iterable[Maps], image_size: Size, grid: Size
) -> Float[np.ndarray, "2 joints time"]:
    """Joints in pixels, from the label maps of every frame."""
    cells = np.stack([doubled(read_out(each.cpu())).numpy() for each in maps], axis=2)
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


def points_protocol(chosen: Protocol, grid: Size) -> Protocol:
    """The protocol for points: that of T-CoRe mixes fewer labels, from nearer by; others stay as they are.

    A mask that is blurred keeps its middle; a point that is blurred is gone. What was changed stays, too, but
    the search is exact: among means of four cells, points go astray.
    """
    if chosen.name.split("-")[0] != TCORE.name:
        return chosen
    radius = max(3.0, round(POINT_RADIUS * min(grid)))
    tuned: dict[str, Any] = {
        "radius": radius,
        "limit_first": True,
        "context": 7,
        "topk": 5,
        "temperature": 0.1,
    }
    kept = {k: v for k, v in tuned.items() if getattr(chosen, k) == getattr(TCORE, k)}
    return replace(chosen, **kept, search="exact")


def stamp_points(points: Float[np.ndarray, "points 2"], grid: Size) -> Float[Tensor, "height width channels"]:
    """Label maps of points (x, y in cells, centers at whole numbers); channel 0 is what is left of 1.

    Quadratic splines over 3x3 cells, whose mean is the point itself, wherever it lies between the centers of
    the outermost cells. A lost point (NaN) leaves its channel empty.
    """
    along_x, along_y = (_spline(points[:, axis], grid[1 - axis]) for axis in (0, 1))
    maps = along_y.T[:, None, :] * along_x.T[None, :, :]
    rest = 1 - maps.sum(axis=2, keepdims=True).clip(0, 1)
    return torch.from_numpy(np.concatenate([rest, maps], axis=2).astype(np.float32))


def locate_points(label_maps: Maps) -> Float[Tensor, "channels-1 3"]:
    """Locate each point (x, y in cells) by the mean of the cells around its strongest one; NaN if empty.

    The third number is how much of the label lies there.
    """
    width = label_maps.shape[1]
    points = doubled(label_maps[:, :, 1:].movedim(2, 0))
    cell = points.flatten(1).argmax(dim=1)[:, None, None]
    row, column = cell // width, cell % width
    span = torch.arange(2 * POINT_REACH + 1, device=points.device)
    channel = torch.arange(len(points), device=points.device)[:, None, None]
    near = F.pad(points, (POINT_REACH,) * 4)[channel, row + span[:, None], column + span]
    mass = near.sum(dim=(1, 2))
    x, y = (
        (near * (at + span.view(shape) - POINT_REACH)).sum(dim=(1, 2)) / mass
        for at, shape in ((column, (1, -1)), (row, (-1, 1)))
    )
    return torch.stack([x, y, mass.clamp(max=1)], dim=1)


class Origin:
    """Where points were given: whether those of a later frame still lead back to it."""

    def __init__(self, features: Features, points: Float[Tensor, "points 2"]) -> None:
        _, height, width = features.shape
        y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        away = torch.hypot(*(to - at.cpu()[:, None, None] for to, at in zip((x, y), points.T, strict=True)))
        self._around = (away <= max(1.5, RETURN_RADIUS * min(height, width))).flatten(1).to(features.device)
        self._unit = F.normalize(features.float(), dim=0).flatten(1)

    def returns(self, features: Features, points: Float[Tensor, "points 2"]) -> Float[Tensor, " points"]:
        """How sure each point leads back to where it was given, from 0 to 1.

        That is the root of the share of the cells around that place in all cells that look like the point.
        """
        scores = features_at(features, points) @ self._unit / RETURN_TEMPERATURE
        return (scores.softmax(dim=1) * self._around).sum(dim=1).clamp(0, 1).sqrt().cpu()


def features_at(features: Features, points: Float[Tensor, "points 2"]) -> Float[Tensor, "points channels"]:
    """Unit features at points (x, y in cells), interpolated between cells; a lost one is at the corner."""
    unit = F.normalize(features.float(), dim=0)
    places = (points.nan_to_num().to(unit) + 0.5) / unit.new_tensor([unit.shape[2], unit.shape[1]]) * 2 - 1
    found = F.grid_sample(unit[None], places[None, :, None], padding_mode="border", align_corners=False)
    return F.normalize(found[0, :, :, 0].T, dim=1)


def _spline(positions: Float[np.ndarray, " points"], cells: int) -> Float[np.ndarray, "points cells"]:
    """Weights of the cells along an axis: they add up to 1, and their mean is the position."""
    positions = positions.astype(np.float64).clip(0, cells - 1)[:, None]
    far = np.abs(np.arange(-1, cells + 1) - positions)
    weights = np.where(far < 0.5, 0.75 - far**2, np.where(far < 1.5, 0.5 * (1.5 - far) ** 2, 0.0))
    # What falls beyond the border, without moving the mean.
    for beyond, edge, inner in ((0, 1, 2), (-1, -2, -3)):
        weights[:, edge] += 2 * weights[:, beyond]
        weights[:, inner] -= weights[:, beyond]
    return weights[:, 1:-1]


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
