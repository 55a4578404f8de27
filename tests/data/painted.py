"""Videos whose colors say where they come from, and what a batch shows of them."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from tcore.config import Config, OptimConfig, RuntimeConfig, ViewsConfig, VitSpec
from tcore.data.images import encode_jpeg
from tcore.data.render import MEAN, STD
from tcore.data.source import RawBatch
from tcore.data.stores import FrameStore
from tests.tiny import change

GRID = 4
TINY = Config(
    views=ViewsConfig(global_size=32, local_size=16, num_local=3),
    vit=VitSpec(patch_size=8),
    optim=OptimConfig(batch=4),
    runtime=RuntimeConfig(workers=0),
)
# Every crop is masked, so that all three frames of every sample are looked at.
ALL_MASKED = change(TINY, masking__probability=1.0)

PastCurrentFuture = tuple[int, int, int]


class Painted(FrameStore):
    """Frames of one color each, which says where they come from: red the video, green the frame."""

    def __init__(
        self,
        lengths: Sequence[int],
        cuts: tuple[int, ...] = (),
        fps: float | None = None,
        sizes: Sequence[tuple[int, int]] = ((20, 20),),
    ) -> None:
        self.names = [f"video-{index}" for index in range(len(lengths))]
        self.lengths = np.array(lengths, dtype=np.int64)
        self.fps = fps
        self._cuts, self._sizes = cuts, sizes

    def read(self, video: int, frames: Sequence[int]) -> list[UInt8[np.ndarray, "height width 3"]]:
        assert all(0 <= frame < self.lengths[video] for frame in frames)
        shape = (*self._sizes[video % len(self._sizes)], 3)
        return [np.full(shape, paint(video, frame), np.uint8) for frame in frames]

    def read_bytes(self, video: int, frames: Sequence[int]) -> list[bytes]:
        return [encode_jpeg(frame, 95) for frame in self.read(video, frames)]

    def cuts(self, video: int) -> tuple[int, ...]:
        return self._cuts


def paint(video: int, frame: int) -> tuple[int, int, int]:
    """The color of a frame."""
    return 10 * video + 5, frame, 60


def videos_of(raw: RawBatch) -> list[int]:
    """The video of each sample, by the frame of its first global crop."""
    current = raw.plans["global"].frame[: len(raw.mask) // 2]
    return [(red - 5) // 10 for red in raw.frames[torch.from_numpy(current), 0, 0, 0].tolist()]


def samples_of(raw: RawBatch) -> list[tuple[int, PastCurrentFuture]]:
    """Video and frames of each sample in the order they were read, where all three of all samples were."""
    num_samples = len(raw.mask) // 2
    assert raw.frames.shape[0] == 3 * num_samples, "some frames were not read"
    red, green = raw.frames[:, 0, 0, :2].reshape(num_samples, 3, 2).unbind(dim=2)
    assert (red == red[:, :1]).all(), "a sample shows more than one video"
    return [
        ((v - 5) // 10, (p, c, f)) for (v, *_), (p, c, f) in zip(red.tolist(), green.tolist(), strict=True)
    ]


def sandwiches_of(raw: RawBatch) -> list[PastCurrentFuture]:
    """The frames of each sample, where all three of all samples were read."""
    return [sandwich for _, sandwich in samples_of(raw)]


def colors_of(crops: Tensor) -> list[tuple[int, int]]:
    """Video and frame that each crop of a single color shows."""
    pixels = 255 * (crops * torch.tensor(STD)[:, None, None] + torch.tensor(MEAN)[:, None, None])
    low, high = pixels.amin(dim=(2, 3)), pixels.amax(dim=(2, 3))
    assert (high - low).max() < 0.1, "a crop shows more than one color"
    return [((round(red) - 5) // 10, round(green)) for red, green, _ in high.tolist()]
