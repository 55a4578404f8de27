"""Checkpoints of other projects, recognized by their key names."""

import argparse
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tcore.errors import InputError
from tcore.evaluation.checkpoints import NetworkName, read_file, translate
from tcore.evaluation.encoder import Encoder
from tcore.evaluation.encoders import load_encoder
from tcore.model.vit import VisionTransformer
from tests.evaluation.networks import images
from tests.evaluation.networks import network as any_network

DIM, DEPTH = 64, 3
State = dict[str, Tensor]
Made = tuple[VisionTransformer, Any]


def network(patch_size: int = 16, registers: int = 0, layer_scale: bool = False) -> VisionTransformer:
    sizes = {"dim": DIM, "depth": DEPTH, "num_heads": 1, "patch_size": patch_size}
    vit = any_network(**sizes, image_size=3 * patch_size, num_registers=registers)
    vit.position_resize = "size" if registers else "factor"  # as their authors evaluate
    with torch.no_grad():
        for name, parameter in vit.named_parameters():
            if ".ls" in name and not layer_scale:
                parameter.fill_(1.0)
    return vit


def weights(vit: VisionTransformer, *, without: str = r"\.ls|mask_token|register_tokens") -> State:
    """Weights under the names that most projects share."""
    return {name: value.clone() for name, value in vit.state_dict().items() if not re.search(without, name)}


def prefixed(prefix: str, state: State) -> State:
    return {prefix + name: value for name, value in state.items()}


WHO: tuple[NetworkName, ...] = ("teacher", "student")
HEAD = {"mlp.0.weight": torch.ones(2, 2), "last_layer.weight_g": torch.ones(2, 1)}
DECODER = {
    "mask_token": torch.ones(1, 1, 16),
    "decoder_pos_embed": torch.ones(1, 10, 16),
    "decoder_blocks.0.multihead_attn.in_proj_weight": torch.ones(2, 2),
}
TRAINING = {
    "optimizer": {"state": {}, "param_groups": []},
    "epoch": 3,
    "args": argparse.Namespace(lr=0.1, arch="vit"),
}


def tcore() -> Made:
    vit = network(registers=4, layer_scale=True)
    state = prefixed("backbone.", weights(vit, without="nothing"))
    return vit, {"teacher": state | prefixed("dino_head.", HEAD)}


def dino() -> Made:
    vit = network(patch_size=8)
    teacher = prefixed("backbone.", weights(vit)) | prefixed("head.", HEAD)
    student = prefixed("module.", {name: torch.zeros_like(value) for name, value in teacher.items()})
    return vit, {"student": student, "teacher": teacher, "dino_loss": {"center": torch.ones(2)}} | TRAINING


def dino_plain() -> Made:
    vit = network(patch_size=8)
    return vit, weights(vit)


def dinov2() -> Made:
    vit = network(patch_size=14, layer_scale=True)
    return vit, prefixed("module.", weights(vit, without="register_tokens"))


def dinov2_sharded(counts_on: bool = True) -> Made:
    vit = network(patch_size=14, registers=2, layer_scale=True)

    def chunk(match: re.Match[str]) -> str:
        i = int(match[1])
        return f"blocks.{i // 2}._fsdp_wrapped_module.{i if counts_on else i % 2}."

    state = weights(vit, without="nothing")
    state = {re.sub(r"blocks\.(\d+)\.", chunk, name): value for name, value in state.items()}
    state = prefixed("backbone._fsdp_wrapped_module.", state)
    return vit, {"teacher": state | prefixed("dino_head.", HEAD) | prefixed("ibot_head.", HEAD)}


def dinov2_chunks_start_again() -> Made:
    return dinov2_sharded(counts_on=False)


def ibot() -> Made:
    vit = network(layer_scale=True)
    state = weights(vit, without="register_tokens")
    state["masked_embed"] = state.pop("mask_token")
    state = {re.sub(r"ls(\d)\.gamma", r"gamma_\1", name): value for name, value in state.items()}
    student = prefixed("student.module.backbone.", {name: value + 1 for name, value in state.items()})
    return vit, {"state_dict": student | prefixed("teacher.module.backbone.", state)}


def croc() -> Made:
    vit = network()
    heads = {"mlp.0.weight": torch.ones(2, 2), "last_layer_c.weight_v": torch.ones(2, 2)}
    teacher = prefixed("backbone.", weights(vit)) | prefixed("head.", heads)
    student = prefixed("module.", {name: torch.zeros_like(value) for name, value in teacher.items()})
    loss = {"center": torch.ones(2), "center_c": torch.ones(2)}
    return vit, {"student": student, "teacher": teacher, "dino_loss": loss} | TRAINING


