"""DINO behind the trainer: what it wants to see, what it minimizes, how it is trained."""

from typing import Any

import numpy as np
import pytest
import torch

from tcore import Config, InputError, methods, recipe
from tcore.config import validate
from tcore.data.loader import render_batch
from tcore.data.stores import FrameStore
from tcore.methods.distillation import SelfDistillation
from tcore.methods.sampling import FrameSampling
from tests.tiny import TINY


def small(**changes: Any) -> Config:
    """The recipe with the sizes of the tiny run."""
    sizes = {name: value for name, value in TINY.items() if not name.startswith("matching.")}
    return recipe("vits16-dino-k400", sizes | {name.replace("__", "."): v for name, v in changes.items()})


def build(config: Config) -> SelfDistillation:
    method = methods.build(config)
    assert type(method) is SelfDistillation
    return method


def test_a_sample_is_one_frame_of_the_wanted_stretch_and_nothing_is_masked() -> None:
    config = small(frame__current=(0.2, 0.5))
    source = methods.build_source(FrameStore.rendered(videos=4, frames=10, size=32), config)
    assert isinstance(source.sampling, FrameSampling)
    drawn = {source.sampling.frames(10, np.random.default_rng(seed))["current"] for seed in range(50)}
    assert drawn == {2, 3, 4}
    assert source.sampling.frames(1, np.random.default_rng(0)) == {"current": 0}
    raw = source.read(0, 0)
    assert len(raw.sizes) == config.optim.batch
    batch = render_batch(raw, torch.device("cpu"))
    assert batch.mask.shape == (8, 0)
    assert batch.teacher_crops is batch.global_crops
    flips = np.concatenate([source.read(step, 0).plans["global"].flip for step in range(20)])
    assert 0.3 < flips.mean() < 0.7


def test_the_mask_token_is_not_trained() -> None:
    names = [name for part in build(small()).parts().values() for name, _ in part.parameters]
    assert "cls_token" in names
    assert "mask_token" not in names


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"optim__matching_lr": 1.0}, "optim.matching_lr=1.0"),
        ({"views__fixed_time": False}, "views.fixed_time=False"),
        ({"source": "images", "frame__current": (0.0, 1.0)}, "frame"),
        ({"auxiliary": "none"}, "auxiliary"),
    ],
)
def test_settings_that_mean_nothing_to_it_are_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=named):
        validate(small(**changes))


def test_without_local_crops_two_pairs_remain() -> None:
    config = small(views__num_local=0, vit__drop_path=0.0)
    source = methods.build_source(FrameStore.rendered(videos=4, frames=10, size=32), validate(config))
    batch = render_batch(source.read(0, 0), torch.device("cpu"))
    assert len(batch.local_crops) == 0
    model = build(config)
    found = []
    for model.fused in (True, False):
        found.append(model(batch, {"teacher_temperature": 0.05})["dino"].item())
    assert found[0] == pytest.approx(found[1], rel=1e-5)
