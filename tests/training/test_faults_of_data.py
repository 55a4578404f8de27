"""Files that go bad while a run goes on."""

import json
import sys
from pathlib import Path

import pytest

from tcore import InputError, train
from tcore.training.monitor import BadSamples
from tests.tiny import tiny
from tests.training.faults import damage, make_store

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signals, limits and /proc of Linux")


def test_an_image_that_goes_bad_in_mid_training_is_replaced_counted_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, store = tmp_path / "run", make_store(tmp_path / "store", videos=6)

    def spoil(step: int) -> None:
        for path in (store / "video-3").iterdir() if step == 3 else ():
            path.write_bytes(path.read_bytes()[:100])

    with pytest.raises(InputError, match=r"runtime.bad_samples=0.01 .*video-3"):
        train(tiny(runtime__workers=0, optim__steps=40, runtime__log_every=1), run, store, on_step=spoil)
    said = capsys.readouterr().err
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    counted = [line["bad_samples"] for line in lines]
    assert counted[:3] == [0, 0, 0]
    assert sum(counted) > 10  # of 1000, in steps of 4 of which a sixth is bad
    assert "unreadable, replaced by other clips" in said
    assert f"  unreadable {counted[-1]}" in said.splitlines()[-1]


def test_a_shard_that_goes_bad_in_mid_training_is_replaced_up_to_the_set_share(tmp_path: Path) -> None:
    from tests.data.packing import pack

    store = pack(tmp_path / "store", [[("a", 10), ("b", 10)], [("c", 10), ("d", 10), ("e", 10)]])
    shard = store / "shards" / "000000.tar"
    run = tmp_path / "run"
    damage(shard, "truncated")
    train(tiny(runtime__bad_samples=1.0, runtime__workers=1), run, store, quiet=True)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert sum(line["bad_samples"] for line in lines) > 0
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
