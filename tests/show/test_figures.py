"""Every kind of figure is drawn from a tiny run, and is a real picture."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tcore import load_encoder
from tcore.cli.main import main
from tcore.data.rendered import render_video
from tcore.errors import InputError
from tcore.evaluation.benchmarks import open_benchmark
from tcore.evaluation.protocols import TCORE
from tcore.show.carried import carry_clip, score_frames
from tcore.show.clips import Times, evenly, open_clip
from tcore.show.propagation import propagation_figure
from tests.evaluation.layouts import write_davis, write_jhmdb, write_vip
from tests.show.runs import make_card, make_run

KINDS = ("attention", "correspondence", "pca", "propagation")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "tiny")


def looks_real(path: Path, least: int = 300) -> None:
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("L"))
    assert min(pixels.shape) >= least
    assert pixels.std() > 10, "blank"


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


@pytest.mark.parametrize("kind", KINDS)
def test_a_figure_of_an_encoder_is_a_real_picture(
    run: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["figure", kind, str(run), "--out", str(tmp_path / "a.png")])
    looks_real(tmp_path / "a.png")
    assert f"picture: {tmp_path / 'a.png'}" in capsys.readouterr().out


def test_a_figure_is_a_pdf_where_its_ending_says_so(run: Path, tmp_path: Path) -> None:
    main(["figure", "pca", str(run), "--out", str(tmp_path / "a.pdf")])
    assert (tmp_path / "a.pdf").read_bytes().startswith(b"%PDF")
    main(["figure", "sandwich", str(run), "--out", str(tmp_path / "b.pdf")])
    assert (tmp_path / "b.pdf").read_bytes().startswith(b"%PDF")


def test_another_ending_is_refused_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["figure", "pca", "no-such-encoder", "--out", str(tmp_path / "a.gif")])
    assert ".png or .pdf" in capsys.readouterr().err


def test_attention_takes_any_three_images_and_chosen_patches(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = paint_images(tmp_path, [(70, 50), (90, 60), (64, 64)])
    out = str(tmp_path / "a.png")
    main(["figure", "attention", str(run), *images, "--patch", "1", "2", "--patch", "6", "10", "--out", out])
    looks_real(tmp_path / "a.png")
    assert "cross-attention of patches 1 2, 6 10" in capsys.readouterr().out
    main(["figure", "attention", str(run), *images, "--heads", "each", "--count", "1", "--out", out])
    looks_real(tmp_path / "a.png", 200)


def test_an_encoder_without_a_matching_module_shows_similarities_and_says_so(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["figure", "attention", str(run / "encoder.safetensors"), "--out", str(tmp_path / "a.png")])
    assert "feature similarity (no patch matching module)" in capsys.readouterr().out
    looks_real(tmp_path / "a.png")


def test_a_patch_outside_of_the_grid_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for kind in ("attention", "correspondence"):
        with pytest.raises(SystemExit):
            main(["figure", kind, str(run), "--patch", "3", "16", "--out", str(tmp_path / "a.png")])
        assert "patch 3 16" in capsys.readouterr().err


def test_propagation_is_an_mp4_where_its_ending_says_so(run: Path, tmp_path: Path) -> None:
    av = pytest.importorskip("av")
    main(["figure", "propagation", str(run), "--show", "objects", "--out", str(tmp_path / "a.mp4")])
    with av.open(str(tmp_path / "a.mp4")) as video:
        assert video.streams.video[0].frames == 20


def test_propagation_of_an_own_video_needs_no_truth(run: Path, tmp_path: Path) -> None:
    frames = tmp_path / "frames"
    frames.mkdir()
    paint_images(frames, [(48, 40)] * 3)
    mask = np.zeros((40, 48), dtype=np.uint8)
    mask[8:24, 8:24] = 1
    Image.fromarray(mask).save(tmp_path / "first.png")
    out = tmp_path / "a.png"
    labels = ["--labels", str(tmp_path / "first.png"), "--columns", "3"]
    main(["figure", "propagation", str(run), str(frames), *labels, "--out", str(out)])
    looks_real(out, 200)


def test_sandwich_and_dynamics_are_drawn_from_a_run(run: Path, tmp_path: Path) -> None:
    main(["figure", "sandwich", str(run), "--rows", "1", "--out", str(tmp_path / "s.png")])
    looks_real(tmp_path / "s.png")
    main(["evaluate", str(run), "--synthetic", "--videos", "1", "--every-checkpoint"])
    main(["figure", "dynamics", str(run), str(run), "--out", str(tmp_path / "d.png")])
    looks_real(tmp_path / "d.png")


def test_failures_show_the_worst_clips_and_where_they_break(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    card = make_card(run)
    main(["figure", "failures", str(card), "--count", "2", "--out", str(tmp_path / "f.png")])
    looks_real(tmp_path / "f.png")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert float(lines[0].split()[1]) <= float(lines[1].split()[1])
    assert "at frame" in lines[0]


def test_failures_refuse_another_encoder_than_the_card_was_made_with(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    card = make_card(run)
    other = str(run / "encoders" / "step-000003.safetensors")
    with pytest.raises(SystemExit):
        main(["figure", "failures", str(card), "--encoder", other, "--out", str(tmp_path / "f.png")])
    assert "other weights" in capsys.readouterr().err


def test_frames_are_found_by_number_by_seconds_or_spread() -> None:
    assert Times(numbers=(3, 1)).of(10, 2.0, "clip") == [3, 1]
    assert Times(seconds=(0.0, 1.5)).of(10, 2.0, "clip") == [0, 3]
    assert evenly(3).of(11, 2.0, "clip") == [0, 5, 10]
    with pytest.raises(InputError, match="frame 10 of clip: it has 10 frames"):
        Times(numbers=(10,)).of(10, 2.0, "clip")


def test_frames_of_a_folder_keep_their_shape_and_fit_the_patch(tmp_path: Path) -> None:
    paint_images(tmp_path, [(100, 50)] * 4)
    clip = open_clip([str(tmp_path)], Times(numbers=(0, 3)), 8)
    assert clip.frames.shape == (2, 48, 96, 3)
    assert clip.names == ("frame 0", "frame 3")


@pytest.mark.parametrize("benchmark", ["davis", "vip", "jhmdb"])
def test_a_clip_of_a_benchmark_is_carried_and_drawn_beside_its_truth(
    run: Path, tmp_path: Path, benchmark: str
) -> None:
    video = render_video(0, 0, num_frames=4, size=64)
    root = {"davis": write_davis, "vip": write_vip, "jhmdb": write_jhmdb}[benchmark](
        tmp_path / "data", [video]
    )
    opened = open_benchmark(benchmark, root, TCORE, size=(64, 64))
    carried = carry_clip(load_encoder(run), opened)
    scores = score_frames(carried)
    assert carried.length == 4
    assert scores[0] > 0.15
    assert scores[0] > scores[3]
    propagation_figure([carried], tmp_path / "a.png", columns=4)
    looks_real(tmp_path / "a.png", 250)
    with pytest.raises(InputError, match="no clip 'clip'"):
        carry_clip(load_encoder(run), opened, "clip")
