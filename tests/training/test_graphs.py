"""Steps by graphs, with a recorder that computes anew what a GPU would replay: the logic without the GPU."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tcore import methods
from tcore.data.loader import render_batch
from tcore.methods.method import Method
from tcore.training.graphs import Losses, StepGraphs, join, split
from tcore.training.loop import open_source, resolve
from tcore.training.optim import build_schedule
from tcore.training.step import Trainer
from tests.tiny import shrunk

# One of each kind of batch: stratified and independent masks, Sinkhorn and centers, regions, pixels.
NAMES = ("vits16-k400", "vits16-tcore-short", "vits16-ibot-short", "vits16-dinov2-short", "vits16-mae-short")


class Rerun:
    """Records by carrying out, and replays by carrying out once more into the same memory."""

    def __init__(self, method: Method) -> None:
        self.method, self.recorded = method, 0

    def __call__(self, work: Callable[[], Losses]) -> tuple[Losses, Callable[[], object]]:
        self.recorded += 1
        waiting = [x.clone() for x in self.method.sums()]
        losses = work()
        for x, before in zip(self.method.sums(), waiting, strict=True):
            x.copy_(before)  # a graph that is recorded computes nothing yet
        own = [p.grad for p in self.method.parameters()]
        health = self.method.health_sample

        def replay() -> None:
            for p in self.method.parameters():
                p.grad = None
            again = work()
            for name, x in again.items():
                losses[name].copy_(x)
            for gradient, p in zip(own, self.method.parameters(), strict=True):
                if gradient is not None:
                    assert p.grad is not None
                    gradient.copy_(p.grad)
            for name, x in self.method.health_sample.items():
                health[name].copy_(x)

        return losses, replay


# What of ours changes a step of T-CoRe.
OURS: dict[str, Any] = {"matching__form": "motion", "matching__start": "identity", "loss__own_patches": 0.5}
FRAMES: dict[str, Any] = {"auxiliary": "none", "loss__patch_teacher": 0.0}  # no loss of patches
UNMASKED: dict[str, Any] = {"masking__probability": 0.0}


def steps_of(
    name: str, graphs: bool, **changes: Any
) -> tuple[list[dict[str, float]], list[torch.Tensor], int]:
    """Losses of some steps, the gradients of the last one, and how often something was recorded."""
    config = shrunk(name, optim__batch=8, vit__drop_path=0.0, **changes)
    method, source = methods.build(config), open_source(config, None)
    schedule, recorder = build_schedule(config, method, 4), Rerun(method)

    def backward(batch: Any, values: Any) -> Losses:
        losses = method(batch, values)
        method.total(losses).backward()
        return {term: loss.detach() for term, loss in losses.items()}

    run = StepGraphs(method, backward, recorder)
    found = []
    for step in range(6):
        method.zero_grad()
        method.observing = step in (0, 4)
        batch, values = render_batch(source[step], torch.device("cpu")), schedule.at(step).own
        losses = run(method.in_fixed_shapes(batch), values) if graphs else backward(batch, values)
        if method.observing:
            assert all(torch.isfinite(rows).all() for rows in method.health_sample.values())
        found.append({term: float(loss) for term, loss in losses.items()})
        method.finish_step({**values, "momentum": 0.9})
    gradients = [p.grad.clone() for p in method.parameters() if p.grad is not None]
    return found, gradients, recorder.recorded


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *((name, {}) for name in NAMES),
        *(
            (name, changes)
            for name in ("vits16-tcore-short", "vits16-k400")
            for changes in (OURS, FRAMES, UNMASKED)
        ),
    ],
)
def test_steps_in_fixed_shapes_by_graphs_are_the_plain_steps(name: str, changes: dict[str, Any]) -> None:
    plain, gradients, _ = steps_of(name, graphs=False, **changes)
    found, others, recorded = steps_of(name, graphs=True, **changes)
    assert recorded == 2  # a step that is observed, and one that is not
    for before, now in zip(plain, found, strict=True):
        assert now == pytest.approx(before, rel=1e-5)
    for one, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("name", "recorded"), [("vits16-tcore-short", 2), ("vits16-odin-short", 1)])
def test_a_trainer_hands_graphs_fixed_shapes_and_takes_the_plain_steps(name: str, recorded: int) -> None:
    config, found = shrunk(name, optim__batch=8, vit__drop_path=0.0), []
    for graphs in (False, True):
        trainer, source = Trainer(resolve(config)), open_source(config, None)
        schedule, recorder = build_schedule(config, trainer.method, 4), Rerun(trainer.method)
        if graphs:
            trainer.graphs = StepGraphs(trainer.method, trainer._backward, recorder)
        # ODIN measures its health outside of graphs.
        steps = [trainer.step(iter([source[i]]), i, schedule.at(i), look=i in (0, 4)) for i in range(6)]
        found.append([outcome.check() for outcome in steps])
    assert recorder.recorded == recorded
    for before, now in zip(*found, strict=True):
        assert now == pytest.approx(before, rel=1e-4, abs=1e-6)


def test_more_masked_patches_than_ever_make_the_shapes_grow() -> None:
    config = shrunk("vits16-tcore-short", optim__batch=8)
    method, source = methods.build(config), open_source(config, None)
    batch = render_batch(source[0], torch.device("cpu"))
    first = method.in_fixed_shapes(batch)
    assert len(first.masked_patches) > len(batch.masked_patches)
    assert int(first.num_masked()) == len(batch.masked_patches)
    more = copy.copy(batch)
    object.__setattr__(more, "masked_patches", batch.masked_patches.repeat(3))
    object.__setattr__(more, "patch_weights", batch.patch_weights.repeat(3))
    assert len(method.in_fixed_shapes(more).masked_patches) >= 3 * len(batch.masked_patches)


def test_a_batch_is_taken_apart_and_put_together_again() -> None:
    config = shrunk("vits16-croc-short")
    batch = render_batch(open_source(config, None)[0], torch.device("cpu"))
    tensors, about = split(batch)
    again = join(batch, iter([x.clone() for x in tensors]))
    assert split(again)[1] == about
    assert torch.equal(again.views.global_crops, batch.views.global_crops)
    assert torch.equal(again.boxes, batch.boxes)
