"""The estimate of memory beside what autograd keeps, what an allocator hands out, and what a GPU measured."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch.profiler import ProfilerActivity, profile

from tcore import Config, recipe
from tcore.data.loader import load
from tcore.training.build import build_model, build_schedule
from tcore.training.loop import open_source, resolve
from tcore.training.memory import GIB, KEPT, count_parameters, estimate
from tcore.training.plan import _state_gib
from tcore.training.step import Trainer
from tests.training import kept

SMALL: dict[str, Any] = {
    "vit.dim": 96,
    "vit.depth": 3,
    "vit.num_heads": 3,
    "views.global_size": 112,
    "views.local_size": 48,
    "head.hidden": 256,
    "head.bottleneck": 64,
    "head.prototypes": 2048,
    "masking.group": 8,
    "optim.batch": 8,
    "optim.precision": "fp32",
    "optim.steps": 2,
    "rendered.videos": 8,
    "rendered.frames": 12,
    "runtime.device": "cpu",
}


@pytest.fixture(scope="module")
def compiled() -> dict[str, float]:
    """Counts of compiled modules, from a process in which shapes are not checked: checks cut graphs."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.training.kept"], capture_output=True, text=True, check=True
    )
    counts: dict[str, float] = json.loads(done.stdout)
    return counts


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("drop", [0.0, 0.5])
def test_a_block_keeps_what_the_estimate_says(bf16: bool, drop: float) -> None:
    assert kept.of_a_block(False, bf16, drop) == pytest.approx(kept_of_a_block(False, bf16, drop), rel=0.01)


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_the_matching_module_keeps_what_the_estimate_says(bf16: bool) -> None:
    assert kept.of_matching(False, bf16) == pytest.approx(kept_of_matching(False, bf16), rel=0.01)


@pytest.mark.long
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_compiled_modules_keep_what_the_estimate_says(bf16: bool, compiled: dict[str, float]) -> None:
    for drop in (0.0, 0.5):
        expected = kept_of_a_block(True, bf16, drop)
        assert compiled[f"block {bf16} {drop}"] == pytest.approx(expected, rel=0.01)
    assert compiled[f"match {bf16}"] == pytest.approx(kept_of_matching(True, bf16), rel=0.01)


def kept_of_a_block(compiled: bool, bf16: bool, drop: float) -> float:
    own = KEPT[compiled, bf16]
    statistics = 16 + 4 * kept.HEADS
    return own.stream * kept.DIM + (1 - drop) * (own.branches * kept.DIM + statistics)


def kept_of_matching(compiled: bool, bf16: bool) -> float:
    return KEPT[compiled, bf16].match * kept.DIM + 8 * kept.HEADS


