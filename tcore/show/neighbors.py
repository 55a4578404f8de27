"""A picture of images beside their neighbors."""

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageOps

from tcore.data.images import Frame
from tcore.data.neighbors import check_neighbors, find_neighbors, load_neighbors
from tcore.data.stores import open_images
from tcore.errors import InputError
from tcore.show.plotting import save_picture

SIDE, GAP, CAPTION, APART = 128, 4, 16, 20


def neighbors_picture(
    images: str | Path,
    out: Path,
    *,
    number: int = 8,
    seed: int = 0,
    neighbors: str | Path | None = None,
) -> None:
    """Draw some images, one per row, each followed by its neighbors with their cosines."""
    if number < 1:
        raise InputError(f"images={number}: need 1 or more.")
    store = open_images(images)
    path = Path(neighbors) if neighbors is not None else find_neighbors(images)
    found = load_neighbors(path)
    check_neighbors(found, path, len(store), store.fingerprint())
    rng = np.random.default_rng(seed)
    shown = rng.choice(len(store), size=min(number, len(store)), replace=False)

    width = SIDE + APART + found.k * (SIDE + GAP) + GAP
    sheet = Image.new("RGB", (width, CAPTION + len(shown) * (SIDE + CAPTION + GAP)), "white")
    draw = ImageDraw.Draw(sheet)
    draw.text((GAP, 2), f"images and their {found.k} neighbors by {found.encoder}", fill="black")
    for row, image in enumerate(shown.tolist()):
        top = CAPTION + row * (SIDE + CAPTION + GAP)
        sheet.paste(thumbnail(store.read(image, [0])[0]), (GAP, top))
        for column, (other, cosine) in enumerate(
            zip(found.indices[image].tolist(), found.cosines[image].tolist(), strict=True)
        ):
            left = GAP + SIDE + APART + column * (SIDE + GAP)
            sheet.paste(thumbnail(store.read(other, [0])[0]), (left, top))
            draw.text((left, top + SIDE + 1), f"{cosine:.3f}", fill="black")
    save_picture(sheet, out)


def thumbnail(image: Frame) -> Image.Image:
    """The middle of an image, as a square."""
    return ImageOps.fit(Image.fromarray(image), (SIDE, SIDE), Image.Resampling.BICUBIC)
