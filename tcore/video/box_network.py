"""A small network from a box to the object in it: where in the box the object is likely to be.

It looks at 48 x 48 pixels, the box and a quarter of its sides around it, and at how well the colors on each
side of the box explain every place. It was trained on rendered scenes alone (experiments/box_scenes.py).
"""

from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from safetensors.torch import load_file
from torch import Tensor, nn

from tcore.evaluation.encoders import FOLDER
from tcore.evaluation.resize import bilinear

SIDE = 48
EDGE = 8  # pixels around the box
FILE = FOLDER / "box-network.safetensors"
WIDTHS = (32, 64, 112)
ALIKE = 0.06  # how far apart colors are that count as one, of 1

Pictures = Float[Tensor, "batch 3 side side"]
Valid = Float[Tensor, "batch 1 side side"]


class BoxNetwork(nn.Module):
    """Log odds of the object, from pictures of boxes with what is around them."""

    def __init__(self) -> None:
        super().__init__()
        fine, middle, coarse = WIDTHS
        self.enter = nn.Conv2d(20, fine, 3, padding=1)
        self.down1, self.down2, self.deep = Block(fine, middle), Block(middle, coarse), Block(coarse, coarse)
        self.whole = nn.Linear(coarse, coarse)
        self.narrow1, self.up1 = nn.Conv2d(coarse, middle, 1), Block(2 * middle, middle)
        self.narrow0, self.up0 = nn.Conv2d(middle, fine, 1), Block(2 * fine, fine)
        self.spread = nn.Conv2d(fine, 32, 1)
        self.mix, self.leave = nn.Conv2d(11, 16, 3, padding=1), nn.Conv2d(16, 1, 3, padding=1)
        # Drawn once and stored: where colors are sampled, left, right, above, below (32 each) and inside.
        self.samples: Tensor
        self.register_buffer("samples", draw_samples())

    def forward(self, pictures: Pictures, valid: Valid) -> Float[Tensor, "batch side side"]:
        """Log odds of every pixel; `valid` is 0 outside of the frame."""
        seen = F.pixel_unshuffle((pictures - 0.5) * 2 * valid, 2)
        half = torch.cat([seen, self.explain(pictures, valid), F.avg_pool2d(valid, 2)], dim=1)
        fine = self.enter(torch.cat([half, places().expand(len(half), -1, -1, -1)], dim=1)).relu()
        middle = self.down1(F.max_pool2d(fine, 2))
        coarse = self.down2(F.max_pool2d(middle, 2))
        coarse = self.deep(coarse + self.whole(coarse.mean(dim=(2, 3)))[:, :, None, None])
        middle = self.up1(torch.cat([middle, twice(self.narrow1(coarse))], dim=1))
        fine = self.up0(torch.cat([fine, twice(self.narrow0(middle))], dim=1))
        whole = torch.cat([F.pixel_shuffle(self.spread(fine), 2), F.pixel_shuffle(seen, 2)], dim=1)
        odds: Tensor = self.leave(self.mix(whole).relu())
        return odds[:, 0]

    def explain(self, pictures: Pictures, valid: Valid) -> Float[Tensor, "batch 4 half half"]:
        """How often the color of every place occurs beside the box (most, mean), in it, and in it rather."""
        red, green, blue = F.avg_pool2d(pictures, 2).unbind(dim=1)
        color = torch.stack(
            [(red + green + blue) / 3, 0.8 * (red - blue), 0.8 * (green - (red + blue) / 2)], dim=1
        )
        around = F.avg_pool2d(F.pad(color, (1,) * 4, mode="replicate"), 3, 1)
        color = torch.cat([color, 0.7 * around], dim=1).flatten(2)
        known, weight = color[:, :, self.samples], F.avg_pool2d(valid, 2).flatten(1)[:, self.samples]
        apart = (color**2).sum(dim=1)[:, :, None] + (known**2).sum(dim=1)[:, None]
        apart = apart - 2 * color.transpose(1, 2) @ known
        close = torch.exp(-(apart / (2 * ALIKE**2)).clamp(0, 15)) * weight[:, None]
        shares = []
        for part, count in zip(
            close.split((32, 32, 32, 32, 64), 2), weight.split((32, 32, 32, 32, 64), 1), strict=True
        ):
            shares.append(part.sum(dim=2) / count.sum(dim=1, keepdim=True).clamp(min=1))
        logs = ((torch.stack(shares, dim=1) + 0.003).log() + 3) / 2
        logs = logs.unflatten(2, (SIDE // 2, SIDE // 2))
        best, inside = logs[:, :4].amax(dim=1), logs[:, 4]
        return torch.stack([best, logs[:, :4].mean(dim=1), inside, inside - best], dim=1)


class Block(nn.Module):
    """Two convolutions, the second one beside a shortcut."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.Conv2d(outputs, outputs, 3, padding=1),
        )
        self.norm1, self.norm2 = nn.GroupNorm(8, outputs), nn.GroupNorm(8, outputs)

    def forward(self, planes: Tensor) -> Tensor:
        """Planes of the same size."""
        planes = self.norm1(self.first(planes)).relu()
        return (planes + self.norm2(self.second(planes))).relu()


def twice(planes: Tensor) -> Tensor:
    """Planes of twice the size."""
    return F.interpolate(planes, scale_factor=2, mode="bilinear", align_corners=False)


def places() -> Float[Tensor, "1 3 half half"]:
    """Where every place is, and whether it is in the box."""
    line = torch.linspace(-1, 1, SIDE // 2)
    x, y = line.expand(SIDE // 2, -1), line[:, None].expand(-1, SIDE // 2)
    inside = torch.zeros_like(x)
    inside[EDGE // 2 : -EDGE // 2, EDGE // 2 : -EDGE // 2] = 1
    return torch.stack([x, y, inside])[None]


def draw_samples() -> Tensor:
    """Places of a picture at half its size: 32 on each side of the box, 64 in the middle."""
    generator = torch.Generator().manual_seed(0)
    line = torch.arange(SIDE // 2) * 2 + 0.5
    y, x = torch.meshgrid(line, line, indexing="ij")
    near = (x - SIDE / 2 + 0.5) ** 2 + (y - SIDE / 2 + 0.5) ** 2 < (0.26 * SIDE) ** 2
    found = []
    for part in (x < EDGE, x >= SIDE - EDGE, y < EDGE, y >= SIDE - EDGE, near):
        among = part.flatten().nonzero()[:, 0]
        order = torch.randperm(len(among), generator=generator)[: 64 if part is near else 32]
        found.append(among[order.sort().values])
    return torch.cat(found)


@lru_cache(maxsize=1)
def load_box_network() -> BoxNetwork:
    """The network that comes with the package."""
    network = BoxNetwork()
    network.load_state_dict(
        {name: tensor.to(network.state_dict()[name].dtype) for name, tensor in load_file(FILE).items()}
    )
    return network.eval()


def widen(first: float, last: float) -> tuple[int, int]:
    """From and to, with what is seen around the box."""
    margin = EDGE / (SIDE - 2 * EDGE) * (last - first)
    return round(first - margin), max(round(last + margin), round(first - margin) + 1)


@torch.no_grad()
def likely_in_box(
    pixels: Float[Tensor, "3 height width"], box: tuple[float, float, float, float]
) -> Float[np.ndarray, "height width"]:
    """How likely every pixel of a frame belongs to the object in a box (x, y, width, height)."""
    left, top, wide, high = box
    height, width = pixels.shape[1:]
    x0, x1 = widen(max(0.0, left), min(float(width), left + wide))
    y0, y1 = widen(max(0.0, top), min(float(height), top + high))
    part = (slice(max(0, y0), min(height, y1)), slice(max(0, x0), min(width, x1)))
    whole = torch.zeros(1, 4, y1 - y0, x1 - x0)
    there = (slice(part[0].start - y0, part[0].stop - y0), slice(part[1].start - x0, part[1].stop - x0))
    whole[0, :3, *there], whole[0, 3, *there] = pixels[:, *part], 1
    small = F.interpolate(whole, (SIDE, SIDE), mode="bilinear", antialias=True)
    valid = (small[:, 3:] > 0.5).float()
    # The picture and its mirror image, so that left and right do not matter.
    pair = torch.cat([small[:, :3] * valid, (small[:, :3] * valid).flip(3)])
    odds = load_box_network()(pair, torch.cat([valid, valid.flip(3)]))
    soft = bilinear(torch.sigmoid((odds[0] + odds[1].flip(1)) / 2), (y1 - y0, x1 - x0))
    found = np.zeros((height, width), dtype=np.float32)
    found[part] = soft[there].numpy()
    return found
