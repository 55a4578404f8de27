"""Clips with true and carried labels, from any benchmark or from anybody's video, in one form."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from tcore.data.images import Frame
from tcore.data.video import open_video
from tcore.errors import InputError
from tcore.evaluation.benchmarks.benchmark import Benchmark, Kind
from tcore.evaluation.benchmarks.rendered import propagate_video, true_joints
from tcore.evaluation.encoder import Encoder
from tcore.evaluation.masks import Ids, read_ids
from tcore.evaluation.protocols import RENDERED, TCORE, Protocol
from tcore.evaluation.scores import BOX_SHARE
from tcore.show.clips import rendered_clip, rendered_name
from tcore.text import did_you_mean
from tcore.video.propagate_video import propagate

Joints = Float[np.ndarray, "2 joints time"]


@dataclass(frozen=True)
class Carried:
    """A clip, what was carried through it and, where it is known, the truth; frames are read when asked for.

    Ids are one array per frame; joints are x, y in pixels, NaN where one is lost or not visible.
    """

    name: str
    kind: Kind
    length: int
    read: Callable[[int], Frame]
    found: list[Ids] | Joints
    truth: list[Ids] | Joints | None


def carry_rendered(encoder: Encoder, source: str, protocol: Protocol = RENDERED) -> dict[Kind, Carried]:
    """Objects, parts and joints of a held-out rendered video."""
    video = rendered_clip(source, encoder.patch_size)
    found = propagate_video(video, lambda frames: encoder(frames).float().cpu(), protocol)
    name, time = rendered_name(source), len(video.frames)

    def one(kind: Kind, labels: Any, truth: Any) -> Carried:
        return Carried(name, kind, time, lambda index: video.frames[index], labels, truth)

    return {
        "objects": one("objects", list(found.objects), list(video.objects)),
        "parts": one("parts", list(found.parts), list(video.parts)),
        "joints": one("joints", found.joints, true_joints(video)),
    }


def carry_clip(encoder: Encoder, benchmark: Benchmark, name: str = "") -> Carried:
    """One clip of a benchmark, by its name or the first one, through the path that scores it."""
    names = [clip.name for clip in benchmark.clips]
    if name and name not in names:
        raise InputError(f"no clip {name!r} in {benchmark.name}.{did_you_mean(name, names)}")
    clip = benchmark.clips[names.index(name) if name else 0]
    read, found, truth = benchmark.label(encoder, clip)
    return Carried(clip.name, benchmark.kind, clip.length, read, found, truth)


def carry_video(
    encoder: Encoder, path: Path, mask: Path, *, protocol: Protocol = TCORE, long_side: int = 880
) -> Carried:
    """Masks of anybody's video from the mask of its first frame; the truth is not known."""
    video = open_video(path)
    frames: list[Frame] = []

    def kept() -> Any:
        for frame in video:
            frames.append(frame)
            yield frame

    found = list(propagate(encoder, kept(), read_ids(mask), protocol=protocol, long_side=long_side))
    return Carried(path.name, "objects", len(frames), lambda index: frames[index], found, None)


def score_frames(carried: Carried) -> Float[np.ndarray, " time"]:
    """How good each frame is: mean IoU of its objects or parts, or the share of joints in place.

    A joint is in place as PCK@.2 has it. NaN where nothing can be told.
    """
    if carried.truth is None:
        return np.full(carried.length, np.nan)
    if carried.kind == "joints":
        return _score_joints(np.asarray(carried.truth), np.asarray(carried.found))
    scores = np.full(carried.length, np.nan)
    ids = sorted(set(np.unique(carried.truth[0]).tolist()) - {0})
    for index, (truth, found) in enumerate(zip(carried.truth, carried.found, strict=False)):
        values = []
        for number in ids:
            true, guess = truth == number, found == number
            union = int((true | guess).sum())
            if union or carried.kind == "objects":  # an object that is rightly not there is right
                values.append(int((true & guess).sum()) / union if union else 1.0)
        if values:
            scores[index] = float(np.mean(values))
    return scores


def _score_joints(truth: Joints, found: Joints) -> Float[np.ndarray, " time"]:
    known = ~np.isnan(truth).any(axis=0)
    scores = np.full(truth.shape[2], np.nan)
    for index in range(truth.shape[2]):
        at = known[:, index]
        if at.sum() >= 2:
            points = truth[:, at, index]
            extent = BOX_SHARE * float(np.linalg.norm(points.max(axis=1) - points.min(axis=1)))
            far = np.linalg.norm(points - found[:, at, index], axis=0)
            scores[index] = float(np.mean(np.nan_to_num(far, nan=np.inf) <= 0.2 * max(extent, 1.0)))
    return scores
