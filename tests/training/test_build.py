"""From settings to networks, schedule, device and precision."""

import math
import os
from pathlib import Path

import pytest
import torch

from tcore.config import Config, ViewsConfig, VitSpec
from tcore.device import choose_device, choose_dtype
from tcore.errors import InputError
from tcore.methods.settings import LossConfig, MatchingConfig
from tcore.methods.settings_groups import HeadConfig, TeacherConfig
from tcore.model.vit import Block, LayerScale
from tcore.training.wrapping import COMPILED, keep_compiled
from tests.methods.tiny_models import LOCALS, PATCH, SIZE, SMALL, STAY, batch, seeded
from tests.tiny import build, change


def tiny_config() -> Config:
    return change(
        Config(),
        views=ViewsConfig(global_size=SIZE, local_size=SMALL, num_local=LOCALS),
        vit=VitSpec(dim=48, depth=2, num_heads=3, patch_size=PATCH),
        matching=MatchingConfig(num_heads=4, gain=2.0, num_blocks=2, temperature=0.5),
        head=HeadConfig(hidden=64, bottleneck=32, prototypes=32, train_gains=False),
        teacher=TeacherConfig(targets="sinkhorn", center_momentum=0.8),
        loss=LossConfig(form="release", student_temperature=0.2),
    )


def test_settings_reach_the_networks() -> None:
    config = tiny_config()
    tcore = build(config)
    vit = tcore.student.backbone
    assert (vit.dim, len(vit.blocks), vit.patch_size, vit.native_grid) == (48, 2, PATCH, 4)
    for block in vit.blocks:
        assert isinstance(block, Block)
        assert block.attn.num_heads == 3
        assert isinstance(block.ls1, LayerScale)
        assert (block.ls1.gamma == 1e-5).all()
    assert tcore.match is not None
    assert len(tcore.match.blocks) == 2
    assert tcore.student.head.prototypes.directions.shape == (32, 32)
    assert not tcore.student.head.prototypes.gains.requires_grad
    assert (tcore.form, tcore.targets, tcore.student_temperature) == ("release", "sinkhorn", 0.2)
    assert tcore.frame_center.momentum == tcore.patch_center.momentum == 0.8


def test_parts_are_what_is_trained() -> None:
    tcore = build(tiny_config())
    parts = tcore.parts()
    assert set(parts) == {"backbone", "head", "match"}
    assert "prototypes.gains" not in dict(parts["head"].parameters)
    assert set(build(change(tiny_config(), auxiliary="none")).parts()) == {"backbone", "head"}


def test_model_is_a_function_of_the_seed_alone() -> None:
    state = torch.get_rng_state()
    first = build(tiny_config()).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(1)
    again = build(tiny_config()).state_dict()
    other = build(change(tiny_config(), seed=1)).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["student.backbone.pos_embed"], other["student.backbone.pos_embed"])


def test_model_with_published_settings_starts_at_the_uniform_answer() -> None:
    """Once the center has caught up; the targets of the very first steps are not centered yet."""
    config = change(
        tiny_config(),
        vit=VitSpec(dim=96, depth=2, num_heads=3, patch_size=PATCH),
        head=HeadConfig(hidden=256, prototypes=512),
        teacher=TeacherConfig(),
        loss=LossConfig(),
    )
    tcore = build(config)
    for step in range(25):
        losses = tcore(batch(seed=step), {"teacher_temperature": 0.04}, seeded())
        tcore.finish_step(STAY)
    assert losses["dino"].item() == pytest.approx(math.log(512), rel=0.05)


def test_device_that_is_none_is_refused_by_name() -> None:
    assert choose_device("cpu") == torch.device("cpu")
    with pytest.raises(InputError, match=r"runtime\.device=gpu"):
        choose_device("gpu")
    if not torch.cuda.is_available():
        assert choose_device("auto") == torch.device("cpu")
        with pytest.raises(InputError, match=r"runtime\.device=cuda"):
            choose_device("cuda")


def test_precision_follows_the_device_unless_given() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert choose_dtype("auto", cpu) == choose_dtype("fp32", gpu) == torch.float32
    assert choose_dtype("auto", gpu) == choose_dtype("bf16", cpu) == torch.bfloat16


def test_compiled_kernels_stay_in_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(COMPILED, "own")
    keep_compiled()
    assert os.environ[COMPILED] == "own"
    monkeypatch.delenv(COMPILED)
    keep_compiled()
    assert os.environ[COMPILED] == str(tmp_path / "tcore" / "compiled")


def test_without_a_cache_to_write_to_pytorch_keeps_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.delenv(COMPILED)
    keep_compiled()
    assert COMPILED not in os.environ
