"""Pixels: uint8 frames and a plan make crops, batched, on the device of the frames."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int64, Shaped, UInt8
from torch import Tensor

from tcore.data.photometry import JITTER, Images, blur, mirror, solarize, to_gray, wide_blur
from tcore.data.views import NO_JITTER, ViewPlan
from tcore.device import send
from tcore.errors import InputError
from tcore.methods.settings_pixel import Filter

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
# Views are cut in chunks, by the size of their source as float: stay in the cache, leave room on a GPU.
CPU_CHUNK, GPU_CHUNK = 2**21, 2**31


class Kernels(NamedTuple):
    """Functions that compiled ones may take the place of.

    `resize` makes views without such matrices; without `colors`, views are colored by rows.
    """

    resampling_matrix: Callable[..., Tensor]
    colors: Callable[..., Tensor] | None = None
    resize: Callable[..., Tensor] | None = None


def resampling_matrix(
    start: Float[Tensor, "n"],
    length: Float[Tensor, "n"],
    source: int,
    target: int,
    filter_: Filter = "bicubic",
) -> Float[Tensor, "n {target} {source}"]:
    """Weigh `length` of `source` pixels, from `start` on, for each of `target` pixels as Pillow does.

    `sharp` is bilinear between the two nearest pixels, however much shrinks.
    """
    scale = (length / target)[:, None, None]
    pixel = torch.arange(source, device=start.device) + 0.5 - start[:, None, None]
    center = (torch.arange(target, device=start.device)[:, None] + 0.5) * scale
    if filter_ == "sharp":
        center = torch.minimum(center.clamp(min=0.5), length[:, None, None] - 0.5)
    distance = (pixel - center) / (1 if filter_ == "sharp" else scale.clamp(min=1))
    weights = _bicubic(distance) if filter_ == "bicubic" else (1 - distance.abs()).clamp(min=0)
    # Only pixels of the crop count, at its border too: the rest of the frame is not part of the image.
    weights = weights * ((pixel > 0) & (pixel < length[:, None, None]))
    return weights / weights.sum(2, keepdim=True)


PLAIN = Kernels(resampling_matrix)


def normalize(images: Float[Tensor, "*batch 3 height width"]) -> Float[Tensor, "*batch 3 height width"]:
    """Bring values of [0, 1] to the mean and deviation of ImageNet."""
    mean, std = _move(np.array([MEAN, STD], np.float32)[:, :, None, None], images.device)
    return (images - mean) / std


def render_pixels(
    frames: UInt8[Tensor, "f height width 3"],
    plan: ViewPlan,
    size: int,
    kernels: Kernels = PLAIN,
    filter_: Filter = "bicubic",
) -> Float[Tensor, "n 3 {size} {size}"]:
    """Make the views of a plan with values in [0, 1]; padding around smaller frames is not read."""
    _check(frames, plan)
    # 8 bits of mantissa would be visible: keep the products out of a surrounding autocast.
    with torch.autocast(frames.device.type, enabled=False), products_of_pixels():
        images = crop_and_resize(frames, plan, size, kernels, filter_)
        if kernels.colors is None:
            _apply(images, plan.flip, mirror)
            _jitter(images, plan)
            _apply(images, plan.gray, to_gray)
        else:
            images = kernels.colors(images, *_color_numbers(plan, images.device))
        _apply(images, (plan.blur > 0) & ~plan.wide_blur, blur, plan.blur)
        _apply(images, (plan.blur > 0) & plan.wide_blur, wide_blur, plan.blur)
        _apply(images, plan.solarize, solarize)
    return images


@contextmanager
def products_of_pixels() -> Iterator[None]:
    """Matrix products of a GPU with 10 bits of mantissa: less than a quarter of a level of 255 is lost."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def crop_and_resize(
    frames: UInt8[Tensor, "f height width 3"],
    plan: ViewPlan,
    size: int,
    kernels: Kernels = PLAIN,
    filter_: Filter = "bicubic",
) -> Float[Tensor, "n 3 {size} {size}"]:
    """Cut the boxes out, resize them (bicubic: with antialias, as Pillow), values in [0, 1]."""
    down_first = shrinks_down_first(plan.box[:, 2], plan.box[:, 3], size)
    if kernels.resize is not None:
        return kernels.resize(frames, np.column_stack([plan.frame, plan.box, down_first]), size, filter_)
    _, height, width, _ = frames.shape
    lines = frames.permute(0, 1, 3, 2).reshape(-1, 3 * width)  # one image row of all channels each
    images = torch.empty((len(plan), 3, size, size), device=frames.device)
    budget = CPU_CHUNK if frames.device.type == "cpu" else GPU_CHUNK
    chunk = max(1, budget // (lines[0].numel() * height * 4))
    for order in (False, True):
        rows = np.flatnonzero(down_first == order)
        for part in (rows[first : first + chunk] for first in range(0, len(rows), chunk)):
            chosen = plan.select(part)
            images[_move(part, images.device)] = _cut(lines, height, chosen, size, order, kernels, filter_)
    return images


def shrinks_down_first(
    height: Int64[np.ndarray, "n"], width: Int64[np.ndarray, "n"], size: int
) -> Bool[np.ndarray, "n"]:
    """Where Pillow (from 13 on) resizes the columns before the rows: height shrinks far more than width.

    8-bit images are cut off between the passes, so that their order shows at sharp edges.
    """
    return (height > size) & (height - size > 2 * (width - size))


def _cut(
    lines: UInt8[Tensor, "lines row"],
    height: int,
    plan: ViewPlan,
    size: int,
    down_first: bool,
    kernels: Kernels,
    filter_: Filter,
) -> Images:
    """Resample one chunk of views by two matrix products."""
    device, width = lines.device, lines.shape[1] // 3
    count, reach = len(plan), int(plan.box[:, 2].max())
    # Read no more rows than the tallest box has; a window that would leave the frame moves up.
    top = np.minimum(plan.box[:, 0], height - reach)
    rows = _move(plan.frame * height + top, device)[:, None] + torch.arange(reach, device=device)
    pixels = lines.index_select(0, rows.flatten()).float()

    box = _move(np.column_stack([plan.box[:, 0] - top, plan.box[:, 1:]]).astype(np.float32), device)
    across = kernels.resampling_matrix(box[:, 1], box[:, 3], width, size, filter_)
    down = kernels.resampling_matrix(box[:, 0], box[:, 2], reach, size, filter_)
    # Bicubic overshoots, and 8-bit images are cut off after either pass.
    if down_first:
        short = torch.bmm(down, pixels.view(count, reach, 3 * width)).clamp_(0, 255)
        resized = torch.bmm(short.view(count, size * 3, width), across.transpose(1, 2))
    else:
        narrow = torch.bmm(pixels.view(count, reach * 3, width), across.transpose(1, 2)).clamp_(0, 255)
        resized = torch.bmm(down, narrow.view(count, reach, 3 * size))
    return (resized.clamp_(0, 255) / 255).view(count, size, 3, size).transpose(1, 2)


def _color_numbers(plan: ViewPlan, device: torch.device) -> tuple[Tensor, ...]:
    numbers = (
        plan.flip,
        plan.jitter.astype(np.float32),
        plan.order,
        plan.jitter != np.array(NO_JITTER),
        plan.gray,
    )
    return tuple(_move(values, device) for values in numbers)


def _jitter(images: Images, plan: ViewPlan) -> None:
    """Apply the four color operations in place, each view in its own order."""
    wanted = plan.jitter != np.array(NO_JITTER)
    for position in range(4):
        for column, operation in enumerate(JITTER):
            rows = (plan.order[:, position] == column) & wanted[:, column]
            _apply(images, rows, operation, plan.jitter[:, column])


def _apply(
    images: Images,
    wanted: Bool[np.ndarray, "n"],
    operation: Callable[..., Tensor],
    amount: Float64[np.ndarray, "n"] | None = None,
) -> None:
    """Replace the wanted rows of images by what the operation makes of them."""
    rows = np.flatnonzero(wanted)
    if not len(rows):
        return
    index = _move(rows, images.device)
    values = () if amount is None else (_move(amount[rows].astype(np.float32), images.device),)
    images.index_copy_(0, index, operation(images.index_select(0, index), *values))


def _bicubic(distance: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Evaluate Keys' kernel with a = -1/2."""
    # Both pieces are 0 where they meet and where they end: held there, they can be added without a choice.
    near, far = distance.abs().clamp(max=1), distance.abs().clamp(1, 2)
    return (1.5 * near - 2.5) * near * near + 1 + (((-0.5 * far + 2.5) * far - 4) * far + 2)


def _move(values: Shaped[np.ndarray, "..."], device: torch.device) -> Tensor:
    """Numbers of the plan on the device."""
    return send(torch.from_numpy(values), device)


def _check(frames: UInt8[Tensor, "f height width 3"], plan: ViewPlan) -> None:
    """Refuse plans that point outside the frames: on a GPU that would end the process."""
    count, height, width, _ = frames.shape
    box, frame = plan.box, plan.frame
    inside = (box[:, :2] >= 0) & (box[:, 2:] > 0) & (box[:, :2] + box[:, 2:] <= np.array([height, width]))
    bad = np.flatnonzero(~inside.all(axis=1) | (frame < 0) | (frame >= count))
    if len(bad):
        row = bad[0]
        raise InputError(
            f"view {row} takes [top, left, height, width] {box[row].tolist()} of frame {frame[row]}: "
            f"boxes must lie inside one of the {count} frames of {height} x {width} pixels."
        )
