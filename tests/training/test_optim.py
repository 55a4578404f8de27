import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tcore.methods import build
from tcore.methods.method import warmup_cosine
from tcore.recipes import recipe
from tcore.training.optim import Optimizer, Schedule, StepValues, build_schedule, parameter_rule
from tests.tiny import tiny

VALUES = StepValues(
    lr=1e-2,
    rates={"backbone": 1e-2, "head": 1e-2, "match": 1e-3, "last_layer": 0.0},
    last_layer=False,
    weight_decay=0.1,
    own={},
)


def schedule_of(name: str, steps_per_epoch: int, changes: dict[str, Any] | None = None) -> Schedule:
    """The schedule of a recipe; its networks, which have no part in it, are tiny."""
    small = {"vit.dim": 32, "vit.depth": 1, "vit.num_heads": 2, "head.hidden": 8, "head.prototypes": 8}
    config = recipe(name, small | {"matching.num_heads": 2} | (changes or {}))
    return build_schedule(config, build(config), steps_per_epoch)


def test_run_given_in_steps_has_warmups_as_fractions() -> None:
    schedule = schedule_of("quickstart", 3, {"optim.steps": 200, "teacher.temperature": (0.04, 0.07)})
    assert (schedule.num_steps, schedule.warmup_steps) == (200, 10)
    warm = [schedule.at(step).own["teacher_temperature"] for step in (0, 13, 14, 199)]
    assert (warm[0], warm[2], warm[3]) == pytest.approx((0.04, 0.07, 0.07))  # a warm-up of 15 steps
    assert warm[1] < 0.069


def test_run_given_in_epochs_counts_steps_of_the_store() -> None:
    schedule = schedule_of("vits16-k400", 936)
    assert (schedule.num_steps, schedule.warmup_steps) == (374_400, 18_720)
    assert (schedule.lr, schedule.rate(18_720, schedule.factors["match"])) == pytest.approx((1e-3, 1e-4))
    temperatures = [schedule.at(step).own["teacher_temperature"] for step in (0, 28_078, 28_079, 28_080)]
    assert temperatures[0] == 0.04
    assert temperatures[1] < temperatures[2] == pytest.approx(0.07) == temperatures[3]
    assert schedule.at(0).own["momentum"] == pytest.approx(0.992)
    large = schedule_of("vitb16-k400", 1873)
    assert large.lr == pytest.approx(1e-3 * math.sqrt(128 / 1024))
    assert large.factors["match"] == 0.13


def test_biases_norms_and_layer_scale_are_not_decayed_and_all_else_is() -> None:
    model = build(tiny())
    for part, named in model.parts().items():
        for name, parameter in named.parameters:
            rule = parameter_rule(part, name, depth=2)
            vector = parameter.ndim == 1
            assert rule.decayed == (not vector), (part, name)
            assert rule.lr_multiplier == 1.0


def test_each_part_is_clipped_by_itself() -> None:
    model = build(tiny())
    optimizer = Optimizer(model.parts(), tiny().optim, depth=2)
    for part, named in model.parts().items():
        for _, parameter in named.parameters:
            parameter.grad = torch.full_like(parameter, 10.0 if part == "head" else 1e-6)
    before = {
        part: [p.grad.clone() for _, p in named.parameters if p.grad is not None]
        for part, named in model.parts().items()
    }
    norms = optimizer.clip()
    assert set(norms) == {"backbone", "head", "match"}
    for part, named in model.parts().items():
        after = [p.grad for _, p in named.parameters if p.grad is not None]
        norm = float(nn.utils.get_total_norm(after))
        if part == "head":
            assert norm == pytest.approx(3.0, rel=1e-4)
        else:
            assert all(torch.equal(x, y) for x, y in zip(after, before[part], strict=True))


def test_matching_module_and_prototypes_follow_their_own_rates() -> None:
    model = build(tiny(head__train_gains=True))
    optimizer = Optimizer(model.parts(), tiny().optim, depth=2)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.ones_like(p) if p.requires_grad else None
    optimizer.step(VALUES)
    moved = {name: float((p.detach() - start[name]).abs().max()) for name, p in model.named_parameters()}
    assert moved["student.head.prototypes.directions"] == 0.0
    assert moved["student.backbone.norm.bias"] == pytest.approx(1e-2, rel=1e-3)
    assert moved["match.blocks.0.linear.bias"] == pytest.approx(1e-3, rel=1e-3)
    assert all(p.grad is None for _, named in model.parts().items() for _, p in named.parameters)


def test_a_peak_that_comes_once_is_the_first_step_after_the_warmup() -> None:
    rates = [warmup_cosine(step, 1.0, 0.0, 4, 10, peak_once=True) for step in range(6)]
    assert rates[:5] == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert rates[5] < 1.0
    changes = {"optim.warmup_peak": "once", "optim.steps": 40}
    schedule = schedule_of("quickstart", 10, changes)
    assert [schedule.at(step).lr / schedule.lr for step in range(3)] == [0.0, 0.5, 1.0]


def test_decay_on_everything_and_no_clip_are_settings() -> None:
    model = build(tiny())
    settings = replace(tiny().optim, decay_all=True, clip_by="none")
    optimizer = Optimizer(model.parts(), settings, depth=2)
    for p in model.parameters():
        p.grad = torch.full_like(p, 100.0) if p.requires_grad else None
    optimizer.clip()
    assert all((p.grad == 100).all() for p in model.parameters() if p.grad is not None)
    optimizer.step(VALUES)
    assert {group["weight_decay"] for group in optimizer.adamw.param_groups} == {VALUES.weight_decay}
