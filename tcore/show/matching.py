"""Does the matching module of a run match? Shares of attention as bars, and where masked patches look."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from PIL import Image
from torch import Tensor

from tcore.config import flatten, load_config
from tcore.data.images import read_image
from tcore.data.loader import load, render_batch
from tcore.device import choose_device
from tcore.errors import InputError
from tcore.evaluation.benchmarks.davis import Davis
from tcore.evaluation.masks import as_binary, read_ids
from tcore.evaluation.protocols import TCORE
from tcore.files import write_json
from tcore.methods import build, build_source
from tcore.methods.batch import Batch
from tcore.methods.match_quality import (
    CROSS,
    PLAIN,
    STILL,
    KnownMotion,
    Looked,
    Matcher,
    draw_mask,
    look,
    measure_matching,
    rendered_motion,
)
from tcore.methods.tcore import TCoRe
from tcore.show.plotting import COLORS, FAINT, drawing, mask_patches, outline, show_heat, show_picture
from tcore.text import to_stderr
from tcore.training.checkpoint import CHECKPOINT, CONFIG, load_newest, read_state
from tcore.training.loop import open_store

GAP = 10  # frames between current and past or future of a clip on disk
EXAMPLES = 4
BATCH = 64
UNSEEN = 10**6  # the first of the steps that no run of ours has made
CHANCE = "chance"
NAMES = {"place": "true place", "moved": "true place,\nmoved patches", "object": "own object"}


def davis_motion(root: Path, size: int, patch: int, *, binary: bool = False) -> Iterator[KnownMotion]:
    """Clips laid out like DAVIS: the middle frame and two others, `size` pixels high; objects are known."""
    benchmark = Davis.open(root, TCORE, binary=binary)
    for number, clip in enumerate(benchmark.clips):
        now, gap = clip.length // 2, min(GAP, clip.length // 2)
        chosen = (now - gap, now, min(now + gap, clip.length - 1))
        frames = [read_image(clip.frames[index]) for index in chosen]
        ids = [as_binary(one) if binary else one for one in (read_ids(clip.truth[i]) for i in chosen)]
        height, width = frames[0].shape[:2]
        rows, columns = size // patch, max(1, round(size * width / height / patch))
        at = [((np.arange(n) + 0.5) * side / n).astype(int) for n, side in ((rows, height), (columns, width))]
        pixels = [np.asarray(Image.fromarray(f).resize((columns * patch, rows * patch))) for f in frames]
        yield KnownMotion(
            np.stack(pixels),
            draw_mask((rows, columns), np.random.default_rng((0, number))),
            np.stack([one[np.ix_(*at)].reshape(-1) for one in ids]).astype(np.uint8),
            None,
        )


def matching_figure(
    matcher: Matcher,
    out: Path,
    *,
    title: str,
    videos: int = 24,
    davis: Sequence[tuple[Path, bool]] = (),
) -> dict[str, dict[str, Looked]]:
    """Measure on rendered videos and on clips on disk, draw it, and write the numbers beside the picture."""
    patch = matcher.backbone.patch_size
    size = matcher.backbone.native_grid * patch
    samples = list(rendered_motion(videos, size, patch))
    found = {"rendered": measure_matching(matcher, samples)}
    for root, binary in davis:
        clips = davis_motion(root, size, patch, binary=binary)
        found[root.resolve().name] = measure_matching(matcher, clips)
    with drawing(out, (3.2 * len(found) + 1.75 * EXAMPLES + 0.6, 4.4), title, text=EXPLAINED) as figure:
        bars, examples = figure.subfigures(
            1, 2, squeeze=False, width_ratios=(3.2 * len(found), 1.75 * EXAMPLES)
        )[0]
        axes = bars.subplots(1, len(found), squeeze=False)[0]
        for one, (name, looked) in zip(axes, found.items(), strict=True):
            _draw_bars(one, name, looked)
        _draw_examples(examples.subplots(2, EXAMPLES, squeeze=False), matcher, samples)
    numbers = {
        name: {how: x._asdict() | {"times_chance": x.times_chance()} for how, x in looked.items()}
        for name, looked in found.items()
    }
    write_json(out.with_suffix(".json"), numbers)
    return found


def views_to_look_at(batch: Batch) -> dict[str, tuple[Tensor, Tensor]]:
    """What the module is given as past and future, by name."""
    assert batch.past is not None
    assert batch.future is not None
    crop = batch.teacher_crops[batch.masked]
    return {
        "past and future": (batch.past, batch.future),
        "those of another video": (batch.past.roll(1, 0), batch.future.roll(1, 0)),
        "the crop itself, unmasked": (crop, crop),
    }


@torch.no_grad()
def cross_entropies(model: TCoRe, batches: Iterable[Batch], temperature: float) -> dict[str, float]:
    """Cross-entropy at masked patches by what the module looks at, mean over batches.

    A module that matches patches finds the answer in the crop itself; one that recognizes scenes does not.
    """
    sums: dict[str, list[float]] = {}
    for batch in batches:
        for name, (past, future) in views_to_look_at(batch).items():
            found = model(replace(batch, past=past, future=future), {"teacher_temperature": temperature})
            sums.setdefault(name, []).append(float(found["past_teacher"] + found["future_teacher"]) / 2)
    return {name: sum(values) / len(values) for name, values in sums.items()}


def run_cross_entropies(run: Path, frames: str | None, batches: int) -> dict[str, float]:
    """The same of a run, from its checkpoint, on batches that it has not seen."""
    config = load_config(run / CONFIG)
    device = choose_device("auto")
    model = build(config).to(device)
    state = load_newest(run / CHECKPOINT, lambda path: read_state(path, device), to_stderr)
    if flatten(config).get("auxiliary") != "both" or state is None:
        raise InputError(f"run {run} has no checkpoint of T-CoRe with --auxiliary both: leave --batches out.")
    assert isinstance(model, TCoRe)
    model.load_state_dict(state["model"])
    model.eval()
    optim = replace(config.optim, batch=BATCH, accumulate=1)
    config = replace(config, optim=optim, runtime=replace(config.runtime, workers=0))
    source = build_source(open_store(config, None if frames == "rendered" else frames), config)
    parts = load(source, UNSEEN, UNSEEN + batches, device)
    temperature = flatten(config)["teacher.temperature"][1]
    return cross_entropies(model, (render_batch(part, device) for part in parts), temperature)


EXPLAINED = (
    "Share of attention that masked patches of the current frame put on their true place in past and future "
    "(cells within one patch of it; all patches, and those that moved by more than one patch) and on their "
    "own object; chance is the share of such cells. Feature "
    "similarity sees the patch, cross-attention does not. On the right: masked patches, and the past with "
    "their true place outlined."
)


def _draw_bars(axes: Axes, name: str, looked: Mapping[str, Looked]) -> None:
    first = next(iter(looked.values()))
    kinds = [kind for kind in NAMES if not np.isnan(getattr(first, kind))]
    for index, bar in enumerate((CROSS, PLAIN, STILL, CHANCE)):
        chance = bar == CHANCE
        source = first if chance else looked[bar]
        values = [100 * getattr(source, f"{kind}_chance" if chance else kind) for kind in kinds]
        at = [place + 0.21 * (index - 1.5) for place in range(len(kinds))]
        color = FAINT if chance else COLORS[index]
        axes.bar_label(axes.bar(at, values, 0.19, color=color, label=bar), fmt="%.1f", fontsize=7)
    axes.set_xticks(range(len(kinds)), [NAMES[kind] for kind in kinds])
    axes.set_title(f"{name}: share of attention, percent", loc="left")
    axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)


def _draw_examples(axes: np.ndarray, matcher: Matcher, samples: Sequence[KnownMotion]) -> None:
    """Masked patches of objects whose place in the past is known, one of each video."""
    patch, shown = matcher.backbone.patch_size, 0
    for sample in samples:
        assert sample.places is not None
        wanted = sample.mask.reshape(-1) & (sample.objects[1] > 0) & np.isfinite(sample.places[0, :, 0])
        if shown == axes.shape[1] or not wanted.any():
            continue
        query = int(np.flatnonzero(wanted)[0])
        heat = look(matcher, sample)[0].cross[int(sample.mask.reshape(-1)[:query].sum())]
        cell, color = divmod(query, sample.mask.shape[1]), COLORS[shown % len(COLORS)]
        show_picture(axes[0, shown], mask_patches(sample.frames[1], sample.mask), "current")
        outline(axes[0, shown], cell, patch, color)
        peak = f"past: peak {heat.max() * heat.numel():.1f}x"
        show_heat(axes[1, shown], sample.frames[0], heat.reshape(sample.mask.shape).numpy(), peak)
        row, column = (round(float(x)) for x in sample.places[0, query])
        outline(axes[1, shown], (row, column), patch, color)
        shown += 1
    for column in range(shown, axes.shape[1]):
        for one in axes[:, column]:
            one.set_axis_off()
