"""Held-out rendered videos as a benchmark: masks, body parts and joints, all three scores; no files."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from tcore.data.rendered import RenderedVideo, render_video
from tcore.errors import InputError
from tcore.evaluation import scores
from tcore.evaluation.benchmarks.benchmark import Benchmark, LabeledClip, Layout, Result, Save, Source
from tcore.evaluation.benchmarks.davis import Davis, describe_objects
from tcore.evaluation.benchmarks.jhmdb import Jhmdb, Joints, describe_joints
from tcore.evaluation.benchmarks.vip import Vip
from tcore.evaluation.edges import labels_to_ids
from tcore.evaluation.encoder import Encoder
from tcore.evaluation.pose import joints_from_grid, joints_to_grid
from tcore.evaluation.propagate import propagate_features
from tcore.evaluation.protocols import RENDERED, Protocol, corrected
from tcore.evaluation.resize import Size, ids_to_grid

HELDOUT_SEED = 31415  # no setting was chosen on these videos
FRAMES = 20
GRID = 16  # patches a side, the same for every patch size


class RenderedClip(NamedTuple):
    """A held-out video by its number."""

    name: str
    number: int
    length: int = FRAMES


class Rendered(Benchmark):
    """Videos that training never sees, of a size that gives every encoder the same grid."""

    name = "rendered"
    score_names = ("J&F", "J", "F", "mIoU", "PCK@0.1", "PCK@0.2")
    options = ("skip_first", "count_lost", "round_border")
    on_disk = False
    unlisted = "rendered, held out"
    old_name = "synthetic"

    @classmethod
    def layout(cls, source: Source) -> Layout:
        """The first `source` held-out videos."""
        count = int(str(source))
        if count < 1:
            raise InputError(f"rendered={source}: need 1 video or more.")
        names = [f"rendered-{index:03d}" for index in range(count)]
        return Layout(names, False, lambda name: RenderedClip(name, int(name.partition("-")[2])))

    @classmethod
    def adapt(cls, chosen: Protocol) -> Protocol:
        """The protocol for a grid of 16 columns, with the chosen corrections."""
        return corrected(RENDERED, chosen)

    def run(self, encoder: Encoder, clip: Any, save: Save | None = None) -> Result:
        """Propagate objects, parts and joints together."""
        video = heldout_video(clip.number, encoder.patch_size)
        found = propagate_video(video, encoder, self.protocol)
        if save:
            for index, (objects, parts) in enumerate(zip(found.objects, found.parts, strict=True)):
                save(f"{clip.name}/objects", f"{index:05d}.png", objects)
                save(f"{clip.name}/parts", f"{index:05d}.png", parts)
            save(clip.name, "joints.npz", found.joints)
        return self.compare(video, found)

    def compare(self, video: RenderedVideo, found: "Propagated") -> Result:
        """The result of one video, given its labels."""
        first = int(self.protocol.skip_first)
        confusion = scores.confusion_matrix(video.parts[first:], found.parts[first:])
        return {
            **describe_objects(scores.davis_scores(video.objects, found.objects)),
            "frames": len(video.frames),
            "input": list(video.frames.shape[1:3]),
            "confusion": confusion.tolist(),
            **describe_joints(true_joints(video), found.joints),
        }

    def total(self, results: Iterable[Result]) -> Result:
        """All scores of the other three benchmarks."""
        results = list(results)
        totals = (kind([], self.protocol, "").total(results) for kind in (Davis, Vip, Jhmdb))
        return {name: value for total in totals for name, value in total.items()}

    def label(self, encoder: Encoder, clip: Any) -> LabeledClip:
        """Predicted and true ids of objects."""
        video = heldout_video(clip.number, encoder.patch_size)
        found = list(propagate_video(video, encoder, self.protocol).objects)
        return LabeledClip(lambda index: video.frames[index], found, list(video.objects))

    def fingerprints(self, clip: Any, patch_size: int) -> tuple[str, str]:
        """Truth and frames follow from the same numbers."""
        numbers = f"rendered {HELDOUT_SEED} {clip.number} {FRAMES} {GRID * patch_size}"
        digest = hashlib.sha256(numbers.encode()).hexdigest()[:16]
        return digest, digest


@dataclass(frozen=True)
class Propagated:
    """The labels of one video, propagated from its first frame."""

    objects: UInt8[np.ndarray, "time height width"]
    parts: UInt8[np.ndarray, "time height width"]
    joints: Joints


def heldout_video(number: int, patch_size: int) -> RenderedVideo:
    """A video of the benchmark."""
    return render_video(HELDOUT_SEED, number, split="heldout", num_frames=FRAMES, size=GRID * patch_size)


def propagate_video(video: RenderedVideo, encoder: Encoder, protocol: Protocol = RENDERED) -> Propagated:
    """Propagate masks, parts and joints of the first frame together, on one set of features."""
    if encoder.copies:
        return copy_first_frame(video)
    size = video.frames.shape[1:3]
    device = next(encoder.parameters()).device
    with torch.autocast(device.type, torch.bfloat16, enabled=protocol.precision == "bf16"):
        found = encoder(torch.from_numpy(video.frames).to(device)).float().cpu()
    grid = (found.shape[2], found.shape[3])
    joints = joints_to_grid(true_joints(video)[:, :, 0], size, grid, protocol.round_border)
    first = [*(_soft(ids, size, grid) for ids in (video.objects, video.parts)), joints]
    labels = torch.stack(list(propagate_features(found, torch.cat(first, dim=2), protocol)))
    objects, parts, joints = labels.split([one.shape[2] for one in first], dim=-1)

    def ids(labels: Tensor) -> np.ndarray:
        pairs = zip(labels, video.frames, strict=True)
        return np.stack([labels_to_ids(soft, frame, size, size, protocol).numpy() for soft, frame in pairs])

    return Propagated(ids(objects), ids(parts), joints_from_grid(joints, size, grid))


def _soft(ids: UInt8[np.ndarray, "time height width"], size: Size, grid: Size) -> Tensor:
    """Soft labels of frame 0 on the grid."""
    first = torch.from_numpy(ids[0])
    return ids_to_grid(first, input_size=size, grid=grid, num_classes=int(ids.max()) + 1)


def copy_first_frame(video: RenderedVideo) -> Propagated:
    """The control that does nothing: every frame has the labels of the first."""
    time = len(video.frames)
    return Propagated(
        objects=np.repeat(video.objects[:1], time, axis=0),
        parts=np.repeat(video.parts[:1], time, axis=0),
        joints=np.repeat(true_joints(video)[:, :, :1], time, axis=2),
    )


def true_joints(video: RenderedVideo) -> Joints:
    """Joints as the scores take them: NaN where one is not visible."""
    position = video.joints[:, :, :2].transpose(2, 1, 0).astype(np.float64)
    return np.where(video.joints[:, :, 2].T > 0, position, np.nan)
