"""From frames and a plan to pixels."""

import colorsys
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import PIL
import pytest
import torch
import torch.nn.functional as F
from jaxtyping import Float, Float32, UInt8
from PIL import Image, ImageEnhance
from torch import Tensor

from tcore.config import ViewsConfig
from tcore.data import photometry
from tcore.data import render as rendering
from tcore.data.boxes import plain_views
from tcore.data.render import MEAN, STD, normalize, render_pixels, shrinks_down_first
from tcore.data.views import NO_JITTER, ViewPlan, random_boxes, sample_views
from tcore.errors import InputError

BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)


def noise(*shape: int, seed: int = 0) -> UInt8[np.ndarray, "..."]:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def plain(boxes: list[tuple[int, int, int, int]], frame: int = 0) -> ViewPlan:
    """Boxes and nothing else."""
    n = len(boxes)
    return ViewPlan(
        frame=np.full(n, frame),
        box=np.array(boxes, np.int64).reshape(n, 4),
        flip=np.zeros(n, bool),
        jitter=np.tile(NO_JITTER, (n, 1)),
        order=np.tile(np.arange(4), (n, 1)),
        gray=np.zeros(n, bool),
        blur=np.zeros(n),
        solarize=np.zeros(n, bool),
        wide_blur=np.zeros(n, bool),
    )


def jittered(column: int, amount: float) -> ViewPlan:
    plan = plain([(0, 0, 32, 32)])
    plan.jitter[0, column] = amount
    return plan


def draw(image: UInt8[np.ndarray, "32 32 3"], plan: ViewPlan) -> Float32[np.ndarray, "32 32 3"]:
    """Render one view of the size of its frame, in steps of 1/255."""
    return 255 * render_pixels(torch.from_numpy(image)[None], plan, 32)[0].permute(1, 2, 0).numpy()


def mixed_batch(count: int = 6) -> tuple[UInt8[Tensor, "f 60 80 3"], ViewPlan]:
    """All views of a few samples, with everything that can happen to a view."""
    plans = []
    for index in range(count):
        sample = sample_views(np.random.default_rng(index), ((60, 80),) * 3, ViewsConfig())
        plan = ViewPlan.concatenate([sample["global"], sample["local"], sample["past"], sample["future"]])
        plans.append(plan.with_frame(plan.frame + 3 * index))
    return torch.from_numpy(noise(3 * count, 60, 80, 3)), ViewPlan.concatenate(plans)


@pytest.mark.parametrize("size", [16, 48, 224])
@pytest.mark.parametrize("frame_size", [(90, 160), (71, 33)])
def test_crop_and_resize_equals_pillow(size: int, frame_size: tuple[int, int]) -> None:
    frames = noise(3, *frame_size, 3, seed=size)
    rng = np.random.default_rng(size)
    boxes = random_boxes(frame_size, (0.01, 1.0), (0.5, 2.0), rng, 12)
    plan = replace(plain([tuple(box) for box in boxes]), frame=np.arange(12) % 3)
    ours = 255 * render_pixels(torch.from_numpy(frames), plan, size).permute(0, 2, 3, 1).numpy()
    for view, frame, (top, left, height, width) in zip(ours, plan.frame, boxes.tolist(), strict=True):
        crop = Image.fromarray(frames[frame]).crop((left, top, left + width, top + height))
        if int(PIL.__version__.split(".")[0]) < 13:  # which always went along the rows first
            down_first = shrinks_down_first(np.array([height]), np.array([width]), size)[0]
            between = (width, size) if down_first else (size, height)
            crop = crop.resize(between, Image.Resampling.BICUBIC)
        pillow = np.asarray(crop.resize((size, size), Image.Resampling.BICUBIC), np.float32)
        assert np.abs(view - pillow).max() <= 2


def test_nothing_outside_the_box_is_read() -> None:
    frame, boxes = noise(60, 80, 3), [(10, 20, 31, 17), (0, 0, 60, 40), (59, 79, 1, 1)]
    plan = plain(boxes)
    views = render_pixels(torch.from_numpy(frame)[None], plan, 24)
    for row, (top, left, height, width) in enumerate(boxes):
        other = noise(60, 80, 3, seed=1)
        box = slice(top, top + height), slice(left, left + width)
        other[box] = frame[box]
        again = render_pixels(torch.from_numpy(other)[None], plan, 24)
        assert torch.equal(again[row], views[row])


