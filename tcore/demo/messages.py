"""What the page and the program tell each other: labels in, the state of a job out."""

import math
from typing import Any

import numpy as np
from jaxtyping import Int, Shaped

from tcore.demo.clips import Truth
from tcore.demo.job import Job
from tcore.errors import InputError
from tcore.evaluation.masks import Ids
from tcore.video.labels import Masks, Points
from tcore.video.tracked import Found

MAX_OBJECTS, MAX_POINTS = 20, 100


def read_given(data: Any, size: tuple[int, int]) -> Masks | Points:
    """Labels that the page sends: runs of ids by frame, or points by frame and name."""
    try:
        if data["kind"] == "masks":
            return Masks({int(frame): _ids(runs, size) for frame, runs in data["given"].items()})
        if data["kind"] != "points":
            raise InputError(f"labels are masks or points, not {data['kind']!r}.")
        names = tuple(str(name)[:60] for name in data["names"])
        if len(names) > MAX_POINTS or len(set(names)) < len(names):
            raise InputError(f"{len(names)} points: need {MAX_POINTS} or fewer, each with its own name.")
        frames = {int(frame): _points(names, places) for frame, places in data["given"].items()}
        return Points(names, frames)
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"these labels cannot be read: {error!r}.") from error


def _points(names: tuple[str, ...], places: list[Any]) -> dict[str, tuple[float, float]]:
    xy = [(math.nan, math.nan) if place is None else (float(place[0]), float(place[1])) for place in places]
    return dict(zip(names, xy, strict=True))


def _ids(runs: list[int], size: tuple[int, int]) -> Ids:
    """Ids of a frame from [length, id, length, id, ...]."""
    pairs = np.array(runs, dtype=np.int64).reshape(-1, 2)
    height, width = size
    if (pairs < 0).any() or (pairs[:, 0] > height * width).any() or pairs[:, 0].sum() != height * width:
        raise InputError(f"a mask of this clip must have {height}x{width} pixels.")
    if pairs[:, 1].max(initial=0) > MAX_OBJECTS:
        raise InputError(f"object {pairs[:, 1].max()}: there are at most {MAX_OBJECTS}.")
    return np.repeat(pairs[:, 1], pairs[:, 0]).reshape(height, width).astype(np.uint8)


def truth_message(truth: Truth) -> dict[str, Any]:
    """The true labels of a sample: runs of ids, and the visible joints."""
    lengths, ids = run_lengths(truth.ids)
    points = [[name, round(x, 2), round(y, 2)] for name, (x, y) in truth.points.items()]
    return {"runs": np.column_stack([lengths, ids]).ravel().tolist(), "points": points}


def run_lengths(
    labels: np.ndarray,
) -> tuple[Int[np.ndarray, " runs"], Shaped[np.ndarray, " runs"]]:
    """Lengths and values of the runs of equal values, row by row.

    >>> run_lengths(np.array([[0, 3], [3, 3]]))
    (array([1, 3]), array([0, 3]))
    """
    flat = labels.ravel()
    starts = np.flatnonzero(np.diff(flat.astype(np.int64), prepend=-1))
    return np.diff(starts, append=flat.size), flat[starts]


def state_message(job: Job) -> dict[str, Any]:
    """Everything that the page shows about a clip and its run."""
    clip, progress, given = job.clip, job.progress, job.given
    state = progress.state  # read before the frames: a run that is done has all of them
    found = dict(job.found)
    seconds = progress.seconds / max(1, len(found) - progress.start)
    return {
        "clip": {
            "name": clip.name,
            "frames": len(clip.frames),
            "height": clip.size[0],
            "width": clip.size[1],
            "rate": float(clip.rate),
            "rows": job.grid[0],
            "columns": job.grid[1],
            "topk": job.protocol.topk,
            "remarks": list(clip.remarks),
            "sample": clip.truth is not None,
            "key": job.key,
        },
        "state": state,
        "error": progress.error,
        "start": progress.start,
        "done": len(found),
        "left": round(seconds * (len(clip.frames) - len(found)), 1) if progress.seconds else None,
        "kind": None if given is None else "masks" if isinstance(given, Masks) else "points",
        "names": list(given.names) if isinstance(given, Points) else [],
        "given": sorted(given.frames) if given else [],
        "confidence": [round(found[index].confidence, 4) for index in sorted(found)],
        "points": [_places(found[index]) for index in sorted(found)] if isinstance(given, Points) else [],
    }


def _places(found: Found) -> list[list[float] | None]:
    """Points of a frame: x, y and confidence, or None where one is lost."""
    return [
        None if math.isnan(x) else [round(x, 2), round(y, 2), round(c, 4)]
        for x, y, c in found.values.tolist()
    ]
