"""The frame encoder: size, first values, positions, masks, stochastic depth."""

import math
from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from tcore.config import VitSpec
from tcore.data.source import Counts
from tcore.errors import InputError
from tcore.methods.batch import make_batch
from tcore.model.positions import ResizePositions, resize_positions
from tcore.model.subset import Share, Subset, Wanted, add_residual, draw_gates, draw_subsets
from tcore.model.vit import Block, LayerScale, Tokens, VisionTransformer, build_vit
from tcore.recipes import VIT_B, VIT_L, VIT_S, VIT_TI

PATCH, DIM = 8, 24


def encoder(
    *, depth: int = 2, layer_scale: float = 0.5, drop_path: float = 0.0, image_size: int = 32
) -> VisionTransformer:
    torch.manual_seed(0)
    return VisionTransformer(
        dim=DIM,
        depth=depth,
        num_heads=3,
        patch_size=PATCH,
        image_size=image_size,
        layer_scale=layer_scale,
        drop_path=drop_path,
    )


def images(count: int, height: int = 32, width: int = 32, seed: int = 1) -> Tensor:
    return torch.randn(count, 3, height, width, generator=seeded(seed))


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def count(vit: VitSpec) -> int:
    """Parameters of an encoder; one block is built and counted as often as there are blocks."""
    built = build_vit(replace(vit, depth=1), 224)
    block = sum(p.numel() for p in built.blocks.parameters())
    return sum(p.numel() for p in built.parameters()) + (vit.depth - 1) * block


def assert_same(first: Tokens, second: Tokens) -> None:
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("vit", "published"),
    [(VIT_TI, 5_529_984), (VIT_S, 21_676_800), (VIT_B, 85_820_928), (VIT_L, 303_355_904)],
)
def test_encoder_has_the_published_number_of_parameters(vit: VitSpec, published: int) -> None:
    assert count(vit) == published


@pytest.mark.parametrize(("position_std", "layer_scale"), [(0.02, 1e-5), (0.5, 0.1)])
def test_parameters_start_as_specified(position_std: float, layer_scale: float) -> None:
    torch.manual_seed(0)
    spec = VitSpec(dim=192, depth=2, num_heads=3, position_std=position_std, layer_scale=layer_scale)
    vit = build_vit(spec, 112)
    assert (vit.mask_token == 0).all()
    for nearly_zero in (vit.cls_token, vit.register_tokens):
        assert 0.7e-6 < nearly_zero.std() < 1.3e-6
    assert vit.register_tokens.shape[1] == 4
    assert vit.pos_embed.std().item() == pytest.approx(position_std, rel=0.05)
    assert vit.pos_embed.mean().abs() < 0.05 * position_std
    linears = [module for module in vit.modules() if isinstance(module, nn.Linear)]
    assert len(linears) == 2 * 4
    for linear in linears:
        assert linear.weight.std().item() == pytest.approx(0.02, rel=0.05)
        assert (linear.bias == 0).all()
    weight, bound = vit.patch_embed.proj.weight, 1 / math.sqrt(3 * 16 * 16)  # PyTorch's default
    assert weight.abs().max() <= bound
    assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)
    gammas = [p for name, p in vit.named_parameters() if name.endswith("gamma")]
    assert len(gammas) == 4
    assert all((gamma == layer_scale).all() for gamma in gammas)
    assert {norm.eps for norm in vit.modules() if isinstance(norm, nn.LayerNorm)} == {1e-6}


def test_shrinking_the_position_grid_averages_instead_of_skipping() -> None:
    """The mean of the 16 cells that become one has a quarter of their deviation, one of them all of it."""
    vit = encoder(image_size=128)  # 16 x 16
    nn.init.normal_(vit.pos_embed)
    assert vit.positions(4, 4)[:, 1:].std() < 0.4


@pytest.mark.parametrize("antialias", [True, False])
def test_resized_positions_have_the_gradient_of_torch_by_a_matrix_product(antialias: bool) -> None:
    """On CUDA, where torch adds it up in any order; the positions themselves are the same bits."""
    grid = torch.randn(1, 5, 8, 8, requires_grad=True)
    weights = torch.randn(1, 5, 3, 6)
    plain = resize_positions(grid, 3, 6, antialias=antialias)
    fast = ResizePositions.apply(grid, 3, 6, antialias)  # type: ignore[no-untyped-call]
    assert torch.equal(plain, fast)
    wanted, found = (torch.autograd.grad((x * weights).sum(), grid)[0] for x in (plain, fast))
    assert torch.allclose(wanted, found, atol=1e-6)
    assert found.abs().max() > 0.1


@pytest.mark.parametrize(("height", "width"), [(36, 32), (32, 36), (4, 32)])
def test_image_that_is_no_multiple_of_the_patch_is_refused(height: int, width: int) -> None:
    with pytest.raises(InputError, match=rf"{width}x{height}.*patch size {PATCH}"):
        encoder()(images(1, height, width))


