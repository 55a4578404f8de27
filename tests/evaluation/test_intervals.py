"""Intervals over seeds and clips, and differences of two rows, against what can be computed by hand."""

import math
from typing import Any

import numpy as np
import pytest

from tcore.evaluation.intervals import bootstrap, clip_scores, difference, half_interval


def test_one_seed_or_clip_has_no_interval() -> None:
    assert half_interval([3.0]) is None
    assert half_interval([3.0, 4.0], [5.0]) is None
    assert half_interval([2.0, 2.0, 2.0]) == 0
    assert bootstrap(1, lambda chosen: {}) == {}


def test_the_interval_of_a_difference_is_students_t_with_degrees_of_freedom_by_welch() -> None:
    """Worked by hand; the quantile between two degrees of freedom is interpolated."""
    a, b = [62.0, 63.0, 64.0], [60.0, 62.0, 64.0]  # variances 1 and 4
    total = 1 / 3 + 4 / 3
    free = total**2 / ((1 / 3) ** 2 / 2 + (4 / 3) ** 2 / 2)
    assert 2 < free < 3
    quantile = 4.30 + (free - 2) * (3.18 - 4.30)
    assert half_interval(a, b) == pytest.approx(quantile * math.sqrt(total))
    assert half_interval(a) == pytest.approx(4.30 / math.sqrt(3))
    few, many = [1.0, 3.0], [0.0, 1.0, 2.0, 3.0, 4.0]  # variances of the means 1 and .5
    assert half_interval(few, many) == pytest.approx(12.71 * math.sqrt(1.5))  # Welch's 2.1 would be too many


@pytest.mark.parametrize(
    ("sets", "seeds", "spread"),
    [
        ((3,), (3, 3), (0.0, 0.0)),
        ((10,), (8, 8), (0.0, 0.0)),
        ((10,), (3, 3), (1.0, 0.0)),
        ((10,), (2, 8), (1.0, 0.0)),
        ((10,), (3, 5), (1.0, 0.0)),
        ((10,), (3, 3), (0.0, 1.0)),
        ((2, 10), (3, 3), (0.0, 1.0)),
        ((2, 6, 10), (3, 3), (0.0, 1.0)),
        ((10,), (3, 3), (1.0, 1.0)),
    ],
)
def test_intervals_of_chance_hold_what_they_say(
    sets: tuple[int, ...], seeds: tuple[int, int], spread: tuple[float, float]
) -> None:
    """Of differences that are chance alone, one in twenty is called sure, at most.

    Whole runs may be better or worse (`spread[0]`), or some clips easier for one row (`spread[1]`).
    """
    rng, wrong = np.random.default_rng(0), 0
    for _ in range(400):
        luck = [spread[0] * rng.normal(size=count) for count in seeds]
        pairs = []
        for clips in sets:
            easier = spread[1] * rng.normal(size=(clips, 1))
            mine = easier + luck[0] + 0.1 * rng.normal(size=(clips, seeds[0]))
            its = luck[1] + 0.1 * rng.normal(size=(clips, seeds[1]))
            pairs.append((by_clip(mine), by_clip(its)))
        found = difference(*pairs)
        assert found is not None
        wrong += found["sure"]
    assert wrong <= 0.05 * 400 + 2 * math.sqrt(0.05 * 0.95 * 400)  # two deviations of what is counted


def by_clip(values: "np.ndarray[tuple[int, int], np.dtype[np.float64]]") -> dict[str, list[float]]:
    """Scores by the names of clips."""
    return {f"clip{number}": row for number, row in enumerate(values.tolist())}


def test_a_small_gain_on_every_clip_is_sure_though_clips_are_far_apart() -> None:
    rng = np.random.default_rng(0)
    hard = {f"clip{i}": [float(x)] * 3 for i, x in enumerate(rng.uniform(10, 90, size=10))}
    gain = {
        name: [x + y for x, y in zip(values, (0.9, 1.0, 1.1), strict=True)] for name, values in hard.items()
    }
    found = difference((gain, hard))
    assert found is not None
    assert found["points"] == pytest.approx(1.0)
    assert found["over_clips"] == pytest.approx(0, abs=1e-9)
    assert found["over_seeds"] == pytest.approx(4.30 * 0.1 / math.sqrt(3))
    assert found["sure"]
    turned = difference((hard, gain))
    assert turned is not None
    assert turned["points"] == pytest.approx(-1.0)
    assert turned["sure"]


