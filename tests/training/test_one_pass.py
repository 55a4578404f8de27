"""What the compiler is told about rows."""

from types import SimpleNamespace

import pytest
import sympy  # type: ignore[import-untyped]
import torch
import torch._inductor.config
import torch.nn.functional as F
from torch._inductor.runtime.hints import ReductionHint
from torch._inductor.virtualized import V

from tcore.training.one_pass import OnePass
from tcore.training.wrapping import read_rows_once

SIZES = SimpleNamespace(statically_known_leq=lambda left, right: bool(left <= right))


@pytest.mark.parametrize(
    ("length", "hint", "held"),
    [
        (384, ReductionHint.DEFAULT, True),  # gathered rows of an encoder
        (384, ReductionHint.INNER, True),  # rows in their order: the compiler's own rule
        (384, ReductionHint.OUTER, False),  # sums over tokens
        (1536, ReductionHint.DEFAULT, False),
    ],
)
def test_gathered_rows_of_an_encoder_are_held_in_one_program(
    length: int, hint: ReductionHint, held: bool
) -> None:
    features = SimpleNamespace(
        reduction_numel=sympy.Integer(length), numel=sympy.Integer(10**6), get_reduction_hint=lambda: hint
    )
    with V.set_graph_handler(SimpleNamespace(sizevars=SIZES)):
        assert OnePass.should_use_persistent_reduction(features, False) == held


@pytest.mark.filterwarnings("ignore")  # torch, of its own affairs, where it compiles
def test_the_compiler_takes_the_choice_and_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._inductor.config, "inductor_choices_class", None)
    read_rows_once()
    assert torch._inductor.config.inductor_choices_class is OnePass
    x, rows = torch.randn(8, 64), torch.tensor([5, 2, 7])

    def normed(x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x[rows], (64,))

    compiled = torch.compile(normed)
    torch.testing.assert_close(compiled(x), normed(x))
