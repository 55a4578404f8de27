"""Images and labels between their own size, the input size and the grid of features."""

from fractions import Fraction

import torch
import torch.nn.functional as F
from jaxtyping import Float, Integer, UInt8
from torch import Tensor

from tcore.errors import InputError
from tcore.text import format_size

Size = tuple[int, int]  # height, width


def input_size(
    frame: Size,
    patch_size: int,
    *,
    short: int | None = None,
    long: int | None = None,
    multiple: int | None = None,
    cell: int | Fraction | None = None,
    up: bool = False,
) -> Size:
    """The size at which a frame goes into an encoder: as many patches as it has cells each way.

    A cell is as large as a patch, or `cell` pixels. With `short` or `long` the frame is scaled until that
    side has this length; the other one is then floored to `multiple`. `up` counts cells that are cut off.

    >>> input_size((480, 854), 16), input_size((480, 854), 16, short=480, multiple=64)
    ((480, 848), (480, 832))
    >>> input_size((1080, 1920), 14, long=448), input_size((480, 854), 14, cell=8)
    ((252, 448), (840, 1484))
    """
    fixed = int((frame[0] > frame[1]) == (short is not None))
    wanted, name = (long, "long") if short is None else (short, "short")
    wanted, cell = frame[fixed] if wanted is None else wanted, cell or patch_size
    sides = [Fraction(side * wanted, frame[fixed]) for side in frame]
    if multiple is not None:
        sides[1 - fixed] = sides[1 - fixed] // multiple * Fraction(multiple)
    height, width = (-(-side // cell) if up else side // cell for side in sides)
    if min(height, width) < 1:
        limit = "" if wanted == frame[fixed] else f" with a {name} side of {wanted}"
        raise InputError(
            f"frames of {format_size(*frame)}{limit} are smaller than one patch of {float(cell):.2g} pixels."
        )
    return height * patch_size, width * patch_size


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
