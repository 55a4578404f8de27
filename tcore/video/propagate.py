"""Labels through frames, for callers from Python: any video, mask or points in, a result per frame out."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from tcore.data.arrays import as_frame, as_frames
from tcore.data.images import Frame
from tcore.data.part import open_part
from tcore.errors import InputError
from tcore.evaluation.encoder import Encoder
from tcore.evaluation.encoders import as_encoder
from tcore.evaluation.propagate import Features, Labels
from tcore.evaluation.protocols import TCORE, Detail, Precision, Protocol, Search
from tcore.evaluation.resize import Size
from tcore.evaluation.run_clip import run_clip, same_size
from tcore.video.both_ways import AHEAD, BACK, SoftLabels, both_ways
from tcore.video.detail import choose_detail, fit_size, suited
from tcore.video.labels import Masks, as_labels
from tcore.video.tracked import TrackedMasks, TrackedPoints, track_labels


@dataclasses.dataclass(frozen=True, eq=False)
class LabeledFrame:
    """Labels of one frame; `numpy.asarray` of it are the labels."""

    frame: int
    """The number of the frame."""
    labels: np.ndarray
    """Ids of all pixels, or x and y of every point (NaN where one is lost)."""
    confidence: float
    """Of the frame, from 0 to 1."""
    each: tuple[float, ...]
    """Of every object, in the order of their ids, or of every point: 0 where it is gone."""
    detail: Detail
    """How fine the grid is that they were propagated on."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.labels, dtype=dtype, copy=copy)

    def __getitem__(self, place: Any) -> Any:
        return self.labels[place]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the labels."""
        return self.labels.shape


def propagate(
    encoder: Encoder | str | Path,
    frames: Any,
    labels: Any,
    *,
    start: int | str = 0,
    end: int | str | None = None,
    every: int = 1,
    protocol: Protocol = TCORE,
    detail: Detail | None = None,
    edges: bool = True,
    long_side: int | None = None,
    search: Search | None = None,
    precision: Precision | None = None,
) -> Iterator[LabeledFrame]:
    """Labels of every frame: ids for a mask, x and y for points (NaN where one is lost), with confidence.

    `encoder` is an encoder or its name ("default"). `frames` is a video file or a folder of images, an array
    or tensor of frames, or any iterable of frames (arrays, tensors, PIL images, image files), of any length:
    one is held, besides the protocol's context. `start`, `end` (included; numbers, or times such as "3.5s")
    and `every` choose frames of a video file or folder.
    `labels` are those of the first frame, or of any frames by their numbers: a mask (bool or ids; array,
    tensor, PIL image or PNG file), or points as [[x, y], ...]. Labels of later frames are carried backward,
    too: `frames` must then be a video, an array, or something else with a length and an index. A patch covers
    16, 8 or about 5 pixels (`detail` coarse, fine or finest; None: fine if this machine can). Masks follow
    the edges of the frames, unless `edges` is False. `precision` is bf16 on a GPU, if it is not given.

    >>> from tcore import FrameStore
    >>> video = FrameStore.rendered(videos=1, frames=4, size=64).read(0, range(4))
    >>> mask = np.zeros((64, 64), dtype=np.uint8)
    >>> mask[16:32, 16:32] = 7
    >>> found = list(propagate("random:vitti16", video, mask))
    >>> len(found), found[3].shape, set(np.unique(found[3].labels).tolist()) <= {0, 7}
    (4, (64, 64), True)
    """
    encoder = as_encoder(encoder)
    encoder.need_features()
    protocol = dataclasses.replace(protocol, edges="guided" if edges else "off")
    number: Callable[[int], int] = int
    backward, there_are = from_memory(frames)
    if isinstance(frames, (str, Path)):
        video = open_part(Path(frames), str(start), None if end is None else str(end), every)
        number, backward, there_are, incoming = video.number, video.backward, video.reach, iter(video)
    elif (start, end, every) != (0, None, 1):
        raise InputError("start, end and every are for video files and folders: slice the frames instead.")
    else:
        incoming = as_frames(frames)
    given = as_labels(labels, number)
    last = max(given.frames)
    if last and last >= (found := there_are(last + 1)):
        raise InputError(f"labels for frame {number(last)}, but there are {found} frames.")
    first = next(incoming, None)
    if first is None:
        raise InputError("no frames: give at least the one that the labels belong to.")
    size = (first.shape[0], first.shape[1])
    detail = detail or choose_detail(encoder, first, None, protocol, long_side, search, precision=precision)
    inside = fit_size(size, encoder.patch_size, detail, long_side)
    protocol = suited(protocol, encoder, inside, search, precision)
    track = track_labels(given, size, inside, encoder.patch_size, protocol)
    soft = soft_labels(encoder, chain([first], incoming), backward, track, size, inside, number)
    for index, (frame, label) in enumerate(labeled for labeled in soft if labeled is not None):
        one = track.read(index, label, frame)
        values = one.values if isinstance(given, Masks) else one.values[:, :2]
        yield LabeledFrame(number(index), values, one.confidence, one.each, detail)


def from_memory(frames: Any) -> tuple[Callable[[int], Iterator[Frame]], Callable[[int], int]]:
    """Ways to read frames backward, and to say how many of the first ones there are."""

    def backward(stop: int) -> Iterator[Frame]:
        return (as_frame(frames[index]) for index in range(stop - 1, -1, -1))

    def there_are(stop: int) -> int:
        if not (hasattr(frames, "__len__") and hasattr(frames, "__getitem__")):
            raise InputError(f"labels for frame {stop - 1} need frames with a length and an index.")
        return min(stop, len(frames))

    return backward, there_are


def soft_labels(
    encoder: Encoder,
    frames: Iterable[Frame],
    backward: Callable[[int], Iterable[Frame]],
    track: TrackedMasks | TrackedPoints,
    size: Size,
    inside: Size,
    number: Callable[[int], int] = int,
    kept: SoftLabels | None = None,
) -> Iterator[tuple[Frame, Labels] | None]:
    """Every frame with its soft labels, after None for every frame of a pass backward.

    `number` is what a frame is called in an error, by its place among the frames. Those that are `kept` are
    not computed again, and those that are computed are kept.
    """
    first, last = track.frames[0], track.frames[-1]

    def run(frames: Iterable[Frame], start: int, step: int) -> Iterator[tuple[Frame, Labels]]:
        def given(index: int, propagated: Labels | None) -> Labels | None:
            return track.given(start + step * index, propagated)

        def watch(index: int, soft: Labels, features: Features) -> None:
            track.watch(step, start + step * index, soft, features)
            if kept is not None and isinstance(track, TrackedPoints):
                kept.put_sure(way, start + step * index, track.sure[step, start + step * index])

        way = AHEAD if step > 0 else BACK
        past = None if kept is None else kept.past(way, start, step, track.frames)
        return run_clip(encoder, frames, given, inside, track.protocol, smooth=True, past=past, watch=watch)

    if kept is not None and isinstance(track, TrackedPoints):
        track.sure |= {(1 if way == AHEAD else -1, index): sure for way, index, sure in kept.sure()}
    step = number(1) - number(0)
    incoming = same_size(frames, size, number(0), step)
    if kept is not None and kept.count(BACK) == last + 1:  # no need to read the frames
        back = (soft for soft in (kept.get(BACK, index) for index in range(last, -1, -1)) if soft is not None)
    else:
        back = (soft for _, soft in run(same_size(backward(last + 1), size, number(last), -step), last, -1))
    ahead = run(incoming, first, 1)
    return both_ways(track, back, incoming, ahead if kept is None else kept.note(first, ahead), kept=kept)
