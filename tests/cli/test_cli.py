"""The command line: what is understood, what is refused with exit code 2, what is printed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from tcore.cli.main import VERBS, main
from tcore.cli.train import parse_train
from tcore.recipes import RECIPES, recipe
from tests.conftest import Refused
from tests.tiny import TINY as SIZES
from tests.tiny import flags_of

TINY = flags_of(SIZES | {"optim.steps": 2, "optim.batch": 2, "rendered.videos": 2})
Capture = pytest.CaptureFixture[str]


def test_flags_may_come_in_any_order() -> None:
    first = parse_train("quickstart --run R --loss.past-future 0 --sandwich.offset 0.05 0.15".split())
    second = parse_train("quickstart --sandwich.offset 0.05 0.15 --loss.past_future=0 --run R".split())
    assert first == second
    assert (first.recipe, first.run) == ("quickstart", Path("R"))
    assert first.config == recipe("quickstart", {"loss.past_future": 0.0, "sandwich.offset": (0.05, 0.15)})


def test_recipe_without_flags_is_the_recipe() -> None:
    one_of_each = {type(recipe(name).method): name for name in RECIPES}  # of a method all have the same flags
    for name in one_of_each.values():
        assert parse_train([name]).config == recipe(name)


def test_old_flags_work_and_name_the_new_ones(capsys: Capture, refused: Refused) -> None:
    assert parse_train(["quickstart", "--views.colour", "0.5"]).config.views.color == 0.5
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "--views.color" in said
    assert "--davis" in refused(*"evaluate random:vitti16 --synthetic --binary".split())


@pytest.mark.parametrize("reach", ["--vit.reach=everywhere", "--vit.reach None"])
def test_a_reach_can_be_lifted(reach: str) -> None:
    assert recipe("vits16-short").vit.reach is not None
    assert parse_train(["vits16-short", *reach.split()]).config.vit.reach is None


# Tyro says these in a box of its own; the others are one line.
BY_TYRO = [
    ("train quickstart --loss.past-futur 0", "--loss.past-future "),
    ("train quickstart --lr 0.1", "--optim.base-lr "),
    ("train quickstart --loss.form papr", "papr"),
    ("train quickstart --optim.base-lr much", "much"),
    ("train quickstart --sandwich.offset 0.1", "--sandwich.offset"),
    ("train quickstart twice", "twice"),
    ("evaluate", "ENCODER"),
    ("evaluate random:vitti16 --davis d --reach far", "far"),
    ("score davis", "--truth"),
    ("propagate random:vitti16 clip.mp4", "--labels"),
    ("neighbors photos", "--encoder"),
    ("figure pca random:vitti16", "--out"),
    ("lab branch --out o --extra", "--extra"),
    ("demo --prot 1", "--port "),
]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        *BY_TYRO,
        ("train --run R quickstart", "needs a recipe first, such as quickstart"),
        ("train quickstrat", "Did you mean quickstart?"),
        ("trane quickstart", "Did you mean train?"),
        ("train vits16-k400", "--frames"),
        ("train quickstart --frames=", "--frames"),
        ("train quickstart --frames /no/such/store", "/no/such/store"),
        ("train quickstart --frames photographs:", "photographs:"),
        ("train quickstart --frames rendered+clips", "rendered does not exist"),
        ("train quickstart --optim.epochs 3", "optim.steps=600"),
        ("train quickstart --seed 99999999999999999999999", "seed="),
        ("train quickstart --runtime.device cuda:x", "runtime.device=cuda:x"),
        ("quickstart --videos 0", "--videos 0"),
        ("figure neighbors . --images 0 --out n.png", "--images 0"),
        ("prepare rendered:3", "STORE"),
        ("prepare rendered:x store", "rendered:x"),
        ("evaluate random:vits17 --davis d", "Did you mean vits16?"),
        ("evaluate random:vitti16 --davis d --protocol dion", "'dion'"),
        ("evaluate random:vitti16 --rendered --size 0 0", "--davis"),
        ("evaluate random:vitti16 --rendered --videos 0", "--videos 0"),
        ("score devis --truth d --predictions d", "devis"),
        ("score vip --binary --truth d --predictions d", "--binary has no effect on vip"),
        ("score davis --truth d --predictions nowhere", "nowhere"),
        ("propagate random:vitti16 clip.mp4 --labels a.png --out o", "clip.mp4"),
        ("propagate default clip.mp4 --labels a.png --protocol tcore-fine", "--protocol tcore --detail fine"),
        ("export random:vitti16 out", "--format"),
        ("export nothing out.pth", "nothing"),
        ("figure pac random:vitti16", "Did you mean pca?"),
        ("figure sandwich nowhere --out s.png", "nowhere"),
        ("figure propagation random:vitti16 rendered_cat.mp4 --out s.png", "--labels FIRST.png"),
        ("figure propagation random:vitti16 --davis a --vip b --out s.png", "--davis and --vip"),
        ("figure propagation random:vitti16 --vip b --binary --out s.png", "--binary goes with --davis"),
        ("demo --port 70000", "--port 70000"),
        ("demo --max-frames 0", "--max-frames 0"),
    ],
)
def test_bad_input_is_named_with_exit_code_2(
    arguments: str, expected: str, refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = refused if (arguments, expected) in BY_TYRO else refused.in_one_line
    assert expected in said(*arguments.split())
    assert list(tmp_path.iterdir()) == []


def test_folders_without_usable_frames_are_refused(tmp_path: Path, refused: Refused) -> None:
    train = ["train", "quickstart", "--run", str(tmp_path / "run"), "--frames"]
    folder = tmp_path / "store" / "video"
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("no frames here")
    assert str(tmp_path) in refused.in_one_line(*train, str(tmp_path / "store"))
    assert str(tmp_path) in refused.in_one_line(*train, f"photographs:{tmp_path}")
    for index in range(3):
        Image.new("RGB", (40, 40)).save(folder / f"{index}.jpg")
    assert "3 frames" in refused.in_one_line(*train, str(tmp_path / "store"))
    assert not (tmp_path / "run").exists()


def test_a_run_folder_that_is_not_one_is_refused(tmp_path: Path, refused: Refused) -> None:
    (tmp_path / "letter.txt").write_text("dear ...")
    for run in (tmp_path, tmp_path / "letter.txt" / "run"):
        assert str(tmp_path) in refused.in_one_line("train", "quickstart", "--run", str(run), *TINY)
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]


def test_training_prints_progress_and_the_encoder_and_keeps_its_settings(
    tmp_path: Path, capsys: Capture, refused: Refused
) -> None:
    train = ["train", "quickstart", "--run", str(tmp_path / "run"), *TINY]
    main([*train, "--runtime.log-every", "1"])
    printed = capsys.readouterr()
    for word in ("step 2/2", "ETA", "samples/s", "wait"):
        assert word in printed.err
    assert printed.out == f"encoder: {tmp_path / 'run' / 'encoder.safetensors'}\n"
    assert "loss.koleo 0.1 -> 0.5" in refused.in_one_line(*train, "--loss.koleo", "0.5")


def test_plan_prints_what_a_run_takes_and_writes_nothing(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    main(["train", "quickstart", "--plan", *TINY])
    printed = capsys.readouterr().out
    for word in ("parameters", "batch", "steps", "memory", "samples/s", "dino"):
        assert word in printed
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_its_flags(verb: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as stop:
        main([verb, "--help"])
    assert stop.value.code == 0
    assert f"usage: tcore {verb}" in capsys.readouterr().out


def test_help_of_a_recipe_shows_its_values(capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        main(["train", "vitb16-k400", "--help"])
    printed = capsys.readouterr().out
    assert "0.13" in printed
    assert "--optim.matching-lr" in printed
    assert "--sandwich.offset" in printed


def test_help_loads_no_large_package() -> None:
    code = """
