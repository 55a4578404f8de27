"""The contact sheet shows what training sees."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tcore import methods
from tcore.data.stores import FrameStore
from tcore.errors import InputError
from tcore.show.sheet import draw_sheet, take_samples
from tests.data.clips import break_jpeg, write_clip
from tests.data.painted import TINY, Painted, paint
from tests.tiny import tiny


def test_samples_are_those_of_the_first_step_and_carry_a_mask() -> None:
    source = methods.build_source(Painted([20] * 6), TINY)
    samples, first = take_samples(source, 3), source.read(0, 0)
    # What is read by itself is the same as in the batch of the first step.
    masked = [i for i in range(4) if first.mask[i].any() or first.mask[4 + i].any()]
    assert len(samples) == min(3, len(masked))
    for sample, slot in zip(samples, masked, strict=False):
        assert sample.raw.mask.equal(first.mask[[slot, 4 + slot]])
        assert np.array_equal(sample.raw.plans["global"].box, first.plans["global"].box[[slot, 4 + slot]])
        pixels = [tuple(frame[0, 0].tolist()) for frame in sample.raw.frames]
        assert pixels == [paint(sample.video, frame) for frame in sample.frames.values()]
        assert list(sample.frames) == ["past", "current", "future"]


def test_the_sheet_has_a_row_for_each_sample_and_leaves_out_what_cannot_be_read(tmp_path: Path) -> None:
    for number in range(4):
        write_clip(tmp_path / "store" / f"v{number}", 20, seed=number)
    for path in (tmp_path / "store" / "v0").iterdir():
        break_jpeg(path)
    store = FrameStore.open(tmp_path / "store")
    config = tiny(masking__probability=1.0, optim__batch=8)
    assert draw_sheet(store, config, tmp_path / "sheet.png", "store") == 3
    assert draw_sheet(store, config, tmp_path / "one.png", "store", rows=1) == 1
    with Image.open(tmp_path / "sheet.png") as many, Image.open(tmp_path / "one.png") as one:
        assert many.width == one.width
        assert many.height > 2 * one.height
    for path in (tmp_path / "store").glob("*/*"):
        break_jpeg(path)
    with pytest.raises(InputError, match="no sample could be read"):
        draw_sheet(store, tiny(), tmp_path / "none.png", "store")


def test_without_auxiliary_branch_the_sheet_has_no_past_and_future(tmp_path: Path) -> None:
    unmasked = tiny(masking__probability=0.0)
    for name, config in (("both", tiny()), ("none", tiny(auxiliary="none")), ("unmasked", unmasked)):
        draw_sheet(Painted([20] * 4), config, tmp_path / f"{name}.png", name, rows=1)
    with Image.open(tmp_path / "both.png") as both, Image.open(tmp_path / "none.png") as none:
        assert none.width < both.width
