import argparse
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from tcore.errors import InputError
from tcore.evaluation.checkpoints import read_checkpoint, read_file, translate
from tcore.evaluation.encoder import Encoder
from tcore.evaluation.encoders import load_encoder
from tcore.model.vit import VisionTransformer

DIM, DEPTH = 128, 4
State = dict[str, Tensor]


def network(patch_size: int = 16, registers: int = 0, layer_scale: bool = False) -> VisionTransformer:
    """A small network whose every weight matters."""
    torch.manual_seed(0)
    vit = VisionTransformer(
        dim=DIM,
        depth=DEPTH,
        num_heads=DIM // 64,
        patch_size=patch_size,
        image_size=3 * patch_size,
        num_registers=registers,
        layer_scale=1.0,
    )
    with torch.no_grad():
        for name, parameter in vit.named_parameters():
            if layer_scale or ".ls" not in name:
                parameter.add_(0.1 * torch.randn(parameter.shape))
    return vit


def weights(vit: VisionTransformer, *, layer_scale: bool = False, registers: bool = False) -> State:
    """Weights under the names that most projects share."""
    state = {name: value.clone() for name, value in vit.state_dict().items()}
    absent = [] if layer_scale else [name for name in state if ".ls" in name]
    absent += ["mask_token"] + ([] if registers else ["register_tokens"])
    return {name: value for name, value in state.items() if name not in absent}


def prefixed(prefix: str, state: State) -> State:
    return {prefix + name: value for name, value in state.items()}


HEAD = {"mlp.0.weight": torch.ones(2, 2), "last_layer.weight_g": torch.ones(2, 1)}
NEW_HEAD = {
    "mlp.0.weight": torch.ones(2, 2),
    "last_layer.parametrizations.weight.original0": torch.ones(2, 1),
}
DECODER = {
    "mask_token": torch.ones(1, 1, 16),
    "decoder_pos_embed": torch.ones(1, 10, 16),
    "decoder_embed.weight": torch.ones(16, DIM),
    "decoder_blocks.0.norm1.weight": torch.ones(16),
    "decoder_norm.weight": torch.ones(16),
    "decoder_pred.bias": torch.ones(3),
}
TRAINING = {
    "optimizer": {"state": {}, "param_groups": []},
    "epoch": 3,
    "args": argparse.Namespace(lr=0.1, arch="vit"),
}


def tcore() -> tuple[VisionTransformer, Any]:
    vit = network(registers=4, layer_scale=True)
    state = weights(vit, layer_scale=True, registers=True) | {"mask_token": vit.mask_token.detach()}
    return vit, {"teacher": prefixed("backbone.", state) | prefixed("dino_head.", HEAD)}


def tcore_without_registers() -> tuple[VisionTransformer, Any]:
    vit = network(layer_scale=True)
    state = weights(vit, layer_scale=True) | {"mask_token": vit.mask_token.detach()}
    return vit, prefixed("module.", state)


def dino() -> tuple[VisionTransformer, Any]:
    vit = network(patch_size=8)
    teacher = prefixed("backbone.", weights(vit)) | prefixed("head.", HEAD)
    student = prefixed("module.", {name: torch.zeros_like(value) for name, value in teacher.items()})
    return vit, {"student": student, "teacher": teacher, "dino_loss": {"center": torch.ones(2)}} | TRAINING


def dino_plain() -> tuple[VisionTransformer, Any]:
    vit = network(patch_size=8)
    return vit, weights(vit)


def dinov2_plain() -> tuple[VisionTransformer, Any]:
    vit = network(patch_size=14, layer_scale=True)
    return vit, weights(vit, layer_scale=True) | {"mask_token": vit.mask_token.detach()}


def dinov2_sharded(counted_on: bool = True) -> tuple[VisionTransformer, Any]:
    vit = network(patch_size=14, registers=2, layer_scale=True)
    state = weights(vit, layer_scale=True, registers=True) | {"mask_token": vit.mask_token.detach()}

    def chunk(match: re.Match[str]) -> str:
        i = int(match[1])
        return f"blocks.{i // 2}._fsdp_wrapped_module.{i if counted_on else i % 2}."

    state = {re.sub(r"blocks\.(\d+)\.", chunk, name): value for name, value in state.items()}
    state = prefixed("backbone._fsdp_wrapped_module.", state)
    return vit, {"teacher": state | prefixed("dino_head.", NEW_HEAD) | prefixed("ibot_head.", NEW_HEAD)}


