"""Training on real frames, where the environment variable TCORE_DATA names a folder that holds some."""

import json
import math
import os
from pathlib import Path

import pytest

from tcore import FrameStore, recipe, train
from tcore.show.check import check
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


@pytest.mark.parametrize(
    ("folder", "kind", "code"),
    [
        ("clips192/train", "frame folders", 0),
        ("images160", "images", 0),
        ("videos", "video files", 1),
        ("davis2016", "DAVIS", 0),
        ("jhmdb_clip", "JHMDB", 0),
    ],
)
def test_real_folders_are_recognised_and_checked(folder: str, kind: str, code: int, tmp_path: Path) -> None:
    findings = check(
        Path(str(DATA)) / folder, recipe("vits16-k400"), sample=100, sheet=tmp_path / "sheet.png"
    )
    assert kind in findings.kind
    assert findings.exit_code == code
    assert (tmp_path / "sheet.png").exists() == (kind not in ("DAVIS", "JHMDB"))


def test_bad_real_videos_are_named() -> None:
    findings = check(Path(str(DATA)) / "videos", recipe("vits16-k400"))
    assert set(findings.figures["bad"]) == {"empty.mp4", "not_a_video.mp4", "truncated.mp4"}