def test_pixels_under_the_mask_do_not_matter() -> None:
    vit, before = encoder(), images(1)
    mask = torch.zeros(1, 16, dtype=torch.bool)
    mask[0, 5] = True  # row 1, column 1
    after = before.clone()
    after[:, :, 8:16, 8:16] = images(1, 8, 8, seed=9)
    assert_same(vit(before, mask), vit(after, mask))
    assert not torch.equal(vit(before).frame, vit(after).frame)


def test_stochastic_depth_is_off_when_evaluating_and_on_request() -> None:
    plain, dropping = encoder(), encoder(drop_path=0.5)
    pixels = images(4)
    expected = plain(pixels)
    assert_same(dropping(pixels, None, seeded(0), stochastic_depth=False), expected)
    assert not torch.equal(dropping(pixels, None, seeded(0)).frame, expected.frame)
    assert_same(dropping.eval()(pixels, None, seeded(0)), expected)


def subset(batch: int, drop: float, generator: torch.Generator) -> Share:
    return draw_subsets([drop], batch, generator, torch.device("cpu"))[0]


def test_stochastic_depth_keeps_and_scales_as_specified() -> None:
    for batch in range(1, 41):
        kept = max(1, batch * 9 // 10)
        rows: list[int] = []

        def ones(x: Tensor, rows: list[int] = rows) -> Tensor:
            rows.append(x.shape[0])
            return torch.ones_like(x)

        added = add_residual(torch.zeros(batch, 1, 2), ones, subset(batch, 0.1, seeded(batch)))
        assert rows == [kept]  # computed for those alone
        changed = added[added != 0]
        assert changed.shape == (2 * kept,)
        torch.testing.assert_close(changed, torch.full_like(changed, batch / kept))


def test_attention_and_mlp_draw_separate_subsets() -> None:
    """Each half may write to one channel only, which shows the rows that it was computed for."""
    torch.manual_seed(0)
    block = Block(DIM, 3, layer_scale=0.0)
    assert isinstance(block.ls1, LayerScale)
    assert isinstance(block.ls2, LayerScale)
    with torch.no_grad():
        block.ls1.gamma[0] = 1.0
        block.ls2.gamma[1] = 1.0
    x = torch.randn(8, 3, DIM)
    differ = 0
    for seed in range(20):
        changed = (block(x, *draw_subsets([0.5, 0.5], 8, seeded(seed), x.device)) != x).any(dim=1)
        attended, transformed = changed[:, 0], changed[:, 1]
        assert attended.sum() == transformed.sum() == 4
        differ += not torch.equal(attended, transformed)
    assert differ >= 17  # independent halves of 8 agree once in 70


def test_stochastic_depth_is_a_function_of_the_generator_alone() -> None:
    vit, pixels = encoder(drop_path=0.5), images(6)
    state = torch.get_rng_state()
    first = vit(pixels, None, seeded(5))
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    assert_same(vit(pixels, None, seeded(5)), first)
    assert not torch.equal(vit(pixels, None, seeded(6)).frame, first.frame)


def test_empty_batch_gives_empty_tokens() -> None:
    tokens = encoder(drop_path=0.1)(images(0), torch.zeros(0, 16, dtype=torch.bool))
    assert [part.shape for part in tokens[:3]] == [(0, DIM), (0, 4, DIM), (0, 16, DIM)]


def wanted_of(masked: list[int], batch: int) -> Wanted:
    """The patches of some samples, of the others the frame token."""
    mask = torch.zeros(batch, 16, dtype=torch.bool)
    mask[masked, 3] = True
    views = torch.zeros(batch, 3, 32, 32)
    # Part of a step that has crops without a mask elsewhere: else a mask in every crop would mean "all".
    wanted = make_batch(views, views[:0], mask, counts=Counts(batch, batch, batch)).wanted()
    assert isinstance(wanted, Wanted)
    return wanted


@pytest.mark.parametrize("drop_path", [0.0, 0.5])
@pytest.mark.parametrize("masked", [[1, 4], [0, 1, 2, 3, 4, 5], []])
def test_what_is_wanted_is_as_if_all_had_been_made(masked: list[int], drop_path: float) -> None:
    vit = encoder(drop_path=drop_path).train()
    images = torch.rand(6, 3, 32, 32)
    weights = torch.rand(6, DIM), torch.rand(len(masked), 16, DIM)

    def outcome(wanted: Wanted | Literal["all"]) -> tuple[Tensor, Tensor, list[Tensor]]:
        tokens = vit(images, None, torch.Generator().manual_seed(3), wanted=wanted)
        patches = tokens.patches if isinstance(wanted, Wanted) else tokens.patches[masked]
        vit.zero_grad()
        ((tokens.frame * weights[0]).sum() + (patches * weights[1]).sum()).backward()
        gradients = [p.grad.clone() for p in vit.parameters() if p.grad is not None]
        return tokens.frame.detach(), patches.detach(), gradients

    lean, plain = outcome(wanted_of(masked, 6)), outcome("all")
    torch.testing.assert_close(lean[:2], plain[:2], rtol=1e-4, atol=1e-6)
    assert len(lean[2]) > 20
    for one, other in zip(lean[2], plain[2], strict=True):
        # Gradients are sums over 6 x 21 tokens. Adding n numbers in another order changes their sum by up
        # to n x 2^-24 times the sum of their sizes, for which the largest entry stands: in small ones they
        # cancel.
        floor = 6 * 21 * 2**-24 * float(other.abs().max())
        torch.testing.assert_close(one, other, rtol=1e-4, atol=floor)


@pytest.mark.parametrize("drop_path", [0.0, 0.5])
def test_frames_alone_are_as_if_all_had_been_made(drop_path: float) -> None:
    vit = encoder(drop_path=drop_path).train()
    images = torch.rand(6, 3, 32, 32)
    lean, plain = (
        vit(images, None, torch.Generator().manual_seed(3), wanted=wanted) for wanted in ("frames", "all")
    )
    torch.testing.assert_close(lean.frame, plain.frame)
    assert lean.patches.shape == (0, 0, DIM)
    assert plain.patches.shape == (6, 16, DIM)


def test_the_last_block_makes_no_more_than_is_wanted() -> None:
    vit, images = encoder(), torch.rand(6, 3, 32, 32)
    rows: list[int] = []
    mlp = vit.blocks[-1].get_submodule("mlp")
    mlp.register_forward_hook(lambda module, given, made: rows.append(made.shape[:2].numel()))
    for wanted in ("all", "frames", wanted_of([1, 4], 6)):
        vit(images, wanted=wanted)
    tokens = 1 + 4 + 16
    assert rows == [6 * tokens, 6, 2 * tokens, 4]


def test_each_sample_skips_by_itself_at_rates_that_rise_with_the_block() -> None:
    vit = VisionTransformer(
        dim=DIM, depth=3, num_heads=3, drop_path=0.4, drop_path_rule="linear", drop_path_form="sample"
    )
    assert vit.drop_rates == pytest.approx([0.0, 0.2, 0.4])
    first, second = draw_gates([0.0, 0.4], 4000, seeded(0), torch.device("cpu"))
    assert first is None
    assert isinstance(second, Tensor)
    assert second.unique().tolist() == pytest.approx([0.0, 1 / 0.6])
    assert float((second == 0).float().mean()) == pytest.approx(0.4, abs=0.03)
    assert float(second.mean()) == pytest.approx(1.0, abs=0.05)


def test_subsets_of_rising_rates_leave_out_their_own_shares() -> None:
    shares = draw_subsets([0.0, 0.25, 0.5], 8, seeded(0), torch.device("cpu"))
    assert shares[0] is None
    assert [len(share.rows) for share in shares if isinstance(share, Subset)] == [6, 4]


def test_without_layer_scale_there_is_no_gain_and_the_card_says_so() -> None:
    vit = VisionTransformer(dim=DIM, depth=1, num_heads=3, layer_scale=None, position_resize="factor")
    assert not any("gamma" in name for name in vit.state_dict())
    sizes = vit.sizes()
    assert (sizes["layer_scale"], sizes["position_resize"]) == (None, "factor")


def test_sincos_positions_and_a_frozen_projection_are_not_trained() -> None:
    vit = VisionTransformer(dim=16, depth=1, num_heads=2, positions="sincos", train_patch_embed=False)
    fixed = {name for name, p in vit.named_parameters() if not p.requires_grad}
    assert fixed == {"pos_embed", "patch_embed.proj.weight", "patch_embed.proj.bias"}
    grid = vit.pos_embed[0, 1:].view(14, 14, 16)
    assert torch.equal(vit.pos_embed[0, 0], torch.zeros(16))
    # The first half is of the row, the second of the column.
    assert torch.equal(grid[3, 5, :8], grid[3, 9, :8])
    assert torch.equal(grid[3, 5, 8:], grid[11, 5, 8:])
    assert grid[3, 5, 0].item() == pytest.approx(math.sin(3), abs=1e-6)
    assert grid[3, 5, 13].item() == pytest.approx(math.cos(5 * 10000**-0.25), abs=1e-6)


def test_xavier_start_counts_queries_keys_and_values_as_three_matrices() -> None:
    torch.manual_seed(0)
    vit = VisionTransformer(dim=64, depth=1, num_heads=2, init="xavier")
    weights = {name: p for name, p in vit.named_parameters() if p.ndim > 1}
    for name, (inputs, outputs) in {
        "blocks.0.attn.qkv.weight": (64, 64),
        "blocks.0.mlp.fc1.weight": (64, 256),
        "patch_embed.proj.weight": (768, 64),
    }.items():
        bound = math.sqrt(6 / (inputs + outputs))
        assert 0.98 * bound < weights[name].abs().max().item() <= bound, name
    assert not vit.patch_embed.proj.bias.any()  # type: ignore[union-attr]
