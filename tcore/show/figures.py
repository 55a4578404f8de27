"""Pictures of what the method does."""

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from tcore.data.rendered import RenderedVideo
from tcore.evaluation.benchmarks.rendered import Propagated
from tcore.files import atomic
from tcore.video.overlay import paint_ids

GAP, CAPTION = 4, 16


def propagation_picture(
    video: RenderedVideo, rows: dict[str, Propagated], path: Path, *, columns: int = 6, zoom: int = 1
) -> None:
    """Masks over frames: the truth, then each way to propagate them, one row each."""
    times = np.linspace(0, len(video.frames) - 1, columns).round().astype(int)
    masks = {"truth": video.objects, **{name: found.objects for name, found in rows.items()}}
    side = video.frames.shape[1] * zoom
    sheet = Image.new("RGB", (columns * (side + GAP) + GAP, len(masks) * (side + CAPTION + GAP)), "white")
    draw = ImageDraw.Draw(sheet)
    for row, (name, ids) in enumerate(masks.items()):
        top = row * (side + CAPTION + GAP)
        draw.text((GAP, top + 2), name, fill="black")
        for column, time in enumerate(times):
            picture = Image.fromarray(paint_ids(video.frames[time], ids[time]))
            sheet.paste(
                picture.resize((side, side), Image.Resampling.NEAREST),
                (GAP + column * (side + GAP), top + CAPTION),
            )
    with atomic(path) as temporary:
        sheet.save(temporary, format="PNG")
