"""Labels carried through a whole video: masks or tracks, an overlay, a confidence per frame."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Integer
from PIL import Image
from torch import Tensor

from tcore.data.images import Frame
from tcore.data.video import FolderVideo, Video, h264_encoder, open_video, video_writer
from tcore.errors import InputError
from tcore.evaluation.encoder import Encoder
from tcore.evaluation.propagate import Precision, Propagator
from tcore.evaluation.protocols import TCORE, Protocol, Size
from tcore.evaluation.run_clip import encode
from tcore.video.labels import Masks, Points, Said, read_labels
from tcore.video.out_folder import check_out, own_folder, write_card
from tcore.video.tracked import TrackedMasks, TrackedPoints, by, open_table

LONG_SIDE = 880
CONFIDENCE = ("frame", "confidence", "share", "given")

Progress = Callable[[int, int | None], None]  # frames done, of how many where that is known


class Propagation(NamedTuple):
    """What was done: frames, their size, the input size, mean confidence, whether there is an overlay."""

    frames: int
    frame_size: Size
    input_size: Size
    confidence: float
    overlay: bool


def propagate_video_file(
    encoder: Encoder,
    video: str | Path,
    labels: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    protocol: Protocol = TCORE,
    long_side: int = LONG_SIDE,
    overlay: bool = True,
    say: Said = lambda line: None,
    progress: Progress = lambda done, total: None,
) -> Propagation:
    """Carry labels through a video file or a folder of images; everything is written under `out`.

    One frame is held at a time, beside the context of the protocol. Labels of further frames replace what
    was carried there, and the propagation starts anew from them. Frames go in at their own size, floored
    to the patch, with the long side at most `long_side`; the protocol's own size is for benchmarks.
    """
    encoder.need_features()
    paths = [Path(labels)] if isinstance(labels, (str, Path)) else [Path(path) for path in labels]
    source, folder = open_video(Path(video)), Path(out)
    inputs = {"video": str(source.path.absolute()), "labels": [str(path.absolute()) for path in paths]}
    _check_files(source, paths, folder)
    check_out(folder, inputs)
    given = read_labels(paths, source.stems, say)
    frames = iter(source)
    first = next(frames)
    size = (first.shape[0], first.shape[1])
    _check_frames(given, source)
    inside = input_size(size, encoder.patch_size, long_side)
    track = _track(given, size, inside, encoder.patch_size, protocol)
    drawn = overlay and _can_draw(say)
    card = inputs | _card(encoder, protocol, size, inside)
    done, total = 0, 0.0
    with own_folder(folder, card):
        say(f"frames of {by(size)} go in at {by(inside)}, a grid of {by(track.grid)}.")
        with ExitStack() as files:
            table = files.enter_context(open_table(folder / "confidence.csv", CONFIDENCE))
            write = track.writer(folder, files)
            overlaid = video_writer(folder / "overlay.mp4", source.rate, size) if drawn else None
            draw = files.enter_context(overlaid) if overlaid is not None else None
            for frame, soft in carry_frames(encoder, chain([first], frames), track, inside, protocol):
                found = track.read(done, soft)
                write(done, source.name(done), found)
                given_here = int(done in given.frames)
                table.writerow((done, f"{found.confidence:.4f}", f"{found.share:.4f}", given_here))
                if draw is not None:
                    draw(track.paint(frame, found))
                done, total = done + 1, total + found.confidence
                progress(done, source.count)
        remarks = list(_remarks(source, given, done))
        for line in remarks:
            say(line)
        write_card(folder, card | {"frames": done, "remarks": remarks, "finished": True})
    return Propagation(done, size, inside, total / done, drawn)


def propagate(
    encoder: Encoder,
    frames: Iterable[Frame],
    first_labels: Integer[np.ndarray, "rows columns"] | Float[np.ndarray, "points 2"],
    *,
    protocol: Protocol = TCORE,
    long_side: int = LONG_SIDE,
) -> Iterator[np.ndarray]:
    """Labels of every frame: ids for a mask of ids, x and y for points (NaN where one is lost).

    Frames may be an array or come one at a time, as many as there are; one is held, beside the context.

    >>> from tcore import FrameStore, load_encoder
    >>> video = FrameStore.rendered(videos=1, frames=4, size=64).read(0, range(4))
    >>> mask = np.zeros((64, 64), dtype=np.uint8)
    >>> mask[16:32, 16:32] = 7
    >>> labels = list(propagate(load_encoder("random:vitti16"), video, mask))
    >>> len(labels), labels[3].shape, set(np.unique(labels[3]).tolist()) <= {0, 7}
    (4, (64, 64), True)
    """
    incoming = iter(frames)
    first = next(incoming, None)
    if first is None:
        raise InputError("no frames: need at least the one that the labels belong to.")
    size = (first.shape[0], first.shape[1])
    inside = input_size(size, encoder.patch_size, long_side)
    given: Masks | Points
    if np.issubdtype(first_labels.dtype, np.integer):
        low, high = int(first_labels.min(initial=0)), int(first_labels.max(initial=0))
        if low < 0 or high > 255:
            raise InputError(f"first labels span {low} to {high}: ids go from 0 to 255.")
        given = Masks({0: first_labels.astype(np.uint8)})
    else:
        names = tuple(map(str, range(len(first_labels))))
        points = ((float(x), float(y)) for x, y in first_labels)
        given = Points(names, {0: dict(zip(names, points, strict=True))})
    track = _track(given, size, inside, encoder.patch_size, protocol)
    labeled = carry_frames(encoder, chain([first], incoming), track, inside, protocol)
    for index, (_, soft) in enumerate(labeled):
        values = track.read(index, soft).values
        yield values if isinstance(given, Masks) else values[:, :2]


def carry_frames(
    encoder: Encoder,
    frames: Iterable[Frame],
    track: TrackedMasks | TrackedPoints,
    size: Size,
    protocol: Protocol,
) -> Iterator[tuple[Frame, Float[Tensor, "rows columns classes"]]]:
    """Frames with their soft labels.

    An annotated frame starts the propagation anew: labels carried up to there are what was corrected, and
    as part of the context they would outvote the correction in the very next frame.
    """
    propagator = protocol.propagator()
    expected: tuple[int, ...] | None = None
    for index, frame in enumerate(frames):
        if expected is not None and frame.shape != expected:
            raise InputError(f"frame {index} is {by(frame.shape[:2])}, the first {by(expected[:2])}.")
        expected = frame.shape
        features = encode_frame(encoder, frame, size, protocol.precision)
        yield frame, label_frame(propagator, track, index, features, first=index == 0)


def label_frame(
    propagator: Propagator,
    track: TrackedMasks | TrackedPoints,
    index: int,
    features: Float[Tensor, "channels rows columns"],
    *,
    first: bool,
) -> Float[Tensor, "rows columns classes"]:
    """Soft labels of the next frame: carried, or those that were given for it, as the first ones are."""
    carried = None if first else propagator.step(features)
    given = track.given(index, carried)
    soft = carried if given is None else given.to(features.device)
    assert soft is not None  # the first frame always has labels
    if given is not None:
        propagator.start(features, soft)
    return soft


def encode_frame(
    encoder: Encoder, frame: Frame, size: Size, precision: Precision = "fp32"
) -> Float[Tensor, "channels rows columns"]:
    """Features of one frame; a frame that shrinks much is smoothed on the way."""
    if frame.shape[0] >= 1.5 * size[0]:
        frame = np.asarray(Image.fromarray(frame).resize((size[1], size[0]), Image.Resampling.BILINEAR))
    return encode(encoder, frame, size, precision)


def input_size(frame: Size, patch_size: int, long_side: int = LONG_SIDE) -> Size:
    """The frame's own size, or smaller so that the long side fits, floored to the patch.

    >>> input_size((480, 854), 16), input_size((1080, 1920), 16), input_size((1080, 1920), 14, 448)
    ((480, 848), (480, 880), (252, 448))
    """
    if long_side < patch_size:
        raise InputError(f"long side is {long_side}; it must be at least one patch, {patch_size} pixels.")
    if min(frame) < patch_size:
        raise InputError(f"frames of {by(frame)} are smaller than one patch of {patch_size} pixels.")
    longest = max(frame)
    height, width = (side if longest <= long_side else side * long_side // longest for side in frame)
    return max(1, height // patch_size) * patch_size, max(1, width // patch_size) * patch_size


def progress_lines(say: Said, every: float = 5.0) -> Progress:
    """Progress as a line every few seconds: frames done, frames per second, seconds left."""
    started = last = time.perf_counter()

    def progress(done: int, total: int | None) -> None:
        nonlocal last
        now = time.perf_counter()
        if now - last >= every:
            last = now
            speed = done / (now - started)
            left = "" if total is None else f"/{total}  ETA {max(0, total - done) / speed:.0f} s"
            say(f"frame {done}{left}  {speed:.1f} frames/s")

    return progress


def _track(
    labels: Masks | Points, size: Size, inside: Size, patch_size: int, protocol: Protocol
) -> TrackedMasks | TrackedPoints:
    if isinstance(labels, Masks):
        return TrackedMasks(labels, size, inside, patch_size, protocol)
    return TrackedPoints(labels, size, inside, patch_size)


def _can_draw(say: Said) -> bool:
    if h264_encoder() is not None:
        return True
    say("no overlay.mp4: PyAV with an H.264 encoder is not there (pip install av).")
    return False


def _check_files(source: Video, labels: Sequence[Path], out: Path) -> None:
    """Refuse to read what would be written over, and to take a mask for a frame."""
    if isinstance(source, FolderVideo):
        frames = {file.resolve() for file in source.files}
        for path in labels:
            if path.resolve() in frames:
                raise InputError(f"labels {path} lie among the frames of {source.path}: move them elsewhere.")
    for path in (source.path, *labels):
        if out.resolve() == path.resolve() or out.resolve() in path.resolve().parents:
            raise InputError(f"{path} lies in the out folder {out}: write to another folder.")


def _check_frames(labels: Masks | Points, source: Video) -> None:
    last = max(labels.frames)
    if source.count is not None and last >= source.count:
        raise InputError(
            f"labels for frame {last}, but {source.path} has {source.count} frames, 0 to {source.count - 1}."
        )


def _remarks(source: Video, labels: Masks | Points, frames: int) -> Iterator[str]:
    """What a user should know of a video that was not as expected."""
    if source.problem:
        yield source.problem
    if frames == 1:
        yield f"video {source.path} has one frame: its labels were written as given, nothing was propagated."
    late = [str(frame) for frame in sorted(labels.frames) if frame >= frames]
    if late:
        yield f"labels for frame {', '.join(late)} were not used: the video ended after {frames} frames."


def _card(encoder: Encoder, protocol: Protocol, size: Size, inside: Size) -> dict[str, Any]:
    return {
        "encoder": encoder.identity(),
        "protocol": {name: value for name, value in dataclasses.asdict(protocol).items() if name != "resize"},
        "frame_size": list(size),
        "input_size": list(inside),
        "finished": False,
    }
