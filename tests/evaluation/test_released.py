"""Released checkpoints of methods that reconstruct pixels, by their key names."""

from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from tcore.data.render import MEAN, STD
from tcore.errors import InputError
from tcore.evaluation.encoder import Encoder
from tcore.evaluation.encoders import load_encoder
from tcore.evaluation.export import GridEncoder, export
from tcore.model.clips import ClipTransformer
from tcore.model.pixels import patchify
from tcore.model.positions import grid_positions
from tcore.model.vit import VisionTransformer

SIZES: dict[str, Any] = {"dim": 64, "depth": 2, "num_heads": 1, "num_registers": 0, "layer_scale": None}
SIZES |= {"image_size": 224, "patch_size": 32}
OTHERS = {"decoder_pos_embed": torch.ones(1, 10, 16), "mask_token": torch.ones(1, 1, 16)}
State = dict[str, Tensor]
Model = TypeVar("Model", bound=VisionTransformer)


def randomized(model: Model) -> Model:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn_like(parameter) * 0.2)
    return model.eval()


def encoder_names(model: VisionTransformer) -> State:
    """The names that released files share with ours."""
    odd = ("places.", "mask_token", "register_tokens")
    return {name: value.clone() for name, value in model.state_dict().items() if not name.startswith(odd)}


def load(state: Any, tmp_path: Path, **how: Any) -> Any:
    torch.save(state, tmp_path / "released.pth")
    return load_encoder(tmp_path / "released.pth", **how)


def test_fixed_positions_are_recognized_and_resized_as_their_authors_do(tmp_path: Path) -> None:
    vit = randomized(VisionTransformer(**SIZES, positions="grid", position_resize="factor"))
    encoder = load({"model": encoder_names(vit) | OTHERS}, tmp_path)
    images = torch.randn(1, 3, 96, 160)
    assert torch.allclose(encoder.backbone(images).patches, vit(images).patches, atol=1e-5)
    assert "factor" in encoder.report
    exact = load({"model": encoder_names(vit) | OTHERS}, tmp_path, positions="exact")
    table = exact.backbone.positions(3, 5)
    assert torch.allclose(table[0, 1:], grid_positions(3, 5, 64), atol=1e-6)
    assert "formula" in exact.report


def test_videomae_is_an_encoder_of_frames(tmp_path: Path) -> None:
    clips = randomized(ClipTransformer(SIZES | {"class_token": False}, "line", tube=2, slots=8))
    state = encoder_names(clips)
    del state["cls_token"]
    for block in range(2):
        bias = state.pop(f"blocks.{block}.attn.qkv.bias")
        query, _, value = bias.chunk(3)
        state |= {f"blocks.{block}.attn.q_bias": query, f"blocks.{block}.attn.v_bias": value}
    named = {f"encoder.{name}": value for name, value in state.items()}
    named |= {"decoder.blocks.0.norm1.weight": torch.ones(4), "encoder_to_decoder.weight": torch.ones(4, 64)}
    encoder = load({"model": named | {"mask_token": torch.ones(1, 1, 4)}}, tmp_path)
    frame = torch.randn(2, 3, 224, 224)
    # The bias of keys changes nothing.
    assert torch.allclose(encoder.backbone(frame).patches, clips.fold()(frame).patches, atol=1e-5)
    assert "folded" in encoder.report


