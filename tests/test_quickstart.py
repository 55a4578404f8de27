import json
from pathlib import Path

import pytest
from PIL import Image

from tcore.evaluation.benchmarks.rendered import heldout_videos, score_videos
from tcore.quickstart import COPY, TRAINED, UNTRAINED, propagate_all, quickstart
from tcore.recipes import recipe
from tests.tiny import TINY


def test_quickstart_prints_the_table_and_saves_picture_and_scores(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = recipe("quickstart", TINY | {"optim.steps": 2, "rendered.size": 64})
    scores = quickstart(tmp_path / "run", config, num_videos=2)
    printed = capsys.readouterr().out
    for words in (
        "copy first frame",
        "raw color patches",
        "untrained",
        "trained",
        "J&F",
        "part mIoU",
        "PCK",
    ):
        assert words in printed
    with Image.open(tmp_path / "run" / "propagation.png") as picture:
        assert picture.size[0] > 6 * 64
    assert f"report: {tmp_path / 'run' / 'report.html'}" in printed
    assert "part mIoU" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    saved = json.loads((tmp_path / "run" / "results.json").read_text())["scores"]
    assert saved[TRAINED]["region"] == scores[TRAINED].region


def test_copying_the_first_frame_scores_clearly_below_an_untrained_encoder() -> None:
    from tcore.evaluation.encoder import Encoder
    from tcore.methods import build

    videos = heldout_videos(3, seed=5)
    untrained = Encoder(build(recipe("quickstart")).encoder(), UNTRAINED)
    found = propagate_all(videos, {UNTRAINED: untrained})
    scores = {name: score_videos(videos, labels).region_and_boundary for name, labels in found.items()}
    assert scores[COPY] + 0.05 < scores[UNTRAINED]
