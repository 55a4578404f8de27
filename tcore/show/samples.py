"""What training reads: samples of a run, and images beside their neighbors."""

from pathlib import Path

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageOps

from tcore.config import Config, load_config
from tcore.data.images import Frame
from tcore.data.neighbors import check_neighbors, find_neighbors, load_neighbors
from tcore.data.stores import FrameStore, open_images
from tcore.errors import InputError
from tcore.files import read_json
from tcore.show.plotting import drawing, show_picture
from tcore.show.sheet import draw_sheet
from tcore.training.loop import open_store

SIDE = 160  # pixels of a thumbnail


def sandwich_figure(run: str | Path, out: Path, *, frames: str | None = None, rows: int = 4) -> int:
    """Draw samples of the first step of a run, with its settings; returns how many there are."""
    run = Path(run)
    config = load_config(run / "config.json")
    if config.source == "images" and config.method.needs_neighbors:
        raise InputError(f"run {run} trains on images: tcore figure neighbors shows what it reads.")
    where, store = open_frames(run, config, frames)
    return draw_sheet(store, config, out, f"{run.name}: {where}", rows)


def open_frames(run: Path, config: Config, frames: str | None) -> tuple[str, FrameStore]:
    """The frames that a run was trained on, or others: where they are, and the store."""
    where = frames_of(run / "environment.json") if frames is None else frames
    return where, open_store(config, None if where == "rendered" else where)


def frames_of(environment: Path) -> str:
    """Where a run read its frames."""
    found = read_json(environment, "where the frames are from ", {"frames": str}, "give --frames")
    return str(found["frames"])


def neighbors_figure(images: str | Path, out: Path, *, number: int = 8, seed: int = 0) -> None:
    """Draw some images, one per row, each followed by its neighbors with their cosines."""
    store = open_images(images)
    path = find_neighbors(images)
    found = load_neighbors(path)
    check_neighbors(found, path, len(store), store.fingerprint())
    shown = np.random.default_rng(seed).choice(len(store), size=min(number, len(store)), replace=False)
    text = f"Images and their {found.k} nearest neighbors by {found.encoder}, with cosines."
    with drawing(out, (1.4 * (1 + found.k) + 0.3, 1.55 * len(shown) + 0.5), text=text) as figure:
        axes = figure.subplots(len(shown), 1 + found.k, squeeze=False)
        for row, image in zip(axes, shown.tolist(), strict=True):
            show_picture(row[0], thumbnail(store.read(image, [0])[0]), f"image {image}")
            for place, other, cosine in zip(row[1:], found.indices[image], found.cosines[image], strict=True):
                show_picture(place, thumbnail(store.read(int(other), [0])[0]), f"{cosine:.3f}")


def thumbnail(image: Frame) -> UInt8[np.ndarray, "side side 3"]:
    """The middle of an image, as a square."""
    square = ImageOps.fit(Image.fromarray(image), (SIDE, SIDE), Image.Resampling.BICUBIC)
    return np.asarray(square)
