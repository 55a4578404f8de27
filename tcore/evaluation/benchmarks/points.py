"""A user's own points: folders of frames with a keypoints.csv, scored by PCK relative to each individual."""

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from tcore.data.images import ahead, read_image
from tcore.data.stores import list_images
from tcore.errors import InputError
from tcore.evaluation import scores
from tcore.evaluation.benchmarks.benchmark import Clip, JointBenchmark, Layout, Result, Source, frame_size
from tcore.evaluation.encoder import Encoder
from tcore.evaluation.pose import locate_points, points_protocol, rescale, stamp_points
from tcore.evaluation.propagate import Features, Labels, propagate_features
from tcore.evaluation.protocols import CELL, Protocol
from tcore.evaluation.resize import Size, input_size
from tcore.evaluation.run_clip import encode
from tcore.files import read_csv

FILE = "keypoints.csv"
COLUMNS = ("frame", "name", "x", "y", "visible")
SHORT_SIDE = 480
Tracks = Float[np.ndarray, "2 points time"]  # x, y in pixels from 0, NaN where a point is not visible


class Points(JointBenchmark):
    """Points from their first visible frame on, scored by the share that stays in place (PCK)."""

    name = "points"
    options = ("size",)

    @classmethod
    def layout(cls, source: Source) -> Layout:
        """All folders with a keypoints.csv, up to two levels below."""
        root = Path(str(source))
        found = sorted({*root.glob(f"*/{FILE}"), *root.glob(f"*/*/{FILE}")})
        if not found:
            raise InputError(f"no clips under {root}: need folders of frames with a {FILE} in each.")
        clips = {path.parent.relative_to(root).as_posix(): path for path in found}
        return Layout(list(clips), False, lambda name: _find_clip(name, clips[name]))

    @classmethod
    def adapt(cls, chosen: Protocol) -> Protocol:
        """The form of the protocol for points, its radius that of frames with a short side of 480 pixels."""
        adapted = super().adapt(chosen)
        rows, columns = (side // CELL for side in adapted.finer((SHORT_SIDE, SHORT_SIDE), CELL))
        return points_protocol(adapted, (rows, columns))

    def own_size(self, frame: Size, patch_size: int) -> Size:
        """The frame's own size, or a short side of 480 pixels where it is larger; or a finer grid of that."""
        return self.protocol.finer(input_size(frame, 1, short=min(SHORT_SIDE, *frame)), patch_size)

    @classmethod
    def read_truth(cls, clip: Clip) -> Tracks:
        """The points of a clip that are ever visible."""
        return read_keypoints(clip)[1]

    def predict(self, encoder: Encoder, clip: Clip) -> tuple[Tracks, Tracks, Size]:
        """Found and true points of a clip, and the input size; points that start together go together."""
        truth = self.read_truth(clip)
        size = self.input_size(encoder, frame_size(clip.frames[0]))
        grid = (size[0] // encoder.patch_size, size[1] // encoder.patch_size)
        visible = ~np.isnan(truth[0])
        starts, end = visible.argmax(axis=1), int(np.flatnonzero(visible.any(axis=0))[-1]) + 1
        found = np.full(truth.shape, np.nan)
        if encoder.copies:
            for point, start in enumerate(starts.tolist()):
                found[:, point, start:] = truth[:, point, start, None]
            return found, truth, size
        runs: dict[int, tuple[list[Features], Iterator[Labels]]] = {}
        first = int(starts.min())
        for index, frame in enumerate(ahead(read_image, clip.frames[first:end]), first):
            image = (frame.shape[0], frame.shape[1])  # labeled images may be of several sizes
            features = encode(encoder, frame, size, self.protocol.precision)
            if index in starts:
                cells = rescale(truth[:, starts == index, index] + 0.5, image, grid) - 0.5
                waiting: list[Features] = []
                labels = propagate_features(_taken(waiting), stamp_points(cells.T, grid), self.protocol)
                runs[index] = (waiting, labels)
            for start, (waiting, labels) in runs.items():
                waiting.append(features)
                cells = locate_points(next(labels))[:, :2].T.cpu().numpy()
                found[:, starts == start, index] = rescale(cells + 0.5, grid, image) - 0.5
        return found, truth, size

    def total(self, results: Iterable[Result]) -> Result:
        """PCK at each threshold: the mean over the points of a clip, then over clips."""
        clips = list(results)
        return {
            name: float(
                np.mean([np.mean([point[name] for point in clip["points"].values()]) for clip in clips])
            )
            for name in self.score_names
        } | {"scored": sum(point["scored"] for clip in clips for point in clip["points"].values())}

    def compare(self, clip: Any, found: Tracks) -> Result:
        """PCK of every point that is visible after its first frame."""
        names, truth = read_keypoints(clip)
        shares, counts = scores.pck_of_points(truth, found, individuals(names))
        return {
            "points": {
                name: {"scored": int(count)}
                | {f"PCK@{t:g}": float(s) for t, s in zip(scores.THRESHOLDS, share, strict=True)}
                for name, share, count in zip(names, shares.T, counts, strict=True)
                if count
            }
        }


def individuals(names: Iterable[str]) -> list[str]:
    """Whom each point belongs to: the part of its name before the first `_`, where all names have one.

    >>> individuals(["a0_head", "a1_head"]), individuals(["left_eye", "nose"])
    (['a0', 'a1'], ['', ''])
    """
    parts = [name.partition("_") for name in names]
    several = all(prefix and rest for prefix, _, rest in parts)
    return [prefix if several else "" for prefix, _, _ in parts]


def read_keypoints(clip: Clip) -> tuple[list[str], Tracks]:
    """Names and positions of the points of a clip; a point that is never visible is left out."""
    path, seen = clip.truth[0], dict[tuple[str, int], tuple[float, float]]()
    for where, row in read_csv(path):
        if missing := set(COLUMNS) - row.keys():
            raise InputError(f"{path}: no column {min(missing)}; need {','.join(COLUMNS)}.")
        try:
            name, frame = row["name"], int(row["frame"])
            x, y, visible = (float(row[column] or math.nan) for column in ("x", "y", "visible"))
        except ValueError as error:
            raise InputError(f"{where}: {error}; need {','.join(COLUMNS)}.") from error
        if not 0 <= frame < len(clip.frames):
            raise InputError(f"{where}: frame {frame} of {len(clip.frames)}, from 0 on.")
        if visible > 0:
            if (name, frame) in seen or not name or not (math.isfinite(x) and math.isfinite(y)):
                raise InputError(f"{where}: {name!r} of frame {frame} has no place, or two.")
            seen[name, frame] = (x, y)
    names = list(dict.fromkeys(name for name, _ in seen))
    truth = np.full((2, len(names), len(clip.frames)), np.nan)
    for (name, frame), place in seen.items():
        truth[:, names.index(name), frame] = place
    if not (np.isfinite(truth[0]).sum(axis=1) > 1).any():
        raise InputError(f"{path}: no point is visible in two frames; there is nothing to score.")
    return names, truth


def _find_clip(name: str, table: Path) -> Clip:
    frames = list_images(table.parent)
    if not frames:
        raise InputError(f"clip {name} has a {FILE}, but no frames beside it in {table.parent}.")
    return Clip(name, frames, (table,))


def _taken(waiting: list[Features]) -> Iterator[Features]:
    """Features that are put into a list one at a time."""
    while waiting:
        yield waiting.pop()
