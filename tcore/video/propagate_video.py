"""Labels propagated through a whole video: masks or tracks, an overlay, a confidence per frame."""

import csv
import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Integer

from tcore.data.images import Frame
from tcore.data.video import FolderVideo, Video, h264_encoder, open_video, video_writer
from tcore.errors import InputError
from tcore.evaluation.encoder import Encoder
from tcore.evaluation.propagate import Labels
from tcore.evaluation.protocols import TCORE, Detail, Protocol, Search
from tcore.evaluation.resize import Size
from tcore.evaluation.run_clip import run_clip, same_size
from tcore.files import check_writable, new_folder, write_text
from tcore.text import Progress, Say, format_size, short_path, silent
from tcore.video.both_ways import both_ways
from tcore.video.detail import choose_detail, fit_size, suited
from tcore.video.formats import About, choose_format, write_files
from tcore.video.labels import Masks, Points, read_labels
from tcore.video.tracked import TrackedMasks, TrackedPoints, paint_labels, track_labels

CONFIDENCE = ("frame", "confidence", "share", "given")


class Propagation(NamedTuple):
    """What was done: the number of frames, and their mean confidence."""

    frames: int
    confidence: float


def propagate_video_file(
    encoder: Encoder,
    video: str | Path,
    labels: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    protocol: Protocol = TCORE,
    detail: Detail | None = None,
    edges: bool = True,
    long_side: int | None = None,
    search: Search | None = None,
    overlay: bool = True,
    form: str | None = None,
    say: Say = silent,
) -> Propagation:
    """Propagate labels through a video file or a folder of images; `out` appears when all is written.

    If a frame cannot be read, `out` holds the labels of those before it, and the error is raised.

    One frame is in memory at a time, besides the context of the protocol, or a few where a file is read
    backward. Labels are given for any frames, which keep them; between two of these, what comes forward
    from one is blended with what comes backward from the other. `detail` and `long_side` are those of
    `fit_size` (None: as fine as this machine can), `search` is that of the protocol (None: exact, or halved
    for large grids on a CPU); the protocol's own size is for benchmarks. `form` is the format of the labels
    (`tcore.video.formats`). Masks follow the edges of a frame, unless `edges` is False.
    """
    encoder.need_features()
    protocol = dataclasses.replace(protocol, edges="guided" if edges else "off")
    paths = [Path(labels)] if isinstance(labels, (str, Path)) else [Path(path) for path in labels]
    source, folder = open_video(Path(video)), Path(out)
    _check_files(source, paths, folder)
    check_writable(folder)
    given = read_labels(paths, source.stems, say)
    chosen = choose_format(form, given)
    used = _within(given, source)
    frames = iter(source)
    first = next(frames)
    size = (first.shape[0], first.shape[1])
    detail = detail or choose_detail(encoder, first, source.count, protocol, long_side, search, say)
    inside = fit_size(size, encoder.patch_size, detail, long_side)
    protocol = suited(protocol, encoder, inside, search)
    track = track_labels(used, size, inside, encoder.patch_size, protocol)
    if overlay and h264_encoder() is None:
        say("no overlay.mp4: it needs PyAV with an H.264 encoder (pip install av).")
        overlay = False
    sizes = (format_size(*one) for one in (size, inside, track.grid))
    say(f"detail {detail}: " + "frames of {} go in at {}, a grid of {}.".format(*sizes))
    with new_folder(folder) as made:
        with ExitStack() as files:
            table = files.enter_context(_open_table(made / "confidence.csv"))
            draw = (
                files.enter_context(video_writer(made / "overlay.mp4", source.rate, size))
                if overlay
                else None
            )
            soft = _soft_labels(encoder, chain([first], frames), source.backward, track, size, inside, made)
            back = track.frames[-1] and 1 + track.frames[-1]  # frames that are also carried backward
            total = source.count and source.count + back
            run = _Run(track, table, draw, Progress("frame", total, say=say))
            if back:
                say(f"two passes: {back} frames backward, then all of them forward.")
            about = About(used, size, source.file_name)
            write_files(made, chosen.write(about, run.labels(soft)))
        remarks = list(_remarks(source, given, run.done))
        if run.stopped is not None:
            remarks.append(
                f"stopped after {run.done} frames, whose labels are in {short_path(folder)}: {run.stopped}"
            )
        for line in remarks:
            say(line)
        knobs = {
            name: value for name, value in dataclasses.asdict(track.protocol).items() if name != "resize"
        }
        card = {
            "video": short_path(source.path),
            "labels": [short_path(path) for path in paths],
            "encoder": encoder.identity() | {"name": short_path(encoder.name)},
            "protocol": knobs,
            "detail": detail,
            "frame_size": list(size),
            "input_size": list(inside),
            "frames": run.done,
            "remarks": remarks,
        }
        write_text(made / "propagation.json", json.dumps(card, indent=1) + "\n")
    if run.stopped is not None:
        raise run.stopped
    return Propagation(run.done, run.confidence / run.done)


