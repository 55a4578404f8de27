"""Kernels of a block beside their plain twins, interpreted; tests/gpu runs them on a GPU."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# In a process of its own: whether Triton interprets is decided when a kernel is defined.
INTERPRETED = """
import torch
import torch.nn.functional as F
from tcore.model import attention_triton as own, gelu_triton
from tcore.model.attention import Attention, FastAttention, tokens_seen
from tcore.model.vit import Mlp

torch.manual_seed(0)


def gradients(module, x):
    module.zero_grad()
    x = x.clone().requires_grad_()
    y = module(x)
    (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]


def compare(plain, fast, close=1e-5):
    for one, other in zip(plain, fast, strict=True):
        assert (one - other).norm() < close * one.norm() + 1e-6


class Looking(torch.nn.Module):
    def __init__(self, seen):
        super().__init__()
        self.attention, self.seen = Attention(32, 2), seen
        torch.nn.init.normal_(self.attention.qkv.bias)

    def forward(self, x):
        return self.attention(x, seen=self.seen)


for side, prefix, reach in ((8, 5, None), (4, 5, None), (4, 5, 1), (14, 5, None)):
    n = side * side + prefix
    seen = None if reach is None else tokens_seen(reach, side, side, prefix, torch.device("cpu"))
    module, x = Looking(seen), torch.randn(2, n, 32)
    plain = gradients(module, x)
    module.attention.fast = FastAttention(lambda dtype, n, width: True, own.attend)
    compare(plain, gradients(module, x))

# All scores far below 0, which is the score of the keys that a last tile has beyond the last.
module, x = Looking(None), torch.randn(2, 40, 32)
with torch.no_grad():
    module.attention.qkv.bias[:32] += 7
    module.attention.qkv.bias[32:64] -= 7
plain = gradients(module, x)
assert own.run_forward(module.attention.qkv(x).detach(), 2, None)[1].max() < -128
module.attention.fast = FastAttention(lambda dtype, n, width: True, own.attend)
compare(plain, gradients(module, x), 1e-4)

x = torch.linspace(-8, 8, 4001)
assert (gelu_triton.run_forward(x).double() - F.gelu(x.double())).abs().max() < 1e-6


class InFull(Mlp):
    def forward(self, x):
        h = F.linear(x, self.fc1.weight, self.fc1.bias.detach())
        return gelu_triton.ActivatedLinear.apply(h, self.fc1.bias, self.fc2.weight, self.fc2.bias)


mlp, x = Mlp(16, 144), torch.randn(3, 101, 16)
torch.nn.init.normal_(mlp.fc1.bias)
other = InFull(16, 144)
other.load_state_dict(mlp.state_dict())
compare(gradients(mlp, x), gradients(other, x))
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_interpreted_kernels_have_the_outputs_and_gradients_of_their_twins() -> None:
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
    }
    subprocess.run([sys.executable, "-c", INTERPRETED], check=True, env=environment, timeout=300)
