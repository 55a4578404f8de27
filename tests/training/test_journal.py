import json
from pathlib import Path

import pytest

from tcore import train
from tcore.training.journal import forget_after, format_seconds
from tests.tiny import tiny


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(line + "\n" for line in lines))
    return path


def test_steps_after_the_checkpoint_are_forgotten(tmp_path: Path) -> None:
    path = write(tmp_path / "m.jsonl", '{"step": 1}', '{"step": 2}', '{"step": 3}')
    forget_after(path, 2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_line_that_was_cut_off_is_forgotten(tmp_path: Path) -> None:
    path = write(tmp_path / "m.jsonl", '{"step": 1}', '{"ste')
    forget_after(path, 5)
    assert path.read_text() == '{"step": 1}\n'


def test_run_without_journal_has_nothing_to_forget(tmp_path: Path) -> None:
    forget_after(tmp_path / "m.jsonl", 5)
    assert not (tmp_path / "m.jsonl").exists()


def test_durations_read_as_people_write_them() -> None:
    assert [format_seconds(s) for s in (0, 59.6, 61, 3600, 90_061)] == [
        "0:00",
        "1:00",
        "1:01",
        "1:00:00",
        "25:01:01",
    ]


def test_tensorboard_gets_losses_and_health(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = train(tiny(optim__steps=4), tmp_path / "run", quiet=True)
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    logged = events.Scalars("total")
    assert [event.step for event in logged] == [2, 4]
    assert logged[-1].value == pytest.approx(lines[-1]["total"], rel=1e-5)
    assert "health/frame_rank" in events.Tags()["scalars"]
