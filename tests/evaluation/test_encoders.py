"""Encoders of runs, timm, transformers and torch.hub, by the words that name them."""

import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tcore.data.render import MEAN, STD
from tcore.errors import InputError
from tcore.evaluation.encoder import Adapted, Encoder
from tcore.evaluation.encoders import adapt, choose_layer, load_encoder, load_timm
from tests.evaluation.networks import SIZES, encoder, images, need, network


def same(one: Encoder, other: Encoder) -> bool:
    return torch.equal(one.features(images()), other.features(images()))


def write_card(run: Path, **changes: Any) -> None:
    (run / "encoder.json").write_text(json.dumps({"vit": SIZES | {"layer_scale": 0.5} | changes}))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """What a run exports."""
    state = network().state_dict()
    (tmp_path / "encoders").mkdir()
    save_file(state, tmp_path / "encoder.safetensors")
    save_file({k: v + 1 for k, v in state.items()}, tmp_path / "encoders" / "step-000001.safetensors")
    write_card(tmp_path)
    return tmp_path


def test_run_folder_and_its_files_are_built_by_its_card(run: Path) -> None:
    for path in (run, str(run), run / "encoder.safetensors"):
        before = torch.get_rng_state()
        load_encoder("random:vitti16")
        found = load_encoder(path)
        assert torch.equal(torch.get_rng_state(), before)
        assert same(found, encoder())
        assert found.fingerprint() == encoder().fingerprint()
        assert "num_heads 2" in found.report
    kept = load_encoder(run / "encoders" / "step-000001.safetensors")
    assert torch.equal(kept.backbone.state_dict()["norm.bias"], network().norm.bias + 1)


def test_frames_are_scaled_and_normalized() -> None:
    frames = torch.randint(0, 256, (1, 16, 40, 3), dtype=torch.uint8)
    expected = encoder().features(
        ((frames / 255 - torch.tensor(MEAN)) / torch.tensor(STD)).permute(0, 3, 1, 2)
    )
    assert torch.allclose(encoder()(frames), expected, atol=1e-5)


@pytest.mark.parametrize(("layer", "blocks"), [(0, 1), (2, 3), (-1, 3), (-2, 2), (-3, 1)])
def test_features_of_a_layer_are_its_output_after_the_final_norm(run: Path, layer: int, blocks: int) -> None:
    vit = network().eval()
    grids: list[Tensor] = []
    vit.blocks[blocks - 1].register_forward_hook(lambda _, __, out: grids.append(vit.norm(out)))
    with torch.no_grad():
        vit(images())
    found = load_encoder(run, layer=layer)
    assert torch.equal(found.features(images()), grids[0][:, 3:].transpose(1, 2).unflatten(2, (2, 5)))
    assert (found.fingerprint() == encoder().fingerprint()) == (blocks == 3)
    assert (f"block {blocks} of 3" in found.report) == (blocks < 3)


def test_reach_of_a_run_is_that_of_its_card_unless_another_is_given(run: Path) -> None:
    write_card(run, reach=1)
    near, everywhere = load_encoder(run), load_encoder(run, reach="everywhere")
    assert same(near, encoder(reach=1))
    assert not same(near, encoder())
    assert same(load_encoder(run, reach=2), encoder(reach=2))
    assert same(everywhere, encoder())
    assert everywhere.fingerprint() == encoder().fingerprint() != near.fingerprint()
    assert "everywhere" in everywhere.report


