"""From image files to RGB frames."""

import io
import struct
import threading
import zlib
from collections.abc import Generator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tcore.data import images as reading
from tcore.data.images import decode_image, decode_jpeg, read_image
from tcore.data.stores import FrameStore
from tcore.errors import InputError


@pytest.mark.parametrize(
    ("mode", "suffix"),
    [("RGB", "jpg"), ("RGB", "JPEG"), *((m, "png") for m in ("L", "RGBA", "P", "1", "LA"))],
)
def test_images_of_all_kinds_become_height_width_rgb(tmp_path: Path, mode: str, suffix: str) -> None:
    color = (200, 100, 50) if mode == "RGB" else (255, 255, 255)
    (tmp_path / "video").mkdir()
    Image.new("RGB", (16, 8), color).convert(mode).save(tmp_path / "video" / f"0.{suffix}")
    (frame,) = FrameStore.open(tmp_path).read(0, [0])
    assert frame.shape == (8, 16, 3)
    assert frame.dtype == np.uint8
    assert np.abs(frame.astype(int) - color).max() <= 3  # JPEG is not exact


def test_16_bit_gray_keeps_its_brightness(tmp_path: Path) -> None:
    high = np.arange(256, dtype=np.uint16).reshape(16, 16)
    low = np.random.default_rng(0).integers(0, 256, (16, 16), dtype=np.uint16)
    Image.fromarray(256 * high + low).save(tmp_path / "0.png")
    assert (tmp_path / "0.png").read_bytes()[24] == 16  # bits per sample
    frame = read_image(tmp_path / "0.png")
    assert frame.shape == (16, 16, 3)
    assert frame.dtype == np.uint8
    assert np.array_equal(frame, np.repeat(high[:, :, None], 3, axis=2))


@pytest.mark.parametrize("transparency", [1, b"\xff\x80\x00"], ids=["one color", "alpha per color"])
def test_a_palette_with_transparency_is_read_in_its_colors_without_a_warning(
    tmp_path: Path, transparency: int | bytes
) -> None:
    colors = [(200, 0, 0), (0, 150, 0), (10, 20, 100)]
    image = Image.new("P", (3, 2))
    image.putpalette([value for color in colors for value in color])
    for column in range(3):
        image.paste(column, (column, 0, column + 1, 2))
    image.save(tmp_path / "0.png", transparency=transparency)
    with Image.open(tmp_path / "0.png") as saved:
        assert saved.mode == "P"
        assert "transparency" in saved.info
    assert np.array_equal(read_image(tmp_path / "0.png"), [colors, colors])  # warnings are errors


def broken_png() -> bytes:
    """A PNG that breaks off into something else."""
    file = io.BytesIO()
    Image.new("RGB", (64, 64)).save(file, "png")
    whole = file.getvalue()
    start = whole.index(b"IDAT") - 4
    half = struct.pack(">I", 4) + whole[start + 4 : start + 12]  # four bytes of pixels
    return whole[:start] + half + struct.pack(">I", zlib.crc32(half[4:])) + b"\0\0\0\4\0\0\0\0" * 9


@pytest.mark.parametrize("data", [b"", b"text" * 50, broken_png()], ids=["empty", "text", "png"])
def test_a_broken_frame_is_named(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "video" / "00000.jpg"
    path.parent.mkdir()
    path.write_bytes(data)
    with pytest.raises(InputError, match="cannot read frame") as caught:
        FrameStore.open(tmp_path).read(0, [0])
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("mode", "size"), [("RGB", (64, 48)), ("L", (33, 17))])
def test_simplejpeg_gives_the_pixels_of_pillow(
    size: tuple[int, int], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("simplejpeg")
    noise = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    for subsampling in (0, 2):
        file = io.BytesIO()
        Image.fromarray(noise).convert(mode).save(file, "JPEG", quality=80, subsampling=subsampling)
        fast = decode_jpeg(file.getvalue())
        assert fast is not None
        with monkeypatch.context() as patch:
            patch.setattr(reading, "decode_jpeg", lambda data: None)
            assert np.array_equal(fast, decode_image(file.getvalue(), "noise"))


def test_what_simplejpeg_cannot_read_is_left_to_pillow() -> None:
    file = io.BytesIO()
    Image.new("CMYK", (8, 8)).save(file, "JPEG")
    assert decode_jpeg(file.getvalue()) is None
    assert decode_image(file.getvalue(), "print").shape == (8, 8, 3)
    whole = io.BytesIO()
    Image.effect_noise((64, 64), 50).save(whole, "JPEG")
    with pytest.raises(InputError, match="cannot read frame half"):
        decode_image(whole.getvalue()[:700], "half")
    assert decode_jpeg(b"no image") is None


def test_work_ahead_that_is_given_up_waits_for_nobody() -> None:
    go_on, before = threading.Event(), set(threading.enumerate())
    late = threading.Timer(30, go_on.set)  # ends a test that fails
    late.start()

    def work(item: int) -> int:
        assert item == 0 or go_on.wait()
        return item

    made = reading.ahead(work, range(20), threads=2)
    assert isinstance(made, Generator)
    assert next(made) == 0
    made.close()
    assert not go_on.is_set()
    go_on.set()
    late.cancel()
    for thread in set(threading.enumerate()) - before:
        thread.join(30)
    assert list(reading.ahead(work, range(20), threads=2)) == [*range(20)]
    assert set(threading.enumerate()) <= before  # what is done leaves no thread behind
