"""SimCLR, MoCo v3, CrOC and ODIN behind the trainer: what they see, minimize and refuse."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tcore import InputError, methods, train
from tcore.data.loader import render_batch
from tcore.data.stores import FrameStore
from tcore.methods.contrast import Contrast, alignment, measure_health, uniformity
from tcore.methods.regions import Croc, Odin, RegionBatch
from tcore.methods.sampling import RegionSampling
from tcore.training.optim import Optimizer, build_schedule
from tests.tiny import change, shrunk


def test_norms_and_biases_of_projectors_are_decayed_only_where_everything_is() -> None:
    for decay_all, exempt in ((False, True), (True, False)):
        config = shrunk("vits16-mocov3-k400", optim__decay_all=decay_all)
        model = methods.build(config)
        assert isinstance(model, Contrast)
        optimizer = Optimizer(model.parts(), config.optim, config.vit.depth)
        values = build_schedule(config, model, 4).at(1)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step(values)
        plain = [group for group in optimizer.adamw.param_groups if group["weight_decay"] == 0]
        assert bool(plain) == exempt
        norm = model.student.projector[1].weight
        assert any(p is norm for group in plain for p in group["params"]) == exempt


def test_frozen_patch_projection_is_in_no_part_and_copied_by_the_teacher() -> None:
    model = methods.build(shrunk("vits16-mocov3-k400"))
    assert isinstance(model, Contrast)
    assert model.teacher is not None
    names = {name for part in model.parts().values() for name, _ in part.parameters}
    assert not {name for name in names if name.startswith(("patch_embed", "pos_embed", "mask_token"))}
    proj = model.student.backbone.patch_embed.proj
    with torch.no_grad():
        proj.weight.add_(1)
    model.finish_step({"momentum": 0.0})
    assert torch.equal(model.teacher.backbone.patch_embed.proj.weight, proj.weight)


def test_alignment_and_uniformity_say_collapse() -> None:
    generator = torch.Generator().manual_seed(0)
    spread = torch.nn.functional.normalize(torch.randn(64, 16, generator=generator), dim=1)
    same = spread[:1].expand(64, -1).contiguous()
    assert alignment(spread, spread) == 0
    assert uniformity(same) == pytest.approx(0, abs=1e-9)
    assert uniformity(spread) < -3
    good = measure_health({"frames": spread, "first": spread, "second": spread}, 0.1)
    assert (good.state, good.warning) == ("learning", None)
    assert "alignment 0.00" in good.line
    bad = measure_health({"frames": same, "first": same, "second": same}, 4.0)
    assert bad.state == "collapse"
    assert bad.warning is not None


# Regions.


def region_batch(name: str, **changes: Any) -> tuple[RegionBatch, RegionSampling]:
    config = shrunk(f"vits16-{name}-k400", **changes)
    source = methods.build_source(FrameStore.rendered(videos=4, frames=10, size=32), config)
    assert isinstance(source.sampling, RegionSampling)
    batch = render_batch(source.read(0, 0), torch.device("cpu"))
    assert isinstance(batch, RegionBatch)
    return batch, source.sampling


def test_the_view_around_both_holds_both_and_is_left_as_it_is() -> None:
    batch, sampling = region_batch("odin")
    assert batch.around is not None
    assert batch.around_box is not None
    assert batch.around.shape == batch.views.global_crops[:4].shape
    for boxes in batch.boxes:
        assert (boxes[:, :2] >= batch.around_box[:, :2]).all()
        end = boxes[:, :2] + boxes[:, 2:]
        assert (end <= batch.around_box[:, :2] + batch.around_box[:, 2:]).all()
    ends = (batch.boxes[..., :2] + batch.boxes[..., 2:]).amax(dim=0)
    assert torch.equal(batch.around_box[:, 2:], ends - batch.boxes[..., :2].amin(dim=0))
    assert list(sampling.sides) == ["global", "around"]


def test_seeds_of_samples_do_not_depend_on_what_else_is_in_the_batch() -> None:
    config = shrunk("vits16-croc-k400")
    source = methods.build_source(FrameStore.rendered(videos=5, frames=10, size=32), config)
    whole = render_batch(source.read_slots(0, range(4)), torch.device("cpu"))
    half = render_batch(source.read_slots(0, range(2, 4)), torch.device("cpu"))
    assert torch.equal(whole.seeds[2:], half.seeds)
    assert torch.equal(whole.boxes[:, 2:], half.boxes)
    assert len(set(whole.seeds.tolist())) == 4
    later = render_batch(source.read_slots(1, range(4)), torch.device("cpu"))
    assert not set(later.seeds.tolist()) & set(whole.seeds.tolist())


@pytest.mark.parametrize("targets", ["centering", "sinkhorn"])
def test_fused_and_plain_region_losses_agree(targets: str) -> None:
    batch, _ = region_batch("croc", teacher__targets=targets)
    found = []
    for fused in (True, False):
        model = methods.build(shrunk("vits16-croc-k400", teacher__targets=targets, vit__drop_path=0.0))
        assert isinstance(model, Croc)
        model.fused = fused
        losses = model(batch, {"teacher_temperature": 0.04, "patch_teacher_temperature": 0.05})
        model.total(losses).backward()
        gradient = model.student.backbone.patch_embed.proj.weight.grad
        assert gradient is not None
        found.append((losses["region"].detach(), losses["dino"].detach(), gradient))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_accumulated_regions_weigh_as_their_videos() -> None:
    batch, _ = region_batch("croc")
    model = methods.build(shrunk("vits16-croc-k400"))
    assert isinstance(model, Croc)
    seen = model.teacher.backbone(batch.views.global_crops, wanted="keys")
    weights = model.region_weights(model.find_regions(seen, batch), batch.views)
    assert float(weights.sum()) == pytest.approx(1.0)
    counts = batch.views.counts._replace(videos=8)  # as half of a step
    half = model.region_weights(model.find_regions(seen, batch), replace(batch.views, counts=counts))
    assert float(half.sum()) == pytest.approx(0.5)


def test_second_round_keeps_the_discovery_network_of_the_run_it_is_given(tmp_path: Path) -> None:
    first = train(shrunk("vits16-odin-k400", optim__steps=2), tmp_path / "first", quiet=True)
    second = shrunk("vits16-odin-k400", discovery__init=str(first), discovery__momentum=(1.0, 1.0), seed=1)
    run = train(change(second, optim__steps=2), tmp_path / "second", quiet=True)
    model = torch.load(run / "checkpoint.pt", weights_only=True)["model"]
    encoder = load_file(first / "encoder.safetensors")
    held = {key.removeprefix("discovery."): x for key, x in model.items() if key.startswith("discovery.")}
    assert held
    assert all(torch.equal(x, held[key]) for key, x in encoder.items())
    assert not torch.equal(held["norm.weight"], model["student.backbone.norm.weight"])
    missing = change(second, discovery__init=str(tmp_path / "nowhere"))
    with pytest.raises(InputError, match="nowhere"):
        methods.build(missing)
    with pytest.raises(InputError, match="does not fit"):
        methods.build(change(second, vit__dim=64))


def test_discovery_is_the_teacher_unless_it_has_a_momentum_of_its_own() -> None:
    assert len(methods.build(shrunk("vits16-odin-k400")).backbones()) == 2
    own = methods.build(shrunk("vits16-odin-k400", discovery__momentum=(0.5, 0.5)))
    assert isinstance(own, Odin)
    assert own.discovery is not None
    with torch.no_grad():
        own.student.backbone.cls_token.add_(1)
    before = own.discovery.cls_token.clone()
    own.finish_step({"momentum": 1.0, "discovery_momentum": 0.5})
    torch.testing.assert_close(own.discovery.cls_token, before + 0.5)