def test_layer_or_reach_that_cannot_be_is_an_error(run: Path) -> None:
    for layer in (3, -4):
        with pytest.raises(InputError, match=f"layer {layer} of .*: it has 3 blocks, -3 to 2"):
            load_encoder(run, layer=layer)
    with pytest.raises(InputError, match=r"reach 0 of .*: need 1 or more"):
        load_encoder(run, reach=0)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("vits16", "Did you mean random:vits16"),
        ("random:vits", "random:vits.*Did you mean vits16"),
        ("timm", "timm:vit_small_patch16_224.dino"),
        ("hf:", "hf:facebook/dinov2-small"),
        ("hub", "hub:facebookresearch/dinov2:dinov2_vits14"),
        ("hub:dinov2_vits14", "hub:facebookresearch/dinov2:dinov2_vits14"),
        ("tim:vit_small", "Did you mean timm:vit_small"),
        ("defualt", "Did you mean default"),
        ("dinov2_vits14", "does not exist: give a run, "),
        ("encoder.onnx", "ONNX"),
        (".", r"no encoder.safetensors.*hf:"),
    ],
)
def test_unknown_encoder_is_an_error_that_says_what_to_give(spec: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_encoder(spec)


BAD_SIZES: list[dict[str, Any]] = [{"color": 1}, {"patch_size": 0}, {"num_heads": 3}, {"num_heads": 0}]
BAD_SIZES += [{"reach": "far"}, {"reach": 0}]


@pytest.mark.parametrize("card", ["{", "{}", "[]", *(json.dumps({"vit": SIZES | bad}) for bad in BAD_SIZES)])
def test_broken_card_is_an_error(run: Path, card: str) -> None:
    (run / "encoder.json").write_text(card, encoding="utf-8")
    with pytest.raises(InputError, match=r"cannot read|no encoder can be built"):
        load_encoder(run)


def test_run_folder_that_is_not_complete_is_an_error(run: Path) -> None:
    torch.save({"model": {}}, run / "checkpoint.pt")
    with pytest.raises(InputError, match="give its run folder"):
        load_encoder(run / "checkpoint.pt")
    (run / "encoder.json").unlink()
    with pytest.raises(InputError, match=r"no encoder.json beside"):
        load_encoder(run)


def all_tokens(vit: Any, x: Tensor) -> Tensor:
    tokens = vit(x)
    return torch.cat([tokens.frame[:, None], tokens.registers, tokens.patches], 1)


class TimmLike(nn.Module):
    """Our network behind the interface of timm."""

    def __init__(self, *, moved_norm: bool = False, mean: float | None = None) -> None:
        super().__init__()
        vit: Any = network()
        norms: tuple[nn.Module, nn.Module] = (vit.norm, nn.Identity())
        vit.norm, vit.blocks = nn.Identity(), nn.Sequential(*vit.blocks)
        self.vit, self.blocks = vit, vit.blocks
        self.norm, self.fc_norm = norms[moved_norm], norms[not moved_norm]
        self.patch_embed = SimpleNamespace(patch_size=(8, 8))
        self.num_prefix_tokens = 3
        self.pretrained_cfg = {} if mean is None else {"mean": (mean,) * 3, "std": (0.5,) * 3}

    def forward_features(self, x: Tensor) -> Tensor:
        return self.norm(all_tokens(self.vit, x))


class TransformersLike(nn.Module):
    """Our network behind the interface of transformers; it takes other sizes only when told to resize."""

    def __init__(self, registers: int | None) -> None:
        super().__init__()
        self.vit = network()
        self.encoder = nn.Module()
        self.encoder.layer = self.vit.blocks
        self.config = SimpleNamespace(patch_size=8)
        if registers is not None:
            self.config.num_register_tokens = registers

    def forward(self, pixel_values: Tensor, interpolate_pos_encoding: bool = False) -> SimpleNamespace:
        assert interpolate_pos_encoding
        return SimpleNamespace(last_hidden_state=all_tokens(self.vit, pixel_values))


class MaskedLike(TransformersLike):
    """An MAE, which drops patches and shuffles the others by noise."""

    def forward(  # type: ignore[override]
        self, pixel_values: Tensor, noise: Tensor | None = None, interpolate_pos_encoding: bool = False
    ) -> SimpleNamespace:
        tokens = super().forward(pixel_values, interpolate_pos_encoding).last_hidden_state
        patches = tokens[:, 3:]
        order = (torch.rand(patches.shape[:2]) if noise is None else noise).argsort(1)
        kept = order[:, : int(patches.shape[1] * (1 - getattr(self.config, "mask_ratio", 0.75)))]
        shown = patches.gather(1, kept[..., None].expand(-1, -1, patches.shape[-1]))
        return SimpleNamespace(last_hidden_state=torch.cat([tokens[:, :3], shown], 1))


class Map(nn.Module):
    """A hub model that gives a feature map."""

    patch_size = 8

    def __init__(self, give: Any = None) -> None:
        super().__init__()
        self.vit, self.give = network(), give

    def forward(self, x: Tensor) -> Any:
        if self.give is not None:
            return self.give(self.vit(x))
        return self.vit(x).patches.transpose(1, 2).unflatten(2, (x.shape[2] // 8, x.shape[3] // 8))


class DinoLike(Map):
    """Our network behind the interface of DINO."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = self.vit.blocks

    def get_intermediate_layers(self, x: Tensor, n: int = 1) -> list[Tensor]:
        return [all_tokens(self.vit, x)]


class Dinov2Like(DinoLike):
    """Our network behind the interface of DINOv2."""

    def forward_features(self, x: Tensor) -> dict[str, Tensor]:
        return {"x_norm_patchtokens": self.vit(x).patches}


@pytest.mark.parametrize("layer", [-1, 1])
@pytest.mark.parametrize(
    "make",
    [
        TimmLike,
        partial(TimmLike, moved_norm=True),
        partial(TransformersLike, 2),
        partial(TransformersLike, None),
        partial(MaskedLike, None),
        DinoLike,
        Dinov2Like,
    ],
    ids=["timm", "timm, fc_norm", "hf", "hf, registers not counted", "hf, mae", "dino", "dinov2"],
)
def test_foreign_model_gives_its_patch_tokens(make: Any, layer: int) -> None:
    found, expected = adapt(make(), "any:like"), encoder()
    choose_layer(found, layer)
    choose_layer(expected, layer)
    assert found.patch_size == 8
    assert same(found, expected)
    assert "tokens before the patches are dropped" in found.report


def test_images_are_normalized_as_the_foreign_model_expects() -> None:
    found = adapt(TimmLike(mean=0.5), "timm:like")
    mean, std = (torch.tensor(x)[:, None, None] for x in (MEAN, STD))
    expected = encoder().features((images() * std + mean - 0.5) / 0.5)
    assert torch.allclose(found.features(images()), expected, atol=1e-5)
    assert "normalized as the model was trained" in found.report


def test_wrong_number_of_tokens_before_the_patches_is_an_error() -> None:
    model = TimmLike()
    model.num_prefix_tokens = 1
    odd = Encoder(Adapted(nn.Identity(), lambda x: torch.zeros(len(x), 40, 4), patch_size=8), "odd")
    models = {"1": adapt(model, "timm:like"), "5": adapt(TransformersLike(4), "hf:like"), "few": odd}
    for tokens, found in models.items():
        with pytest.raises(InputError, match=f"2x5 patches after {tokens} other tokens"):
            found.features(images())


def test_hub_repository_gives_its_model(tmp_path: Path) -> None:
    entries = "from tests.evaluation.networks import network as ours\n\ndef broken():\n    open('no file')\n"
    (tmp_path / "hubconf.py").write_text(entries, encoding="utf-8")
    assert same(load_encoder(f"hub:{tmp_path}:ours"), encoder())
    for entry, message in (("missing", "missing"), ("broken", "no file")):
        with pytest.raises(InputError, match=f"cannot load hub:.*{message}"):
            load_encoder(f"hub:{tmp_path}:{entry}")


def test_hub_model_may_give_a_map_but_nothing_else_than_tokens() -> None:
    found = adapt(Map(), "hub:like")
    assert same(found, encoder())
    with pytest.raises(InputError, match="its blocks are unknown"):
        choose_layer(found, 1)
    with pytest.raises(InputError, match=r"images of \(16, 40\) into \(2, 32\)"):
        adapt(Map(lambda tokens: tokens.frame), "hub:like").features(images())
    with pytest.raises(InputError, match="returns a tuple"):
        adapt(Map(lambda tokens: (tokens, tokens)), "hub:like").features(images())


def test_foreign_model_has_square_patches_and_no_reach() -> None:
    model = nn.Identity()
    model.patch_size = (8, 16)  # type: ignore[assignment]
    for wrong, size in ((model, r"\(8, 16\)"), (None, "None")):
        with pytest.raises(InputError, match=f"patch size {size}"):
            adapt(wrong, "hub:a:b")
    with pytest.raises(InputError, match="reach 3 of control:color"):
        load_encoder("control:color", reach=3)


def test_fingerprint_knows_every_weight_of_any_precision() -> None:
    found = adapt(TimmLike(), "timm:like")
    found.backbone.bfloat16()
    before = found.fingerprint()
    next(found.parameters()).data[..., 0] += 1
    assert found.fingerprint() != before


@pytest.mark.parametrize(("package", "spec"), [("timm", "timm:x"), ("transformers", "hf:x")])
def test_package_that_does_not_import_is_named(
    package: str, spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InputError, match=f"{spec} needs the package {package}.*pip install {package}"):
        load_encoder(spec)


class ResNetLike(nn.Module):
    """Three stages behind the interface of timm's features: the third of stride 16, or of 8 by dilation."""

    def __init__(self, output_stride: int) -> None:
        super().__init__()
        last = 2 if output_stride == 16 else 1
        self.stages = nn.Sequential(
            nn.Conv2d(3, 8, 7, stride=4, padding=3),
            nn.Conv2d(8, 8, 3, stride=2, padding=1),
            nn.Conv2d(8, 12, 3, stride=last, padding=3 - last, dilation=3 - last),
        )

    def forward(self, images: Tensor) -> list[Tensor]:
        return [self.stages(images)]


def test_resnets_of_timm_have_features_of_stride_16_or_8(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def create_model(name: str, **options: Any) -> nn.Module:
        asked.append({"name": name, **options})
        return ResNetLike(options["output_stride"])

    monkeypatch.setitem(sys.modules, "timm", SimpleNamespace(create_model=create_model))
    frames = torch.zeros(1, 64, 96, 3, dtype=torch.uint8)
    assert load_encoder("timm:resnet50")(frames).shape == (1, 12, 4, 6)
    fine = load_encoder("timm:resnet50.a1_in1k@8")
    assert fine(frames).shape == (1, 12, 8, 12)
    assert "stride 8 by dilation" in fine.report
    assert [(one["name"], one["out_indices"]) for one in asked] == [
        ("resnet50", (3,)),
        ("resnet50.a1_in1k", (3,)),
    ]
    with pytest.raises(InputError, match=r"timm:resnet50@4.*stride 16 or 8"):
        load_encoder("timm:resnet50@4")


def test_real_resnet_of_timm() -> None:
    need("timm")
    frames = torch.randint(0, 256, (1, 64, 96, 3), dtype=torch.uint8)
    for name, grid in (("resnet50", (4, 6)), ("resnet50@8", (8, 12))):
        encoder = load_timm(name, pretrained=False)
        assert encoder(frames).shape == (1, 1024, *grid)


def test_real_transformers_model(tmp_path: Path) -> None:
    transformers = need("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 64}
    model = transformers.ViTModel(transformers.ViTConfig(**sizes, intermediate_size=64, patch_size=16))
    model.eval().save_pretrained(tmp_path)
    frames = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        expected = model(frames).last_hidden_state[:, 1:]
    found = load_encoder(f"hf:{tmp_path}")
    assert torch.allclose(found.features(frames).flatten(2).transpose(1, 2), expected, atol=1e-5)
    assert load_encoder(f"hf:{tmp_path}", layer=0).features(torch.randn(1, 3, 32, 96)).shape == (1, 32, 2, 6)


def test_the_untrained_twin_of_a_run_has_its_network_and_other_weights(whole: Path) -> None:
    trained, twin = load_encoder(whole), load_encoder(f"untrained:{whole}")
    before, after = twin.backbone.state_dict(), trained.backbone.state_dict()
    assert {name: value.shape for name, value in before.items()} == {n: v.shape for n, v in after.items()}
    assert twin.fingerprint() == load_encoder(f"untrained:{whole}").fingerprint() != trained.fingerprint()
    with pytest.raises(InputError, match="does not exist"):
        load_encoder("untrained:nowhere")
