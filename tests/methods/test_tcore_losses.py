"""The method as a whole: which losses there are, and what they are."""

from dataclasses import replace

import pytest
import torch

from tcore.methods.settings import Auxiliary, LossForm
from tcore.methods.settings_groups import Targets
from tcore.model.subset import Wanted
from tests.methods.tiny_models import (
    MASKED,
    TEMPERATURE,
    VALUES,
    VIDEOS,
    batch,
    model,
    part_of,
    seeded,
    values,
)

# Which losses there are


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
    for part in tcore.parts().values():
        for name, parameter in part.parameters:
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name


@pytest.mark.parametrize("auxiliary", ["none", "past", "both"])
def test_every_trained_parameter_gets_a_finite_gradient(auxiliary: Auxiliary) -> None:
    tcore = model(auxiliary=auxiliary, drop_path=0.1)
    tcore.total(tcore(batch(auxiliary=auxiliary), VALUES, seeded())).backward()
    for part in tcore.parts().values():
        for name, parameter in part.parameters:
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name
            assert parameter.grad.abs().max() > 0, name


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
    assert all(p.grad is not None and p.grad.isfinite().all() for p in tcore.student.parameters())


# What the losses are


@pytest.mark.parametrize("form", ["paper", "release"])
def test_patch_teacher_restores_from_the_student_alone(form: LossForm) -> None:
    tcore, made = model(auxiliary="none", form=form), batch(auxiliary="none")
    got = values(tcore(made, VALUES))["patch_teacher"]
    expected = 0.0
    with torch.no_grad():
        seen = tcore.teacher.backbone(made.global_crops).patches
        masked = tcore.student.backbone(made.global_crops, made.mask).patches
        for crop in MASKED:
            target = (tcore.teacher.head(seen[crop]) / TEMPERATURE).softmax(dim=-1)
            predicted = (tcore.student.head(masked[crop]) / 0.1).log_softmax(dim=-1)
            expected -= (target * predicted).sum(dim=-1)[made.mask[crop]].mean().item()
    divisor = len(MASKED) if form == "paper" else 2 * VIDEOS
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
