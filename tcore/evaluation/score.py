"""Scores of anybody's predictions: files in, plain nested numbers out."""

import io
import math
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from tcore.data.stores import list_images
from tcore.errors import InputError
from tcore.evaluation import davis, jhmdb, scores, vip
from tcore.evaluation.masks import MaskClip, as_binary, read_ids
from tcore.evaluation.scores import ObjectScores, Statistics
from tcore.files import read_bytes

PCK_THRESHOLDS = (0.1, 0.2)


def score_davis(truth: Path, predictions: Path, *, binary: bool = False) -> dict[str, Any]:
    """J and F of every sequence and object, as fractions."""
    return {clip.name: score_sequence(clip, predictions, binary) for clip in davis.find_clips(truth)[0]}


def score_sequence(clip: MaskClip, predictions: Path, binary: bool) -> dict[str, Any]:
    """One sequence of predicted masks beside the truth."""
    found = predicted_masks(clip, predictions)
    # The ends of a sequence are not scored, and the last one need not be there.
    last = len(clip.masks) - 1
    true_ids = [davis.read_truth(clip, i, binary) for i in range(len(clip.masks))]
    ids = [
        true_ids[0],
        *(_read_like(found, clip, i, true_ids[i], binary) for i in range(1, last)),
        true_ids[last],
    ]
    return describe_objects(scores.davis_scores(np.stack(true_ids), np.stack(ids)))


def predicted_masks(clip: MaskClip, predictions: Path) -> dict[str, Path]:
    """The predicted masks of a clip by their frame."""
    folder = predictions / clip.name
    if not folder.is_dir():
        raise InputError(f"no predictions for {clip.name}: {folder} does not exist.")
    return {path.stem: path for path in list_images(folder)}


def _read_like(
    found: dict[str, Path], clip: MaskClip, index: int, truth: np.ndarray, binary: bool
) -> np.ndarray:
    stem = clip.masks[index].stem
    if stem not in found:
        raise InputError(f"no prediction for frame {stem} of {clip.name}.")
    ids = read_ids(found[stem])
    if ids.shape != truth.shape:
        raise InputError(
            f"prediction {found[stem]} is {ids.shape[0]}x{ids.shape[1]}, "
            f"the truth {truth.shape[0]}x{truth.shape[1]}: need the same size."
        )
    return as_binary(ids) if binary else ids


def describe_objects(objects: list[ObjectScores]) -> dict[str, Any]:
    """Means over the objects of a sequence, and each object where there are several."""
    frames = len(objects[0].region) if objects else 0
    each = [{"J": one.region_statistics._asdict(), "F": one.boundary_statistics._asdict()} for one in objects]
    described: dict[str, Any] = {"frames": frames}
    for name in ("J", "F"):
        described[name] = {
            part: float(np.mean([one[name][part] for one in each])) if each else float("nan")
            for part in Statistics._fields
        }
    if len(each) > 1:
        described["objects"] = {str(number): one for number, one in enumerate(each, start=1)}
    return described


def summarize_davis(sequences: dict[str, Any]) -> dict[str, float]:
    """J, F and J&F: means over all objects of all sequences."""
    objects = [one for s in sequences.values() for one in s.get("objects", {"1": s}).values()]
    j, f = (float(np.mean([one[name]["mean"] for one in objects])) for name in ("J", "F"))
    return {"J": j, "F": f, "J&F": (j + f) / 2, "objects": len(objects)}


def score_vip(truth: Path, predictions: Path, *, skip_first: bool = False) -> dict[str, Any]:
    """Mean IoU over one confusion matrix of all frames."""
    confusion = np.zeros((vip.NUM_CLASSES, vip.NUM_CLASSES), dtype=np.int64)
    clips, _ = vip.find_clips(truth)
    for clip in clips:
        found = predicted_masks(clip, predictions)
        for index, path in list(enumerate(clip.masks))[int(skip_first) :]:
            true_ids = read_ids(path)
            confusion += scores.confusion_matrix(true_ids, _read_like(found, clip, index, true_ids, False))
    return describe_confusion(confusion)


def describe_confusion(confusion: np.ndarray) -> dict[str, Any]:
    """Mean IoU, and that of every class that occurs."""
    iou = scores.class_iou(confusion)
    classes = {str(index): float(value) for index, value in enumerate(iou) if not np.isnan(value)}
    return {"mIoU": scores.mean_iou(confusion), "classes": classes}


def score_jhmdb(truth: Path, predictions: Path, *, count_lost: bool = False) -> dict[str, Any]:
    """PCK over all clips; predictions are the joints.npz files that an evaluation saves."""
    true_joints, found = [], []
    for clip in jhmdb.find_clips(truth)[0]:
        true_joints.append(jhmdb.read_truth(clip))
        found.append(read_joints(predictions / clip.name / "joints.npz", true_joints[-1].shape))
    return describe_pose(scores.pck(true_joints, found, PCK_THRESHOLDS, count_lost=count_lost))


def read_joints(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """Predicted joints of a clip: x, y in pixels, NaN where one is lost."""
    try:
        data = io.BytesIO(read_bytes(path))
        with zipfile.ZipFile(data) as archive:
            if archive.getinfo("joints.npy").file_size > 16 * math.prod(shape) + 4096:
                raise ValueError("more numbers than there are joints")
        with np.load(data) as arrays:
            joints = np.asarray(arrays["joints"], dtype=np.float64)
    except FileNotFoundError as error:
        raise InputError(f"no predictions: {path} does not exist.") from error
    except Exception as error:  # what is no such file can raise anything
        raise InputError(f"cannot read {path}: need an npz file with the array 'joints'.") from error
    if joints.shape != shape:
        raise InputError(f"{path}: joints is {joints.shape}, need {shape} (x/y, joint, frame).")
    return joints


def describe_pose(found: scores.PoseScores) -> dict[str, Any]:
    """PCK at each threshold, and what could not be scored."""
    named = {f"PCK@{t:g}": float(value) for t, value in zip(PCK_THRESHOLDS, found.pck, strict=True)}
    return {
        **named,
        "scored": found.scored,
        "lost_in_truth": found.lost_in_truth,
        "lost_in_prediction": found.lost_in_prediction,
    }


def plain(values: np.ndarray) -> list[Any]:
    """Nested lists with None for what is lost, as JSON has no NaN."""
    listed = values.astype(object)
    listed[np.isnan(values)] = None
    return list(listed.tolist())