def test_padding_of_the_frames_changes_nothing() -> None:
    frames, plan = mixed_batch(2)
    padded = torch.full((6, 75, 130, 3), 255, dtype=torch.uint8)
    padded[:, :60, :80] = frames
    torch.testing.assert_close(
        normalize(render_pixels(padded, plan, 16)),
        normalize(render_pixels(frames, plan, 16)),
        atol=1e-4,
        rtol=0,
    )


@pytest.mark.parametrize(
    ("column", "enhance"),
    [
        (BRIGHTNESS, ImageEnhance.Brightness),
        (CONTRAST, ImageEnhance.Contrast),
        (SATURATION, ImageEnhance.Color),
    ],
)
@pytest.mark.parametrize("factor", [0.6, 0.9, 1.37])
def test_factors_mean_what_they_mean_in_pillow(
    column: int,
    enhance: Callable[[Image.Image], ImageEnhance.Brightness | ImageEnhance.Contrast | ImageEnhance.Color],
    factor: float,
) -> None:
    image = noise(32, 32, 3)
    image[:, :16] //= 3  # a mean that is not the middle of the scale
    pillow = np.asarray(enhance(Image.fromarray(image)).enhance(factor), np.float32)
    assert np.abs(draw(image, jittered(column, factor)) - pillow).max() <= 1.5


@pytest.mark.parametrize("turns", [-0.1, 0.07, 0.5])
def test_hue_is_turned_as_in_colorsys(turns: float) -> None:
    image = noise(32, 32, 3)
    image[0] = image[0, :, :1]  # grays
    image[1] = 0
    image[2, :, 1] = image[2, :, 0]  # two channels equal
    image[3, :, 2] = image[3, :, 1]
    ours = draw(image, jittered(HUE, turns)).reshape(-1, 3) / 255
    for pixel, (red, green, blue) in zip(ours, image.reshape(-1, 3).tolist(), strict=True):
        hue, saturation, value = colorsys.rgb_to_hsv(red / 255, green / 255, blue / 255)
        true = colorsys.hsv_to_rgb((hue + turns) % 1, saturation, value)
        np.testing.assert_allclose(pixel, true, atol=1e-5)


def test_the_order_of_the_operations_is_followed() -> None:
    image = noise(32, 32, 3)
    amounts = (1.4, 0.6, 1.2, 0.1)
    seen: list[Float32[np.ndarray, "32 32 3"]] = []
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2], [2, 0, 3, 1]):
        plan = plain([(0, 0, 32, 32)])
        plan.jitter[0], plan.order[0] = amounts, order
        ours = draw(image, plan)
        step: Float[Tensor, "1 3 32 32"] = torch.from_numpy(image).permute(2, 0, 1)[None] / 255
        for column in order:
            step = photometry.JITTER[column](step, torch.tensor([amounts[column]]))
        np.testing.assert_allclose(ours, 255 * step[0].permute(1, 2, 0).numpy(), atol=1e-2)
        # Gray, blur and solarizing come after them, in this order.
        plan = replace(plan, gray=np.array([True]), blur=np.array([1.5]), solarize=np.array([True]))
        step = photometry.solarize(photometry.blur(photometry.to_gray(step), torch.tensor([1.5])))
        np.testing.assert_allclose(draw(image, plan), 255 * step[0].permute(1, 2, 0).numpy(), atol=1e-2)
        assert all(np.abs(ours - other).max() > 1 for other in seen)
        seen.append(ours)


def test_flip_mirrors_and_gray_is_that_of_pillow_in_all_channels() -> None:
    image = noise(32, 32, 3)
    plan = plain([(0, 0, 32, 32)])
    np.testing.assert_allclose(draw(image, replace(plan, flip=np.array([True]))), image[:, ::-1], atol=1e-3)
    pillow = np.asarray(Image.fromarray(image).convert("L"), np.float32)
    assert np.abs(draw(image, replace(plan, gray=np.array([True]))) - pillow[:, :, None]).max() <= 0.51


