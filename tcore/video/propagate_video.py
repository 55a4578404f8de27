"""Labels propagated through a whole video: masks or tracks, an overlay, a confidence per frame."""

import csv
import dataclasses
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tcore.data.images import Frame
from tcore.data.part import PartOfVideo, frame_at, open_part
from tcore.data.video import FolderVideo, Video, h264_encoder, video_writer
from tcore.errors import InputError
from tcore.evaluation.card import versions
from tcore.evaluation.encoder import Encoder
from tcore.evaluation.masks import VOID
from tcore.evaluation.propagate import Labels
from tcore.evaluation.protocols import TCORE, Detail, Precision, Protocol, Search
from tcore.evaluation.resize import Size
from tcore.files import check_writable, digest, new_folder, sha256, write_json
from tcore.text import Progress, Say, format_size, short_path, silent
from tcore.video.both_ways import AHEAD, BACK
from tcore.video.detail import choose_detail, fit_size, suited
from tcore.video.formats import About, choose_format, write_files
from tcore.video.labels import Masks, Points, read_labels
from tcore.video.mark import Mark, Marker
from tcore.video.propagate import soft_labels
from tcore.video.resume import CARD, DIGITS, UNFINISHED, digest_video, find_unfinished, keep_unfinished
from tcore.video.tracked import LOST, LOST_POINT, TrackedMasks, TrackedPoints, paint_labels, track_labels

LISTED = 5  # losses that are listed
CONFIDENCE = ("frame", "confidence", "share", "given")


class InterruptedRunError(InputError):
    """The user stopped the command; what was done before is kept."""

    exit_code = 130


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
    marks: Sequence[Mark] = (),
    mark_at: str | None = None,
    start: str = "0",
    end: str | None = None,
    every: int = 1,
    protocol: Protocol = TCORE,
    detail: Detail | None = None,
    edges: bool = True,
    long_side: int | None = None,
    search: Search | None = None,
    precision: Precision | None = None,
    overlay: bool = True,
    form: str | None = None,
    interrupted: Callable[[], bool] = bool,
    say: Say = silent,
) -> Propagation:
    """Propagate labels through a video file or a folder of images; all of `out` appears at once.

    If a frame cannot be read, or `interrupted` says so, `out` holds the labels of those before it, and the
    error is raised. After an interruption or a kill, `out` also holds what the same call needs to resume; it
    ends with the same files as one that was never stopped. Other calls are refused there.

    One frame is in memory at a time, besides the context of the protocol, or a few where a file is read
    backward. Labels are given for any frames, which keep them, as files or as `marks` on frame `mark_at`
    (None: the first one); between two of these, what comes forward from one is blended with what comes
    backward from the other. `start`, `end` and `every` are those of `open_part`. `detail` and `long_side` are
    those of `fit_size` (None: as fine as this machine can), `search` is that of the protocol (None: exact, or
    halved for large grids on a CPU), `precision` likewise (None: bf16 on a GPU); the protocol's own size is
    for benchmarks. `form` is the format of the labels (`tcore.video.formats`). Masks follow the edges of a
    frame, unless `edges` is False.
    """
    encoder.need_features()
    protocol = dataclasses.replace(protocol, edges="guided" if edges else "off")
    paths = [Path(labels)] if isinstance(labels, (str, Path)) else [Path(path) for path in labels]
    source, folder = open_part(Path(video), start, end, every), Path(out)
    check_writable(folder)
    _check_files(source, paths, folder)
    parts = {"start": start, "end": end, "every": every, "mark-at": mark_at}
    knobs = {"detail": detail, "long-side": long_side, "search": search, "overlay": overlay, "format": form}
    asked = _asked(encoder, source, paths, marks, protocol) | parts | knobs
    asked |= {"precision": precision} if precision else {}
    before = find_unfinished(folder, asked)
    given, called = _read(paths, marks, mark_at, source, encoder, say)
    chosen, used = choose_format(form, given), _within(given, source)
    frames = iter(source)
    first = next(frames)
    asks = (before or detail, long_side, search, precision)
    way = _settle(encoder, first, source.count, used, protocol, *asks, say)
    if overlay and h264_encoder() is None:
        say("no overlay.mp4: it needs PyAV with an H.264 encoder (pip install av).")
        overlay = False
    sizes = (format_size(*one) for one in (way.size, way.inside, way.track.grid))
    say(f"detail {way.detail}: " + "frames of {} go in at {}, a grid of {}.".format(*sizes))
    about = About(used, way.size, source.file_name, called)
    with new_folder(folder, replace=True) as made:
        with ExitStack() as files:
            kept = files.enter_context(keep_unfinished(folder, asked, way.detail))
            table = files.enter_context(_open_table(made / "confidence.csv", about.in_words))
            film = video_writer(made / "overlay.mp4", source.rate, way.size) if overlay else nullcontext()
            draw, past = files.enter_context(film), kept.count(BACK) + kept.count(AHEAD)
            progress = _begin(source.count, way.back, past, say)
            run = _Run(way.track, source.number, table, draw, progress, interrupted, about.in_words, past)
            soft = soft_labels(
                encoder,
                chain([first], frames),
                source.backward,
                way.track,
                way.size,
                way.inside,
                source.number,
                kept,
            )
            write_files(made, chosen.write(about, run.labels(soft)))
        remarks = list(_remarks(source, given, run.done)) if run.stopped is None else []
        card = _card(source, paths, marks, encoder, way)
        write_json(made / CARD, card | _outcome(run, remarks, folder, digest(asked, DIGITS), say))
        if isinstance(run.stopped, InterruptedRunError):
            shutil.copyfile(folder / UNFINISHED, made / UNFINISHED)
    if run.stopped is not None:
        raise run.stopped
    return Propagation(run.done, run.confidence / run.done)