def allocated_at_the_peak(function: Callable[[], Any]) -> int:
    """The most that torch held at once of what it allocated in a function."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        function()
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"optim.precision": "bf16"},
        {"optim.batch": 16},
        {"vit.depth": 6, "vit.drop_path": 0.4},
        {"views.num_local": 2, "auxiliary": "none"},
        {"head.prototypes": 8192, "auxiliary": "past"},
        {"teacher.targets": "sinkhorn"},
        {"optim.batch": 16, "optim.accumulate": 2},
    ],
    ids=lambda changes: ",".join(f"{name}={value}" for name, value in changes.items()),
)
def test_a_step_on_a_cpu_takes_no_more_than_the_estimate_and_not_much_less(changes: dict[str, Any]) -> None:
    config = resolve(recipe("vits16-k400", SMALL | changes))
    trainer, schedule = Trainer(config), build_schedule(config, 1)
    parts = load(open_source(config, None), 0, 2, trainer.device)
    trainer.step(parts, 0, schedule.at(0))
    found = allocated_at_the_peak(lambda: trainer.step(parts, 1, schedule.at(1)))
    trained = sum(p.numel() for named in trainer.model.parts().values() for _, p in named)
    teacher = sum(p.numel() for p in trainer.model.teacher.parameters())
    found += 4 * (3 * trained + teacher)  # gradients alone are made in the step
    said = estimate(config, 1, "cpu", config.rendered.size**2)
    assert 1.0 <= (said.total - said.overhead) / found < 1.25


@pytest.mark.parametrize(
    ("changes", "measured"),
    [
        ({}, 31.22),
        ({"optim.batch": 64}, 9.30),
        ({"optim.batch": 512}, 59.80),
        ({"head.prototypes": 8192}, 30.26),
        ({"head.prototypes": 131072}, 31.69),
        ({"views.num_local": 2}, 22.53),
        ({"vit.dim": 192, "vit.num_heads": 3}, 17.62),
        ({"vit.dim": 768, "vit.num_heads": 12, "optim.batch": 128}, 31.69),
        ({"vit.dim": 1024, "vit.depth": 24, "vit.num_heads": 16, "optim.batch": 64}, 43.68),
    ],
)
def test_the_estimate_agrees_with_peaks_measured_on_an_h200(changes: dict[str, Any], measured: float) -> None:
    # benchmarks/cost.py, compiled bf16: docs/performance.md
    assert 1.0 <= estimate(recipe("vits16-k400", changes)).total / GIB / measured < 1.1


def total(changes: dict[str, Any], processes: int = 1) -> float:
    return estimate(recipe("vits16-k400", changes), processes).total


@pytest.mark.parametrize(
    ("more", "less"),
    [
        ({"optim.batch": 512}, {}),
        ({"views.num_local": 9}, {}),
        ({"head.prototypes": 131072}, {}),
        ({}, {"vit.drop_path": 0.3}),
        ({}, {"auxiliary": "past"}),
        ({"auxiliary": "past"}, {"auxiliary": "none"}),
        ({"optim.precision": "fp32"}, {}),
        ({"runtime.compile": "off"}, {}),
        ({"matching.num_blocks": 2}, {}),
        ({}, {"optim.accumulate": 2}),
        ({"teacher.targets": "sinkhorn"}, {}),
    ],
)
def test_what_takes_more_memory_is_said_to(more: dict[str, Any], less: dict[str, Any]) -> None:
    assert total(more) > total(less)


def test_activations_grow_in_proportion_to_samples_and_nothing_else_does() -> None:
    one, two, four = (estimate(recipe("vits16-k400", {"optim.batch": 64 * n})) for n in (1, 2, 4))
    assert four.activations - two.activations == pytest.approx(2 * (two.activations - one.activations))
    assert (one.state, one.losses, one.overhead) == (four.state, four.losses, four.overhead)


def test_parts_and_processes_take_what_a_smaller_batch_takes() -> None:
    assert total({"optim.accumulate": 4}) == total({"optim.batch": 64}) == total({}, processes=4)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"auxiliary": "none", "vit.num_registers": 0},
        {"matching.num_blocks": 2, "head.train_gains": False},
    ],
)
def test_parameters_are_counted_as_they_are_built(changes: dict[str, Any]) -> None:
    config = recipe("vits16-k400", SMALL | changes)
    model, count = build_model(config), count_parameters(config)
    assert count.trained == sum(p.numel() for named in model.parts().values() for _, p in named)
    assert count.teacher == sum(p.numel() for p in model.teacher.parameters())
    assert count.block == sum(p.numel() for p in model.student.backbone.blocks[0].parameters())


def test_state_is_that_of_the_networks_and_is_shared_by_shards() -> None:
    config = resolve(recipe("vits16-k400", SMALL))
    assert estimate(config).state / GIB == pytest.approx(_state_gib(Trainer(config)))
    large = recipe("vitl16-k400")
    replicated = replace(large, runtime=replace(large.runtime, sharding="replicate"))
    whole, share = estimate(replicated, 8).state, estimate(large, 8).state
    assert whole / 8 < share < whole / 4
    assert estimate(large, 1).state == whole


def test_parts_add_up_and_are_printed() -> None:
    memory = estimate(Config())
    assert memory.total == sum(memory)
    said = memory.in_gib()
    assert said.startswith(f"{memory.total / GIB:.2f} GiB (state 0.84, activations ")
