"""What holds for any numbers: plans, masks, schedules, propagation, scores, settings."""

import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tcore.config import ViewsConfig, flatten, from_dict, to_dict, validate
from tcore.data.masking import sample_step_masks
from tcore.data.views import sample_views
from tcore.evaluation import scores
from tcore.evaluation.propagate import propagate_features
from tcore.evaluation.protocols import Protocol
from tcore.methods.schedules import cosine, warmup_linear
from tcore.methods.settings_distillation import MaskingConfig, MaskKind
from tcore.recipes import RECIPES, recipe
from tcore.training.optim import Schedule

quick = settings(deadline=None, max_examples=40)
seeds = st.integers(0, 2**32 - 1)
sides = st.integers(1, 400)


@quick
@given(seeds, sides, sides, st.integers(1, 6))
def test_every_view_lies_inside_its_frame(seed: int, height: int, width: int, num_local: int) -> None:
    sizes = ((height, width),) * 3
    plan, again = (
        sample_views(np.random.default_rng(seed), sizes, ViewsConfig(num_local=num_local)) for _ in range(2)
    )
    for views in plan.values():
        top, left, tall, wide = views.box.T
        assert (views.box[:, :2] >= 0).all()
        assert (views.box[:, 2:] >= 1).all()
        assert (top + tall <= height).all()
        assert (left + wide <= width).all()
        assert np.isfinite(views.jitter).all()
        assert (views.blur >= 0).all()
    assert np.array_equal(again["global"].box, plan["global"].box)


@quick
@given(
    seeds,
    st.integers(1, 40),
    st.integers(2, 8),
    st.floats(0, 1),
    st.tuples(st.floats(0, 0.5), st.floats(0.5, 1)),
    st.sampled_from(["block", "random"]),
)
def test_masks_keep_their_counts_and_do_not_depend_on_other_groups(
    seed: int, videos: int, grid: int, probability: float, ratio: tuple[float, float], kind: MaskKind
) -> None:
    def draw(count: int) -> np.ndarray:
        masking = MaskingConfig(group=8, probability=probability, ratio=ratio, kind=kind)
        return sample_step_masks((seed,), count, grid, masking)

    masks = draw(videos)
    assert masks.shape == (2, videos, grid * grid)
    assert masks.sum(axis=2).max() <= math.ceil(ratio[1] * grid * grid)
    assert masks.any(axis=2).sum() <= math.ceil(2 * videos * probability)
    whole = videos // 8 * 8
    assert np.array_equal(draw(whole + 8)[:, :whole], masks[:, :whole])


@quick
@given(st.integers(1, 500), st.data())
def test_schedules_stay_between_their_ends(num_steps: int, data: st.DataObject) -> None:
    warmup = data.draw(st.integers(0, num_steps))
    schedule = Schedule(
        num_steps=num_steps,
        warmup_steps=data.draw(st.integers(0, num_steps - 1)),
        lr=1e-3,
        end_lr=1e-6,
        weight_decay=(0.04, 0.4),
        factors={"match": 0.1},
        own=lambda step: {
            "momentum": cosine(step, 0.992, 1.0, num_steps),
            "teacher_temperature": warmup_linear(step, 0.04, 0.07, warmup),
        },
    )
    values = [schedule.at(step).logged() for step in range(num_steps)]
    rounding = 1e-12
    for value in values:
        assert -rounding <= value["lr"] <= 1e-3 + rounding
        assert -rounding <= value["lr_match"] <= 1e-4 + rounding
        assert 0.04 - rounding <= value["weight_decay"] <= 0.4 + rounding
        assert 0.992 - rounding <= value["momentum"] <= 1 + rounding
        assert 0.04 - rounding <= value["teacher_temperature"] <= 0.07 + rounding
    for name in ("weight_decay", "momentum", "teacher_temperature"):
        rising = np.diff([value[name] for value in values])
        assert (rising >= -rounding).all(), name


@settings(deadline=None, max_examples=10)
@given(seeds, st.integers(2, 6), st.integers(1, 6), st.integers(1, 6), st.integers(0, 4))
def test_identical_frames_keep_any_labels(
    seed: int, time: int, height: int, width: int, context: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    frame = torch.randn(1, 16, height, width, generator=generator)
    labels = torch.rand(height, width, 3, generator=generator).softmax(dim=2)
    protocol = Protocol(context=context, topk=1)
    found = list(propagate_features(frame.expand(time, -1, -1, -1), labels, protocol))
    torch.testing.assert_close(torch.stack(found), labels.expand(time, -1, -1, -1), rtol=0, atol=1e-5)


@quick
@given(seeds, st.integers(1, 30), st.integers(1, 30))
def test_region_and_boundary_scores_are_symmetric_and_one_for_the_truth(
    seed: int, height: int, width: int
) -> None:
    rng = np.random.default_rng(seed)
    a, b = rng.random((2, 3, height, width)) < rng.random()
    for score in (scores.region_similarity, scores.boundary_similarity):
        there, back = score(a, b), score(b, a)
        np.testing.assert_allclose(there, back)
        assert ((there >= 0) & (there <= 1)).all()
        assert (score(a, a) == 1).all()


@quick
@given(seeds, st.integers(1, 20))
def test_class_iou_is_symmetric_and_one_for_the_truth(seed: int, classes: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = rng.integers(0, classes, (2, 4, 9, 9))
    there, back = (scores.class_iou(scores.confusion_matrix(x, y)) for x, y in ((a, b), (b, a)))
    np.testing.assert_allclose(there, back)
    assert scores.mean_iou(scores.confusion_matrix(a, a)) == 1


@quick
@given(seeds, st.integers(1, 5), st.integers(2, 6))
def test_true_joints_are_all_correct(seed: int, clips: int, frames: int) -> None:
    rng = np.random.default_rng(seed)
    truth = [rng.uniform(1, 300, (2, 15, frames)) for _ in range(clips)]
    assert (scores.pck(truth, truth).pck == 1).all()


@quick
@given(st.sampled_from(sorted(RECIPES)), st.integers(0, 2**62), st.floats(0, 1), st.integers(1, 10**6))
def test_settings_of_every_recipe_survive_json(name: str, seed: int, share: float, every: int) -> None:
    config = recipe(name, {"seed": seed, "runtime.bad_samples": share, "checkpoint_every": every})
    assert from_dict(to_dict(config)) == config
    assert flatten(validate(config)) == flatten(config)