def dinov2_chunks_counted_anew() -> tuple[VisionTransformer, Any]:
    return dinov2_sharded(counted_on=False)


def ibot() -> tuple[VisionTransformer, Any]:
    vit = network(layer_scale=True)
    state = weights(vit, layer_scale=True) | {"masked_embed": vit.mask_token.detach()}
    state = {re.sub(r"ls(\d)\.gamma", r"gamma_\1", name): value for name, value in state.items()}
    teacher, student = (
        prefixed("teacher.module.backbone.", state),
        prefixed("student.module.backbone.", state),
    )
    return vit, {"state_dict": {name: value + 1 for name, value in student.items()} | teacher}


def ibot_plain() -> tuple[VisionTransformer, Any]:
    vit = network()
    return vit, {"state_dict": weights(vit)}


def mae() -> tuple[VisionTransformer, Any]:
    vit = network()
    return vit, {"model": weights(vit) | DECODER, "scaler": {}} | TRAINING


def mae_encoder() -> tuple[VisionTransformer, Any]:
    vit = network()
    return vit, {"model": weights(vit)}


def cropmae() -> tuple[VisionTransformer, Any]:
    vit = network()
    attention = {"decoder_blocks.0.multihead_attn.in_proj_weight": torch.ones(2, 2)}
    return vit, {"model": prefixed("module.", weights(vit) | DECODER | attention)}


def rsp() -> tuple[VisionTransformer, Any]:
    vit = network()
    latent = {"to_prior.0.weight": torch.ones(2, 2), "to_posterior.2.bias": torch.ones(2)}
    return vit, {"model": weights(vit) | DECODER | latent} | TRAINING


def timm() -> tuple[VisionTransformer, Any]:
    vit = network(patch_size=14, registers=4, layer_scale=True)
    with torch.no_grad():
        vit.pos_embed[:, 0] = 0
    state = weights(vit, layer_scale=True, registers=True)
    state["reg_token"] = state.pop("register_tokens")
    return vit, state | {"pos_embed": state["pos_embed"][:, 1:].clone()}


FORMATS: list[tuple[Callable[[], tuple[VisionTransformer, Any]], str, list[str]]] = [
    (
        tcore,
        "T-CoRe key names under teacher",
        ["4 registers", "with LayerScale", "projection heads (2 keys)"],
    ),
    (tcore_without_registers, "DINOv2 key names", ["0 registers", "patch 16"]),
    (
        dino,
        "DINO key names under teacher",
        ["patch 8", "without LayerScale", "student, dino_loss, optimizer"],
    ),
    (dino_plain, "DINO key names:", ["mask token (0)", "LayerScale (1)"]),
    (dinov2_plain, "DINOv2 key names:", ["patch 14", "positions 3x3"]),
    (dinov2_sharded, "DINOv2 key names under teacher", ["2 registers", "projection heads (4 keys)"]),
    (dinov2_chunks_counted_anew, "DINOv2 key names under teacher", ["4 blocks"]),
    (ibot, "iBOT key names under state_dict", ["with LayerScale", "student ("]),
    (ibot_plain, "iBOT key names under state_dict", ["bicubic with antialias"]),
    (mae, "MAE key names under model", ["decoder (5 keys)", "mask token of the decoder (1 keys)"]),
    (mae_encoder, "MAE key names under model", ["width 128, 4 blocks, 2 heads"]),
    (cropmae, "CropMAE key names under model", ["decoder (6 keys)"]),
    (rsp, "RSP key names under model", ["prior and posterior (2 keys)"]),
    (timm, "timm key names:", ["4 registers", "position of CLS (0)"]),
]


