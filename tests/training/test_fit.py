"""What fits into memory, in how many parts; and what --plan and the command line say about it."""

import pytest
import torch

from tcore import recipe
from tcore.cli.main import VERBS, main
from tcore.training import plan as planning
from tcore.training.fit import (
    MARGIN,
    Place,
    advice,
    fewest_parts,
    free_memory,
    in_parts,
    largest_part,
    verdict,
)
from tcore.training.memory import GIB
from tests.tiny import TINY, tiny

VITS = recipe("vits16-k400")


def gpu(gib: float, processes: int = 1) -> Place:
    return Place(gib * GIB, processes=processes)


def test_a_tenth_of_the_memory_is_kept_free() -> None:
    needs = gpu(0).needs(VITS).total
    assert Place(1.001 * needs / (1 - MARGIN)).has_room(VITS)
    assert not Place(0.999 * needs / (1 - MARGIN)).has_room(VITS)


@pytest.mark.parametrize(("gib", "parts"), [(139, 1), (32, 2), (16, 4), (8, 8), (4, 32)])
def test_the_fewest_parts_that_fit_are_proposed(gib: float, parts: int) -> None:
    place = gpu(gib)
    assert fewest_parts(VITS, place) == parts
    assert place.has_room(in_parts(VITS, parts))
    assert parts == 1 or not place.has_room(in_parts(VITS, parts // 2))


def test_parts_divide_the_batch_among_all_processes() -> None:
    config = recipe("vits16-k400", {"optim.batch": 96})
    parts = fewest_parts(config, gpu(3, processes=2))
    assert parts is not None
    assert 96 % (2 * parts) == 0


def test_whole_groups_of_masks_come_before_fewer_parts() -> None:
    config = recipe("vits16-k400", {"optim.batch": 192})
    halves = gpu(0).needs(in_parts(config, 2)).total / (1 - MARGIN)
    assert fewest_parts(config, Place(1.01 * halves)) == 2  # 96 videos: three groups of 32
    # 192 = 4 x 48 fits where 3 x 64 does not, but the next whole groups are 6 x 32.
    quarters = gpu(0).needs(in_parts(config, 4)).total / (1 - MARGIN)
    assert fewest_parts(config, Place(1.01 * quarters)) == 6


def test_the_largest_part_fits_and_the_next_does_not() -> None:
    place = gpu(24)
    most = largest_part(VITS, place)
    assert most % VITS.masking.group == 0
    assert place.has_room(recipe("vits16-k400", {"optim.batch": most}))
    assert not place.has_room(recipe("vits16-k400", {"optim.batch": most + 32}))
    assert 0 < largest_part(VITS, gpu(3)) < 32
    assert largest_part(VITS, gpu(0.5)) == 0


def test_the_verdict_names_batch_parts_and_memory() -> None:
    said = verdict(VITS, gpu(139))
    assert said.startswith("fits: batch 256 in 1 part (31.9 of 139.0 GiB, 10% kept free")
    said = verdict(VITS, gpu(16))
    assert said.startswith("does not fit: batch 256 in 1 part (31.9 of 16.0 GiB")
    assert said.endswith("add --optim.accumulate 4")
    assert "nor does any other number of parts" in verdict(VITS, gpu(1))


def test_after_running_out_of_memory_more_parts_are_advised_than_there_were() -> None:
    assert advice(VITS, gpu(16)).startswith("--optim.accumulate 4 (64 videos at a time")
    assert advice(VITS, gpu(139)).startswith("--optim.accumulate 2 ")  # though one part was thought to fit
    assert advice(VITS, gpu(1)).startswith("a smaller --optim.batch")


def test_there_is_memory_here() -> None:
    assert 0 < free_memory(torch.device("cpu")) < 2**50


def test_plan_memory_needs_neither_frames_nor_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    main(["train", "vits16-k400", "--plan-memory", "24"])
    printed = capsys.readouterr().out
    assert "of 23.5 GiB" in printed
    assert "add --optim.accumulate 2\n" in printed
    main(["train", "vits16-k400", "--plan-memory", "24", "--optim.accumulate", "2"])
    assert "fits: batch 256 in 2 parts" in capsys.readouterr().out


@pytest.mark.parametrize("gib", ["0", "-3", "nan", "inf"])
def test_plan_memory_of_nothing_is_refused(gib: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["train", "vits16-k400", f"--plan-memory={gib}"])
    assert stop.value.code == 2
    assert "--plan-memory" in capsys.readouterr().err


def test_plan_prints_the_estimate_beside_the_measured_peak() -> None:
    said = planning.plan(tiny(), None)
    rows = dict(line.split("  ", 1) for line in said.splitlines() if "  " in line)
    assert rows["memory"].strip().endswith("measured")
    assert "(state 0.00, activations " in rows["memory, estimated"]
    assert rows["room"].strip().startswith("fits: batch 4 in 1 part")


def test_plan_makes_no_step_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "free_memory", lambda device: 0.1 * GIB)
    monkeypatch.setattr(planning, "Trainer", None)
    said = planning.plan(tiny(), None)
    assert "does not fit: batch 4 in 1 part" in said
    assert "samples/s" not in said


def test_out_of_memory_is_one_line_with_the_number_of_parts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def runs_out(argv: list[str]) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setitem(VERBS, "train", runs_out)
    flags = [word for name, value in TINY.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    with pytest.raises(SystemExit) as stop:
        main(["train", "quickstart", *flags])
    assert stop.value.code == 1
    line = capsys.readouterr().err
    assert "out of memory: use --optim.accumulate 2 (2 videos at a time" in line
    assert line.count("\n") == 1
