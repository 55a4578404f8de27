"""Scores while a run trains: the run itself does not notice, and nothing of them is lost."""

import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tcore import InputError, Scoring, evaluate, load_encoder, train
from tcore.data.rendered import render_video
from tcore.evaluation.card import Card
from tcore.evaluation.encoder import Encoder
from tcore.evaluation.trajectory import read_checkpoints
from tcore.pretrain import BEST, BEST_CARD, read_best
from tcore.show.runs import CYCLE, MATCHING, SCORES, curves, read_run
from tcore.training.guard import StopRequested
from tests.conftest import Refused
from tests.evaluation.layouts import heldout_videos, write_davis
from tests.runs import assert_same_run, checkpoint
from tests.tiny import tiny
from tests.training.faults import make_store

SETTINGS = tiny(keep_every=3)
TABLE = "checkpoints/checkpoints.json"


@dataclass(frozen=True)
class Rigged(Scoring):
    """Gives the scores it is told to, in turn; a signal or an error in their place happens."""

    scores: tuple[Any, ...] = ()
    way: str = "usual"

    def cycle_clips(self) -> Any:
        """Two small frames."""
        return [list(render_video(0, 0, num_frames=2, size=32).frames)], "rendered"

    def score(self, encoder: Encoder, out: Path, say: Any) -> Card:
        """The next score."""
        names = ("step-000002", "step-000004", "step-000006", "best")
        value = dict(zip(names, self.scores, strict=False))[out.name]
        if isinstance(value, BaseException):
            raise value
        if isinstance(value, signal.Signals):
            os.kill(os.getpid(), value)
            say("one clip")
        result = {"scores": {"J&F": value}, "interval": {}, "protocol": {}, "binary": False}
        card = {"rendered": result | {"truth": self.way, "clips": {}}}
        return {"encoder": {"weights": encoder.fingerprint()}, "benchmarks": card}


def rows(run: Path) -> dict[int, Any]:
    return read_checkpoints(run / TABLE)


def test_training_does_not_notice_that_it_is_scored(whole: Path, tmp_path: Path) -> None:
    states = []
    frames = str(make_store(tmp_path / "store", videos=2))
    for name, scoring in (("plain", None), ("run", Scoring(4, clips=1, cycle_frames=frames))):
        torch.manual_seed(5)
        run = train(SETTINGS, tmp_path / name, scoring=scoring, quiet=True)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
    assert_same_run(run, whole)
    assert json.loads((run / "config.json").read_text()) == json.loads((whole / "config.json").read_text())
    assert list(rows(run)) == [4, 6]
    shown = read_run(run)
    drawn = curves(shown)
    assert list(drawn[SCORES]["rendered J&F"]) == list(drawn[CYCLE][""]) == [4, 6]
    looked = rows(run)[6]["matching"]["cross-attention"]
    assert list(drawn[MATCHING]) == ["true place", "patches that moved"]
    assert drawn[MATCHING]["true place"][6] == pytest.approx(looked["place"] / looked["place_chance"])
    # The same numbers as those of `tcore evaluate`.
    card = evaluate(load_encoder(run), rendered=1)
    assert rows(run)[6]["scores"]["rendered"] == card["benchmarks"]["rendered"]["scores"]
    assert 0 < looked["place_chance"] < 1
    best = max(rows(run).values(), key=lambda row: row["scores"]["rendered"]["J&F"])
    assert load_encoder(run / BEST).fingerprint() == best["weights"]


