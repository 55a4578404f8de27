"""Losses where they are special; their values are those of the golden files."""

import math

import pytest
import torch
from torch import Tensor

from tcore.model.losses import cross_entropy, koleo_loss, sinkhorn_targets

PROTOTYPES = 7
TEMPERATURE = 0.1


def outputs(count: int, seed: int) -> Tensor:
    """Raw outputs of a head: numbers from -1 to 1."""
    return torch.rand(count, PROTOTYPES, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def probabilities(count: int, seed: int) -> Tensor:
    return (outputs(count, seed) / 0.3).softmax(dim=-1)


def frame_tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(seed)) * 3


def test_losses_of_half_precision_arithmetic_are_computed_in_full() -> None:
    targets, out = probabilities(5, 0), outputs(5, 1).bfloat16()
    frames = frame_tokens(1, seed=1) + 1e-2 * frame_tokens(8)  # cosines that bf16 cannot distinguish
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = (cross_entropy(targets, out, TEMPERATURE), koleo_loss(frames, 8))
    exact = (cross_entropy(targets, out.float(), TEMPERATURE), koleo_loss(frames, 8))
    torch.testing.assert_close(found, exact, rtol=0, atol=0)


def test_koleo_of_a_part_counts_by_its_share_of_the_step() -> None:
    frames = frame_tokens(3)
    torch.testing.assert_close(koleo_loss(frames, 12), koleo_loss(frames, 3) / 4)


def test_koleo_of_one_video_is_zero_with_a_graph() -> None:
    frames = frame_tokens(1).requires_grad_()
    loss = koleo_loss(frames, 1)
    assert loss.item() == 0
    loss.backward()
    assert frames.grad is not None
    assert (frames.grad == 0).all()


def test_koleo_of_equal_frames_is_large_with_a_finite_gradient() -> None:
    frames = frame_tokens(1).expand(4, -1).clone().requires_grad_()
    loss = koleo_loss(frames, 4)
    assert 15 < loss.item() <= -math.log(1e-8)
    loss.backward()
    assert frames.grad is not None
    assert frames.grad.isfinite().all()


def test_koleo_of_opposite_frames_does_not_take_a_frame_for_its_own_neighbor() -> None:
    frames = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    assert koleo_loss(frames, 2).item() == pytest.approx(-math.log(2))


def test_sinkhorn_neither_overflows_nor_fails_on_nothing() -> None:
    assert sinkhorn_targets(100 * outputs(6, 0), 0.5).isfinite().all()
    assert sinkhorn_targets(torch.zeros(0, PROTOTYPES), 0.04).shape == (0, PROTOTYPES)
