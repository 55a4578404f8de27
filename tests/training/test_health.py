import json
import math
from pathlib import Path

import pytest
import torch

from tcore import train
from tcore.model.tcore import Glimpse
from tcore.training.health import effective_rank, entropy, measure
from tests.tiny import tiny

K = 32


def glimpse(frames: torch.Tensor, targets: torch.Tensor) -> Glimpse:
    patches = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    return Glimpse(frames, patches, targets, targets, None, None)


def features() -> torch.Tensor:
    return torch.randn(64, 16, generator=torch.Generator().manual_seed(0))


def one_hot(classes: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.one_hot(classes, K).float()


def test_uniform_targets_are_a_plateau() -> None:
    health = measure(glimpse(features(), torch.full((64, K), 1 / K)))
    assert health.state == "plateau"
    assert health.target_entropy == pytest.approx(math.log(K))
    assert health.target_information == pytest.approx(0, abs=1e-5)
    assert health.warning() is None


def test_sharp_targets_that_differ_are_learning() -> None:
    health = measure(glimpse(features(), one_hot(torch.arange(64) % K)))
    assert health.state == "learning"
    assert health.prototypes_used == pytest.approx(K, rel=1e-4)
    assert health.target_information == pytest.approx(math.log(K), rel=1e-4)
    assert health.warning() is None


def test_one_target_for_all_is_a_collapse() -> None:
    health = measure(glimpse(features(), one_hot(torch.zeros(64, dtype=torch.int64))))
    assert health.state == "collapse"
    assert "collapse" in (health.warning() or "")


def test_features_in_one_direction_are_a_collapse() -> None:
    line = torch.linspace(-1, 1, 64)[:, None] * torch.ones(16)
    assert measure(glimpse(line, one_hot(torch.arange(64) % K))).state == "collapse"


def test_effective_rank_counts_directions() -> None:
    basis = torch.linalg.qr(torch.randn(200, 16, generator=torch.Generator().manual_seed(2)))[0]
    basis = torch.linalg.qr(basis - basis.mean(dim=0))[0]
    assert effective_rank(basis[:, :5] @ torch.eye(5, 16)) == pytest.approx(5, rel=1e-3)
    assert effective_rank(torch.ones(20, 8)) == 1.0


def test_entropy_of_a_certain_answer_is_zero() -> None:
    assert float(entropy(torch.eye(4)[0])) == 0.0


def test_collapse_is_said_during_training_and_a_healthy_run_says_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # A centre that never moves and sharp targets: nothing keeps all frames from one prototype.
    collapsing = tiny(
        teacher__targets="centering",
        teacher__center_momentum=1.0,
        teacher__temperature=(0.01, 0.01),
        teacher__momentum=(0.5, 0.5),
        loss__koleo=0.0,
        vit__layer_scale=0.5,
        optim__base_lr=0.05,
        optim__steps=60,
        optim__batch=4,
        runtime__log_every=10,
        checkpoint_every=100,
    )
    train(collapsing, tmp_path / "collapsing")
    assert "warning: step" in capsys.readouterr().err
    healthy = tiny(optim__steps=60, runtime__log_every=10, checkpoint_every=100)
    run = train(healthy, tmp_path / "healthy")
    printed = capsys.readouterr().err
    assert "warning" not in printed
    assert "learning" in printed
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert set(lines[-1]["health"]) == {
        "frame_rank",
        "patch_rank",
        "prototypes_used",
        "target_entropy",
        "target_information",
        "past_future_cosine",
        "state",
    }


def test_published_initialisation_is_called_a_plateau(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny(vit__layer_scale=1e-5, teacher__targets="centering", head__prototypes=512, optim__steps=2)
    train(config, tmp_path / "run")
    assert "plateau" in capsys.readouterr().err
