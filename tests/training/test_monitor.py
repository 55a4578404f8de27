"""What a run says of its data: time spent waiting for it, and files that go bad meanwhile."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tcore import InputError, train
from tcore.config import Config
from tcore.data.images import Frame
from tcore.data.stores import FolderStore, FrameStore
from tcore.device import num_cores
from tcore.methods import build_source
from tcore.training.journal import WAIT_FEWEST, WAIT_PAUSE, WAIT_STEPS, BadSamples, DataWait
from tests.data.packing import pack
from tests.data.painted import Painted
from tests.runs import metrics
from tests.tiny import tiny
from tests.training.faults import damage, make_store


def warnings(wait: DataWait, shares: Sequence[float], speed: float = 10.0) -> list[tuple[int, str]]:
    """Steps at which something was said, with what it was; every step is looked at."""
    said = []
    for step, share in enumerate(shares, start=1):
        text = wait.note(step, {"data_wait": share, "samples_per_second": speed}, look=True)
        if text is not None:
            said.append((step, text))
    return said


def waiting(store: FrameStore, config: Config | None = None) -> DataWait:
    return DataWait(build_source(store, config or tiny(runtime__workers=0)))


def test_a_slow_store_is_warned_of_once_during_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_store(tmp_path / "store", videos=4)
    usual = FolderStore.read

    def slow(self: FolderStore, video: int, frames: Sequence[int]) -> list[Frame]:
        time.sleep(0.05)  # more than a tenth of a step, on a busy machine too
        return usual(self, video, frames)

    monkeypatch.setattr(FolderStore, "read", slow)
    train(tiny(optim__steps=12, runtime__workers=0), tmp_path / "run", tmp_path / "store")
    printed = capsys.readouterr().err
    assert printed.count("waiting for data") == 1
    assert f"--runtime.workers {num_cores()}" in printed
    assert "tcore prepare" in printed


def test_little_waiting_and_the_first_step_are_not_worth_a_word() -> None:
    assert warnings(waiting(Painted([20] * 4)), [0.09] * 200) == []
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
    assert ("--runtime.hold-gib" in said) == (sys.platform == "linux")
    few = warnings(waiting(packed, tiny(runtime__workers=0)), [0.5] * 20)[0][1]
    assert f"--runtime.workers {num_cores()} reads with every core (now 0)" in few


def test_rendered_videos_are_not_complained_of() -> None:
    rendered = FrameStore.rendered(videos=2, frames=10, size=32)
    assert warnings(waiting(rendered), [0.9] * 100) == []


def test_an_image_that_goes_bad_in_mid_training_is_replaced_counted_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, store = tmp_path / "run", make_store(tmp_path / "store", videos=6)

    def spoil(step: int) -> None:
        for path in (store / "video-3").iterdir() if step == 3 else ():
            path.write_bytes(path.read_bytes()[:100])

    config = tiny(runtime__workers=0, optim__steps=40, runtime__log_every=1)
    with pytest.raises(InputError, match=r"runtime.bad_samples=0.01 .*video-3"):
        train(config, run, store, on_step=spoil)
    said = capsys.readouterr().err
    counted = [line["bad_samples"] for line in metrics(run)]
    assert counted[:3] == [0, 0, 0]
    assert sum(counted) > 10  # of 1000, in steps of 4 of which a sixth is bad
    assert "unreadable, replaced by other clips" in said
    assert f"  unreadable {counted[-1]}" in said.splitlines()[-1]


def test_a_shard_that_goes_bad_in_mid_training_is_replaced_up_to_the_set_share(tmp_path: Path) -> None:
    store = pack(tmp_path / "store", [[("a", 10), ("b", 10)], [("c", 10), ("d", 10), ("e", 10)]])
    shard = store / "shards" / "000000.tar"
    run = tmp_path / "run"
    damage(shard, "truncated")
    train(tiny(runtime__bad_samples=1.0, runtime__workers=1), run, store, quiet=True)
    assert sum(line["bad_samples"] for line in metrics(run)) > 0
    with pytest.raises(InputError, match=r"runtime.bad_samples=0 .*000000.tar is cut off"):
        train(tiny(runtime__bad_samples=0.0, runtime__workers=0), tmp_path / "strict", store, quiet=True)


def test_the_share_of_bad_samples_is_taken_of_the_last_thousand() -> None:
    bad = BadSamples(0.01)
    said = [bad.note(step, ("broken",) if step % 200 == 0 else (), 4) for step in range(1, 2001)]
    assert sum(line is not None for line in said) == 10  # one in 800 samples
    assert bad.total == 10
    with pytest.raises(InputError, match="11 of the last 1000"):
        [bad.note(step, ("broken",), 4) for step in range(2001, 2100)]
    with pytest.raises(InputError, match="bad_samples=0 "):
        BadSamples(0.0).note(1, ("broken",), 4)
