"""How sure scores are: intervals over clips and over seeds, and the difference of two rows, clip by clip."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from tcore.files import number

BOOTSTRAP = 1000
# Two-sided 95% quantiles of Student's t for 1, 2, ... 30 degrees of freedom; more count as 30.
STUDENT = (
    *(12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23),
    *(2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10, 2.09, 2.09),
    *(2.08, 2.07, 2.07, 2.06, 2.06, 2.06, 2.05, 2.05, 2.05, 2.04),
)

ClipScores = Mapping[str, Sequence[float]]  # by clip: the score of each seed, in percent


def bootstrap(count: int, score: Callable[[list[int]], Mapping[str, float]]) -> dict[str, list[float]]:
    """95% interval of every score over resampled clips; none where there is one clip."""
    if count < 2:
        return {}
    kept = cache(lambda *chosen: score(list(chosen)))  # of a few clips, the same are drawn again and again
    rng = np.random.default_rng(0)
    draws = [kept(*row) for row in rng.integers(count, size=(BOOTSTRAP, count)).tolist()]
    return {
        name: [float(x) for x in np.percentile([draw[name] for draw in draws], [2.5, 97.5])]
        for name in draws[0]
    }


def half_interval(*groups: Sequence[float], share: float = 1.0) -> float | None:
    """Half the 95% interval of a sum or difference of means, each times a share; None for a single value.

    Student's t with Welch's degrees of freedom, for groups that differ in spread. If sizes differ
    too, those are too many, and the smallest group's are used: with 2 seeds against 8, or 2 clips
    against 10, a tenth of the differences due to chance alone would be called sure.

    >>> round(half_interval([62.0, 63.0, 64.0]), 2), half_interval([62.0])
    (2.48, None)
    """
    if any(len(values) < 2 for values in groups):
        return None
    parts = [float(np.var(values, ddof=1)) / len(values) for values in groups]  # variances of the means
    if not (total := sum(parts)):
        return 0.0
    free: float = min(map(len, groups)) - 1
    if len(set(map(len, groups))) == 1:
        free *= total**2 / sum(part**2 for part in parts)
    return float(np.interp(free, range(1, len(STUDENT) + 1), STUDENT)) * share * math.sqrt(total)


def mean_scores(results: Sequence[Mapping[str, Any]], names: Iterable[str], main: str) -> dict[str, Any]:
    """Scores of several seeds in percent: their means, and the intervals of the main one."""
    percent = {name: [100 * result["scores"][name] for result in results] for name in names}
    means = {name: float(np.mean(values)) for name, values in percent.items()}
    ends = [result.get("interval", {}).get(main) for result in results]
    over_clips = [100 * float(x) for x in np.mean(ends, axis=0)] if all(ends) else None
    return means | {"over_seeds": half_interval(percent[main]), "over_clips": over_clips}


def clip_scores(cards: Sequence[Mapping[str, Mapping[str, float]]], main: str) -> dict[str, list[float]]:
    """The main score of every clip in percent, seed by seed; a clip that lacks one is left out."""
    found = {name: [card.get(name, {}).get(main) for card in cards] for name in cards[0]}
    return {
        name: [100 * value for value in values if value is not None]
        for name, values in found.items()
        if all(map(number, values))
    }


def comparable(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two results are of the same true labels and clips, with objects distinguished alike."""
    return all(one.get(name) == other.get(name) for name in ("truth", "binary"))


def difference(*sets: tuple[ClipScores, ClipScores]) -> dict[str, Any] | None:
    """How far a row is above another one, in points; None where no clip has been scored for both.

    Each set of clips is a pair: the scores of the row and of the other one. All sets have equal weight. A
    hard clip is hard for every row; comparing clip by clip keeps that out of the interval. A difference is
    `sure` if it exceeds both intervals combined: less than 5% by chance.

    >>> difference(({"a": [30.0], "b": [72.0]}, {"a": [29.0], "b": [70.0]}))["points"]
    1.5
    """
    own, base, by_clip, left_out = [], [], [], 0
    for row, other in sets:
        if not (both := [name for name in row if name in other]):
            return None
        left_out += len(row.keys() | other.keys()) - len(both)
        mine, its = (np.array([scores[name] for name in both]) for scores in (row, other))  # clips x seeds
        by_clip.append((mine.mean(axis=1) - its.mean(axis=1)).tolist())
        own.append(mine.mean(axis=0))
        base.append(its.mean(axis=0))
    seeds = half_interval(np.mean(own, axis=0).tolist(), np.mean(base, axis=0).tolist())
    clips = half_interval(*by_clip, share=1 / len(sets))
    points = float(np.mean(own) - np.mean(base))
    sure = seeds is not None and clips is not None and abs(points) > math.hypot(seeds, clips)
    return {"points": points, "over_seeds": seeds, "over_clips": clips, "left_out": left_out, "sure": sure}
