"""Folders for the Hugging Face Hub: written, described, and read back."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tcore
from tcore.cli.main import main
from tcore.errors import InputError
from tcore.evaluation.encoder import Encoder
from tcore.evaluation.evaluate import evaluate
from tcore.evaluation.export import export
from tests.evaluation.layouts import heldout_videos, write_davis
from tests.evaluation.networks import encoder, images


@pytest.fixture(scope="module")
def mine() -> Encoder:
    found = encoder(reach=2)
    found.notes = ["trained on three rendered videos"]
    return found


@pytest.fixture(scope="module")
def folder(mine: Encoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exported encoder with a score."""
    home = tmp_path_factory.mktemp("hub")
    davis = write_davis(home / "davis", heldout_videos(1, num_frames=3, size=64))
    evaluate(mine, davis=davis, size=(64, 64), binary=True, out=home / "results")
    export(mine, home / "model", "hub", license="mit", results=home / "results")
    return home / "model"


def test_folder_for_the_hub_has_weights_sizes_and_a_card_with_numbers_and_their_command(
    folder: Path, mine: Encoder
) -> None:
    assert {path.name for path in folder.iterdir()} == {"README.md", "config.json", "model.safetensors"}
    config = json.loads((folder / "config.json").read_text())
    assert config["tcore"]["vit"]["reach"] == 2
    card = (folder / "README.md").read_text()
    header = re.match(r"---\n(.*?)\n---\n", card, flags=re.DOTALL)
    assert header is not None
    assert {"license: mit", "library_name: tcore"} <= set(header[1].splitlines())
    assert "tcore evaluate hf:REPOSITORY --davis DAVIS --binary --size 64 64\n" in card
    score = json.loads((folder.parent / "results" / "results.json").read_text())["benchmarks"]["davis"][
        "scores"
    ]
    assert f"| {100 * score['J&F']:.1f} |" in card
    assert "not comparable with the published rows: 1 instead of 30 clips" in card
    assert "trained on three rendered videos" in card
    assert "patches up to 2 away" in card


def test_folder_for_the_hub_loads_back_by_every_name(
    folder: Path, mine: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def download(name: str, **options: Any) -> str:
        asked.append({"name": name, **options})
        return str(folder)

    hub = SimpleNamespace(
        snapshot_download=download, hf_hub_download=lambda name, file: str(Path(download(name)) / file)
    )
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    by_name = tcore.from_pretrained("me/mine", revision="v1")
    assert asked[0]["revision"] == "v1"
    assert asked[0]["allow_patterns"] == ["config.json", "model.safetensors"]
    assert by_name.name == "hf:me/mine"
    others = [tcore.load_encoder(name) for name in (str(folder), f"hf:{folder}", "hf:me/mine")]
    for back in (by_name, tcore.from_pretrained(folder), *others):
        assert back.fingerprint() == mine.fingerprint()
        assert back.notes == mine.notes
        assert torch.equal(back.features(images()), mine.features(images()))


def test_what_a_model_card_cannot_say_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--license is missing"):
        export(encoder(), tmp_path / "out", "hub")
    with pytest.raises(InputError, match="--license 'a: b'"):
        export(encoder(), tmp_path / "out", "hub", license="a: b")
    with pytest.raises(InputError, match="scores of other weights"):
        export(encoder(depth=1), tmp_path / "out", "hub", "mit", folder.parent / "results")
    with pytest.raises(InputError, match="--license and --results are for"):
        export(encoder(), tmp_path / "out", "timm", "mit")
    assert not list(tmp_path.iterdir())


def test_missing_hub_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(InputError, match=r"'me/mine', which is no folder here.*pip install huggingface_hub"):
        tcore.from_pretrained("me/mine")


def test_the_default_encoder_knows_its_license(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["export", "default", str(tmp_path / "default"), "--format", "hub"])
    assert "tcore.from_pretrained" in capsys.readouterr().out
    card = (tmp_path / "default" / "README.md").read_text()
    assert "license: apache-2.0\n" in card
    assert "None were given" in card
