import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tcore.data.render import MEAN, STD
from tcore.errors import InputError
from tcore.evaluation.adapters import adapt_hub, adapt_timm, adapt_transformers
from tcore.evaluation.encoder import Adapted, Encoder
from tcore.evaluation.encoders import choose_layer, load_encoder, untrained
from tcore.model.vit import VisionTransformer

SIZES = {"dim": 32, "depth": 3, "num_heads": 2, "patch_size": 8, "image_size": 24, "num_registers": 2}


def network() -> VisionTransformer:
    torch.manual_seed(0)
    return VisionTransformer(**SIZES, layer_scale=0.5)


def images() -> Tensor:
    return torch.randn(2, 3, 16, 40, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """What a run exports."""
    state = network().state_dict()
    (tmp_path / "encoders").mkdir()
    save_file(state, tmp_path / "encoder.safetensors")
    save_file({k: v + 1 for k, v in state.items()}, tmp_path / "encoders" / "step-000001.safetensors")
    card = {"vit": SIZES | {"layer_scale": 0.5}}
    (tmp_path / "encoder.json").write_text(json.dumps(card), encoding="utf-8")
    return tmp_path


def test_run_folder_and_its_file_are_the_same_encoder(run: Path) -> None:
    expected = Encoder(network(), "source")
    for path in (run, str(run), run / "encoder.safetensors"):
        encoder = load_encoder(path)
        assert torch.equal(encoder.features(images()), expected.features(images()))
        assert encoder.fingerprint() == expected.fingerprint()
        assert "num_heads 2" in encoder.report


def test_kept_encoder_is_built_by_the_card_of_its_run(run: Path) -> None:
    kept = load_encoder(run / "encoders" / "step-000001.safetensors")
    assert torch.equal(kept.backbone.state_dict()["norm.bias"], torch.ones(32))


def test_frames_are_scaled_and_normalized() -> None:
    encoder = Encoder(network(), "source")
    frames = torch.randint(0, 256, (1, 16, 40, 3), dtype=torch.uint8)
    mean, std = torch.tensor(MEAN), torch.tensor(STD)
    expected = encoder.features(((frames / 255 - mean) / std).permute(0, 3, 1, 2))
    assert torch.allclose(encoder(frames), expected, atol=1e-5)


def test_untrained_encoder_is_always_the_same_and_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    assert untrained("random:vitti16").fingerprint() == load_encoder("random:vitti16").fingerprint()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("layer", "blocks"), [(0, 1), (1, 2), (2, 3), (-1, 3), (-2, 2), (-3, 1)])
def test_features_of_a_layer_are_its_output_after_the_final_norm(run: Path, layer: int, blocks: int) -> None:
    vit = network().eval()
    grids: list[Tensor] = []
    vit.blocks[blocks - 1].register_forward_hook(lambda _, __, out: grids.append(vit.norm(out)))
    with torch.no_grad():
        vit(images())
    expected = grids[0][:, 3:].transpose(1, 2).unflatten(2, (2, 5))
    encoder = load_encoder(run, layer=layer)
    assert torch.equal(encoder.features(images()), expected)
    assert (encoder.fingerprint() == load_encoder(run).fingerprint()) == (blocks == 3)
    assert (f"block {blocks} of 3" in encoder.report) == (blocks < 3)


def test_reach_of_a_run_is_that_of_its_card_unless_another_is_wanted(run: Path) -> None:
    trained = load_encoder(run)
    (run / "encoder.json").write_text(json.dumps({"vit": SIZES | {"layer_scale": 0.5, "reach": 1}}))
    near = load_encoder(run)
    assert not torch.equal(near.features(images()), trained.features(images()))
    assert torch.equal(load_encoder(run, reach=1).features(images()), near.features(images()))
    all_over = load_encoder(run, reach="everywhere")
    assert torch.equal(all_over.features(images()), trained.features(images()))
    assert all_over.fingerprint() == trained.fingerprint() != near.fingerprint()
    assert "patches look everywhere" in all_over.report
    assert "patches look 2 patches far" in load_encoder(run, reach=2).report


def test_reach_that_cannot_be_is_an_error(run: Path) -> None:
    with pytest.raises(InputError, match=r"reach 0 of .*: need 1 or more patches, or everywhere"):
        load_encoder(run, reach=0)
    with pytest.raises(InputError, match=r"reach 3 of control:color: only Vision Transformers that"):
        load_encoder("control:color", reach=3)
    (run / "encoder.json").write_text(json.dumps({"vit": SIZES | {"layer_scale": 0.5, "reach": "far"}}))
    with pytest.raises(InputError, match="reach='far' is no size that fits"):
        load_encoder(run)


