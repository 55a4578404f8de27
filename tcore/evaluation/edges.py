"""Labels brought from the grid to pixels by a filter that looks at the frame: labels follow its colors.

The guided filter (He et al., TPAMI 2013) takes soft labels of the grid and a frame, and returns soft labels
of a finer grid, the guide: every cell becomes `side` x `side` pixels. Nothing is learned.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor

from tcore.evaluation.propagate import Labels
from tcore.evaluation.protocols import Protocol
from tcore.evaluation.resize import Size, bilinear, grid_to_ids

Shot = UInt8[np.ndarray, "frame_height frame_width 3"]
Pixels = UInt8[Tensor, "frame_height frame_width 3"]
FineLabels = Float[Tensor, "fine_rows fine_columns classes"]
Planes = Float[Tensor, "1 planes rows columns"]
LARGEST_SIDE = 8  # of a cell, in pixels of the guide
COARSE = 40  # cells along the short side: below, what is a few cells wide would fade
ALIKE = 0.1  # neighbors whose labels differ by less have no border between them


def labels_to_ids(
    labels: Labels, frame: Shot, inside: Size, size: Size, protocol: Protocol
) -> UInt8[Tensor, "new_height new_width"]:
    """Soft labels of the grid as ids of `size`, bilinear or along the edges of the frame.

    The protocol says which; bilinear labels are compared at the size `inside`.
    """
    if protocol.edges == "guided":
        coarse = min(labels.shape[:2]) < COARSE
        labels = guided_labels(labels, torch.from_numpy(frame.copy()), keep=coarse)
        # The guide is about half as large as a frame of 480 lines; larger frames need no larger planes.
        inside = (min(size[0], 2 * labels.shape[0]), min(size[1], 2 * labels.shape[1]))
    return grid_to_ids(labels, input_size=inside, output_size=size, stretch=protocol.stretch)


def guide_side(grid: Size, frame: Size) -> int:
    """Pixels of the guide along a cell: about every second one of the frame, two at least.

    >>> guide_side((30, 55), (480, 854)), guide_side((60, 110), (480, 854)), guide_side((60, 110), (96, 176))
    (8, 4, 2)
    """
    return max(2, min(LARGEST_SIDE, round(frame[0] / grid[0] / 2)))


def guide(frame: Pixels, grid: Size, side: int) -> Float[Tensor, "1 3 rows columns"]:
    """The frame at the size of the guide, scaled to [0, 1]."""
    planes = frame.permute(2, 0, 1)[None].to(torch.float32) / 255
    size = (grid[0] * side, grid[1] * side)
    return F.interpolate(planes, size=size, mode="bilinear", align_corners=False, antialias=True)


@torch.no_grad()
def guided_labels(
    labels: Labels,
    frame: Pixels,
    radius: float = 1.5,
    strength: float = 1e-5,
    *,
    keep: bool = False,
    everywhere: bool = False,
) -> FineLabels:
    """Soft labels of the guide: around every pixel, labels are linear in its color.

    `radius` counts cells; a larger `strength` (epsilon of the paper) smooths more. Smoothing takes from what
    is small or thin: with `keep`, cells get back what their pixels have lost on average. A CPU filters only
    the rectangle around the borders between labels, unless `everywhere`; the rest is bilinear.
    """
    grid = (labels.shape[0], labels.shape[1])
    side = guide_side(grid, (frame.shape[0], frame.shape[1]))
    # Shares add up to one before and after: the first class is what the others leave.
    cells = labels.movedim(-1, 0)[None, 1:].float()
    planes = bilinear(cells, (grid[0] * side, grid[1] * side))
    # A filtered pixel sees two windows around it, and so do those within them.
    whole = everywhere or labels.is_cuda  # a GPU would wait for the rectangle longer than it filters
    box = (0, grid[0], 0, grid[1]) if whole else around_borders(labels, math.ceil(4 * radius + 0.5))
    if box is not None:
        top, bottom, left, right = box
        fine = (slice(None), slice(None), *(slice(a * side, b * side) for a, b in (box[:2], box[2:])))
        image = guide(frame.to(labels.device), grid, side)[fine]
        shape = (image.shape[2], image.shape[3])
        follow = follow_colors(image, max(1, round(radius * side)), strength)
        wanted = cells[:, :, top:bottom, left:right]
        found = follow(bilinear(wanted, shape)).clamp(0, 1)
        if keep:
            found = (found + bilinear(wanted - F.avg_pool2d(found, side), shape)).clamp(0, 1)
        planes[fine] = found
    rest = (1 - planes.sum(dim=1, keepdim=True)).clamp(min=0)
    return torch.cat([rest, planes], dim=1)[0].movedim(0, -1)


def around_borders(labels: Labels, margin: int) -> tuple[int, int, int, int] | None:
    """The cells around all borders between labels: rows and columns from and to; None where there is none."""
    planes = labels.movedim(-1, 0)[None]
    # Beyond the rim of the grid, a pool sees its nearest cells alone.
    apart = F.max_pool2d(planes, 3, 1, 1) + F.max_pool2d(-planes, 3, 1, 1)
    borders = (apart > ALIKE).any(dim=1)[0]
    if not borders.any():
        return None
    found = []
    for line, length in ((borders.any(dim=1), labels.shape[0]), (borders.any(dim=0), labels.shape[1])):
        places = line.nonzero()
        found += [max(0, int(places[0]) - margin), min(length, int(places[-1]) + 1 + margin)]
    return found[0], found[1], found[2], found[3]


def follow_colors(image: Planes, half: int, strength: float) -> Callable[[Planes], Planes]:
    """The guided filter of an image of three colors with windows of 2 half + 1: a function of planes."""
    down, across = (window_means(length, half).to(image.device) for length in image.shape[2:])

    def mean(x: Tensor) -> Tensor:
        return down @ x @ across.T  # several times faster than pooling, which adds every window anew

    color = mean(image)
    spread = mean((image[:, :, None] * image[:, None]).flatten(1, 2)).unflatten(1, (3, 3))
    spread = spread - color[:, :, None] * color[:, None]
    spread = spread + strength * torch.eye(3, device=image.device)[:, :, None, None]

    def follow(planes: Planes) -> Planes:
        label = mean(planes)
        joint = mean((image[:, :, None] * planes[:, None]).flatten(1, 2)).unflatten(1, (3, -1))
        slope = solve_planes(spread, joint - color[:, :, None] * label[:, None])
        offset = label - (slope * color[:, :, None]).sum(dim=1)
        slope = mean(slope.flatten(1, 2)).unflatten(1, (3, -1))
        return (slope * image[:, :, None]).sum(dim=1) + mean(offset)

    return follow


def solve_planes(
    matrix: Float[Tensor, "1 n n rows columns"], right: Float[Tensor, "1 n k rows columns"]
) -> Float[Tensor, "1 n k rows columns"]:
    """A small positive definite system at every pixel, by elimination.

    Determinants would not do: where all is gray, they are small differences of large numbers.
    """
    count = matrix.shape[1]
    lines = list(torch.cat([matrix, right], dim=2).unbind(1))
    for index in range(count):
        lines[index] = lines[index] / lines[index][:, index : index + 1]
        for other in set(range(count)) - {index}:
            lines[other] = lines[other] - lines[index] * lines[other][:, index : index + 1]
    return torch.stack([line[:, count:] for line in lines], dim=1)


def window_means(length: int, half: int) -> Float[Tensor, "length length"]:
    """The matrix that replaces every value of a line by the mean of a window, cut off at the ends.

    >>> window_means(4, 1)[1:3]
    tensor([[0.3333, 0.3333, 0.3333, 0.0000],
            [0.0000, 0.3333, 0.3333, 0.3333]])
    """
    places = torch.arange(length)
    inside = ((places[:, None] - places).abs() <= half).float()
    return inside / inside.sum(dim=1, keepdim=True)
