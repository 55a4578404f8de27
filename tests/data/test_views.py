"""The numbers that make the views."""

import math
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from jaxtyping import Float64

from tcore.config import ViewsConfig
from tcore.data.views import (
    ASPECT,
    CURRENT,
    FUTURE,
    GLOBAL_1,
    GLOBAL_2,
    LOCAL,
    NO_JITTER,
    PAST,
    Photometry,
    Size,
    ViewPlan,
    central_box,
    random_boxes,
    sample_photometry,
    sample_views,
)
from tcore.errors import InputError

DRAWS = 4000
Sample = dict[str, ViewPlan]
SIZES = ((240, 320), (240, 320), (240, 320))


def draw(seed: int = 0, sizes: tuple[Size, Size, Size] = SIZES, **settings: Any) -> Sample:
    return sample_views(np.random.default_rng(seed), sizes, ViewsConfig(**settings))


def colors(recipe: Photometry, seed: int = 0) -> ViewPlan:
    frame, box = np.zeros(DRAWS, np.int64), np.zeros((DRAWS, 4), np.int64)
    return sample_photometry(np.random.default_rng(seed), frame, box, [recipe] * DRAWS)


def assert_frequency(hits: int, probability: float, draws: int = DRAWS) -> None:
    deviation = math.sqrt(draws * probability * (1 - probability))
    assert abs(hits - draws * probability) <= 4 * deviation


def assert_uniform(values: Float64[np.ndarray, "n"], low: float, high: float) -> None:
    assert low <= values.min()
    assert values.max() <= high
    for share in (0.1, 0.3, 0.5, 0.7, 0.9):
        assert_frequency(int((values < low + share * (high - low)).sum()), share, len(values))


def same(first: ViewPlan, second: ViewPlan) -> bool:
    return all(np.array_equal(getattr(first, f.name), getattr(second, f.name)) for f in fields(ViewPlan))


def one_random_box(
    size: tuple[int, int], area: tuple[float, float], rng: np.random.Generator
) -> tuple[int, int, int, int]:
    """The random resized crop, one number at a time."""
    for _ in range(10):
        share, aspect = rng.uniform(*area), math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        target = share * size[0] * size[1]
        width, height = round(math.sqrt(target * aspect)), round(math.sqrt(target / aspect))
        if 0 < width <= size[1] and 0 < height <= size[0]:
            top, left = rng.integers(size[0] - height + 1), rng.integers(size[1] - width + 1)
            return int(top), int(left), height, width
    return central_box(size)


@pytest.mark.parametrize(
    ("recipe", "flip", "blur", "solarize"),
    [(GLOBAL_1, 0, 0, 0), (GLOBAL_2, 0, 0.9, 0.2), (LOCAL, 0.5, 0.5, 0)],
)
def test_probabilities_are_those_of_the_table(
    recipe: Photometry, flip: float, blur: float, solarize: float
) -> None:
    plan = colors(recipe)
    assert_frequency(int(plan.flip.sum()), flip)
    assert_frequency(int((plan.jitter != (1, 1, 1, 0)).all(axis=1).sum()), 0.8)
    assert_frequency(int(plan.gray.sum()), 0.2)
    assert_frequency(int((plan.blur > 0).sum()), blur)
    assert_frequency(int(plan.solarize.sum()), solarize)


def test_jitter_and_blur_are_uniform_in_their_ranges() -> None:
    plan = colors(GLOBAL_2)
    jitter = plan.jitter[plan.jitter[:, 3] != 0]
    for column, (low, high) in enumerate([(0.6, 1.4), (0.6, 1.4), (0.8, 1.2), (-0.1, 0.1)]):
        assert_uniform(jitter[:, column], low, high)
    assert_uniform(plan.blur[plan.blur > 0], 0.1, 2.0)


def test_every_order_of_the_four_operations_is_equally_likely() -> None:
    orders, counts = np.unique(colors(LOCAL).order, axis=0, return_counts=True)
    assert len(orders) == 24
    for count in counts:
        assert_frequency(int(count), 1 / 24)


