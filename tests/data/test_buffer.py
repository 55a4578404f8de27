"""The memory that the frames of a batch share."""

import numpy as np
import pytest
import torch

from tcore.data.source import FrameBuffer, pad


def frames_of(sizes: list[tuple[int, int]]) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(1, 256, (*size, 3), dtype=np.uint8) for size in sizes]


@pytest.mark.parametrize(
    "sizes",
    [
        [(4, 6)] * 5,
        [(4, 6), (4, 6), (5, 7), (3, 9), (3, 9), (4, 6)],
        [(2, 2), (3, 3), (9, 9), (20, 30), (40, 50)],  # more room is needed again and again
    ],
)
def test_every_frame_is_found_again_in_its_corner_and_the_rest_is_zero(sizes: list[tuple[int, int]]) -> None:
    frames, buffer = frames_of(sizes), FrameBuffer(len(sizes))
    for frame in frames:
        buffer.add(frame)
    assert len(buffer.pixels) == sum(frame.size for frame in frames), "there are gaps"
    padded = pad(buffer.pixels, buffer.sizes)
    plain = np.zeros((len(sizes), *np.max(sizes, axis=0), 3), np.uint8)
    for row, frame in zip(plain, frames, strict=True):
        row[: frame.shape[0], : frame.shape[1]] = frame
    assert torch.equal(padded, torch.from_numpy(plain))
    # Frames of one size are not copied again.
    assert (padded.data_ptr() == buffer.pixels.data_ptr()) == (len(set(sizes)) == 1)
