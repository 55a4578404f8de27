"""J, F, mIoU and PCK: arrays in, numbers out."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, Integer

from tcore.errors import InputError

Mask = Bool[np.ndarray, "height width"]
Masks = Bool[np.ndarray, "frames height width"]
IdsOfClip = Integer[np.ndarray, "time height width"]
Confusion = Int[np.ndarray, "classes classes"]
JointsOfClip = Float[np.ndarray, "2 joints frames"]
VOID = 255
"""The id of unlabeled pixels: background for J and F, left out of the mIoU."""

NUM_CLASSES = 20  # of VIP: parts of the body and the background
THRESHOLDS = (0.1, 0.2)  # of the PCK
BOX_SHARE = 0.6
"""PCK measures distances in this share of the diagonal of the box around the true joints."""


class PoseScores(NamedTuple):
    """PCK at each threshold, as fractions, and how many joints could not be scored."""

    pck: Float[np.ndarray, " thresholds"]
    per_joint: Float[np.ndarray, "thresholds joints"]
    scored: int
    lost_in_truth: int
    lost_in_prediction: int


def region_similarity(truth: Masks, prediction: Masks) -> Float[np.ndarray, " frames"]:
    """J: intersection over union of each frame's masks, 1 where both are empty."""
    intersection = np.count_nonzero(truth & prediction, axis=(1, 2))
    union = np.count_nonzero(truth | prediction, axis=(1, 2))
    return np.where(union > 0, intersection / np.maximum(union, 1), 1.0)


def boundary_similarity(truth: Masks, prediction: Masks) -> Float[np.ndarray, " frames"]:
    """F: harmonic mean of the precision and recall of each frame's mask boundaries."""
    radius = math.ceil(0.008 * math.hypot(*truth.shape[1:]))
    # One frame at a time: the maps of one frame stay in the cache, those of a sequence do not.
    return np.array([_boundary_f(t, p, radius) for t, p in zip(truth, prediction, strict=True)], dtype=float)


def boundary_map(mask: Mask) -> Mask:
    """Mark the pixels that differ from their right, lower or lower-right neighbor, where that exists."""
    boundary = np.zeros_like(mask)
    boundary[:, :-1] |= mask[:, :-1] != mask[:, 1:]
    boundary[:-1] |= mask[:-1] != mask[1:]
    boundary[:-1, :-1] |= mask[:-1, :-1] != mask[1:, 1:]
    return boundary


def share_within(points: Mask, targets: Mask, radius: int) -> float:
    """Return the share of the marked points that have a marked target within the radius."""
    # Boundaries are thin: looking around every point for a target costs far less than dilating the targets.
    # counts[y, x] is the number of targets left of column x, so that a run of a row is one difference.
    height, width = points.shape
    counts = np.zeros((height + 2 * radius, width + 1), dtype=np.int32)
    np.cumsum(targets, axis=1, dtype=np.int32, out=counts[radius : radius + height, 1:])
    flat = counts.reshape(-1)
    rows, columns = np.nonzero(points)
    found = np.zeros(len(rows), dtype=bool)
    for dy in range(-radius, radius + 1):
        reach = math.isqrt(radius * radius - dy * dy)
        row_start = (rows + (radius + dy)) * (width + 1)
        left = row_start + np.maximum(columns - reach, 0)
        right = row_start + np.minimum(columns + (reach + 1), width)
        found |= flat[right] > flat[left]
    return float(np.count_nonzero(found)) / len(found)


def _boundary_f(truth: Mask, prediction: Mask, radius: int) -> float:
    true_boundary, found_boundary = boundary_map(truth), boundary_map(prediction)
    true_empty, found_empty = not true_boundary.any(), not found_boundary.any()
    if true_empty or found_empty:
        return float(true_empty and found_empty)
    precision = share_within(found_boundary, true_boundary, radius)
    recall = share_within(true_boundary, found_boundary, radius)
    return 2 * precision * recall / (precision + recall) if precision + recall > 0 else 0.0


def object_statistics(values: Float[np.ndarray, " frames"]) -> dict[str, float]:
    """Return the mean, the share of frames above .5, and the loss from the first quarter to the last."""
    ends = (np.round(np.linspace(1, len(values), 5) + 1e-10) - 1).astype(int)
    first, last = values[ends[0] : ends[1] + 1], values[ends[3] : ends[4] + 1]
    decay = float(first.mean() - last.mean())
    return {"mean": float(values.mean()), "recall": float((values > 0.5).mean()), "decay": decay}


def num_objects(first: Integer[np.ndarray, "height width"]) -> int:
    """The objects of a first mask: those that appear later are not scored."""
    return int(first[first != VOID].max(initial=0))


def object_scores(
    pairs: Iterable[tuple[np.ndarray, np.ndarray]], count: int
) -> list[Float[np.ndarray, "2 frames"]]:
    """J and F of objects 1 to `count`, given the true and the predicted ids of the frames that count."""
    values: list[list[tuple[float, float]]] = [[] for _ in range(count)]
    for truth, found in pairs:
        for number, kept in enumerate(values, start=1):
            masks = truth[None] == number, found[None] == number
            kept.append((float(region_similarity(*masks)[0]), float(boundary_similarity(*masks)[0])))
    return [np.array(kept).T for kept in values]


def davis_scores(truth: IdsOfClip, prediction: IdsOfClip) -> list[Float[np.ndarray, "2 frames"]]:
    """J and F of every object of one sequence of ids; the first and the last frame are not scored."""
    if len(truth) < 3:
        raise InputError(f"sequence has {len(truth)} frames; J and F need at least 3, without the ends.")
    return object_scores(zip(truth[1:-1], prediction[1:-1], strict=True), num_objects(truth[0]))