import sys
from tcore.cli.main import main
for words, more in (("--help", "tyro PIL"), ("train quickstart --help", ""), ("figure failures --help", "")):
    try:
        main(words.split())
    except SystemExit:
        pass
    assert not {"torch", "numpy", "matplotlib", *more.split()} & set(sys.modules), words
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert all(words in done.stdout for words in ("usage: tcore train", "usage: tcore figure failures"))


def test_library_imports_without_the_packages_of_the_command_line() -> None:
    code = """
import sys
for name in ("tyro", "av", "tensorboard", "torchvision", "timm", "starlette", "uvicorn"):
    sys.modules[name] = None
import tcore, tcore.training.plan, tcore.quickstart
for name in tcore._HOMES:
    getattr(tcore, name)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("workers", ["0", "2"])
def test_broken_frame_is_one_line_that_names_it_whoever_reads_it(
    workers: str, tmp_path: Path, refused: Refused
) -> None:
    folder = tmp_path / "store" / "video"
    folder.mkdir(parents=True)
    for index in range(8):
        (folder / f"{index}.jpg").write_bytes(b"no image")
    frames = ["--frames", str(tmp_path / "store"), "--run", str(tmp_path / "run")]
    *_, last = refused("train", "quickstart", *frames, *TINY, "--runtime.workers", workers).splitlines()
    assert re.match(rf"tcore: error: 11 clips .*{folder}/\d.jpg", last)
