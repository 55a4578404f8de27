"""Training that waits for its data says so, and what to do."""

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tcore import train
from tcore.config import Config
from tcore.data.images import Frame
from tcore.data.samples import Source
from tcore.data.stores import FolderStore, FrameStore
from tcore.device import num_cores
from tcore.training.monitor import WAIT_FEWEST, WAIT_PAUSE, WAIT_STEPS, DataWait
from tests.data.clips import write_clip
from tests.data.packing import pack
from tests.data.painted import Painted
from tests.tiny import tiny


def warnings(wait: DataWait, shares: Sequence[float], speed: float = 10.0) -> list[tuple[int, str]]:
    """Steps at which something was said, with what it was; every step is looked at."""
    said = []
    for step, share in enumerate(shares, start=1):
        text = wait.note(step, {"data_wait": share, "samples_per_second": speed}, look=True)
        if text is not None:
            said.append((step, text))
    return said


def waiting(store: FrameStore, config: Config | None = None) -> DataWait:
    return DataWait(Source(store, config or tiny(runtime__workers=0)))


def test_a_slow_store_is_warned_of_once_during_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(4):
        write_clip(tmp_path / "store" / f"v{number}", 10, seed=number)
    usual = FolderStore.read

    def slow(self: FolderStore, video: int, frames: Sequence[int]) -> list[Frame]:
        time.sleep(0.05)
        return usual(self, video, frames)

    monkeypatch.setattr(FolderStore, "read", slow)
    train(tiny(optim__steps=16, runtime__workers=0), tmp_path / "run", tmp_path / "store")
    printed = capsys.readouterr().err
    assert printed.count("waiting for data") == 1
    assert f"--runtime.workers {num_cores()}" in printed
    assert "tcore prepare" in printed


def test_little_waiting_is_not_worth_a_word() -> None:
    assert warnings(waiting(Painted([20] * 4)), [0.09] * 200) == []


def test_the_first_step_does_not_count() -> None:
    assert warnings(waiting(Painted([20] * 4)), [0.99] + [0.05] * 30) == []


def test_it_is_said_when_there_is_enough_to_go_by_and_again_after_a_while() -> None:
    said = warnings(waiting(Painted([20] * 4)), [0.5] * (2 * WAIT_PAUSE))
    assert [step for step, _ in said] == [WAIT_FEWEST + 1, WAIT_FEWEST + 1 + WAIT_PAUSE]
    assert f"50% of the last {WAIT_FEWEST} steps" in said[0][1]
    assert f"of the last {WAIT_STEPS} steps" in said[1][1]


def test_steps_weigh_by_their_time() -> None:
    wait = waiting(Painted([20] * 4))
    for step in range(1, 30):
        slow = step % 2 == 0  # every other step takes 100 times as long, and does not wait
        metrics = {"data_wait": 0.0 if slow else 0.9, "samples_per_second": 1.0 if slow else 100.0}
        assert wait.note(step, metrics, look=True) is None


def test_only_knobs_that_are_left_are_named(tmp_path: Path) -> None:
    packed = FrameStore.open(pack(tmp_path / "packed", [[("a", 20), ("b", 20)]]))
    said = warnings(waiting(packed, tiny(runtime__workers=num_cores())), [0.5] * 20)[0][1]
    assert "--runtime.workers" not in said
    assert "packs the frames" not in said
    assert "--short-side" in said
    few = warnings(waiting(packed, tiny(runtime__workers=0)), [0.5] * 20)[0][1]
    assert f"--runtime.workers {num_cores()} reads with every core (now 0)" in few


def test_rendered_videos_are_not_complained_of() -> None:
    rendered = FrameStore.rendered(videos=2, frames=10, size=32)
    assert warnings(waiting(rendered), [0.9] * 100) == []
    assert np.all(rendered.lengths == 10)
