"""A run folder from before there were methods: it loads, resumes, and trains on as it would have then."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from tcore import load_encoder, train
from tcore.config import load_config
from tests.runs import metrics

OLD = Path(__file__).parent / "old_run"
# Learning rates by part had other names.
RENAMED = {"matching_lr": "lr_match", "last_layer_lr": "lr_last_layer", "backbone_lr": "lr_backbone"}


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the old run, trained to its end."""
    run = tmp_path_factory.mktemp("runs") / "old"
    shutil.copytree(OLD, run, ignore=shutil.ignore_patterns("README.md", "expected.json"))
    return train(load_config(run / "config.json"), run, quiet=True)


def test_an_old_run_resumes_with_the_losses_of_the_uninterrupted_one(resumed: Path) -> None:
    lines = metrics(resumed)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    for found, expected in zip(lines[2:], json.loads((OLD / "expected.json").read_text()), strict=True):
        for name, value in expected.items():
            # Other processors round otherwise, and a loss near 0 is a difference of larger numbers.
            close = pytest.approx(value, rel=1e-9 if "lr" in name else 1e-4, abs=0 if "lr" in name else 1e-6)
            assert found[RENAMED.get(name, name)] == close, name


def test_the_encoder_of_an_old_run_loads_before_and_after(resumed: Path) -> None:
    frames = torch.randint(256, (1, 16, 24, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    before, after = (load_encoder(run)(frames) for run in (OLD, resumed))
    assert before.shape == after.shape == (1, 12, 2, 3)
    assert not torch.equal(before, after)
    assert torch.equal(load_encoder(OLD / "encoder.safetensors")(frames), before)
