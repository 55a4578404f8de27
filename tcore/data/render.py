"""Pixels: uint8 frames and a plan make crops, batched, on the device of the frames."""

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int64, Shaped, UInt8
from torch import Tensor

from tcore.data.views import NO_JITTER, ViewPlan
from tcore.errors import InputError

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
GREY = (0.299, 0.587, 0.114)  # ITU-R 601, as Pillow
BLUR_REACH = 4  # a kernel of 9 pixels
# 8-bit images are inverted from 128 on. A float that would be stored as 128 counts: from 127.5 / 255.
SOLARIZE_FROM = 0.5
# Views are cut in chunks, by the size of their source as float: stay in the cache, leave room on a GPU.
CPU_CHUNK, GPU_CHUNK = 2**21, 2**29

Images = Float[Tensor, "n 3 height width"]


def render(
    frames: UInt8[Tensor, "f height width 3"], plan: ViewPlan, size: int
) -> Float[Tensor, "n 3 {size} {size}"]:
    """Make the views of a plan, normalised; padding that brings the frames to one size is not read."""
    return normalize(render_pixels(frames, plan, size))


def normalize(images: Images) -> Images:
    """Bring values of [0, 1] to the mean and deviation of ImageNet."""
    mean, std = _move(np.array([MEAN, STD], np.float32)[:, :, None, None], images.device)
    return (images - mean) / std


def render_pixels(
    frames: UInt8[Tensor, "f height width 3"], plan: ViewPlan, size: int
) -> Float[Tensor, "n 3 {size} {size}"]:
    """Make the views of a plan with values in [0, 1]."""
    _check(frames, plan)
    # 8 bits of mantissa would be visible: keep the products out of a surrounding autocast.
    with torch.autocast(frames.device.type, enabled=False):
        images = crop_and_resize(frames, plan, size)
        _apply(images, plan.flip, mirror)
        _jitter(images, plan)
        _apply(images, plan.grey, to_grey)
        _apply(images, plan.blur > 0, blur, plan.blur)
        _apply(images, plan.solarize, solarize)
    return images


def resampling_matrix(
    start: Float[Tensor, "n"], length: Float[Tensor, "n"], source: int, target: int
) -> Float[Tensor, "n {target} {source}"]:
    """Weigh `length` of `source` pixels, from `start` on, for each of `target` pixels as Pillow's bicubic."""
    scale = (length / target)[:, None, None]
    pixel = torch.arange(source, device=start.device) + 0.5 - start[:, None, None]
    centre = (torch.arange(target, device=start.device)[:, None] + 0.5) * scale
    weights = _bicubic((pixel - centre) / scale.clamp(min=1))
    # Only pixels of the crop count, at its border too: the rest of the frame is not part of the image.
    weights = weights * ((pixel > 0) & (pixel < length[:, None, None]))
    return weights / weights.sum(2, keepdim=True)


