"""T-CoRe as a whole: what its branches see, which losses there are, the teacher and its centers."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tcore import methods
from tcore.config import VitSpec
from tcore.data.loader import render_batch
from tcore.methods.batch import Batch
from tcore.methods.distillation import Center
from tcore.methods.method import Length
from tcore.methods.settings import Auxiliary, LossForm
from tcore.methods.settings_groups import Targets
from tcore.methods.tcore import AUXILIARY, FACTOR, OWN, TCoRe
from tcore.model.subset import Wanted
from tcore.training.loop import open_source
from tests.methods import tiny_models
from tests.methods.tiny_models import STAY, TEMPERATURE, VALUES, VIDEOS, batch, model, part_of, seeded, values
from tests.tiny import tiny


def assert_finite_gradients(tcore: TCoRe) -> None:
    """Every parameter that is trained has a gradient of finite numbers."""
    for part in tcore.parts().values():
        for name, parameter in part.parameters:
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name


# Branches


@pytest.mark.parametrize("filled", [False, True])
def test_masked_patches_get_the_gradients_of_plain_indexing(filled: bool) -> None:
    made = batch()
    if filled:  # by rows that count nothing
        rows = len(made.masked_patches) + 5
        made = made.in_fixed_shapes(rows, all_crops=False, dtype=torch.float32)
        assert made.counted is not None
        first = made.masked_patches[0]  # the patch that they repeat may be masked itself
        made = replace(made, masked_patches=made.masked_patches.where(made.counted > 0, first))
    patches = torch.randn(len(made.masked), 16, tiny_models.DIM, requires_grad=True)
    pull = torch.randn(len(made.masked_patches), tiny_models.DIM)
    (found,) = torch.autograd.grad(made.at_masked(patches), patches, pull)
    plain = patches.flatten(0, 1)[made.masked_patches]
    counted = torch.ones(len(pull)) if made.counted is None else made.counted
    assert torch.equal(found, torch.autograd.grad(plain, patches, pull * counted[:, None])[0])
    assert counted.sum() == len(batch().masked_patches)


def test_student_does_not_see_masked_pixels_but_the_teacher_does() -> None:
    tcore, made = model(), batch()
    hidden = (
        made.mask.view(-1, 4, 4)
        .repeat_interleave(tiny_models.PATCH, 1)
        .repeat_interleave(tiny_models.PATCH, 2)[:, None]
    )
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
    tiny_models.perturb(tcore.student)
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


def test_own_masked_patches_may_be_compared_beside_past_and_future() -> None:
    tcore, made = model(), batch()
    published = values(tcore(made, VALUES))
    alone = model(auxiliary="none")
    alone.student.load_state_dict(tcore.student.state_dict())
    alone.teacher.load_state_dict(tcore.teacher.state_dict())
    tcore.weights = {**tcore.weights, OWN: 0.5}
    for tcore.fused in (True, False):
        losses = tcore(made, VALUES)
        own = values(alone(batch(auxiliary="none"), VALUES))[OWN]
        assert values(losses) == pytest.approx(published | {OWN: own}, rel=1e-5)
        without = sum(tcore.weights[name] * value for name, value in published.items())
        assert tcore.total(losses).item() == pytest.approx(without + 0.5 * own, rel=1e-5)


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_weight_of_own_masked_patches_is_a_setting(weight: float) -> None:
    config = tiny(loss__own_patches=weight)
    tcore = methods.build(config)
    assert tcore.weights[OWN] == weight
    losses = tcore(render_batch(open_source(config, None)[0], torch.device("cpu")), VALUES)
    assert (OWN in losses) == (weight > 0)


# Losses


@pytest.mark.parametrize("form", ["paper", "release"])
@pytest.mark.parametrize(
    ("auxiliary", "terms"),
    [
        ("none", {"patch_teacher"}),
        ("past", {"past_teacher"}),
        ("future", {"future_teacher"}),
        ("both", {"past_teacher", "future_teacher", "past_future"}),
    ],
)
def test_auxiliary_setting_decides_which_losses_there_are(
    auxiliary: Auxiliary, terms: set[str], form: LossForm
) -> None:
    losses = model(auxiliary=auxiliary, form=form)(batch(auxiliary=auxiliary), VALUES)
    assert set(losses) == {"dino", "koleo"} | terms
    assert all(loss.shape == () and loss.isfinite() and loss != 0 for loss in losses.values())


@pytest.mark.parametrize("form", ["paper", "release"])
@pytest.mark.parametrize("auxiliary", ["none", "past", "future", "both"])
@pytest.mark.parametrize("targets", ["centering", "sinkhorn"])
def test_without_masked_crops_the_patch_terms_are_zero_with_a_graph(
    auxiliary: Auxiliary, form: LossForm, targets: Targets
) -> None:
    tcore = model(auxiliary=auxiliary, form=form, targets=targets, drop_path=0.1)
    losses = tcore(batch(masked=(), auxiliary=auxiliary), VALUES, seeded())
    for name, loss in losses.items():
        assert loss.requires_grad
        assert (loss.item() == 0) == (name not in ("dino", "koleo"))
    tcore.total(losses).backward()
    assert_finite_gradients(tcore)


@pytest.mark.parametrize("auxiliary", ["none", "past", "both"])
def test_every_trained_parameter_gets_a_finite_gradient(auxiliary: Auxiliary) -> None:
    tcore = model(auxiliary=auxiliary, drop_path=0.1)
    tcore.total(tcore(batch(auxiliary=auxiliary), VALUES, seeded())).backward()
    assert_finite_gradients(tcore)
    trained = [p.grad for part in tcore.parts().values() for _, p in part.parameters]
    assert all(gradient is not None and gradient.any() for gradient in trained)


@pytest.mark.parametrize("drop_path", [0.0, 0.3])
def test_a_mask_in_every_crop_takes_the_plain_way_to_the_same_gradients(drop_path: float) -> None:
    plain = batch(masked=tuple(range(2 * VIDEOS)))
    assert plain.wanted() == "all"
    # Part of a step with a crop without a mask elsewhere; the release form does not divide by their number.
    lean = replace(plain, counts=plain.counts._replace(masked_crops=2 * VIDEOS - 1))
    assert isinstance(lean.wanted(), Wanted)
    gradients = []
    for way in (plain, lean):
        tcore = model(form="release", drop_path=drop_path)
        tcore.total(tcore(way, VALUES, seeded())).backward()
        gradients.append({name: p.grad for part in tcore.parts().values() for name, p in part.parameters})
    torch.testing.assert_close(gradients[0], gradients[1])


def test_a_single_video_trains() -> None:
    tcore = model()
    losses = tcore(batch(videos=1, masked=(0,)), VALUES)
    assert losses["koleo"].item() == 0
    tcore.total(losses).backward()
    assert_finite_gradients(tcore)


@pytest.mark.parametrize("form", ["paper", "release"])
def test_patch_teacher_restores_from_the_student_alone(form: LossForm) -> None:
    tcore, made = model(auxiliary="none", form=form), batch(auxiliary="none")
    got = values(tcore(made, VALUES))["patch_teacher"]
    expected = 0.0
    with torch.no_grad():
        seen = tcore.teacher.backbone(made.global_crops).patches
        masked = tcore.student.backbone(made.global_crops, made.mask).patches
        for crop in tiny_models.MASKED:
            target = (tcore.teacher.head(seen[crop]) / TEMPERATURE).softmax(dim=-1)
            predicted = (tcore.student.head(masked[crop]) / 0.1).log_softmax(dim=-1)
            expected -= (target * predicted).sum(dim=-1)[made.mask[crop]].mean().item()
    divisor = len(tiny_models.MASKED) if form == "paper" else 2 * VIDEOS
    assert got == pytest.approx(expected / divisor, rel=1e-4)


@pytest.mark.parametrize("form", ["paper", "release"])
def test_parts_of_a_step_add_up_to_the_losses_and_gradients_of_the_whole(form: LossForm) -> None:
    whole, tcore, in_parts = batch(), model(form=form), model(form=form)
    for method in (tcore, in_parts):
        method.weights["koleo"] = 0.0  # koleo looks at the videos of a part alone
    losses = tcore(whole, VALUES)
    tcore.total(losses).backward()
    parts = [in_parts(part_of(whole, videos), VALUES) for videos in ([0, 2], [1])]
    for part in parts:
        in_parts.total(part).backward()
    for name in losses.keys() - {"koleo"}:
        assert sum(part[name].item() for part in parts) == pytest.approx(losses[name].item(), rel=1e-4)
    for (name, one), other in zip(tcore.named_parameters(), in_parts.parameters(), strict=True):
        if one.requires_grad:
            torch.testing.assert_close(other.grad, one.grad, rtol=1e-3, atol=1e-5, msg=name)


# Teacher and centers


def test_teacher_starts_as_a_copy_of_the_student() -> None:
    tcore = model()
    student, teacher = tcore.student.state_dict(), tcore.teacher.state_dict()
    assert set(student) == set(teacher)
    for name in student:
        assert torch.equal(student[name], teacher[name])
        assert student[name].data_ptr() != teacher[name].data_ptr()


def test_teacher_evaluates_while_the_student_trains_and_has_no_gradient() -> None:
    tcore = model()
    for mode in (True, False, True):
        tcore.train(mode)
        assert all(module.training == mode for module in tcore.student.modules())
        assert not any(module.training for module in tcore.teacher.modules())
    tcore.total(tcore(batch(), VALUES)).backward()
    assert not any(p.requires_grad or p.grad is not None for p in tcore.teacher.parameters())


def test_center_moves_by_a_tenth_toward_the_mean() -> None:
    center = Center(3, 0.9)
    assert (center.value == 0).all()
    first, second = torch.randn(4, 3, generator=seeded(0)), torch.randn(5, 3, generator=seeded(1))
    center.observe(first.sum(dim=0), len(first))
    assert (center.value == 0).all()  # a step's own outputs wait until it is done
    center.update()
    torch.testing.assert_close(center.value, 0.1 * first.mean(dim=0))
    center.observe(second.sum(dim=0), len(second))
    center.update()
    torch.testing.assert_close(center.value, 0.9 * 0.1 * first.mean(dim=0) + 0.1 * second.mean(dim=0))
    before = center.value.clone()
    center.observe(torch.zeros(3), 0)
    center.update()
    assert torch.equal(center.value, before)  # nothing was seen


def test_without_masked_tokens_only_the_frame_center_moves() -> None:
    tcore = model()
    tcore(batch(), VALUES)
    tcore.finish_step(STAY)
    frame, patch = tcore.frame_center.value.clone(), tcore.patch_center.value.clone()
    tcore(batch(masked=()), VALUES)
    tcore.finish_step(STAY)
    assert not torch.equal(tcore.frame_center.value, frame)
    assert torch.equal(tcore.patch_center.value, patch)


def test_targets_of_a_step_use_the_centers_of_the_steps_before() -> None:
    tcore, first, second = model(), batch(seed=0), batch(seed=1)

    def expected(center: Tensor, made: Batch) -> Tensor:
        return ((tiny_models.teacher_outputs(tcore, made)[0] - center) / TEMPERATURE).softmax(dim=-1)

    nothing_seen = torch.zeros(tiny_models.PROTOTYPES)
    for _ in range(2):  # a second part of the same step sees the same center
        tcore(first, VALUES)
        torch.testing.assert_close(tcore.health_sample["frame_targets"], expected(nothing_seen, first))
    tcore.finish_step(STAY)
    tcore(second, VALUES)
    first_seen = 0.1 * tiny_models.teacher_outputs(tcore, first)[0].mean(dim=0)
    torch.testing.assert_close(tcore.health_sample["frame_targets"], expected(first_seen, second))


def test_sinkhorn_targets_use_no_center() -> None:
    tcore = model(targets="sinkhorn")
    tcore(batch(), VALUES)
    tcore.finish_step(STAY)
    assert (tcore.frame_center.value == 0).all()
    assert (tcore.patch_center.value == 0).all()
    for targets in (tcore.health_sample["frame_targets"], tcore.health_sample["patch_targets"]):
        torch.testing.assert_close(targets.sum(dim=1), torch.ones(targets.shape[0]))
        assert targets.sum(dim=0).max() < 3 * targets.shape[0] / tiny_models.PROTOTYPES