def test_both_intervals_together_must_leave_a_difference() -> None:
    """1.5 +- 1.2 over seeds and +- 1.2 over clips: more than either, less than both together."""
    base = {name: [50.0, 50.0, 50.0] for name in "abc"}
    by_seed, by_clip = (-0.5, 0.0, 0.5), (-0.5, 0.0, 0.5)
    row = {
        name: [50 + 1.5 + clip + seed for seed in by_seed] for name, clip in zip("abc", by_clip, strict=True)
    }
    found = difference((row, base))
    assert found is not None
    assert found["over_seeds"] == pytest.approx(4.30 * 0.5 / math.sqrt(3))
    assert found["over_clips"] == pytest.approx(4.30 * 0.5 / math.sqrt(3))
    assert found["over_seeds"] < found["points"] < math.hypot(found["over_seeds"], found["over_clips"])
    assert not found["sure"]


@pytest.mark.parametrize("gains", [[9.0, -1.0, -1.0], [3.0, 3.0, 3.0]])
def test_a_gain_of_one_clip_or_of_one_seed_is_not_sure(gains: list[float]) -> None:
    base = {name: [50.0, 50.0] for name in "abc"}
    seeds = (1.0, 1.0) if min(gains) < 0 else (2.0, 0.0)  # the same for every clip, but for one seed alone
    row = {name: [50.0 + gain * seed for seed in seeds] for name, gain in zip("abc", gains, strict=True)}
    found = difference((row, base))
    assert found is not None
    assert found["points"] > 2
    assert not found["sure"]


def test_clips_without_a_score_of_both_take_no_part_and_are_counted() -> None:
    cards = [
        {"a": {"J&F": 0.5}, "b": {"J&F": math.nan}, "c": {}},
        {"a": {"J&F": 0.7}, "b": {"J&F": 0.1}, "c": {"J&F": 1.0}},
    ]
    assert clip_scores(cards, "J&F") == {"a": [50.0, 70.0]}
    damaged: Any = [{"a": {"J&F": None}, "b": {"J&F": "1"}, "c": {"J&F": [0.5]}, "d": {"J&F": 0.5}}]
    assert clip_scores(damaged, "J&F") == {"d": [50.0]}
    found = difference(({"a": [50.0], "b": [10.0]}, {"b": [11.0], "c": [12.0]}))
    assert found == {"points": -1.0, "over_seeds": None, "over_clips": None, "left_out": 2, "sure": False}
    assert difference(({"a": [1.0]}, {"b": [1.0]})) is None


def test_several_sets_count_alike_whatever_their_number_of_clips() -> None:
    """+1 on four clips and +3 on two are +2; seeds are compared by their means over the sets."""
    many = {name: [50.0, 52.0] for name in "abcd"}, {name: [49.0, 51.0] for name in "abcd"}
    few = {"x": [42.0, 40.0], "y": [43.0, 41.0]}, {"x": [39.0, 37.0], "y": [40.0, 38.0]}
    found = difference(many, few)
    assert found is not None
    assert found["points"] == pytest.approx(2.0)
    assert found["over_clips"] == 0
    # What one set gains by a seed, the other one loses.
    assert found["over_seeds"] == pytest.approx(0, abs=1e-9)
    assert difference(many, ({"x": [1.0, 1.0]}, {"y": [1.0, 1.0]})) is None


def test_a_set_of_one_clip_leaves_the_mean_of_all_without_an_interval_over_clips() -> None:
    many = {name: [50.0, 52.0] for name in "abcd"}, {name: [49.0, 51.0] for name in "abcd"}
    found = difference(many, ({"x": [42.0, 40.0]}, {"x": [39.0, 37.0]}))
    assert found is not None
    assert found["points"] == pytest.approx(2.0)
    assert found["over_clips"] is None
    assert not found["sure"]


def test_the_interval_over_clips_of_two_sets_is_that_of_the_mean_of_their_means() -> None:
    one = {"a": [1.0], "b": [3.0]}, {"a": [0.0], "b": [0.0]}  # variance of the mean 1
    two = {"c": [2.0], "d": [6.0]}, {"c": [0.0], "d": [0.0]}  # 4
    found = difference(one, two)
    assert found is not None
    free = 25 / (1 / 1 + 16 / 1)
    quantile = 12.71 + (free - 1) * (4.30 - 12.71)
    assert found["over_clips"] == pytest.approx(quantile * math.sqrt(5) / 2)
