"""Our kernels for a block beside torch's: attention among few tokens, and the MLP's activation.

`python benchmarks/attention.py` on a GPU: errors against fp64 first, then milliseconds of several ways to cut
the work. `--all` times every way for every size, not only for ViT-S.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tcore.model import attention_triton as own
from tcore.model import gelu_triton
from tcore.model.attention import tokens_seen


class Case(NamedTuple):
    """Sizes of a call; with a reach, patches of a grid see their neighbors alone."""

    name: str
    batch: int
    tokens: int
    heads: int
    reach: int | None = None


CASES = (
    Case("ViT-S, global crops", 460, 201, 6),
    Case("ViT-S, local crops", 1843, 41, 6),
    Case("ViT-S, short, global", 230, 69, 6, 3),
    Case("ViT-S, short, local", 460, 21, 6, 3),
    Case("ViT-B, global crops", 230, 201, 12),
    Case("ViT-B, local crops", 921, 41, 12),
)
WIDTH, PREFIX = 64, 5


def forward_ways(n: int) -> list[own.Forward]:
    """Ways to cut the forward pass; the first is the one in use."""
    parts, one = own.key_parts(n), (max(16, 1 << (n - 1).bit_length()), 0, 0)
    ways = [own.forward_plan(n)]
    for tiles in dict.fromkeys((parts, one)):
        if n <= 64:
            ways += [own.Forward(tiles), own.Forward(tiles, stages=2)]
        elif n <= 128:
            ways += [own.Forward(tiles), own.Forward(tiles, blocks=2), own.Forward(tiles, rows=128, warps=8)]
        else:
            ways += [own.Forward(tiles), own.Forward(tiles, blocks=2), own.Forward(tiles, blocks=4)]
            ways += [own.Forward(tiles, blocks=4, stages=2), own.Forward(tiles, rows=128, warps=8)]
            ways += [own.Forward(tiles, rows=128, blocks=2, warps=8)]
    return list(dict.fromkeys(ways))


def backward_ways(n: int) -> list[own.Backward]:
    """Ways to cut the backward pass; the first is the one in use."""
    ways = [own.backward_plan(n)]
    if n <= 64:  # with 16 keys at a time, Triton 3.6 made a kernel that left its memory
        ways += [own.Backward(64, 4, 2), own.Backward(64, 8)]
    elif n <= 128:
        ways += [own.Backward(*way) for way in ((16, 4), (32, 4), (32, 8), (64, 8), (32, 8, 2))]
    else:
        ways += [own.Backward(*way) for way in ((16, 8), (32, 8), (16, 8, 2), (32, 8, 2), (64, 8))]
        ways += [own.Backward(*way) for way in ((16, 16), (32, 16), (32, 16, 2), (64, 16))]
    return list(dict.fromkeys(ways))


def milliseconds(work: Callable[[], Any], times: int = 20) -> float:
    """Mean of some calls after a few that do not count."""
    for _ in range(3):
        work()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / times


def line(what: str, work: Callable[[], str]) -> None:
    """One line; what fails is said and does not stop the rest."""
    try:
        said = work()
    except Exception as error:
        said = f"FAILED: {type(error).__name__}: {str(error)[:150]}"
    print(f"  {what:62} {said}", flush=True)


def by_torch(qkv: Tensor, heads: int, seen: Tensor | None) -> Tensor:
    """The plain form of Attention between its two layers."""
    b, n, triple = qkv.shape
    q, k, v = qkv.view(b, n, 3, heads, -1).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).reshape(b, n, triple // 3)


def apart(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm())


def inputs(case: Case, batch: int) -> tuple[Tensor, Tensor, Tensor | None]:
    torch.manual_seed(0)
    d = case.heads * WIDTH
    qkv = torch.randn(batch, case.tokens, 3 * d, device="cuda").mul(1.5).bfloat16()
    pull = torch.randn(batch, case.tokens, d, device="cuda").bfloat16()
    side = round((case.tokens - PREFIX) ** 0.5)
    seen = None if case.reach is None else tokens_seen(case.reach, side, side, PREFIX, qkv.device)
    return qkv, pull, seen


def errors(case: Case) -> None:
    """Relative errors of outputs, gradients and the gradient of the bias; all ways must agree with fp64."""
    qkv, pull, seen = inputs(case, 8)
    exact = qkv.double().requires_grad_()
    expected = by_torch(exact, case.heads, seen)
    expected.backward(pull.double())
    assert exact.grad is not None
    wanted, total = exact.grad, exact.grad.sum(dim=(0, 1))
    leaf = qkv.clone().requires_grad_()
    found = by_torch(leaf, case.heads, seen)
    found.backward(pull)
    assert leaf.grad is not None
    said = f"output {apart(found, expected):.1e}, gradient {apart(leaf.grad, wanted):.1e}, "
    print(
        f"{case.name}: {case.tokens} tokens; torch: {said}bias {apart(leaf.grad.sum(dim=(0, 1)), total):.1e}"
    )
    for way in forward_ways(case.tokens):
        line(
            str(way),
            lambda way=way: (  # type: ignore[misc]
                f"output {apart(own.run_forward(qkv, case.heads, seen, way)[0], expected):.1e}"
            ),
        )
    out, lse = own.run_forward(qkv, case.heads, seen)
    for back in backward_ways(case.tokens):

        def check(back: own.Backward = back) -> str:
            made, sums = own.run_backward(pull, qkv, out, lse, case.heads, seen, back)
            again = own.run_backward(pull, qkv, out, lse, case.heads, seen, back)
            same = torch.equal(made, again[0]) and torch.equal(sums, again[1])
            return (
                f"gradient {apart(made, wanted):.1e}, bias {apart(sums.sum(dim=0), total):.1e}"
                f"{'' if same else ', NOT THE SAME TWICE'}"
            )

        line(str(back), check)


def times(case: Case, every: bool) -> None:
    """Milliseconds of torch's form, with all copies that it needs, and of ours."""
    qkv, pull, seen = inputs(case, case.batch)
    leaf = qkv.clone().requires_grad_()
    out = by_torch(leaf, case.heads, seen)

    def torch_backward() -> Tensor:
        (gradient,) = torch.autograd.grad(out, leaf, pull, retain_graph=True)
        return gradient.sum(dim=(0, 1))

    with torch.no_grad():
        forward = milliseconds(lambda: by_torch(qkv, case.heads, seen))
    backward = milliseconds(torch_backward)
    print(
        f"{case.name}: {case.batch} x {case.tokens}; torch: forward {forward:.3f} ms, backward {backward:.3f}"
    )
    count = None if every else 2

    def said(work: Callable[[], Any], before: float) -> str:
        took = milliseconds(work)
        return f"{took:.3f} ms, {before / took:.2f} x"

    for way in forward_ways(case.tokens)[:count]:
        line(
            str(way),
            lambda way=way: said(lambda: own.run_forward(qkv, case.heads, seen, way), forward),  # type: ignore[misc]
        )
    made, lse = own.run_forward(qkv, case.heads, seen)
    for back in backward_ways(case.tokens)[:count]:

        def work(back: own.Backward = back) -> Tensor:
            return own.run_backward(pull, qkv, made, lse, case.heads, seen, back)[1].sum(dim=0)

        line(str(back), lambda work=work: said(work, backward))  # type: ignore[misc]


