"""What the page and the program tell each other: labels in; out the state of a job, and about one patch."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tcore.demo.clips import Clip
from tcore.demo.job import Job, numbers
from tcore.demo.limits import Limits
from tcore.errors import InputError
from tcore.evaluation.masks import Ids
from tcore.evaluation.propagate import LabelSource, label_sources
from tcore.evaluation.resize import Size
from tcore.text import format_size
from tcore.video.formats import run_lengths
from tcore.video.labels import Masks, Points
from tcore.video.tracked import Found

MAX_OFFSET = 60  # frames between a patch and its matches


def read_given(data: Any, clip: Clip, limits: Limits) -> Masks | Points:
    """Labels that the page sends: runs of ids by frame, or points by frame and name."""
    try:
        given = {int(frame): labels for frame, labels in data["given"].items()}
        if not given:
            raise InputError("no frame has labels yet: mark an object or a point on one.")
        if len(given) > limits.marked:
            raise InputError(f"{len(given)} frames have labels of yours: at most {limits.marked} may.")
        if min(given) < 0 or max(given) >= clip.count:
            raise InputError(f"labels for frame {max(given)}, but there are {clip.count} frames.")
        if data["kind"] == "masks":
            return Masks({frame: _ids(runs, clip.size, limits.objects) for frame, runs in given.items()})
        names = tuple(_name(name) for name in data["names"])
        if len(names) > limits.points or len(set(names)) < len(names):
            raise InputError(f"{len(names)} points: need {limits.points} or fewer, each with its own name.")
        return Points(names, {frame: _points(names, places) for frame, places in given.items()})
    except InputError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError, IndexError) as error:
        raise InputError("these labels cannot be read: need runs of ids, or x and y of points.") from error


def read_hints(data: Any, clip: Clip, limits: Limits) -> tuple[int, dict[str, Any]]:
    """A frame, and what the page says about an object there, as `Marker.mark` takes it."""
    try:
        frame = int(data["frame"])
        if not 0 <= frame < clip.count:
            raise InputError(f"there is no frame {frame}.")
        said: dict[str, Any] = {
            name: [_pair(xy) for xy in data.get(name, ())] for name in ("clicks", "clicks_not")
        }
        if sum(map(len, said.values())) > limits.points:
            raise InputError(f"more than {limits.points} clicks on one object.")
        if data.get("box") is not None:
            left, top, width, height = map(float, data["box"])
            said["box"] = (left, top, width, height)
        for name in ("scribble", "brush"):
            if data.get(name) is not None:
                said[name] = _ids(data[name], clip.size, 1) > 0
        return frame, said
    except InputError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError, IndexError) as error:
        raise InputError(
            "this mark cannot be read: need frame, and box, clicks or runs of pixels."
        ) from error


def _pair(xy: Any) -> tuple[float, float]:
    x, y = xy
    return float(x), float(y)


def _name(name: Any) -> str:
    """A name that can be written: JSON may hold halves of characters."""
    return str(name)[:60].encode(errors="replace").decode()


def _points(names: tuple[str, ...], places: list[Any]) -> dict[str, tuple[float, float]]:
    xy = [(math.nan, math.nan) if place is None else (float(place[0]), float(place[1])) for place in places]
    return dict(zip(names, xy, strict=True))


def _ids(runs: list[int], size: Size, most: int) -> Ids:
    """Ids of a frame from [length, id, length, id, ...]."""
    lengths, ids = np.array(runs, dtype=np.int64).reshape(-1, 2).T
    height, width = size
    if lengths.min() < 0 or lengths.max() > height * width or lengths.sum() != height * width:
        raise InputError(f"a mask of this clip must have {format_size(height, width)} pixels.")
    if ids.min() < 0 or ids.max() > most:
        raise InputError(f"a mask holds object {ids.max()}: there are at most {most}.")
    return np.repeat(ids.astype(np.uint8), lengths).reshape(height, width)


def truth(ids: Ids, points: dict[str, tuple[float, float]]) -> dict[str, Any]:
    """The true labels of a sample: runs of ids, and the visible joints."""
    return {
        "runs": runs(ids),
        "points": [[name, round(x, 2), round(y, 2)] for name, (x, y) in points.items()],
    }


def runs(ids: Ids) -> list[int]:
    """Ids of a frame as [length, id, length, id, ...]."""
    found: list[int] = np.column_stack(run_lengths(ids)).ravel().tolist()
    return found


def mark(job: Job, frame: int, said: dict[str, Any]) -> dict[str, Any]:
    """The object that was meant, as runs of 0 and 1."""
    return {"runs": runs(job.marker(frame).mark(**said).astype(np.uint8))}


def state(job: Job) -> dict[str, Any]:
    """Everything that the page shows about a clip and its run."""
    clip, given = job.clip, job.given
    now, found = job.state, job.found[:]  # in this order: a run that is done has labels of all frames
    seconds = job.seconds / max(1, job.steps)
    points = isinstance(given, Points)
    return {
        "clip": {
            "name": clip.name,
            "frames": clip.count,
            "height": clip.size[0],
            "width": clip.size[1],
            "rate": float(clip.rate),
            "rows": job.grid[0],
            "columns": job.grid[1],
            "topk": job.protocol.topk,
            "detail": job.detail,
            "remarks": clip.remarks,
            "sample": clip.truth is not None,
            "key": job.key,
        },
        "state": now,
        "error": job.error,
        "start": job.first,
        "done": len(found),
        "share": job.steps / job.total,
        "left": round(seconds * (job.total - job.steps), 1) if job.seconds else None,
        "kind": None if given is None else "points" if points else "masks",
        "names": given.names if isinstance(given, Points) else [],
        "given": sorted(given.frames) if given else [],
        "lost": [list(numbers) for numbers in job.lost[: len(found)]],
        "suggest": _suggest(job, len(found)) if now == "done" else None,
        "confidence": [round(one.confidence, 4) for one in found],
        "points": [_places(one) for one in found] if points else [],
    }


def _suggest(job: Job, done: int) -> dict[str, Any] | None:
    """The next frame worth correcting: the first one that has lost something, or else the least certain."""
    assert job.given is not None
    for frame, lost in enumerate(job.lost[:done]):
        if lost:
            return {"frame": frame, "object": lost[0], "lost": True}
    each = [(sure, frame, name) for frame in range(done) for name, sure in _each(job, frame)]
    sure, frame, name = min(each, default=(1.0, 0, 0))
    return {"frame": frame, "object": name, "lost": False} if sure < 1 else None


def _each(job: Job, frame: int) -> Iterator[tuple[int, float]]:
    """Every object or point of a frame that is not given, with its confidence."""
    if job.given is not None and frame not in job.given.frames:
        yield from zip(numbers(job.given), job.found[frame].each, strict=True)


def _places(found: Found) -> list[list[float] | None]:
    """Points of a frame: x, y and confidence, or None where one is lost."""
    return [None if math.isnan(place[0]) else place for place in found.values.round(4).tolist()]


def inspect(job: Job, frame: int, row: int, column: int, offset: int, attention: bool) -> dict[str, Any]:
    """The sources of a patch's label, and its matches `offset` frames before and after; for the page."""
    if attention and job.engine.matcher is None:
        raise InputError("this encoder has no matching module: choose feature similarity.")
    if not (0 <= frame < job.clip.count and 0 <= row < job.grid[0] and 0 <= column < job.grid[1]):
        raise InputError(f"no patch at frame {frame}, row {row}, column {column} of this clip.")
    given = job.given is not None and frame in job.given.frames
    offset = min(max(1, offset), MAX_OFFSET)
    wanted = {"past": max(0, frame - offset), "future": min(job.clip.count - 1, frame + offset)}
    others = {side: index for side, index in wanted.items() if index != frame}
    if attention:
        frames = [job.clip.frame(index) for index in others.values()]
        maps = (
            job.engine.attention(job.clip.frame(frame), frames, job.inside, job.detail, row, column)
            if frames
            else []
        )
    else:
        query = job.features(frame)[:, row, column, None, None]
        maps = [torch.cosine_similarity(job.features(index), query, dim=0) for index in others.values()]
    return {
        "frame": frame,
        "row": row,
        "column": column,
        "given": given,
        "labeled": frame < job.done,
        "sources": [] if given or frame >= job.done else _sources(job, frame, row, column),
        "kind": "attention" if attention else "similarity",
        "matches": [_match(job, *at, values) for at, values in zip(others.items(), maps, strict=True)],
    }