@pytest.mark.parametrize("layer", [3, -4, 100])
def test_layer_that_does_not_exist_is_an_error(run: Path, layer: int) -> None:
    with pytest.raises(InputError, match=rf"layer {layer} of .*: it has 3 blocks, -3 to 2"):
        load_encoder(run, layer=layer)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("vits16", "did you mean random:vits16"),
        ("vit-s16", "did you mean random:vits16"),
        ("random:vits", "there are random:vitti16, random:vits16"),
        ("random", "'random' needs a name, as in random:vits16"),
        ("timm", "'timm' needs a name, as in timm:vit_small_patch16_224.dino"),
        ("hf:", "'hf:' needs a name, as in hf:facebook/dinov2-small"),
        ("hub", "needs a name, as in hub:facebookresearch/dinov2:dinov2_vits14"),
        ("hub:dinov2_vits14", "needs a repository and a name"),
        ("tim:vit_small", "did you mean timm:vit_small"),
        ("dinov2_vits14", "does not exist: give a run folder, a checkpoint"),
        ("nowhere/weights.pth", "does not exist: give a run folder, a checkpoint"),
    ],
)
def test_unknown_encoder_is_an_error_that_says_what_would_do(spec: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_encoder(spec)


def test_folder_without_an_encoder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds no encoder.safetensors .*hf:"):
        load_encoder(tmp_path)


def test_file_without_its_card_is_an_error(run: Path) -> None:
    (run / "encoder.json").unlink()
    with pytest.raises(InputError, match=r"no encoder.json beside"):
        load_encoder(run)


@pytest.mark.parametrize("card", ["{", "{}", "[]", '{"vit": {"color": 1}}', '{"vit": {"patch_size": 0}}'])
def test_broken_card_is_an_error(run: Path, card: str) -> None:
    (run / "encoder.json").write_text(card, encoding="utf-8")
    with pytest.raises(InputError, match=r"cannot read|no encoder can be built"):
        load_encoder(run)


def test_state_of_a_training_is_no_encoder(run: Path) -> None:
    torch.save({"model": {}}, run / "checkpoint.pt")
    with pytest.raises(InputError, match="give its run folder"):
        load_encoder(run / "checkpoint.pt")


def test_weights_of_another_network_are_an_error_that_lists_and_counts_them(run: Path) -> None:
    save_file({"norm.bias": torch.ones(3), "other": torch.ones(1)}, run / "encoder.safetensors")
    with pytest.raises(InputError, match=r"do not fit, \d+ keys: missing cls_token.*; and \d+ more"):
        load_encoder(run)


class TimmLike(nn.Module):
    """Our network behind the interface of timm."""

    def __init__(self, *, moved_norm: bool = False, mean: float | None = None) -> None:
        super().__init__()
        vit = network()
        self.vit = vit
        self.blocks = nn.Sequential(*vit.blocks)
        self.norm: nn.Module = nn.Identity() if moved_norm else vit.norm
        self.fc_norm: nn.Module = vit.norm if moved_norm else nn.Identity()
        self.patch_embed = SimpleNamespace(patch_size=(8, 8))
        self.num_prefix_tokens = 3
        self.pretrained_cfg = {} if mean is None else {"mean": (mean,) * 3, "std": (0.5,) * 3}

    def forward_features(self, images: Tensor) -> Tensor:
        """CLS, registers and patches; the norm of the inner network is taken out, the own one put in."""
        inner, vit = self.vit.norm, self.vit
        vit.blocks, vit.norm = nn.ModuleList(self.blocks), nn.Identity()  # type: ignore[assignment]
        tokens = vit(images)
        vit.norm = inner
        return self.norm(torch.cat([tokens.frame[:, None], tokens.registers, tokens.patches], 1))


@pytest.mark.parametrize("moved_norm", [False, True])
@pytest.mark.parametrize("layer", [-1, 1])
def test_timm_model_gives_its_patch_tokens(moved_norm: bool, layer: int) -> None:
    encoder, expected = adapt_timm(TimmLike(moved_norm=moved_norm), "timm:like"), Encoder(network(), "source")
    choose_layer(encoder, layer)
    choose_layer(expected, layer)
    assert encoder.patch_size == 8
    assert torch.equal(encoder.features(images()), expected.features(images()))
    assert "3 tokens before the patches are dropped" in encoder.report


def test_images_are_normalized_as_the_foreign_model_expects() -> None:
    encoder = adapt_timm(TimmLike(mean=0.5), "timm:like")
    mean, std = (torch.tensor(x)[:, None, None] for x in (MEAN, STD))
    expected = Encoder(network(), "source").features((images() * std + mean - 0.5) / 0.5)
    assert torch.allclose(encoder.features(images()), expected, atol=1e-5)
    assert "normalized as the model was trained" in encoder.report


def test_wrong_number_of_prefix_tokens_is_an_error() -> None:
    model = TimmLike()
    model.num_prefix_tokens = 1
    with pytest.raises(InputError, match="2x5 patches after 1 other tokens"):
        adapt_timm(model, "timm:like").features(images())


class TransformersLike(nn.Module):
    """Our network behind the interface of transformers; other sizes only where it is told to resize."""

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
        tokens = self.vit(pixel_values)
        all_tokens = torch.cat([tokens.frame[:, None], tokens.registers, tokens.patches], 1)
        return SimpleNamespace(last_hidden_state=all_tokens)


class MaskedLike(TransformersLike):
    """One that hides patches and shuffles the others by noise."""

    def forward(  # type: ignore[override]
        self, pixel_values: Tensor, noise: Tensor | None = None, interpolate_pos_encoding: bool = False
    ) -> SimpleNamespace:
        tokens = super().forward(pixel_values, interpolate_pos_encoding).last_hidden_state
        patches = tokens[:, 3:]
        order = (torch.rand(patches.shape[:2]) if noise is None else noise).argsort(1)
        kept = order[:, : int(patches.shape[1] * (1 - getattr(self.config, "mask_ratio", 0.75)))]
        shown = patches.gather(1, kept[..., None].expand(-1, -1, patches.shape[-1]))
        return SimpleNamespace(last_hidden_state=torch.cat([tokens[:, :3], shown], 1))


@pytest.mark.parametrize(
    "model",
    [TransformersLike(2), TransformersLike(None), MaskedLike(None)],
    ids=["counted", "uncounted", "mae"],
)
def test_transformers_model_gives_its_patch_tokens(model: TransformersLike) -> None:
    expected = Encoder(network(), "source")
    encoder = adapt_transformers(model, "hf:like")
    assert torch.equal(encoder.features(images()), expected.features(images()))
    choose_layer(encoder, 0)
    choose_layer(expected, 0)
    assert torch.equal(encoder.features(images()), expected.features(images()))


def test_wrong_number_of_registers_is_an_error() -> None:
    with pytest.raises(InputError, match="2x5 patches after 5 other tokens"):
        adapt_transformers(TransformersLike(4), "hf:like").features(images())


HUBCONF = '''
import torch
from tcore.model.vit import VisionTransformer

def ours():
    torch.manual_seed(0)
    sizes = dict(dim=32, depth=3, num_heads=2, patch_size=8, image_size=24, num_registers=2)
    return VisionTransformer(**sizes, layer_scale=0.5)

class Old(torch.nn.Module):
    """Interface of DINO."""
    def __init__(self):
        super().__init__()
        self.vit = ours()
        self.blocks = self.vit.blocks
        self.patch_embed = torch.nn.Module()
        self.patch_embed.patch_size = 8
    def get_intermediate_layers(self, x, n=1):
        tokens = self.vit(x)
        return [torch.cat([tokens.frame[:, None], tokens.registers, tokens.patches], 1)]

class New(torch.nn.Module):
    """Interface of DINOv2."""
    patch_size = 8
    def __init__(self):
        super().__init__()
        self.vit = ours()
        self.blocks = self.vit.blocks
    def forward_features(self, x):
        return {"x_norm_patchtokens": self.vit(x).patches}

class Map(torch.nn.Module):
    """A feature map as it is."""
    patch_size = 8
    def __init__(self):
        super().__init__()
        self.vit = ours()
    def forward(self, x):
        return self.vit(x).patches.transpose(1, 2).unflatten(2, (x.shape[2] // 8, x.shape[3] // 8))

class Pooled(Map):
    def forward(self, x):
        return self.vit(x).frame

class Pair(Map):
    def forward(self, x):
        return x, x

old, new, map, pooled, pair = (lambda made=made: made() for made in (Old, New, Map, Pooled, Pair))

def nothing():
    return None

def broken():
    raise KeyError("no such weights")
'''


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "hubconf.py").write_text(HUBCONF, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("entry", ["ours", "old", "new", "map"])
def test_hub_model_gives_its_patch_tokens(entry: str, repository: Path) -> None:
    encoder, expected = load_encoder(f"hub:{repository}:{entry}"), Encoder(network(), "source")
    assert torch.equal(encoder.features(images()), expected.features(images()))
    if entry != "map":
        choose_layer(expected, 1)
        layer = load_encoder(f"hub:{repository}:{entry}", layer=1)
        assert torch.equal(layer.features(images()), expected.features(images()))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("missing", "cannot load hub:.*missing"),
        ("broken", "cannot load hub:.*no such weights"),
        ("nothing", "has patch size None"),
        ("pooled", r"answers images of \(16, 40\) with \(2, 32\)"),
        ("pair", "answers with a tuple"),
    ],
)
def test_hub_model_that_cannot_be_used_is_an_error(entry: str, message: str, repository: Path) -> None:
    with pytest.raises(InputError, match=message):
        load_encoder(f"hub:{repository}:{entry}").features(images())


