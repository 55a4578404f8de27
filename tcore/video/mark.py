"""Marking an object: a box, clicks, a scribble or a rough brush becomes its mask.

Of a box, a small network says where in it the object is likely to be. Colors and patch features of the frame
are sorted into a few kinds each; how often a kind occurs on the object and around it says what a pixel looks
like (as in GrabCut, Rother et al., SIGGRAPH 2004). A random walk between neighboring pixels (Grady, TPAMI
2006) carries that along, less across edges; both are repeated. Where frames right before and after are
given, motion beside the background's is sorted into kinds in the same way.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tcore.data.arrays import FrameLike, as_frame, as_mask, as_points
from tcore.data.images import Frame
from tcore.errors import InputError
from tcore.evaluation.edges import follow_colors, window_means
from tcore.evaluation.encoder import Encoder
from tcore.evaluation.encoders import DEFAULT, as_encoder
from tcore.evaluation.resize import Size, bilinear
from tcore.evaluation.run_clip import encode
from tcore.text import format_size
from tcore.video.box_network import likely_in_box
from tcore.video.motion import Motion, find_motion, sample
from tcore.video.outlines import bounds

MaskPixels = Bool[np.ndarray, "rows columns"]
Plane = Float[Tensor, "height width"]

SHORT_SIDE = 30  # cells of the grid of features along the short side of a frame
SIDE = 96  # pixels along the long side of the stretch that is walked over
MARGIN = 0.25  # around the object, in sides of its box: what background looks like
KINDS = 48  # of colors, and of features
CHANNELS = 16  # principal components of the features
ROUNDS = 5
STEPS = 30  # of conjugate gradients
BY_MOTION = 2.0  # how much motion counts beside colors
MOVES = 1.25  # from which on a pixel moves otherwise than the background; see Motion
LEAN = 1.0  # log odds of what does
PULL = 0.03  # of what a pixel looks like, against its neighbors
FIXED = 1e3  # pull of what was said: clicks, scribbles, and all outside of the box
EVEN = 0.5  # share of each histogram that is spread over all kinds
CHANCE = 0.4  # from which on a pixel belongs to the object
SPOT = 0.012  # radius of a click, in short sides of the frame
NEAR = 0.15  # how far from a click its object is expected to reach, in short sides of the frame


@dataclass(frozen=True)
class Mark:
    """An object by its name, and what was drawn to mark it."""

    name: str
    box: tuple[float, float, float, float] | None = None
    clicks: tuple[tuple[float, float], ...] = ()
    clicks_not: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class Hints:
    """What was said about an object: pixels where it may be, how likely, where it is, and where it is not."""

    inside: MaskPixels
    likely: Float[np.ndarray, "rows columns"]
    leaning: Float[np.ndarray, "rows columns"]
    """Log odds of a place that is closer to what is not the object; 0 elsewhere."""
    is_object: MaskPixels
    is_not: MaskPixels
    trust: float
    """How much `likely` counts beside what a pixel looks like."""


class Marker:
    """A frame whose objects are being marked: its features are computed once, for any number of marks."""

    def __init__(self, frame: Frame, encoder: Encoder, nearby: Sequence[np.ndarray] = ()) -> None:
        encoder.need_features()
        self.frame, size = frame, (frame.shape[0], frame.shape[1])
        self._nearby = nearby
        for other in nearby:
            if other.shape != frame.shape:
                found, wanted = format_size(*other.shape[:2]), format_size(*size)
                raise InputError(f"a nearby frame is {found}, the marked one {wanted}: need one size.")
        patch = encoder.patch_size
        rows, columns = (max(1, round(SHORT_SIDE * side / min(size))) * patch for side in size)
        features = encode(encoder, frame, (rows, columns), smooth=True)
        self._features = F.normalize(features, dim=0).cpu()
        self._pixels = torch.from_numpy(frame.copy()).permute(2, 0, 1).float() / 255

    def mark(
        self,
        *,
        box: Any = None,
        clicks: Any = (),
        clicks_not: Any = (),
        scribble: Any = None,
        brush: Any = None,
    ) -> MaskPixels:
        """The object in a box, at the clicks, under a scribble or under a rough brush; see `mark`."""
        size = (self.frame.shape[0], self.frame.shape[1])
        boxes = [] if box is None else as_points("box", box, 4)
        clicks, clicks_not = as_points("clicks", clicks), as_points("clicks_not", clicks_not)
        scribble, brush = (None if one is None else as_mask(one) for one in (scribble, brush))
        hints = read_hints(size, boxes, clicks, clicks_not, scribble, brush)
        if boxes and brush is None:
            soft = np.max([likely_in_box(self._pixels, (x, y, w, h)) for x, y, w, h in boxes], axis=0)
            hints = replace(hints, likely=np.where(hints.inside, soft, 0), trust=1.0)
        found = self._refine(hints, hints.inside)
        if box is None and brush is None and found.any():
            # Where the object is was not said: look once more, closely.
            found = self._refine(replace(hints, likely=0.9 * found.astype(np.float32)), found)
        return found

    def _refine(self, hints: Hints, around: MaskPixels) -> MaskPixels:
        """The object, from what was said, in a stretch of the frame around some pixels."""
        place = top, bottom, left, right = stretch(around)
        part = (slice(top, bottom), slice(left, right))
        scale = min(1.0, SIDE / max(bottom - top, right - left))
        size = (max(2, round(scale * (bottom - top))), max(2, round(scale * (right - left))))

        def small(mask: np.ndarray) -> Plane:
            return F.interpolate(
                torch.from_numpy(mask[part].astype(np.float32))[None, None], size, mode="area"
            )[0, 0]

        pixels = F.interpolate(self._pixels[None, :, *part], size, mode="area")[0]
        height, width = hints.inside.shape
        features = sample(self._features, (0, height, 0, width), place, size)
        above, before, below, after = bounds(around)
        motions = [
            find_motion(self.frame, other, (above, below, before, after), place, size)
            for other in self._nearby
        ]
        inside, likely = small(hints.inside) > 0.5, small(hints.likely)
        sure, never = small(hints.is_object) > 0, small(hints.is_not) > 0
        leaning = small(hints.leaning)
        soft = walk_rounds(
            pixels, features, inside, likely, hints.trust, leaning, sure, never & ~sure, motions
        )
        if sure.any():
            soft = soft * connected(soft > 0.5, sure)
        found = np.zeros(hints.inside.shape, dtype=bool)
        found[part] = fine_edges(soft, self._pixels[:, *part]).numpy() > CHANCE
        return (found & hints.inside | hints.is_object) & ~hints.is_not


def mark(
    frame: FrameLike,
    encoder: Encoder | str | Path = DEFAULT,
    *,
    box: Any = None,
    clicks: Any = (),
    clicks_not: Any = (),
    scribble: Any = None,
    brush: Any = None,
    nearby: Sequence[FrameLike] = (),
) -> MaskPixels:
    """The mask of an object of a frame, from a box, clicks, a scribble or a brush.

    A `box` is x, y, width and height. `clicks` (x, y each) are on the object, `clicks_not` beside it. A
    `scribble` is a mask of some pixels of the object, a `brush` one that covers all of it, roughly. They may
    be combined. `nearby` are frames of the same video, best those right before and after: an object that
    moves otherwise than the background is told from it. For several marks on one frame,
    `tcore.video.mark.Marker` computes its features once.
    """
    marker = Marker(as_frame(frame), as_encoder(encoder), [as_frame(other) for other in nearby])
    return marker.mark(box=box, clicks=clicks, clicks_not=clicks_not, scribble=scribble, brush=brush)


def read_hints(
    size: Size,
    boxes: Sequence[Sequence[float]],
    clicks: Sequence[Sequence[float]],
    clicks_not: Sequence[Sequence[float]],
    scribble: MaskPixels | None,
    brush: MaskPixels | None,
) -> Hints:
    """Masks of what was said; what lies outside of the frame is refused."""
    if not boxes and not clicks and scribble is None and brush is None:
        raise InputError("nothing is marked: give a box, clicks on the object, a scribble or a brush.")
    height, width = size
    y, x = np.mgrid[:height, :width].astype(np.float32)
    spots = {True: np.zeros(size, dtype=bool), False: np.zeros(size, dtype=bool)}
    near = {True: np.zeros(size, dtype=np.float32), False: np.zeros(size, dtype=np.float32)}
    for on, places in ((True, clicks), (False, clicks_not)):
        for place in places:
            column, row = place
            if not (-0.5 <= column < width - 0.5 and -0.5 <= row < height - 0.5):
                raise InputError(
                    f"click at x {column:g}, y {row:g} is outside of the frame, "
                    f"which is {width} wide and {height} high."
                )
            far = ((x - column) ** 2 + (y - row) ** 2) / min(size) ** 2
            spots[on] |= far <= max(SPOT, 0.75 / min(size)) ** 2
            near[on] = np.maximum(near[on], np.exp(-far / (2 * NEAR**2)))
    for name, mask in (("scribble", scribble), ("brush", brush)):
        if mask is not None and (mask.shape != size or not mask.any()):
            what = "is empty" if mask.shape == size else f"is {format_size(*mask.shape)}"
            raise InputError(f"the {name} {what}: need a mask of {format_size(*size)} with some pixels set.")
    if scribble is not None:
        spots[True] |= scribble
        near[True] = np.maximum(near[True], spread(scribble, round(NEAR * min(size))))
    inside, likely = np.ones(size, dtype=bool), near[True]
    leaning = np.zeros(size, dtype=np.float32)
    if clicks_not and near[True].any():
        leaning = 2 * np.log((near[True] + 0.1) / (near[False] + 0.1)).clip(max=0)
    for left, top, wide, high in boxes:
        across, down = x + 0.5 - left, y + 0.5 - top
        inside &= (across > 0) & (across < wide) & (down > 0) & (down < high)
        if not inside.any():
            raise InputError(
                f"box {left:g} {top:g} {wide:g} {high:g} (x, y, width, height) holds no pixel of the frame, "
                f"which is {width} wide and {height} high."
            )
        across, down = 2 * across / wide - 1, 2 * down / high - 1
        likely = np.maximum(likely, 0.9 * np.exp(-0.5 * (across**2 + down**2)))
    if brush is not None:
        inside &= brush
        likely = np.maximum(likely * brush, 0.9 * brush)
    likely = np.where(inside, likely, 0).astype(np.float32)
    trust = 0.3 if boxes or brush is not None else 1.0
    return Hints(inside, likely, leaning, spots[True] & inside, spots[False], trust)


def spread(mask: MaskPixels, half: int) -> Float[np.ndarray, "rows columns"]:
    """A mask that fades out around its pixels, 1 at most."""
    down, across = (window_means(length, half) for length in mask.shape)
    soft = torch.from_numpy(mask.astype(np.float32))
    for _ in range(2):
        soft = down @ soft @ across.T
    return np.asarray(soft / soft.max())


def connected(mask: Bool[Tensor, "rows columns"], seeds: Bool[Tensor, "rows columns"]) -> Tensor:
    """The parts of a mask that hold a seed."""
    found, before = seeds, -1
    while (count := int(found.sum())) != before:
        before = count
        for _ in range(8):
            found = (F.max_pool2d(found[None].float(), 3, 1, 1)[0] > 0) & (mask | seeds)
    return found


def stretch(around: MaskPixels) -> tuple[int, int, int, int]:
    """Rows and columns from and to: the box of a mask, with a margin."""
    top, left, bottom, right = bounds(around)
    found = []
    for first, last, length in ((top, bottom, around.shape[0]), (left, right, around.shape[1])):
        margin = max(12, round(MARGIN * (last - first)))
        found += [max(0, first - margin), min(length, last + margin)]
    return found[0], found[1], found[2], found[3]


def walk_rounds(
    pixels: Float[Tensor, "3 rows columns"],
    features: Float[Tensor, "channels rows columns"],
    inside: Bool[Tensor, "rows columns"],
    likely: Float[Tensor, "rows columns"],
    trust: float,
    leaning: Float[Tensor, "rows columns"],
    sure: Bool[Tensor, "rows columns"],
    never: Bool[Tensor, "rows columns"],
    motions: Sequence[Motion] = (),
) -> Float[Tensor, "rows columns"]:
    """How much every pixel belongs to the object: what it looks like and where it is, in turns."""
    shape = (inside.shape[0], inside.shape[1])
    motions = [weigh_motion(motion, likely, inside) for motion in motions]
    likely = likely_by_motion(likely, inside, motions)
    colors, places = opponent(pixels), principal(features)
    kinds = [sort_kinds(planes.flatten(1).T) for planes in (colors, places)]
    moves = [(sort_kinds(motion.beside.flatten(1).T), motion.sure.flatten()) for motion in motions]
    links = [link(colors, places, step) for step in STEPS_TO]
    fixed = ~inside | sure | never
    pull = torch.where(fixed, FIXED, PULL)
    on = torch.where(sure, 1.0, likely * inside * ~never)
    off = torch.where(inside & ~never, 0.0, 1.0)
    if trust == 1:  # background is where the object is not expected
        off = torch.where(sure, 0.0, 1 - on)
    found, sides = on, split_sides(inside)
    # An object lies around its clicks, or where the network expects it in the box.
    place = trust * torch.logit(likely.clamp(0.05, 0.95)).flatten()
    for turn in range(ROUNDS):
        offs = [off, *sides] if turn or trust == 1 else (sides or [off])
        by_color, by_feature = (
            compare(kind, on.flatten(), [one.flatten() for one in offs]) for kind in kinds
        )
        odds = by_color + 0.5 * by_feature + place
        if moves:
            odds = odds + BY_MOTION * compare_motion(moves, on.flatten(), [one.flatten() for one in offs])
        target = torch.where(fixed, sure.float(), torch.sigmoid(odds.unflatten(0, shape) + leaning))
        found = walk(links, pull, target, target).clamp(0, 1)
        on, off = found, 1 - found
    return found


def opponent(pixels: Float[Tensor, "3 rows columns"]) -> Float[Tensor, "3 rows columns"]:
    """Brightness and two differences of colors."""
    red, green, blue = pixels
    return torch.stack([pixels.mean(dim=0), 0.8 * (red - blue), 0.8 * (green - (red + blue) / 2)])


def principal(features: Float[Tensor, "channels rows columns"]) -> Float[Tensor, "few rows columns"]:
    """The principal components of features."""
    flat = features.flatten(1)
    flat = flat - flat.mean(dim=1, keepdim=True)
    _, axes = torch.linalg.eigh(flat @ flat.T)
    return (axes[:, -CHANNELS:].T @ flat).unflatten(1, features.shape[1:])


def sort_kinds(values: Float[Tensor, "pixels channels"]) -> Int[Tensor, " pixels"]:
    """The kind of every pixel: k-means from centers that are far apart."""
    values = values / values.std().clamp(min=1e-6)
    some = values[:: max(1, len(values) // 2000)]
    centers = some[:1]
    far = torch.cdist(some, centers)[:, 0]
    for _ in range(min(KINDS, len(some)) - 1):
        centers = torch.cat([centers, some[far.argmax()][None]])
        far = torch.minimum(far, torch.cdist(some, centers[-1:])[:, 0])
    for _ in range(8):
        member = F.one_hot(torch.cdist(some, centers).argmin(dim=1), len(centers)).float()
        count = member.sum(dim=0)[:, None]
        centers = torch.where(count > 0, member.T @ some / count.clamp(min=1), centers)
    return torch.cdist(values, centers).argmin(dim=1)


def split_sides(inside: Bool[Tensor, "rows columns"]) -> list[Plane]:
    """What lies left, right, above and below of a region."""
    if inside.all() or not inside.any():
        return []
    top, left, bottom, right = bounds(inside.numpy())
    outside = (~inside).float()
    parts = [(slice(None), slice(0, left)), (slice(None), slice(right, None))]
    parts += [(slice(0, top), slice(None)), (slice(bottom, None), slice(None))]
    found = []
    for part in parts:
        if outside[part].numel():
            side = torch.zeros_like(outside)
            side[part] = outside[part]
            found.append(side)
    return found or [outside]


def compare(
    kind: Int[Tensor, " pixels"], on: Float[Tensor, " pixels"], offs: Sequence[Float[Tensor, " pixels"]]
) -> Float[Tensor, " pixels"]:
    """Log odds of every pixel by how often its kind occurs on the object, and off it, wherever most."""
    shares = []
    for weights in (on, *offs):
        count = torch.bincount(kind, weights, minlength=KINDS).float()
        shares.append(count / count.sum().clamp(min=1e-6) + EVEN / KINDS)
    return (shares[0] / torch.stack(shares[1:]).amax(dim=0)).log()[kind]


def weigh_motion(motion: Motion, likely: Plane, inside: Bool[Tensor, "rows columns"]) -> Motion:
    """Motion counts as far as more of what is likely the object moves than of what is around it."""
    on, off = (
        (moving(motion) * part).sum() / part.sum().clamp(min=1e-6)
        for part in (likely * inside * motion.sure, ~inside * motion.sure)
    )
    return replace(motion, sure=motion.sure * (4 * (on - off - 0.05)).clamp(0, 1))


def moving(motion: Motion) -> Plane:
    """How surely every pixel moves otherwise than the background, from 0 to 1."""
    return torch.sigmoid(4 * (torch.hypot(*motion.beside) - MOVES))


def likely_by_motion(likely: Plane, inside: Bool[Tensor, "rows columns"], motions: Sequence[Motion]) -> Plane:
    """Where the object is likely, more so where it moves and less so elsewhere."""
    total = weight = torch.zeros_like(likely)
    for motion in motions:
        total = total + motion.sure * (2 * moving(motion) - 1)
        weight = weight + motion.sure
    told = LEAN * total / weight.clamp(min=1)
    moved = torch.sigmoid(torch.logit(likely.clamp(0.02, 0.98)) + told) * inside
    return torch.where(told == 0, likely, moved)


def compare_motion(
    moves: Sequence[tuple[Int[Tensor, " pixels"], Float[Tensor, " pixels"]]],
    on: Float[Tensor, " pixels"],
    offs: Sequence[Float[Tensor, " pixels"]],
) -> Float[Tensor, " pixels"]:
    """Log odds of every pixel by its motion to each nearby frame: their mean, or less where none is sure."""
    total = weight = torch.zeros_like(on)
    for kind, sure in moves:
        total = total + sure * compare(kind, on * sure, [off * sure for off in offs])
        weight = weight + sure
    return total / weight.clamp(min=1)


Step = tuple[int, int]
Link = tuple[tuple[slice, slice], tuple[slice, slice], Tensor]
STEPS_TO: tuple[Step, ...] = ((0, 1), (1, 0), (1, 1), (1, -1))  # half of the eight neighbors, down and right


def link(colors: Tensor, places: Tensor, step: Step) -> Link:
    """Pixels, their neighbors in one direction, and how strongly they hold together."""
    down, right = step
    height, width = colors.shape[1:]
    here = (slice(0, height - down), slice(max(0, -right), width - max(0, right)))
    there = (slice(down, height), slice(max(0, right), width + min(0, right)))
    apart: Tensor | float = 0.0
    for planes, weight in ((colors, 2.0), (places, 0.5)):
        distance = ((planes[:, *here] - planes[:, *there]) ** 2).sum(dim=0)
        apart = apart + weight * distance / distance.mean().clamp(min=1e-9)
    return here, there, torch.exp(-torch.as_tensor(apart)) / float(np.hypot(*step))


def walk(links: Sequence[Link], pull: Plane, target: Plane, start: Plane) -> Plane:
    """The solution of a random walk that ends at each pixel's target by its pull: conjugate gradients."""

    def gather(plane: Plane) -> Plane:
        total = torch.zeros_like(plane)
        for here, there, strength in links:
            total[here] += strength * plane[there]
            total[there] += strength * plane[here]
        return total

    diagonal = gather(torch.ones_like(target)) + pull
    found = start
    rest = pull * target - diagonal * found + gather(found)
    along = scaled = rest / diagonal
    power = (rest * scaled).sum()
    for _ in range(STEPS):
        if power < 1e-9:
            break
        image = diagonal * along - gather(along)
        step = power / (along * image).sum()
        found, rest = found + step * along, rest - step * image
        scaled = rest / diagonal
        before, power = power, (rest * scaled).sum()
        along = scaled + power / before * along
    return found


def fine_edges(soft: Plane, pixels: Float[Tensor, "3 rows columns"]) -> Float[Tensor, "rows columns"]:
    """Soft labels at the size of the frame, along its edges."""
    size = (pixels.shape[1], pixels.shape[2])
    wide = bilinear(soft, size)
    if max(size) <= SIDE:
        return wide
    half = max(1, round(1.5 * max(size) / max(soft.shape)))
    return follow_colors(pixels[None], half, 1e-4)(wide[None, None])[0, 0]
