"""The encoder that comes with the package: made from a run, found by one word, part of the wheel."""

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from experiments.default_search import candidate
from tcore import InputError, load_encoder, recipe
from tcore.cli.main import main
from tcore.config import from_dict
from tcore.data.rendered import render_video
from tcore.demo.engine import load_engine
from tcore.evaluation import encoders
from tcore.evaluation.encoders import shipped
from tcore.evaluation.export import ship
from tcore.show.features import load_matcher
from tests.conftest import Refused

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "default-encoder.md").read_text(encoding="utf-8")


@pytest.fixture
def folder(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installation that came with the encoder of the run."""
    ship(load_encoder(whole), tmp_path / "encoders")
    monkeypatch.setattr(encoders, "FOLDER", tmp_path / "encoders")
    return tmp_path / "encoders"


def test_this_checkout_comes_with_one_that_its_card_describes() -> None:
    files, encoder = shipped(), load_encoder("default")
    assert files.weights.stat().st_size < 12e6
    card, matching = (json.loads(x.read_text(encoding="utf-8")) for x in (files.card, files.matching_card))
    # As the page's commands say, and as a GPU resolves it.
    assert "python experiments/default_search.py train --clips CLIPS --runs RUNS --only simclr" in PAGE
    made_with = candidate("simclr", {"optim.precision": "bf16"})
    assert replace(from_dict(card["config"]), runtime=made_with.runtime) == made_with
    vit = encoder.backbone
    assert (vit.dim, vit.depth, vit.patch_size, vit.reach) == (192, 12, 16, 3)
    assert card["step"] == made_with.optim.steps
    assert f"`{encoder.fingerprint()}`" in PAGE
    for path in files:
        assert f"| `{path.name}` | `{hashlib.sha256(path.read_bytes()).hexdigest()[:16]}` |" in PAGE
    assert sum(path.stat().st_size for path in encoders.FOLDER.iterdir()) < 26e6
    # The matching module is that of a run of T-CoRe, with a student of its own.
    assert "tcore train vitti16-short --optim.steps 1500 --frames RENDERED" in PAGE
    made_with = recipe("vitti16-short", {"optim.steps": 1500, "optim.precision": "bf16"})
    assert replace(from_dict(matching["config"]), runtime=made_with.runtime) == made_with
    assert load_matcher("default") is not None


def test_the_first_command_of_the_readme_propagates_a_mask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    video = render_video(4, 0, num_frames=20, size=256)
    (tmp_path / "clip").mkdir()
    for number, frame in enumerate(video.frames[:3]):
        Image.fromarray(frame).save(tmp_path / "clip" / f"{number:05d}.png")
    Image.fromarray(video.objects[0]).save(tmp_path / "first.png")
    main(["propagate", "default", "clip", "--labels", "first.png", "--no-overlay"])
    assert "propagated/clip: 3 frames" in capsys.readouterr().out
    found = np.asarray(Image.open(tmp_path / "propagated/clip/masks/00002.png"))
    truth = video.objects[2]
    assert (found == truth)[truth > 0].mean() > 0.75  # an untrained encoder: 0.33


def test_the_word_is_not_a_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    monkeypatch.chdir(tmp_path)
    for words in ("export default new --format default", "evaluate default --rendered --every-checkpoint"):
        assert "./default" in refused(*words.split())
    assert not list(tmp_path.iterdir())


def test_half_precision_on_disk_is_single_precision_in_use(
    whole: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = load_file(folder / "default.safetensors")
    assert {value.dtype for value in stored.values()} == {torch.float16}
    size = (folder / "default.safetensors").stat().st_size
    assert size < 0.6 * (whole / "encoder.safetensors").stat().st_size
    ours, theirs = load_encoder("default"), load_encoder(whole)
    assert ours.name == "default"
    assert {p.dtype for p in ours.parameters()} == {torch.float32}
    frames = torch.randint(0, 255, (2, 32, 48, 3), dtype=torch.uint8)
    assert torch.allclose(ours(frames), theirs(frames), atol=2e-2)
    assert load_encoder("default", layer=0).backbone.depth == 1
    # The word wins over a folder, and a path over the word.
    monkeypatch.chdir(tmp_path)
    Path("default").symlink_to(whole)
    assert load_encoder("default").fingerprint() == ours.fingerprint() != theirs.fingerprint()
    assert load_encoder("./default").fingerprint() == theirs.fingerprint()
    assert load_encoder(Path("default")).fingerprint() == theirs.fingerprint()
    monkeypatch.setattr(encoders, "FOLDER", tmp_path)
    with pytest.raises(InputError, match=r"default\.safetensors does not exist"):
        load_encoder("default")


def test_figures_and_the_demo_take_the_word_with_its_matching_module(
    whole: Path,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    ours, theirs = load_engine("default", "coarse").matcher, load_matcher(whole)
    assert ours is not None
    assert theirs is not None
    for a, b in zip(ours.match.parameters(), theirs.match.parameters(), strict=True):
        assert a.dtype == torch.float32
        assert torch.allclose(a, b, atol=1e-3)
    main(["figure", "attention", "default", "--out", str(tmp_path / "attention.png")])
    assert "cross-attention of patches" in capsys.readouterr().out


def test_files_of_an_earlier_version_have_one_card_for_both_networks(
    whole: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(folder, tmp_path / "old")
    (tmp_path / "old" / "default-matching.json").unlink()
    monkeypatch.setattr(encoders, "FOLDER", tmp_path / "old")
    found, theirs = load_matcher("default"), load_matcher(whole)
    assert found is not None
    assert theirs is not None
    assert [p.shape for p in found.match.parameters()] == [p.shape for p in theirs.match.parameters()]


def test_the_command_makes_it_and_overwrites_nothing(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], refused: Refused
) -> None:
    words = ["export", str(whole), str(tmp_path / "new"), "--format", "default"]
    main(words)
    assert "default.safetensors" in capsys.readouterr().out
    card = json.loads((tmp_path / "new" / "default.json").read_text())
    assert (card["step"], card["precision"], card["vit"]["dim"]) == (6, "fp16", 32)
    assert "exists: remove it" in refused(*words)
    encoder = load_encoder(whole)
    next(iter(encoder.parameters())).data.fill_(1e6)
    with pytest.raises(InputError, match=r"reaches 1e\+06: half precision ends at 65504"):
        ship(encoder, tmp_path / "beyond")
    assert not (tmp_path / "beyond").exists()


def test_the_card_tells_the_step_of_the_file_and_nothing_of_a_run_nearby(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ship(load_encoder(whole / "encoders" / "step-000003.safetensors"), tmp_path / "kept")
    names = ("default.json", "default-matching.json")
    assert [json.loads((tmp_path / "kept" / name).read_text())["step"] for name in names] == [3, 6]
    monkeypatch.chdir(whole)
    files = ship(load_encoder("random:vitti16"), tmp_path / "random")
    assert "step" not in json.loads(files[1].read_text())
    assert sorted(files) == sorted((tmp_path / "random").iterdir())
