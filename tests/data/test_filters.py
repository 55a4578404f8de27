"""Views resized by other filters than bicubic, beside Pillow and torch."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from tcore.data.boxes import plain_views
from tcore.data.render import render_pixels


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
