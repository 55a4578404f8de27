"""Images and labels between their own size, the input size and the grid of features."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Integer, UInt8
from torch import Tensor

from tcore.errors import InputError
from tcore.text import format_size

Size = tuple[int, int]  # height, width


def input_size(
    frame: Size, patch_size: int, *, short: int | None = None, long: int | None = None, multiple: int = 1
) -> Size:
    """The size at which a frame goes into an encoder: both sides are multiples of the patch.

    That is the frame's own size, or, with `short` or `long`, the size at which that side has this length;
    the other side is then floored to `multiple`.

    >>> input_size((480, 854), 16), input_size((480, 854), 16, short=480, multiple=64)
    ((480, 848), (480, 832))
    >>> input_size((1080, 1920), 14, long=448), input_size((720, 1280), 16, long=880, multiple=64)
    ((252, 448), (448, 880))
    """
    if min(frame) < patch_size:
        raise InputError(
            f"frames of {format_size(*frame)} are smaller than one patch of {patch_size} pixels."
        )
    wanted = short or long
    if wanted is not None:
        if wanted < patch_size:
            raise InputError(f"input side is {wanted}; it must be at least one patch, {patch_size} pixels.")
        fixed = min(frame) if short else max(frame)
        other = (max(frame) if short else min(frame)) * wanted // fixed // multiple * multiple
        taller = frame[0] > frame[1]
        frame = (wanted, other) if taller != bool(short) else (other, wanted)
    height, width = (max(1, side // patch_size) * patch_size for side in frame)
    return height, width


def resize_images(
    images: UInt8[Tensor, "*batch height width 3"], size: Size
) -> Float[Tensor, "*batch 3 new_height new_width"]:
    """Scale images to [0, 1] and resize them bilinearly, without antialias, to (height, width)."""
    planes = images.movedim(-1, -3).to(torch.float32) / 255
    return bilinear(planes, size)


def resize_ids(
    ids: Integer[Tensor, "*batch height width"], size: Size
) -> Integer[Tensor, "*batch new_height new_width"]:
    """Resize ids to (height, width) by nearest neighbor: source = floor(target * scale)."""
    # Whole numbers, because a scale in single precision picks the wrong pixel at some sizes.
    height, width = size
    rows = torch.arange(height, device=ids.device) * ids.shape[-2] // height
    columns = torch.arange(width, device=ids.device) * ids.shape[-1] // width
    return ids.index_select(-2, rows).index_select(-1, columns)


def ids_to_grid(
    ids: Integer[Tensor, "height width"],
    *,
    input_size: Size,
    grid: Size,
    num_classes: int,
    nearest: bool = False,
) -> Float[Tensor, "grid_height grid_width classes"]:
    """Turn ids into labels of the grid: nearest to the input size, one-hot, then bilinear or nearest."""
    at_input = resize_ids(ids, input_size).long()
    if not (at_input.min() >= 0 and at_input.max() < num_classes):
        raise InputError(
            f"label ids span {int(at_input.min())}..{int(at_input.max())}; "
            f"{num_classes} classes allow 0..{num_classes - 1}"
        )
    if nearest:
        return F.one_hot(resize_ids(at_input, grid), num_classes).to(torch.float32)
    planes = F.one_hot(at_input, num_classes).movedim(-1, 0).to(torch.float32)
    return bilinear(planes, grid).movedim(0, -1).contiguous()


def grid_to_ids(
    labels: Float[Tensor, "grid_height grid_width classes"],
    *,
    input_size: Size,
    output_size: Size,
    stretch: bool = False,
) -> UInt8[Tensor, "height width"]:
    """Turn soft labels of the grid into ids: bilinear to the input size, argmax, nearest to the output."""
    if labels.shape[-1] > 256:
        raise InputError(f"labels have {labels.shape[-1]} classes; ids of 8 bits allow 256")
    # Double precision keeps rounding out of the choice between two nearly equal classes.
    at_input = bilinear(doubled(labels.movedim(-1, 0)), input_size)
    if stretch:  # every channel to [0, 1] by its own range; an empty one stays empty
        low, high = at_input.amin(dim=(1, 2), keepdim=True), at_input.amax(dim=(1, 2), keepdim=True)
        spread = torch.where(high > low, high - low, 1)
        at_input = torch.where(high > 0, (at_input - low) / spread, at_input)
    # max() yields the same first maximum as argmax(), many times faster across planes.
    return resize_ids(at_input.max(dim=0).indices.to(torch.uint8), output_size)


def doubled(values: Tensor) -> Tensor:
    """Values in double precision; on the host where they lie on Apple's GPU, which has none."""
    return (values.cpu() if values.device.type == "mps" else values).double()


def bilinear(
    planes: Float[Tensor, "*batch height width"], size: Size
) -> Float[Tensor, "*batch new_height new_width"]:
    """Planes at another size, without antialias."""
    stacked = planes.reshape(-1, 1, *planes.shape[-2:])
    resized = F.interpolate(stacked, size=size, mode="bilinear", align_corners=False, antialias=False)
    return resized.reshape(*planes.shape[:-2], *size)
