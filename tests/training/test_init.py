import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tcore import Config, InputError, load_encoder, pretrain, train
from tcore.data.loader import load
from tcore.evaluation.encoder import Encoder
from tcore.evaluation.export import export
from tcore.methods import build_source
from tcore.model.vit import VisionTransformer
from tcore.pretrain import read_init
from tcore.training.checkpoint import apply_init, encoder_card
from tcore.training.loop import open_store
from tcore.training.optim import build_schedule
from tcore.training.plan import plan
from tcore.training.step import Trainer
from tests.conftest import Refused
from tests.evaluation.networks import network as any_network
from tests.tiny import TINY, as_tcore, flags_of, tiny
from tests.training.jobs import StoppedError, stopping_at


def network(**changes: Any) -> VisionTransformer:
    """Of the size of the tiny run."""
    return any_network(**{"depth": 2, "image_size": 32, "num_registers": 4} | changes)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """An encoder of the size of the tiny run."""
    return export(Encoder(network(), "mine"), tmp_path / "mine.safetensors", "safetensors").path


def trained(config: Config, steps: int) -> Trainer:
    """A trainer that started from the weights of the settings and made some steps."""
    trainer = Trainer(config)
    found = read_init(config)
    assert found is not None
    apply_init(found, trainer.method)
    source = build_source(open_store(config, None), config)
    schedule = build_schedule(config, trainer.method, source.steps_per_epoch)
    parts = load(source, 0, steps, trainer.device)
    for step in range(steps):
        trainer.step(parts, step, schedule.at(step))
    return trainer


def same(module: nn.Module, state: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, state[name]) for name, value in module.state_dict().items())


def test_student_and_teacher_start_as_the_encoder(file: Path) -> None:
    model = as_tcore(trained(tiny(init=str(file)), steps=0).method)
    expected = load_encoder(file).backbone.state_dict()
    assert same(model.student.backbone, expected)
    assert same(model.teacher.backbone, expected)


def test_the_card_of_an_encoder_holds_no_whole_path(file: Path) -> None:
    card = encoder_card(tiny(init=str(file)), step=3)
    assert card["config"]["init"].endswith(f"{file.parent.name}/{file.name}")
    assert str(file) not in json.dumps(card)


@pytest.mark.parametrize(("frozen", "steps"), [(2, 2), (2, 3), (0, 2)])
def test_backbone_stays_for_the_frozen_steps_and_moves_after(file: Path, frozen: int, steps: int) -> None:
    config = tiny(init=str(file), optim__freeze_backbone_steps=frozen, optim__weight_decay=(0.5, 0.5))
    before, after = as_tcore(trained(config, 0).method), as_tcore(trained(config, steps).method)
    assert same(after.student.backbone, dict(before.student.backbone.state_dict())) == (steps == frozen)
    assert not same(after.student.head, dict(before.student.head.state_dict()))
    assert before.match is not None
    assert after.match is not None
    assert not same(after.match, dict(before.match.state_dict()))


