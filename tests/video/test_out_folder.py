"""The output folder: no results are lost, and a folder that cannot be used is refused first."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tcore.cli.main import main
from tcore.data.rendered import RenderedVideo
from tcore.errors import InputError
from tcore.evaluation.encoder import Encoder
from tcore.video.out_folder import CARD, own_folder
from tests.evaluation.clips import write_folder
from tests.video.test_propagate_video import mask, run


def test_an_out_folder_with_anything_else_in_it_is_refused(
    encoder: Encoder, clip: Path, first: Path, tmp_path: Path
) -> None:
    run(encoder, clip, first, tmp_path / "out", overlay=False)
    before = sorted(path.name for path in (tmp_path / "out").rglob("*"))
    with pytest.raises(InputError, match=r"holds confidence\.csv"):
        run(encoder, clip, first, tmp_path / "out", overlay=False)
    assert sorted(path.name for path in (tmp_path / "out").rglob("*")) == before
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    with pytest.raises(InputError, match=r"holds thesis\.tex"):
        run(encoder, clip, first, tmp_path / "other")
    with pytest.raises(InputError, match=r"first\.png lies in the out folder"):
        run(encoder, clip, first, tmp_path)
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InputError, match=r"cannot write to .*file"):
            run(encoder, clip, first, out)


def interrupt(encoder: Encoder, clip: Path, first: Path, out: Path) -> None:
    def stop(done: int, total: int | None) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(encoder, clip, first, out, progress=stop, overlay=False)


def test_what_another_video_or_other_labels_left_unfinished_is_kept(
    encoder: Encoder, video: RenderedVideo, clip: Path, first: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    interrupt(encoder, clip, first, out)
    kept = sorted(path.name for path in (out / "masks").iterdir())
    assert len(kept) == 3
    other = write_folder(tmp_path / "other" / "frames", video.frames[:2])
    with pytest.raises(InputError, match=rf"video {clip}"):
        run(encoder, other, first, out)
    painted = mask(tmp_path / "again.png", video.objects[0])
    with pytest.raises(InputError, match=rf"labels {first}"):
        run(encoder, clip, painted, out)
    assert sorted(path.name for path in (out / "masks").iterdir()) == kept
    run(encoder, clip, first, out, overlay=False)  # the same command again
    assert len(list((out / "masks").iterdir())) == 8


def test_two_processes_do_not_write_to_one_folder(
    encoder: Encoder, clip: Path, first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tcore.files.ORPHANS", 0.1)
    out = tmp_path / "out"
    card = {"video": str(clip), "labels": [str(first)], "finished": False}
    with own_folder(out, card), pytest.raises(InputError, match=f"{out} is in use by process"):
        run(encoder, clip, first, out)
    assert [path.name for path in out.iterdir()] == [CARD]
    run(encoder, clip, first, out, overlay=False)
    assert json.loads((out / CARD).read_text())["finished"] is True


def test_a_folder_that_will_not_do_is_one_line_before_anything_else_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], video: RenderedVideo
) -> None:
    monkeypatch.chdir(tmp_path)
    target = write_folder(tmp_path / "annex" / "0fb31c", video.frames[:2])
    Path("dog").symlink_to(target)
    both = np.where(video.objects[0] > 0, 255, 0).astype(np.uint8)  # as in DAVIS-2016: this is reported, too
    Image.fromarray(both).save("first.png")
    words = ["propagate", "random:vitti16", "dog", "--labels", "first.png", "--no-overlay"]
    main(words)
    assert "propagated/dog: 2 frames" in capsys.readouterr().out  # a link goes by its own name
    Path("file").touch()
    for more, named in (
        ([], "confidence.csv"),
        (["--out", "file"], "file"),
        (["--out", "file/below"], "file"),
    ):
        with pytest.raises(SystemExit):
            main([*words, *more])
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("tcore: error: ")
        assert named in line
