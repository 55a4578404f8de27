"""Intervals over seeds and clips, and differences of two rows, against what can be computed by hand."""

import math

import numpy as np
import pytest

from tcore.evaluation.intervals import bootstrap, clip_scores, difference, over_seeds


def test_one_seed_or_clip_has_no_interval() -> None:
    assert over_seeds([3.0]) is None
    assert over_seeds([3.0, 4.0], [5.0]) is None
    assert over_seeds([2.0, 2.0, 2.0]) == 0
    assert bootstrap(1, lambda chosen: {}) == {}


def test_the_interval_of_a_difference_over_seeds_is_that_of_two_samples() -> None:
    """Student's t with 4 degrees of freedom: 2.78 times the standard error of the difference."""
    a, b = [62.0, 63.0, 64.0], [60.0, 62.0, 64.0]
    pooled = (2 * 1.0 + 2 * 4.0) / 4
    assert over_seeds(a, b) == pytest.approx(2.78 * math.sqrt(pooled * 2 / 3))
    assert over_seeds(a) == pytest.approx(4.30 / math.sqrt(3))


def test_a_small_gain_on_every_clip_is_sure_though_clips_are_far_apart() -> None:
    rng = np.random.default_rng(0)
    hard = {f"clip{i}": [float(x)] * 3 for i, x in enumerate(rng.uniform(10, 90, size=10))}
    gain = {
        name: [x + y for x, y in zip(values, (0.9, 1.0, 1.1), strict=True)] for name, values in hard.items()
    }
    found = difference((gain, hard))
    assert found is not None
    assert found["points"] == pytest.approx(1.0)
    assert found["over_clips"] == pytest.approx([1.0, 1.0])
    assert found["over_seeds"] < 0.5
    assert found["sure"]
    turned = difference((hard, gain))
    assert turned is not None
    assert turned["points"] == pytest.approx(-1.0)
    assert turned["sure"]


@pytest.mark.parametrize("gains", [[9.0, -1.0, -1.0], [3.0, 3.0, 3.0]])
def test_a_gain_of_one_clip_or_of_one_seed_is_not_sure(gains: list[float]) -> None:
    base = {name: [50.0, 50.0] for name in "abc"}
    seeds = (1.0, 1.0) if min(gains) < 0 else (2.0, 0.0)  # the same for every clip, but for one seed alone
    row = {name: [50.0 + gain * seed for seed in seeds] for name, gain in zip("abc", gains, strict=True)}
    found = difference((row, base))
    assert found is not None
    assert found["points"] > 2
    assert not found["sure"]


def test_clips_without_a_score_of_both_take_no_part() -> None:
    cards = [
        {"a": {"J&F": 0.5}, "b": {"J&F": math.nan}, "c": {}},
        {"a": {"J&F": 0.7}, "b": {"J&F": 0.1}, "c": {"J&F": 1.0}},
    ]
    assert clip_scores(cards, "J&F") == {"a": [50.0, 70.0]}
    found = difference(({"a": [50.0], "b": [10.0]}, {"b": [11.0], "c": [12.0]}))
    assert found == {"points": -1.0, "over_seeds": None, "over_clips": None, "sure": False}
    assert difference(({"a": [1.0]}, {"b": [1.0]})) is None


def test_several_sets_count_alike_whatever_their_number_of_clips() -> None:
    """+1 on four clips and +3 on one are +2; seeds are compared by their means over the sets."""
    many = {name: [50.0, 52.0] for name in "abcd"}, {name: [49.0, 51.0] for name in "abcd"}
    one = {"x": [42.0, 40.0]}, {"x": [39.0, 37.0]}
    found = difference(many, one)
    assert found is not None
    assert found["points"] == pytest.approx(2.0)
    assert found["over_clips"] == pytest.approx([2.0, 2.0])
    assert found["over_seeds"] == pytest.approx(
        0, abs=1e-9
    )  # what one set gains by a seed the other one loses
    assert difference(many, ({"x": [1.0, 1.0]}, {"y": [1.0, 1.0]})) is None
