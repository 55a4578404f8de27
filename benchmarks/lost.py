"""Does the confidence of an object say when it is wrong? `python benchmarks/lost.py $TCORE_DATA/davis2016`.

Propagates the first mask of every clip (layout of DAVIS, any id above 0 is the object) and compares, over all
frames but the first, the object's confidence with its true J: rank correlation, area under the ROC curve for
J < .3, and what a threshold catches.
"""

import argparse
from pathlib import Path

import numpy as np

from tcore.data.images import read_image
from tcore.data.stores import list_images
from tcore.evaluation.encoders import load_encoder
from tcore.evaluation.masks import read_ids
from tcore.video.propagate import propagate
from tcore.video.propagate_video import LOST

WRONG = 0.3  # J below which an object counts as lost


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("roots", type=Path, nargs="+", help="folders with the layout of DAVIS")
    parser.add_argument("--encoder", default="default")
    parser.add_argument("--every", type=int, default=4, help="take every so many frames")
    parser.add_argument("--frames", type=int, default=18, help="at most this many of them")
    parser.add_argument("--detail", default="coarse", choices=("coarse", "fine", "finest"))
    parser.add_argument("--long-side", type=int, default=None, help="shrink frames to this long side")
    options = parser.parse_args()
    encoder = load_encoder(options.encoder)
    for root in options.roots:
        sure, right = list[float](), list[float]()
        for folder in sorted((root / "Annotations" / "480p").iterdir()):
            truths = list_images(folder)[:: options.every][: options.frames]
            images = (
                next((root / "JPEGImages" / "480p" / folder.name).glob(f"{one.stem}.*")) for one in truths
            )
            first = read_ids(truths[0]) > 0
            found = propagate(
                encoder, map(read_image, images), first, detail=options.detail, long_side=options.long_side
            )
            before = len(right)
            for truth, one in zip(truths[1:], list(found)[1:], strict=True):
                ids, mask = one.labels > 0, read_ids(truth) > 0
                right.append(float((ids & mask).sum() / max(1, (ids | mask).sum())))
                sure.append(one.each[0])
            print(
                f"{folder.name:20} J {np.mean(right[before:]):.3f}  confidence {np.mean(sure[before:]):.3f}",
                flush=True,
            )
        report(root.name, np.array(sure), np.array(right))


def report(name: str, sure: np.ndarray, right: np.ndarray) -> None:
    """Print how well confidence predicts J."""
    wrong, flagged = right < WRONG, sure < LOST
    linked, found = np.corrcoef(ranks(sure), ranks(right))[0, 1], auroc(sure, wrong)
    print(f"{name}: {len(right)} frames, {wrong.mean():.0%} with J < {WRONG}")
    print(f"  rank correlation with J {linked:.3f}, AUROC for J < {WRONG} {found:.3f}")
    caught = f"{wrong[flagged].mean():.0%} of these are wrong, {flagged[wrong].mean():.0%} of the wrong ones"
    print(f"  confidence < {LOST}: {flagged.mean():.0%} of the frames; {caught}", flush=True)


def ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 1 on; equal values share theirs."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2)[place]


def auroc(sure: np.ndarray, wrong: np.ndarray) -> float:
    """The chance that a wrong frame is less sure than a right one."""
    bad, good = int(wrong.sum()), int((~wrong).sum())
    return float((ranks(sure)[~wrong].sum() - good * (good + 1) / 2) / max(1, bad * good))


if __name__ == "__main__":
    main()
