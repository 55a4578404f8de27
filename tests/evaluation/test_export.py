"""Encoders in the formats of other software, and back."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from tcore.cli.main import main
from tcore.errors import InputError
from tcore.evaluation.encoder import Adapted, Encoder
from tcore.evaluation.encoders import load_encoder
from tcore.evaluation.export import (
    FORMATS,
    Exported,
    Format,
    GridEncoder,
    check_out,
    compare,
    export,
    whole_matrix,
)
from tcore.model.vit import VisionTransformer
from tests.evaluation.networks import encoder, images, need, network

ROOT = Path(__file__).parents[2]
NAMES: dict[Format, str] = {
    "safetensors": "encoder-of-mine.safetensors",
    "torch": "encoder.pth",
    "timm": "timm",
    "hf": "hf",
    "hub": "hub",
    "onnx": "encoder.onnx",
}
# Names in timm 1.0 and in the published checkpoints of transformers: + is weight and bias, * is each block.
PACKAGES: dict[Format, str] = {
    "timm": "cls_token reg_token pos_embed patch_embed.proj+ norm+ blocks.*.norm1+ blocks.*.norm2+ "
    "blocks.*.attn.qkv+ blocks.*.attn.proj+ blocks.*.mlp.fc1+ blocks.*.mlp.fc2+ "
    "blocks.*.ls1.gamma blocks.*.ls2.gamma",
    "hf": "embeddings.cls_token embeddings.mask_token embeddings.register_tokens "
    "embeddings.position_embeddings embeddings.patch_embeddings.projection+ layernorm+ "
    "encoder.layer.*.norm1+ encoder.layer.*.norm2+ encoder.layer.*.mlp.fc1+ encoder.layer.*.mlp.fc2+ "
    "encoder.layer.*.attention.attention.query+ encoder.layer.*.attention.attention.key+ "
    "encoder.layer.*.attention.attention.value+ encoder.layer.*.attention.output.dense+ "
    "encoder.layer.*.layer_scale1.lambda1 encoder.layer.*.layer_scale2.lambda1",
}


@pytest.mark.parametrize("format", ["safetensors", "torch", "timm", "hf"])
@pytest.mark.parametrize("num_registers", [2, 0])
def test_what_was_exported_loads_back_with_the_same_features(
    format: Format, num_registers: int, tmp_path: Path
) -> None:
    mine = encoder(num_registers=num_registers)
    done = export(mine, tmp_path / NAMES[format], format)
    back = load_encoder(done.path)
    for x in (images(), images(3, 3)):
        assert torch.equal(back.features(x), mine.features(x))
    assert isinstance(back.backbone, VisionTransformer)
    assert back.backbone.num_heads == 2
    if format != "timm":  # which has no mask token, and CLS with its position in one
        assert back.fingerprint() == mine.fingerprint()
    assert list(tmp_path.iterdir()) == [done.path]
    if format == "safetensors":  # goes by itself, also beside the card of another run
        card = {"vit": {"dim": 64, "depth": 1, "num_heads": 4}}
        (tmp_path / "encoder.json").write_text(json.dumps(card))
        assert load_encoder(done.path).fingerprint() == mine.fingerprint()


@pytest.mark.parametrize("format", ["timm", "hf"])
def test_names_are_those_of_the_other_package(format: Format, tmp_path: Path) -> None:
    path = export(encoder(), tmp_path / "out", format).path
    ends = [name.replace("+", end) for name in PACKAGES[format].split() for end in (".weight", ".bias")]
    assert set(load_file(path / "model.safetensors")) == {x.replace("*", n) for x in ends for n in "012"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("num_registers", [2, 0])
@pytest.mark.parametrize(("package", "format"), [("timm", "timm"), ("transformers", "hf")])
def test_the_other_package_loads_the_folder_strictly_and_sees_the_same(
    package: str, format: Format, num_registers: int, tmp_path: Path
) -> None:
    module, mine = need(package), encoder(num_registers=num_registers)
    path = export(mine, tmp_path / "out", format).path
    if format == "timm":
        grids, spec = [(2, 5), (3, 3), (7, 4)], f"timm:local-dir:{path}"
        model = module.create_model(f"local-dir:{path}", pretrained=True).eval()
        model.load_state_dict(load_file(path / "model.safetensors"))
        read = model.forward_features
    else:
        grids, spec = [(3, 3)], f"hf:{path}"  # positions on other grids are resized differently there
        model, info = module.Dinov2WithRegistersModel.from_pretrained(path, output_loading_info=True)
        assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        read = lambda x: model.eval()(x).last_hidden_state  # noqa: E731
    adapted = load_encoder(spec)
    for x in (images(*grid) for grid in grids):
        tokens = mine.backbone(x)
        with torch.no_grad():
            found = read(x)
        assert torch.allclose(found[:, 0], tokens.frame, atol=1e-5)
        assert torch.allclose(found[:, 1 + num_registers :], tokens.patches, atol=1e-5)
        assert torch.allclose(adapted.features(x), mine.features(x), atol=1e-5)


@pytest.mark.parametrize("before", [1, 14])
def test_two_matrix_products_are_the_resize_of_torch(before: int) -> None:
    grid = torch.rand(1, 2, before, before + 2)
    for after in (1, 2, 8, 14, 33):
        size = (after, after + 1)
        expected = F.interpolate(grid, size, mode="bicubic", antialias=True, align_corners=False)
        found = whole_matrix(before, after) @ grid @ whole_matrix(before + 2, after + 1).T
        assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("format", ["safetensors", "torch", "timm", "hf"])
def test_reach_goes_with_the_file_and_not_into_packages_without_one(format: Format, tmp_path: Path) -> None:
    mine = encoder(reach=1)
    if format in ("timm", "hf"):
        with pytest.raises(InputError, match=rf"--format {format} .*--reach everywhere"):
            export(mine, tmp_path / NAMES[format], format)
        assert list(tmp_path.iterdir()) == []
        return
    path = export(mine, tmp_path / NAMES[format], format).path
    back, all_over = load_encoder(path), load_encoder(path, reach="everywhere")
    assert torch.equal(back.features(images()), mine.features(images()))
    assert back.fingerprint() == mine.fingerprint() != all_over.fingerprint() == encoder().fingerprint()


@pytest.mark.parametrize("reach", [None, 1])
@pytest.mark.parametrize("grid", [(3, 3), (1, 1), (2, 5), (9, 4)])
def test_graph_sees_what_the_encoder_sees(grid: tuple[int, int], reach: int | None) -> None:
    vit = network(reach=reach).eval()
    with torch.no_grad():
        (features, frame), tokens = GridEncoder(vit)(images(*grid)), vit(images(*grid))
    assert torch.allclose(features, tokens.patches.transpose(1, 2).unflatten(2, grid), atol=2e-5)
    assert torch.allclose(frame, tokens.frame, atol=2e-5)


def need_onnx() -> None:
    for package in ("onnxruntime", "onnx", "onnxscript"):
        need(package)


@pytest.fixture(scope="module")
def onnx_file(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    need_onnx()
    return export(encoder(), tmp_path_factory.mktemp("onnx") / "encoder.onnx", "onnx")


def test_onnx_file_answers_like_torch_at_any_size(onnx_file: Exported) -> None:
    assert "checked with onnxruntime" in onnx_file.notes[0]
    assert "24x24 and 48x8: within" in onnx_file.notes[0]
    session = need("onnxruntime").InferenceSession(str(onnx_file.path))
    for grid in ((3, 3), (1, 1), (9, 4)):
        for batch in (1, 2):
            x = images(*grid)[:batch]
            features, frame = session.run(["features", "frame"], {"images": x.numpy()})
            assert torch.allclose(torch.from_numpy(features), encoder().features(x), atol=1e-4)
            assert torch.allclose(torch.from_numpy(frame), network().eval()(x).frame, atol=1e-4)
    assert json.loads(session.get_modelmeta().custom_metadata_map["mean"]) == [0.485, 0.456, 0.406]
    assert list(onnx_file.path.parent.iterdir()) == [onnx_file.path]


def test_onnx_file_keeps_the_reach(tmp_path: Path) -> None:
    need_onnx()
    done = export(encoder(reach=1), tmp_path / "encoder.onnx", "onnx")
    session = need("onnxruntime").InferenceSession(str(done.path))
    x = images(9, 4)
    (features,) = session.run(["features"], {"images": x.numpy()})
    assert torch.allclose(torch.from_numpy(features), encoder(reach=1).features(x), atol=1e-4)
    assert not torch.allclose(torch.from_numpy(features), encoder().features(x), atol=1e-2)


def test_onnx_file_that_differs_is_refused(onnx_file: Exported) -> None:
    another = network().eval()
    nn.init.normal_(another.pos_embed)
    with pytest.raises(InputError, match=r"differs from torch by .* 24x24"):
        compare(GridEncoder(another), onnx_file.path)


def test_onnx_without_its_packages_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(InputError, match=r"needs the package onnx .*pip install onnx"):
        export(encoder(), tmp_path / "encoder.onnx", "onnx")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    said = compare(GridEncoder(network()), tmp_path / "any")
    assert said.startswith("not checked")
    assert "pip install onnxruntime" in said


def test_name_that_does_not_suit_the_format_is_refused(tmp_path: Path) -> None:
    names = {"out": (None, "torch", "tim"), "out.txt": (None,), "out.pth": ("onnx", "hf")}
    for name, format in ((name, format) for name, formats in names.items() for format in formats):
        with pytest.raises(InputError, match=rf"{name} with.* --format"):
            check_out(tmp_path / name, format)


def test_what_is_there_is_not_overwritten_and_foreign_models_are_refused(tmp_path: Path) -> None:
    for format in FORMATS:
        out = tmp_path / NAMES[format]
        out.write_text("dear ...")
        with pytest.raises(InputError, match=f"{out} exists"):
            export(encoder(), out, format)
        assert out.read_text() == "dear ..."
    foreign = Encoder(Adapted(nn.Identity(), lambda x: x, patch_size=8), "timm:someone")
    with pytest.raises(InputError, match="timm:someone"):
        export(foreign, tmp_path / "out.safetensors", "safetensors")


def test_folder_of_another_model_names_the_spec_that_runs_its_code(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "config.json").write_text('{"model_type": "siglip"}')
    with pytest.raises(InputError, match=f"give hf:{tmp_path}"):
        load_encoder(tmp_path)
    (tmp_path / "config.json").write_text('{"architecture": "vit_base_patch16_siglip"}')
    with pytest.raises(InputError, match=f"give timm:local-dir:{tmp_path}"):
        load_encoder(tmp_path)


def test_folder_that_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    for format in ("hf", "safetensors"):
        with pytest.raises(OSError, match="No space left"):
            export(encoder(), tmp_path / NAMES[format], format)
    assert list(tmp_path.iterdir()) == []


def test_command_says_what_was_written_and_how_to_load_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = export(encoder(), tmp_path / "mine.pth", "torch").path
    out = tmp_path / "new" / "one.safetensors"
    main(["export", str(mine), str(out), "--layer", "0"])
    said = capsys.readouterr().out
    assert f"{out}: 0.1 MiB, safetensors" in said
    line = next(line for line in said.splitlines() if line.startswith("load it: ")).removeprefix("load it: ")
    known: dict[str, Any] = {}
    exec(line, known)
    expected = load_encoder(mine, layer=0).features(images())
    assert torch.equal(known["encoder"].features(images()), expected)
    assert known["encoder"].backbone.depth == 1
    hub = torch.hub.load(str(ROOT), "tcore", source="local", encoder=str(mine), layer=0)
    assert torch.equal(hub.features(images()), expected)
