"""Trains the network from a box to its object (tcore/video/box_network.py) on scenes that are drawn here.

An object of up to nine parts (a trunk, others attached to it, often legs), decals on it, two other things
beside it, surfaces behind it and sometimes something before it, all with textures of the rendered videos.
`python experiments/box_scenes.py OUT.safetensors --scenes 54000 --steps 5600`.
"""

import argparse
import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from tcore.data.rendered_textures import draw_texture
from tcore.data.rendered_varied import draw_photograph
from tcore.video.box_network import EDGE, SIDE, BoxNetwork

MARGIN = EDGE / (SIDE - 2 * EDGE)
BEHIND, PARTS, OTHER, BEFORE, DECALS = 8, 9, 4, 2, 3  # shapes of each kind, at most
TURN = 2 * math.pi
RIGHT = math.pi / 2
Shapes = dict[str, Tensor]
"""Numbers of shapes by name, scenes x shapes each."""
Warp = tuple[Tensor, Tensor]


class Dice:
    """Random tensors of one generator."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def between(self, low: float, high: float, *shape: int) -> Tensor:
        """Evenly between two numbers."""
        return low + (high - low) * torch.rand(*shape, generator=self.generator)

    def normal(self, *shape: int) -> Tensor:
        """Of mean 0 and deviation 1."""
        return torch.randn(*shape, generator=self.generator)

    def whole(self, end: int, *shape: int) -> Tensor:
        """Whole numbers from 0, below `end`."""
        return torch.randint(0, end, shape, generator=self.generator)

    def chance(self, share: float, *shape: int) -> Tensor:
        """True as often as this share says."""
        return torch.rand(*shape, generator=self.generator) < share


def draw_tiles(count: int, seed: int) -> Tensor:
    """Textures of mean 0, at several scales."""
    rng, found = np.random.default_rng(seed), []
    for _ in range(count):
        draw = draw_photograph if rng.random() < 0.8 else draw_texture
        tile = torch.from_numpy(np.asarray(draw(rng, 128, np.full(3, 0.5)))).float()[None]
        for _ in range(2):
            zoom = np.exp(rng.uniform(np.log(0.7), np.log(4)))
            need = min(128, max(2, int(np.ceil(SIDE / zoom))))
            y, x = rng.integers(0, 128 - need + 1, 2)
            piece = F.interpolate(
                tile[..., y : y + need, x : x + need], (SIDE, SIDE), mode="bilinear", antialias=True
            )[0]
            found.append(piece - piece.mean(dim=(1, 2), keepdim=True))
    return torch.stack(found)


def draw_shapes(dice: Dice, scenes: int, count: int, rough: float) -> Shapes:
    """Outlines: mixtures of diamond, ellipse and rectangle, some of them rough."""
    size = (scenes, count)
    mix = 0.3 * dice.between(0, 1, *size, 3) ** 2 + 0.9 * F.one_hot(dice.whole(3, *size), 3)
    mix[..., 0] *= 0.6
    mix /= mix.sum(dim=-1, keepdim=True)
    phase, amount = dice.between(0, TURN, *size), rough * dice.between(0, 1, *size) ** 2
    shapes = {"diamond": mix[..., 0], "ellipse": mix[..., 1], "rectangle": mix[..., 2]}
    shapes |= {"cos": phase.cos(), "sin": phase.sin()}
    shapes |= {"hole": torch.zeros(size), "bend": torch.zeros(size)}
    shapes["taper"] = dice.between(-0.5, 0.5, *size) * dice.chance(0.5, *size)
    return shapes | {f"wave{k}": amount * dice.normal(*size) * 1.2 / k for k in (2, 3, 4, 5)}


def depth(shape: Shapes, x: Tensor, y: Tensor) -> Tensor:
    """How deep points lie in their shapes; negative outside."""
    x, y, cos, sin = x - shape["x"], y - shape["y"], shape["angle"].cos(), shape["angle"].sin()
    u, v = (x * cos + y * sin) / shape["long"], y * cos - x * sin
    v = v - shape["bend"] * shape["long"] * u * u
    v = v / (shape["short"] * (1 + shape["taper"] * u.clamp(-1.2, 1.2)))
    far = torch.hypot(u, v).clamp(min=1e-4)
    norm = shape["diamond"] * (u.abs() + v.abs()) + shape["ellipse"] * far
    norm = norm + shape["rectangle"] * torch.maximum(u.abs(), v.abs())
    one = c = torch.complex(u / far, v / far)
    radius = 1 + shape["wave5"] * (c.real * shape["sin"] - c.imag * shape["cos"])
    for k in (2, 3, 4):
        c = c * one
        radius = radius + shape[f"wave{k}"] * (c.real * shape["cos"] + c.imag * shape["sin"])
    hollow = torch.where(shape["hole"] > 0, norm - shape["hole"] * radius, torch.tensor(9.0))
    return torch.minimum(radius - norm, hollow) * torch.minimum(shape["long"], shape["short"])


def draw_parts(dice: Dice, scenes: int, count: int) -> Shapes:
    """An object: a trunk, and parts that grow out of it or of one another."""
    size = (scenes, count)
    parts = draw_shapes(dice, scenes, count, 0.25)
    parts |= {"x": torch.zeros(size), "y": torch.zeros(size), "angle": dice.between(0, TURN, *size)}
    parts["long"] = dice.between(0.1, 0.6, *size)
    parts["short"] = parts["long"] * dice.between(0.12, 0.9, *size)
    parts["bend"] = 0.25 * dice.normal(*size) * dice.chance(0.5, *size)
    parts["long"][:, 0] = dice.between(0.25, 0.8, scenes)
    parts["short"][:, 0] = parts["long"][:, 0] * dice.between(0.25, 1, scenes)
    level = RIGHT * dice.whole(2, scenes) + 0.2 * dice.normal(scenes)
    parts["angle"][:, 0] = torch.where(dice.chance(0.6, scenes), level, parts["angle"][:, 0])
    parts["hole"] = dice.between(0.5, 0.85, *size) * dice.chance(0.05, *size)
    parts["hole"][:, 0] = 0
    kept = 1 + (count * dice.between(0, 1, scenes) ** 1.3).long().clamp(max=count - 1)
    legged, down = dice.chance(0.55, scenes), RIGHT + 0.15 * dice.normal(scenes)
    length, width = dice.between(0.15, 0.6, scenes), dice.between(0.08, 0.5, scenes)
    for k in range(1, count):
        parent = (k * dice.between(0, 1, scenes) ** 2).long()
        held = {name: values.gather(1, parent[:, None])[:, 0] for name, values in parts.items()}
        around, out = dice.between(0, TURN, scenes), dice.between(0.5, 0.95, scenes)
        u = around.cos() * held["long"] * out
        v = around.sin() * held["short"] * out + held["bend"] * held["long"] * (around.cos() * out) ** 2
        x = held["x"] + u * held["angle"].cos() - v * held["angle"].sin()
        y = held["y"] + u * held["angle"].sin() + v * held["angle"].cos()
        leg = legged & dice.chance(0.5, scenes) & (y > parts["y"][:, 0]) & (parent == 0)
        away = torch.atan2(y - held["y"], x - held["x"]) + 0.5 * dice.normal(scenes)
        angle = torch.where(leg, down + 0.25 * dice.normal(scenes), away)
        parts["long"][:, k] = torch.where(leg, length * dice.between(0.8, 1.2, scenes), parts["long"][:, k])
        parts["short"][:, k] = torch.where(leg, length * width, parts["short"][:, k])
        parts["angle"][:, k] = angle
        parts["x"][:, k] = x + 0.75 * angle.cos() * parts["long"][:, k]
        parts["y"][:, k] = y + 0.75 * angle.sin() * parts["long"][:, k]
    return parts | {"gone": torch.arange(count) >= kept[:, None]}


def draw_behind(dice: Dice, scenes: int) -> Shapes:
    """Surfaces behind the object; the first two are often half planes."""
    size = (scenes, BEHIND)
    shapes, small = draw_shapes(dice, scenes, BEHIND, 0.4), dice.between(0, 1, *size) ** 0.7
    level = RIGHT * dice.whole(4, *size) + 0.08 * dice.normal(*size)
    shapes |= {"x": 1.3 * dice.normal(*size), "y": 1.3 * dice.normal(*size), "long": 2.5 * 0.12**small}
    shapes["angle"] = torch.where(dice.chance(0.6, *size), level, dice.between(0, TURN, *size))
    shapes["bend"] = 0.15 * dice.normal(*size)
    shapes["short"] = shapes["long"] * dice.between(0.06, 1, *size)
    for k, side in ((0, 3.0), (1, -3.0)):
        plane = {"long": torch.full((scenes,), 9.0), "short": torch.full((scenes,), 3.0)}
        plane |= {"angle": 0.1 * dice.normal(scenes) + math.pi * dice.whole(2, scenes)}
        plane |= {"x": dice.normal(scenes), "y": dice.between(-1, 1, scenes) + side}
        half = dice.chance(0.6, scenes)
        for name, values in plane.items():
            shapes[name][:, k] = torch.where(half, values, shapes[name][:, k])
    return shapes | {"gone": torch.arange(BEHIND) >= 1 + dice.whole(BEHIND, scenes)[:, None]}


def draw_other(dice: Dice, scenes: int) -> Shapes:
    """Another thing, beside the object."""
    parts, scale = draw_parts(dice, scenes, OTHER), dice.between(0.4, 1.3, scenes, 1)
    around, far = dice.between(0, TURN, scenes, 1), dice.between(0.4, 1.5, scenes, 1)
    for name in ("x", "y", "long", "short"):
        parts[name] = parts[name] * scale
    parts["x"], parts["y"] = parts["x"] + far * around.cos(), parts["y"] + 0.6 * far * around.sin()
    return parts | {"gone": parts["gone"] | dice.chance(0.5, scenes, 1)}


def draw_before(dice: Dice, scenes: int) -> Shapes:
    """What hides a part of the object: most of it upright and thin."""
    size = (scenes, BEFORE)
    shapes, upright = draw_shapes(dice, scenes, BEFORE, 0.2), RIGHT + 0.05 * dice.normal(*size)
    shapes |= {"x": 0.7 * dice.normal(*size), "y": 0.7 * dice.normal(*size)}
    shapes["angle"] = torch.where(dice.chance(0.7, *size), upright, dice.between(0, TURN, *size))
    shapes["long"] = dice.between(0.1, 4, *size)
    short = (shapes["long"] * dice.between(0.05, 0.6, *size)).clamp(max=0.35)
    shapes["short"] = short * torch.where(dice.chance(0.6, *size), 0.2, 1.0)
    return shapes | {"gone": dice.chance(0.8, *size)}


def draw_decals(dice: Dice, scenes: int) -> Shapes:
    """Spots on the object."""
    size = (scenes, DECALS)
    shapes = draw_shapes(dice, scenes, DECALS, 0.3)
    shapes |= {"x": 0.35 * dice.normal(*size), "y": 0.35 * dice.normal(*size)}
    shapes |= {"angle": dice.between(0, TURN, *size), "long": dice.between(0.05, 0.4, *size)}
    shapes["short"] = shapes["long"] * dice.between(0.15, 1, *size)
    return shapes | {"gone": dice.chance(0.5, *size)}


def measure(layers: list[Shapes], warp: Warp, x: Tensor, y: Tensor) -> list[Tensor]:
    """Depths of points in all shapes of all layers, everything bent a little."""
    places = torch.stack([x, y], dim=-1) / 3
    for knots, mode in zip(warp, ("bicubic", "bilinear"), strict=True):
        shift = F.grid_sample(knots, places, mode=mode, padding_mode="border", align_corners=True)
        x, y = x + shift[:, 0], y + shift[:, 1]
    found = []
    for shapes in layers:
        there = ~shapes["gone"]
        scene = there.nonzero()[:, 0]
        one = {name: values[there][:, None, None] for name, values in shapes.items()}
        whole = torch.full((*there.shape, *x.shape[1:]), -9.0)
        whole[there] = depth(one, x[scene], y[scene])
        found.append(whole)
    return found


def find_box(mask: Tensor, line: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """First and last x, first and last y of masks whose pixels lie at a line of places."""
    step, count = float(line[1] - line[0]), len(line)
    found = []
    for seen in (mask.any(dim=1), mask.any(dim=2)):
        index = torch.arange(count)
        found.append(line[torch.where(seen, index, count).amin(dim=1)] - step / 2)
        found.append(line[torch.where(seen, index, -1).amax(dim=1)] + step / 2)
    return found[0], found[1], found[2], found[3]


def blur(pictures: Tensor, sigma: Tensor) -> Tensor:
    """Every picture by its own amount, down and across."""
    count, channels, height, width = pictures.shape
    steps = torch.arange(-6, 7).float()
    for axis in (0, 1):
        kernel = torch.exp(-0.5 * (steps / sigma[:, axis, None].clamp(min=0.05)) ** 2)
        kernel = (kernel / kernel.sum(dim=1, keepdim=True)).repeat_interleave(channels, 0)[:, None]
        padded = F.pad(pictures, (0, 0, 6, 6) if axis == 0 else (6, 6, 0, 0), mode="replicate")
        flat = padded.flatten(0, 1)[None]
        kernel = kernel[..., None] if axis == 0 else kernel[:, :, None]
        pictures = F.conv2d(flat, kernel, groups=count * channels).view(count, channels, height, width)
    return pictures


class Painter:
    """Paints layers of shapes: colors of a palette, textures, and light that changes over each of them."""

    def __init__(self, dice: Dice, scenes: int, tiles: Tensor) -> None:
        self.dice, self.scenes, self.tiles = dice, scenes, tiles
        self.across = (torch.arange(SIDE) / SIDE - 0.5)[None, None, None, None, :]

    def palette(self, count: int) -> Tensor:
        """Colors, most of them rather gray."""
        dice, size = self.dice, (self.scenes, count)
        gray, spread = dice.between(0.03, 0.97, *size, 1), dice.between(0, 0.2, *size, 1)
        return gray + dice.normal(*size, 3) * spread

    def texture(self, count: int) -> Tensor:
        """Textures, faint or strong."""
        strength = self.dice.between(0, 1.4, self.scenes, count, 1, 1, 1) ** 1.5
        return self.tiles[self.dice.whole(len(self.tiles), self.scenes, count)] * strength

    def light(self, count: int, amount: float) -> Tensor:
        """Factors that change evenly over a picture."""
        size = (self.scenes, count, 1, 1, 1)
        down = self.across.transpose(3, 4)
        return 1 + amount * (self.dice.normal(*size) * self.across + self.dice.normal(*size) * down)

    def paint(
        self, under: Tensor, cover: Tensor, palette: Tensor, amount: float, same: Tensor | None = None
    ) -> Tensor:
        """Shapes over what is there; in some scenes all of them have the `same` texture."""
        count, kinds = cover.shape[1], palette.shape[1]
        index = (self.dice.between(0, 1, self.scenes, count) * kinds).long().clamp(max=kinds - 1)
        colors = palette.gather(1, index[..., None].expand(-1, -1, 3))
        colors = colors + 0.04 * self.dice.normal(self.scenes, count, 3)
        texture, light = self.texture(count), self.light(count, amount)
        if same is not None:
            texture = torch.where(same[:, None, None, None, None], texture[:, :1], texture)
        for k in range(count):
            surface = (colors[:, k, :, None, None] + texture[:, k]) * light[:, k]
            under = torch.lerp(under, surface, cover[:, k, None])
        return under


def draw_batch(dice: Dice, scenes: int, tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Pictures of boxes with what is around them, and the masks of their objects, as bytes."""
    layers = [draw_behind(dice, scenes), draw_other(dice, scenes), draw_other(dice, scenes)]
    layers += [draw_parts(dice, scenes, PARTS), draw_before(dice, scenes), draw_decals(dice, scenes)]
    coarse = dice.normal(scenes, 2, 4, 4) * dice.between(0, 0.12, scenes, 1, 1, 1)
    warp = (
        coarse * dice.chance(0.7, scenes, 1, 1, 1),
        0.03 * dice.normal(scenes, 2, 9, 9) * dice.chance(0.5, scenes, 1, 1, 1),
    )
    line = (torch.arange(40) + 0.5) / 40 * 5 - 2.5
    whole = (line.expand(scenes, 40, 40), line[:, None].expand(scenes, 40, 40))
    depths = measure(layers, warp, *whole)
    seen = (depths[3].amax(dim=1) > 0) & ~(depths[4].amax(dim=1) > 0)
    good = seen.flatten(1).sum(dim=1) > 8
    x0, x1, y0, y1 = (ends[:, None, None] for ends in find_box(seen | ~good[:, None, None], line))
    cells = (torch.arange(SIDE) + 0.5) / SIDE * (1 + 2 * MARGIN) - MARGIN
    x = (x0 + cells * (x1 - x0)).expand(scenes, SIDE, SIDE)
    y = (y0 + cells[:, None] * (y1 - y0)).expand(scenes, SIDE, SIDE)
    pixel = torch.maximum(x1 - x0, y1 - y0)[:, None] * (1 + 2 * MARGIN) / SIDE
    covers = [(one / pixel + 0.5).clamp(0, 1) for one in measure(layers, warp, x, y)]
    pictures = paint_scenes(Painter(dice, scenes, tiles), covers, (x - x0) / (x1 - x0), (y - y0) / (y1 - y0))
    masks = covers[3].amax(dim=1) * (1 - covers[4].amax(dim=1))
    good &= masks.flatten(1).mean(dim=1) > 0.04
    return (pictures[good] * 255).round().byte(), (masks[good] * 255).round().byte()