def activation() -> None:
    """GELU forward by the compiler and by us, and all that its backward pass needs."""
    h = torch.randn(92460, 1536, device="cuda").mul(2).bfloat16()
    pull = torch.randn_like(h)
    exact = h[:512].double().requires_grad_()
    F.gelu(exact).backward(pull[:512].double())
    assert exact.grad is not None
    right = exact.grad
    short = gelu_triton.run_forward(h[:512])
    print(
        f"GELU of 92460 x 1536; errors {apart(short, F.gelu(exact)):.1e} (torch "
        f"{apart(F.gelu(h[:512]), F.gelu(exact)):.1e})"
    )
    plain = torch.compile(F.gelu, dynamic=False)
    line("forward, the compiler's", lambda: f"{milliseconds(lambda: plain(h)):.3f} ms")
    line("forward, ours", lambda: f"{milliseconds(lambda: gelu_triton.run_forward(h)):.3f} ms")
    line("copy of as many bytes", lambda: f"{milliseconds(h.clone):.3f} ms")

    @torch.compile(dynamic=False)
    def by_compiler(h: Tensor, pull: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        to_h = torch.ops.aten.gelu_backward(pull, h)
        return F.gelu(h), to_h, to_h.sum(dim=0)

    line("backward, the compiler's", lambda: f"{milliseconds(lambda: by_compiler(h, pull)):.3f} ms")
    tiles = [(gelu_triton.ROWS, gelu_triton.COLUMNS, gelu_triton.TIMES, gelu_triton.WARPS)]
    tiles += [(4, 256, 32, 4), (4, 256, 128, 4), (8, 256, 32, 8), (8, 128, 32, 4), (2, 512, 64, 4)]
    tiles += [(4, 512, 32, 8), (4, 512, 32, 4), (8, 256, 16, 4), (16, 64, 16, 4), (1, 512, 128, 2)]
    for tile in tiles:

        def work(tile: tuple[int, int, int, int] = tile) -> Tensor:
            return gelu_triton.run_gradients(h, pull, tile)[2].sum(dim=0)

        def check(tile: tuple[int, int, int, int] = tile) -> str:
            made, to_h, sums = gelu_triton.run_gradients(h[:512], pull[:512], tile)
            wrong = (
                apart(made, F.gelu(exact)),
                apart(to_h, right),
                apart(sums.sum(0), right.sum(0)),
            )
            return ", ".join(f"{x:.1e}" for x in wrong)

        line(
            f"backward, rows x columns, times, warps: {tile}",
            lambda work=work, check=check: f"{milliseconds(work):.3f} ms; errors {check()}",  # type: ignore[misc]
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="every way for every size")
    options = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__)
    parts: list[Callable[[], None]] = [partial(errors, case) for case in CASES[:4]]
    parts += [partial(times, case, options.all or case.heads == 6) for case in CASES]
    for part in (*parts, activation):
        try:
            part()
        except Exception as error:
            print(f"FAILED: {type(error).__name__}: {str(error)[:150]}", flush=True)


if __name__ == "__main__":
    main()
