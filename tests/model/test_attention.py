"""Attention within reach: who sees whom, in the encoder and in its graph."""

import pytest
import torch
from torch import Tensor

from tcore.model import attention
from tcore.model import vit as vit_module
from tcore.model.attention import TILE, tiles_within_reach, tokens_seen, within_reach
from tcore.model.vit import VisionTransformer
from tests.model.test_vit import wanted_of

CPU = torch.device("cpu")


def network(reach: int | None, depth: int = 1) -> VisionTransformer:
    torch.manual_seed(0)
    vit = VisionTransformer(
        dim=24, depth=depth, num_heads=3, patch_size=8, image_size=48, layer_scale=1.0, reach=reach
    )
    for parameter in vit.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return vit.eval().requires_grad_(False)


def images(height: int = 48, width: int = 64) -> Tensor:
    return torch.randn(1, 3, height, width, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("reach", "rows", "columns", "prefix"), [(1, 4, 6, 5), (2, 3, 7, 1), (3, 5, 5, 0)])
def test_a_patch_sees_the_square_around_it_and_every_other_token(
    reach: int, rows: int, columns: int, prefix: int
) -> None:
    seen = tokens_seen(reach, rows, columns, prefix, CPU)
    assert seen.shape == (prefix + rows * columns,) * 2
    assert bool(seen[:prefix].all())
    assert bool(seen[:, :prefix].all())
    for one in range(rows * columns):
        for other in range(rows * columns):
            near = (
                abs(one // columns - other // columns) <= reach
                and abs(one % columns - other % columns) <= reach
            )
            assert seen[prefix + one, prefix + other] == near


def test_a_reach_over_the_whole_grid_needs_no_mask() -> None:
    assert within_reach(5, 6, 4, 5, CPU) is None
    assert within_reach(4, 6, 4, 5, CPU) is not None
    assert within_reach(4, 4, 6, 5, CPU) is not None


def test_what_is_out_of_reach_does_not_change_a_patch() -> None:
    vit, before = network(reach=2), images()
    after = before.clone()
    after[..., :8, :8] += 1  # the patch of row 0, column 0
    # The frame token sees everything, and is seen by all: in one block it still holds what it began with.
    moved = (vit(before).patches - vit(after).patches).abs().amax(dim=2).view(6, 8)
    assert bool((moved[:3, :3] > 1e-4).all())
    moved[:3, :3] = 0
    assert float(moved.max()) == 0


def test_encoder_with_a_long_reach_is_the_plain_one() -> None:
    torch.testing.assert_close(network(reach=7, depth=2)(images()), network(reach=None, depth=2)(images()))
    torch.testing.assert_close(
        network(reach=6, depth=2)(images(48, 48)), network(reach=None, depth=2)(images(48, 48))
    )


def test_what_is_wanted_is_within_reach_too() -> None:
    vit = network(reach=1, depth=3)
    pixels = torch.rand(6, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    whole, lean = vit(pixels), vit(pixels, wanted=wanted_of([1, 4], 6))
    torch.testing.assert_close(lean.patches, whole.patches[[1, 4]])
    torch.testing.assert_close(lean.frame, whole.frame)


@pytest.mark.parametrize(
    ("reach", "rows", "columns"), [(1, 1, 9), (2, 8, 16), (3, 9, 7), (1, 17, 8), (5, 13, 19), (3, 30, 55)]
)
def test_tiles_make_the_features_of_the_mask(
    monkeypatch: pytest.MonkeyPatch, reach: int, rows: int, columns: int
) -> None:
    vit = network(reach, depth=2)
    pixels = torch.randn(2, 3, 8 * rows, 8 * columns, generator=torch.Generator().manual_seed(3))
    found = {}
    monkeypatch.setattr(attention, "TILE_BYTES", 1 << 20)  # a few tiles at a time
    for large in (0, 10**9):
        monkeypatch.setattr(vit_module, "LARGE", large)
        with torch.no_grad():
            found[large] = vit(pixels)
    torch.testing.assert_close(found[0], found[10**9], rtol=0, atol=1e-5)
    assert not torch.equal(found[0].patches, found[10**9].patches)  # two computations, not one twice


def test_keys_of_a_tile_do_not_grow_with_the_grid() -> None:
    few, many = (tiles_within_reach(3, 8 * n, 8 * n, 5, CPU) for n in (4, 12))
    assert few.seen.shape == (16, 1, TILE**2, 5 + (TILE + 6) ** 2)
    assert many.seen.shape == (144, *few.seen.shape[1:])
    # Every patch is a query once, in the order of the grid.
    tokens = torch.cat([torch.arange(5), many.queries.flatten()])
    assert torch.equal(tokens[many.order], torch.arange(5 + 96**2))


def test_training_keeps_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*sizes: object) -> None:
        raise AssertionError(sizes)

    monkeypatch.setattr(vit_module, "LARGE", 0)
    monkeypatch.setattr(vit_module, "tiles_within_reach", refuse)
    vit = network(reach=1)
    vit(images())  # gradients may be wanted
    with torch.no_grad():
        vit.train()(images())
        with pytest.raises(AssertionError, match="6, 8"):
            vit.eval()(images())
