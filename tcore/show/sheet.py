"""A contact sheet of training samples: their frames, the boxes of the crops, and the masked patches."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from tcore import methods
from tcore.config import Config
from tcore.data.render import render_pixels
from tcore.data.source import SAMPLE, RawBatch, Source
from tcore.data.stores import FrameStore
from tcore.errors import InputError
from tcore.show.plotting import Picture, drawing, mask_patches, show_picture, to_picture

ROWS = 6
GLOBAL_COLORS, LOCAL_COLOR = ("#1e6eeb", "#eb6e14"), "#28be78"


class Shown(NamedTuple):
    """One sample: its video, the frames that were read, by name, and what the loader would hand over."""

    video: int
    frames: dict[str, int]
    raw: RawBatch


def draw_sheet(store: FrameStore, config: Config, path: Path, title: str, rows: int = ROWS) -> int:
    """Draw samples of the first step of a run, and return how many there are."""
    source = methods.build_source(store, config)
    samples = take_samples(source, rows)
    if not samples:
        raise InputError("no sample could be read, so there is nothing to draw on a sheet.")
    columns = [name for name in source.sampling.names if any(name in sample.frames for sample in samples)]
    num_global = len(samples[0].raw.plans["global"])
    wide = [1.34] * len(columns) + [1.0] * num_global
    wide += [-(-len(samples[0].raw.plans["local"]) // 2) / 2] if "local" in source.sampling.sides else []
    text = (
        f"Samples of the first step, seed {config.seed}. Boxes: global crops (blue, orange), local crops "
        "(green). Hatched: masked patches."
    )
    title = title.encode("ascii", "replace").decode("ascii")
    with drawing(path, (1.9 * sum(wide), 2.1 * len(samples) + 0.6), title, text) as figure:
        grid = figure.subplots(len(samples), len(wide), squeeze=False, width_ratios=wide)
        for axes, sample in zip(grid, samples, strict=True):
            _draw_row(list(axes), source, sample, columns)
    return len(samples)


def take_samples(source: Source, rows: int) -> list[Shown]:
    """Samples of the first step that carry a mask, as training reads them, without unreadable ones."""
    samples: list[Shown] = []
    masked = np.asarray(source.sampling.masks(0).any(axis=(0, 2)))
    # Where nothing is masked, any sample will do.
    slots, chosen = np.flatnonzero(masked) if masked.any() else np.arange(len(masked)), source.chosen(0)
    # A store smaller than the batch is gone through repeatedly: show each clip once.
    _, first = np.unique(chosen[slots], return_index=True)
    for slot in slots[np.sort(first)].tolist():
        if len(samples) == rows:
            break
        try:
            raw = source.read_slots(0, range(slot, slot + 1))
        except InputError:
            continue
        if not raw.bad:  # a clip that replaces an unreadable one has a row of its own
            video, start, length = (int(column[chosen[slot]]) for column in source.clips)
            drawn = source.sampling_of(video).frames(
                length, np.random.default_rng((source.config.seed, SAMPLE, 0, slot))
            )
            needed = source.sampling.needs(bool(masked[slot]))
            samples.append(Shown(video, {name: start + drawn[name] for name in needed}, raw))
    return samples


def _draw_row(axes: list[Axes], source: Source, sample: Shown, columns: list[str]) -> None:
    """Frames, boxes and crops of one sample."""
    raw, store = sample.raw, source.store
    fps, current = store.fps or source.config.fps, sample.frames["current"]
    for place, name in zip(axes, columns, strict=False):
        if name not in sample.frames:
            place.axis("off")
            continue
        index = list(sample.frames).index(name)
        height, width = raw.sizes[index]
        seconds = (sample.frames[name] - current) / fps
        title = f"{name}, frame {sample.frames[name]}" + (f" ({seconds:+.1f} s)" if seconds else "")
        show_picture(place, raw.frames[index, :height, :width].numpy(), title)
        if name == "current":
            _draw_boxes(place, raw)
    name = store.names[sample.video].encode("ascii", "replace").decode("ascii")
    name = name if len(name) <= 40 else "..." + name[-37:]
    axes[0].set_title(
        f"{name}, {store.lengths[sample.video]} frames\n{axes[0].get_title(loc='left')}", loc="left", pad=3
    )
    rest = axes[len(columns) :]
    crops = _crops(raw, "global", source.sampling.sides)
    masks = np.repeat(raw.mask.numpy(), max(1, len(crops) // len(raw.mask)), axis=0)  # of frames, from tubes'
    for number, (place, crop, mask) in enumerate(zip(rest, crops, masks, strict=False)):
        side = round(mask.size**0.5)
        picture = mask_patches(crop, mask.reshape(side, side)) if mask.any() else crop
        share = f"{mask.mean():.0%} masked" if mask.any() else "no mask"
        show_picture(place, picture, f"global {number + 1}, {share}")
        _outline(place, (0, 0, *crop.shape[:2]), GLOBAL_COLORS[number % 2], 3)
    if "local" in source.sampling.sides:
        local = _crops(raw, "local", source.sampling.sides)
        local += [np.full_like(local[0], 255)] * (len(local) % 2)
        pairs = [np.concatenate(local[i : i + 2], axis=0) for i in range(0, len(local), 2)]
        show_picture(rest[-1], np.concatenate(pairs, axis=1), "local")


def _draw_boxes(axes: Axes, raw: RawBatch) -> None:
    """Boxes of the local crops, thin, then those of the global ones."""
    if "local" in raw.plans:
        for box in raw.plans["local"].box.tolist():
            _outline(axes, box, LOCAL_COLOR, 0.8)
    for box, color in zip(raw.plans["global"].box.tolist(), GLOBAL_COLORS, strict=False):
        _outline(axes, box, color, 2)


def _outline(axes: Axes, box: Sequence[float], color: str, width: float) -> None:
    top, left, height, wide = box
    axes.add_patch(Rectangle((left, top), wide, height, fill=False, edgecolor=color, linewidth=width))


def _crops(raw: RawBatch, view: str, sides: dict[str, int]) -> list[Picture]:
    """Crops as pixels."""
    return [to_picture(crop) for crop in render_pixels(raw.frames, raw.plans[view], sides[view])]