def test_decisions_and_amounts_of_a_view_are_independent_of_one_another() -> None:
    plan = colors(Photometry(flip=0.5, jitter=0.5, gray=0.5, blur=0.5, solarize=0.5))
    decisions = [plan.flip, plan.jitter[:, 3] != 0, plan.gray, plan.blur > 0, plan.solarize]
    for index, first in enumerate(decisions):
        for second in decisions[:index]:
            assert_frequency(int((first & second).sum()), 0.25)
    plan = colors(Photometry(jitter=1.0, blur=1.0))
    correlation = np.corrcoef(np.column_stack([plan.jitter, plan.blur, plan.order[:, 0]]).T)
    assert np.abs(correlation - np.eye(6)).max() <= 4 / math.sqrt(DRAWS)


@pytest.mark.parametrize(
    ("size", "area"), [((240, 320), (0.32, 1.0)), ((320, 180), (0.32, 1.0)), ((200, 200), (0.05, 0.32))]
)
def test_boxes_follow_the_usual_random_resized_crop(size: Size, area: tuple[float, float]) -> None:
    rng = np.random.default_rng(1)
    ours = random_boxes(size, area, ASPECT, rng, DRAWS)
    usual = np.array([one_random_box(size, area, rng) for _ in range(DRAWS)])
    for column in range(4):
        first, second = ours[:, column], usual[:, column]
        for level in np.quantile(second, [0.1, 0.25, 0.5, 0.75, 0.9]):
            share = float((second <= level).mean())
            # Both sides are samples: twice the variance.
            bound = 4 * math.sqrt(2 * share * (1 - share) / DRAWS)
            assert abs(float((first <= level).mean()) - share) <= bound


def test_a_frame_in_which_no_try_fits_gives_the_central_box() -> None:
    box = random_boxes((20, 200), (0.9, 1.0), ASPECT, np.random.default_rng(4), 50)
    assert (box == central_box((20, 200), ASPECT)).all()


@pytest.mark.parametrize(
    ("size", "box"),
    [
        ((240, 320), (0, 0, 240, 320)),
        ((240, 300), (0, 0, 240, 300)),
        ((90, 160), (0, 20, 90, 120)),
        ((160, 90), (20, 0, 120, 90)),
        ((20, 200), (0, 86, 20, 27)),
    ],
)
def test_central_box_is_the_frame_with_its_aspect_clamped(
    size: tuple[int, int], box: tuple[int, int, int, int]
) -> None:
    assert central_box(size) == box


def test_a_sample_has_its_views_on_the_right_frames() -> None:
    sample = draw(num_local=5)
    frames = {name: plan.frame.tolist() for name, plan in sample.items()}
    assert frames == {
        "global": [CURRENT] * 2,
        "local": [CURRENT] * 5,
        "past": [PAST] * 2,
        "future": [FUTURE] * 2,
    }
    assert len(draw(num_local=0)["local"]) == 0


def test_past_and_future_can_show_the_box_of_the_crop_they_serve() -> None:
    central, current = draw(), draw(auxiliary_box="current")
    assert (current["past"].box == current["global"].box).all()
    assert (current["future"].box == current["global"].box).all()
    assert same(current["global"], central["global"])
    assert (current["past"].jitter == central["past"].jitter).all()


def test_colors_change_more_rarely_where_wanted_and_all_else_stays() -> None:
    """The same numbers are drawn: every change that is left is one of the published ones."""
    published, half, never = ([draw(seed, color=color) for seed in range(200)] for color in (1.0, 0.5, 0.0))
    changes = {}
    for name, samples in (("published", published), ("half", half), ("never", never)):
        plans = [plan for s in samples for plan in (s["global"], s["local"], s["past"], s["future"])]
        jittered = np.concatenate([(plan.jitter != np.array(NO_JITTER)).any(axis=1) for plan in plans])
        gray, solarized = (np.concatenate([getattr(p, k) for p in plans]) for k in ("gray", "solarize"))
        changes[name] = np.stack([jittered, gray, solarized])
    assert changes["published"].mean(axis=1) == pytest.approx([0.8, 0.2, 0.2 * 3 / 14], abs=0.02)
    assert changes["half"].mean(axis=1) == pytest.approx([0.4, 0.1, 0.1 * 3 / 14], abs=0.02)
    assert not changes["never"].any()
    assert not (changes["half"] & ~changes["published"]).any()
    for one, other in zip(published, never, strict=True):
        for name in ("box", "flip", "blur"):
            assert (getattr(one["local"], name) == getattr(other["local"], name)).all()


