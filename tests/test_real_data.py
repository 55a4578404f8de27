"""Training on real frames, where the environment variable TCORE_DATA names a folder that holds some."""

import json
import math
import os
from pathlib import Path

import pytest

from tcore import FrameStore, train
from tests.tiny import tiny

DATA = os.environ.get("TCORE_DATA")
pytestmark = pytest.mark.skipif(DATA is None, reason="TCORE_DATA is not set: no real frames to train on")


def test_real_clips_are_found_and_train(tmp_path: Path) -> None:
    clips = Path(str(DATA)) / "clips192" / "train"
    store = FrameStore.open(clips)
    assert len(store) == 208
    assert 8 <= store.lengths.min() <= store.lengths.max() <= 20
    run = train(tiny(optim__steps=3, runtime__workers=2), tmp_path / "run", clips, quiet=True)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 3
    assert all(math.isfinite(line["total"]) for line in lines)