@pytest.mark.parametrize(("made", "name", "said"), FORMATS, ids=[made.__name__ for made, _, _ in FORMATS])
def test_features_of_a_foreign_checkpoint_are_those_of_its_network(
    made: Callable[[], tuple[VisionTransformer, Any]], name: str, said: list[str], tmp_path: Path
) -> None:
    vit, saved = made()
    torch.save(saved, tmp_path / "weights.pth")
    encoder = load_encoder(tmp_path / "weights.pth")
    source, size = Encoder(vit, "source"), vit.patch_size
    for shape in ((3 * size, 3 * size), (2 * size, 5 * size)):
        images = torch.randn(2, 3, *shape)
        assert torch.equal(encoder.features(images), source.features(images))
    assert encoder.report.startswith(name)
    assert all(part in encoder.report for part in said), encoder.report


def test_without_layer_scale_and_registers_the_plain_transformer_is_computed() -> None:
    state = weights(network(patch_size=8))
    images = torch.randn(2, 3, 24, 24)
    patches = F.conv2d(images, state["patch_embed.proj.weight"], state["patch_embed.proj.bias"], stride=8)
    x = torch.cat([state["cls_token"].expand(2, -1, -1), patches.flatten(2).transpose(1, 2)], 1)
    x = x + state["pos_embed"]

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (DIM,), state[f"{name}.weight"], state[f"{name}.bias"], eps=1e-6)

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, state[f"{name}.weight"], state[f"{name}.bias"])

    for block in (f"blocks.{i}" for i in range(DEPTH)):
        qkv = linear(norm(x, f"{block}.norm1"), f"{block}.attn.qkv").view(2, 10, 3, 2, 64)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = (q @ k.mT / 8).softmax(-1) @ v
        x = x + linear(attended.transpose(1, 2).reshape(2, 10, DIM), f"{block}.attn.proj")
        hidden = F.gelu(linear(norm(x, f"{block}.norm2"), f"{block}.mlp.fc1"))
        x = x + linear(hidden, f"{block}.mlp.fc2")
    expected = norm(x, "norm")[:, 1:].transpose(1, 2).unflatten(2, (3, 3))

    found = translate(state, "weights")
    vit = VisionTransformer(**found.sizes)
    vit.load_state_dict(found.state)
    torch.testing.assert_close(Encoder(vit, "found").features(images), expected, atol=2e-5, rtol=1e-4)


def test_foreign_safetensors_without_a_card_are_translated(tmp_path: Path) -> None:
    vit, saved = dino_plain()
    save_file(saved, tmp_path / "dino.safetensors")
    images = torch.randn(1, 3, 24, 24)
    expected = Encoder(vit, "source").features(images)
    assert torch.equal(load_encoder(tmp_path / "dino.safetensors").features(images), expected)


def test_half_precision_weights_are_used_in_single_precision() -> None:
    _, saved = dino_plain()
    found = translate({name: value.half() for name, value in saved.items()}, "weights")
    assert {value.dtype for value in found.state.values()} == {torch.float32}
    assert "turned into float32 from: float16" in found.report


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_number_of_heads_is_taken_from_the_file_where_it_says_it(suffix: str, tmp_path: Path) -> None:
    _, saved = dino_plain()
    path = tmp_path / f"weights.{suffix}"
    if suffix == "pth":
        torch.save({"model": saved, "vit": {"num_heads": 4}}, path)
    else:
        save_file(saved, path, metadata={"num_heads": "4"})
    assert read_checkpoint(path).sizes["num_heads"] == 4
    assert read_checkpoint(path, num_heads=8).sizes["num_heads"] == 8


def test_heads_of_vit_huge_are_80_wide() -> None:
    state = {
        "patch_embed.proj.weight": torch.zeros(1280, 3, 14, 14),
        "pos_embed": torch.zeros(1, 257, 1280),
        "blocks.0.norm1.weight": torch.zeros(1280),
    }
    assert translate(state, "weights").sizes["num_heads"] == 16


