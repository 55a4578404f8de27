"""--plan: memory and time measured at two sizes, and what follows from the line through them."""

from pathlib import Path

import pytest
import torch

from tcore import InputError, recipe, train
from tcore.training import plan as planning
from tcore.training.plan import Cost, Line, plan, verdict
from tests.conftest import Refused
from tests.runs import metrics
from tests.tiny import tiny

VITS = recipe("vits16-k400")
LINE = Line(2.0, 0.125)  # 34 GiB for 256 samples


def rows(said: str) -> dict[str, str]:
    return {name: value.strip() for name, value in (line.split("  ", 1) for line in said.splitlines())}


def test_plan_measures_real_steps_at_half_of_the_batch_and_at_all_of_it(tmp_path: Path) -> None:
    config = tiny(optim__batch=8, optim__accumulate=2, optim__steps=1)
    found = rows(plan(config, None))
    assert "batch 8 in 2 parts" in found["run"]
    assert "measured at 2 and 4" in found["memory"]
    assert "takes 1 step of tcore" in found["run"]
    assert "backbone" in found["parameters"]
    assert "samples/s" in found["a step"]
    line = metrics(train(config, tmp_path / "run", quiet=True))[0]
    losses = dict(item.split() for item in found["first losses"].split(", "))
    assert {"total", "dino", "koleo"} <= losses.keys()
    assert not any("gradient" in name for name in losses)
    for name, value in losses.items():
        assert line[name] == pytest.approx(float(value), abs=1e-4)
    assert "fits" not in found  # nobody knows how much of a machine's memory is ours


def test_plan_of_a_single_sample_has_one_size() -> None:
    assert "measured at 1 and 1" in rows(plan(tiny(optim__batch=1), None))["memory"]


def test_two_measurements_give_a_line_that_does_not_fall() -> None:
    line = Line.through((64, 9.0), (256, 30.0))
    assert (line.at(64), line.at(256), line.at(512)) == pytest.approx((9.0, 30.0, 58.0))
    assert Line.through((2, 0.5), (4, 0.4)) == Line(0.4, 0.0)
    assert Line.through((1, 0.5), (1, 0.5)) == Line(0.5, 0.0)


def test_where_memory_runs_out_smaller_sizes_are_measured() -> None:
    asked: list[int] = []

    def measure(config: object) -> Cost:
        size = config.optim.batch  # type: ignore[attr-defined]
        asked.append(size)
        if size > 128:
            raise torch.OutOfMemoryError
        return Cost(size, size, LINE.at(size), 1.0, 0.0, {}, {})

    small, large = planning._measure_two(VITS, measure)
    assert asked == [128, 256, 64]
    assert (small.at_a_time, large.at_a_time) == (64, 128)


@pytest.mark.parametrize(("gib", "parts"), [(32, 2), (16, 4), (8, 8), (4, 32)])
def test_the_fewest_parts_that_fit_are_proposed(gib: float, parts: int) -> None:
    said = verdict(VITS, 1, LINE, gib)
    assert said.startswith("no:")
    assert f"--optim.accumulate {parts} " in said


def test_a_tenth_of_the_gpu_is_kept_free() -> None:
    assert verdict(VITS, 1, LINE, 34.0 / 0.9 + 0.1).startswith("yes: batch 256 needs 34.0")
    assert verdict(VITS, 1, LINE, 34.0 / 0.9 - 0.1).startswith("no:")
    assert "no --optim.accumulate helps" in verdict(VITS, 1, LINE, 2.0)


def test_parts_divide_the_batch_among_all_processes() -> None:
    config = recipe("vits16-k400", {"optim.batch": 96})
    assert "--optim.accumulate 3 " in verdict(config, 2, LINE, 5.0)  # 24 at a time would not, 16 do


@pytest.mark.parametrize("gib", ["0", "-3", "nan", "inf"])
def test_plan_memory_of_nothing_is_refused(gib: str, refused: Refused) -> None:
    assert "--plan-memory" in refused("train", "quickstart", f"--plan-memory={gib}")


def test_plan_memory_without_a_gpu_is_refused() -> None:
    with pytest.raises(InputError, match=r"--plan-memory 24 .*GPU"):
        plan(tiny(runtime__device="cpu"), None, gpu_gib=24)


def test_out_of_memory_is_one_line_that_names_the_flag(
    monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    def runs_out(argv: list[str]) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr("tcore.cli.train.train", runs_out)
    line = refused("train", "quickstart", code=1)
    assert "--optim.accumulate" in line
    assert line.count("\n") == 1
