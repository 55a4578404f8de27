"""Held-out rendered videos as a benchmark: masks, body parts and joints, all three scores."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from tcore.data.rendered import RenderedVideo, render_video
from tcore.evaluation import scores
from tcore.evaluation.pose import grid_to_pixels, joint_label_map, pixels_to_grid, read_out
from tcore.evaluation.propagate import propagate_features
from tcore.evaluation.protocols import RENDERED, Protocol
from tcore.evaluation.resize import grid_to_ids, ids_to_grid

Frames = UInt8[Tensor, "time height width 3"]
HELDOUT_SEED = 31415  # no setting was chosen on these videos
Features = Callable[[Frames], Float[Tensor, "time channels rows columns"]]


@dataclass(frozen=True)
class Propagated:
    """What became of the first frame's labels in one video."""

    objects: UInt8[np.ndarray, "time height width"]
    parts: UInt8[np.ndarray, "time height width"]
    joints: Float[np.ndarray, "2 joints time"]


@dataclass(frozen=True)
class RenderedScores:
    """Scores over held-out videos, as fractions."""

    region: float
    boundary: float
    part_iou: float
    pck: float
    """Share of the joints within .2 of the figure's size."""

    @property
    def region_and_boundary(self) -> float:
        """J&F."""
        return (self.region + self.boundary) / 2


def heldout_videos(
    count: int, *, seed: int = 0, num_frames: int = 20, size: int = 128
) -> list[RenderedVideo]:
    """Videos that training never sees."""
    return [render_video(seed, i, split="heldout", num_frames=num_frames, size=size) for i in range(count)]


def propagate_video(video: RenderedVideo, features: Features, protocol: Protocol = RENDERED) -> Propagated:
    """Carry masks, parts and joints of the first frame through a video, on one set of features."""
    size = video.frames.shape[1:3]
    found = features(torch.from_numpy(video.frames))
    grid = (found.shape[2], found.shape[3])
    objects, parts, joints = first_labels(video, grid, round_border=protocol.round_border)
    channels = [objects.shape[2], parts.shape[2], joints.shape[2]]
    first = torch.cat([objects, parts, joints], dim=2)
    labels = torch.stack(list(propagate_features(found, first, protocol.propagator())))
    object_maps, part_maps, joint_maps = labels.split(channels, dim=-1)
    cells = torch.stack([read_out(maps) for maps in joint_maps], dim=-1).double().numpy()
    return Propagated(
        objects=_ids(object_maps, size),
        parts=_ids(part_maps, size),
        joints=grid_to_pixels(cells, size, grid),
    )


def copy_first_frame(video: RenderedVideo) -> Propagated:
    """The control that does nothing: every frame has the labels of the first."""
    time = len(video.frames)
    joints = true_joints(video)
    return Propagated(
        objects=np.repeat(video.objects[:1], time, axis=0),
        parts=np.repeat(video.parts[:1], time, axis=0),
        joints=np.repeat(joints[:, :, :1], time, axis=2),
    )


def first_labels(
    video: RenderedVideo, grid: tuple[int, int], *, round_border: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Soft labels of frame 0 on the grid: objects, parts, joints."""
    size = video.frames.shape[1:3]

    def soft(ids: np.ndarray) -> Tensor:
        return ids_to_grid(
            torch.from_numpy(ids[0]), input_size=size, grid=grid, num_classes=int(ids.max()) + 1
        )

    points = pixels_to_grid(true_joints(video)[:, :, 0], size, grid)
    joints = torch.from_numpy(joint_label_map(points.T, grid, corrected_border=round_border)).float()
    return soft(video.objects), soft(video.parts), joints


def true_joints(video: RenderedVideo) -> Float[np.ndarray, "2 joints time"]:
    """Joints as the scores take them: x, y in pixels, NaN where one is not visible."""
    position = video.joints[:, :, :2].transpose(2, 1, 0).astype(np.float64)
    return np.where(video.joints[:, :, 2].T > 0, position, np.nan)


def score_videos(videos: list[RenderedVideo], found: list[Propagated]) -> RenderedScores:
    """J and F over all objects, IoU over all parts, PCK over all joints."""
    pairs = list(zip(videos, found, strict=True))
    objects = [one for video, labels in pairs for one in scores.davis_scores(video.objects, labels.objects)]
    confusion = sum(scores.confusion_matrix(video.parts, labels.parts) for video, labels in pairs)
    assert isinstance(confusion, np.ndarray)
    pck = scores.pck([true_joints(video) for video in videos], [labels.joints for labels in found], (0.2,))
    return RenderedScores(
        region=float(np.mean([one.region_statistics.mean for one in objects])),
        boundary=float(np.mean([one.boundary_statistics.mean for one in objects])),
        part_iou=scores.mean_iou(confusion),
        pck=float(pck.pck[0]),
    )


def raw_color(patch_size: int) -> Features:
    """The control that has learned nothing: the pixels of each patch are its features."""

    def features(frames: Frames) -> Float[Tensor, "time channels rows columns"]:
        pixels = frames.permute(0, 3, 1, 2).float() / 255 - 0.5
        return torch.nn.functional.pixel_unshuffle(pixels, patch_size)

    return features


def _ids(maps: Tensor, size: tuple[int, int]) -> np.ndarray:
    return np.stack([grid_to_ids(m, input_size=size, output_size=size).numpy() for m in maps])