def test_mae_st_carries_its_mean_and_deviation(tmp_path: Path) -> None:
    clips = randomized(ClipTransformer(SIZES, "separable", tube=2, slots=8))
    state = encoder_names(clips)
    for block in range(2):
        for kind in ("weight", "bias"):
            parts = state.pop(f"blocks.{block}.attn.qkv.{kind}").chunk(3)
            state |= {f"blocks.{block}.attn.{n}.{kind}": x.clone() for n, x in zip("qkv", parts, strict=True)}
    own = {"space": "pos_embed_spatial", "time": "pos_embed_temporal", "frame": "pos_embed_class"}
    state |= {theirs: getattr(clips.places, ours).detach().clone() for ours, theirs in own.items()}
    encoder = load({"model_state": state, "model": state | OTHERS}, tmp_path)
    pixels = torch.rand(1, 3, 224, 224)
    mean, std = (torch.tensor(x)[:, None, None] for x in (MEAN, STD))
    seen = encoder.backbone((pixels - mean) / std).patches
    assert torch.allclose(seen, clips.fold()((pixels - 0.45) / 0.225).patches, atol=2e-4)
    assert "0.45 and 0.225" in encoder.report


def test_dropmae_sees_a_frame_as_the_first_of_two(tmp_path: Path) -> None:
    clips = randomized(
        ClipTransformer(SIZES | {"class_token": False, "positions": "grid"}, "grid", tube=1, slots=2)
    )
    state = encoder_names(clips)
    del state["cls_token"]
    time = clips.places.time.detach()
    state |= {"temporal_pos_embed_x": time[:, :1].clone(), "temporal_pos_embed_z": time[:, 1:].clone()}
    state["pos_embed"] = torch.cat([torch.zeros(1, 1, 64), grid_positions(7, 7, 64)[None]], dim=1)
    encoder = load({"model": state | OTHERS}, tmp_path)
    frame = torch.randn(1, 3, 224, 224)
    assert torch.allclose(encoder.backbone(frame).patches, clips.fold()(frame).patches, atol=1e-5)
    places = torch.arange(49)[None]
    seen = clips.sequence(patchify(frame[:, :, None], 1, 32), places)
    assert torch.allclose(encoder.backbone(frame).patches, seen, atol=1e-5)


def test_rsp_and_rcmae_files_lose_what_is_no_encoder(tmp_path: Path) -> None:
    vit = randomized(VisionTransformer(**SIZES, positions="grid"))
    rsp = (
        encoder_names(vit)
        | OTHERS
        | {"to_prior.0.weight": torch.ones(2, 2), "to_posterior.2.bias": torch.ones(2)}
    )
    frame = torch.randn(1, 3, 224, 224)
    assert torch.allclose(
        load({"model": rsp}, tmp_path).backbone(frame).patches, vit(frame).patches, atol=1e-5
    )
    other = {name: value + 1 for name, value in encoder_names(vit).items()}
    both = {"teacher": encoder_names(vit) | OTHERS, "model": other | OTHERS}
    assert torch.allclose(load(both, tmp_path).backbone(frame).patches, vit(frame).patches, atol=1e-5)


def test_learned_positions_have_no_formula(tmp_path: Path) -> None:
    vit = randomized(VisionTransformer(**SIZES))
    with pytest.raises(InputError, match="positions exact"):
        load({"model": encoder_names(vit)}, tmp_path, positions="exact")


def test_encoders_without_class_token_are_exported_where_others_know_them(tmp_path: Path) -> None:
    encoder = Encoder(randomized(VisionTransformer(**SIZES, class_token=False)), "mine")
    frame = torch.randn(1, 3, 64, 96)
    again = load_encoder(export(encoder, tmp_path / "vit.safetensors", "safetensors").path)
    assert torch.equal(again.backbone(frame).patches, encoder.backbone(frame).patches)
    grid, mean = GridEncoder(encoder.backbone)(frame)  # type: ignore[arg-type]
    assert torch.allclose(grid.flatten(2).transpose(1, 2), encoder.backbone(frame).patches, atol=1e-5)
    assert torch.allclose(mean, encoder.backbone(frame).patches.mean(dim=1), atol=1e-5)
    for format_ in ("timm", "hf"):
        with pytest.raises(InputError, match="without a class token"):
            export(encoder, tmp_path / format_, format_)
    encoder.notes = ["trained on something else"]
    assert encoder.identity()["notes"] == ["trained on something else"]
