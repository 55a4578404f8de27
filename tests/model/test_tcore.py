"""The method as a whole: branches, gradients, teacher, centres, parts of a step."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tcore.config import (
    Config,
    HeadConfig,
    LossConfig,
    MatchingConfig,
    OptimConfig,
    TeacherConfig,
    ViewsConfig,
    VitConfig,
)
from tcore.data.batch import Batch, Counts, find_holes, make_batch
from tcore.errors import InputError
from tcore.model.heads import ProjectionHead
from tcore.model.losses import Losses
from tcore.model.matching import PatchMatchingModule
from tcore.model.tcore import Auxiliary, Center, LossForm, Targets, TCoRe, at_holes
from tcore.model.vit import Block, VisionTransformer
from tcore.recipes import recipe
from tcore.training.build import build_model, build_schedule, choose_device, choose_dtype

VIDEOS, LOCALS, SIZE, SMALL, PATCH, DIM, PROTOTYPES = 3, 2, 32, 16, 8, 16, 24
MASKED = (1, 2, 4)
TEMPERATURE = 0.05
WEIGHTS = LossConfig().weights()


def model(
    *,
    auxiliary: Auxiliary = "both",
    form: LossForm = "paper",
    targets: Targets = "centering",
    drop_path: float = 0.0,
    auxiliary_drop_path: bool = True,
    train_gains: bool = True,
) -> TCoRe:
    """A tiny model whose weights are large enough for every branch to matter."""
    torch.manual_seed(0)
    backbone = VisionTransformer(
        dim=DIM,
        depth=2,
        num_heads=2,
        patch_size=PATCH,
        image_size=SIZE,
        layer_scale=0.5,
        drop_path=drop_path,
    )
    head = ProjectionHead(
        dim=DIM, hidden=16, bottleneck=8, num_prototypes=PROTOTYPES, train_gains=train_gains
    )
    for linear in (m for m in (*backbone.modules(), *head.modules()) if isinstance(m, nn.Linear)):
        nn.init.normal_(linear.weight, std=0.3)
    match = None if auxiliary == "none" else PatchMatchingModule(dim=DIM, num_heads=4)
    return TCoRe(backbone, head, match, form=form, targets=targets, auxiliary_drop_path=auxiliary_drop_path)


def batch(
    *, masked: tuple[int, ...] = MASKED, auxiliary: Auxiliary = "both", videos: int = VIDEOS, seed: int = 0
) -> Batch:
    generator = torch.Generator().manual_seed(seed)

    def crops(count: int, size: int) -> Tensor:
        return torch.randn(count, 3, size, size, generator=generator)

    global_crops, local_crops = crops(2 * videos, SIZE), crops(LOCALS * videos, SMALL)
    past, future = crops(len(masked), SIZE), crops(len(masked), SIZE)
    mask = torch.zeros(2 * videos, (SIZE // PATCH) ** 2, dtype=torch.bool)
    for number, crop in enumerate(masked):
        mask[crop, torch.randperm(mask.shape[1], generator=generator)[: 2 + 3 * number]] = True
    return make_batch(
        global_crops,
        local_crops,
        mask,
        past if auxiliary in ("past", "both") else None,
        future if auxiliary in ("future", "both") else None,
    )


def part_of(whole: Batch, videos: list[int]) -> Batch:
    """Some videos of a batch, with the counts of the whole step."""

    def rows(x: Tensor) -> Tensor:
        return x.unflatten(0, (-1, VIDEOS))[:, videos].flatten(0, 1)

    # Row of each crop among the auxiliary views, -1 where it carries no mask.
    row_of = torch.full((2 * VIDEOS,), -1)
    row_of[whole.masked] = torch.arange(len(whole.masked))
    kept = rows(row_of)
    kept = kept[kept >= 0]
    assert whole.past is not None
    assert whole.future is not None
    return make_batch(
        rows(whole.global_crops),
        rows(whole.local_crops),
        rows(whole.mask),
        whole.past[kept],
        whole.future[kept],
        counts=whole.counts,
    )


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def values(losses: Losses) -> dict[str, float]:
    return {name: loss.item() for name, loss in losses.named().items()}


def perturb(module: nn.Module) -> None:
    """Move parameters away from where they are."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=seeded(parameter.numel())))