class _Way(NamedTuple):
    """How the labels of a video are carried."""

    detail: Detail
    size: Size
    """Of its frames."""
    inside: Size
    """Of what the encoder is given."""
    track: TrackedMasks | TrackedPoints
    back: int
    """Frames that are also carried backward."""


def _settle(
    encoder: Encoder,
    first: Frame,
    count: int | None,
    used: Masks | Points,
    protocol: Protocol,
    detail: Detail | None,
    long_side: int | None,
    search: Search | None,
    precision: Precision | None,
    say: Say,
) -> _Way:
    """Choose what was not asked for: the detail, and what follows from it."""
    last = max(used.frames)
    back = last and 1 + last
    detail = choose_detail(
        encoder, first, count, protocol, long_side, search, say, detail, precision, backward=back
    )
    size = (first.shape[0], first.shape[1])
    inside = fit_size(size, encoder.patch_size, detail, long_side)
    protocol = suited(protocol, encoder, inside, search, precision)
    track = track_labels(used, size, inside, encoder.patch_size, protocol)
    return _Way(detail, size, inside, track, back)


def _begin(count: int | None, back: int, past: int, say: Say) -> Progress:
    """Say what there is to do, and count it."""
    total = count and count + back
    if back:
        say(f"two passes: {back} frames backward, then all of them forward.")
    if past:
        say(f"resuming after {past} finished frames{f' of {total}' if total else ''}.")
    return Progress("frame", total, past, say=say)


def _outcome(run: "_Run", remarks: Sequence[str], folder: Path, command: str, say: Say) -> dict[str, Any]:
    """What propagation.json says about what came of it; the same is said."""
    losses = list(run.losses())
    for line in (*losses, *remarks):
        say(line)
    found: dict[str, Any] = {"frames": run.done, "losses": losses, "remarks": list(remarks)}
    if run.stopped is None:
        return {"command": command} | found
    # Why it stopped is said by the error.
    there = f"stopped after {run.done} frames, whose labels are in {short_path(folder)}"
    say(f"{there}.")
    return found | {"remarks": [*remarks, f"{there}: {run.stopped}"]}


def _asked(
    encoder: Encoder, source: Video, paths: Sequence[Path], marks: Sequence[Mark], protocol: Protocol
) -> dict[str, Any]:
    """What labels depend on, by the names of the flags; the same command has the same."""
    return {
        "versions": versions(),
        "encoder": digest(encoder.identity(), DIGITS),
        "device": next(encoder.parameters()).device.type,
        "video": digest_video(source),
        "labels": digest([(path.name, sha256(path)) for path in paths], DIGITS),
        "box and click": digest([dataclasses.asdict(mark) for mark in marks], DIGITS),
        "protocol": digest(dataclasses.asdict(protocol), DIGITS),
    }


def _card(
    source: Video, paths: Sequence[Path], marks: Sequence[Mark], encoder: Encoder, way: _Way
) -> dict[str, Any]:
    """What propagation.json says about how labels were made."""
    knobs = {
        name: value for name, value in dataclasses.asdict(way.track.protocol).items() if name != "resize"
    }
    card: dict[str, Any] = {
        "video": short_path(source.path),
        "labels": [short_path(path) for path in paths],
        "encoder": encoder.identity() | {"name": short_path(encoder.name)},
        "protocol": knobs,
        "detail": way.detail,
        "frame_size": list(way.size),
        "input_size": list(way.inside),
    }
    if source.number(1) - source.number(0) > 1 or source.number(0):
        card |= {"start": source.number(0), "every": source.number(1) - source.number(0)}
    return card | ({"marks": [dataclasses.asdict(mark) for mark in marks]} if marks else {})