@dataclasses.dataclass
class _Run:
    """The labels of frame after frame, and what is written of each besides."""

    track: TrackedMasks | TrackedPoints
    table: Any
    draw: Callable[[Frame], None] | None
    progress: Progress
    done: int = 0
    confidence: float = 0.0
    """Of all frames together."""
    stopped: InputError | None = None
    """Why a later frame could not be read."""

    def labels(self, soft: Iterable[tuple[Frame, Labels] | None]) -> Iterator[tuple[int, np.ndarray]]:
        """Number and labels of every frame, up to one that cannot be read."""
        try:
            for labeled in soft:
                self.progress.advance()
                if labeled is None:  # a frame of the pass backward
                    continue
                frame, label = labeled
                found = self.track.read(self.done, label, frame)
                yield self.done, found.values
                row = (f"{found.confidence:.4f}", f"{found.share:.4f}", int(self.done in self.track.frames))
                self.table.writerow((self.done, *row))
                if self.draw:
                    self.draw(paint_labels(frame, found.values))
                self.done, self.confidence = self.done + 1, self.confidence + found.confidence
        except InputError as error:
            if self.done == 0:
                raise
            self.stopped = error  # what was done before is kept


@contextmanager
def _open_table(path: Path) -> Iterator[Any]:
    """A CSV that grows row by row."""
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(CONFIDENCE)
        yield table


def _within(given: Masks | Points, source: Video) -> Masks | Points:
    """The labels of frames that there are; a video may end earlier than it says."""
    last = max(given.frames)
    if source.count is not None and last >= source.count:
        raise InputError(f"labels for frame {last}, but {source.path} has {source.count} frames, from 0 on.")
    count = source.reach(last + 1) if last else 1
    if min(given.frames) >= count:
        raise InputError(
            f"labels for frame {min(given.frames)}, but {source.path} has {count} frames, from 0 on."
        )
    if isinstance(given, Masks):
        return Masks({frame: ids for frame, ids in given.frames.items() if frame < count})
    return Points(given.names, {frame: named for frame, named in given.frames.items() if frame < count})


def _soft_labels(
    encoder: Encoder,
    frames: Iterable[Frame],
    backward: Callable[[int], Iterable[Frame]],
    track: TrackedMasks | TrackedPoints,
    size: Size,
    inside: Size,
    folder: Path | None = None,
) -> Iterator[tuple[Frame, Labels] | None]:
    """Every frame with its soft labels, after None for every frame of a pass backward."""
    first, last = track.frames[0], track.frames[-1]

    def run(frames: Iterable[Frame], start: int, step: int) -> Iterator[tuple[Frame, Labels]]:
        def given(index: int, propagated: Labels | None) -> Labels | None:
            return track.given(start + step * index, propagated)

        return run_clip(encoder, frames, given, inside, track.protocol, smooth=True)

    incoming = same_size(frames, size)
    back = (soft for _, soft in run(same_size(backward(last + 1), size, last, -1), last, -1))
    return both_ways(track, back, incoming, run(incoming, first, 1), folder=folder)


ArrayLabels = Integer[np.ndarray, "rows columns"] | Float[np.ndarray, "points 2"]


