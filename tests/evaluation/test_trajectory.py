"""Every kept encoder of a run is scored once."""

import json
import shutil
from pathlib import Path

import pytest

from tcore import evaluate
from tcore.errors import InputError
from tcore.evaluation import trajectory
from tcore.evaluation.card import Card
from tcore.evaluation.encoder import Encoder
from tcore.evaluation.trajectory import evaluate_checkpoints, read_checkpoints, trajectory_table


def score(encoder: Encoder, out: Path) -> Card:
    return evaluate(encoder, rendered=1, out=out)


def test_every_kept_encoder_is_scored_and_not_again(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trajectory, "cycle_consistency", lambda encoder, clips: 0.5)
    run = shutil.copytree(whole, tmp_path / "run")
    found = evaluate_checkpoints(run, score)
    assert list(found) == [3, 6]
    assert found[3]["weights"] != found[6]["weights"]
    assert read_checkpoints(run / "checkpoints" / "checkpoints.json")[6]["scores"] == found[6]["scores"]
    assert trajectory_table(found)[0].split()[:2] == ["step", "rendered"]
    clip = run / "checkpoints" / "step-000003" / "clips" / "rendered" / "rendered-000.json"
    written = clip.stat().st_mtime_ns
    assert evaluate_checkpoints(run, score) == found
    assert clip.stat().st_mtime_ns == written


def test_a_run_that_kept_nothing_says_how_to_keep(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({}))
    with pytest.raises(InputError, match="--keep-every"):
        evaluate_checkpoints(tmp_path, score)