def paint_scenes(painter: Painter, covers: list[Tensor], x: Tensor, y: Tensor) -> Tensor:
    """From back to front: surfaces, other things, a shadow, the object and its decals, what hides it."""
    dice, scenes = painter.dice, painter.scenes

    def each(low: float, high: float) -> Tensor:
        return dice.between(low, high, scenes, 1, 1)

    behind, own = painter.palette(5), painter.palette(4)
    # Some colors of the object are also around it; some objects have one color.
    picked = dice.whole(5, scenes, 4)[..., None].expand(-1, -1, 3)
    near = behind.gather(1, picked) + dice.normal(scenes, 4, 3) * dice.between(0.02, 0.12, scenes, 1, 1)
    own = torch.where(dice.chance(0.3, scenes, 4, 1), near, own)
    plain = own[:, :1] + 0.05 * dice.normal(scenes, 4, 3)
    plain[:, 0] = own[:, 0]
    own = torch.where(dice.chance(0.45, scenes, 1, 1), plain, own)

    pictures = (behind[:, 0, :, None, None] + painter.texture(1)[:, 0]) * painter.light(1, 0.4)[:, 0]
    pictures = painter.paint(pictures, covers[0], behind, 0.3)
    for cover in covers[1:3]:
        palette = torch.where(dice.chance(0.3, scenes, 1, 1), own, painter.palette(4))
        pictures = painter.paint(pictures, cover, palette, 0.3)
    shadow = (
        1 - ((x - each(0.3, 0.7)) / each(0.3, 0.7)) ** 2 - ((y - each(0.88, 1.02)) / each(0.03, 0.2)) ** 2
    )
    dark = (4 * shadow).clamp(0, 1) * each(0.2, 0.75) * dice.chance(0.4, scenes, 1, 1)
    pictures = pictures * (1 - dark)[:, None]
    sigma = dice.between(0, 1.5, scenes, 2) * dice.chance(0.5, scenes, 2)
    sigma[:, 1] += dice.between(0, 4, scenes) * dice.chance(0.2, scenes)  # a camera that follows the object
    pictures = blur(pictures, sigma)

    body = covers[3].amax(dim=1, keepdim=True)
    front = painter.paint(pictures, covers[3], own, 0.4, same=dice.chance(0.5, scenes))
    palette = torch.where(dice.chance(0.5, scenes, 4, 1), behind[:, :4], painter.palette(4))
    front = painter.paint(front, covers[5] * body, palette, 0.3)
    pictures = torch.lerp(pictures, front * painter.light(1, 0.5)[:, 0], body)
    pictures = painter.paint(pictures, covers[4], painter.palette(4), 0.3)
    focus = dice.between(0, 0.8, scenes) * dice.chance(0.7, scenes)
    pictures = blur(pictures, focus[:, None].expand(-1, 2)) * painter.light(1, 0.25)[:, 0]
    pictures = (pictures * each(0.75, 1.2)[:, None]).clamp(0, 1)
    return (pictures + dice.normal(*pictures.shape) * each(0, 0.03)[:, None]).clamp(0, 1)


