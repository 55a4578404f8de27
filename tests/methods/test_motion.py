"""Cross-attention that follows motion: what it looks at, and training with it."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tcore import methods
from tcore.data.loader import render_batch
from tcore.methods.matching import HeadedAttention, PatchMatchingModule
from tcore.methods.motion import SPREAD, Scene, follow_motion, forget_places, geometry, view_scene
from tcore.methods.tcore import TCoRe
from tcore.model.vit import VisionTransformer
from tcore.training.loop import open_source
from tests.methods import tiny_models
from tests.methods.tiny_models import VALUES, seeded
from tests.tiny import tiny

ROWS, COLUMNS, DIM = 5, 6, 64
GRID, CPU = (ROWS, COLUMNS), torch.device("cpu")


def scene_of(masked: Tensor) -> Scene:
    places = torch.randn(ROWS * COLUMNS, DIM, generator=seeded(7))
    return Scene(masked.flatten(1), places, GRID, *geometry(*GRID, CPU))


def unit(*shape: int, seed: int) -> Tensor:
    return F.normalize(torch.randn(*shape, generator=seeded(seed)), dim=-1)


def slow(current: Tensor, other: Tensor, scale: float, masked: Tensor) -> Tensor:
    """One patch after the other: the formula as it is described."""
    cells = [(row, column) for row in range(ROWS) for column in range(COLUMNS)]
    found = (scale * current @ other.T).softmax(dim=-1)
    shares = torch.zeros(len(cells), len(cells))
    for i, (row, column) in enumerate(cells):
        visible = [j for j in range(len(cells)) if not masked[j]]
        far = [(cells[j][0] - row) ** 2 + (cells[j][1] - column) ** 2 for j in visible]
        alike = scale * current[visible] @ current[i] - torch.tensor(far) / (2 * SPREAD**2)
        for j, weight in zip(visible, alike.softmax(dim=0).tolist(), strict=True):
            for k, place in enumerate(cells):
                there = (row + place[0] - cells[j][0], column + place[1] - cells[j][1])
                if there in cells:
                    shares[i, cells.index(there)] += weight * found[j, k]
    return shares / shares.sum(dim=1, keepdim=True)


def test_attention_is_what_the_formula_says_patch_by_patch() -> None:
    current, other = unit(2, 1, ROWS * COLUMNS, 8, seed=0), unit(2, 1, ROWS * COLUMNS, 8, seed=1)
    masked = torch.rand(2, ROWS * COLUMNS, generator=seeded(2)) < 0.4
    found = follow_motion(current, other, 5.0, scene_of(masked))
    for number in range(2):
        expected = slow(current[number, 0], other[number, 0], 5.0, masked[number])
        torch.testing.assert_close(found[number, 0], expected, atol=1e-4, rtol=1e-3)


def test_a_masked_patch_goes_where_visible_patches_like_it_have_gone() -> None:
    """An object of 2 x 3 patches moves down and right before a ground that stays; half of it is masked."""
    thing, ground = unit(DIM, seed=3), unit(DIM, seed=4)
    own = 0.5 * unit(ROWS, COLUMNS, DIM, seed=5)  # what tells the patches of each from one another
    texture, moved = own + ground, own + ground
    texture[1:3, 1:4], moved[2:4, 2:5] = own[1:3, 1:4] + thing, own[1:3, 1:4] + thing
    masked = torch.zeros(1, ROWS, COLUMNS, dtype=torch.bool)
    masked[0, 1, 1] = masked[0, 2, 3] = masked[0, 1, 3] = masked[0, 4, 0] = True
    texture[1, 1] = texture[2, 3] = texture[1, 3] = thing  # of what is masked, no more is known than this
    texture[4, 0] = ground
    shape = (1, 1, ROWS * COLUMNS, DIM)
    share = follow_motion(
        F.normalize(texture.reshape(shape), dim=-1),
        F.normalize(moved.reshape(shape), dim=-1),
        20.0,
        scene_of(masked),
    )
    for (row, column), there in {(1, 1): (2, 2), (2, 3): (3, 4), (1, 3): (2, 4), (4, 0): (4, 0)}.items():
        highest = int(share[0, 0, row * COLUMNS + column].argmax())
        assert divmod(highest, COLUMNS) == there


def test_rows_sum_to_one_also_where_all_is_masked_or_has_left_the_frame() -> None:
    current = unit(1, 2, ROWS * COLUMNS, 8, seed=0)
    other = current.roll(COLUMNS * (ROWS - 1), 2)  # everything went up by a row; the first one left
    for masked in (torch.ones(1, ROWS, COLUMNS), torch.zeros(1, ROWS, COLUMNS)):
        share = follow_motion(current, other, 200.0, scene_of(masked.bool()))
        torch.testing.assert_close(share.sum(dim=-1), torch.ones(1, 2, ROWS * COLUMNS))
        assert (share >= 0).all()


def test_places_and_what_a_frame_has_in_common_are_forgotten() -> None:
    content = torch.randn(2, ROWS * COLUMNS, DIM, generator=seeded(1))
    places = torch.randn(ROWS * COLUMNS, DIM, generator=seeded(2))
    free = forget_places(content, places)
    shift = 3 * (places - places.mean(dim=0))  # as features that say where they are
    torch.testing.assert_close(forget_places(content + shift, places), free, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(free.mean(dim=1), torch.zeros(2, DIM), atol=1e-5, rtol=0)
    # Masked patches count for nothing in what is common.
    seen = torch.arange(ROWS * COLUMNS).expand(2, -1) % 3 > 0
    changed = torch.where(seen[..., None], content, 100.0)
    before, after = (forget_places(x, places, seen)[seen] for x in (content, changed))
    torch.testing.assert_close(before, after)


def test_what_is_taken_over_is_whole_and_what_is_compared_carries_no_gradient_to_it() -> None:
    attention = HeadedAttention(DIM, 1, temperature=0.05, form="motion", start="identity")
    source = torch.randn(1, ROWS * COLUMNS, DIM, generator=seeded(0))
    scene = scene_of(torch.zeros(1, ROWS, COLUMNS, dtype=torch.bool))
    query = source.clone().requires_grad_()
    found = attention(query, source, scene)
    expected = attention.map(query, source, scene)[:, 0] @ source
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    source = source.clone().requires_grad_()
    attention(query, source, scene).sum().backward()
    assert query.grad is None
    assert source.grad is not None  # what is taken over is the value, whose projection is the identity
    share = attention.map(query, source, scene)[:, 0].sum(dim=1)
    torch.testing.assert_close(source.grad, share[..., None].expand_as(source), atol=1e-4, rtol=1e-4)
    assert attention.in_proj_weight.grad is not None
    queries, keys, values = attention.in_proj_weight.grad.chunk(3)
    assert all(part.abs().sum() > 0 for part in (queries, keys, values))


def test_a_scene_is_what_the_encoder_makes_of_nothing() -> None:
    torch.manual_seed(0)
    backbone = VisionTransformer(
        dim=16, depth=2, num_heads=2, patch_size=8, image_size=32, drop_path=0.5, position_std=1.0
    )
    masked = torch.zeros(3, 4 * 6, dtype=torch.bool)
    scene = view_scene(backbone.train(), masked, (4, 6))
    assert scene.places.shape == (24, 16)
    assert not scene.places.requires_grad
    content = torch.randn(1, 3, 32, 48)  # is not seen: all patches are masked
    expected = backbone.eval()(content, torch.ones(1, 24, dtype=torch.bool)).patches[0]
    torch.testing.assert_close(scene.places, expected)


def test_a_run_may_follow_motion_and_the_published_module_needs_no_scene() -> None:
    settings = {"matching__form": "motion", "matching__start": "identity", "matching__num_heads": 1}
    config = tiny(**settings, matching__temperature=0.07)
    tcore = methods.build(config)
    assert isinstance(tcore, TCoRe)
    batch = render_batch(open_source(config, None)[0], CPU)
    scene = tcore.scene(batch)
    assert scene is not None
    assert torch.equal(scene.masked, batch.mask[batch.masked])
    losses = tcore(batch, VALUES)
    tcore.total(losses).backward()
    trained = [p for p in tcore.student.parameters() if p.requires_grad]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in trained)
    assert tcore.match is not None
    grads = [p.grad for name, p in tcore.match.named_parameters() if "cross_attention" in name]
    assert all(grad is not None and grad.abs().sum() > 0 for grad in grads)
    published = methods.build(tiny())
    assert isinstance(published, TCoRe)
    assert published.scene(batch) is None
    assert not PatchMatchingModule(dim=16, num_heads=2).needs_scene


def test_a_part_of_a_step_may_have_no_masked_crop() -> None:
    tcore = tiny_models.model()
    tcore.match = PatchMatchingModule(dim=tiny_models.DIM, num_heads=1, form="motion")
    losses = tcore(tiny_models.batch(masked=()), VALUES)
    assert all(loss.isfinite() for loss in losses.values())
