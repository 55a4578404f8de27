"""What happens to the pixels of a view after it is cut out: flip, colors, blur."""

import torch
from jaxtyping import Float
from torch import Tensor

GRAY = (0.299, 0.587, 0.114)  # ITU-R 601, as Pillow
BLUR_REACH = 4  # a kernel of 9 pixels
# 8-bit images are inverted from 128 on. A float that would be stored as 128 counts: from 127.5 / 255.
SOLARIZE_FROM = 0.5

Images = Float[Tensor, "n 3 height width"]


def mirror(images: Images) -> Images:
    """Swap left and right."""
    return images.flip(3)


def adjust_brightness(images: Images, factor: Float[Tensor, "n"]) -> Images:
    """Blend with black."""
    return (images * factor[:, None, None, None]).clamp_(0, 1)


def adjust_contrast(images: Images, factor: Float[Tensor, "n"]) -> Images:
    """Blend with the mean of the gray image."""
    mean = _luma(images).mean(dim=(1, 2, 3), keepdim=True)
    return torch.lerp(mean, images, factor[:, None, None, None]).clamp_(0, 1)


def adjust_saturation(images: Images, factor: Float[Tensor, "n"]) -> Images:
    """Blend with the gray image."""
    return torch.lerp(_luma(images), images, factor[:, None, None, None]).clamp_(0, 1)


def shift_hue(images: Images, turns: Float[Tensor, "n"]) -> Images:
    """Turn the color circle, value and saturation (of HSV) kept."""
    red, green, blue = images.unbind(1)
    value = images.amax(1)
    chroma = value - images.amin(1)
    safe = chroma.clamp(min=1e-12)  # gray has no hue: any will do, since chroma = 0 takes it out below
    hue = torch.where(
        value == red,
        (green - blue) / safe,
        torch.where(value == green, 2 + (blue - red) / safe, 4 + (red - green) / safe),
    )
    hue = hue + 6 * turns[:, None, None]
    # In sixths of a turn from its own center a channel is full up to 1 and empty from 2 on.
    corner = 5 - 2 * torch.arange(3, device=images.device)[:, None, None]
    sixth = torch.remainder(hue[:, None] + corner, 6)
    share = torch.minimum(sixth, 4 - sixth).clamp_(0, 1)
    return (value[:, None] - chroma[:, None] * share).clamp_(0, 1)


def to_gray(images: Images) -> Images:
    """Replace every channel by the gray image."""
    return _luma(images).expand_as(images)


def blur(images: Images, sigma: Float[Tensor, "n"]) -> Images:
    """Blur by a Gaussian of 9 x 9 pixels, the border reflected."""
    return _blur(images, sigma, BLUR_REACH, reflect=True)


def wide_blur(images: Images, sigma: Float[Tensor, "n"], reach: int | None = None) -> Images:
    """SimCLR's blur (arXiv:2002.05709): as wide as a tenth of the image, black beyond the border."""
    return _blur(images, sigma, images.shape[2] // 20 if reach is None else reach, reflect=False)


def solarize(images: Images) -> Images:
    """Invert the bright half."""
    return torch.where(images >= SOLARIZE_FROM, 1 - images, images)


JITTER = (adjust_brightness, adjust_contrast, adjust_saturation, shift_hue)


def _luma(images: Images) -> Float[Tensor, "n 1 height width"]:
    """Make the gray image."""
    red, green, blue = images.unbind(1)
    return (GRAY[0] * red + GRAY[1] * green + GRAY[2] * blue)[:, None]


def _blur(images: Images, sigma: Float[Tensor, "n"], reach: int, reflect: bool) -> Images:
    down, across = (_blur_matrix(sigma, size, reach, reflect) for size in images.shape[2:])
    return down[:, None] @ images @ across[:, None].transpose(2, 3)


def _blur_matrix(
    sigma: Float[Tensor, "n"], size: int, reach: int, reflect: bool
) -> Float[Tensor, "n {size} {size}"]:
    """Write the blur along one axis of `size` pixels as a matrix, reflection at the borders included."""
    offset = torch.arange(-reach, reach + 1, device=sigma.device)
    kernel = torch.exp(-0.5 * (offset / sigma[:, None]) ** 2)
    kernel = kernel / kernel.sum(1, keepdim=True)
    read = offset[:, None] + torch.arange(size, device=sigma.device)
    if reflect:
        read = size - 1 - (size - 1 - read.abs()).abs()
    taps = (read[:, :, None] == torch.arange(size, device=sigma.device)).to(kernel.dtype)
    return torch.einsum("no,ots->nts", kernel, taps)
