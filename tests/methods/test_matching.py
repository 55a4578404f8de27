"""The patch matching module: formula, settings, attention map."""

import math

import pytest
import torch
from torch import Tensor, nn

from tcore.methods.matching import HeadedAttention, MatchingBlock, PatchMatchingModule

DIM, HEADS = 16, 4


def module(*, gain: float = 4.0, num_blocks: int = 1, temperature: float = 1.0) -> PatchMatchingModule:
    """A module whose every parameter is random."""
    torch.manual_seed(0)
    match = PatchMatchingModule(
        dim=DIM, num_heads=HEADS, gain=gain, num_blocks=num_blocks, temperature=temperature
    )
    for parameter in match.parameters():
        nn.init.normal_(parameter, std=0.5)
    return match


def frames(current: int = 5, auxiliary: int = 7, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(2, current, DIM, generator=generator),
        torch.randn(2, auxiliary, DIM, generator=generator),
    )


def blocks(match: PatchMatchingModule) -> list[MatchingBlock]:
    return [block for block in match.blocks if isinstance(block, MatchingBlock)]


def reference(attention: HeadedAttention) -> nn.MultiheadAttention:
    """PyTorch's own attention with the same weights."""
    other = nn.MultiheadAttention(DIM, HEADS, batch_first=True)
    other.load_state_dict(attention.state_dict())
    return other


def slow_block(block: MatchingBlock, gain: float, s: Tensor, a: Tensor) -> Tensor:
    x = block.norm1(gain * reference(block.cross_attention)(s, a, a)[0] + s)
    y = block.norm2(reference(block.self_attention)(x, x, x)[0] + x)
    return block.norm3(block.linear(y) + y)


@pytest.mark.parametrize(("dim", "published"), [(384, 1_332_864), (768, 5_319_936)])
def test_module_has_the_published_number_of_parameters(dim: int, published: int) -> None:
    assert sum(p.numel() for p in PatchMatchingModule(dim=dim).parameters()) == published


@pytest.mark.parametrize(("gain", "num_blocks"), [(0.0, 1), (1.0, 1), (4.0, 3)])
def test_output_of_a_block_is_the_current_frame_of_the_next(gain: float, num_blocks: int) -> None:
    match, (x, auxiliary) = module(gain=gain, num_blocks=num_blocks), frames()
    found = match(x, auxiliary)
    for block in blocks(match):
        last = reference(block.cross_attention)(x, auxiliary, auxiliary)[1]
        x = slow_block(block, gain, x, auxiliary)
    torch.testing.assert_close(found, x)
    torch.testing.assert_close(match.attention(*frames()).cross, last)


def test_module_starts_at_the_defaults_of_pytorch() -> None:
    torch.manual_seed(0)
    (block,) = blocks(PatchMatchingModule(dim=96))
    for attention in (block.cross_attention, block.self_attention):
        xavier = math.sqrt(6 / (96 + 3 * 96))
        assert attention.in_proj_weight.abs().max() <= xavier
        assert attention.in_proj_weight.std().item() == pytest.approx(xavier / math.sqrt(3), rel=0.02)
        assert (attention.in_proj_bias == 0).all()
        assert (attention.out_proj.bias == 0).all()
    for linear in (block.cross_attention.out_proj, block.self_attention.out_proj, block.linear):
        bound = 1 / math.sqrt(96)
        assert linear.weight.abs().max() <= bound
        assert linear.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)
    assert 0 < block.linear.bias.abs().max() <= bound
    for norm in (block.norm1, block.norm2, block.norm3):
        assert (norm.weight == 1).all()
        assert (norm.bias == 0).all()


def test_attention_is_the_mean_over_heads_and_its_rows_sum_to_one() -> None:
    match, (current, auxiliary) = module(), frames(auxiliary=9)
    (block,) = blocks(match)
    attention = match.attention(current, auxiliary)
    assert attention.cross.shape == (2, 5, 9)
    for one in attention:
        assert (one >= 0).all()
        torch.testing.assert_close(one.sum(dim=-1), torch.ones(one.shape[:-1]))
    crossed = block.cross(current, auxiliary)
    torch.testing.assert_close(attention.self_, reference(block.self_attention)(crossed, crossed, crossed)[1])


def test_temperature_divides_the_logits_of_the_cross_attention() -> None:
    current, auxiliary = frames()
    warm, cold = (blocks(module(temperature=t))[0].cross_attention for t in (1.0, 0.5))
    expected = (2 * warm.map(current, auxiliary).log()).softmax(dim=-1)
    torch.testing.assert_close(cold.map(current, auxiliary), expected)
    # What is gathered goes by the same temperature as what is shown: halve it and double the queries' scale.
    with torch.no_grad():
        warm.in_proj_weight[:DIM] *= 2
        warm.in_proj_bias[:DIM] *= 2
    torch.testing.assert_close(cold(current, auxiliary), warm(current, auxiliary))


def test_temperature_leaves_the_self_attention_alone() -> None:
    warm, cold = (module(gain=0.0, temperature=t).attention(*frames()) for t in (1.0, 0.25))
    assert torch.equal(warm.self_, cold.self_)
    assert not torch.allclose(warm.cross, cold.cross)


def test_cosine_form_compares_directions_alone() -> None:
    torch.manual_seed(0)
    attention = HeadedAttention(DIM, HEADS, temperature=0.5, form="cosine")
    query, source = (x[:1] for x in frames())
    q, k, _ = attention._project(query, source)
    unit = [x / x.norm(dim=-1, keepdim=True) for x in (q, k)]
    torch.testing.assert_close(
        attention.map(query, source), (unit[0] @ unit[1].mT / 0.5).softmax(dim=-1), rtol=1e-5, atol=1e-6
    )
    dot = HeadedAttention(DIM, HEADS, temperature=0.5)
    dot.load_state_dict(attention.state_dict())
    for one, changes in ((attention, False), (dot, True)):
        same = torch.allclose(one.map(3 * query, source), one.map(query, source), atol=1e-6)
        assert same != changes


def test_projections_that_start_as_the_identity_find_the_patch_itself() -> None:
    attention = HeadedAttention(DIM, 1, temperature=0.01, form="cosine", start="identity")
    _, source = frames()
    torch.testing.assert_close(attention(source, source), source, rtol=1e-4, atol=1e-4)
    published = HeadedAttention(DIM, 1)
    assert not torch.allclose(published(source, source), source, atol=0.1)
    (block,) = blocks(PatchMatchingModule(dim=DIM, num_heads=HEADS, form="cosine", start="identity"))
    assert (block.cross_attention.form, block.self_attention.form) == ("cosine", "dot")