def crop_and_resize(
    frames: UInt8[Tensor, "f height width 3"], plan: ViewPlan, size: int
) -> Float[Tensor, "n 3 {size} {size}"]:
    """Cut the boxes out, resize them bicubic with antialias, values in [0, 1]."""
    _, height, width, _ = frames.shape
    lines = frames.permute(0, 1, 3, 2).reshape(-1, 3 * width)  # one image row of all channels each
    images = torch.empty((len(plan), 3, size, size), device=frames.device)
    budget = CPU_CHUNK if frames.device.type == "cpu" else GPU_CHUNK
    chunk = max(1, budget // (lines[0].numel() * height * 4))
    down_first = shrinks_down_first(plan.box[:, 2], plan.box[:, 3], size)
    for order in (False, True):
        rows = np.flatnonzero(down_first == order)
        for part in (rows[first : first + chunk] for first in range(0, len(rows), chunk)):
            images[_move(part, images.device)] = _cut(lines, height, plan.select(part), size, order)
    return images


def shrinks_down_first(
    height: Int64[np.ndarray, "n"], width: Int64[np.ndarray, "n"], size: int
) -> Bool[np.ndarray, "n"]:
    """Where Pillow (from 13 on) resizes the columns before the rows: height shrinks far more than width.

    8-bit images are cut off between the passes, so that their order shows at sharp edges.
    """
    return (height > size) & (height - size > 2 * (width - size))


def _cut(
    lines: UInt8[Tensor, "lines row"], height: int, plan: ViewPlan, size: int, down_first: bool
) -> Images:
    """Resample one chunk of views by two matrix products."""
    device, width = lines.device, lines.shape[1] // 3
    count, reach = len(plan), int(plan.box[:, 2].max())
    # Read no more rows than the tallest box has; a window that would leave the frame moves up.
    top = np.minimum(plan.box[:, 0], height - reach)
    rows = (plan.frame * height + top)[:, None] + np.arange(reach)
    pixels = lines.index_select(0, _move(rows.reshape(-1), device)).float()

    box = _move(np.column_stack([plan.box[:, 0] - top, plan.box[:, 1:]]).astype(np.float32), device)
    across = resampling_matrix(box[:, 1], box[:, 3], width, size)
    down = resampling_matrix(box[:, 0], box[:, 2], reach, size)
    # Bicubic overshoots, and 8-bit images are cut off after either pass.
    if down_first:
        short = torch.bmm(down, pixels.view(count, reach, 3 * width)).clamp_(0, 255)
        resized = torch.bmm(short.view(count, size * 3, width), across.transpose(1, 2))
    else:
        narrow = torch.bmm(pixels.view(count, reach * 3, width), across.transpose(1, 2)).clamp_(0, 255)
        resized = torch.bmm(down, narrow.view(count, reach, 3 * size))
    return (resized.clamp_(0, 255) / 255).view(count, size, 3, size).transpose(1, 2)


def mirror(images: Images) -> Images:
    """Swap left and right."""
    return images.flip(3)


def adjust_brightness(images: Images, factor: Float[Tensor, "n"]) -> Images:
    """Blend with black."""
    return (images * factor[:, None, None, None]).clamp_(0, 1)


def adjust_contrast(images: Images, factor: Float[Tensor, "n"]) -> Images:
    """Blend with the mean of the grey image."""
    mean = _luma(images).mean(dim=(1, 2, 3), keepdim=True)
    return torch.lerp(mean, images, factor[:, None, None, None]).clamp_(0, 1)


def adjust_saturation(images: Images, factor: Float[Tensor, "n"]) -> Images:
    """Blend with the grey image."""
    return torch.lerp(_luma(images), images, factor[:, None, None, None]).clamp_(0, 1)


def shift_hue(images: Images, turns: Float[Tensor, "n"]) -> Images:
    """Turn the colour circle, value and saturation (of HSV) kept."""
    red, green, blue = images.unbind(1)
    value = images.amax(1)
    chroma = value - images.amin(1)
    safe = chroma.clamp(min=1e-12)  # grey has no hue: any will do, since chroma = 0 takes it out below
    hue = torch.where(
        value == red,
        (green - blue) / safe,
        torch.where(value == green, 2 + (blue - red) / safe, 4 + (red - green) / safe),
    )
    hue = hue + 6 * turns[:, None, None]
    # In sixths of a turn from its own centre a channel is full up to 1 and empty from 2 on.
    corner = 5 - 2 * torch.arange(3, device=images.device)[:, None, None]
    sixth = torch.remainder(hue[:, None] + corner, 6)
    share = torch.minimum(sixth, 4 - sixth).clamp_(0, 1)
    return (value[:, None] - chroma[:, None] * share).clamp_(0, 1)


def to_grey(images: Images) -> Images:
    """Replace every channel by the grey image."""
    return _luma(images).expand_as(images)


def blur(images: Images, sigma: Float[Tensor, "n"]) -> Images:
    """Blur by a Gaussian of 9 x 9 pixels, the border reflected."""
    height, width = images.shape[2:]
    down, across = _blur_matrix(sigma, height), _blur_matrix(sigma, width)
    return down[:, None] @ images @ across[:, None].transpose(2, 3)


def solarize(images: Images) -> Images:
    """Invert the bright half."""
    return torch.where(images >= SOLARIZE_FROM, 1 - images, images)


_JITTER = (adjust_brightness, adjust_contrast, adjust_saturation, shift_hue)


def _jitter(images: Images, plan: ViewPlan) -> None:
    """Apply the four colour operations in place, each view in its own order."""
    wanted = plan.jitter != np.array(NO_JITTER)
    for position in range(4):
        for column, operation in enumerate(_JITTER):
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


def _luma(images: Images) -> Float[Tensor, "n 1 height width"]:
    """Make the grey image."""
    red, green, blue = images.unbind(1)
    return (GREY[0] * red + GREY[1] * green + GREY[2] * blue)[:, None]


def _bicubic(distance: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Evaluate Keys' kernel with a = -1/2."""
    # Both pieces are 0 where they meet and where they end: held there, they can be added without a choice.
    near, far = distance.abs().clamp(max=1), distance.abs().clamp(1, 2)
    return (1.5 * near - 2.5) * near * near + 1 + (((-0.5 * far + 2.5) * far - 4) * far + 2)


def _blur_matrix(sigma: Float[Tensor, "n"], size: int) -> Float[Tensor, "n {size} {size}"]:
    """Write the blur along one axis of `size` pixels as a matrix, reflection at the borders included."""
    offset = torch.arange(-BLUR_REACH, BLUR_REACH + 1, device=sigma.device)
    kernel = torch.exp(-0.5 * (offset / sigma[:, None]) ** 2)
    kernel = kernel / kernel.sum(1, keepdim=True)
    read = (offset[:, None] + torch.arange(size, device=sigma.device)).abs()
    read = size - 1 - (size - 1 - read).abs()
    taps = (read[:, :, None] == torch.arange(size, device=sigma.device)).to(kernel.dtype)
    return torch.einsum("no,ots->nts", kernel, taps)


def _move(values: Shaped[np.ndarray, "..."], device: torch.device) -> Tensor:
    """Send numbers of the plan to the device without waiting for it."""
    return torch.from_numpy(values).to(device, non_blocking=True)


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
