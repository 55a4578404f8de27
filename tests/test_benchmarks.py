"""The parts of the benchmarks that decide something."""

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import cost
import curves
import lost
import marking


def falling(last: float) -> np.ndarray:
    return np.linspace(1.0, last, 100)


def test_equal_curves_pass_if_they_fall(capsys: pytest.CaptureFixture[str]) -> None:
    run = dict.fromkeys(curves.LOSSES, falling(0.5))
    assert curves.report(run, run, 1.0)
    assert capsys.readouterr().out.count("passed") == 2 + len(curves.LOSSES)
    level = dict.fromkeys(curves.LOSSES, falling(0.95))
    assert not curves.report(level, level, 1.0)


@pytest.mark.parametrize("loss", curves.LOSSES)
def test_one_loss_that_drifts_apart_fails_and_is_named(loss: str, capsys: pytest.CaptureFixture[str]) -> None:
    plain = dict.fromkeys(curves.LOSSES, falling(0.5))
    fast = plain | {loss: falling(0.5) * np.linspace(1.0, 1.05, 100)}
    assert not curves.report(plain, fast, 1.0)
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "FAILED" in line)
    assert line.startswith(loss)


def test_a_loss_that_passes_zero_is_compared_by_its_size() -> None:
    koleo = np.linspace(-1.0, 1.0, 100)
    assert curves.compare(koleo, koleo + 0.005).apart == pytest.approx(0.005 / 0.5, rel=0.3)


def test_a_loss_falls_from_its_plateau_not_from_below_it_and_not_from_above() -> None:
    below = np.concatenate([np.full(20, 0.5), np.full(40, 1.0), np.full(40, 0.8)])
    above = np.concatenate([np.full(20, 3.0), np.full(40, 1.0), np.full(40, 0.8)])
    assert curves.fall(below, 1.0) == pytest.approx(0.2)
    assert curves.fall(above, 1.0) == pytest.approx(0.2)


def test_points_that_were_measured_otherwise_are_not_kept(tmp_path: Path) -> None:
    here = {"device": "CPU, a small model", "compile": "off", "steps": 6}
    path = tmp_path / "points.json"
    assert cost.read_kept(path, here) == {}
    path.write_text(json.dumps(here | {"points": {"center": {"speed": 1.0}}}))
    assert cost.read_kept(path, here) == {"center": {"speed": 1.0}}
    with pytest.raises(SystemExit, match="is of compile off, not auto: name another file"):
        cost.read_kept(path, here | {"compile": "auto"})


def test_axes_meet_in_one_point_that_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def found(
        change: dict[str, object], steps: int, wish: str, lock: Path, deadline: float
    ) -> dict[str, float] | None:
        asked.append(change)
        numbers = {"batch": 8, "K": 2048, "locals": 4, "size": 96, "speed": 1.0, "memory": 1.0}
        return numbers if time.perf_counter() < deadline else None

    monkeypatch.setattr(cost, "in_fresh_process", found)
    kept: dict[str, dict[str, float]] = {}
    options = argparse.Namespace(steps=6, compile="auto", at_a_time=2, lock=None)
    points = list(cost.measure_axes(cost.GPU_AXES, kept, options, time.perf_counter() + 60))
    assert len(points) == 14
    assert len(asked) == 11
    assert list(cost.measure_axes(cost.GPU_AXES, kept, options, time.perf_counter() - 1)) == points
    assert len(asked) == 11
    assert list(cost.measure_axes(cost.GPU_AXES, {}, options, time.perf_counter() - 1)) == []


def test_ranks_are_shared_by_equal_values_and_auroc_is_a_chance() -> None:
    assert lost.ranks(np.array([3.0, 1.0, 3.0, 2.0])).tolist() == [3.5, 1.0, 3.5, 2.0]
    sure = np.array([0.1, 0.4, 0.4, 0.9])
    assert lost.auroc(sure, np.array([True, True, False, False])) == pytest.approx(3.5 / 4)
    assert lost.auroc(-sure, np.array([True, True, False, False])) == pytest.approx(0.5 / 4)


def test_a_simulated_click_falls_deepest_inside() -> None:
    mask = np.zeros((20, 30), dtype=bool)
    mask[0:3, :] = True
    mask[8:19, 10:21] = True
    assert marking.deepest(mask) == (15, 13)
    assert marking.overlap(mask, mask) == 1
