"""Where the label of a patch came from, and which patches of other frames it matches."""

from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from tcore.demo.job import Job
from tcore.errors import InputError
from tcore.evaluation.propagate import label_sources
from tcore.video.labels import Masks

MAX_OFFSET = 60  # frames between a patch and its matches

Kind = Literal["similarity", "attention"]


def inspect_patch(job: Job, frame: int, row: int, column: int, offset: int, kind: Kind) -> dict[str, Any]:
    """The sources of a patch's label, and its matches `offset` frames before and after; for the page."""
    if kind == "attention" and job.engine.matcher is None:
        raise InputError("this encoder has no matching module: choose feature similarity.")
    if not (0 <= frame < len(job.clip.frames) and 0 <= row < job.grid[0] and 0 <= column < job.grid[1]):
        raise InputError(f"no patch at frame {frame}, row {row}, column {column} of this clip.")
    given = job.given is not None and frame in job.given.frames
    offset = min(max(1, offset), MAX_OFFSET)
    wanted = {"past": max(0, frame - offset), "future": min(len(job.clip.frames) - 1, frame + offset)}
    others = {side: index for side, index in wanted.items() if index != frame}
    return {
        "frame": frame,
        "row": row,
        "column": column,
        "given": given,
        "labeled": frame < job.done,
        "sources": [] if given or frame >= job.done else _sources(job, frame, row, column),
        "kind": kind,
        "matches": _matches(job, frame, row, column, others, kind) if others else [],
    }


def _sources(job: Job, frame: int, row: int, column: int) -> list[dict[str, Any]]:
    """The cells that a label was mixed from: the propagator's own answer, with the same context."""
    assert job.given is not None
    first = max(index for index in job.given.frames if index < frame)
    numbers = [first, *range(max(first + 1, frame - job.protocol.context), frame)]
    features = (job.features(index) for index in (*numbers, frame))
    (found,) = label_sources(features, [(row, column)], job.protocol.propagator())
    return [
        source._asdict()
        | {"frame": (at := numbers[source.frame]), "label": _label_at(job, at, source.row, source.column)}
        for source in found
    ]


def _label_at(job: Job, frame: int, row: int, column: int) -> int | None:
    """The id in the middle of a cell; None for points."""
    if not isinstance(job.given, Masks):
        return None
    (height, width), (rows, columns) = job.clip.size, job.grid
    y, x = (2 * row + 1) * height // (2 * rows), (2 * column + 1) * width // (2 * columns)
    return int(job.found[frame].values[y, x])


def _matches(
    job: Job, frame: int, row: int, column: int, others: dict[str, int], kind: Kind
) -> list[dict[str, Any]]:
    maps: list[Float[Tensor, "rows columns"]]
    if kind == "attention":
        frames = [job.clip.frames[index] for index in others.values()]
        maps = job.engine.attention(job.clip.frames[frame], frames, job.inside, row, column)
    else:
        query = job.features(frame)[:, row, column, None, None]
        maps = [torch.cosine_similarity(job.features(index), query, dim=0) for index in others.values()]
    matches = []
    for (side, index), values in zip(others.items(), maps, strict=True):
        at, low, high = int(values.argmax()), float(values.min()), float(values.max())
        heat = ((values - low) / max(high - low, 1e-9)).flatten().tolist()
        best = {"row": at // job.grid[1], "column": at % job.grid[1], "value": high}
        matches.append({"side": side, "frame": index, "best": best, "map": [round(v, 3) for v in heat]})
    return matches