def vary(dice: Dice, pictures: Tensor, masks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Boxes that are not quite tight, mirror images, other colors, and frames that end beside the box."""
    count = len(pictures)
    move = torch.zeros(count, 2, 3)
    scale = 1 + 0.03 * dice.normal(count, 2)
    move[:, 0, 0] = scale[:, 0] * torch.where(dice.chance(0.5, count), -1.0, 1.0)
    move[:, 1, 1], move[:, :, 2] = scale[:, 1], 0.02 * dice.normal(count, 2)
    grid = F.affine_grid(move, [count, 1, SIDE, SIDE], align_corners=False)
    both = torch.cat([pictures, masks[:, None]], dim=1).float() / 255
    both = F.grid_sample(both, grid, padding_mode="reflection", align_corners=False)
    colors = both[:, :3]
    order = torch.rand(count, 3, generator=dice.generator).argsort(dim=1)[:, :, None, None]
    colors = torch.where(dice.chance(0.3, count, 1, 1, 1), colors.gather(1, order.expand_as(colors)), colors)
    colors = torch.lerp(colors.mean(dim=1, keepdim=True), colors, dice.between(0, 1.1, count, 1, 1, 1))
    colors = colors.clamp(1e-3, 1) ** torch.exp(0.3 * dice.normal(count, 1, 1, 1))
    colors = (colors - 0.5) * dice.between(0.6, 1.2, count, 1, 1, 1) + 0.5
    colors = (colors + 0.1 * dice.normal(count, 1, 1, 1)).clamp(0, 1)
    ends = (EDGE * dice.between(0, 1, count, 4)).long() * dice.chance(0.12, count, 4)
    line = torch.arange(SIDE)
    columns = (line >= ends[:, :1]) & (line < SIDE - ends[:, 1:2])
    rows = (line >= ends[:, 2:3]) & (line < SIDE - ends[:, 3:])
    valid = (rows[:, :, None] & columns[:, None]).float()[:, None]
    return colors * valid, valid, both[:, 3]


def train(pictures: Tensor, masks: Tensor, steps: int, batch: int, dice: Dice) -> dict[str, Tensor]:
    """The mean of the last weights, from cross entropy and overlap within the box."""
    network = BoxNetwork()
    mean = {name: value.clone() for name, value in network.state_dict().items()}
    optimizer = torch.optim.AdamW(network.parameters(), 2e-3, betas=(0.9, 0.98), weight_decay=0.01)
    box = slice(EDGE, SIDE - EDGE)
    for step in range(steps):
        rate = min(1.0, (step + 1) / 100) * (0.02 + 0.49 * (1 + math.cos(math.pi * step / steps)))
        optimizer.param_groups[0]["lr"] = 2e-3 * rate
        index = dice.whole(len(pictures), batch)
        colors, valid, truth = vary(dice, pictures[index], masks[index])
        odds, truth = network(colors, valid)[:, box, box], truth[:, box, box]
        soft = odds.sigmoid()
        both, either = (soft * truth).sum(dim=(1, 2)), (soft + truth - soft * truth).sum(dim=(1, 2))
        overlap = (both / either.clamp(min=1)).mean()
        loss = F.binary_cross_entropy_with_logits(odds, truth) + 1 - overlap
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        for name, value in network.state_dict().items():
            if value.is_floating_point():
                mean[name].lerp_(value, max(0.005, 1 / ((step + 1) / 10 + 1)))
        if (step + 1) % 100 == 0:
            print(
                f"step {step + 1}: loss {float(loss.detach()):.3f}, overlap {float(overlap.detach()):.3f}",
                flush=True,
            )
    return mean


def main() -> None:
    """Draw the scenes, train, and store the weights."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--scenes", type=int, default=54_000)
    parser.add_argument("--steps", type=int, default=5_600)
    parser.add_argument("--batch", type=int, default=24)
    parser.add_argument("--tiles", type=int, default=400)
    options = parser.parse_args()
    torch.set_flush_denormal(True)
    torch.manual_seed(0)
    dice, tiles = Dice(0), draw_tiles(options.tiles, 0)
    pictures, masks = list[Tensor](), list[Tensor]()
    while sum(map(len, pictures)) < options.scenes:
        some, their = draw_batch(dice, 32, tiles)
        pictures.append(some)
        masks.append(their)
    weights = train(torch.cat(pictures), torch.cat(masks), options.steps, options.batch, dice)
    save_file(
        {name: value.half() if value.is_floating_point() else value for name, value in weights.items()},
        options.out,
    )


if __name__ == "__main__":
    main()
