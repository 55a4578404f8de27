"""Train the learned filter (experiments/learned_filter.py) without any label.

    python experiments/edge_filter.py FRAMES OUT.safetensors [--steps 4000] [--goal both] [--encoder default]

FRAMES is a folder of clips. Two goals, one of them or both:

- `pieces`: frames cut into the outlines of rendered objects and figures and glued over one another; their
  ids, moved and blurred on the grid as propagated labels are, must come back at the size of the guide;
- `features`: features of an image at half its size, brought up by the filter, must be those of the image.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from experiments.learned_filter import EdgeFilter, grow
from tcore.data.render import normalize
from tcore.data.rendered import render_video
from tcore.data.stores import walk_frames
from tcore.evaluation.encoder import Encoder
from tcore.model.vit import save_safetensors

Goal = Literal["pieces", "features", "both"]
SIDE = 192  # of the images in the bank
PIECES = 5  # ids of a glued image


class Bank(NamedTuple):
    """What training images are glued from: photographs, and maps of ids, both square."""

    images: Tensor  # n 3 SIDE SIDE, uint8
    maps: Tensor  # m SIDE SIDE, uint8


def read_bank(frames: Path, device: torch.device, images: int = 1600, videos: int = 150) -> Bank:
    """Frames of all clips, evenly, and maps of rendered videos: objects, or the parts of a figure."""
    files = [frames / name / file for name, found, _ in walk_frames(frames) for file in found]
    files = [files[int(i)] for i in np.linspace(0, len(files) - 1, min(images, len(files)))]
    pixels = np.stack([_square(path) for path in sorted(files)])
    maps = []
    for number in range(videos):
        video = render_video(7, number, num_frames=20, size=SIDE)
        for frame in (0, 6, 12, 18):
            parts = video.parts[frame] * (number % 2)  # every second video shows limbs apart
            maps.append((video.objects[frame].astype(int) + parts) % PIECES)
    stacked = torch.from_numpy(np.stack(maps).astype(np.uint8))
    return Bank(torch.from_numpy(pixels).permute(0, 3, 1, 2).to(device), stacked.to(device))


def _square(path: Path) -> np.ndarray:
    image = Image.open(path).convert("RGB")
    side = min(image.size)
    left, top = ((length - side) // 2 for length in image.size)
    box = (left, top, left + side, top + side)
    return np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BILINEAR, box=box))


class Draw:
    """Random numbers on a device."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.device = device
        self.generator = torch.Generator(device).manual_seed(seed)

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        """Uniform numbers."""
        return low + (high - low) * torch.rand(*shape, generator=self.generator, device=self.device)

    def normal(self, *shape: int) -> Tensor:
        """Standard normal numbers."""
        return torch.randn(*shape, generator=self.generator, device=self.device)

    def pick(self, count: int, *shape: int) -> Tensor:
        """Numbers below `count`."""
        return torch.randint(count, shape, generator=self.generator, device=self.device)

    def places(self, count: int, side: int, zoom: tuple[float, float]) -> Tensor:
        """Sampling grids: a window of 1/zoom of an image, turned, mirrored, somewhere inside."""
        scale = 1 / self.uniform(*zoom, count)
        angle, flip = self.uniform(-0.4, 0.4, count), 1 - 2.0 * self.pick(2, count)
        shift = self.uniform(-1, 1, count, 2) * (1 - scale)[:, None]
        cos, sin = scale * angle.cos(), scale * angle.sin()
        matrix = torch.stack(
            [torch.stack([cos * flip, -sin, shift[:, 0]], 1), torch.stack([sin * flip, cos, shift[:, 1]], 1)],
            1,
        )
        return F.affine_grid(matrix, [count, 1, side, side], align_corners=False)


def sample(images: Tensor, places: Tensor) -> Tensor:
    """Bilinear, mirrored beyond the border."""
    return F.grid_sample(images, places, padding_mode="reflection", align_corners=False)


def blur(x: Tensor, sigma: Tensor) -> Tensor:
    """A Gaussian of another width for every image of a batch."""
    steps = torch.arange(-6, 7, device=x.device)
    kernel = torch.exp(-0.5 * (steps / sigma[:, None].clamp(min=0.05)) ** 2)
    kernel = (kernel / kernel.sum(1, keepdim=True)).repeat_interleave(x.shape[1], 0)
    flat = F.pad(x.flatten(0, 1)[None], (6,) * 4, mode="replicate")
    flat = F.conv2d(flat, kernel[:, None, :, None], groups=len(kernel))
    return F.conv2d(flat, kernel[:, None, None, :], groups=len(kernel))[0].unflatten(0, x.shape[:2])


def glue(bank: Bank, draw: Draw, count: int, size: int) -> tuple[Tensor, Tensor]:
    """Images of pieces of other images, normalized, and how much of a pixel belongs to each piece."""
    maps = bank.maps[draw.pick(len(bank.maps), count)].long()
    share = F.one_hot(maps, PIECES).movedim(-1, 1).float()
    share = sample(share, draw.places(count, size, (1.0, 3.0)))
    share = share + 1e-3 * share.new_tensor([1.0, 0, 0, 0, 0])[None, :, None, None]
    share = share**2 / (share**2).sum(1, keepdim=True)
    which = draw.pick(len(bank.images), count * PIECES)
    pixels = sample(bank.images[which].float() / 255, draw.places(count * PIECES, size, (1.0, 4.0)))
    pixels = pixels.unflatten(0, (count, PIECES))
    # Colors move towards those of the first piece: objects often look like what is behind them.
    mean = pixels.mean((3, 4), keepdim=True)
    near = draw.uniform(0, 1.0, count, PIECES, 1, 1, 1)
    pixels = pixels + near * (mean[:, :1] - mean) + 0.1 * draw.normal(count, PIECES, 3, 1, 1)
    image = (pixels * blur(share, draw.uniform(0.1, 1.2, count))[:, :, None]).sum(1)
    image = blur(image, draw.uniform(0.05, 0.9, count)) + 0.02 * draw.normal(count, 3, size, size)
    return normalize(image.clamp(0, 1)), share


