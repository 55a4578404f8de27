"""The method as a whole: the teacher and its centers."""

import torch
from torch import Tensor

from tcore.methods.batch import Batch
from tcore.methods.distillation import Center
from tests.methods.tiny_models import (
    PROTOTYPES,
    STAY,
    TEMPERATURE,
    VALUES,
    batch,
    model,
    seeded,
    teacher_outputs,
)

# Teacher


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


# Centers


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
        return ((teacher_outputs(tcore, made)[0] - center) / TEMPERATURE).softmax(dim=-1)

    nothing_seen = torch.zeros(PROTOTYPES)
    for _ in range(2):  # a second part of the same step sees the same center
        tcore(first, VALUES)
        torch.testing.assert_close(tcore.health_sample["frame_targets"], expected(nothing_seen, first))
    tcore.finish_step(STAY)
    tcore(second, VALUES)
    first_seen = 0.1 * teacher_outputs(tcore, first)[0].mean(dim=0)
    torch.testing.assert_close(tcore.health_sample["frame_targets"], expected(first_seen, second))


def test_sinkhorn_targets_use_no_center() -> None:
    tcore = model(targets="sinkhorn")
    tcore(batch(), VALUES)
    tcore.finish_step(STAY)
    assert (tcore.frame_center.value == 0).all()
    assert (tcore.patch_center.value == 0).all()
    for targets in (tcore.health_sample["frame_targets"], tcore.health_sample["patch_targets"]):
        torch.testing.assert_close(targets.sum(dim=1), torch.ones(targets.shape[0]))
        assert targets.sum(dim=0).max() < 3 * targets.shape[0] / PROTOTYPES