def propagate(
    encoder: Encoder,
    frames: Iterable[Frame],
    labels: ArrayLabels | Mapping[int, ArrayLabels],
    *,
    protocol: Protocol = TCORE,
    detail: Detail | None = None,
    edges: bool = True,
    long_side: int | None = None,
    search: Search | None = None,
) -> Iterator[np.ndarray]:
    """Labels of every frame: ids for a mask of ids, x and y for points (NaN where one is lost).

    `labels` are those of the first frame, or of any frames by their numbers. Frames may be an array or any
    iterable, of any length; one is held, besides the protocol's context. Labels of later frames are carried
    backward, too: `frames` must then be an array, or something else with a length and an index. A patch
    covers 16, 8 or about 5 pixels (`detail` coarse, fine or finest; None: fine if this machine can).
    Masks follow the edges of the frames, unless `edges` is False.

    >>> from tcore import FrameStore, load_encoder
    >>> video = FrameStore.rendered(videos=1, frames=4, size=64).read(0, range(4))
    >>> mask = np.zeros((64, 64), dtype=np.uint8)
    >>> mask[16:32, 16:32] = 7
    >>> labels = list(propagate(load_encoder("random:vitti16"), video, mask))
    >>> len(labels), labels[3].shape, set(np.unique(labels[3]).tolist()) <= {0, 7}
    (4, (64, 64), True)
    """
    protocol = dataclasses.replace(protocol, edges="guided" if edges else "off")
    given = _from_arrays(labels if isinstance(labels, Mapping) else {0: labels})
    indexed: Any = frames
    if max(given.frames) > 0:
        if not (hasattr(frames, "__len__") and hasattr(frames, "__getitem__")):
            raise InputError(f"labels for frame {max(given.frames)} need frames with a length and an index.")
        if max(given.frames) >= len(indexed):
            raise InputError(f"labels for frame {max(given.frames)}, but there are {len(indexed)} frames.")
    incoming = iter(frames)
    first = next(incoming, None)
    if first is None:
        raise InputError("no frames: give at least the one that the labels belong to.")
    size = (first.shape[0], first.shape[1])
    detail = detail or choose_detail(encoder, first, None, protocol, long_side, search)
    inside = fit_size(size, encoder.patch_size, detail, long_side)
    protocol = suited(protocol, encoder, inside, search)
    track = track_labels(given, size, inside, encoder.patch_size, protocol)
    soft = _soft_labels(
        encoder,
        chain([first], incoming),
        lambda stop: (indexed[index] for index in range(stop - 1, -1, -1)),
        track,
        size,
        inside,
    )
    for index, (frame, label) in enumerate(labeled for labeled in soft if labeled is not None):
        values = track.read(index, label, frame).values
        yield values if isinstance(given, Masks) else values[:, :2]


def _from_arrays(labels: Mapping[int, ArrayLabels]) -> Masks | Points:
    """Labels from arrays by the number of their frame."""
    if not labels or min(labels) < 0:
        raise InputError(f"labels for frames {sorted(labels)}: need one or more, numbered from 0.")
    masks = [np.issubdtype(values.dtype, np.integer) for values in labels.values()]
    if all(masks):
        for frame, values in labels.items():
            low, high = int(values.min(initial=0)), int(values.max(initial=0))
            if low < 0 or high > 255:
                raise InputError(f"labels of frame {frame} span {low} to {high}: ids go from 0 to 255.")
        return Masks({frame: values.astype(np.uint8) for frame, values in labels.items()})
    counts = {len(values) for values in labels.values()}
    if any(masks) or len(counts) > 1:
        raise InputError(
            "labels differ in kind or number: give masks of ids, or the same points, for all frames."
        )
    names = tuple(map(str, range(counts.pop())))
    rows = {frame: [(float(x), float(y)) for x, y in values] for frame, values in labels.items()}
    return Points(names, {frame: dict(zip(names, row, strict=True)) for frame, row in rows.items()})


def _check_files(source: Video, labels: Sequence[Path], out: Path) -> None:
    """Refuse to overwrite what is there, and to read a mask as a frame."""
    if isinstance(source, FolderVideo):
        frames = {file.resolve() for file in source.files}
        for path in labels:
            if path.resolve() in frames:
                raise InputError(f"labels {path} lie among the frames of {source.path}: move them elsewhere.")
    for path in (source.path, *labels):
        if out.resolve() == path.resolve() or out.resolve() in path.resolve().parents:
            raise InputError(f"{path} lies in the out folder {out}: write to another folder.")
    for path in out.iterdir() if out.is_dir() else ():
        raise InputError(
            f"out folder {out} already holds {path.name}: give a new or an empty folder as --out."
        )


def _remarks(source: Video, labels: Masks | Points, frames: int) -> Iterator[str]:
    """What a user should know about a video that was not as expected."""
    if source.problem:
        yield source.problem
    if frames == 1:
        yield f"video {source.path} has one frame: its labels were written as given, nothing was propagated."
    late = [str(frame) for frame in sorted(labels.frames) if frame >= frames]
    if late:
        yield f"labels for frame {', '.join(late)} were not used: the video ended after {frames} frames."