@dataclasses.dataclass
class _Run:
    """The labels of frame after frame, and what is written of each besides."""

    track: TrackedMasks | TrackedPoints
    number: Callable[[int], int]
    table: Any
    draw: Callable[[Frame], None] | None
    progress: Progress
    interrupted: Callable[[], bool]
    names: Sequence[str]
    """Of the objects or points."""
    past: int = 0
    """Frames that an earlier run has done; the pass backward counts."""
    done: int = 0
    confidence: float = 0.0
    """Of all frames together."""
    lost: dict[str, int] = dataclasses.field(default_factory=dict)
    """Objects and points that are lost, and since which frame."""
    gone: list[tuple[int, str, bool]] = dataclasses.field(default_factory=list)
    """Every loss: number of the frame, the object or point, and whether it was found again."""
    weakest: tuple[float, int, str] = (2.0, 0, "")
    """The smallest confidence, and of what in which frame."""
    stopped: InputError | None = None
    """Why a later frame was not labeled."""

    def labels(self, soft: Iterable[tuple[Frame, Labels] | None]) -> Iterator[tuple[int, np.ndarray]]:
        """Number and labels of every frame, up to one that cannot be read, or to an interruption."""
        seen = 0
        try:
            for labeled in soft:
                if self.interrupted():
                    where = f"after frame {self.number(self.done - 1)}" if self.done else "at the beginning"
                    raise InterruptedRunError(f"interrupted {where}: rerun the same command to resume.")
                seen += 1
                if seen > self.past:
                    self.progress.advance()
                if labeled is None:  # a frame of the pass backward
                    continue
                frame, label = labeled
                found, number = self.track.read(self.done, label, frame), self.number(self.done)
                yield number, found.values
                self._note(number, found.each)
                row = (f"{found.confidence:.4f}", f"{found.share:.4f}", int(self.done in self.track.frames))
                self.table.writerow((number, *row, *(f"{one:.4f}" for one in found.each)))
                if self.draw:
                    self.draw(paint_labels(frame, found.values))
                self.done, self.confidence = self.done + 1, self.confidence + found.confidence
        except InputError as error:
            if self.done == 0:
                raise
            self.stopped = error  # what was done before is kept

    def _note(self, number: int, each: Sequence[float]) -> None:
        for name, sure in zip(self.names, each, strict=True):
            if sure >= self.least:
                if name in self.lost:
                    self.gone.append((self.lost.pop(name), name, True))
            elif name not in self.lost:
                self.lost[name] = number
            self.weakest = min(self.weakest, (sure, number, name))

    @property
    def least(self) -> float:
        """The confidence below which something is lost."""
        return LOST_POINT if isinstance(self.track, TrackedPoints) else LOST

    def losses(self) -> Iterator[str]:
        """What was lost where, and which frame to label next."""
        gone = sorted([*self.gone, *((number, name, False) for name, number in self.lost.items())])
        for number, name, again in gone[:LISTED]:
            yield f"{name} was lost at frame {number}{' for a while' if again else ''}: mark it there."
        if len(gone) > LISTED:
            yield f"{len(gone) - LISTED} more losses are in confidence.csv (below {self.least})."
        sure, number, name = self.weakest
        if gone:
            number, name, _ = next((one for one in gone if not one[2]), gone[0])
            yield f"the frame to correct next: {number} ({name})."
        elif sure < 1:
            yield f"the frame to correct next, if any: {number} ({name}, confidence {sure:.2f})."


@contextmanager
def _open_table(path: Path, names: Sequence[str]) -> Iterator[Any]:
    """A CSV that grows row by row."""
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow((*CONFIDENCE, *names))
        yield table


def _read(
    paths: Sequence[Path],
    marks: Sequence[Mark],
    mark_at: str | None,
    source: Video,
    encoder: Encoder,
    say: Say,
) -> tuple[Masks | Points, dict[int, str]]:
    """Labels of files and marks by the places of their frames; names of marked objects by their ids."""
    read = read_labels(paths, source.stems, say, source.number(0)) if paths or not marks else Masks({})
    given = _places(read, source)
    return _with_marks(given, marks, mark_at, source, encoder, say) if marks else (given, {})


