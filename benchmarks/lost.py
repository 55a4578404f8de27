"""Does confidence say when an object or a point is wrong? `python benchmarks/lost.py $TCORE_DATA/davis2016`.

Propagates the first mask of every clip (layout of DAVIS, any id above 0 is the object) and compares, over all
frames but the first, the object's confidence with its true J: rank correlation, area under the ROC curve for
J < .3, and what a threshold catches. Of folders of clips with a keypoints.csv, it propagates the points of
the first labeled frame, and compares confidence with their distance from the truth, in units of the larger
side of the box around their individual; wrong is more than .2 of it. Figures of points are for all clips, for
every folder, and for clips of a folder whose names begin alike (dance_00, dance_02).
"""

import argparse
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tcore.data.images import read_image
from tcore.data.stores import list_images
from tcore.evaluation.benchmarks.points import Points, individuals, read_keypoints
from tcore.evaluation.encoder import Encoder
from tcore.evaluation.encoders import load_encoder
from tcore.evaluation.masks import read_ids
from tcore.evaluation.protocols import Detail
from tcore.video.propagate import propagate
from tcore.video.tracked import LOST, LOST_POINT

WRONG = 0.3  # J below which an object counts as lost
FAR = 0.2  # of the box: a point beyond is wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("roots", type=Path, nargs="+", help="layout of DAVIS, or clips with points")
    parser.add_argument("--encoder", default="default")
    parser.add_argument("--clips", nargs="+", help="only these, of clips with points")
    parser.add_argument("--every", type=int, default=4, help="take every so many frames")
    parser.add_argument("--frames", type=int, default=18, help="at most this many of them")
    parser.add_argument("--detail", default="coarse", choices=("coarse", "fine", "finest"))
    parser.add_argument("--long-side", type=int, default=None, help="shrink frames to this long side")
    options = parser.parse_args()
    encoder = load_encoder(options.encoder)
    points = [root for root in options.roots if not (root / "Annotations").is_dir()]
    if points:
        groups = dict[str, list[tuple[np.ndarray, np.ndarray]]]()
        for root in points:
            for name, *pair in follow(encoder, root, options.detail, options.clips):
                family, _, number = name.partition("_")
                for group in {"all points", root.name, f"{root.name} {family}" if number else root.name}:
                    groups.setdefault(group, []).append((pair[0], pair[1]))
        for group, pairs in sorted(groups.items()):
            certain, near = (np.concatenate(values) for values in zip(*pairs, strict=True))
            report(group, certain, near, 1 - FAR, LOST_POINT)
    for root in options.roots:
        if root in points:
            continue
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
        report(root.name, np.array(sure), np.array(right), WRONG, LOST)


def follow(
    encoder: Encoder, root: Path, detail: Detail, clips: list[str] | None
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Name of each clip, confidence of its points in later frames, and 1 minus how far off they are."""
    layout = Points.layout(root)
    for name in layout.names:
        if clips and name not in clips:
            continue
        clip = layout.find(name)
        names, truth = read_keypoints(clip)
        seen, owners = ~np.isnan(truth[0]), np.array(individuals(names))
        first, last = np.flatnonzero(seen.any(axis=0))[[0, -1]]
        some = seen[:, first]
        images = [read_image(path) for path in clip.frames[first : last + 1]]
        if len({image.shape for image in images}) > 1:
            print(f"{name:20} left out: its frames have several sizes", flush=True)
            continue
        found = list(propagate(encoder, images, truth[:, some, first].T, detail=detail))[1:]
        places = np.stack([one.labels for one in found]).transpose(2, 1, 0)
        there = truth[:, :, first + 1 : last + 1]
        box = np.zeros(there.shape[1:])
        for owner in set(owners):
            own = there[:, owners == owner]
            with np.errstate(all="ignore"), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # frames without labels
                box[owners == owner] = (np.nanmax(own, axis=1) - np.nanmin(own, axis=1)).max(axis=0)
        away = np.hypot(*(places - there[:, some])) / np.where(box[some] > 0, box[some], np.nan)
        scored = seen[some, first + 1 : last + 1] & (box[some] > 0)
        sure = np.array([one.each for one in found]).T[scored]
        right = 1 - np.nan_to_num(away, nan=np.inf)[scored]  # a point without a place is wrong
        print(
            f"{name:20} within {FAR} {np.mean(right >= 1 - FAR):.3f}  confidence {sure.mean():.3f}",
            flush=True,
        )
        yield name, sure, right


def report(name: str, sure: np.ndarray, right: np.ndarray, least: float, lost: float) -> None:
    """Print how well confidence predicts J, or 1 minus the error of a point."""
    wrong, flagged = right < least, sure < lost
    linked, found = np.corrcoef(ranks(sure), ranks(right))[0, 1], auroc(sure, wrong)
    print(f"{name}: {len(right)}, {wrong.mean():.0%} of them wrong (below {least:g})")
    print(f"  rank correlation {linked:.3f}, AUROC {found:.3f}")
    caught = f"{wrong[flagged].mean():.0%} of these are wrong, {flagged[wrong].mean():.0%} of the wrong ones"
    print(f"  confidence < {lost}: {flagged.mean():.0%} of all; {caught}", flush=True)


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
