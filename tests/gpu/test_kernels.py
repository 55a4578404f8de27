"""Kernels for a GPU beside their plain twins; skipped where there is none."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tcore.methods.settings_pixel import Filter
from tcore.model import fused
from tests.data.test_render import mixed_batch

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),  # torch itself, on Python 3.12
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("sides", "k"), [(1, 4096), (2, 4096), (2, 1000), (1, 24)])
def test_rows_of_outputs_give_the_numbers_and_gradients_of_the_plain_twin(
    sides: int, k: int, dtype: torch.dtype
) -> None:
    from tcore.model import fused_triton

    torch.manual_seed(0)
    rows, asked = 37, 50
    outputs = torch.rand(sides, rows, k, device="cuda").mul(2).sub(1).to(dtype)
    teacher = torch.rand(asked, k, device="cuda").mul(2).sub(1).to(dtype)
    center, which = torch.rand(k, device="cuda"), torch.randint(asked, (rows,), device="cuda")
    knobs = fused.Temperatures(0.04, 0.1)
    plain = fused.row_stats(outputs, teacher, center, which, knobs)
    fast = fused_triton.row_stats(outputs, teacher, center, which, knobs)
    for name, expected in plain._asdict().items():
        torch.testing.assert_close(getattr(fast, name), expected, rtol=2e-5, atol=2e-5, msg=name)
    pulls = fused.Pulls(
        torch.rand(sides, rows, device="cuda"), torch.rand((), device="cuda"), torch.rand(rows, device="cuda")
    )
    expected = fused.row_gradients(outputs, teacher, center, which, knobs, plain, pulls).float()
    found = fused_triton.row_gradients(outputs.clone(), teacher, center, which, knobs, fast, pulls).float()
    assert F.cosine_similarity(found.flatten(), expected.flatten(), dim=0) > 0.99999
    bound = 1e-5 if dtype == torch.float32 else 1e-2
    assert (found - expected).norm() < bound * expected.norm()


def test_log_targets_that_are_not_finite_do_no_harm() -> None:
    from tcore.model import fused_triton

    outputs, which = torch.rand(1, 3, 512, device="cuda"), torch.arange(3, device="cuda")
    targets = torch.zeros(3, 512, device="cuda")
    targets[:, 7] = 1.0
    zero, knobs = torch.zeros(512, device="cuda"), fused.Temperatures(1.0, 0.1)
    stats = fused_triton.row_stats(outputs, targets.log(), zero, which, knobs)
    torch.testing.assert_close(stats.agreement[0], outputs[0, :, 7] / 0.1)
    assert stats.teacher.isfinite().all()


def test_colors_are_those_of_the_plain_twin() -> None:
    from tcore.data import photometry_triton
    from tcore.data.render import Kernels, render_pixels, resampling_matrix

    frames, plan = mixed_batch()
    plan = replace(plan, blur=0 * plan.blur, solarize=plan.solarize & False)  # what comes after it
    fast = Kernels(resampling_matrix, photometry_triton.colors)
    for size in (16, 40):
        expected = render_pixels(frames.cuda(), plan, size)
        torch.testing.assert_close(
            render_pixels(frames.cuda(), plan, size, fast), expected, rtol=0, atol=2e-5
        )


@pytest.mark.parametrize("filter_", ["bicubic", "bilinear", "sharp"])
def test_boxes_are_cut_and_resized_as_by_the_plain_twin(filter_: Filter) -> None:
    from tcore.data import resample_triton
    from tcore.data.render import Kernels, crop_and_resize, resampling_matrix, shrinks_down_first

    frames, plan = mixed_batch()
    fast = Kernels(resampling_matrix, resize=resample_triton.resize)
    for size in (16, 40, 96):
        expected = crop_and_resize(frames, plan, size, filter_=filter_)
        found = crop_and_resize(frames.cuda(), plan, size, fast, filter_).cpu()
        # Less than half a level of 255, on noise: products have 10 bits of mantissa.
        torch.testing.assert_close(found, expected, rtol=0, atol=1.5e-3)
    assert 0 < shrinks_down_first(plan.box[:, 2], plan.box[:, 3], 16).sum() < len(plan)


@pytest.mark.parametrize(("side", "heads", "reach"), [(14, 6, None), (6, 6, None), (8, 12, 3), (4, 6, 1)])
def test_attention_among_few_tokens_is_that_of_torch_and_the_same_twice(
    side: int, heads: int, reach: int | None
) -> None:
    from tcore.model import attention_triton as own
    from tcore.model.attention import tokens_seen

    torch.manual_seed(0)
    n, d = side * side + 5, 64 * heads
    seen = None if reach is None else tokens_seen(reach, side, side, 5, torch.device("cuda"))
    qkv = torch.randn(7, n, 3 * d, device="cuda").bfloat16().requires_grad_()
    bias, pull = torch.zeros(3 * d, device="cuda", requires_grad=True), torch.randn(7, n, d, device="cuda")
    out = own.attend(qkv, bias, heads, seen)
    found = torch.autograd.grad(out, (qkv, bias), pull.bfloat16(), retain_graph=True)
    again = torch.autograd.grad(out, (qkv, bias), pull.bfloat16())
    exact = qkv.detach().double().requires_grad_()
    q, k, v = exact.view(7, n, 3, heads, 64).permute(2, 0, 3, 1, 4)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).flatten(2)
    (gradient,) = torch.autograd.grad(expected, exact, pull.bfloat16().double())
    wanted = (expected, gradient, gradient.sum(dim=(0, 1)))
    for made, right in zip((out, *found), wanted, strict=True):
        assert (made.double() - right).norm() < 1e-2 * right.norm()
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))


def test_gradients_of_attention_are_finite_where_all_scores_are_far_below_zero() -> None:
    from tcore.model import attention_triton as own

    for n in (40, 69, 157, 201):  # the last tile of keys is not full
        qkv = torch.randn(2, n, 3, 64, device="cuda")
        qkv[:, :, 0] += 6
        qkv[:, :, 1] -= 6
        qkv = qkv.flatten(2).bfloat16()
        out, lse = own.run_forward(qkv, 1, None)
        assert lse.max() < -128
        made, sums = own.run_backward(torch.ones_like(out), qkv, out, lse, 1, None)
        assert made.isfinite().all()
        assert sums.isfinite().all()


@pytest.mark.filterwarnings("ignore")  # torch, of its own affairs, where it compiles
@pytest.mark.parametrize("reach", [None, 3])
def test_a_bf16_step_on_the_fast_path_is_near_an_fp32_step_on_the_plain_one(reach: int | None) -> None:
    """Losses within 1e-3, gradients with a cosine above 0.999."""
    from tcore.config import Config
    from tcore.data.loader import render_batch
    from tcore.methods import build_source
    from tcore.recipes import recipe
    from tcore.training.loop import open_store, resolve
    from tcore.training.step import Trainer
    from tests.tiny import as_tcore

    def run(config: Config) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        config = resolve(config)
        trainer = Trainer(config)
        method = as_tcore(trainer.method)
        method.fused = config.runtime.compile != "off"
        source = build_source(open_store(config, None), config)
        batch = render_batch(source[0], trainer.device, trainer.render)
        with trainer._autocast():
            losses = method(batch, {"teacher_temperature": 0.05}, trainer.generator.manual_seed(0))
        method.total(losses).backward()
        gradients = {name: p.grad for name, p in method.named_parameters() if p.grad is not None}
        return {name: float(x) for name, x in losses.items()}, gradients

    settings = {"vit.layer_scale": 0.1, "head.prototypes": 4096, "optim.batch": 16, "rendered.size": 256}
    base = recipe("vits16-k400", {**settings, "vit.depth": 4, "vit.reach": reach, "rendered.videos": 16})
    fast = replace(base, optim=replace(base.optim, precision="bf16"))
    plain = replace(
        base, optim=replace(base.optim, precision="fp32"), runtime=replace(base.runtime, compile="off")
    )
    (fast_losses, fast_gradients), (plain_losses, plain_gradients) = run(fast), run(plain)
    assert fast_losses == pytest.approx(plain_losses, rel=1e-3)

    def part(name: str) -> str:
        return name.split(".")[1] if name.startswith("student") else "match"

    assert {part(name) for name in plain_gradients} == {"backbone", "head", "match"}
    for wanted in ("backbone", "head", "match"):
        names = [name for name in plain_gradients if part(name) == wanted]
        a, b = (torch.cat([g[name].flatten() for name in names]) for g in (fast_gradients, plain_gradients))
        assert F.cosine_similarity(a, b, dim=0) > 0.999, wanted