def teacher_outputs(tcore: TCoRe, crops: Batch) -> tuple[Tensor, Tensor]:
    """Raw outputs of the teacher's head for all global crops and for the masked tokens."""
    with torch.no_grad():
        seen = tcore.teacher.backbone(crops.teacher_crops)
        return tcore.teacher.head(seen.frame), tcore.teacher.head(seen.patches[crops.mask])


# Batches


def test_holes_are_the_masked_patches_of_the_masked_crops_in_order() -> None:
    made = batch()
    assert made.masked.tolist() == list(MASKED)
    patches = torch.randn(2 * VIDEOS, 16, DIM)
    assert torch.equal(at_holes(patches[made.masked], made), patches[made.mask])


def test_holes_of_a_crop_weigh_one_together() -> None:
    made = batch()
    of_crop = made.holes // 16
    for crop in range(len(MASKED)):
        weights = made.hole_weights[of_crop == crop]
        assert len(weights) == 2 + 3 * crop
        torch.testing.assert_close(weights, torch.full_like(weights, 1 / len(weights)))


def test_counts_of_a_batch_by_itself_are_its_own() -> None:
    assert batch().counts == Counts(videos=VIDEOS, masked_crops=3, masked_tokens=2 + 5 + 8)
    assert make_batch(torch.zeros(2, 3, 8, 8), torch.zeros(1, 3, 8, 8), torch.zeros(2, 1) > 0).counts == (
        1,
        0,
        0,
    )


def test_nothing_masked_has_no_holes() -> None:
    found = find_holes(torch.zeros(4, 9, dtype=torch.bool))
    assert [len(part) for part in found] == [0, 0, 0]


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
    losses = model(auxiliary=auxiliary, form=form)(batch(auxiliary=auxiliary), TEMPERATURE)
    assert set(losses.named()) == {"dino", "koleo"} | terms
    assert all(loss.shape == () and loss.isfinite() and loss != 0 for loss in losses.named().values())


@pytest.mark.parametrize("form", ["paper", "release"])
@pytest.mark.parametrize("auxiliary", ["none", "past", "future", "both"])
@pytest.mark.parametrize("targets", ["centering", "sinkhorn"])
def test_without_masked_crops_the_patch_terms_are_zero_with_a_graph(
    auxiliary: Auxiliary, form: LossForm, targets: Targets
) -> None:
    tcore = model(auxiliary=auxiliary, form=form, targets=targets, drop_path=0.1)
    losses = tcore(batch(masked=(), auxiliary=auxiliary), TEMPERATURE, seeded())
    for name, loss in losses.named().items():
        assert loss.requires_grad
        assert (loss.item() == 0) == (name not in ("dino", "koleo"))
    losses.total(WEIGHTS).backward()
    for part in tcore.parts().values():
        for name, parameter in part:
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name


@pytest.mark.parametrize("auxiliary", ["none", "past", "both"])
def test_every_trained_parameter_gets_a_finite_gradient(auxiliary: Auxiliary) -> None:
    tcore = model(auxiliary=auxiliary, drop_path=0.1)
    tcore(batch(auxiliary=auxiliary), TEMPERATURE, seeded()).total(WEIGHTS).backward()
    for part in tcore.parts().values():
        for name, parameter in part:
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name
            assert parameter.grad.abs().max() > 0, name


def test_a_single_video_trains() -> None:
    tcore = model()
    losses = tcore(batch(videos=1, masked=(0,)), TEMPERATURE)
    assert losses.koleo.item() == 0
    losses.total(WEIGHTS).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in tcore.student.parameters())


# What the losses are


def test_release_form_counts_all_crops_and_paper_form_masked_ones() -> None:
    paper = values(model(form="paper")(batch(), TEMPERATURE))
    release = values(model(form="release")(batch(), TEMPERATURE))
    for name in ("past_teacher", "future_teacher"):
        assert release[name] == pytest.approx(paper[name] * len(MASKED) / (2 * VIDEOS), rel=1e-5)
    assert (release["dino"], release["koleo"]) == (paper["dino"], paper["koleo"])
    assert release["past_future"] != pytest.approx(paper["past_future"], rel=0.01)