def test_layer_of_a_model_whose_blocks_are_not_known_is_an_error(repository: Path) -> None:
    with pytest.raises(InputError, match="its blocks are not known, only -1"):
        load_encoder(f"hub:{repository}:map", layer=1)


def test_grid_that_is_not_what_it_seems_is_an_error() -> None:
    model = nn.Identity()
    adapted = Adapted(model, lambda x: torch.zeros(len(x), 40, 4), patch_size=8)
    with pytest.raises(InputError, match="2x5 patches after few other tokens"):
        adapted(images())


def test_patches_that_are_not_square_are_an_error() -> None:
    model = nn.Identity()
    model.patch_size = (8, 16)  # type: ignore[assignment]
    with pytest.raises(InputError, match=r"patch size \(8, 16\)"):
        adapt_hub(model, "hub:a:b")


def test_fingerprint_knows_every_weight_of_any_precision() -> None:
    model = TimmLike().bfloat16()
    encoder = adapt_timm(model, "timm:like")
    encoder.backbone.bfloat16()
    before = encoder.fingerprint()
    model.vit.cls_token.data[..., 0] += 1
    assert encoder.fingerprint() != before


def installed(package: str) -> Any:
    """A package, or None where it does not import beside this torch."""
    try:
        return importlib.import_module(package)
    except (ImportError, RuntimeError):
        return None