def mocov3() -> Made:
    vit = network()
    vit.pos_embed.data = VisionTransformer(dim=DIM, depth=1, image_size=48, positions="sincos").pos_embed.data
    base = prefixed("module.base_encoder.", weights(vit) | prefixed("head.", {"0.weight": torch.ones(2, 2)}))
    momentum = {k.replace("base", "momentum"): torch.zeros_like(v) for k, v in base.items()}
    predictor = {"module.predictor.0.weight": torch.ones(2, 2)}
    return vit, {"state_dict": base | momentum | predictor, "arch": "vit_small"} | TRAINING


def mae() -> Made:
    vit = network()
    return vit, {"model": prefixed("module.", weights(vit) | DECODER), "scaler": {}} | TRAINING


def rsp() -> Made:
    vit = network()
    latent = {"to_prior.0.weight": torch.ones(2, 2), "to_posterior.2.bias": torch.ones(2)}
    return vit, {"model": weights(vit) | DECODER | latent}


def timm() -> Made:
    vit = network(patch_size=14, registers=4, layer_scale=True)
    vit.pos_embed.data[:, 0] = 0
    state = weights(vit, without="mask_token")
    state["reg_token"] = state.pop("register_tokens")
    return vit, state | {"pos_embed": state["pos_embed"][:, 1:].clone()}


FORMATS: list[tuple[Callable[[], Made], list[str]]] = [
    (tcore, ["of teacher", "num_registers 4", "patch_size 16", "left out: 2 keys"]),
    (dino, ["of teacher", "patch_size 8"]),
    (dino_plain, ["dim 64, depth 3, num_heads 1", "mask token (0)", "LayerScale (1)", "bicubic by a factor"]),
    (dinov2, ["patch_size 14", "image_size 42", "num_registers 0"]),
    (dinov2_sharded, ["of teacher", "num_registers 2", "left out: 4 keys"]),
    (dinov2_chunks_start_again, ["depth 3"]),
    (ibot, ["of state_dict", "left out: 49 keys"]),
    (croc, ["of teacher", "left out: 2 keys", "by a factor"]),
    (mocov3, ["of state_dict", "positions sincos", "left out: 45 keys"]),
    (mae, ["of model", "left out: 3 keys"]),
    (rsp, ["left out: 5 keys"]),
    (timm, ["num_registers 4", "position of CLS (0)"]),
]


@pytest.mark.parametrize(("made", "said"), FORMATS, ids=[made.__name__ for made, _ in FORMATS])
def test_features_of_a_foreign_checkpoint_are_those_of_its_network(
    made: Callable[[], Made], said: list[str], tmp_path: Path
) -> None:
    vit, saved = made()
    torch.save(saved, tmp_path / "weights.pth")
    before = torch.get_rng_state()
    encoder = load_encoder(tmp_path / "weights.pth")
    assert torch.equal(torch.get_rng_state(), before)
    for rows, columns in ((3, 3), (2, 5)):
        x = images(rows, columns, vit.patch_size)
        assert torch.equal(encoder.features(x), Encoder(vit, "source").features(x))
    assert all(part in encoder.report for part in said), encoder.report


def test_half_precision_weights_are_used_in_single_precision_and_heads_are_guessed_or_read(
    tmp_path: Path,
) -> None:
    _, saved = dino_plain()
    found = translate({name: value.half() for name, value in saved.items()}, "weights")
    assert {value.dtype for value in found.state.values()} == {torch.float32}
    assert "converted to float32 from: float16" in found.report
    torch.save({"model": saved, "vit": {"num_heads": 4}}, tmp_path / "weights.pth")
    save_file(saved, tmp_path / "weights.safetensors", metadata={"num_heads": "4"})
    for path in tmp_path.iterdir():
        assert translate(read_file(path), "").sizes["num_heads"] == 4
    huge = {
        "patch_embed.proj.weight": torch.zeros(1280, 3, 14, 14),
        "pos_embed": torch.zeros(1, 257, 1280),
        "blocks.0.norm1.weight": torch.zeros(1280),
    }
    assert translate(huge, "weights").sizes["num_heads"] == 16  # 80 wide, in a ViT-H


@pytest.mark.parametrize("made", [dino, ibot, croc])
def test_the_student_of_a_file_that_holds_both_is_read_by_name(
    made: Callable[[], Made], tmp_path: Path
) -> None:
    vit, saved = made()
    torch.save(saved, tmp_path / "weights.pth")
    teacher, student = (load_encoder(tmp_path / "weights.pth", network=who) for who in WHO)
    assert torch.equal(teacher.backbone.state_dict()["norm.bias"], vit.norm.bias)
    expected = vit.norm.bias + 1 if made is ibot else torch.zeros(DIM)
    assert torch.equal(student.backbone.state_dict()["norm.bias"], expected)
    torch.save(saved["teacher"] if made is not ibot else weights(vit), tmp_path / "one.pth")
    with pytest.raises(InputError, match="holds no student"):
        load_encoder(tmp_path / "one.pth", network="student")


