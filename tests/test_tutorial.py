"""The tutorial is executed, command by command, on rendered videos; only its training is cut short."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tcore.cli.main import main
from tcore.data.rendered import render_video
from tests.evaluation.clips import need_av, write_file

TUTORIAL = (Path(__file__).parent.parent / "docs" / "tutorial.md").read_text(encoding="utf-8")
COMMANDS = re.findall(
    r"^tcore .*$", "\n".join(re.findall(r"```\n(.*?)```", TUTORIAL, re.DOTALL)), re.MULTILINE
)
SHORT = {
    "train": "--optim.steps 2 --optim.batch 2 --runtime.workers 0",
    "evaluate": "--videos 1",
    "prepare": "--engine here",
}


def run(words: list[str]) -> int:
    """The exit code of a command."""
    try:
        main(words)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.mark.long
def test_every_command_of_the_tutorial_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    need_av()
    for index in range(2):
        video = render_video(3, index, num_frames=20, size=64)
        write_file(tmp_path / "videos" / f"clip{index}.mp4", np.repeat(video.frames, 5, axis=0), rate=10)
    Image.fromarray(render_video(3, 0, size=64).objects[0]).save(tmp_path / "first.png")
    monkeypatch.chdir(tmp_path)
    assert len(COMMANDS) >= 11
    for command in COMMANDS:
        verb, *arguments = shlex.split(command)[1:]
        code = run([verb, *arguments, *SHORT.get(verb, "").split()])
        assert code == 0, (command, capsys.readouterr().err)
    for made in (
        "store/store.json",
        "sheet.png",
        "runs/mine/encoder.safetensors",
        "result/overlay.mp4",
        "pca.png",
    ):
        assert (tmp_path / made).stat().st_size > 0
    assert len(list((tmp_path / "result" / "masks").glob("*.png"))) == 100
    assert "<html" in (tmp_path / "report.html").read_text(encoding="utf-8")[:500]
    assert (tmp_path / "encoder.safetensors").exists()
