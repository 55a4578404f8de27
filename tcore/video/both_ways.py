"""Labels of any frames, carried both ways: those of the pass backward wait on disk for the pass forward."""

import struct
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import IO, TypeVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tcore.errors import InputError
from tcore.evaluation.propagate import Labels
from tcore.evaluation.run_clip import Past
from tcore.video.tracked import TrackedMasks, TrackedPoints

Item = TypeVar("Item")
BACK, AHEAD = 0, 1  # the two passes
SURE = 2  # above: how sure points are in a pass
RECORD = struct.Struct("<BIIIIII")  # pass, frame, shape, bytes, checksum


class SoftLabels:
    """Soft labels of the frames of both passes in a file, compressed, one after another.

    What a file holds from its position on is read; where a record is cut off or damaged, the file ends.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._places: dict[tuple[int, int], tuple[int, tuple[int, ...], int]] = {}
        end = file.tell()
        while len(head := file.read(RECORD.size)) == RECORD.size:
            way, index, *shape, length, checksum = RECORD.unpack(head)
            data = file.read(length)
            if len(data) < length or zlib.crc32(head[:-4] + data) != checksum:
                break
            self._places[way, index] = (end + RECORD.size, tuple(shape), length)
            end = file.tell()
        file.seek(end)
        file.truncate()

    def put(self, way: int, index: int, soft: Labels) -> None:
        """Keep the labels of a frame."""
        if (way, index) in self._places:
            return
        data, shape = zlib.compress(soft.float().cpu().numpy().tobytes(), 1), tuple(soft.shape)
        head = RECORD.pack(way, index, *shape, len(data), 0)[:-4]
        start = self._file.seek(0, 2)
        self._file.write(head + struct.pack("<I", zlib.crc32(head + data)) + data)
        self._file.flush()  # a process that is killed leaves it to the next one
        self._places[way, index] = (start + RECORD.size, shape, len(data))

    def get(self, way: int, index: int) -> Labels | None:
        """The labels of a frame, if they were kept."""
        if (way, index) not in self._places:
            return None
        start, shape, length = self._places[way, index]
        self._file.seek(start)
        values = np.frombuffer(zlib.decompress(self._file.read(length)), dtype=np.float32)
        return torch.from_numpy(values.copy()).reshape(shape)

    @property
    def empty(self) -> bool:
        """Whether nothing is kept."""
        return not self._places

    def count(self, way: int) -> int:
        """How many frames of a pass are kept."""
        return sum(kept == way for kept, _ in self._places)

    def put_sure(self, way: int, index: int, sure: Float[Tensor, " points"]) -> None:
        """Keep how sure the points of a frame are."""
        self.put(SURE + way, index, sure[None, None])

    def sure(self) -> Iterator[tuple[int, int, Float[Tensor, " points"]]]:
        """Pass, frame, and how sure its points are, of all that is kept."""
        for way, index in self._places:
            if way >= SURE and (found := self.get(way, index)) is not None:
                yield way - SURE, index, found[0, 0]

    def note(self, start: int, ahead: Iterable[tuple[Item, Labels]]) -> Iterator[tuple[Item, Labels]]:
        """The pass forward from frame `start` on, kept as it goes."""
        for index, (item, soft) in enumerate(ahead, start):
            self.put(AHEAD, index, soft)
            yield item, soft

    def past(self, way: int, start: int, step: int, given: Sequence[int]) -> Past | None:
        """What is kept of a pass that begins at frame `start`; `given` are the frames with given labels."""
        count = self.count(way)
        last = max((place for place in range(count) if start + step * place in given), default=0)
        return Past(count, last, partial(self._place, way, start, step)) if count else None

    def _place(self, way: int, start: int, step: int, place: int) -> Labels:
        soft = self.get(way, start + step * place)
        assert soft is not None
        return soft


def both_ways(
    track: TrackedMasks | TrackedPoints,
    back: Iterable[Labels],
    early: Iterable[Item],
    ahead: Iterable[tuple[Item, Labels]],
    *,
    first: int = 0,
    folder: Path | None = None,
    kept: SoftLabels | None = None,
) -> Iterator[tuple[Item, Labels] | None]:
    """Every frame from `first` on with its soft labels, after None for every frame of the pass backward.

    `back` has the labels of the frames from the last given one down to `first`; it is not used where that
    is the first one. `ahead` goes forward from the first given frame on, `early` has the frames before that.
    The pass backward is `kept`, or in a file without a name in `folder`.
    """
    last, start = max(track.frames), min(frame for frame in track.frames if frame >= first)
    stopped: InputError | None = None
    with ExitStack() as files:
        kept = kept or SoftLabels(files.enter_context(tempfile.TemporaryFile(dir=folder)))
        if last > first:
            try:
                for index, soft in zip(range(last, first - 1, -1), back, strict=False):
                    kept.put(BACK, index, soft)
                    yield None
            except InputError as error:
                stopped = error  # at a frame where the pass forward ends, too
        for index, item in zip(range(first, start), early, strict=False):
            labels = kept.get(BACK, index)
            if labels is None:
                raise stopped or InputError(f"frame {index} could not be reached from frame {start}.")
            yield item, labels
        for index, (item, soft) in enumerate(ahead, start):
            yield item, track.blend(index, soft, kept.get(BACK, index))