def test_heads_of_moco_v3_are_twelve_unless_a_number_is_given(tmp_path: Path) -> None:
    vit = any_network(dim=384, depth=1, num_heads=12, patch_size=16, image_size=32, num_registers=0)
    state = prefixed("module.base_encoder.", weights(vit, without=r"mask_token|register_tokens"))
    torch.save({"state_dict": state}, tmp_path / "moco.pth")
    encoder = load_encoder(tmp_path / "moco.pth")
    assert isinstance(encoder.backbone, VisionTransformer)
    assert encoder.backbone.num_heads == 12
    assert "weights do not tell, --heads" in encoder.report
    six = load_encoder(tmp_path / "moco.pth", heads=6)
    assert isinstance(six.backbone, VisionTransformer)
    assert six.backbone.num_heads == 6
    assert not torch.equal(six.features(images(2, 2)), encoder.features(images(2, 2)))
    torch.save({"model": weights(vit), "vit": {"num_heads": 12}}, tmp_path / "ours.pth")
    with pytest.raises(InputError, match=r"heads 6 of .*ours\.pth: it was trained with 12"):
        load_encoder(tmp_path / "ours.pth", heads=6)
    with pytest.raises(InputError, match="heads and network"):
        load_encoder("random:vits16", heads=6)


def changed(changes: dict[str, Tensor | None]) -> Any:
    """A DINO checkpoint of which some weights are replaced or, with None, removed."""
    _, saved = dino_plain()
    return {name: value for name, value in (saved | changes).items() if value is not None}


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        (changed({"norm.bias": None}), "do not fit, 1 keys: missing norm.bias"),
        (changed({"blocks.1.ls1.gamma": torch.ones(DIM)}), "5 keys: missing blocks.0.ls1.gamma"),
        (changed({"temperature": torch.ones(1)}), "unexpected temperature"),
        (changed({"norm.bias": torch.ones(3)}), r"norm.bias is \(3,\), expected \(64,\)"),
        (changed({f"extra{i}": torch.ones(1) for i in range(23)}), r"23 keys: .*extra9 and 13 more"),
        (changed({"pos_embed": None}), "pos_embed is missing"),
        (changed({"pos_embed": torch.ones(1, 12, DIM)}), "12 positions are not CLS and a square grid"),
        (changed({"patch_embed.proj.weight": torch.ones(DIM, 3, 2, 8, 8)}), "an image encoder has one of 4"),
        (changed({"patch_embed.proj.weight": torch.ones(DIM, 1, 8, 8)}), "1x8x8 are not square RGB patches"),
        (changed({"patch_embed.proj.weight": torch.ones(100, 3, 8, 8)}), "width 100 is not a multiple of 64"),
        (changed({"module.norm.bias": torch.ones(DIM)}), "holds norm.bias twice"),
        (
            changed({name: None for name in weights(network()) if "blocks.1." in name}),
            "blocks 0, 2: some are",
        ),
        ({"model": {"conv1.weight": torch.ones(1)}}, "no weights of a Vision Transformer.*conv1.weight"),
        ({}, "but nothing"),
        ([1, 2], "holds a list, not a dict of weights"),
    ],
)
def test_checkpoint_that_does_not_fit_is_refused(saved: Any, message: str, tmp_path: Path) -> None:
    torch.save(saved, tmp_path / "weights.pth")
    with pytest.raises(InputError, match=message):
        load_encoder(tmp_path / "weights.pth")


class Harmless:
    """An object that only unpickling its class would bring back."""


def test_pickled_objects_are_not_opened_but_for_plain_arguments(tmp_path: Path) -> None:
    torch.save({"model": Harmless()}, tmp_path / "object.pth")
    (tmp_path / "plain.pth").write_bytes(pickle.dumps({"model": Harmless()}, protocol=2))
    for name in ("object.pth", "plain.pth"):
        with pytest.raises(InputError, match=r"Python objects \(.*Harmless\) that could run code"):
            read_file(tmp_path / name)
    torch.save(TRAINING, tmp_path / "args.pth")
    assert read_file(tmp_path / "args.pth")["args"].arch == "vit"
    assert argparse.Namespace not in torch.serialization.get_safe_globals()


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_file_that_is_no_checkpoint_is_refused_in_one_line(suffix: str, tmp_path: Path) -> None:
    path, (vit, saved) = tmp_path / f"weights.{suffix}", dino_plain()
    if suffix == "pth":
        torch.save(saved, path)
    else:
        save_file(saved, path)
    # Foreign safetensors without a card are translated like any other file.
    assert torch.equal(load_encoder(path).features(images()), Encoder(vit, "source").features(images()))
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b"hello there\n", b"<html>\n", b""):
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"weights\.") as caught:
            load_encoder(path)
        assert "\n" not in str(caught.value)