def test_run_notes_what_it_started_from(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(tiny(init=str(file), optim__steps=1, optim__freeze_backbone_steps=1), tmp_path / "run")
    fingerprint = load_encoder(file).fingerprint()
    assert json.loads((run / "init.json").read_text()) == {"encoder": str(file), "fingerprint": fingerprint}
    assert json.loads((run / "config.json").read_text())["init"] == str(file)
    said = capsys.readouterr().err
    assert f"starts from {file} (weights {fingerprint}), student and teacher" in said
    assert "backbone is frozen for the first" in said  # it never moves


def test_another_reach_than_that_of_the_start_is_said(file: Path) -> None:
    def lines(config: Config) -> str:
        init = read_init(config)
        assert init is not None
        return "\n".join(init.lines)

    assert "attended everywhere, and now attend up to 2 patches away (--vit.reach)" in lines(
        tiny(init=str(file), vit__reach=2)
    )
    assert "attend" not in lines(tiny(init=str(file)))


def test_resumed_run_equals_uninterrupted_run_and_needs_its_start_no_more(file: Path, tmp_path: Path) -> None:
    config = tiny(init=str(file), optim__freeze_backbone_steps=3, checkpoint_every=2)
    whole = train(config, tmp_path / "whole", quiet=True)
    with pytest.raises(StoppedError):
        train(config, tmp_path / "parts", quiet=True, on_step=stopping_at(3))
    file.unlink()
    parts = train(config, tmp_path / "parts", quiet=True)
    assert (parts / "encoder.safetensors").read_bytes() == (whole / "encoder.safetensors").read_bytes()
    assert (parts / "init.json").read_text() == (whole / "init.json").read_text()


def test_run_goes_on_with_its_own_start_alone(file: Path, tmp_path: Path) -> None:
    run = train(tiny(init=str(file), optim__steps=1), tmp_path / "run", quiet=True)
    for other in ("random:vits16", None):
        with pytest.raises(InputError, match=f"init {file} -> {other}"):
            train(tiny(init=other, optim__steps=1), run, quiet=True)


def test_run_that_never_saved_refuses_a_file_that_changed(file: Path, tmp_path: Path) -> None:
    config = tiny(init=str(file), optim__steps=1)
    run = train(config, tmp_path / "run", quiet=True)
    (run / "checkpoint.pt").unlink()
    train(config, run, quiet=True)
    (run / "checkpoint.pt").unlink()
    file.unlink()
    other = network()
    nn.init.zeros_(other.cls_token)
    export(Encoder(other, "other"), file, "safetensors")
    with pytest.raises(InputError, match=r"began with other weights of .*mine.safetensors"):
        train(config, run, quiet=True)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"dim": 48}, "vit.dim 48 instead of 32: add --vit.dim 48."),
        ({"num_registers": 0}, "vit.num_registers 0 instead of 4: add --vit.num-registers 0."),
        (
            {"depth": 3, "num_heads": 4},
            "vit.depth 3 instead of 2, vit.num_heads 4 instead of 2: add --vit.depth 3 --vit.num-heads 4.",
        ),
    ],
)
def test_encoder_of_another_size_is_one_line_with_the_flags_that_fit(
    changes: dict[str, int], line: str, tmp_path: Path, refused: Refused
) -> None:
    path = export(Encoder(network(**changes), "mine"), tmp_path / "mine.pth", "torch").path
    said = refused("train", "quickstart", "--init", path, "--run", tmp_path / "run", *flags_of(TINY))
    assert said == f"tcore: error: init={path} does not fit, it has {line}\n"
    assert not (tmp_path / "run").exists()  # so that the same --run takes the corrected command


def test_positions_of_another_grid_are_resized_with_a_line(tmp_path: Path) -> None:
    vit = network(image_size=56).eval()
    path = export(Encoder(vit, "mine"), tmp_path / "mine.pth", "torch").path
    found = read_init(tiny(init=str(path)))
    assert found is not None
    assert "  positions resized from 7x7 to 4x4, as the encoder itself does" in found.lines
    model = as_tcore(trained(tiny(init=str(path)), steps=0).method).eval()
    images = torch.randn(1, 3, 32, 32)
    assert torch.equal(model.student.backbone(images).patches, vit(images).patches)


def test_what_the_file_lacks_is_said(tmp_path: Path) -> None:
    state = {
        name: value
        for name, value in network(num_registers=0).state_dict().items()
        if "gamma" not in name and name not in ("mask_token", "register_tokens")
    }
    torch.save({"state_dict": state, "vit": {"num_heads": 2}}, tmp_path / "plain.pth")
    config = tiny(init=str(tmp_path / "plain.pth"), vit__num_registers=0)
    found = read_init(config)
    assert found is not None
    assert "  not in the file: LayerScale (1), mask token (0)" in found.lines
    gains = as_tcore(trained(config, 0).method).student.backbone.state_dict()["blocks.1.ls2.gamma"]
    assert torch.equal(gains, torch.ones(32))


def test_model_of_another_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from tcore.evaluation.encoder import Adapted

    foreign = Encoder(Adapted(nn.Identity(), lambda x: x, patch_size=8), "timm:someone")
    monkeypatch.setattr(pretrain, "load_encoder", lambda _: foreign)
    with pytest.raises(InputError, match="init=timm:someone runs in the code of another package"):
        read_init(tiny(init="timm:someone"))


def test_plan_shows_the_start_and_writes_nothing(file: Path) -> None:
    said = plan(tiny(init=str(file)), None, read_init=read_init)
    assert f"starts from   {file} (weights " in said
    assert list(file.parent.iterdir()) == [file]
