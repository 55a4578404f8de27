"""How the pixels around a box move, beside the background: what moves otherwise is likely to be the object.

Motion to a nearby frame is found as by Lucas and Kanade (IJCAI 1981), from coarse to fine, with a window
around every pixel. The background's motion is the affine one that most of what lies outside of the box has.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from tcore.data.images import Frame
from tcore.evaluation.resize import Size, bilinear

SIDE = 128  # pixels of the longer side of the box where its motion is found
COARSEST = 8  # pixels of the shorter side of the smallest picture
TURNS = 4  # at every size
FITS = 8  # of the background's motion
WINDOW = 2.0  # pixels, the deviation of a Gaussian
NARROW = 1.5  # of the window where two motions are compared
STILL = 0.3  # pixels: smaller differences of motion say little,
NOTHING = 0.1  # and still smaller ones nothing
FLAT = 1e-3  # of the squared slopes in a window: less has no texture
NOISE = 2e-3  # of the squared differences of colors, of 1

Stretch = tuple[int, int, int, int]
"""Rows from and to, columns from and to."""
Picture = Float[Tensor, "1 3 rows columns"]
Flow = Float[Tensor, "1 2 rows columns"]
Plane = Float[Tensor, "rows columns"]


@dataclass(frozen=True)
class Motion:
    """Of every pixel: how it moves beside the background, and how far that is to be believed."""

    beside: Float[Tensor, "2 rows columns"]
    """In the direction of the difference; in length its logarithm, of what it is beside its usual error."""
    sure: Plane


@torch.no_grad()
def find_motion(frame: Frame, nearby: Frame, around: Stretch, wanted: Stretch, size: Size) -> Motion:
    """How the wanted stretch of a frame moves to a nearby frame, at a size; the object lies in `around`."""
    top, bottom, left, right = around
    height, width = frame.shape[:2]
    side = max(bottom - top, right - left)
    margin = round(max(side / 2, 0.15 * min(height, width), 12))
    seen = (
        *(max(0, top - margin), min(height, bottom + margin)),
        *(max(0, left - margin), min(width, right + margin)),
    )
    scale = min(1.0, SIDE / side)
    rows, columns = (max(2, round(scale * length)) for length in (seen[1] - seen[0], seen[3] - seen[2]))
    part = (slice(seen[0], seen[1]), slice(seen[2], seen[3]))
    here, there = (
        F.interpolate(
            torch.from_numpy(one[part] / np.float32(255)).permute(2, 0, 1)[None], (rows, columns), mode="area"
        )
        for one in (frame, nearby)
    )
    y = (torch.arange(rows) + 0.5) / rows * (seen[1] - seen[0]) + seen[0]
    x = (torch.arange(columns) + 0.5) / columns * (seen[3] - seen[2]) + seen[2]
    inside = ((y > top) & (y < bottom))[:, None] & ((x > left) & (x < right))
    beside, sure = beside_background(here, there, inside)
    planes = sample(torch.cat([beside, sure[None]]), seen, wanted, (2 * size[0], 2 * size[1]))
    planes = F.avg_pool2d(planes, 2)
    return Motion(planes[:2], planes[2])


def beside_background(
    frame: Picture, other: Picture, inside: Bool[Tensor, "rows columns"]
) -> tuple[Float[Tensor, "2 rows columns"], Plane]:
    """How pixels move beside the background, see `Motion`, and how far that is to be believed."""
    wide, narrow = Blur(frame, WINDOW), Blur(frame, NARROW)
    flow = follow(frame, other)
    error = ((warp(other, flow) - frame) ** 2).sum(dim=1)[0]
    # What is covered or newly seen matches nowhere: differences count beside the contrast around a pixel.
    contrast = (wide(frame**2) - wide(frame) ** 2).sum(dim=1)[0].clamp(min=0)
    allowed = contrast / 2 + NOISE
    sure = 1 / (1 + (wide(error) / allowed) ** 2)
    outside = torch.ones_like(sure) if inside.all() else (~inside).float()
    right, down = slope_planes(frame)
    slopes = wide((right**2 + down**2).sum(dim=1))[0]
    background, usual = fit_affine(flow, outside * (sure * slopes / (slopes + FLAT) + 1e-3))
    # A window at the border of an object has one motion, which the pixels beyond the border do not have.
    as_background = ((warp(other, background) - frame) ** 2).sum(dim=1)[0]
    gain = narrow(error) - narrow(as_background)
    belongs = torch.sigmoid((gain - NOISE / 2) / (0.15 * NOISE))
    sure = 1 / (1 + (wide(error).lerp(wide(as_background), belongs) / allowed) ** 2)
    beside = (flow - background)[0] * (1 - belongs)
    length = torch.hypot(*beside)
    told = ((length - NOTHING).clamp(min=0) / (usual + STILL)).log1p()
    return beside * (told / length.clamp(min=1e-6)), sure


def follow(frame: Picture, other: Picture) -> Flow:
    """Where every pixel of a frame is in another one: steps right and down, in pixels."""
    pairs = [(frame, other)]
    while min(frame.shape[2:]) >= 2 * COARSEST:
        half = tuple(round(length / 2) for length in frame.shape[2:])
        frame, other = (F.interpolate(one, half, mode="bilinear", antialias=True) for one in (frame, other))
        pairs.append((frame, other))
    flow = torch.zeros(1, 2, *frame.shape[2:])
    for first, second in reversed(pairs):
        rows, columns = first.shape[2:]
        grown = torch.tensor([columns / flow.shape[3], rows / flow.shape[2]])
        flow = bilinear(flow, (rows, columns)) * grown[:, None, None]
        blur, (right, down) = Blur(first, WINDOW), slope_planes(first)
        across, both, along = (
            blur((one * two).sum(dim=1)) for one, two in ((right, right), (right, down), (down, down))
        )
        across, along = across + 1e-4, along + 1e-4
        scale = across * along - both**2
        for _ in range(TURNS):
            apart = warp(second, flow) - first
            x, y = blur((right * apart).sum(dim=1)), blur((down * apart).sum(dim=1))
            step = torch.stack([both * y - along * x, both * x - across * y], dim=1) / scale[:, None]
            flow = median(median(flow + step.clamp(-1, 1)))
    return flow


class Blur:
    """A Gaussian window around every pixel of planes of one size."""

    def __init__(self, like: Tensor, deviation: float) -> None:
        self.down, self.across = (gaussian(length, deviation) for length in like.shape[-2:])

    def __call__(self, planes: Tensor) -> Tensor:
        """The mean of every window."""
        return self.down @ planes @ self.across.T


def gaussian(length: int, deviation: float) -> Float[Tensor, "length length"]:
    """A matrix that replaces values in a row by their means in Gaussian windows."""
    places = torch.arange(length, dtype=torch.float32)
    far = (places - places[:, None]) / deviation
    weights = torch.exp(-(far**2) / 2) * (far.abs() < 4)
    return weights / weights.sum(dim=1, keepdim=True)


def slope_planes(planes: Picture) -> tuple[Picture, Picture]:
    """How colors change to the right, and down."""
    wide = F.pad(planes, (1, 1, 1, 1), mode="replicate")
    return (wide[:, :, 1:-1, 2:] - wide[:, :, 1:-1, :-2]) / 2, (
        wide[:, :, 2:, 1:-1] - wide[:, :, :-2, 1:-1]
    ) / 2


def warp(planes: Picture, flow: Flow) -> Picture:
    """The colors of another frame, where the pixels of this one are there."""
    rows, columns = planes.shape[2:]
    x = (torch.arange(columns) + 0.5 + flow[:, 0]) * 2 / columns - 1
    y = (torch.arange(rows)[:, None] + 0.5 + flow[:, 1]) * 2 / rows - 1
    places = torch.stack([x, y], dim=-1)
    return F.grid_sample(planes, places, padding_mode="border", align_corners=False)


def median(flow: Flow) -> Flow:
    """About the median of 3 x 3 values around each: that of three columns' medians."""
    wide = F.pad(flow, (1, 1, 1, 1), mode="replicate")
    return middle(*middle(*wide.unfold(2, 3, 1).unbind(dim=-1)).unfold(3, 3, 1).unbind(dim=-1))


