"""What holds for any numbers: views, schedules, propagation."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tcore.config import ViewsConfig
from tcore.data.views import sample_views
from tcore.evaluation.propagate import propagate_features
from tcore.evaluation.protocols import Protocol
from tcore.methods.method import cosine, warmup_linear
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
