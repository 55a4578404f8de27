"""Bytes that autograd keeps of a block and of the matching module, per token; run by itself, compiled."""

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tcore.model.matching import PatchMatchingModule
from tcore.model.subset import draw_subsets
from tcore.model.vit import Block, run_block

SAMPLES, TOKENS, DIM, HEADS = 8, 37, 96, 4


def kept_bytes(module: nn.Module, function: Callable[[], Tensor], bf16: bool) -> float:
    """Bytes per token of all that is kept of a function, but for weights and their copies in bf16."""
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    found: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        # Whatever is kept for tokens has as many rows as there are, which no weight has.
        is_weight = tensor.dim() == 2 and set(tensor.shape) <= {DIM, 3 * DIM, 4 * DIM}
        if storage.data_ptr() not in own and not is_weight:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with (
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16),
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
    ):
        function()
    return sum(found.values()) / (SAMPLES * TOKENS)


def maybe_compile(function: Callable[..., Any], compiled: bool) -> Callable[..., Any]:
    """What is kept is decided before kernels are written: that much of the compiler will do."""
    if not compiled:
        return function
    return torch.compile(function, dynamic=False, backend="aot_eager_decomp_partition")


def of_a_block(compiled: bool, bf16: bool, drop: float) -> float:
    block, run = Block(DIM, HEADS, 1e-5), maybe_compile(run_block, compiled)
    x = torch.randn(SAMPLES, TOKENS, DIM, requires_grad=True)
    subsets = draw_subsets(2, SAMPLES, drop, None, x.device) if drop else [None, None]
    return kept_bytes(block, lambda: run(block, x, *subsets), bf16)


def of_matching(compiled: bool, bf16: bool) -> float:
    match = PatchMatchingModule(dim=DIM, num_heads=HEADS)
    run = maybe_compile(match.forward, compiled)
    current, past = (torch.randn(SAMPLES, TOKENS, DIM) for _ in range(2))
    return kept_bytes(match, lambda: run(current.requires_grad_(), past), bf16)


if __name__ == "__main__":
    counts = {
        f"block {bf16} {drop}": of_a_block(True, bf16, drop) for bf16 in (False, True) for drop in (0.0, 0.5)
    }
    print(json.dumps(counts | {f"match {bf16}": of_matching(True, bf16) for bf16 in (False, True)}))
