"""Propagated labels beside the true ones: a grid of frames with the score of each, or a video."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image, ImageDraw

from tcore.data.images import Frame
from tcore.data.rendered import RenderedVideo
from tcore.data.rendered_scene import LIMBS
from tcore.data.video import h264_encoder, open_video, video_writer
from tcore.errors import InputError
from tcore.evaluation.benchmarks.benchmark import Benchmark, Kind
from tcore.evaluation.benchmarks.rendered import Propagated, propagate_video, true_joints
from tcore.evaluation.encoder import Encoder
from tcore.evaluation.masks import Ids, read_ids
from tcore.evaluation.protocols import RENDERED, TCORE, Protocol
from tcore.evaluation.scores import BOX_SHARE
from tcore.show.clips import rendered_clip, rendered_name
from tcore.show.plotting import check_out, drawing, show_picture
from tcore.text import did_you_mean
from tcore.video.propagate_video import propagate
from tcore.video.tracked import paint_ids

Joints = Float[np.ndarray, "2 joints time"]
SCORES: dict[Kind, str] = {"objects": "J", "parts": "IoU", "joints": "in place"}
MEANINGS: dict[Kind, str] = {
    "objects": "J: mean IoU of the objects",
    "parts": "IoU: mean over the parts",
    "joints": "in place: share of the joints that PCK@.2 counts as right",
}
SHORTEST = 256  # a drawn frame is enlarged to this side, so that skeletons are fine lines
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


def label_rendered(
    encoder: Encoder, source: str, protocol: Protocol = RENDERED
) -> dict[Kind, PropagatedClip]:
    """Objects, parts and joints of a held-out rendered video, propagated by an encoder."""
    video = rendered_clip(source, encoder.patch_size)
    found = propagate_video(video, encoder, protocol)
    return compare_rendered(video, found, rendered_name(source))


def compare_rendered(video: RenderedVideo, found: Propagated, name: str) -> dict[Kind, PropagatedClip]:
    """Propagated and true labels of a rendered video, by kind."""

    def one(kind: Kind, labels: Any, truth: Any) -> PropagatedClip:
        return PropagatedClip(name, kind, len(video.frames), lambda index: video.frames[index], labels, truth)

    return {
        "objects": one("objects", list(found.objects), list(video.objects)),
        "parts": one("parts", list(found.parts), list(video.parts)),
        "joints": one("joints", found.joints, true_joints(video)),
    }


def label_clip(encoder: Encoder, benchmark: Benchmark, name: str = "") -> PropagatedClip:
    """A clip of a benchmark, the first one if none is named, propagated as it is for the score."""
    names = [clip.name for clip in benchmark.clips]
    if name and name not in names:
        raise InputError(f"no clip {name!r} in {benchmark.name}.{did_you_mean(name, names)}")
    clip = benchmark.clips[names.index(name) if name else 0]
    read, found, truth = benchmark.label(encoder, clip)
    return PropagatedClip(clip.name, benchmark.kind, clip.length, read, found, truth)


def label_video(
    encoder: Encoder, path: Path, mask: Path, *, protocol: Protocol = TCORE, long_side: int = 880
) -> PropagatedClip:
    """A user's video, propagated from the mask of its first frame; true labels are not known."""
    frames: list[Frame] = []

    def kept() -> Iterator[Frame]:
        for frame in open_video(path):
            frames.append(frame)
            yield frame

    found = list(propagate(encoder, kept(), read_ids(mask), protocol=protocol, long_side=long_side))
    return PropagatedClip(path.name, "objects", len(frames), lambda index: frames[index], found, None)


def score_frames(clip: PropagatedClip) -> Float[np.ndarray, " time"]:
    """The score of each frame: mean IoU of its objects or parts, or the share of joints in place (PCK@.2).

    NaN where there is nothing to compare.
    """
    if clip.truth is None:
        return np.full(clip.length, np.nan)
    if clip.kind == "joints":
        return _score_joints(np.asarray(clip.truth), np.asarray(clip.found))
    scores = np.full(clip.length, np.nan)
    ids = sorted(set(np.unique(clip.truth[0]).tolist()) - {0})
    for index, (truth, found) in enumerate(zip(clip.truth, clip.found, strict=False)):
        pairs = [(truth == number, found == number) for number in ids]
        sizes = [(int((true & guess).sum()), int((true | guess).sum())) for true, guess in pairs]
        # An object that is absent in both is right; such a part does not count.
        values = [both / any_ if any_ else 1.0 for both, any_ in sizes if any_ or clip.kind == "objects"]
        scores[index] = np.mean(values) if values else np.nan
    return scores


def _score_joints(truth: Joints, found: Joints) -> Float[np.ndarray, " time"]:
    known = ~np.isnan(truth).any(axis=0)
    scores = np.full(truth.shape[2], np.nan)
    for index in np.flatnonzero(known.sum(axis=0) >= 2).tolist():
        points = truth[:, known[:, index], index]
        extent = BOX_SHARE * float(np.linalg.norm(np.ptp(points, axis=1)))
        far = np.linalg.norm(points - found[:, known[:, index], index], axis=0)
        scores[index] = float(np.mean(far <= 0.2 * max(extent, 1.0)))  # false where a joint is lost
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
    """Limbs between visible joints: the right side orange, the left side green."""
    image = Image.fromarray((frame * 0.6).astype(np.uint8))
    draw = ImageDraw.Draw(image)
    points = [(float(x + 0.5) * scale, float(y + 0.5) * scale) for x, y in joints.T]
    visible = ~np.isnan(joints).any(axis=0)
    width = max(2, min(frame.shape[:2]) // 80)
    for a, b in LIMBS:
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


def propagation_figure(
    clips: Sequence[PropagatedClip], out: Path, *, columns: int = 6, title: str = ""
) -> None:
    """Draw frames spread over each clip: truth above prediction, with the score of each frame."""
    rows: list[Row] = []
    for clip in clips:
        rows += [] if clip.truth is None else [(f"{clip.kind}, truth", clip, True)]
        rows += [("prediction" if rows else f"{clip.kind}, prediction", clip, False)]
    _draw_rows(rows, out, columns, title)


def comparison_figure(clips: Mapping[str, PropagatedClip], out: Path, *, columns: int = 6) -> None:
    """Draw one clip propagated in several ways: the truth, then a row for each way."""
    truth = ("truth", next(iter(clips.values())), True)
    _draw_rows([truth, *((name, clip, False) for name, clip in clips.items())], out, columns, "")


def _draw_rows(rows: Sequence[Row], out: Path, columns: int, title: str) -> None:
    height, width = rows[0][1].read(0).shape[:2]
    kinds = {clip.kind for _, clip, _ in rows if clip.truth is not None}
    text = "; ".join(MEANINGS[kind] for kind in MEANINGS if kind in kinds)
    text = f"The labels of frame 0 are given. {text}{', in percent.' if text else ''}"
    with drawing(
        out, (1.7 * columns + 0.4, len(rows) * (1.7 * height / width + 0.22) + 0.6), title, text=text
    ) as figure:
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


def propagation_video(clips: Sequence[PropagatedClip], out: Path, *, rate: Fraction = Fraction(8)) -> int:
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
    with video_writer(out, rate, (height, width)) as write:
        for index in range(length):
            write(compose(index))
    return length