@pytest.mark.parametrize("form", ["paper", "release"])
def test_patch_losses_follow_the_formulas_crop_by_crop(form: LossForm) -> None:
    tcore, made = model(form=form), batch()
    assert made.past is not None
    assert made.future is not None
    losses = values(tcore(made, TEMPERATURE))
    with torch.no_grad():
        seen = tcore.teacher.backbone(made.global_crops).patches
        holed = tcore.student.backbone(made.global_crops, made.mask).patches
        past, future = (tcore.student.backbone(x).patches for x in (made.past, made.future))
        assert tcore.match is not None
        of_crops: list[tuple[float, float, float]] = []
        squares: list[Tensor] = []
        for row, crop in enumerate(MASKED):
            target = (tcore.teacher.head(seen[crop]) / TEMPERATURE).softmax(dim=-1)
            sides = [
                tcore.student.head(tcore.match(holed[crop][None], other[row][None])[0])
                for other in (past, future)
            ]
            p, q = ((side / 0.1).softmax(dim=-1) for side in sides)
            holes = made.mask[crop]
            reconstruction = [-(target * x.log()).sum(dim=-1)[holes].mean().item() for x in (p, q)]
            agreement = (p - q).square().sum(dim=-1)[holes].mean().item()
            of_crops.append((reconstruction[0], reconstruction[1], agreement))
            squares.append((sides[0] - sides[1]).square()[holes])
    past_sum, future_sum, agreement_sum = (sum(terms) for terms in zip(*of_crops, strict=True))
    divisor = len(MASKED) if form == "paper" else 2 * VIDEOS
    assert losses["past_teacher"] == pytest.approx(past_sum / divisor, rel=1e-4)
    assert losses["future_teacher"] == pytest.approx(future_sum / divisor, rel=1e-4)
    expected = agreement_sum / len(MASKED) if form == "paper" else torch.cat(squares).mean().item()
    assert losses["past_future"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("form", ["paper", "release"])
def test_patch_teacher_restores_from_the_student_alone(form: LossForm) -> None:
    tcore, made = model(auxiliary="none", form=form), batch(auxiliary="none")
    got = values(tcore(made, TEMPERATURE))["patch_teacher"]
    expected = 0.0
    with torch.no_grad():
        seen = tcore.teacher.backbone(made.global_crops).patches
        holed = tcore.student.backbone(made.global_crops, made.mask).patches
        for crop in MASKED:
            target = (tcore.teacher.head(seen[crop]) / TEMPERATURE).softmax(dim=-1)
            predicted = (tcore.student.head(holed[crop]) / 0.1).log_softmax(dim=-1)
            expected -= (target * predicted).sum(dim=-1)[made.mask[crop]].mean().item()
    divisor = len(MASKED) if form == "paper" else 2 * VIDEOS
    assert got == pytest.approx(expected / divisor, rel=1e-4)


def test_koleo_is_the_sum_over_the_two_global_crops() -> None:
    tcore, made = model(), batch()
    got = values(tcore(made, TEMPERATURE))["koleo"]
    with torch.no_grad():
        frames = tcore.student.backbone(made.global_crops, made.mask).frame
    expected = 0.0
    for crop in range(2):
        units = [f / f.norm() for f in frames[crop * VIDEOS : (crop + 1) * VIDEOS]]
        for i in range(VIDEOS):
            nearest = min((units[i] - units[j]).norm().item() for j in range(VIDEOS) if j != i)
            expected -= math.log(nearest + 1e-8) / VIDEOS
    assert got == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("form", ["paper", "release"])
def test_parts_of_a_step_add_up_to_the_whole(form: LossForm) -> None:
    whole = batch()
    expected = values(model(form=form)(whole, TEMPERATURE))
    split = [values(model(form=form)(part_of(whole, videos), TEMPERATURE)) for videos in ([0, 2], [1])]
    for name in ("dino", "past_teacher", "future_teacher", "past_future"):
        assert sum(part[name] for part in split) == pytest.approx(expected[name], rel=1e-4)


def test_gradients_of_the_parts_of_a_step_add_up_to_those_of_the_whole() -> None:
    weights = WEIGHTS | {"koleo": 0.0}  # koleo looks at the videos of a part alone
    whole, tcore, in_parts = batch(), model(), model()
    tcore(whole, TEMPERATURE).total(weights).backward()
    for videos in ([0, 2], [1]):
        in_parts(part_of(whole, videos), TEMPERATURE).total(weights).backward()
    for (name, one), other in zip(tcore.named_parameters(), in_parts.parameters(), strict=True):
        if one.requires_grad:
            torch.testing.assert_close(other.grad, one.grad, rtol=1e-3, atol=1e-5, msg=name)


def test_swapping_past_and_future_swaps_their_losses() -> None:
    made = batch()
    swapped = replace(made, past=made.future, future=made.past)
    for form in ("paper", "release"):
        one, other = (values(model(form=form)(x, TEMPERATURE)) for x in (made, swapped))
        assert one["past_teacher"] == pytest.approx(other["future_teacher"], rel=1e-5)
        assert one["future_teacher"] == pytest.approx(other["past_teacher"], rel=1e-5)
        assert one["past_teacher"] != pytest.approx(one["future_teacher"], rel=1e-4)
        for name in ("past_future", "dino", "koleo"):
            assert one[name] == pytest.approx(other[name], rel=1e-5)


def test_equal_past_and_future_agree_completely() -> None:
    made = batch()
    for form in ("paper", "release"):
        losses = values(model(form=form)(replace(made, future=made.past), TEMPERATURE))
        assert losses["past_future"] == pytest.approx(0, abs=1e-9)


def test_auxiliary_views_belong_to_the_masked_crops_in_their_order() -> None:
    tcore, made = model(), batch()
    assert made.past is not None
    assert made.past.shape[0] == len(MASKED) < 2 * VIDEOS
    before = values(tcore(made, TEMPERATURE))
    shuffled = values(tcore(replace(made, past=made.past.flip(0)), TEMPERATURE))
    assert shuffled["past_teacher"] != pytest.approx(before["past_teacher"], rel=1e-6)
    assert shuffled["future_teacher"] == before["future_teacher"]


# Branches


def test_student_does_not_see_masked_pixels_but_the_teacher_does() -> None:
    tcore, made = model(), batch()
    hidden = made.mask.view(-1, 4, 4).repeat_interleave(PATCH, 1).repeat_interleave(PATCH, 2)[:, None]
    changed = torch.where(
        hidden, torch.randn(made.global_crops.shape, generator=seeded(5)), made.global_crops
    )
    before = values(tcore(made, TEMPERATURE))
    student_only = values(tcore(replace(made, global_crops=changed), TEMPERATURE))
    assert student_only == before
    teacher_only = values(tcore(replace(made, teacher_crops=changed), TEMPERATURE))
    assert teacher_only["past_teacher"] != pytest.approx(before["past_teacher"], rel=1e-4)
    assert teacher_only["past_future"] == before["past_future"]


def test_teacher_crops_are_the_global_crops_unless_given() -> None:
    made = batch()
    assert made.teacher_crops is made.global_crops


def test_auxiliary_branch_is_the_student_without_mask() -> None:
    tcore, made = model(), batch()
    perturb(tcore.student)
    found = tcore._auxiliary_patches(made, None)
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
    tcore(made, TEMPERATURE).total(WEIGHTS).backward()
    for pixels in (made.past, made.future):
        assert pixels is not None
        assert pixels.grad is None
    for pixels in (made.global_crops, made.local_crops):
        assert pixels.grad is not None
        assert pixels.grad.abs().max() > 0


@pytest.mark.parametrize("form", ["paper", "release"])
def test_past_future_has_a_gradient_into_both_sides(form: LossForm) -> None:
    tcore, made = model(form=form), batch()
    holes = len(made.holes)
    sides = {side: torch.randn(holes, DIM, generator=seeded(n)) for n, side in enumerate(("past", "future"))}
    for tokens in sides.values():
        tokens.requires_grad_()
    targets = torch.full((holes, PROTOTYPES), 1 / PROTOTYPES)
    tcore._patch_losses(made, targets, sides)["past_future"].backward()
    for tokens in sides.values():
        assert tokens.grad is not None
        assert (tokens.grad.abs().amax(dim=1) > 0).all()


@pytest.mark.parametrize("name", ["past_teacher", "future_teacher", "past_future"])
def test_patch_losses_train_backbone_head_and_matching_module(name: str) -> None:
    tcore = model()
    tcore(batch(), TEMPERATURE).named()[name].backward()
    for part, parameters in tcore.parts().items():
        reached = [p.grad is not None and bool(p.grad.abs().max() > 0) for _, p in parameters]
        assert sum(reached) > len(reached) / 2, part
    assert tcore.student.backbone.mask_token.grad is not None


def test_stochastic_depth_of_the_auxiliary_branch_is_a_setting() -> None:
    made = batch()

    def past(auxiliary_drop_path: bool, seed: int) -> Tensor:
        tcore = model(drop_path=0.5, auxiliary_drop_path=auxiliary_drop_path)
        return tcore._auxiliary_patches(made, seeded(seed))["past"]

    assert torch.equal(past(False, 0), past(False, 1))
    assert not torch.equal(past(True, 0), past(True, 1))
    assert model(drop_path=0.5).auxiliary_drop_path  # on, as released
    assert VitConfig().auxiliary_drop_path


def test_same_seed_gives_the_same_losses_and_gradients() -> None:
    def run(seed: int) -> tuple[dict[str, float], Tensor | None]:
        tcore = model(drop_path=0.3)
        torch.manual_seed(torch.seed())  # nothing but the generator may matter
        losses = tcore(batch(), TEMPERATURE, seeded(seed))
        losses.total(WEIGHTS).backward()
        return values(losses), tcore.student.backbone.pos_embed.grad

    (first, gradient), (again, gradient_again), (other, _) = run(3), run(3), run(4)
    assert first == again
    assert gradient is not None
    assert gradient_again is not None
    assert torch.equal(gradient, gradient_again)
    assert first != other


def test_losses_of_half_precision_arithmetic_are_in_full_precision() -> None:
    for targets in ("centering", "sinkhorn"):
        exact = values(model(targets=targets)(batch(), TEMPERATURE))
        tcore = model(targets=targets, drop_path=0.1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses = tcore.eval()(batch(), TEMPERATURE, seeded())
        losses.total(WEIGHTS).backward()
        for name, loss in losses.named().items():
            assert loss.dtype == torch.float32
            assert loss.item() == pytest.approx(exact[name], rel=0.1)
        assert all(p.grad is not None and p.grad.isfinite().all() for p in tcore.student.parameters())
        assert tcore.frame_center.waiting.dtype == torch.float32


# Teacher


def test_teacher_starts_as_a_copy_of_the_student() -> None:
    tcore = model()
    student, teacher = tcore.student.state_dict(), tcore.teacher.state_dict()
    assert set(student) == set(teacher)
    for name in student:
        assert torch.equal(student[name], teacher[name])
        assert student[name].data_ptr() != teacher[name].data_ptr()


def test_teacher_evaluates_while_the_student_trains() -> None:
    tcore = model()
    for mode in (True, False, True):
        tcore.train(mode)
        assert all(module.training == mode for module in tcore.student.modules())
        assert not any(module.training for module in tcore.teacher.modules())
    tcore.eval()
    assert not any(module.training for module in tcore.modules())


def test_teacher_has_no_gradient() -> None:
    tcore = model()
    assert not any(p.requires_grad for p in tcore.teacher.parameters())
    tcore(batch(), TEMPERATURE).total(WEIGHTS).backward()
    assert all(p.grad is None for p in tcore.teacher.parameters())


@pytest.mark.parametrize("momentum", [0.0, 0.992, 1.0])
def test_teacher_follows_the_student(momentum: float) -> None:
    tcore = model()
    perturb(tcore.student)
    before = {name: p.clone() for name, p in tcore.teacher.named_parameters()}
    student = dict(tcore.student.named_parameters())
    kept = {name: p.clone() for name, p in student.items()}
    tcore.update_teacher(momentum)
    for name, p in tcore.teacher.named_parameters():
        torch.testing.assert_close(p, momentum * before[name] + (1 - momentum) * student[name])
        assert torch.equal(student[name], kept[name])
        if momentum == 1:
            assert torch.equal(p, before[name])


def test_teacher_follows_backbone_and_head_but_has_no_matching_module() -> None:
    tcore = model()
    assert {name.split(".")[0] for name, _ in tcore.teacher.named_parameters()} == {"backbone", "head"}


# Centres


def test_center_moves_by_a_tenth_towards_the_mean() -> None:
    center = Center(3, 0.9)
    assert (center.value == 0).all()
    first, second = torch.randn(4, 3, generator=seeded(0)), torch.randn(5, 3, generator=seeded(1))
    center.observe(first)
    assert (center.value == 0).all()  # a step's own outputs wait until it is done
    center.update()
    torch.testing.assert_close(center.value, 0.1 * first.mean(dim=0))
    center.observe(second)
    center.update()
    torch.testing.assert_close(center.value, 0.9 * 0.1 * first.mean(dim=0) + 0.1 * second.mean(dim=0))


def test_two_parts_of_a_step_move_the_center_like_one() -> None:
    x = torch.randn(7, 3, generator=seeded(0))
    whole, parts = Center(3, 0.9), Center(3, 0.9)
    whole.observe(x)
    parts.observe(x[:2])
    parts.observe(x[2:])
    whole.update()
    parts.update()
    torch.testing.assert_close(parts.value, whole.value)


def test_center_that_observed_nothing_stays() -> None:
    center = Center(3, 0.9)
    center.observe(torch.ones(2, 3))
    center.update()
    before = center.value.clone()
    center.update()
    center.observe(torch.zeros(0, 3))
    center.update()
    assert torch.equal(center.value, before)


def test_centers_take_all_global_crops_and_masked_tokens_only() -> None:
    tcore, made = model(), batch()
    frames, patches = teacher_outputs(tcore, made)
    tcore(made, TEMPERATURE)
    assert (tcore.frame_center.value == 0).all()
    tcore.update_centers()
    torch.testing.assert_close(tcore.frame_center.value, 0.1 * frames.mean(dim=0))
    torch.testing.assert_close(tcore.patch_center.value, 0.1 * patches.mean(dim=0))


def test_without_masked_tokens_only_the_frame_center_moves() -> None:
    tcore = model()
    tcore(batch(), TEMPERATURE)
    tcore.update_centers()
    frame, patch = tcore.frame_center.value.clone(), tcore.patch_center.value.clone()
    tcore(batch(masked=()), TEMPERATURE)
    tcore.update_centers()
    assert not torch.equal(tcore.frame_center.value, frame)
    assert torch.equal(tcore.patch_center.value, patch)


def test_targets_of_a_step_use_the_centers_of_the_steps_before() -> None:
    tcore, first, second = model(), batch(seed=0), batch(seed=1)

    def expected(center: Tensor, made: Batch) -> Tensor:
        return ((teacher_outputs(tcore, made)[0] - center) / TEMPERATURE).softmax(dim=-1)

    nothing_seen = torch.zeros(PROTOTYPES)
    for _ in range(2):  # a second part of the same step sees the same centre
        tcore(first, TEMPERATURE)
        assert tcore.glimpse is not None
        torch.testing.assert_close(tcore.glimpse.frame_targets, expected(nothing_seen, first))
    tcore.update_centers()
    tcore(second, TEMPERATURE)
    first_seen = 0.1 * teacher_outputs(tcore, first)[0].mean(dim=0)
    assert tcore.glimpse is not None
    torch.testing.assert_close(tcore.glimpse.frame_targets, expected(first_seen, second))


def test_parts_of_a_step_move_the_centers_like_the_whole() -> None:
    whole, tcore, in_parts = batch(), model(), model()
    tcore(whole, TEMPERATURE)
    for videos in ([0, 2], [1]):
        in_parts(part_of(whole, videos), TEMPERATURE)
    tcore.update_centers()
    in_parts.update_centers()
    torch.testing.assert_close(in_parts.frame_center.value, tcore.frame_center.value)
    torch.testing.assert_close(in_parts.patch_center.value, tcore.patch_center.value)


def test_sinkhorn_targets_use_no_center() -> None:
    tcore = model(targets="sinkhorn")
    tcore(batch(), TEMPERATURE)
    tcore.update_centers()
    assert (tcore.frame_center.value == 0).all()
    assert (tcore.patch_center.value == 0).all()
    assert tcore.glimpse is not None
    for targets in (tcore.glimpse.frame_targets, tcore.glimpse.patch_targets):
        torch.testing.assert_close(targets.sum(dim=1), torch.ones(targets.shape[0]))
        assert targets.sum(dim=0).max() < 3 * targets.shape[0] / PROTOTYPES


# From settings


def tiny_config() -> Config:
    return Config(
        views=ViewsConfig(global_size=SIZE, local_size=SMALL, num_local=LOCALS),
        vit=VitConfig(dim=48, depth=2, num_heads=3, patch_size=PATCH),
        matching=MatchingConfig(num_heads=4, gain=2.0, num_blocks=2, temperature=0.5),
        head=HeadConfig(hidden=64, bottleneck=32, prototypes=32, train_gains=False),
        teacher=TeacherConfig(targets="sinkhorn", center_momentum=0.8),
        loss=LossConfig(form="release", student_temperature=0.2),
    )


def test_settings_reach_the_networks() -> None:
    config = tiny_config()
    tcore = build_model(config)
    vit = tcore.student.backbone
    assert (vit.dim, len(vit.blocks), vit.patch_size, vit.native_grid) == (48, 2, PATCH, 4)
    for block in vit.blocks:
        assert isinstance(block, Block)
        assert block.attn.num_heads == 3
        assert block.drop_path == 0.1
        assert (block.ls1.gamma == 1e-5).all()
    assert tcore.match is not None
    assert len(tcore.match.blocks) == 2
    assert tcore.student.head.prototypes.directions.shape == (32, 32)
    assert not tcore.student.head.prototypes.gains.requires_grad
    assert (tcore.form, tcore.targets, tcore.student_temperature) == ("release", "sinkhorn", 0.2)
    assert tcore.frame_center.momentum == tcore.patch_center.momentum == 0.8


def test_parts_are_what_is_trained() -> None:
    tcore = build_model(tiny_config())
    parts = tcore.parts()
    assert set(parts) == {"backbone", "head", "match"}
    assert "prototypes.gains" not in dict(parts["head"])
    assert set(build_model(replace(tiny_config(), auxiliary="none")).parts()) == {"backbone", "head"}


def test_model_is_a_function_of_the_seed_alone() -> None:
    state = torch.get_rng_state()
    first = build_model(tiny_config()).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(1)
    again = build_model(tiny_config()).state_dict()
    other = build_model(replace(tiny_config(), seed=1)).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["student.backbone.pos_embed"], other["student.backbone.pos_embed"])


def test_model_with_published_settings_starts_at_the_uniform_answer() -> None:
    """Once the centre has caught up; the targets of the very first steps are not centred yet."""
    config = replace(
        tiny_config(),
        vit=VitConfig(dim=96, depth=2, num_heads=3, patch_size=PATCH),
        head=HeadConfig(hidden=256, prototypes=512),
        teacher=TeacherConfig(),
        loss=LossConfig(),
    )
    tcore = build_model(config)
    for step in range(25):
        losses = tcore(batch(seed=step), 0.04, seeded())
        tcore.update_centers()
    assert losses.dino.item() == pytest.approx(math.log(512), rel=0.05)


def test_schedule_of_a_run_in_epochs_is_the_published_one() -> None:
    schedule = build_schedule(recipe("vits16-k400"), 936)
    assert (schedule.num_steps, schedule.warmup_steps) == (400 * 936, 20 * 936)
    assert schedule.temperature_steps == 30 * 936
    assert (schedule.lr, schedule.matching_lr, schedule.end_lr) == pytest.approx((1e-3, 1e-4, 1e-6))
    large = build_schedule(recipe("vitb16-k400"), 1873)
    assert large.lr == pytest.approx(1e-3 * math.sqrt(128 / 1024))
    assert large.matching_lr == pytest.approx(0.13 * large.lr)


def test_warm_ups_of_a_run_in_steps_are_fractions_of_it() -> None:
    schedule = build_schedule(replace(Config(), optim=OptimConfig(steps=1200)), 7)
    assert (schedule.num_steps, schedule.warmup_steps, schedule.temperature_steps) == (1200, 60, 90)


def test_device_that_is_none_is_refused_by_name() -> None:
    assert choose_device("cpu") == torch.device("cpu")
    with pytest.raises(InputError, match=r"runtime\.device=gpu"):
        choose_device("gpu")
    if not torch.cuda.is_available():
        assert choose_device("auto") == torch.device("cpu")
        with pytest.raises(InputError, match=r"runtime\.device=cuda"):
            choose_device("cuda")


def test_precision_follows_the_device_unless_given() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert choose_dtype("auto", cpu) == choose_dtype("fp32", gpu) == torch.float32
    assert choose_dtype("auto", gpu) == choose_dtype("bf16", cpu) == torch.bfloat16
