"""Steps by CUDA graphs beside steps without, on a GPU."""

from dataclasses import replace
from itertools import cycle

import pytest
import torch

from tcore.training.loop import open_source, resolve
from tcore.training.optim import build_schedule
from tcore.training.step import Trainer
from tests.tiny import shrunk

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore"),  # torch, of its own affairs, where it compiles
]

METHODS = ("", "tcore-", "dino-", "ibot-", "dinov2-", "simclr-", "mocov3-", "croc-", "odin-")
PIXELS = ("mae-", "rcmae-", "siammae-", "cropmae-", "rsp-", "dropmae-", "videomae-", "maest-")


def losses_of(name: str, graphs: str) -> list[dict[str, float]]:
    """Losses and gradient norms of some steps in fp32, every third one observed."""
    changes = {"mask_ratio": 0.75} if name in ("siammae-", "cropmae-") else {}  # of 16 patches
    config = shrunk(
        f"vits16-{name}short", optim__batch=8, runtime__compile="on", optim__precision="fp32", **changes
    )
    config = resolve(replace(config, runtime=replace(config.runtime, graphs=graphs)))  # type: ignore[arg-type]
    trainer = Trainer(config)
    assert (trainer.graphs is None) == (graphs == "off")
    source = open_source(config, None)
    feed = cycle([source[index].pin_memory() for index in range(8)])
    schedule = build_schedule(config, trainer.method, 1000)
    found = []
    for step in range(8):
        outcome = trainer.step(feed, step, schedule.at(step), look=step % 3 == 0)
        found.append(outcome.check())
        health = outcome.health()
        assert (health is not None) == (step % 3 == 0)
    return found


@pytest.mark.parametrize("name", METHODS + PIXELS)
def test_steps_by_graphs_have_the_losses_of_steps_without(name: str) -> None:
    for plain, replayed in zip(losses_of(name, "off"), losses_of(name, "auto"), strict=True):
        assert replayed == pytest.approx(plain, rel=2e-3, abs=1e-5)
