"""What methods that reconstruct pixels make of frames: the frame, what is seen of it, the prediction."""

from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from tcore import methods
from tcore.config import load_config
from tcore.data.loader import render_batch
from tcore.data.render import MEAN, STD
from tcore.errors import InputError
from tcore.methods.reconstruction import PixelBatch, PixelMethod
from tcore.model.pixels import put, unpatchify
from tcore.show.plotting import Picture, drawing, show_picture, to_picture
from tcore.show.samples import open_frames
from tcore.training.checkpoint import CHECKPOINT, CONFIG, read_state

GRAY = 0.5  # of masked patches


def reconstruction_figure(
    run: str | Path, out: Path, *, frames: str | None = None, rows: int = 4
) -> list[str]:
    """Draw samples of the first step of a run as its method sees and restores them; returns the columns."""
    run = Path(run)
    config = load_config(run / CONFIG)
    method = methods.build(config)
    if not isinstance(method, PixelMethod):
        raise InputError(f"run {run} is of {config.method.name}, which reconstructs no pixels.")
    if not (run / CHECKPOINT).is_file():
        raise InputError(f"no {CHECKPOINT} in {run}: the decoder is kept there alone; train it again.")
    method.load_state_dict(read_state(run / CHECKPOINT, "cpu")["model"])
    method.eval()
    where, store = open_frames(run, config, frames)
    source = methods.build_source(store, config)
    raw = source.read_slots(0, range(min(rows, config.optim.samples)))
    batch = render_batch(raw, torch.device("cpu"))
    assert isinstance(batch, PixelBatch)
    pictures, shown = columns(method, batch), len(batch.target)
    text = f"{config.method.name}: samples of the first step. Predictions have the colors of true patches."
    size = (1.5 * len(pictures) + 0.2, 1.65 * shown + 0.5)
    with drawing(out, size, f"{run.name}: {where}", text) as figure:
        axes = figure.subplots(shown, len(pictures), squeeze=False)
        for row, places in enumerate(axes):
            for place, (title, images) in zip(places, pictures.items(), strict=True):
                show_picture(place, images[row], title if row == 0 else "")
    return list(pictures)


def columns(method: PixelMethod, batch: PixelBatch) -> dict[str, list[Picture]]:
    """Pictures of all samples by title: of a clip, the frames of its first and last time slot."""
    found = method.reconstruct(batch)
    side, patch = method.backbone.native_grid, method.backbone.patch_size
    gray = torch.full_like(found.true, GRAY)
    masked = put(found.true, gray[:, : batch.masked.shape[1]], batch.masked)

    def in_time(tokens: Float[Tensor, "b n p"]) -> Float[Tensor, "b 3 time h w"]:
        return unpatchify(tokens, found.frames, patch, (side, side))

    slots = sorted({0, in_time(found.true).shape[2] - 1})
    made: dict[str, list[Picture]] = {}
    if batch.memory is not None:
        mean, std = (torch.tensor(x)[:, None, None] for x in (MEAN, STD))
        made["seen whole"] = [to_picture(frame * std + mean) for frame in batch.memory[:, :, 0]]
    for slot in slots:
        when = f" {slot + 1}" if len(slots) > 1 else ""
        for title, tokens in {"frame": found.true, "seen": masked, **found.made}.items():
            made[title + when] = [to_picture(frame) for frame in in_time(tokens)[:, :, slot]]
    return made
