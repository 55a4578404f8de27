"""The notebooks of the docs run, cell after cell, on a tiny video."""

import json
from pathlib import Path
from typing import Any

import pytest

from tcore.data.rendered import render_video
from tests.evaluation.clips import need_av, write_file

# The encoder of the package takes seconds where others take milliseconds.
pytestmark = pytest.mark.long
DOCS = Path(__file__).parent.parent / "docs"


def run(name: str) -> dict[str, Any]:
    """The names that the cells of a notebook define."""
    book = json.loads((DOCS / name).read_text(encoding="utf-8"))
    assert all(not cell.get("outputs") for cell in book["cells"])  # they would grow old
    names: dict[str, Any] = {}
    for cell in book["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{name}, {cell['id']}", "exec"), names)
    return names


def test_own_video(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_av()
    frames = render_video(0, 1, split="heldout", num_frames=8, size=64).frames
    write_file(tmp_path / "clip.mp4", frames)
    monkeypatch.chdir(tmp_path)
    names = run("own_video.ipynb")
    assert [one.frame for one in names["found"]] == [0, 2, 4, 6]
    assert (names["found"][0].labels > 0).tolist() == names["mask"].tolist()


def test_score_an_encoder(capsys: pytest.CaptureFixture[str]) -> None:
    names = run("score_an_encoder.ipynb")
    assert names["card"] != names["twin"]
    assert "J&F" in capsys.readouterr().out
