import contextlib
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image

from tcore.cli.main import main
from tcore.cli.train import parse_train
from tcore.recipes import RECIPES, recipe

TINY = (
    "--vit.dim 32 --vit.depth 1 --vit.num-heads 2 --views.global-size 32 --views.local-size 16 "
    "--views.num-local 1 --matching.num-heads 2 --head.hidden 16 --head.bottleneck 8 --head.prototypes 16 "
    "--optim.steps 2 --optim.batch 2 --rendered.videos 2 --rendered.size 32"
).split()


def fails(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of a command that fails with exit code 2."""
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1
    assert printed.err.startswith("tcore: error: ")
    return printed.err


def test_flags_may_come_in_any_order() -> None:
    first = parse_train("quickstart --run R --loss.past-future 0 --sandwich.offset 0.05 0.15".split())
    second = parse_train("--sandwich.offset 0.05 0.15 --loss.past_future=0 --run R quickstart".split())
    assert first == second
    assert first.config == recipe("quickstart", {"loss.past_future": 0.0, "sandwich.offset": (0.05, 0.15)})


def test_a_run_may_be_named_like_a_recipe() -> None:
    command = parse_train(["--run", "vits16-k400", "quickstart"])
    assert (command.recipe, str(command.run)) == ("quickstart", "vits16-k400")


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_without_flags_is_the_recipe(name: str) -> None:
    assert parse_train([name]).config == recipe(name)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            "train quickstart --loss.past-futur 0",
            "unknown flag --loss.past-futur; did you mean --loss.past-future",
        ),
        ("train quickstart --optim.stepz 3", "did you mean --optim.steps"),
        ("train quickstart --lr 0.1", "did you mean --optim.base-lr?"),
        ("train quickstrat", "did you mean quickstart"),
        ("train", "needs a recipe"),
        ("trane quickstart", "did you mean train"),
        ("train quickstart --loss.form papr", "--loss.form papr: need paper or release."),
        ("train quickstart --optim.batch many", "--optim.batch many: need a whole number."),
        ("train quickstart --optim.steps many", "--optim.steps many: need a whole number."),
        ("train quickstart --optim.base-lr much", "--optim.base-lr much: need a number."),
        ("train quickstart --optim.base-lr", "--optim.base-lr: need 1 value."),
        ("train quickstart --optim.batch 1,2", "--optim.batch 1,2: need a whole number."),
        ("train quickstart --frames photographs:", "names no folder"),
        ("train quickstart --frames rendered+clips", "tcore prepare rendered:N STORE"),
        ("prepare rendered:0 store", "rendered:0: need a number of videos from 1"),
        ("prepare rendered:x store", "rendered:x: need a number of videos from 1"),
        ("evaluate random:vitti16 --davis d --reach far", "--reach far: need a whole number or everywhere."),
        ("evaluate random:vitti16 --davis d --size 9", "--size 9: need two whole numbers."),
        ("evaluate random:vitti16 --synthetic --size 0 0", "--size 0 0 goes with --davis"),
        ("evaluate random:vitti16 --synthetic --binary", "--binary goes with --davis DIR"),
        ("figure sandwich nowhere --out s.png", "nowhere is no run folder"),
        ("figure propagation random:vitti16 rendered_cat.mp4 --out s.png", "needs --labels FIRST.png"),
        ("train quickstart --sandwich.offset 0.1", "--sandwich.offset"),
        ("train quickstart twice", "twice"),
        ("train quickstart --sandwich.offset 0.15 0.4", "reaches outside the video"),
        ("train quickstart --frames /no/such/store", "/no/such/store does not exist"),
        ("train vits16-k400", "needs --frames"),
        ("train quickstart --frames=", "--frames is empty"),
        ("train quickstart --optim.epochs 3", "optim.epochs=3 has no effect while optim.steps=600"),
        ("train quickstart --seed 99999999999999999999999", "seed="),
        ("train quickstart --rendered.size 16", "rendered.size=16"),
        ("train quickstart --runtime.device cuda:x", "runtime.device=cuda:x"),
        ("quickstart --videos 0", "videos=0"),
        ("evaluate", "needs an encoder"),
        ("evaluate random:vits17 --davis d", "random:vits16"),
        ("evaluate random:vitti16 --davis nowhere", "nowhere does not exist"),
        ("evaluate random:vitti16 --davis d --protocol dion", "no protocol 'dion'"),
        ("score", "needs a benchmark"),
        ("score davis", "needs --truth DIR and --predictions DIR"),
        ("score vip --binary --truth d --predictions d", "--binary goes with davis"),
        ("propagate", "needs an encoder and a video"),
        ("propagate random:vitti16 clip.mp4", "needs --labels FIRST: a mask of frame 0"),
        ("propagate random:vitti16 clip.mp4 --labels a.png --out o", "clip.mp4"),
        ("export", "needs an encoder and a place"),
        ("export random:vitti16 out", "out does not say its format"),
        ("export random:vitti16 out --format tim", "did you mean timm"),
        ("export random:vitti16 out --format onnx", "a file that ends in .onnx"),
        ("export random:vitti16 out.pth --format hf", "--format hf is a folder"),
        ("export nothing out.pth", "nothing does not exist"),
        ("quickstart --video 3", "did you mean --videos"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: str,
    expected: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert expected in fails(arguments.split(), capsys)
    assert list(tmp_path.iterdir()) == []


def test_store_without_usable_video_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "store" / "video"
    folder.mkdir(parents=True)
    for index in range(3):
        Image.new("RGB", (40, 40)).save(folder / f"{index}.jpg")
    run = str(tmp_path / "run")
    line = fails(["train", "quickstart", "--frames", str(tmp_path / "store"), "--run", run], capsys)
    assert "no usable video among 1: the longest has 3 frames" in line
    assert not (tmp_path / "run").exists()


def test_store_without_frames_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("no frames here")
    line = fails(["train", "quickstart", "--frames", str(tmp_path), "--run", str(tmp_path / "run")], capsys)
    assert f"no frames under {tmp_path}" in line
    line = fails(["train", "quickstart", "--frames", f"photographs:{tmp_path}"], capsys)
    assert f"no images under {tmp_path}: give a folder of JPEG or PNG files" in line


def test_foreign_run_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "letter.txt").write_text("dear ...")
    assert "is no run folder" in fails(["train", "quickstart", "--run", str(tmp_path), *TINY], capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]


def test_run_with_other_settings_is_refused_with_the_differences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(tmp_path / "run")
    main(["train", "quickstart", "--run", run, *TINY])
    capsys.readouterr()
    line = fails(["train", "quickstart", "--run", run, *TINY, "--loss.koleo", "0.5"], capsys)
    assert "loss.koleo 0.1 -> 0.5" in line


def test_run_below_a_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    run = str(tmp_path / "file" / "run")
    assert str(tmp_path / "file") in fails(["train", "quickstart", "--run", run, *TINY], capsys)


def test_plan_prints_what_a_run_takes_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    main(["train", "quickstart", "--plan", *TINY])
    printed = capsys.readouterr().out
    for word in ("parameters", "batch", "steps", "memory", "samples/s", "dino"):
        assert word in printed
    assert list(tmp_path.iterdir()) == []


def test_training_prints_progress_and_the_encoder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["train", "quickstart", "--run", str(tmp_path / "run"), *TINY, "--runtime.log-every", "1"])
    printed = capsys.readouterr()
    assert "step 2/2" in printed.err
    for word in ("ETA", "samples/s", "wait"):
        assert word in printed.err
    assert printed.out == f"encoder: {tmp_path / 'run' / 'encoder.safetensors'}\n"


@pytest.mark.parametrize(
    "arguments", [["--help"], ["train", "--help"], ["train", "vits16-k400", "--help"], []]
)
def test_help_is_printed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):
        main(arguments)
    printed = capsys.readouterr().out
    assert "tcore train" in printed


def test_help_of_a_recipe_shows_its_values(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "vitb16-k400", "--help"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "0.13" in printed
    assert "Peak learning rate of the patch matching module" in printed


def test_import_is_quick_beyond_torch() -> None:
    code = "import time, torch; t = time.perf_counter(); import tcore; print(time.perf_counter() - t)"
    times = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        times.append(float(done.stdout))
        time.sleep(0.1)
    assert min(times) < 1.5


def test_library_imports_without_the_packages_of_the_command_line() -> None:
    code = """
import sys
for name in ("tyro", "av", "tensorboard", "torchvision", "timm"):
    sys.modules[name] = None
import tcore, tcore.training.plan, tcore.quickstart, tcore.video.propagate_video
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("workers", ["0", "2"])
def test_broken_frame_is_one_line_that_names_it_whoever_reads_it(
    workers: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "store" / "video"
    folder.mkdir(parents=True)
    for index in range(8):
        (folder / f"{index}.jpg").write_bytes(b"no image")
    arguments = [
        "--frames",
        str(tmp_path / "store"),
        "--run",
        str(tmp_path / "run"),
        "--runtime.workers",
        workers,
    ]
    with pytest.raises(SystemExit) as stop:
        main(["train", "quickstart", *arguments, *TINY])
    assert stop.value.code == 2
    introduced, said = capsys.readouterr().err.splitlines()
    assert introduced.startswith("1 videos")
    assert re.fullmatch(
        r"tcore: error: 11 clips could not be read, one after the other; the last: "
        rf"cannot read frame {folder}/\d.jpg: cannot identify image file\.",
        said,
    )