def test_each_view_of_a_mixed_batch_equals_the_view_rendered_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    frames, plan = mixed_batch()
    assert {len(set(values)) > 1 for values in (plan.flip, plan.gray, plan.blur, plan.solarize)} == {True}
    together = normalize(render_pixels(frames, plan, 16))
    for row in range(len(plan)):
        alone = normalize(render_pixels(frames, plan.select(np.array([row])), 16))
        torch.testing.assert_close(together[row], alone[0], atol=2e-4, rtol=0)
    monkeypatch.setattr(rendering, "CPU_CHUNK", 5 * 60 * 80 * 3 * 4)
    torch.testing.assert_close(normalize(render_pixels(frames, plan, 16)), together, atol=2e-4, rtol=0)


def test_render_is_normalized_float32_whatever_autocast_is_around_it() -> None:
    frames, plan = mixed_batch(1)
    views, pixels = normalize(render_pixels(frames, plan, 16)), render_pixels(frames, plan, 16)
    assert views.dtype == torch.float32
    assert views.is_contiguous()
    assert 0 <= pixels.min() <= pixels.max() <= 1 + 1e-6
    back = views * torch.tensor(STD)[:, None, None] + torch.tensor(MEAN)[:, None, None]
    torch.testing.assert_close(back, pixels)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(normalize(render_pixels(frames, plan, 16)), views)
    assert normalize(render_pixels(frames, plan.select(slice(0, 0)), 16)).shape == (0, 3, 16, 16)


@pytest.mark.parametrize(("box", "frame"), [((0, 0, 61, 10), 0), ((-1, 0, 5, 5), 0), ((0, 0, 5, 5), 3)])
def test_a_box_outside_the_frames_is_refused(box: tuple[int, int, int, int], frame: int) -> None:
    frames = torch.zeros((3, 60, 80, 3), dtype=torch.uint8)
    with pytest.raises(InputError, match="inside one of the 3 frames of 60 x 80 pixels"):
        normalize(render_pixels(frames, plain([box], frame), 16))


def test_the_wide_blur_is_a_tenth_of_the_view_and_black_beyond_its_border() -> None:
    white = torch.full((1, 3, 60, 60), 1.0)
    made = photometry.wide_blur(white, torch.tensor([2.0]))  # 7 taps: up to 3 pixels away
    assert made[0, 0, 30, 30].item() == pytest.approx(1.0, abs=1e-6)
    assert made[0, 0, 30, 3].item() == pytest.approx(1.0, abs=1e-6)
    taps = torch.exp(-0.5 * (torch.arange(-3, 4) / 2.0) ** 2)
    assert made[0, 0, 30, 0].item() == pytest.approx((taps[3:].sum() / taps.sum()).item(), abs=1e-6)
    plan = replace(plain([(0, 0, 32, 32)]), blur=np.array([1.0]))
    image = noise(32, 32, 3)
    both = [draw(image, replace(plan, wide_blur=np.array([wide]))) for wide in (False, True)]
    assert np.abs(both[0] - both[1]).max() > 1


def made(
    frame: np.ndarray, box: tuple[int, int, int, int], size: int, filter_: str, flip: bool = False
) -> np.ndarray:
    plan = plain_views(np.zeros(1, dtype=np.int64), [box], np.array([flip]))
    pixels = render_pixels(torch.from_numpy(frame)[None], plan, size, filter_=filter_)  # type: ignore[arg-type]
    return 255 * pixels[0].permute(1, 2, 0).numpy()


@pytest.mark.parametrize("size", [12, 40])
def test_bilinear_is_pillows_and_sharp_is_torchs_without_antialias(size: int) -> None:
    frame = np.random.default_rng(0).integers(0, 256, (30, 44, 3), dtype=np.uint8)
    top, left, height, width = box = (3, 5, 20, 31)
    cut = np.ascontiguousarray(frame[top : top + height, left : left + width])
    pillow = np.asarray(
        Image.fromarray(cut).resize((size, size), Image.Resampling.BILINEAR), dtype=np.float32
    )
    assert np.abs(made(frame, box, size, "bilinear") - pillow).max() < 1.01
    plain = F.interpolate(torch.from_numpy(cut).permute(2, 0, 1)[None].float(), (size, size), mode="bilinear")
    assert np.abs(made(frame, box, size, "sharp") - plain[0].permute(1, 2, 0).numpy()).max() < 1e-2
    assert np.array_equal(
        made(frame, box, size, "sharp", flip=True), made(frame, box, size, "sharp")[:, ::-1]
    )
