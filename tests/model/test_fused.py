"""The losses in chunks beside the losses as they are written down: values and gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tcore.methods.settings import Auxiliary, LossForm
from tcore.methods.settings_groups import Targets
from tcore.model import fused
from tcore.model.losses import (
    TeacherTargets,
    cross_entropy,
    dino_loss,
    given_targets,
    past_future_output_distance,
    past_future_probability_distance,
    patch_loss,
)
from tests.methods.tiny_models import STAY, VALUES, batch, model, perturb, seeded, values

ROWS, WIDTH, PROTOTYPES, TEACHER, STUDENT = 11, 6, 40, 0.04, 0.1


def drawn(*shape: int, seed: int) -> Tensor:
    """Rows of unit length, as bottlenecks and prototypes are."""
    return F.normalize(torch.randn(*shape, generator=seeded(seed), dtype=torch.float64), dim=-1)


def teaching(rows: int) -> TeacherTargets:
    return TeacherTargets(
        drawn(rows, WIDTH, seed=1), drawn(PROTOTYPES, WIDTH, seed=2), drawn(PROTOTYPES, seed=3), 0.4
    )


@pytest.fixture(params=["one chunk", "many chunks"], autouse=True)
def chunked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "many chunks":  # three rows of the patches, two videos of the frames
        monkeypatch.setattr(fused, "CPU_CHUNK", 10 * PROTOTYPES * 8)


@pytest.mark.parametrize("probabilities", [True, False])
@pytest.mark.parametrize("sides", [1, 2])
def test_patch_sums_and_their_gradients_are_those_of_the_plain_losses(
    sides: int, probabilities: bool
) -> None:
    teacher, weights = teaching(ROWS), drawn(ROWS, seed=4).abs()
    z, prototypes = drawn(sides, ROWS, WIDTH, seed=5), drawn(PROTOTYPES, WIDTH, seed=6)
    upstream = torch.tensor([0.3, -1.7, 2.1], dtype=torch.float64)[-(sides + 1) :]

    def plain(z: Tensor, prototypes: Tensor) -> Tensor:
        outputs, targets = z @ prototypes.T, teacher.targets()
        sums = [patch_loss(targets, side, weights, STUDENT, 1) for side in outputs]
        if probabilities:
            distance = past_future_probability_distance(outputs[0], outputs[-1], weights, STUDENT, 1)
        else:
            distance = past_future_output_distance(outputs[0], outputs[-1], 1) * PROTOTYPES
        return torch.stack([*sums, distance])

    def fast(z: Tensor, prototypes: Tensor) -> Tensor:
        entropies, distance, apart = fused.fused_patch_sums(z, prototypes, teacher, weights, STUDENT)
        return torch.cat([entropies, (apart if probabilities else distance)[None]])

    check(plain, fast, z, prototypes, upstream)


@pytest.mark.parametrize("views", [2, 5])
def test_frame_sum_and_its_gradient_are_those_of_the_plain_loss(views: int) -> None:
    videos = 7
    teacher = teaching(2 * videos)
    z, prototypes = drawn(views, videos, WIDTH, seed=5), drawn(PROTOTYPES, WIDTH, seed=6)

    def plain(z: Tensor, prototypes: Tensor) -> Tensor:
        outputs = (z @ prototypes.T).flatten(0, 1)
        pairs = 2 * (views - 2) + 2
        global_, local = outputs.tensor_split([2 * videos])
        return dino_loss(teacher.targets(), global_, local, STUDENT, 1) * pairs

    def fast(z: Tensor, prototypes: Tensor) -> Tensor:
        return fused.fused_frame_sum(z, prototypes, teacher, STUDENT)

    check(plain, fast, z, prototypes, torch.tensor(0.7, dtype=torch.float64))


def check(plain: object, fast: object, z: Tensor, prototypes: Tensor, upstream: Tensor) -> None:
    found = []
    for loss in (plain, fast):
        assert callable(loss)
        inputs = [z.clone().requires_grad_(), prototypes.clone().requires_grad_()]
        value = loss(*inputs)
        value.backward(upstream.to(value.dtype))
        found.append((value.detach().double(), *(x.grad for x in inputs)))
    for expected, got in zip(*found, strict=True):
        assert expected is not None
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("targets", ["centering", "sinkhorn"])
@pytest.mark.parametrize("auxiliary", ["none", "past", "both"])
@pytest.mark.parametrize("form", ["paper", "release"])
def test_a_whole_step_is_the_same_fused_and_plain(
    form: LossForm, auxiliary: Auxiliary, targets: Targets
) -> None:
    """Losses to 1e-5, and every gradient; the centers have moved away from 0."""
    results = []
    for fast in (False, True):
        tcore = model(form=form, auxiliary=auxiliary, targets=targets)
        perturb(tcore.teacher)
        tcore.fused = fast
        tcore(batch(auxiliary=auxiliary, seed=3), VALUES)
        tcore.finish_step(STAY)
        losses = tcore(batch(auxiliary=auxiliary), VALUES)
        tcore.total(losses).backward()
        gradients = {name: p.grad for name, p in tcore.named_parameters() if p.requires_grad}
        results.append((values(losses), gradients))
    (plain, plain_gradients), (fast_values, fast_gradients) = results
    assert fast_values == pytest.approx(plain, rel=1e-5)
    for name, expected in plain_gradients.items():
        assert expected is not None
        found = fast_gradients[name]
        assert found is not None
        assert (found - expected).norm() <= 1e-5 * expected.norm(), name


def test_sum_of_the_teachers_outputs_needs_no_outputs() -> None:
    teacher = teaching(ROWS)
    torch.testing.assert_close(
        teacher.total(), teacher.outputs(slice(None)).float().sum(dim=0), rtol=1e-5, atol=1e-5
    )


def test_targets_of_some_rows_are_those_of_all() -> None:
    teacher = teaching(ROWS)
    outputs = teacher.outputs(slice(None)).float()
    every = ((outputs - teacher.center.float()) / teacher.temperature).softmax(dim=-1)
    torch.testing.assert_close(teacher.targets(slice(2, 9, 3)), every[2:9:3], check_dtype=False)
    given = given_targets(every)
    torch.testing.assert_close(given.targets(slice(2, 5)), every[2:5], check_dtype=False)
    output = drawn(ROWS, PROTOTYPES, seed=8)
    torch.testing.assert_close(
        cross_entropy(given.targets(), output, 0.1), cross_entropy(every, output, 0.1), rtol=1e-5, atol=1e-5
    )


def test_impossible_prototypes_of_given_targets_do_no_harm() -> None:
    """Sinkhorn can underflow to exactly 0, whose logarithm is not finite."""
    targets = torch.zeros(3, PROTOTYPES)
    targets[:, 4] = 1.0
    z = drawn(1, 3, WIDTH, seed=5).float().requires_grad_()
    entropies, distance, apart = fused.fused_patch_sums(
        z, drawn(PROTOTYPES, WIDTH, seed=6).float(), given_targets(targets), torch.ones(3), 0.1
    )
    (entropies.sum() + distance + apart).backward()
    assert entropies.isfinite().all()
    assert z.grad is not None
    assert z.grad.isfinite().all()
