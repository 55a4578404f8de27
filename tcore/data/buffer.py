"""Memory for the frames of a batch."""

import torch
from jaxtyping import UInt8
from torch import Tensor
from torch.utils.data import get_worker_info

from tcore.data.images import Frame
from tcore.data.views import Size


class FrameBuffer:
    """Frames of a batch behind one another without gaps; each is taken over once it is decoded.

    Padded to the largest, the frames of mixed videos would be twice as many bytes, and every byte is copied
    twice on its way to the training device.

    >>> import numpy as np
    >>> buffer = FrameBuffer(2)
    >>> for side in (2, 6):
    ...     buffer.add(np.ones((side, 4, 3), np.uint8))
    >>> len(buffer.pixels), pad(buffer.pixels, buffer.sizes).shape
    (96, torch.Size([2, 6, 4, 3]))
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.sizes: list[Size] = []
        self._memory, self._taken = torch.empty(0, dtype=torch.uint8), 0

    @property
    def pixels(self) -> UInt8[Tensor, " bytes"]:
        """The frames so far."""
        return self._memory[: self._taken]

    def add(self, frame: Frame) -> None:
        """Copy a frame."""
        end = self._taken + frame.size
        if end > len(self._memory):
            # Room for the rest, were they all like this one; what is not written to is no memory yet.
            before, left = self.pixels, self.count - len(self.sizes)
            self._memory = allocate(self._taken + left * frame.size)
            self.pixels[:] = before
        self._memory[self._taken : end].numpy().reshape(frame.shape)[:] = frame
        self._taken = end
        self.sizes.append((frame.shape[0], frame.shape[1]))


def allocate(size: int) -> UInt8[Tensor, " size"]:
    """Bytes; in a reading process in shared memory, from where they are handed over without another copy."""
    if get_worker_info() is None:
        return torch.empty(size, dtype=torch.uint8)
    storage = torch.UntypedStorage._new_shared(size)
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def pad(pixels: UInt8[Tensor, " bytes"], sizes: list[Size]) -> UInt8[Tensor, "{len(sizes)} height width 3"]:
    """Bring frames to the size of the largest, with zeros below and to the right."""
    if len(set(sizes)) == 1:
        return pixels.view(len(sizes), *sizes[0], 3)
    height, width = (max(sides) for sides in zip(*sizes, strict=True))
    padded = pixels.new_zeros(len(sizes), height, width, 3)
    first = start = 0
    while first < len(sizes):  # neighbors of one size, as those of one video are, in one go
        rows, columns = size = sizes[first]
        last = next((i for i in range(first, len(sizes)) if sizes[i] != size), len(sizes))
        end = start + (last - first) * rows * columns * 3
        padded[first:last, :rows, :columns] = pixels[start:end].view(last - first, rows, columns, 3)
        first, start = last, end
    return padded
