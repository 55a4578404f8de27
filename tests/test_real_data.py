"""Training on real frames, where the environment variable TCORE_DATA names a folder that holds some."""

import math
import os
import shutil
from pathlib import Path

import pytest

from tcore import FrameStore, load_encoder, recipe, train
from tcore.data.neighbors import load_neighbors
from tcore.evaluation.neighbors import find_all
from tcore.show.check import check
from tests.runs import metrics
from tests.tiny import tiny

DATA = os.environ.get("TCORE_DATA")
pytestmark = pytest.mark.skipif(DATA is None, reason="TCORE_DATA is not set: no real frames to train on")


def test_real_clips_are_found_and_train(tmp_path: Path) -> None:
    clips = Path(str(DATA)) / "clips192" / "train"
    store = FrameStore.open(clips)
    assert len(store) == 208
    assert 8 <= store.lengths.min() <= store.lengths.max() <= 20
    run = train(tiny(optim__steps=3, runtime__workers=2), tmp_path / "run", clips, quiet=True)
    lines = metrics(run)
    assert len(lines) == 3
    assert all(math.isfinite(line["total"]) for line in lines)


def test_real_photographs_find_neighbors_and_train_with_them(tmp_path: Path) -> None:
    folder = tmp_path / "photographs"
    for label in range(20):
        shutil.copytree(Path(str(DATA)) / "images160" / str(label), folder / str(label))
    first = train(tiny(source="images", auxiliary="none"), tmp_path / "A", folder, quiet=True)
    found = load_neighbors(find_all(load_encoder(first), folder))
    assert found.indices.shape == (60, 5)
    second = train(tiny(source="images", auxiliary="past"), tmp_path / "B", folder, quiet=True)
    assert all(math.isfinite(line["past_teacher"]) for line in metrics(second))


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
def test_real_folders_are_recognized_and_checked(folder: str, kind: str, code: int, tmp_path: Path) -> None:
    findings = check(
        Path(str(DATA)) / folder, recipe("vits16-k400"), sample=100, sheet=tmp_path / "sheet.png"
    )
    assert kind in findings.kind
    assert findings.exit_code == code
    assert (tmp_path / "sheet.png").exists() == (kind not in ("DAVIS", "JHMDB"))
    if folder == "videos":
        assert set(findings.figures["bad"]) == {"empty.mp4", "not_a_video.mp4", "truncated.mp4"}