def middle(one: Tensor, two: Tensor, three: Tensor) -> Tensor:
    """Of three values each, the one in the middle."""
    return torch.maximum(torch.minimum(one, two), torch.minimum(torch.maximum(one, two), three))


def fit_affine(flow: Flow, weights: Plane) -> tuple[Flow, Tensor]:
    """The affine motion that most pixels have, and the usual distance from it."""
    rows, columns = weights.shape
    y, x = torch.meshgrid(torch.linspace(-0.5, 0.5, rows), torch.linspace(-0.5, 0.5, columns), indexing="ij")
    basis = torch.stack([torch.ones_like(x), x, y], dim=-1)
    some = weights[::2, ::2] > 0  # every second row and column: enough
    places, steps = basis[::2, ::2][some], flow[0, :, ::2, ::2][:, some].T
    weights = weights[::2, ::2][some]
    off = torch.hypot(*(steps - steps.median(dim=0).values).T)
    # Slopes are held back a little, for boxes with hardly anything around them.
    firm = torch.diag(torch.tensor([0.0, 1e-4, 1e-4]))
    for _ in range(FITS):
        usual = (1.5 * off.median()).clamp(min=0.1)
        now = (weights / (1 + (off / usual) ** 2) ** 2)[:, None]
        motion = torch.linalg.solve((places * now).T @ places + firm * now.sum(), (places * now).T @ steps)
        off = torch.hypot(*(steps - places @ motion).T)
    return (basis @ motion).movedim(-1, 0)[None], (1.5 * off.median()).clamp(min=0.1)


def sample(
    planes: Float[Tensor, "planes rows columns"], seen: Stretch, wanted: Stretch, size: Size
) -> Tensor:
    """Planes that cover a stretch of a frame, in another stretch, at another size."""
    y = torch.linspace(wanted[0], wanted[1], 2 * size[0] + 1)[1::2] - seen[0]
    x = torch.linspace(wanted[2], wanted[3], 2 * size[1] + 1)[1::2] - seen[2]
    y, x = y / (seen[1] - seen[0]) * 2 - 1, x / (seen[3] - seen[2]) * 2 - 1
    places = torch.stack([x.expand(*size), y[:, None].expand(*size)], dim=-1)
    return F.grid_sample(planes[None], places[None], padding_mode="border", align_corners=False)[0]