def test_views_are_blurred_more_rarely_where_wanted_and_all_else_stays() -> None:
    published, half, never = ([draw(seed, blur=blur) for seed in range(200)] for blur in (1.0, 0.5, 0.0))

    def sigma(samples: list[dict[str, ViewPlan]], name: str) -> Float64[np.ndarray, "all"]:
        return np.concatenate([sample[name].blur for sample in samples])

    for name, expected in (("global", 0.45), ("local", 0.5), ("past", 0.45)):
        usual, rare = sigma(published, name), sigma(half, name)
        assert (usual > 0).mean() == pytest.approx(expected, abs=0.06)
        assert (rare > 0).mean() == pytest.approx(expected / 2, abs=0.06)
        assert (rare[rare > 0] == usual[rare > 0]).all()
        assert not sigma(never, name).any()
    for one, other in zip(published, never, strict=True):
        for kept in ("box", "flip", "jitter", "gray", "solarize"):
            assert (getattr(one["global"], kept) == getattr(other["global"], kept)).all()


@pytest.mark.parametrize("settings", [{"auxiliary_box": "current"}, {"fixed_time": False}])
def test_the_box_of_a_crop_in_frames_of_other_sizes_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"needs frames of one size, got \(40, 30\)"):
        draw(sizes=((40, 30), (240, 320), (240, 320)), **settings)


def test_frames_of_other_sizes_get_boxes_of_their_own() -> None:
    for seed in range(20):
        sample = draw(seed, ((90, 160), (64, 64), (300, 200)), fixed_space=False, fixed_time=False)
        assert sample["past"].box.tolist() == [[0, 20, 90, 120]] * 2
        assert sample["future"].box.tolist() == [[16, 0, 267, 200]] * 2
        for name, size in (("global", (64, 64)), ("local", (64, 64)), ("student", (90, 160))):
            assert (sample[name].box[:, :2] + sample[name].box[:, 2:] <= size).all()


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return [draw(seed) for seed in range(400)]


def test_auxiliary_views_follow_the_recipe_of_their_global_crop(samples: list[Sample]) -> None:
    for name in ("global", "past", "future"):
        plans: list[ViewPlan] = [sample[name] for sample in samples]
        assert not any(plan.flip.any() or plan.blur[0] or plan.solarize[0] for plan in plans)
        assert_frequency(sum(bool(plan.blur[1]) for plan in plans), 0.9, len(plans))
        assert_frequency(sum(bool(plan.solarize[1]) for plan in plans), 0.2, len(plans))
        for row in range(2):
            assert_frequency(sum(bool(plan.gray[row]) for plan in plans), 0.2, len(plans))
            assert_frequency(sum(plan.jitter[row, 0] != 1 for plan in plans), 0.8, len(plans))


def test_every_view_of_a_sample_draws_for_itself(samples: list[Sample]) -> None:
    for sample in samples[:50]:
        plan = ViewPlan.concatenate([sample["global"], sample["local"], sample["past"], sample["future"]])
        hues = plan.jitter[plan.jitter[:, 3] != 0, 3]
        sigmas = plan.blur[plan.blur > 0]
        assert len(set(hues)) == len(hues)
        assert len(set(sigmas)) == len(sigmas)
        assert len({tuple(box) for box in plan.box[:10]}) == 10


@pytest.mark.parametrize(
    ("space", "time", "frame"), [(False, True, CURRENT), (True, False, PAST), (False, False, PAST)]
)
def test_a_student_that_is_not_aligned_differs_in_place_or_time_but_not_in_color(
    space: bool, time: bool, frame: int
) -> None:
    aligned, sample = draw(), draw(fixed_space=space, fixed_time=time)
    student, teacher = sample["student"], sample["global"]
    assert same(teacher, aligned["global"])
    assert same(sample["future"], aligned["future"])
    assert student.frame.tolist() == [frame] * 2
    assert (student.box == teacher.box).all(axis=1).tolist() == [space] * 2
    assert same(student, ViewPlan.concatenate([teacher]).with_frame(student.frame)) == space
    assert (student.jitter == teacher.jitter).all()
    assert (student.blur == teacher.blur).all()
