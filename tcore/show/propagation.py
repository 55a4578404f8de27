"""Propagated labels beside the true ones: frames with their scores, a video, the worst clips of a card."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from PIL import Image, ImageDraw

from tcore.data.images import Frame
from tcore.data.rendered import JOINT_NAMES
from tcore.data.rendered_scene import LIMBS
from tcore.data.video import h264_encoder, open_video, video_writer
from tcore.errors import InputError
from tcore.evaluation.benchmarks import find_benchmark
from tcore.evaluation.benchmarks.benchmark import Benchmark, Kind
from tcore.evaluation.benchmarks.rendered import heldout_video, propagate_video, true_joints
from tcore.evaluation.card import Card, worst
from tcore.evaluation.encoder import Encoder
from tcore.evaluation.masks import Ids, read_ids
from tcore.evaluation.protocols import RENDERED, TCORE, Protocol
from tcore.evaluation.scores import joint_distances
from tcore.show.plotting import COLORS, FAINT, check_out, drawing, show_picture
from tcore.text import Say, did_you_mean, silent
from tcore.video.propagate import propagate
from tcore.video.tracked import paint_ids

Joints = Float[np.ndarray, "2 joints time"]
SCORES: dict[Kind, str] = {"objects": "J", "parts": "IoU", "joints": "in place"}
MEANINGS: dict[Kind, str] = {
    "objects": "J: mean IoU of the objects",
    "parts": "IoU: mean over the parts",
    "joints": "in place: share of the joints that PCK@.2 counts as right",
}
BROKEN = 0.5  # a frame below this is broken
LASTING = 3  # a clip breaks where this many frames in a row, or all that are left, are broken
SHORTEST = 256  # a drawn frame is enlarged to this side, so that skeletons are fine lines
RATE = Fraction(8)  # frames per second of a video
RIGHT, LEFT, MIDDLE = (255, 159, 28), (46, 196, 182), (240, 240, 240)


@dataclass(frozen=True)
class PropagatedClip:
    """A clip with its propagated labels and, if they are known, the true ones; frames are read on demand.

    Ids are one array per frame; joints are x, y in pixels, NaN where one is lost or not visible.
    """

    name: str
    kind: Kind
    length: int
    read: Callable[[int], Frame]
    found: list[Ids] | Joints
    truth: list[Ids] | Joints | None


def label_rendered(encoder: Encoder, number: int, protocol: Protocol = RENDERED) -> list[PropagatedClip]:
    """Objects, parts and joints of a held-out rendered video, propagated by an encoder."""
    video = heldout_video(number, encoder.patch_size)
    found = propagate_video(video, encoder, protocol)
    labels: dict[Kind, tuple[Any, Any]] = {
        "objects": (list(found.objects), list(video.objects)),
        "parts": (list(found.parts), list(video.parts)),
        "joints": (found.joints, true_joints(video)),
    }
    name, length, read = f"rendered-{number:03d}", len(video.frames), video.frames.__getitem__
    return [PropagatedClip(name, kind, length, read, *both) for kind, both in labels.items()]


def label_clip(encoder: Encoder, benchmark: Benchmark, name: str = "") -> PropagatedClip:
    """A clip of a benchmark, the first one if none is named, propagated as it is for the score."""
    names = [clip.name for clip in benchmark.clips]
    if name and name not in names:
        raise InputError(f"no clip {name!r} in {benchmark.name}.{did_you_mean(name, names)}")
    clip = benchmark.clips[names.index(name) if name else 0]
    read, found, truth = benchmark.label(encoder, clip)
    return PropagatedClip(clip.name, benchmark.kind, clip.length, read, found, truth)


def label_video(encoder: Encoder, path: Path, mask: Path, protocol: Protocol = TCORE) -> PropagatedClip:
    """A user's video, propagated from the mask of its first frame; true labels are not known."""
    frames: list[Frame] = []

    def kept() -> Iterator[Frame]:
        for frame in open_video(path):
            frames.append(frame)
            yield frame

    found = [one.labels for one in propagate(encoder, kept(), read_ids(mask), protocol=protocol)]
    return PropagatedClip(path.name, "objects", len(frames), lambda index: frames[index], found, None)


def score_frames(clip: PropagatedClip) -> Float[np.ndarray, " time"]:
    """The score of each frame: mean IoU of its objects or parts, or the share of joints in place (PCK@.2).

    NaN where there is nothing to compare.
    """
    if clip.truth is None:
        return np.full(clip.length, np.nan)
    if clip.kind == "joints":
        far = joint_distances(np.asarray(clip.truth), np.asarray(clip.found), count_lost=True)
        known = ~np.isnan(far)
        share = (far <= 0.2).sum(axis=0) / np.maximum(known.sum(axis=0), 1)
        return np.where(known.sum(axis=0) >= 2, share, np.nan)
    scores = np.full(clip.length, np.nan)
    ids = sorted(set(np.unique(clip.truth[0]).tolist()) - {0})
    for index, (truth, found) in enumerate(zip(clip.truth, clip.found, strict=False)):
        pairs = [(truth == number, found == number) for number in ids]
        sizes = [(int((true & guess).sum()), int((true | guess).sum())) for true, guess in pairs]
        # An object that is absent in both is right; such a part does not count.
        values = [both / any_ if any_ else 1.0 for both, any_ in sizes if any_ or clip.kind == "objects"]
        scores[index] = np.mean(values) if values else np.nan
    return scores


