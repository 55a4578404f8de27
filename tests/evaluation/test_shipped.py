"""The encoder that comes with the package: made from a run, found by one word, part of the wheel."""

import dataclasses
import hashlib
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from tcore import InputError, evaluate, load_encoder, recipe, train
from tcore.cli.demo import usual_encoder
from tcore.cli.main import main
from tcore.data.rendered import render_video
from tcore.demo.engine import load_engine
from tcore.evaluation import shipped
from tcore.show.matcher import load_matcher
from tests.tiny import tiny

ROOT = Path(__file__).parents[2]
CARD = (ROOT / "docs" / "default-encoder.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tiny(optim__steps=2), tmp_path_factory.mktemp("runs") / "run", quiet=True)


def test_this_checkout_comes_with_one_that_its_card_describes() -> None:
    files = shipped.shipped()
    assert files is not None
    assert files.weights.stat().st_size < 12e6
    card = json.loads(files.card.read_text(encoding="utf-8"))
    # As the card's command says, and as a GPU resolves it.
    assert "tcore train vitti16-short --optim.steps 1500 --frames RENDERED" in CARD
    made_with = recipe("vitti16-short", {"optim.steps": 1500, "optim.precision": "bf16"})
    settings = json.loads(json.dumps(dataclasses.asdict(made_with)))
    assert card["config"] | {"runtime": settings["runtime"]} == settings
    vit = load_encoder("default").backbone
    assert (vit.dim, vit.depth, vit.patch_size, vit.reach) == (192, 12, 16, 3)
    assert card["step"] == card["matching_step"] == settings["optim"]["steps"]
    assert f"`{load_encoder('default').fingerprint()}`" in CARD


def test_its_matching_module_is_that_of_the_same_run() -> None:
    files = shipped.need_shipped()
    teacher, student = load_file(files.weights), load_file(files.matching)
    for name, weight in teacher.items():
        if weight.ndim == 2:
            ours, theirs = (x.flatten().float() for x in (weight, student[f"backbone.{name}"]))
            assert torch.cosine_similarity(ours, theirs, dim=0) > 0.9, name
    assert load_matcher("default") is not None


def test_the_files_are_those_of_the_model_card() -> None:
    for path in shipped.need_shipped():
        assert f"| `{path.name}` | `{hashlib.sha256(path.read_bytes()).hexdigest()[:16]}` |" in CARD


def test_the_first_command_of_the_readme_carries_a_mask_also_without_a_place_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    video = render_video(4, 0, num_frames=20, size=256)
    for number, frame in enumerate(video.frames[:3]):
        path = tmp_path / "clip" / f"{number:05d}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(frame).save(path)
    Image.fromarray(video.objects[0]).save(tmp_path / "first.png")
    words = ["propagate", "default", str(tmp_path / "clip"), "--labels", str(tmp_path / "first.png")]
    main([*words, "--no-overlay"])
    assert "propagated/clip: 3 frames" in capsys.readouterr().out
    main([*words, "--out", str(tmp_path / "masks"), "--no-overlay"])
    place = "masks/00002.png"
    assert (tmp_path / "masks" / place).read_bytes() == (tmp_path / "propagated/clip" / place).read_bytes()
    carried = np.asarray(Image.open(tmp_path / "masks" / place))
    truth = video.objects[2]
    assert (carried == truth)[truth > 0].mean() > 0.75  # an untrained encoder: 0.33


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("export default new --format default", "default is in that form already: copy .*encoders"),
        ("evaluate default --synthetic --every-checkpoint", r"a run folder of that name is \./default"),
        ("evaluate defualt --synthetic", r"defualt does not exist \(did you mean default\?\)"),
    ],
)
def test_the_word_is_no_run_folder(
    words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(words.split())
    assert end.value.code == 2
    assert re.search(said, capsys.readouterr().err)
    assert not list(tmp_path.iterdir())


def test_it_carries_masks_further_than_an_untrained_one() -> None:
    untrained, ours = (
        evaluate(load_encoder(name), synthetic=3)["benchmarks"]["synthetic"]["scores"]["J&F"]
        for name in ("random:vitti16", "default")
    )
    assert ours > untrained + 0.05


@pytest.fixture
def folder(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installation that came with the encoder of the run."""
    shipped.ship(load_encoder(run), run, tmp_path / "encoders")
    monkeypatch.setattr(shipped, "FOLDER", tmp_path / "encoders")
    return tmp_path / "encoders"


def test_an_installation_without_one_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    with pytest.raises(InputError, match=r"came without a default encoder .* tcore quickstart"):
        load_encoder("default")
    monkeypatch.chdir(tmp_path)
    assert usual_encoder() == ""


def test_half_precision_on_disk_is_single_precision_in_use(run: Path, folder: Path) -> None:
    stored = load_file(folder / "default.safetensors")
    assert {value.dtype for value in stored.values()} == {torch.float16}
    size = (folder / "default.safetensors").stat().st_size
    assert size < 0.6 * (run / "encoder.safetensors").stat().st_size
    ours, theirs = load_encoder("default"), load_encoder(run)
    assert ours.name == "default"
    assert {p.dtype for p in ours.parameters()} == {torch.float32}
    frames = torch.randint(0, 255, (2, 32, 48, 3), dtype=torch.uint8)
    found = ours(frames)
    assert found.dtype == torch.float32
    assert torch.allclose(found, theirs(frames), atol=2e-2)
    assert load_encoder("default", layer=0).backbone.depth == 1


def test_the_word_wins_over_a_folder_and_a_path_over_the_word(
    run: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("default").symlink_to(run)
    assert load_encoder("default").fingerprint() != load_encoder(run).fingerprint()
    assert load_encoder("./default").fingerprint() == load_encoder(run).fingerprint()
    assert load_encoder(Path("default")).fingerprint() == load_encoder(run).fingerprint()


def test_the_matching_module_comes_along(run: Path, folder: Path) -> None:
    ours, theirs = load_matcher("default"), load_matcher(run)
    assert ours is not None
    assert theirs is not None
    for a, b in zip(ours.match.parameters(), theirs.match.parameters(), strict=True):
        assert a.dtype == torch.float32
        assert torch.allclose(a, b, atol=1e-3)
    assert load_engine("default").matcher is not None


def test_figures_and_the_demo_take_the_word(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert usual_encoder() == "default"
    for kind in ("pca", "attention"):
        main(["figure", kind, "default", "--out", str(tmp_path / f"{kind}.png")])
    assert "cross-attention of patches" in capsys.readouterr().out


def test_the_command_makes_it_and_writes_over_nothing(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["export", str(run), str(tmp_path / "new"), "--format", "default"]
    main(words)
    assert "default.safetensors" in capsys.readouterr().out
    card = json.loads((tmp_path / "new" / "default.json").read_text())
    assert (card["step"], card["precision"], card["vit"]["dim"]) == (2, "fp16", 32)
    with pytest.raises(SystemExit):
        main(words)
    assert "exists: remove it" in capsys.readouterr().err


def test_the_card_tells_the_step_of_the_file_and_nothing_of_a_run_nearby(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = run / "encoders" / "step-000001.safetensors"
    shipped.ship(load_encoder(kept), kept, tmp_path / "kept")
    card = json.loads((tmp_path / "kept" / shipped.CARD).read_text())
    assert (card["step"], card["matching_step"]) == (1, 2)
    monkeypatch.chdir(run)
    shipped.ship(load_encoder("random:vitti16"), "random:vitti16", tmp_path / "random")
    card = json.loads((tmp_path / "random" / shipped.CARD).read_text())
    assert "step" not in card
    assert not (tmp_path / "random" / shipped.MATCHING).exists()


def test_weights_beyond_half_precision_are_refused(run: Path, tmp_path: Path) -> None:
    encoder = load_encoder(run)
    next(iter(encoder.parameters())).data.fill_(1e6)
    with pytest.raises(InputError, match="reaches 1e\\+06: half precision ends at 65504"):
        shipped.ship(encoder, run, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_wheel_holds_it(tmp_path: Path) -> None:
    """Built with the settings of the package, from a small package."""
    pytest.importorskip("setuptools")
    project = tmp_path / "project"
    (project / "tcore" / "encoders").mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (project / name).write_bytes((ROOT / name).read_bytes())
    (project / "tcore" / "__init__.py").touch()
    (project / "tcore" / "encoders" / "default.json").write_text("{}")
    save_file({"x": torch.zeros(1)}, project / "tcore" / "encoders" / "default-matching.safetensors")
    save_file({"x": torch.zeros(1)}, project / "tcore" / "encoders" / "default.safetensors")
    code = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    command = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path)]
    subprocess.run(command, cwd=project, check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {f"tcore/encoders/{name}" for name in (shipped.WEIGHTS, shipped.CARD, shipped.MATCHING)} <= names