def changed(changes: dict[str, Tensor | None]) -> Any:
    """A DINO checkpoint of which some weights are replaced or, with None, removed."""
    _, saved = dino_plain()
    return {name: value for name, value in (saved | changes).items() if value is not None}


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        (changed({"norm.bias": None}), "do not fit, 1 keys: missing norm.bias"),
        (changed({"blocks.1.attn.qkv.bias": None}), "missing blocks.1.attn.qkv.bias"),
        (changed({"blocks.1.ls1.gamma": torch.ones(DIM)}), "7 keys: missing blocks.0.ls1.gamma"),
        (changed({"temperature": torch.ones(1)}), "unexpected temperature"),
        (changed({"blocks.0.mlp.w12.weight": torch.ones(1)}), "unexpected blocks.0.mlp.w12.weight"),
        (changed({"norm.bias": torch.ones(3)}), r"norm.bias is \(3,\), expected \(128,\)"),
        (changed({f"extra{i}": torch.ones(1) for i in range(23)}), r"23 keys: .*extra9; and 13 more"),
        (changed({"pos_embed": None}), "pos_embed is missing"),
        (changed({"cls_token": None}), "missing cls_token"),
        (changed({"pos_embed": torch.ones(1, 12, DIM)}), "12 positions are not CLS and a square grid"),
        (changed({"patch_embed.proj.weight": torch.ones(DIM, 3, 2, 8, 8)}), "an image encoder has one of 4"),
        (changed({"patch_embed.proj.weight": torch.ones(DIM, 1, 8, 8)}), "1x8x8 are not square RGB patches"),
        (changed({"patch_embed.proj.weight": torch.ones(100, 3, 8, 8)}), "width 100 is no multiple of 64"),
        (changed({"module.norm.bias": torch.ones(DIM)}), "some weights twice"),
        (changed({"backbone.norm.bias": torch.ones(DIM)}), "holds norm.bias twice"),
        (
            changed({"mask_token": torch.ones(1, DIM), "masked_embed": torch.ones(1, DIM)}),
            "in the names of two formats",
        ),
        (
            changed({name: None for name in weights(network()) if "blocks.2." in name}),
            "blocks 0; 1; 3: some are",
        ),
        (changed({name: None for name in weights(network()) if "blocks." in name}), "some are missing"),
        ({"model": {"conv1.weight": torch.ones(1)}}, "no weights of a Vision Transformer.*conv1.weight"),
        ({}, "nothing: known are the formats of T-CoRe"),
        ([1, 2], "holds a list, not a dict of weights"),
    ],
)
def test_checkpoint_that_does_not_fit_is_refused(saved: Any, message: str, tmp_path: Path) -> None:
    torch.save(saved, tmp_path / "weights.pth")
    with pytest.raises(InputError, match=message):
        load_encoder(tmp_path / "weights.pth")


class Harmless:
    """An object that only unpickling its class would bring back."""


def test_pickled_objects_are_not_opened(tmp_path: Path) -> None:
    torch.save({"model": Harmless()}, tmp_path / "object.pth")
    (tmp_path / "plain.pth").write_bytes(pickle.dumps({"model": Harmless()}, protocol=2))
    for name in ("object.pth", "plain.pth"):
        with pytest.raises(InputError, match=r"Python objects \(.*Harmless\) that could run code"):
            read_file(tmp_path / name)


def test_namespace_is_allowed_for_the_one_file_only(tmp_path: Path) -> None:
    torch.save(TRAINING, tmp_path / "args.pth")
    assert read_file(tmp_path / "args.pth")["args"].arch == "vit"
    assert argparse.Namespace not in torch.serialization.get_safe_globals()


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
@pytest.mark.parametrize("content", ["cut", "text", "html", "empty"])
def test_file_that_is_no_checkpoint_is_refused_in_one_line(suffix: str, content: str, tmp_path: Path) -> None:
    path = tmp_path / f"weights.{suffix}"
    _, saved = dino_plain()
    if suffix == "pth":
        torch.save(saved, path)
    else:
        save_file(saved, path)
    whole = path.read_bytes()
    path.write_bytes(
        {"cut": whole[: len(whole) // 2], "text": b"hello there\n", "html": b"<html>\n", "empty": b""}[
            content
        ]
    )
    with pytest.raises(InputError, match=r"weights\.") as caught:
        load_encoder(path)
    assert "\n" not in str(caught.value)


def test_loading_leaves_the_random_state_alone(tmp_path: Path) -> None:
    torch.save(dino_plain()[1], tmp_path / "weights.pth")
    before = torch.get_rng_state()
    load_encoder(tmp_path / "weights.pth")
    assert torch.equal(torch.get_rng_state(), before)
