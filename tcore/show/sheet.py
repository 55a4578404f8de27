"""A contact sheet of training samples: past, current and future, the crops' boxes, the holes of the masks."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, UInt8
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from tcore import methods
from tcore.config import Config
from tcore.data.images import Frame
from tcore.data.render import render_pixels
from tcore.data.source import RawBatch, Source
from tcore.data.stores import FrameStore
from tcore.data.views import ViewPlan
from tcore.errors import InputError
from tcore.show.plotting import save_picture

ROWS = 6
PAPER, INK, FAINT, HOLE = (250, 249, 246), (34, 34, 40), (120, 120, 128), (214, 211, 204)
GLOBAL_COLORS = ((30, 110, 235), (235, 110, 20))
LOCAL_COLOR = (40, 190, 120)
FRAME = (268, 201)  # the place of a frame: width, height
CROP, GAP, MARGIN = FRAME[1], 8, 20
HEAD, TITLE, CAPTION = 66, 24, 26  # heights of the head, of the columns' titles, of a row's caption
LOCAL = (CROP - GAP // 2) // 2

Pixels = UInt8[np.ndarray, "height width 3"]


class Watched(FrameStore):
    """A store that remembers what was read from it last."""

    def __init__(self, store: FrameStore) -> None:
        self.store, self.names, self.lengths, self.fps = store, store.names, store.lengths, store.fps
        self.video: int = 0
        self.frames: tuple[int, ...] = ()

    def read(self, video: int, frames: Sequence[int]) -> list[Frame]:
        """Read, and remember."""
        self.video, self.frames = video, tuple(frames)
        return self.store.read(video, frames)

    def cuts(self, video: int) -> tuple[int, ...]:
        """As the store knows them."""
        return self.store.cuts(video)


class Shown(NamedTuple):
    """One sample: its video, the frames that were read of it, and what the loader handed over."""

    video: int
    frames: tuple[int, ...]
    raw: RawBatch


def draw_sheet(store: FrameStore, config: Config, path: Path, title: str, rows: int = ROWS) -> int:
    """Draw samples of the first step of a run, and return how many there are."""
    source = methods.build_source(Watched(store), config)
    samples = take_samples(source, rows)
    if not samples:
        raise InputError("no sample could be read, so there is nothing to draw on a sheet.")
    num_local = len(samples[0].raw.plans["local"])
    locals_wide = -(-num_local // 2)
    auxiliary = any(len(sample.frames) > 1 for sample in samples)
    columns = column_places(auxiliary, locals_wide)
    width = columns[-1][1] + locals_wide * (LOCAL + GAP // 2) + MARGIN
    height = HEAD + TITLE + len(samples) * (CAPTION + FRAME[1] + GAP) + MARGIN
    sheet = Image.new("RGB", (width, height), PAPER)
    draw = ImageDraw.Draw(sheet)
    draw_head(draw, source, title)
    for name, left in columns:
        draw.text((left, HEAD), name, fill=FAINT, font=font(14))
    for row, sample in enumerate(samples):
        top = HEAD + TITLE + row * (CAPTION + FRAME[1] + GAP)
        draw.text((MARGIN, top + 4), caption(source, sample), fill=INK, font=font(15))
        draw_row(sheet, source, sample, dict(columns), top + CAPTION)
    save_picture(sheet, path)
    return len(samples)


def take_samples(source: Source, rows: int) -> list[Shown]:
    """Samples of the first step that carry a mask, as training reads them; unreadable ones are left out."""
    samples: list[Shown] = []
    masked = np.asarray(source.sampling.masks(0).any(axis=(0, 2)))
    # Where nothing is masked (--masking.probability 0), any sample will do.
    slots = np.flatnonzero(masked) if masked.any() else np.arange(len(masked))
    watched, chosen = source.store, source.chosen(0)
    assert isinstance(watched, Watched)
    # A store smaller than the batch is gone through repeatedly: show each clip once.
    _, first = np.unique(chosen[slots], return_index=True)
    for slot in slots[np.sort(first)].tolist():
        if len(samples) == rows:
            break
        try:
            raw = source.read_slots(0, range(slot, slot + 1))
            if raw.bad:  # another clip stands in for one that cannot be read, and has a row of its own
                continue
        except InputError:
            continue
        samples.append(Shown(watched.video, watched.frames, raw))
    return samples


def column_places(auxiliary: bool, locals_wide: int) -> list[tuple[str, int]]:
    """Titles of the columns, and where they begin."""
    widths = {"past": FRAME[0], "current, with the boxes of its crops": FRAME[0], "future": FRAME[0]}
    if not auxiliary:
        widths = {"current, with the boxes of its crops": FRAME[0]}
    widths |= {"global 1, as the student sees it": CROP, "global 2": CROP, "local": locals_wide * LOCAL}
    places, left = [], MARGIN
    for name, width in widths.items():
        places.append((name, left))
        left += width + GAP
    return places


def draw_head(draw: ImageDraw.ImageDraw, source: Source, title: str) -> None:
    """What this is, and what the colors mean."""
    config, left = source.config, MARGIN
    draw.text((left, 12), plain(title), fill=INK, font=font(20))
    text = f"samples of the first step, seed {config.seed}"
    draw.text((left, 40), text, fill=FAINT, font=font(14))
    left += int(draw.textlength(text, font=font(14))) + 30
    legend = [*zip(("global 1", "global 2"), GLOBAL_COLORS, strict=True), ("local", LOCAL_COLOR)]
    for name, color in legend:
        draw.rectangle((left, 43, left + 18, 55), outline=color, width=3)
        draw.text((left + 24, 40), name, fill=FAINT, font=font(14))
        left += 40 + int(draw.textlength(name, font=font(14)))
    draw.rectangle((left, 43, left + 18, 55), fill=HOLE)
    draw.text((left + 24, 40), "hole of the mask", fill=FAINT, font=font(14))


def caption(source: Source, sample: Shown) -> str:
    """Name, frames and times of a sample."""
    name, length = plain(source.store.names[sample.video]), int(source.store.lengths[sample.video])
    name = name if len(name) <= 60 else "..." + name[-57:]
    if length == 1:
        return name
    current = sample.frames[int(sample.raw.plans["global"].frame[0])]
    fps = source.store.fps or source.config.fps
    apart = [f"{(frame - current) / fps:+.1f} s" for frame in sample.frames if frame != current]
    read = ", ".join(map(str, sample.frames))
    return f"{name}:  frames {read} of {length}" + (f"  ({' and '.join(apart)})" if apart else "")


def draw_row(sheet: Image.Image, source: Source, sample: Shown, columns: dict[str, int], top: int) -> None:
    """Frames, boxes, crops and holes of one sample."""
    raw, views = sample.raw, source.config.views
    places = list(columns.values())
    if len(places) == 6:
        for left, plan in ((places[0], raw.plans["past"]), (places[2], raw.plans["future"])):
            paste_frame(sheet, raw, plan, (left, top))
    current = places[1] if len(places) == 6 else places[0]
    box, scale = paste_frame(sheet, raw, raw.plans["global"], (current, top))
    draw_boxes(ImageDraw.Draw(sheet), raw, box, scale)
    pictures = to_pictures(render_pixels(raw.frames, raw.plans["global"], views.global_size))
    for index, (picture, mask) in enumerate(zip(pictures, raw.mask.numpy(), strict=True)):
        left = places[-3 + index]
        crop = Image.fromarray(picture).resize((CROP, CROP), Image.Resampling.BICUBIC)
        sheet.paste(punch(crop, mask), (left, top))
        tag(
            sheet,
            (left, top),
            f"{mask.mean():.0%} masked" if mask.any() else "no mask",
            GLOBAL_COLORS[index],
        )
    for index, picture in enumerate(
        to_pictures(render_pixels(raw.frames, raw.plans["local"], views.local_size))
    ):
        small = Image.fromarray(picture).resize((LOCAL, LOCAL), Image.Resampling.BICUBIC)
        across, down = divmod(index, 2)
        place = places[-1] + across * (LOCAL + GAP // 2), top + down * (LOCAL + GAP // 2)
        sheet.paste(small, place)


def paste_frame(
    sheet: Image.Image, raw: RawBatch, plan: ViewPlan, place: tuple[int, int]
) -> tuple[tuple[int, int], float]:
    """Fit a whole frame into its place; says where its corner is and by how much it was scaled."""
    if not len(plan) or plan.frame[0] < 0:
        draw = ImageDraw.Draw(sheet)
        draw.rectangle((*place, place[0] + FRAME[0] - 1, place[1] + FRAME[1] - 1), outline=HOLE)
        draw.text((place[0] + 12, place[1] + 10), "not read", fill=FAINT, font=font(14))
        return place, 1.0
    frame = raw.frames[int(plan.frame[0])].numpy()
    height, width = frame.shape[:2]
    scale = min(FRAME[0] / width, FRAME[1] / height)
    size = max(1, round(width * scale)), max(1, round(height * scale))
    corner = place[0] + (FRAME[0] - size[0]) // 2, place[1] + (FRAME[1] - size[1]) // 2
    sheet.paste(Image.fromarray(frame).resize(size, Image.Resampling.LANCZOS), corner)
    return corner, scale


def draw_boxes(draw: ImageDraw.ImageDraw, raw: RawBatch, corner: tuple[int, int], scale: float) -> None:
    """Boxes of the local crops, thin, then those of the global ones."""
    boxes = [(box, LOCAL_COLOR, 1) for box in raw.plans["local"].box.tolist()]
    boxes += [
        (box, color, 3) for box, color in zip(raw.plans["global"].box.tolist(), GLOBAL_COLORS, strict=True)
    ]
    for (top, left, height, width), color, thick in boxes:
        x, y = corner[0] + left * scale, corner[1] + top * scale
        draw.rectangle((x, y, x + width * scale - 1, y + height * scale - 1), outline=color, width=thick)


def punch(crop: Image.Image, mask: Bool[np.ndarray, " n"]) -> Image.Image:
    """Cut the masked patches out of a crop."""
    grid = round(len(mask) ** 0.5)
    edges = np.linspace(0, CROP, grid + 1).round().astype(int)
    draw = ImageDraw.Draw(crop)
    for row, column in np.argwhere(mask.reshape(grid, grid)).tolist():
        place = (edges[column], edges[row], edges[column + 1] - 1, edges[row + 1] - 1)
        draw.rectangle(tuple(int(x) for x in place), fill=HOLE, outline=PAPER)
    return crop


def tag(sheet: Image.Image, place: tuple[int, int], text: str, color: tuple[int, int, int]) -> None:
    """A small label on the lower left corner of a crop, under a line of its color."""
    draw = ImageDraw.Draw(sheet)
    left, top = place
    draw.rectangle((left, top, left + CROP - 1, top + CROP - 1), outline=color, width=3)
    width = int(draw.textlength(text, font=font(12))) + 10
    bottom = top + CROP - 1
    draw.rectangle((left, bottom - 17, left + width, bottom), fill=color)
    draw.text((left + 5, bottom - 16), text, fill="white", font=font(12))


def to_pictures(images: Tensor) -> list[Pixels]:
    """Images of [0, 1] as pixels."""
    pixels = (images.clamp(0, 1) * 255).round().to(torch.uint8)
    return list(pixels.permute(0, 2, 3, 1).contiguous().numpy())


def font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Pillow's own font; old versions have it in one size."""
    try:
        return ImageFont.load_default(size)
    except TypeError:
        return ImageFont.load_default()


def plain(text: str) -> str:
    """Text in letters that the font has."""
    return text.encode("ascii", "replace").decode("ascii")
