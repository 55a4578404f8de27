"""Does the matching module match? Where masked patches look, in frames whose motion or objects are known.

The share of cross-attention that a masked patch puts on its true place (cells within one patch of it) and on
its own object, next to the share of all cells that these are (chance) and to plain similarity of features,
for which the current frame is not masked. Most patches do not move far, so a module that knows only positions
is many times better than chance; patches that moved by more than one patch show whether it matches.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64, UInt8
from torch import Tensor

from tcore.config import Config
from tcore.data.masking import sample_masks
from tcore.data.render import normalize
from tcore.data.rendered import find_scene, follow, render_video
from tcore.methods.matching import PatchMatchingModule
from tcore.methods.motion import Scene, view_scene
from tcore.methods.settings import TCoReSettings
from tcore.methods.settings_groups import MaskingConfig
from tcore.methods.tcore import build_matching
from tcore.model.vit import VisionTransformer, build_vit

HELDOUT = 7  # seed of the rendered videos; settings may be chosen on them, scores use others
MASKED = (0.4, 0.5)  # share of the current frame that is masked
SHARPNESS = 1 / 0.07  # of the softmax over cosines that stands for plain similarity
CROSS, PLAIN, STILL = "cross-attention", "feature similarity", "same position"  # ways of looking, by name
NEAR = 1.0  # distance in patches that counts as the true place


class Matcher(NamedTuple):
    """Student backbone and matching module."""

    backbone: VisionTransformer
    match: PatchMatchingModule

    def scene(self, masked: Bool[Tensor, "b n"], grid: tuple[int, int]) -> Scene | None:
        """What the module must know of masked frames beside their patches."""
        return view_scene(self.backbone, masked, grid) if self.match.needs_scene else None


class KnownMotion(NamedTuple):
    """Past, current and future frame; what the middle of each patch shows, and where it is in the others."""

    frames: UInt8[np.ndarray, "3 height width 3"]
    mask: Bool[np.ndarray, "rows columns"]
    objects: UInt8[np.ndarray, "3 n"]
    """Id of the object in the middle of a patch; 0 is the ground."""
    places: Float[np.ndarray, "2 n 2"] | None
    """Row and column in past and future, in patches; NaN where hidden; None where no motion is known."""


class Looked(NamedTuple):
    """Shares of attention, means over masked patches; NaN where no patch counts."""

    place: float
    place_chance: float
    moved: float
    """Share on the true place of patches that moved by more than one patch; the same position has none."""
    moved_chance: float
    object: float
    object_chance: float
    hits: float
    """Share of the patches that attend most to a cell at their true place."""

    def times_chance(self) -> dict[str, float]:
        """Shares on the true place in multiples of chance: all patches, and moved ones."""
        return {"place": self.place / self.place_chance, "moved": self.moved / self.moved_chance}


def build_matcher(config: Config, weights: Mapping[str, Tensor]) -> Matcher:
    """Student backbone and matching module of a run of T-CoRe, from what it saves of them."""
    assert isinstance(config.method, TCoReSettings)
    with torch.random.fork_rng(devices=[]):
        backbone = build_vit(config.vit, config.views.global_size)
        match = build_matching(config.method, config.vit.dim)
    for name, module in (("backbone", backbone), ("match", match)):
        own = {key.removeprefix(f"{name}."): x for key, x in weights.items() if key.startswith(f"{name}.")}
        module.load_state_dict(own)
        module.eval().requires_grad_(False)
    return Matcher(backbone, match)


def rendered_motion(count: int, size: int, patch: int) -> Iterator[KnownMotion]:
    """Held-out rendered videos, offsets as in training: a fifth of the video, give or take a frame."""
    side = size // patch
    middle = (np.arange(side) + 0.5) * patch - 0.5
    points = np.stack(np.meshgrid(middle, middle, indexing="xy"), -1).reshape(-1, 2)  # x, y
    for number in range(count):
        video = render_video(HELDOUT, number, split="heldout", num_frames=20, size=size)
        scene = find_scene(HELDOUT, number, split="heldout")
        rng = np.random.default_rng((HELDOUT, number))
        now, before, after = 10, *(int(x) for x in rng.integers(3, 5, size=2, endpoint=True))
        chosen = (now - before, now, now + after)
        places = [follow(scene, video, now, chosen[side], points) for side in (0, 2)]
        rows, columns = (points[:, axis].round().astype(int) for axis in (1, 0))
        yield KnownMotion(
            video.frames[list(chosen)],
            draw_mask((side, side), rng),
            video.objects[list(chosen)][:, rows, columns],
            (np.stack(places)[..., ::-1] + 0.5) / patch - 0.5,
        )


def draw_mask(
    grid: tuple[int, int], rng: np.random.Generator, ratio: tuple[float, float] = MASKED
) -> Bool[np.ndarray, "rows columns"]:
    """Mask blocks as in training, on a grid of any shape."""
    side = max(grid)
    masks = sample_masks(rng, 2, side, MaskingConfig(ratio=ratio))
    return masks[masks.any(axis=1)][0].reshape(side, side)[: grid[0], : grid[1]].copy()


class Tally:
    """Collects shares over masked patches."""

    def __init__(self) -> None:
        self.place: list[Tensor] = []
        self.object: list[Tensor] = []

    def add(
        self,
        attention: Float[Tensor, "q n"],
        own: Int64[Tensor, " q"],
        near: Bool[Tensor, "q n"] | None,
        same: Bool[Tensor, "q n"],
    ) -> None:
        """Add the attention of some patches; rows of `near` and `same` without any cell do not count."""
        if near is not None:
            known, most = near.any(dim=1), attention.argmax(dim=1)
            hits, moved = (near.gather(1, cell[:, None])[:, 0].float() for cell in (most, own))
            share = (attention * near).sum(dim=1)
            rows = torch.stack([share, near.float().mean(dim=1), hits, 1 - moved], dim=1)
            self.place.append(rows[known])
        rows = torch.stack([(attention * same).sum(dim=1), same.float().mean(dim=1)], dim=1)
        self.object.append(rows[same.any(dim=1)])

    def result(self) -> Looked:
        """The means."""
        none = torch.empty(0, 4)  # whose mean is NaN
        rows = torch.cat([none, *self.place])
        place, place_chance, hits, _ = rows.mean(dim=0).tolist()
        moved, moved_chance, *_ = rows[rows[:, 3] > 0].mean(dim=0).tolist()
        own, own_chance = torch.cat([none[:, :2], *self.object]).mean(dim=0).tolist()
        return Looked(place, place_chance, moved, moved_chance, own, own_chance, hits)


class Attention(NamedTuple):
    """Where the masked patches of a frame look in the past or the future, and where they should."""

    cross: Float[Tensor, "q n"]
    """Cross-attention, mean over heads."""
    plain: Float[Tensor, "q n"]
    """Softmax over cosines of features; the current frame is not masked for these."""
    near: Bool[Tensor, "q n"] | None
    same: Bool[Tensor, "q n"]


@torch.no_grad()
def look(matcher: Matcher, sample: KnownMotion) -> list[Attention]:
    """Attention of the masked patches over the past, and over the future."""
    device = next(matcher.match.parameters()).device
    images = normalize(torch.from_numpy(sample.frames).to(device).permute(0, 3, 1, 2).float() / 255)
    mask = torch.from_numpy(sample.mask.reshape(1, -1)).to(device)
    current = matcher.backbone(images[1:2], mask).patches
    patches = matcher.backbone(images).patches
    rows = mask[0].nonzero()[:, 0]
    scene = matcher.scene(mask, (sample.mask.shape[0], sample.mask.shape[1]))
    unit = torch.nn.functional.normalize(patches, dim=-1)
    found = []
    for side, index in enumerate((0, 2)):
        heads = matcher.match.cross_attention(current, patches[index : index + 1], scene)[0]
        cross = heads.mean(dim=0)[rows]
        plain = (SHARPNESS * unit[1][rows] @ unit[index].T).softmax(dim=-1)
        near, same = _truth(sample, side, index, rows.cpu())
        found.append(Attention(cross.float().cpu(), plain.float().cpu(), near, same))
    return found


def measure_matching(matcher: Matcher, samples: Iterable[KnownMotion]) -> dict[str, Looked]:
    """Where masked patches look: by cross-attention, by similarity of features, or if nothing moved."""
    tallies = {name: Tally() for name in (CROSS, PLAIN, STILL)}
    for sample in samples:
        cells = torch.from_numpy(np.flatnonzero(sample.mask))
        own = torch.eye(sample.mask.size)[cells]
        for one in look(matcher, sample):
            for tally, attention in zip(tallies.values(), (one.cross, one.plain, own), strict=True):
                tally.add(attention, cells, one.near, one.same)
    return {name: tally.result() for name, tally in tallies.items()}


def _truth(sample: KnownMotion, side: int, index: int, rows: Tensor) -> tuple[Tensor | None, Tensor]:
    """Which cells of past or future are near the true place of these patches, and which show their object."""
    objects = torch.from_numpy(sample.objects)
    same = (objects[1][rows, None] == objects[index]) & (objects[1][rows, None] > 0)
    if sample.places is None:
        return None, same
    grid = torch.from_numpy(np.argwhere(np.ones_like(sample.mask)).astype(np.float64))
    places = torch.from_numpy(sample.places[side])[rows]
    near = (places[:, None] - grid).norm(dim=-1) <= NEAR  # false where the place is not known
    return near, same


def describe(found: Mapping[str, Looked]) -> list[str]:
    """The shares as lines for a person."""
    lines = []
    for name, looked in found.items():
        place = ""
        if not math.isnan(looked.place):
            times = looked.times_chance()
            place = (
                f"true place {looked.place:.1%} ({times['place']:.1f} times chance), if moved "
                f"{looked.moved:.1%} ({times['moved']:.1f} times); "
            )
        lines.append(f"{name}: {place}own object {looked.object:.1%} (chance {looked.object_chance:.1%})")
    return lines
