"""Every kind of figure is drawn from a tiny run, and is a real picture."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tcore import load_encoder
from tcore.cli.main import main
from tcore.config import override
from tcore.data.rendered import render_video
from tcore.errors import InputError
from tcore.evaluation.benchmarks import find_benchmark
from tcore.evaluation.protocols import TCORE
from tcore.pretrain import train
from tcore.show.clips import Times, evenly, open_clip
from tcore.show.propagation import PropagatedClip, label_clip, propagation_figure, score_frames, with_truth
from tests.conftest import Refused
from tests.evaluation.layouts import write_davis, write_jhmdb, write_vip
from tests.tiny import tiny


def looks_real(path: Path, least: int = 200) -> None:
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("L"))
    assert min(pixels.shape) >= least
    assert pixels.std() > 10, "blank"


def draw(kind: str, *words: str | Path, out: Path) -> None:
    """Run `tcore figure` and look at what it wrote."""
    main(["figure", kind, *map(str, words), "--out", str(out)])
    if out.suffix == ".png":
        looks_real(out)


def paint_images(folder: Path, sizes: list[tuple[int, int]]) -> list[str]:
    """Images of some sizes, width and height, with something in them."""
    rng = np.random.default_rng(0)
    paths = []
    for index, (width, height) in enumerate(sizes):
        coarse = Image.fromarray(rng.integers(0, 255, (6, 8, 3), dtype=np.uint8))
        path = folder / f"{index}.png"
        coarse.resize((width, height), Image.Resampling.BICUBIC).save(path)
        paths.append(str(path))
    return paths


@pytest.mark.parametrize("kind", ["correspondence", "pca"])
def test_a_figure_of_an_encoder_is_a_real_picture(
    run: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    draw(kind, run, out=tmp_path / "a.png")
    assert str(tmp_path / "a.png") in capsys.readouterr().out


def test_a_figure_is_a_pdf_if_its_ending_says_so(run: Path, tmp_path: Path) -> None:
    draw("sandwich", run, "--rows", "1", out=tmp_path / "a.pdf")
    assert (tmp_path / "a.pdf").read_bytes().startswith(b"%PDF")


def test_attention_takes_any_three_images_and_chosen_patches(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images, out = paint_images(tmp_path, [(70, 50), (90, 60), (64, 64)]), tmp_path / "a.png"
    draw("attention", run, *images, "--patch", "1", "2", "--patch", "6", "10", "--heads", "each", out=out)
    assert "cross-attention of patches 1 2, 6 10" in capsys.readouterr().out
    draw("attention", run / "encoder.safetensors", "--patch", "1", "2", out=out)
    assert "similarity" in capsys.readouterr().out, "there is no matching module"


def test_attention_of_a_module_that_follows_motion(tmp_path: Path) -> None:
    settings = {"matching.form": "motion", "matching.start": "identity", "optim.steps": 2}
    run = train(override(tiny(), settings), tmp_path / "run")
    images = paint_images(tmp_path, [(70, 50)] * 3)
    draw("attention", run, *images, "--patch", "1", "2", out=tmp_path / "a.png")


@pytest.mark.parametrize(
    ("words", "out", "named"),
    [
        ("pca no-such-encoder", "a.gif", ".png"),
        ("attention RUN --patch 3 16", "a.png", "3 16"),
        ("correspondence RUN --patch 3 16", "a.png", "3 16"),
        ("matching RUN --binary", "a.png", "--binary goes with --davis"),
        ("matching RUN --frames rendered", "a.png", "--frames rendered goes with --batches"),
        ("matching RUN --batches -1", "a.png", "--batches -1: need 0 or more"),
        ("matching RUN --davis a/set b/set", "a.png", "two datasets are called set"),
        ("matching nowhere", "a.png", "run nowhere does not exist"),
    ],
)
def test_what_cannot_be_drawn_is_named(
    words: str, out: str, named: str, run: Path, tmp_path: Path, refused: Refused
) -> None:
    assert named in refused("figure", *words.replace("RUN", str(run)).split(), "--out", tmp_path / out)


def test_propagation_is_an_mp4_if_its_ending_says_so(run: Path, tmp_path: Path) -> None:
    av = pytest.importorskip("av")
    draw("propagation", run, "--show", "objects", out=tmp_path / "a.mp4")
    with av.open(str(tmp_path / "a.mp4")) as video:
        assert video.streams.video[0].frames == 20


def test_propagation_of_a_users_video_needs_no_truth(run: Path, tmp_path: Path) -> None:
    frames = tmp_path / "frames"
    frames.mkdir()
    paint_images(frames, [(48, 40)] * 3)
    mask = np.zeros((40, 48), dtype=np.uint8)
    mask[8:24, 8:24] = 1
    Image.fromarray(mask).save(tmp_path / "first.png")
    labels = ["--labels", str(tmp_path / "first.png"), "--columns", "3"]
    draw("propagation", run, frames, *labels, out=tmp_path / "a.png")


def test_dynamics_are_drawn_from_a_run(run: Path, tmp_path: Path) -> None:
    draw("dynamics", run, run, out=tmp_path / "d.png")


def test_failures_show_the_worst_clips_and_where_they_break(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], refused: Refused
) -> None:
    draw("failures", run / "eval", "--count", "2", out=tmp_path / "f.png")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert float(lines[0].split()[1]) <= float(lines[1].split()[1])
    assert "at frame" in lines[0]
    other = run / "encoders" / "step-000003.safetensors"
    said = refused("figure", "failures", run / "eval", "--encoder", other, "--out", tmp_path / "f.png")
    assert "other weights" in said


def test_frames_are_found_by_number_by_seconds_or_spread() -> None:
    assert Times(numbers=(3, 1)).of(10, 2.0, "clip") == [3, 1]
    assert Times(seconds=(0.0, 1.5)).of(10, 2.0, "clip") == [0, 3]
    assert evenly(3).of(11, 2.0, "clip") == [0, 5, 10]
    with pytest.raises(InputError, match="frame 10 of clip"):
        Times(numbers=(10,)).of(10, 2.0, "clip")


def test_frames_of_a_folder_keep_their_shape_and_fit_the_patch(tmp_path: Path) -> None:
    paint_images(tmp_path, [(100, 50)] * 4)
    clip = open_clip([str(tmp_path)], Times(numbers=(0, 3)), 8)
    assert clip.frames.shape == (2, 48, 96, 3)
    assert clip.names == ("frame 0", "frame 3")


def test_frames_are_scored_by_the_overlap_of_their_objects() -> None:
    ids = np.zeros((2, 96, 96), dtype=np.uint8)
    ids[0, 10:30, 10:30] = ids[1, 10:30, 20:40] = 1
    frame = np.zeros((96, 96, 3), dtype=np.uint8)
    clip = PropagatedClip("clip", "objects", 2, lambda index: frame, [*ids], [ids[0]] * 2)
    np.testing.assert_allclose(score_frames(clip), [1, 200 / 600])


@pytest.mark.parametrize("benchmark", ["davis", "vip", "jhmdb"])
def test_a_clip_of_a_benchmark_is_drawn_beside_its_truth(run: Path, tmp_path: Path, benchmark: str) -> None:
    video = render_video(0, 0, num_frames=4, size=64)
    write = {"davis": write_davis, "vip": write_vip, "jhmdb": write_jhmdb}[benchmark]
    opened = find_benchmark(benchmark).open(write(tmp_path / "data", [video]), TCORE, size=(64, 64))
    clip = label_clip(load_encoder(run), opened)
    scores = score_frames(clip)
    assert clip.length == 4
    assert scores[0] > max(0.15, scores[3])
    propagation_figure(with_truth([clip]), tmp_path / "a.png", columns=4)
    looks_real(tmp_path / "a.png")
    with pytest.raises(InputError, match="no clip 'clip'"):
        label_clip(load_encoder(run), opened, "clip")
