"""Carried labels beside the truth: a grid of frames, or a video."""

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image, ImageDraw

from tcore.data.images import Frame
from tcore.data.rendered_scene import LIMBS
from tcore.data.video import h264_encoder, video_writer
from tcore.errors import InputError
from tcore.show.carried import Carried, score_frames
from tcore.show.plotting import caption, check_out, new_figure, save_figure, show_picture, styled
from tcore.video.overlay import paint_ids

SCORES = {"objects": "J", "parts": "IoU", "joints": "in place"}
SHORTEST = 256  # a drawn frame is enlarged to this side, so that skeletons are fine lines
RIGHT, LEFT, MIDDLE = (255, 159, 28), (46, 196, 182), (240, 240, 240)


def paint(carried: Carried, labels: Any, index: int) -> Frame:
    """A frame with ids over it, or with a skeleton."""
    frame = carried.read(index)
    enlarge = max(1, -(-SHORTEST // min(frame.shape[:2])))
    if carried.kind == "joints":
        return draw_skeleton(_enlarged(frame, enlarge), np.asarray(labels)[:, :, index], enlarge)
    ids = labels[index]
    if ids.shape != frame.shape[:2]:
        raise InputError(f"{carried.name}: mask of {ids.shape} over a frame of {frame.shape[:2]}.")
    return paint_ids(_enlarged(frame, enlarge), np.kron(ids, np.ones((enlarge, enlarge), dtype=np.uint8)))


def _enlarged(frame: Frame, times: int) -> UInt8[np.ndarray, "tall wide 3"]:
    size = frame.shape[1] * times, frame.shape[0] * times
    return np.asarray(Image.fromarray(frame).resize(size, Image.Resampling.BICUBIC))


def draw_skeleton(frame: Frame, joints: Float[np.ndarray, "2 joints"], scale: float = 1.0) -> Frame:
    """Limbs between joints that are there: the right side orange, the left side green."""
    image = Image.fromarray((frame * 0.6).astype(np.uint8))
    draw = ImageDraw.Draw(image)
    points = [(float(x + 0.5) * scale, float(y + 0.5) * scale) for x, y in joints.T]
    there = ~np.isnan(joints).any(axis=0)
    width = max(2, min(frame.shape[:2]) // 80)
    for a, b in LIMBS:
        if there[a] and there[b]:
            # Joints 3, 5, 7, ... are on the right, 4, 6, 8, ... on the left.
            color = MIDDLE if max(a, b) < 3 else RIGHT if max(a, b) % 2 else LEFT
            draw.line((*points[a], *points[b]), fill=color, width=width)
    for index in np.flatnonzero(there).tolist():
        x, y = points[index]
        draw.ellipse((x - width, y - width, x + width, y + width), fill="white", outline="black")
    return np.asarray(image)


@styled
def propagation_figure(clips: Sequence[Carried], out: Path, *, columns: int = 6, title: str = "") -> None:
    """Draw frames spread over each clip: truth above prediction, with the score of the frame."""
    check_out(out)
    rows = [
        (clip, name)
        for clip in clips
        for name in ("truth", "prediction")
        if name == "prediction" or clip.truth is not None
    ]
    height, width = clips[0].read(0).shape[:2]
    figure = new_figure(1.7 * columns + 0.4, len(rows) * (1.7 * height / width + 0.22) + 0.6)
    axes = figure.subplots(len(rows), columns, squeeze=False)
    for row, (clip, name) in enumerate(rows):
        scores = score_frames(clip)
        labels = clip.truth if name == "truth" else clip.found
        for column, index in enumerate(np.linspace(0, clip.length - 1, columns).round().astype(int).tolist()):
            if name == "truth" or clip.truth is None:
                text = f"{clip.kind}, {name}: frame {index}" if column == 0 else f"frame {index}"
            else:
                told = "" if np.isnan(scores[index]) else f"{SCORES[clip.kind]} {100 * scores[index]:.0f}"
                text = f"{name}: {told}" if column == 0 else told
            show_picture(axes[row, column], paint(clip, labels, index), text)
            axes[row, column].title.set_fontsize(8)
    caption(figure, _explain(clips))
    save_figure(figure, out, title)


def _explain(clips: Sequence[Carried]) -> str:
    kinds = {clip.kind for clip in clips if clip.truth is not None}
    said = {
        "objects": "J: mean IoU of the objects",
        "parts": "IoU: mean over the parts",
        "joints": "in place: share of the joints that PCK@.2 counts as right",
    }
    text = "; ".join(said[kind] for kind in said if kind in kinds)
    return f"The labels of frame 0 are given. {text}{', in percent.' if text else ''}"


def propagation_video(clips: Sequence[Carried], out: Path, *, rate: Fraction = Fraction(8)) -> int:
    """Write an mp4: truth left, prediction right, a row for each kind; returns the number of frames."""
    check_out(out, (".mp4",))
    if h264_encoder() is None:
        raise InputError(f"{out} needs PyAV with an H.264 encoder: pip install av; or give a .png.")
    length = min(clip.length for clip in clips)

    def compose(index: int) -> Frame:
        rows = []
        for clip in clips:
            sides = [clip.found] if clip.truth is None else [clip.truth, clip.found]
            pictures = [paint(clip, labels, index) for labels in sides]
            gap = np.full((pictures[0].shape[0], 4, 3), 255, dtype=np.uint8)
            rows.append(np.concatenate([pictures[0], *(x for p in pictures[1:] for x in (gap, p))], axis=1))
        widest = max(row.shape[1] for row in rows)
        return np.concatenate([np.pad(row, ((0, 0), (0, widest - row.shape[1]), (0, 0))) for row in rows])

    first = compose(0)
    with video_writer(out, rate, (first.shape[0], first.shape[1])) as write:
        for index in range(length):
            write(compose(index))
    return length
