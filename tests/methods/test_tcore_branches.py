"""The method as a whole: what student, teacher and auxiliary branch see of batches."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tcore.config import VitSpec
from tcore.methods.method import Length
from tcore.methods.tcore import AUXILIARY, FACTOR
from tests.methods.tiny_models import (
    PATCH,
    VALUES,
    batch,
    model,
    perturb,
    seeded,
    values,
)


def test_student_does_not_see_masked_pixels_but_the_teacher_does() -> None:
    tcore, made = model(), batch()
    hidden = made.mask.view(-1, 4, 4).repeat_interleave(PATCH, 1).repeat_interleave(PATCH, 2)[:, None]
    changed = torch.where(
        hidden, torch.randn(made.global_crops.shape, generator=seeded(5)), made.global_crops
    )
    before = values(tcore(made, VALUES))
    student_only = values(tcore(replace(made, global_crops=changed), VALUES))
    assert student_only == before
    teacher_only = values(tcore(replace(made, teacher_crops=changed), VALUES))
    assert teacher_only["past_teacher"] != pytest.approx(before["past_teacher"], rel=1e-4)
    assert teacher_only["past_future"] == before["past_future"]


def test_auxiliary_branch_is_the_student_without_mask() -> None:
    tcore, made = model(), batch()
    perturb(tcore.student)
    found = tcore.context(made, None)
    assert set(found) == {"past", "future"}
    for side, crops in (("past", made.past), ("future", made.future)):
        assert crops is not None
        torch.testing.assert_close(found[side], tcore.student.backbone(crops).patches)
        assert not torch.allclose(found[side], tcore.teacher.backbone(crops).patches, atol=1e-2)


def test_stochastic_depth_of_the_auxiliary_branch_is_a_setting() -> None:
    made = batch()

    def past(auxiliary_drop_path: bool, seed: int) -> Tensor:
        tcore = model(drop_path=0.5, auxiliary_drop_path=auxiliary_drop_path)
        return tcore.context(made, seeded(seed))["past"]

    assert torch.equal(past(False, 0), past(False, 1))
    assert not torch.equal(past(True, 0), past(True, 1))
    assert model(drop_path=0.5).auxiliary_drop_path  # on, as released
    assert VitSpec().auxiliary_drop_path


def test_same_seed_gives_the_same_losses_and_gradients() -> None:
    def run(seed: int) -> tuple[dict[str, float], Tensor | None]:
        tcore = model(drop_path=0.3)
        torch.manual_seed(torch.seed())  # nothing but the generator may matter
        losses = tcore(batch(), VALUES, seeded(seed))
        tcore.total(losses).backward()
        return values(losses), tcore.student.backbone.pos_embed.grad

    (first, gradient), (again, gradient_again), (other, _) = run(3), run(3), run(4)
    assert first == again
    assert gradient is not None
    assert gradient_again is not None
    assert torch.equal(gradient, gradient_again)
    assert first != other


def test_losses_of_half_precision_arithmetic_are_in_full_precision() -> None:
    for targets in ("centering", "sinkhorn"):
        exact = values(model(targets=targets)(batch(), VALUES))
        tcore = model(targets=targets, drop_path=0.1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses = tcore.eval()(batch(), VALUES, seeded())
        tcore.total(losses).backward()
        for name, loss in losses.items():
            assert loss.dtype == torch.float32
            assert loss.item() == pytest.approx(exact[name], rel=0.1)
        assert all(p.grad is not None and p.grad.isfinite().all() for p in tcore.student.parameters())
        assert tcore.frame_center.waiting.dtype == torch.float32


# What is not published


def test_auxiliary_branch_carries_a_gradient_only_where_wanted() -> None:
    tcore, made = model(), batch()
    assert made.past is not None
    made.past.requires_grad_()
    found = []
    for tcore.auxiliary_gradient in (False, True):
        losses = tcore(made, VALUES)
        tcore.total(losses).backward()
        found.append((values(losses), made.past.grad is not None))
    assert found == [(found[0][0], False), (found[0][0], True)]


def test_losses_of_past_and_future_may_have_a_schedule() -> None:
    tcore, made, length = model(), batch(), Length(num_steps=5, steps_per_epoch=1, in_epochs=False)
    published = values(tcore(made, VALUES))
    assert FACTOR not in tcore.values(0, length)
    tcore.auxiliary_factor = (0.0, 2.0)
    assert [tcore.values(step, length)[FACTOR] for step in range(5)] == [0.0, 0.5, 1.0, 1.5, 2.0]
    found = values(tcore(made, VALUES | {FACTOR: 0.5}))
    for name, value in published.items():
        assert found[name] == pytest.approx(value * (0.5 if name in AUXILIARY else 1.0))
    assert set(AUXILIARY) <= set(published)