def _sources(job: Job, frame: int, row: int, column: int) -> list[dict[str, Any]]:
    """The cells that a label was mixed from on its way from the nearest given frame, by the propagator."""
    assert job.given is not None
    first = min(job.given.frames, key=lambda index: abs(index - frame))
    step = 1 if first < frame else -1
    nearest = min(abs(frame - first) - 1, job.protocol.context)  # frames of the context
    numbers = [first, *range(frame - step * nearest, frame, step)]
    features = (job.features(index) for index in (*numbers, frame))
    (found,) = label_sources(features, [(row, column)], job.protocol)
    named = [source._replace(frame=numbers[source.frame]) for source in found]
    return [source._asdict() | {"label": _label(job, source)} for source in named]


def _label(job: Job, source: LabelSource) -> int | None:
    """The id in the middle of a cell; None for points."""
    if not isinstance(job.given, Masks):
        return None
    (height, width), (rows, columns) = job.clip.size, job.grid
    y, x = (2 * source.row + 1) * height // (2 * rows), (2 * source.column + 1) * width // (2 * columns)
    return int(job.labels(source.frame)[y, x])


def _match(job: Job, side: str, frame: int, values: Float[Tensor, "rows columns"]) -> dict[str, Any]:
    low, high = float(values.min()), float(values.max())
    heat = ((values - low) / max(high - low, 1e-9)).flatten().tolist()
    row, column = divmod(int(values.argmax()), job.grid[1])
    best = {"row": row, "column": column, "value": high}
    return {"side": side, "frame": frame, "best": best, "map": [round(value, 3) for value in heat]}
