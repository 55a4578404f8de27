"""Memory for the frames of a batch."""

import math

import torch
from jaxtyping import UInt8
from torch import Tensor
from torch.utils.data import get_worker_info

from tcore.data.frames import Frame


class FrameBuffer:
    """Frames of a batch behind one another, padded to the largest; each is taken over once it is decoded.

    >>> import numpy as np
    >>> buffer = FrameBuffer(2)
    >>> small, large = (np.ones((side, 4, 3), np.uint8) for side in (2, 6))
    >>> rows = buffer.add(small), buffer.add(large)
    >>> buffer.pixels.shape, int(buffer.pixels[0].sum())
    (torch.Size([2, 6, 4, 3]), 24)
    """

    def __init__(self, count: int) -> None:
        self.count, self.taken = count, 0
        self.pixels: UInt8[Tensor, "count height width 3"] = torch.zeros(count, 0, 0, 3, dtype=torch.uint8)

    def add(self, frame: Frame) -> Frame:
        """Copy a frame; the copy is what to hold on to."""
        height, width = frame.shape[:2]
        if height > self.pixels.shape[1] or width > self.pixels.shape[2]:
            self._grow(max(height, self.pixels.shape[1]), max(width, self.pixels.shape[2]))
        row: Frame = self.pixels[self.taken].numpy()[:height, :width]
        row[:] = frame
        self.taken += 1
        return row

    def _grow(self, height: int, width: int) -> None:
        """Move to larger frames; where all have one size, this is where the memory comes from."""
        before, self.pixels = self.pixels, allocate((self.count, height, width, 3))
        if self.taken:
            self.pixels[: self.taken, : before.shape[1], : before.shape[2]] = before[: self.taken]


def allocate(shape: tuple[int, ...]) -> UInt8[Tensor, "..."]:
    """Zeros; in a reading process in shared memory, from where they are handed over without another copy."""
    if get_worker_info() is None:
        return torch.zeros(shape, dtype=torch.uint8)
    storage = torch.UntypedStorage._new_shared(math.prod(shape))  # pages of shared memory begin as zeros
    return torch.empty(0, dtype=torch.uint8).set_(storage).view(shape)
