import json
from pathlib import Path

import pytest
from PIL import Image

from tcore.evaluation.benchmarks.rendered import Rendered
from tcore.evaluation.protocols import RENDERED
from tcore.quickstart import COPY, TRAINED, UNTRAINED, quickstart, untrained_encoders
from tcore.recipes import recipe
from tests.tiny import TINY


def test_quickstart_prints_the_table_and_saves_picture_and_scores(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tcore.show.report.draw_figures", lambda *_: None)  # tests/show draws them
    monkeypatch.setattr("tcore.show.report.panel_svg", lambda *_: "")
    config = recipe("quickstart", TINY | {"optim.steps": 2, "rendered.size": 64})
    scores = quickstart(tmp_path / "run", config, num_videos=1)
    printed = capsys.readouterr().out
    for words in ("copy first frame", "raw color patches", "untrained", "trained", "J&F", "part mIoU", "PCK"):
        assert words in printed
    with Image.open(tmp_path / "run" / "propagation.png") as picture:
        assert picture.size[0] > 6 * 64
    assert f"report: {tmp_path / 'run' / 'report.html'}" in printed
    assert "part mIoU" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    saved = json.loads((tmp_path / "run" / "results.json").read_text())["scores"]
    assert saved[TRAINED]["region"] == scores[TRAINED]["J"]


def test_copying_the_first_frame_scores_clearly_below_an_untrained_encoder() -> None:
    benchmark = Rendered.open(2, RENDERED)
    scores = {
        name: benchmark.summarize([benchmark.run(encoder, clip) for clip in benchmark.clips])["J&F"]
        for name, encoder in untrained_encoders(recipe("quickstart")).items()
    }
    assert scores[COPY] + 0.05 < scores[UNTRAINED]