def test_the_best_is_kept_over_a_stop(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        train(SETTINGS, run, scoring=Rigged(2, scores=(0.5, KeyboardInterrupt())), quiet=True)
    best = (run / BEST).read_bytes()
    # Killed while step 4 was scored: the run goes on there, and scores it now.
    train(SETTINGS, run, scoring=Rigged(2, scores=(None, 0.4, 0.3)))
    assert "resumes at step 4" in (said := capsys.readouterr().err)
    assert "step 4 scored: rendered J&F 40.0 (best 50.0 at step 2), cycle" in said
    assert list(rows(run)) == [2, 4, 6]
    assert (run / BEST).read_bytes() == best
    card = json.loads((run / BEST_CARD).read_text())
    assert (card["step"], card["best"]["score"]) == (2, 0.5)
    assert_same_run(run, whole)


def test_a_signal_while_it_scores_ends_the_run_at_that_step(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(StopRequested):
        train(SETTINGS, run, scoring=Rigged(4, scores=(None, signal.SIGTERM)), quiet=True)
    assert not (run / TABLE).exists()
    assert checkpoint(run)["step"] == 4
    train(SETTINGS, run, scoring=Rigged(4, scores=(None, 0.2, 0.3)), quiet=True)
    assert list(rows(run)) == [4, 6]
    assert read_best(run) == (6, 0.3, rows(run)[6]["way"])


def test_what_fails_while_it_scores_is_said_and_training_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failing = Rigged(2, scores=(InputError("clip is gone."), OSError(28, "No space left"), 0.3))
    run = train(SETTINGS, tmp_path / "run", scoring=failing)
    said = capsys.readouterr().err
    assert "warning: step 2 could not be scored: clip is gone." in said
    assert "warning: step 4 could not be scored: OSError: [Errno 28]" in said
    assert list(rows(run)) == [6]


def test_scored_another_way_the_best_is_scored_again(tmp_path: Path) -> None:
    run = train(SETTINGS, tmp_path / "run", scoring=Rigged(4, scores=(None, 0.9, 0.1)), quiet=True)
    kept = load_encoder(run / BEST).fingerprint()
    other = Rigged(4, scores=(None, None, 0.2, 0.6), way="other")
    train(SETTINGS, run, scoring=other, quiet=True)
    assert read_best(run) == (4, 0.6, rows(run)[6]["way"])
    assert list(rows(run)) == [6], "scores of two ways in one table"
    kept_rows = json.loads((run / TABLE).read_text())["checkpoints"]
    assert [row["step"] for row in kept_rows] == [4, 6, 6], "scores were lost"
    assert load_encoder(run / BEST).fingerprint() == kept


def test_a_damaged_best_is_said_and_begins_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(SETTINGS, tmp_path / "run", scoring=Rigged(9, scores=(None, None, 0.5)), quiet=True)
    (run / BEST).write_bytes(b"cut short")
    train(SETTINGS, run, scoring=Rigged(9, scores=(None, None, 0.4)))
    assert "the best so far begins anew" in capsys.readouterr().err
    assert load_encoder(run / BEST).patch_size == 8


def test_davis_is_scored_small_and_its_clips_are_spread(tmp_path: Path) -> None:
    davis = write_davis(tmp_path / "davis", heldout_videos(3, num_frames=4, size=32))
    frames = str(davis / "JPEGImages/480p")
    scoring = Scoring(9, davis=davis, size=(32, 48), clips=2, cycle_frames=frames)
    run = train(SETTINGS, tmp_path / "run", scoring=scoring, quiet=True)
    card = json.loads((run / "checkpoints/step-000006/results.json").read_text())["benchmarks"]["davis"]
    assert list(card["clips"]) == ["clip0", "clip2"]
    assert card["clips"]["clip0"]["input"] == [32, 48]
    assert "input 32x48" in card["differs"]


def test_what_could_never_be_scored_is_refused_before_training(tmp_path: Path) -> None:
    davis = write_davis(tmp_path / "davis", heldout_videos(2, num_frames=4, size=32))
    Scoring(2, davis=davis).check(8)
    with pytest.raises(InputError, match="--evaluate-size 4 48 is smaller than a patch"):
        Scoring(2, davis=davis, size=(4, 48)).check(8)
    last = sorted((davis / "JPEGImages/480p/clip1").iterdir())[-1]
    whole = last.read_bytes()
    last.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=last.name):
        Scoring(2, davis=davis).check(8)
    last.write_bytes(whole)
    for mask in sorted((davis / "Annotations/480p/clip0").iterdir())[1:]:
        mask.unlink()
    with pytest.raises(InputError, match="clip0"):
        Scoring(2, davis=davis).check(8)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--davis nowhere", "--davis goes with --evaluate-every"),
        ("--evaluate-clips 2", "--evaluate-clips goes with --evaluate-every"),
        ("--evaluate-every 0", "--evaluate-every 0: need 1 step"),
        ("--evaluate-every 5 --evaluate-clips 0", "--evaluate-clips 0: need 1"),
        ("--evaluate-every 5 --binary", "--binary goes with --davis"),
        ("--evaluate-every 5 --davis nowhere", "nowhere"),
        ("--evaluate-every 5 --evaluate-size 32 32", "goes with --davis"),
        ("--evaluate-every 5 --cycle-frames nowhere", "nowhere does not exist"),
    ],
)
def test_the_command_line_says_what_goes_together(
    flags: str, said: str, tmp_path: Path, refused: Refused
) -> None:
    assert said in refused("train", "quickstart", "--run", tmp_path / "run", *flags.split())
    assert not (tmp_path / "run").exists()


def test_the_old_words_for_scoring_work_and_name_the_new_ones(tmp_path: Path) -> None:
    import tcore

    with pytest.warns(DeprecationWarning, match="Scoring"):
        assert tcore.Watch is Scoring  # type: ignore[attr-defined, unused-ignore]
    with pytest.warns(DeprecationWarning, match="scoring="):
        train(SETTINGS, tmp_path / "run", watch=Rigged(6, scores=(None, None, 0.5)), quiet=True)
    assert list(rows(tmp_path / "run")) == [6]