def propagated(share: Tensor, side: int, draw: Draw) -> Tensor:
    """Labels of the grid as propagation makes them: pieces a little off, blurred, unsure in places."""
    count, _, size, _ = share.shape
    rows = size // side
    field = grow(draw.normal(count, 2, rows // 3, rows // 3), share)
    off = field * draw.uniform(0, 0.7, count, 1, 1, 1) * (2 / rows)
    plain = F.affine_grid(torch.eye(2, 3, device=share.device).expand(count, 2, 3), list(share.shape), False)
    cells = F.avg_pool2d(sample(share, plain + off.movedim(1, -1)), side)
    cells = blur(cells, draw.uniform(0.2, 1.2, count))
    noise = grow(draw.normal(count, PIECES, rows // 2, rows // 2), cells) * draw.uniform(
        0, 0.5, count, 1, 1, 1
    )
    return cells * noise.exp() / (cells * noise.exp()).sum(1, keepdim=True)


def pieces_loss(model: EdgeFilter, bank: Bank, draw: Draw, batch: int) -> tuple[Tensor, Tensor]:
    """Cross-entropy of the pieces, and that of plain bilinear labels."""
    side = (2, 4, 4, 8)[int(draw.pick(4, 1))]
    size = {2: 96, 4: 128, 8: 192}[side]
    image, share = glue(bank, draw, batch, size)
    cells = propagated(share, side, draw)

    def cost(found: Tensor) -> Tensor:
        return -(share * found.clamp(min=1e-4).log()).sum(1).mean()

    return cost(model(image, cells)), cost(grow(cells, share)).detach()


def features_loss(
    model: EdgeFilter, bank: Bank, encoder: Encoder, draw: Draw, batch: int
) -> tuple[Tensor, Tensor]:
    """1 - cosine of features brought up from half the size and those of the whole, and of bilinear ones."""
    patch = encoder.patch_size
    small = (8, 10, 12)[int(draw.pick(3, 1))]
    which = draw.pick(len(bank.images), batch)
    whole = sample(bank.images[which].float() / 255, draw.places(batch, 2 * small * patch, (1.0, 2.0)))
    whole = normalize(whole)
    half = F.interpolate(whole, scale_factor=0.5, mode="bilinear", antialias=True)
    side = (4, 8)[int(draw.pick(2, 1))]
    image = F.interpolate(whole, size=(small * side,) * 2, mode="bilinear", antialias=True)
    goal, given = encoder.features(whole).float(), encoder.features(half).float()
    made = F.avg_pool2d(model(image, given), side // 2)

    def cost(found: Tensor) -> Tensor:
        return 1 - F.cosine_similarity(found, goal, dim=1).mean()

    return cost(made), cost(grow(given, goal)).detach()


def train_filter(
    bank: Bank,
    encoder: Encoder | None,
    goal: Goal,
    *,
    steps: int = 4000,
    seconds: float = 1e9,
    batch: int = 32,
    rate: float = 2e-3,
    seed: int = 0,
    sizes: tuple[int, int] = (32, 32),
    say: Callable[[str], None] = print,
) -> EdgeFilter:
    """A trained filter, after `steps` or `seconds`, whichever ends first.

    Every 10% of the steps a line says both costs, beside those of bilinear labels.
    """
    torch.manual_seed(seed)
    device, draw = bank.images.device, Draw(seed, bank.images.device)
    model = EdgeFilter(*sizes).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=1e-2)
    begun, sums = time.perf_counter(), torch.zeros(4, device=device)
    for step in range(steps):
        done = max(step / steps, (time.perf_counter() - begun) / seconds)
        if done >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1, (step + 1) / 200) * 0.5 * (1 + np.cos(np.pi * done))
        terms: list[Tensor] = []
        if goal != "features":
            terms += pieces_loss(model, bank, draw, batch)
        if goal != "pieces":
            assert encoder is not None
            terms += features_loss(model, bank, encoder, draw, batch)
        loss = torch.stack(terms[::2]).sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        sums[: len(terms)] += torch.stack(terms).detach()
        every = max(1, steps // 10)
        if (step + 1) % every == 0:
            shown = " ".join(f"{x / every:.4f}" for x in sums[: len(terms)].tolist())
            say(f"edges {goal} step {step + 1} filter/bilinear {shown} {time.perf_counter() - begun:.0f} s")
            sums.zero_()
    return model.eval().requires_grad_(False)


def save_filter(model: EdgeFilter, path: Path) -> None:
    """The weights in half precision, with what builds the network again."""
    halves = {name: value.half() for name, value in model.state_dict().items()}
    save_safetensors(halves, path, {name: str(value) for name, value in model.sizes.items()})


def main() -> None:
    """Train from the command line."""
    from tcore.device import choose_device
    from tcore.evaluation.encoders import load_encoder

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("frames", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--goal", choices=("pieces", "features", "both"), default="both")
    parser.add_argument("--encoder", default="default")
    parser.add_argument("--images", type=int, default=1600)
    parser.add_argument("--videos", type=int, default=150)
    given = parser.parse_args()
    device = choose_device("auto")
    bank = read_bank(given.frames, device, given.images, given.videos)
    encoder = None if given.goal == "pieces" else load_encoder(given.encoder).to(device)
    save_filter(train_filter(bank, encoder, given.goal, steps=given.steps, batch=given.batch), given.out)


if __name__ == "__main__":
    main()
