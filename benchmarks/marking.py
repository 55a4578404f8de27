"""How good marks are: `python benchmarks/marking.py $TCORE_DATA/davis2016 $TCORE_DATA/eval/masks_ytvos`.

For every object of the first labeled frame of each clip (layout of DAVIS): the overlap (IoU) of its true
mask with its box itself, with what `tcore.mark` makes of the box, and of 1, 3 and 5 simulated clicks. A click
falls on the pixel deepest inside of what is missing, or of what is too much, whichever is larger. `--nearby
1` also gives the frames right before and after; `--at` marks another labeled frame than the first.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from tcore.data.images import read_image
from tcore.data.stores import list_images
from tcore.evaluation.encoders import load_encoder
from tcore.evaluation.masks import VOID, read_ids
from tcore.video.mark import Marker, MaskPixels

CLICKS = (1, 3, 5)
SMALLEST = 200  # pixels; smaller objects are left out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("roots", type=Path, nargs="+", help="folders with the layout of DAVIS")
    parser.add_argument("--encoder", default="default")
    parser.add_argument("--objects", type=int, default=20, help="at most this many objects of a frame")
    parser.add_argument("--nearby", type=int, default=0, help="frames before and after that are looked at")
    parser.add_argument("--at", type=int, default=0, help="which of the labeled frames is marked, from 0")
    options = parser.parse_args()
    encoder = load_encoder(options.encoder)
    names = ["the box", "from the box", *(f"{count} clicks" for count in CLICKS)]
    print(f"{'':32}" + "".join(f"{name:>14}" for name in names))
    spent = {"encoder": 0.0, "mark": 0.0}
    marked = frames = 0
    for root in options.roots:
        rows = []
        for folder in sorted((root / "Annotations" / "480p").iterdir()):
            truth = list_images(folder)[options.at]
            images = list_images(root / "JPEGImages" / "480p" / folder.name)
            place = [image.stem for image in images].index(truth.stem)
            near = [step for step in range(-options.nearby, options.nearby + 1) if step]
            nearby = [read_image(images[place + step]) for step in near if 0 <= place + step < len(images)]
            ids = read_ids(truth)
            ids = np.where(ids == VOID, 0 if (ids[ids != VOID] > 0).any() else 1, ids)
            begun = time.process_time()
            marker = Marker(read_image(images[place]), encoder, nearby)
            spent["encoder"], frames = spent["encoder"] + time.process_time() - begun, frames + 1
            begun, found = time.process_time(), []
            for label in np.unique(ids[ids > 0])[: options.objects]:
                if (ids == label).sum() >= SMALLEST:
                    found.append(score(marker, ids == label))
            marked += sum(1 + CLICKS[-1] for _ in found)
            spent["mark"] += time.process_time() - begun
            rows += found
            if found:
                print(line(f"{root.name}/{folder.name}", np.mean(found, axis=0)), flush=True)
        print(line(f"{root.name}: {len(rows)} objects", np.mean(rows, axis=0)), flush=True)
    each = spent["encoder"] / frames, spent["mark"] / max(1, marked)
    print("CPU time: features of a frame {:.2f} s, a mark {:.2f} s".format(*each))


def line(name: str, scores: np.ndarray) -> str:
    return f"{name:32}" + "".join(f"{value:14.3f}" for value in scores)


def score(marker: Marker, truth: MaskPixels) -> list[float]:
    """Overlap of the box itself, of the mask from it, and after 1, 3 and 5 clicks."""
    rows, columns = np.nonzero(truth)
    top, left = int(rows.min()), int(columns.min())
    high, wide = int(np.ptp(rows)) + 1, int(np.ptp(columns)) + 1
    box = np.zeros_like(truth)
    box[top : top + high, left : left + wide] = True
    found = [overlap(box, truth), overlap(marker.mark(box=(left, top, wide, high)), truth)]
    on, off, guess = list[tuple[int, int]](), list[tuple[int, int]](), np.zeros_like(truth)
    for count in range(1, CLICKS[-1] + 1):
        missing, extra = truth & ~guess, guess & ~truth
        if missing.sum() >= extra.sum():
            on.append(deepest(missing))
        else:
            off.append(deepest(extra))
        guess = marker.mark(clicks=on, clicks_not=off)
        if count in CLICKS:
            found.append(overlap(guess, truth))
    return found


def overlap(found: MaskPixels, truth: MaskPixels) -> float:
    return float((found & truth).sum() / max(1, (found | truth).sum()))


def deepest(mask: MaskPixels) -> tuple[int, int]:
    """The pixel (x, y) farthest from the border of a mask."""
    left = torch.from_numpy(np.pad(mask, 1)).float()[None]
    depth = left.clone()
    while left.any():
        left = -F.max_pool2d(-left, 3, 1, 1)
        depth += left
    place = int(depth.argmax())
    return place % depth.shape[2] - 1, place // depth.shape[2] - 1


if __name__ == "__main__":
    main()
