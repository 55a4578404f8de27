"""The method as a whole: batches, and what student, teacher and auxiliary branch see of them."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tcore.config import VitSpec
from tcore.methods.schedules import Length
from tcore.methods.settings import LossForm
from tcore.methods.tcore import AUXILIARY, FACTOR
from tcore.model.losses import given_targets
from tests.methods.tiny_models import (
    DIM,
    LOCALS,
    MASKED,
    PATCH,
    PROTOTYPES,
    VALUES,
    VIDEOS,
    batch,
    model,
    perturb,
    seeded,
    values,
)

# Batches


def test_masked_patches_are_found_in_the_masked_crops_in_order() -> None:
    made = batch()
    assert made.masked.tolist() == list(MASKED)
    patches = torch.randn(2 * VIDEOS, 16, DIM)
    assert torch.equal(made.at_masked(patches[made.masked]), patches[made.mask])


# Branches


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


def test_auxiliary_branch_carries_no_gradient() -> None:
    tcore, made = model(), batch()
    for pixels in (made.past, made.future, made.global_crops, made.local_crops):
        assert pixels is not None
        pixels.requires_grad_()
    tcore.total(tcore(made, VALUES)).backward()
    for pixels in (made.past, made.future):
        assert pixels is not None
        assert pixels.grad is None
    for pixels in (made.global_crops, made.local_crops):
        assert pixels.grad is not None
        assert pixels.grad.abs().max() > 0


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("form", ["paper", "release"])
def test_past_future_has_a_gradient_into_both_sides(form: LossForm, fused: bool) -> None:
    tcore, made = model(form=form), batch()
    masked = len(made.masked_patches)
    sides = {side: torch.randn(masked, DIM, generator=seeded(n)) for n, side in enumerate(("past", "future"))}
    for tokens in sides.values():
        tokens.requires_grad_()
    about_patches = given_targets(torch.full((masked, PROTOTYPES), 1 / PROTOTYPES))
    about_frames = given_targets(torch.full((2 * VIDEOS, PROTOTYPES), 1 / PROTOTYPES))
    compare = tcore._compare_fused if fused else tcore._compare_plainly
    frames = torch.randn((2 + LOCALS) * VIDEOS, DIM, generator=seeded(9))
    compare(made, about_frames, about_patches, frames, sides)["past_future"].backward()
    for tokens in sides.values():
        assert tokens.grad is not None
        assert (tokens.grad.abs().amax(dim=1) > 0).all()


@pytest.mark.parametrize("name", ["past_teacher", "future_teacher", "past_future"])
def test_patch_losses_train_backbone_head_and_matching_module(name: str) -> None:
    tcore = model()
    tcore(batch(), VALUES)[name].backward()
    for name_of_part, part in tcore.parts().items():
        reached = [p.grad is not None and bool(p.grad.abs().max() > 0) for _, p in part.parameters]
        assert sum(reached) > len(reached) / 2, name_of_part
    assert tcore.student.backbone.mask_token.grad is not None


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


def test_auxiliary_branch_may_carry_a_gradient() -> None:
    tcore, made = model(), batch()
    published = values(tcore(made, VALUES))
    tcore.auxiliary_gradient = True
    assert made.past is not None
    made.past.requires_grad_()
    losses = tcore(made, VALUES)
    assert values(losses) == published
    tcore.total(losses).backward()
    assert made.past.grad is not None
    assert made.past.grad.abs().sum() > 0


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