def confusion_matrix(
    truth: Integer[np.ndarray, "*shape"], prediction: Integer[np.ndarray, "*shape"]
) -> Confusion:
    """Count pixels by (true class, predicted class); pixels whose truth is no class are left out."""
    kept = (truth >= 0) & (truth < NUM_CLASSES)
    rows, columns = truth[kept].astype(np.int64), prediction[kept].astype(np.int64)
    if columns.size and not (columns.min() >= 0 and columns.max() < NUM_CLASSES):
        worst = columns[(columns < 0) | (columns >= NUM_CLASSES)][0]
        raise InputError(f"prediction holds class {worst}; classes are 0..{NUM_CLASSES - 1}")
    counts = np.bincount(rows * NUM_CLASSES + columns, minlength=NUM_CLASSES**2)
    return counts.reshape(NUM_CLASSES, NUM_CLASSES)


def class_iou(confusion: Confusion) -> Float[np.ndarray, " classes"]:
    """Return the IoU of every class; NaN for a class that neither the truth nor the prediction holds."""
    hits = np.diagonal(confusion)
    union = confusion.sum(axis=0) + confusion.sum(axis=1) - hits
    return np.where(union > 0, hits / np.maximum(union, 1), np.nan)


def mean_iou(confusion: Confusion) -> float:
    """Return the mean IoU over the classes that the truth or the prediction holds."""
    iou = class_iou(confusion)
    if np.isnan(iou).all():
        raise InputError("confusion matrix is empty; the mIoU needs at least one pixel with a true class")
    return float(np.nanmean(iou))


def pck(
    truth: Sequence[np.ndarray],
    prediction: Sequence[np.ndarray],
    thresholds: Sequence[float] = THRESHOLDS,
    *,
    count_lost: bool = False,
) -> PoseScores:
    """Score clips of (x, y) pixel coordinates, NaN where a joint is lost; frame 0 is left out.

    A joint counts as right when its distance, in units of .6 times the diagonal of the box around the
    frame's true joints that are not lost, is at most the threshold. Joints are pooled over
    clips, then averaged. Joints that only the prediction lost are left out, or wrong with `count_lost`.
    """
    if not truth:
        raise InputError("no clips to score; PCK needs at least one")
    clips = [(t[:, :, 1:], p[:, :, 1:]) for t, p in zip(truth, prediction, strict=True)]
    distances = np.concatenate([joint_distances(t, p, count_lost) for t, p in clips], axis=1)
    lost_in_truth = sum(int(np.isnan(t).any(axis=0).sum()) for t, _ in clips)
    lost_in_either = sum(int(np.isnan(t + p).any(axis=0).sum()) for t, p in clips)
    scored = ~np.isnan(distances)
    if not scored.any():
        raise InputError(
            f"none of {distances.size} joints can be scored; PCK needs truth and prediction for one"
        )
    samples = scored.sum(axis=1)
    hits = np.stack([(distances <= threshold).sum(axis=1) for threshold in thresholds])
    per_joint = np.where(samples > 0, hits / np.maximum(samples, 1), np.nan)
    return PoseScores(
        pck=np.nanmean(per_joint, axis=1),
        per_joint=per_joint,
        scored=int(samples.sum()),
        lost_in_truth=lost_in_truth,
        lost_in_prediction=lost_in_either - lost_in_truth,
    )


def pck_of_points(
    truth: JointsOfClip, prediction: JointsOfClip, individuals: Sequence[str]
) -> tuple[Float[np.ndarray, "thresholds joints"], Integer[np.ndarray, " joints"]]:
    """The share of the frames in which each point of a clip is right, and how many were scored.

    A point is scored where it is visible, after the first such frame. It is right when its distance, in units
    of the larger side of the box around the visible points of its individual in that frame, is at most the
    threshold; a point that the prediction lost is wrong.
    """
    visible = ~np.isnan(truth[0])
    scored = visible & (visible.cumsum(axis=1) > 1)
    unit = np.zeros(visible.shape)
    for one in set(individuals):
        own = np.array([name == one for name in individuals])
        seen = visible[own][None]
        high = np.where(seen, truth[:, own], -np.inf).max(axis=1)
        low = np.where(seen, truth[:, own], np.inf).min(axis=1)
        unit[own] = np.where(seen.any(axis=1), high - low, 0).max(axis=0)
    distance = np.nan_to_num(np.hypot(*(prediction - truth)), nan=np.inf)
    counts = scored.sum(axis=1)
    # A box without extent has no unit of length: nothing but an exact hit can be right there.
    right = np.stack([(distance <= threshold * unit) & scored for threshold in THRESHOLDS])
    return right.sum(axis=2) / np.maximum(counts, 1), counts


def joint_distances(
    truth: JointsOfClip, prediction: JointsOfClip, count_lost: bool
) -> Float[np.ndarray, "joints frames"]:
    """Return each joint's distance in units of its frame's box, NaN where it is lost."""
    found = ~(np.isnan(truth) | np.isnan(prediction)).any(axis=0)
    # As in the published scores, a joint that only the prediction lost does not stretch the box either.
    boxed = ~np.isnan(truth).any(axis=0) if count_lost else found
    high = np.where(boxed, truth, -np.inf).max(axis=1)
    low = np.where(boxed, truth, np.inf).min(axis=1)
    unit = BOX_SHARE * np.hypot(*np.where(boxed.any(axis=0), high - low, 0))
    distance = np.where(found, np.hypot(*(prediction - truth)), np.where(boxed, np.inf, np.nan))
    # A box without extent has no unit of length: nothing but an exact hit can be right there.
    beyond = np.where(distance > 0, np.inf, distance)
    return np.where(unit > 0, distance / np.where(unit > 0, unit, 1), beyond)
