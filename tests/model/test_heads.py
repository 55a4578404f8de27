"""The projection head: size, first values, cosines, gains."""

import math

import pytest
import torch
from torch import Tensor, nn

from tcore.model.heads import ProjectionHead

DIM, PROTOTYPES = 12, 20


def head(*, train_gains: bool = True) -> ProjectionHead:
    """A head with random biases, so that nothing is zero by accident."""
    torch.manual_seed(0)
    made = ProjectionHead(
        dim=DIM, hidden=16, bottleneck=8, num_prototypes=PROTOTYPES, train_gains=train_gains
    )
    for layer in made.mlp:
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=0.3)
            nn.init.normal_(layer.bias, std=0.3)
    return made


def tokens(count: int = 6) -> Tensor:
    return torch.randn(count, DIM, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("dim", "published"), [(384, 22_352_128), (768, 23_138_560)])
def test_head_has_the_published_number_of_parameters(dim: int, published: int) -> None:
    assert sum(p.numel() for p in ProjectionHead(dim=dim).parameters()) == published


def test_head_starts_as_specified() -> None:
    torch.manual_seed(0)
    made = ProjectionHead(dim=96, hidden=128, bottleneck=64, num_prototypes=256)
    linears = [layer for layer in made.mlp if isinstance(layer, nn.Linear)]
    assert len(linears) == 3
    for layer in linears:
        assert layer.weight.std().item() == pytest.approx(0.02, rel=0.05)
        assert (layer.bias == 0).all()
    assert (made.prototypes.gains == 1).all()
    directions, bound = made.prototypes.directions, 1 / math.sqrt(64)
    assert directions.abs().max() <= bound
    assert directions.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.03)


@pytest.mark.parametrize("train_gains", [True, False])
def test_gains_are_trained_by_choice(train_gains: bool) -> None:
    made = head(train_gains=train_gains)
    trained = {name for name, p in made.named_parameters() if p.requires_grad}
    assert ("prototypes.gains" in trained) == train_gains
    assert "prototypes.gains" in made.state_dict()
    (made(tokens()) ** 2).sum().backward()
    gradient = made.prototypes.gains.grad
    assert gradient is None if not train_gains else gradient is not None and (gradient != 0).all()
    assert made.prototypes.directions.grad is not None


def test_zero_bottleneck_gives_zeros_and_finite_gradients() -> None:
    made = ProjectionHead(dim=DIM, hidden=16, bottleneck=8, num_prototypes=PROTOTYPES)
    outputs = made(torch.zeros(2, DIM))  # biases start at zero
    assert (outputs == 0).all()
    outputs.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in made.parameters())
    assert made(torch.zeros(0, DIM)).shape == (0, PROTOTYPES)