def _places(given: Masks | Points, source: Video) -> Masks | Points:
    """Labels by the places of their frames among those that are propagated, instead of their numbers."""
    begin, every = source.number(0), source.number(1) - source.number(0)
    for frame in given.frames:
        if frame < begin or (frame - begin) % every:
            raise InputError(
                f"labels for frame {frame}, which is not among those from {begin} on, every {every}: "
                "change --start or --every, or leave them out."
            )
    if isinstance(given, Masks):
        return Masks({(frame - begin) // every: ids for frame, ids in given.frames.items()})
    return Points(given.names, {(frame - begin) // every: named for frame, named in given.frames.items()})


def _with_marks(
    given: Masks | Points, marks: Sequence[Mark], at: str | None, source: Video, encoder: Encoder, say: Say
) -> tuple[Masks, dict[int, str]]:
    """Masks, and with them the objects that are marked on a frame; they get the ids that are free."""
    if isinstance(given, Points):
        raise InputError("boxes and clicks make masks: they cannot be combined with points.")
    whole = source.whole if isinstance(source, PartOfVideo) else source
    number = source.number(0) if at is None else frame_at(at, whole, "mark-at")
    (place,) = _places(Masks({number: np.zeros((1, 1), np.uint8)}), source).frames
    frame, nearby = source.around(place)
    if frame is None:
        raise InputError(f"mark-at {number}: {source.path} ends before that frame.")
    taken = max((int(ids.max()) for ids in given.frames.values()), default=0)
    ids = given.frames.get(place, np.zeros(frame.shape[:2], np.uint8)).copy()
    if ids.shape != frame.shape[:2]:
        found, wanted = format_size(*ids.shape), format_size(*frame.shape[:2])
        raise InputError(f"the mask for frame {number} is {found}, the frames are {wanted}.")
    if taken + len(marks) >= VOID:
        raise InputError(f"{taken} objects and {len(marks)} marked ones: ids are at most {VOID - 1}.")
    marker = Marker(frame, encoder, nearby)
    for label, mark in enumerate(marks, start=taken + 1):
        found_here = marker.mark(box=mark.box, clicks=mark.clicks, clicks_not=mark.clicks_not)
        ids[found_here] = label
        say(f"object {label} is {mark.name!r}: {int(found_here.sum())} pixels of frame {number}.")
        if not found_here.any():
            raise InputError(f"nothing was found where {mark.name!r} is marked: mark it otherwise.")
    called = {label: mark.name for label, mark in enumerate(marks, start=taken + 1)}
    return Masks(given.frames | {place: ids}), called


def _within(given: Masks | Points, source: Video) -> Masks | Points:
    """The labels of frames that there are; a video may end earlier than it says."""
    last, number = max(given.frames), source.number
    ends = f"but {source.path} has"
    if source.count is not None and last >= source.count:
        if isinstance(source, PartOfVideo):
            raise InputError(
                f"labels for frame {number(last)}, but frame {number(source.count - 1)} is the last that is "
                "propagated: change --end, or leave them out."
            )
        raise InputError(f"labels for frame {last}, {ends} {source.count} frames, from 0 on.")
    count = source.reach(last + 1) if last else 1
    if min(given.frames) >= count:
        raise InputError(
            f"labels for frame {number(min(given.frames))}, {ends} {count} frames, from {number(0)} on."
        )
    if isinstance(given, Masks):
        return Masks({frame: ids for frame, ids in given.frames.items() if frame < count})
    return Points(given.names, {frame: named for frame, named in given.frames.items() if frame < count})


def _check_files(source: Video, labels: Sequence[Path], out: Path) -> None:
    """Refuse to write over what is read, and to read a mask as a frame."""
    whole = source.whole if isinstance(source, PartOfVideo) else source
    if isinstance(whole, FolderVideo):
        frames = {file.resolve() for file in whole.files}
        for path in labels:
            if path.resolve() in frames:
                raise InputError(f"labels {path} lie among the frames of {source.path}: move them elsewhere.")
    for path in (source.path, *labels):
        if out.resolve() == path.resolve() or out.resolve() in path.resolve().parents:
            raise InputError(f"{path} lies in the out folder {out}: write to another folder.")


def _remarks(source: Video, labels: Masks | Points, frames: int) -> Iterator[str]:
    """What a user should know about a video that was not as expected."""
    if source.problem:
        yield source.problem
    if frames == 1:
        yield f"video {source.path} has one frame: its labels were written as given, nothing was propagated."
    late = [str(frame) for frame in sorted(labels.frames) if frame >= frames]
    if late:
        yield f"labels for frame {', '.join(late)} were not used: the video ended after {frames} frames."