@pytest.mark.parametrize(("package", "spec"), [("timm", "timm:x"), ("transformers", "hf:x")])
def test_package_that_does_not_import_is_named(package: str, spec: str) -> None:
    if installed(package) is not None:
        pytest.skip(f"{package} is installed")
    with pytest.raises(InputError, match=f"{spec} needs the package {package}.*pip install {package}"):
        load_encoder(spec)


def test_real_timm_model() -> None:
    timm = installed("timm")
    if timm is None:
        pytest.skip("timm does not import")
    model = timm.create_model(
        "vit_tiny_patch16_224", pretrained=False, num_classes=0, dynamic_img_size=True, depth=2, reg_tokens=4
    )
    encoder, frames = adapt_timm(model, "timm:tiny"), torch.randn(1, 3, 64, 96)
    with torch.no_grad():
        mean, std = (torch.tensor(model.pretrained_cfg[key])[:, None, None] for key in ("mean", "std"))
        ours, width = torch.tensor(MEAN)[:, None, None], torch.tensor(STD)[:, None, None]
        expected = model.forward_features((frames * width + ours - mean) / std)[:, 5:]
    found = encoder.features(frames)
    assert torch.allclose(found.flatten(2).transpose(1, 2), expected, atol=1e-4)
    choose_layer(encoder, 0)
    assert encoder.features(frames).shape == (1, 192, 4, 6)


@pytest.mark.parametrize("registers", [None, 4])
def test_real_transformers_model(registers: int | None, tmp_path: Path) -> None:
    transformers = installed("transformers")
    if transformers is None:
        pytest.skip("transformers does not import")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 64}
    if registers is None:
        model = transformers.ViTModel(transformers.ViTConfig(**sizes, intermediate_size=64, patch_size=16))
    else:
        config = transformers.Dinov2WithRegistersConfig(**sizes, patch_size=16, num_register_tokens=registers)
        model = transformers.Dinov2WithRegistersModel(config)
    model.eval().save_pretrained(tmp_path)
    frames = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        expected = model(frames).last_hidden_state[:, 1 + (registers or 0) :]
    encoder = load_encoder(f"hf:{tmp_path}")
    assert torch.allclose(encoder.features(frames).flatten(2).transpose(1, 2), expected, atol=1e-5)
    assert load_encoder(f"hf:{tmp_path}", layer=0).features(torch.randn(1, 3, 32, 96)).shape == (1, 32, 2, 6)
