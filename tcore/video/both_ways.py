"""Labels of any frames, carried both ways: those of the pass backward wait on disk for the pass forward."""

import tempfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, TypeVar

import numpy as np
import torch

from tcore.errors import InputError
from tcore.evaluation.propagate import Labels
from tcore.video.tracked import TrackedMasks, TrackedPoints

Item = TypeVar("Item")


class SoftLabels:
    """Soft labels of frames in a file, compressed, in half precision."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._places: dict[int, tuple[int, int]] = {}
        self._shape: tuple[int, ...] = ()

    def put(self, index: int, soft: Labels) -> None:
        """Keep the labels of a frame."""
        data = zlib.compress(soft.half().cpu().numpy().tobytes(), 1)
        self._shape = tuple(soft.shape)
        self._places[index] = (self._file.seek(0, 2), self._file.write(data))

    def get(self, index: int) -> Labels | None:
        """The labels of a frame, if they were kept."""
        if index not in self._places:
            return None
        start, length = self._places[index]
        self._file.seek(start)
        values = np.frombuffer(zlib.decompress(self._file.read(length)), dtype=np.float16)
        return torch.from_numpy(values.astype(np.float32)).reshape(self._shape)


def both_ways(
    track: TrackedMasks | TrackedPoints,
    back: Iterable[Labels],
    early: Iterable[Item],
    ahead: Iterable[tuple[Item, Labels]],
    *,
    first: int = 0,
    folder: Path | None = None,
) -> Iterator[tuple[Item, Labels] | None]:
    """Every frame from `first` on with its soft labels, after None for every frame of the pass backward.

    `back` has the labels of the frames from the last given one down to `first`; it is not used where that
    is the first one. `ahead` goes forward from the first given frame on, `early` has the frames before that.
    The file of the pass backward has no name and is in `folder`.
    """
    last, start = max(track.frames), min(frame for frame in track.frames if frame >= first)
    stopped: InputError | None = None
    with tempfile.TemporaryFile(dir=folder) as file:
        kept = SoftLabels(file)
        if last > first:
            try:
                for index, soft in zip(range(last, first - 1, -1), back, strict=False):
                    kept.put(index, soft)
                    yield None
            except InputError as error:
                stopped = error  # at a frame where the pass forward ends, too
        for index, item in zip(range(first, start), early, strict=False):
            labels = kept.get(index)
            if labels is None:
                raise stopped or InputError(f"frame {index} could not be reached from frame {start}.")
            yield item, labels
        for index, (item, soft) in enumerate(ahead, start):
            yield item, track.blend(index, soft, kept.get(index))
