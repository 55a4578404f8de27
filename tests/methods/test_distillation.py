"""DINO, iBOT and DINOv2: what they see; masked patches, their prototypes, temperature and center."""

from typing import Any

import numpy as np
import pytest
import torch

from tcore import Config, methods
from tcore.config import validate
from tcore.data.loader import render_batch
from tcore.data.masking import sample_masks
from tcore.data.stores import FrameStore
from tcore.methods.batch import Batch
from tcore.methods.distillation import SelfDistillation
from tcore.methods.sampling import FrameSampling
from tcore.methods.settings_groups import MaskingConfig
from tcore.training.optim import build_schedule
from tests.tiny import shrunk

VALUES = {"teacher_temperature": 0.05}


def ibot(**changes: Any) -> Config:
    settings = {"vit__drop_path": 0.0, "masking__smallest_block": 2, "masking__probability": 0.7}
    return validate(shrunk("vits16-ibot-k400", **(settings | changes)))


def build(config: Config) -> SelfDistillation:
    method = methods.build(config)
    assert type(method) is SelfDistillation
    return method


def batch_of(config: Config) -> Batch:
    source = methods.build_source(FrameStore.rendered(videos=5, frames=10, size=32), config)
    batch = render_batch(source.read(0, 0), torch.device("cpu"))
    assert isinstance(batch, Batch)
    return batch


def losses(config: Config, **values: float) -> dict[str, float]:
    found = build(config)(batch_of(config), VALUES | values)
    return {name: value.item() for name, value in found.items()}


def test_a_weight_of_0_leaves_its_term_and_its_work_out() -> None:
    assert list(losses(ibot())) == ["dino", "patch_teacher"]
    assert list(losses(ibot(loss__koleo=0.1))) == ["dino", "koleo", "patch_teacher"]
    without = ibot(loss__patch_teacher=0.0)
    assert losses(without) == pytest.approx({"dino": losses(ibot())["dino"]})
    model, patches = build(without), []
    model.observing = False
    model.teacher.backbone.norm.register_forward_hook(lambda module, x, made: patches.append(made.shape[1]))
    model(batch_of(without), VALUES)
    assert patches == [1]  # the teacher made frame tokens alone


def test_patches_may_have_a_temperature_and_prototypes_of_their_own() -> None:
    usual, colder = losses(ibot()), losses(ibot(), patch_teacher_temperature=0.02)
    assert colder["dino"] == usual["dino"]
    assert colder["patch_teacher"] != pytest.approx(usual["patch_teacher"], rel=1e-3)
    config = ibot(head__patch_prototypes=7, optim__freeze_last_layer_epochs=1)
    model = build(config)
    assert model.patch_center.value.shape == (7,)
    found = {}
    for model.fused in (True, False):
        found[model.fused] = model(batch_of(config), VALUES)["patch_teacher"].item()
    assert found[True] == pytest.approx(found[False], rel=1e-5)
    head = model.parts()["head"]
    last = [name for name, _ in head.parameters if name.startswith(head.last_layer)]
    assert {name.split(".")[0] for name in last} == {"prototypes", "patch_prototypes"}


def test_before_the_first_epoch_with_masks_nothing_is_masked() -> None:
    config = ibot(masking__start_epoch=2, teacher__patch_temperature=(0.05, 0.08))
    model = build(config)
    schedule = build_schedule(config, model, steps_per_epoch=3)
    assert [schedule.at(step).own["masked"] for step in (0, 5, 6)] == [0.0, 0.0, 1.0]
    warm = [schedule.at(step).own["patch_teacher_temperature"] for step in (0, 8)]
    assert warm[0] == 0.05
    batch = batch_of(config)
    assert batch.mask.any()
    before, after = (model(batch, VALUES | {"masked": masked}) for masked in (0.0, 1.0))
    assert before["patch_teacher"] == 0
    assert after["patch_teacher"] > 0
    clear = model(batch.unmasked(), VALUES)
    assert clear["dino"] == before["dino"]
    model.total(before).backward()
    assert model.student.backbone.mask_token.grad is not None  # all processes have all gradients


def test_without_masks_there_is_no_patch_term_and_no_mask_token_to_train() -> None:
    config = ibot(masking__probability=0.0)
    assert list(losses(config)) == ["dino"]
    assert "mask_token" not in [name for name, _ in build(config).parts()["backbone"].parameters]


def test_every_crop_draws_its_mask_for_itself_and_never_exceeds_it() -> None:
    rng = np.random.default_rng(0)
    masks = sample_masks(rng, 600, 14, MaskingConfig(draw="independent", smallest_block=16, fill=False))
    counts = masks.sum(axis=1)
    assert 0.42 < (counts > 0).mean() < 0.58
    assert counts.max() <= 98
    exact = sample_masks(
        rng, 40, 14, MaskingConfig(ratio=(0.3, 0.3), draw="independent", kind="random", probability=1.0)
    )
    assert set(exact.sum(axis=1)) == {58}
    small = sample_masks(
        rng, 300, 14, MaskingConfig(ratio=(0.5, 0.5), probability=1.0, largest_block=4, fill=False)
    )
    assert small.sum(axis=1).max() <= 98
    assert small.sum(axis=1).mean() > 80


def test_a_sample_is_one_frame_of_the_wanted_stretch_and_nothing_is_masked() -> None:
    config = shrunk("vits16-dino-k400", frame__current=(0.2, 0.5))
    source = methods.build_source(FrameStore.rendered(videos=4, frames=10, size=32), config)
    assert isinstance(source.sampling, FrameSampling)
    drawn = {source.sampling.frames(10, np.random.default_rng(seed))["current"] for seed in range(50)}
    assert drawn == {2, 3, 4}
    assert source.sampling.frames(1, np.random.default_rng(0)) == {"current": 0}
    raw = source.read(0, 0)
    assert len(raw.sizes) == config.optim.batch
    batch = render_batch(raw, torch.device("cpu"))
    assert batch.mask.shape == (8, 0)
    assert batch.teacher_crops is batch.global_crops
    flips = np.concatenate([source.read(step, 0).plans["global"].flip for step in range(20)])
    assert 0.3 < flips.mean() < 0.7


def test_without_local_crops_two_pairs_remain() -> None:
    config = validate(shrunk("vits16-dino-k400", views__num_local=0, vit__drop_path=0.0))
    model, batch = build(config), batch_of(config)
    assert len(batch.local_crops) == 0
    assert "mask_token" not in [name for part in model.parts().values() for name, _ in part.parameters]
    found = []
    for model.fused in (True, False):
        found.append(model(batch, {"teacher_temperature": 0.05})["dino"].item())
    assert found[0] == pytest.approx(found[1], rel=1e-5)