def paint(clip: PropagatedClip, labels: Any, index: int) -> Frame:
    """A frame with ids over it, or with a skeleton."""
    frame = clip.read(index)
    times = max(1, -(-SHORTEST // min(frame.shape[:2])))
    large = Image.fromarray(frame).resize(
        (frame.shape[1] * times, frame.shape[0] * times), Image.Resampling.BICUBIC
    )
    if clip.kind == "joints":
        return draw_skeleton(np.asarray(large), np.asarray(labels)[:, :, index], times)
    ids = labels[index]
    if ids.shape != frame.shape[:2]:
        raise InputError(f"{clip.name}: mask of {ids.shape} over a frame of {frame.shape[:2]}.")
    return paint_ids(np.asarray(large), np.kron(ids, np.ones((times, times), dtype=np.uint8)))


def draw_skeleton(frame: Frame, joints: Float[np.ndarray, "2 joints"], scale: float = 1.0) -> Frame:
    """Limbs between the visible joints of a person, the right side orange, the left side green; or points."""
    image = Image.fromarray((frame * 0.6).astype(np.uint8))
    draw = ImageDraw.Draw(image)
    points = [(float(x + 0.5) * scale, float(y + 0.5) * scale) for x, y in joints.T]
    visible = ~np.isnan(joints).any(axis=0)
    width = max(2, min(frame.shape[:2]) // 80)
    for a, b in LIMBS if len(points) == len(JOINT_NAMES) else ():
        if visible[a] and visible[b]:
            # Joints 3, 5, 7, ... are on the right, 4, 6, 8, ... on the left.
            color = MIDDLE if max(a, b) < 3 else RIGHT if max(a, b) % 2 else LEFT
            draw.line((*points[a], *points[b]), fill=color, width=width)
    for index in np.flatnonzero(visible).tolist():
        x, y = points[index]
        draw.ellipse((x - width, y - width, x + width, y + width), fill="white", outline="black")
    return np.asarray(image)


Row = tuple[str, PropagatedClip, bool]
"""A row of a figure: its name, the clip, and whether it shows the truth or what was propagated."""


def with_truth(clips: Sequence[PropagatedClip]) -> list[Row]:
    """Two rows for each clip, truth above prediction, or one where the truth is not known."""
    rows: list[Row] = []
    for clip in clips:
        rows += [] if clip.truth is None else [(f"{clip.kind}, truth", clip, True)]
        rows += [("prediction" if rows else f"{clip.kind}, prediction", clip, False)]
    return rows


def propagation_figure(rows: Sequence[Row], out: Path, *, columns: int = 6, title: str = "") -> None:
    """Draw frames spread over each clip, with the score of each frame."""
    height, width = rows[0][1].read(0).shape[:2]
    kinds = {clip.kind for _, clip, _ in rows if clip.truth is not None}
    text = "; ".join(MEANINGS[kind] for kind in MEANINGS if kind in kinds)
    text = f"The labels of frame 0 are given. {text}{', in percent.' if text else ''}"
    size = (1.7 * columns + 0.4, len(rows) * (1.7 * height / width + 0.22) + 0.6)
    with drawing(out, size, title, text=text) as figure:
        axes = figure.subplots(len(rows), columns, squeeze=False)
        for places, (name, clip, is_truth) in zip(axes, rows, strict=True):
            scores = score_frames(clip)
            labels = clip.truth if is_truth else clip.found
            shown = np.linspace(0, clip.length - 1, columns).round().astype(int).tolist()
            for place, index in zip(places, shown, strict=True):
                tile = "" if np.isnan(scores[index]) else f"{SCORES[clip.kind]} {100 * scores[index]:.0f}"
                tile = f"frame {index}" if is_truth or clip.truth is None else tile
                tile = f"{name}: {tile}" if place is places[0] else tile
                show_picture(place, paint(clip, labels, index), tile)
                place.title.set_fontsize(8)


def propagation_video(clips: Sequence[PropagatedClip], out: Path) -> int:
    """Write an mp4: truth left, prediction right, a row for each clip; returns the number of frames."""
    check_out(out, (".mp4",))
    if h264_encoder() is None:
        raise InputError(f"{out} needs PyAV with an H.264 encoder: pip install av; or give a .png.")

    def compose(index: int) -> UInt8[np.ndarray, "tall wide 3"]:
        rows = []
        for clip in clips:
            sides = [clip.found] if clip.truth is None else [clip.truth, clip.found]
            rows.append(np.concatenate([paint(clip, labels, index) for labels in sides], axis=1))
        return np.concatenate(rows)

    length, (height, width) = min(clip.length for clip in clips), compose(0).shape[:2]
    with video_writer(out, RATE, (height, width)) as write:
        for index in range(length):
            write(compose(index))
    return length


@dataclass(frozen=True)
class Failure:
    """One of the worst clips of a card."""

    benchmark: str
    score: float
    breaks: int
    """The frame where it breaks, or the worst one if it does not."""
    lasting: bool
    scores: Float[np.ndarray, " time"]
    labels: PropagatedClip


def find_failures(
    card: Card, encoder: Encoder, roots: Mapping[str, Path], *, count: int = 4, say: Say = silent
) -> list[Failure]:
    """Run the worst clips of a card again, with the encoder and the settings that it was made with."""
    own, wanted = encoder.fingerprint(), card["encoder"]["weights"]
    if own != wanted:
        raise InputError(
            f"the card was made with other weights ({wanted}) than {encoder.name} has ({own}): "
            "evaluate again, or give --encoder."
        )
    lacking = [name for name in card["benchmarks"] if find_benchmark(name).on_disk and name not in roots]
    if set(lacking) == set(card["benchmarks"]):
        names = " and ".join(f"--{name} DIR" for name in lacking)
        raise InputError(f"the clips of this card are in its datasets: give {names}.")
    known = {field.name for field in fields(Protocol)}
    found = []
    for benchmark, result in card["benchmarks"].items():
        if benchmark in lacking:
            continue
        protocol = Protocol(**{name: value for name, value in result["protocol"].items() if name in known})
        for clip, score in worst(card, benchmark)[:count]:
            say(f"{benchmark}  {clip}")
            size = tuple(result["clips"][clip].get("input", ())) or None
            source = roots.get(benchmark, len(result["clips"]))
            opened = find_benchmark(benchmark).open(source, protocol, binary=result["binary"], size=size)
            labels = label_clip(encoder, opened, clip)
            scores = score_frames(labels)
            found.append(Failure(benchmark, score, *breaking_frame(scores), scores, labels))
    return found


def breaking_frame(scores: Float[np.ndarray, " time"]) -> tuple[int, bool]:
    """The first frame from which a clip stays broken for a while, or the worst one; and whether it broke.

    >>> breaking_frame(np.array([1.0, np.nan, 0.3, 0.8, 0.4, 0.3, 0.2, 0.6]))
    (4, True)
    >>> breaking_frame(np.array([1.0, 0.9, 0.7, 0.8]))
    (2, False)
    """
    known = np.flatnonzero(~np.isnan(scores))
    if len(known) == 0:
        return 0, False
    broken = scores[known] < BROKEN
    for place, index in enumerate(known.tolist()):
        if index > 0 and broken[place : place + LASTING].all():
            return index, True
    return int(known[np.argmin(scores[known])]), False


def failures_figure(failures: list[Failure], out: Path, *, title: str = "") -> None:
    """Draw a row for each clip: its first frame, truth and prediction where it breaks, its scores."""
    text = f"Breaks: first of {LASTING} frames in a row with a mean below {BROKEN:g}."
    with drawing(out, (9.8, 2.0 * len(failures) + 0.7), title, text=text) as figure:
        axes = figure.subplots(len(failures), 4, squeeze=False, width_ratios=(1, 1, 1, 1.5))
        for row, failure in enumerate(failures):
            labels, at = failure.labels, failure.breaks
            head = (
                f"{labels.name}  {find_benchmark(failure.benchmark).score_names[0]} {100 * failure.score:.1f}"
            )
            show_picture(axes[row, 0], paint(labels, labels.truth, 0), head)
            axes[row, 0].title.set_fontweight("bold")
            word = "breaks at" if failure.lasting else "worst at"
            show_picture(axes[row, 1], paint(labels, labels.truth, at), f"truth, {word} frame {at}")
            show_picture(axes[row, 2], paint(labels, labels.found, at), f"prediction, frame {at}")
            _draw_scores(axes[row, 3], failure, row + 1 == len(failures))


def _draw_scores(axes: Axes, failure: Failure, last: bool) -> None:
    axes.plot(failure.scores, color=COLORS[0], linewidth=1.6)
    axes.axhline(BROKEN, color=FAINT, linewidth=0.8, linestyle=":")
    axes.axvline(failure.breaks, color=COLORS[1], linewidth=1.2)
    axes.set_ylim(0, 1.02)
    axes.set_xlim(0, len(failure.scores) - 1)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    axes.tick_params(labelsize=7.5, length=2.5)
    axes.set_ylabel(SCORES[failure.labels.kind], labelpad=1)
    if last:
        axes.set_xlabel("frame", labelpad=1)
