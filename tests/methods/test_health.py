"""Whether training learns, waits or collapses: figures, and what a run says of them."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tcore import train
from tcore.methods import build_source
from tcore.methods.health import Health, effective_rank, measure_health
from tcore.training.loop import open_store
from tcore.training.optim import build_schedule
from tcore.training.step import Trainer
from tests.runs import metrics
from tests.tiny import change, tiny

K = 32


def measure(frames: torch.Tensor, targets: torch.Tensor, dino: float = 0.5 * math.log(K)) -> Health:
    patches = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    return measure_health({"frames": frames, "patches": patches, "frame_targets": targets}, dino)


def features() -> torch.Tensor:
    return torch.randn(64, 16, generator=torch.Generator().manual_seed(0))


def one_hot(classes: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.one_hot(classes, K).float()


SHARP, ONE = one_hot(torch.arange(64) % K), one_hot(torch.zeros(64, dtype=torch.int64))
LINE = torch.linspace(-1, 1, 64)[:, None] * torch.ones(16)


@pytest.mark.parametrize(
    ("frames", "targets", "dino", "state"),
    [
        (features(), torch.full((64, K), 1 / K), 0.5, "plateau"),
        (features(), SHARP, 0.9, "learning"),
        (features(), SHARP, 1.1, "plateau"),  # the student does not follow
        (features(), ONE, 0.5, "collapse"),
        (1 + 1e-3 * features(), SHARP, 0.5, "collapse"),  # all alike
        (LINE, SHARP, 0.5, "collapse"),  # in one direction
    ],
)
def test_features_and_targets_tell_the_state(
    frames: torch.Tensor, targets: torch.Tensor, dino: float, state: str
) -> None:
    health = measure(frames, targets, dino * math.log(K))
    assert health.state == state
    assert (health.warning is None) == (state != "collapse")
    information = {"plateau": 0.0 if dino < 1 else math.log(K), "learning": math.log(K)}.get(state)
    if information is not None:
        assert health.figures["target_information"] == pytest.approx(information, abs=1e-4)
    assert measure(frames[:4], targets[:4]).warning is None  # too few to say


def test_parts_of_a_step_are_judged_together() -> None:
    config = tiny(optim__accumulate=2, optim__batch=4)
    source, trainer = build_source(open_store(config, None), config), Trainer(config)
    judged: list[Mapping[str, torch.Tensor]] = []

    def judge(rows: Mapping[str, torch.Tensor], losses: Mapping[str, float]) -> Health:
        judged.append(rows)
        return measure_health(rows, losses["dino"])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.method, "health", judge)
        values = build_schedule(config, trainer.method, 1).at(0)
        trainer.step(iter([source[0], source[1]]), 0, values, look=True).health()
    assert judged[0]["frames"].shape == judged[0]["frame_targets"].shape == (8, 32)


def test_small_parts_of_a_healthy_run_raise_no_alarm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tiny(optim__accumulate=4, optim__steps=2), tmp_path / "parts")
    train(tiny(optim__batch=2, optim__steps=2), tmp_path / "few")
    assert "collapse" not in capsys.readouterr().err


def test_effective_rank_counts_directions() -> None:
    basis = torch.linalg.qr(torch.randn(200, 16, generator=torch.Generator().manual_seed(2)))[0]
    basis = torch.linalg.qr(basis - basis.mean(dim=0))[0]
    assert effective_rank(basis[:, :5] @ torch.eye(5, 16)) == pytest.approx(5, rel=1e-3)
    assert effective_rank(torch.ones(20, 8)) == 1.0


def test_collapse_is_said_during_training_and_a_healthy_run_says_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # A center that never moves and sharp targets: nothing keeps all frames from one prototype.
    healthy = tiny(optim__steps=12, optim__batch=8, runtime__log_every=4, checkpoint_every=100)
    loose: dict[str, Any] = {"center_momentum": 1.0, "temperature": (0.01, 0.01), "momentum": (0.5, 0.5)}
    teacher = {f"teacher__{name}": value for name, value in loose.items()}
    collapsing = change(
        healthy,
        **teacher,
        teacher__targets="centering",
        loss__koleo=0.0,
        vit__layer_scale=0.5,
        optim__base_lr=0.05,
    )
    train(collapsing, tmp_path / "collapsing")
    assert "warning: step" in capsys.readouterr().err
    run = train(change(healthy, optim__steps=4), tmp_path / "healthy")
    printed = capsys.readouterr().err
    assert "warning" not in printed
    figures = "frame_rank patch_rank prototypes_used target_entropy target_information frame_cosine"
    assert set(metrics(run)[-1]["health"]) == {*figures.split(), "past_future_cosine", "state"}


def test_published_initialization_is_called_a_plateau(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny(vit__layer_scale=1e-5, teacher__targets="centering", head__prototypes=512, optim__steps=2)
    train(config, tmp_path / "run")
    assert "plateau" in capsys.readouterr().err
