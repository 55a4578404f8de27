"""Which boxes, flips and colors make the views of a sample: plain numbers, no pixels."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from jaxtyping import Bool, Float64, Int64

from tcore.config import ViewsConfig
from tcore.errors import InputError

Size = tuple[int, int]  # height, width
Range = tuple[float, float]

PAST, CURRENT, FUTURE = 0, 1, 2
ASPECT: Range = (3 / 4, 4 / 3)  # width / height
NO_JITTER = (1.0, 1.0, 1.0, 0.0)  # brightness, contrast, saturation, hue
TRIES = 10


@dataclass(frozen=True, eq=False)
class ViewPlan:
    """What makes n views of one size: a source frame, a box in it, and colors."""

    frame: Int64[np.ndarray, "n"]  # index into the frames of a batch
    box: Int64[np.ndarray, "n 4"]  # top, left, height, width in pixels
    flip: Bool[np.ndarray, "n"]
    jitter: Float64[np.ndarray, "n 4"]  # brightness, contrast, saturation factors and hue shift in turns
    order: Int64[np.ndarray, "n 4"]  # order[:, 0] is the column of `jitter` that is applied first
    gray: Bool[np.ndarray, "n"]
    blur: Float64[np.ndarray, "n"]  # sigma in pixels, 0 = none
    solarize: Bool[np.ndarray, "n"]
    wide_blur: Bool[np.ndarray, "n"]  # by SimCLR's kernel, as wide as a tenth of the view

    def __len__(self) -> int:
        return len(self.frame)

    def select(self, rows: Int64[np.ndarray, "m"] | Bool[np.ndarray, "n"] | slice) -> "ViewPlan":
        """Keep some rows, in the order given."""
        return ViewPlan(*(getattr(self, field.name)[rows] for field in fields(self)))

    def with_frame(self, frame: Int64[np.ndarray, "n"]) -> "ViewPlan":
        """Take the same views from other frames."""
        return replace(self, frame=frame)

    @staticmethod
    def concatenate(plans: "Sequence[ViewPlan]") -> "ViewPlan":
        """Put the rows of several plans below one another."""
        return ViewPlan(
            *(np.concatenate([getattr(plan, field.name) for plan in plans]) for field in fields(ViewPlan))
        )


@dataclass(frozen=True)
class Photometry:
    """Probabilities and ranges of what happens to a view after it is cut out."""

    flip: float = 0.0
    jitter: float = 0.8
    strength: tuple[float, float, float, float] = (0.4, 0.4, 0.2, 0.1)
    gray: float = 0.2
    blur: float = 0.0
    sigma: Range = (0.1, 2.0)
    solarize: float = 0.0
    wide_blur: bool = False


# The usual text says blur 1 / .1 / .5; the code that made the published models inverts the probabilities.
GLOBAL_1 = Photometry()
GLOBAL_2 = Photometry(blur=0.9, solarize=0.2)
LOCAL = Photometry(flip=0.5, blur=0.5)
SIMCLR = Photometry(strength=(0.8, 0.8, 0.8, 0.2), blur=0.5, wide_blur=True)
# First and second global crop, and local crops, by name.
PHOTOMETRY: dict[str, tuple[Photometry, Photometry, Photometry]] = {
    "tcore": (GLOBAL_1, GLOBAL_2, LOCAL),
    "dino": (Photometry(blur=1.0), Photometry(blur=0.1, solarize=0.2), LOCAL),
    "byol": (Photometry(blur=1.0), Photometry(blur=0.1, solarize=0.2), LOCAL),  # MoCo v3's and ODIN's too
    "simclr": (SIMCLR, SIMCLR, replace(SIMCLR, flip=0.5)),
}


def central_box(size: Size, aspect: Range = ASPECT) -> tuple[int, int, int, int]:
    """Cut the whole frame, or its middle where the frame is wider or taller than `aspect` allows."""
    height, width = size
    box_height, box_width = height, width
    if width / height < aspect[0]:
        box_height = round(width / aspect[0])
    elif width / height > aspect[1]:
        box_width = round(height * aspect[1])
    return (height - box_height) // 2, (width - box_width) // 2, box_height, box_width


def random_boxes(
    size: Size, area: Range, aspect: Range, rng: np.random.Generator, count: int = 1
) -> Int64[np.ndarray, "count 4"]:
    """Draw independent random resized crops: share of the area uniform, aspect log-uniform."""
    height, width = size
    shape = rng.random((2, count, TRIES))
    areas = (area[0] + (area[1] - area[0]) * shape[0]) * (height * width)
    aspects = np.exp(math.log(aspect[0]) + math.log(aspect[1] / aspect[0]) * shape[1])
    widths, heights = np.rint(np.sqrt(areas * aspects)), np.rint(np.sqrt(areas / aspects))
    fits = (widths > 0) & (widths <= width) & (heights > 0) & (heights <= height)
    rows, first = np.arange(count), fits.argmax(axis=1)
    box = np.empty((count, 4))
    box[:, 2], box[:, 3] = heights[rows, first], widths[rows, first]
    box[:, :2] = np.floor(rng.random((count, 2)) * (np.array(size) - box[:, 2:] + 1))
    box[~fits[rows, first]] = central_box(size, aspect)
    return box.astype(np.int64)


def sample_photometry(
    rng: np.random.Generator,
    frame: Int64[np.ndarray, "n"],
    box: Int64[np.ndarray, "n 4"],
    recipes: Sequence[Photometry],
    color: float = 1.0,
    blur: float = 1.0,
) -> ViewPlan:
    """Draw flips, colors and blur for n given boxes, each by its own recipe; the last two may be rarer."""
    table = np.array([(r.flip, r.jitter, r.gray, r.blur, r.solarize, *r.sigma, *r.strength) for r in recipes])
    draw = rng.random((len(recipes), 14))
    share = (1.0, color, color, blur, color)
    flip, jitter, gray, blurred, solarize = (draw[:, :5] < table[:, :5] * share).T
    sigma = table[:, 5] + (table[:, 6] - table[:, 5]) * draw[:, 5]
    none = np.array(NO_JITTER)
    factors = none + table[:, 7:] * (2 * draw[:, 6:10] - 1)
    return ViewPlan(
        frame=frame,
        box=box,
        flip=flip,
        jitter=np.where(jitter[:, None], factors, none),
        order=draw[:, 10:].argsort(axis=1),
        gray=gray,
        blur=np.where(blurred, sigma, 0.0),
        solarize=solarize,
        wide_blur=np.array([r.wide_blur for r in recipes], dtype=bool),
    )


def sample_views(
    rng: np.random.Generator, sizes: tuple[Size, Size, Size], settings: ViewsConfig
) -> dict[str, ViewPlan]:
    """Draw all views of one sample by name; `sizes` are those of the past, current and future frame.

    `frame` of a view is PAST, CURRENT or FUTURE; `student` are its own global crops in an ablation.
    """
    current, num_local = sizes[CURRENT], settings.num_local
    global_box = random_boxes(current, settings.global_area, ASPECT, rng, 2)
    local_box = random_boxes(current, settings.local_area, ASPECT, rng, num_local)
    if settings.auxiliary_box == "current" and len(set(sizes)) > 1:
        raise InputError(
            f"views.auxiliary_box=current needs frames of one size, got {', '.join(map(str, sizes))}: "
            "use a video, or --views.auxiliary-box central."
        )
    auxiliary = [
        np.array([central_box(sizes[frame])] * 2) if settings.auxiliary_box == "central" else global_box
        for frame in (PAST, FUTURE)
    ]
    *pair, small = PHOTOMETRY[settings.photometry]
    flipped = [replace(one, flip=settings.flip_global) for one in pair]
    frame = np.array([CURRENT] * (2 + num_local) + [PAST] * 2 + [FUTURE] * 2)
    box = np.concatenate([global_box, local_box, *auxiliary])
    recipes = flipped + [small] * num_local + pair + pair
    views = sample_photometry(rng, frame, box, recipes, settings.color, settings.blur)
    past = 2 + num_local
    plans = {
        "global": views.select(slice(0, 2)),
        "local": views.select(slice(2, past)),
        "past": views.select(slice(past, past + 2)),
        "future": views.select(slice(past + 2, past + 4)),
    }
    if settings.fixed_space and settings.fixed_time:
        return plans
    # Drawn last: the other views are the same with and without the ablation.
    return {**plans, "student": _student(rng, sizes, plans["global"], settings)}


def _student(
    rng: np.random.Generator, sizes: tuple[Size, Size, Size], teacher: ViewPlan, settings: ViewsConfig
) -> ViewPlan:
    """Move the teacher's crops in space and/or time, colors kept."""
    source = CURRENT if settings.fixed_time else PAST
    if settings.fixed_space and sizes[source] != sizes[CURRENT]:
        raise InputError(
            f"fixed_space=True, fixed_time=False needs frames of one size, "
            f"got {sizes[PAST]} and {sizes[CURRENT]}: use a video, or fixed_space=False."
        )
    moved = (
        teacher.box
        if settings.fixed_space
        else random_boxes(sizes[source], settings.global_area, ASPECT, rng, 2)
    )
    return replace(teacher, frame=np.full(2, source), box=moved)
