"""Held-out rendered videos in the place of a dataset: objects, parts and joints, scored clip by clip."""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from tcore.data.rendered import render_video
from tcore.evaluation import scores
from tcore.evaluation.encoder import Encoder
from tcore.evaluation.protocols import RENDERED, SHARED, Protocol, Size
from tcore.evaluation.rendered import HELDOUT_SEED, copy_first_frame, propagate_video, true_joints
from tcore.evaluation.score import (
    PCK_THRESHOLDS,
    describe_confusion,
    describe_objects,
    describe_pose,
    plain,
    summarize_davis,
)

FRAMES = 20
GRID = 16  # patches a side, the same for every patch size


class RenderedClip(NamedTuple):
    """A held-out video by its number."""

    name: str
    number: int
    length: int = FRAMES


@dataclass(frozen=True)
class RenderedBenchmark:
    """Videos that training never sees; nothing is on disk."""

    clips: list[RenderedClip]
    protocol: Protocol
    side: int
    """Side of a frame, in pixels."""
    name: str = "synthetic"
    binary: bool = False
    fixed_size: Size | None = None
    clips_from: str = "rendered, held out"

    def run(
        self, encoder: Encoder, clip: RenderedClip, save: Callable[[str, str, Any], None] | None
    ) -> dict[str, Any]:
        """The result of one video as plain numbers."""
        video = render_video(HELDOUT_SEED, clip.number, split="heldout", num_frames=FRAMES, size=self.side)
        device = next(encoder.parameters()).device

        def features(
            frames: UInt8[Tensor, "time height width 3"],
        ) -> Float[Tensor, "time channels rows columns"]:
            with torch.autocast(device.type, torch.bfloat16, enabled=self.protocol.precision == "bf16"):
                return encoder(frames.to(device)).float().cpu()

        found = copy_first_frame(video) if encoder.copies else propagate_video(video, features, self.protocol)
        if save:
            for index, (objects, parts) in enumerate(zip(found.objects, found.parts, strict=True)):
                save(f"{clip.name}/objects", f"{index:05d}.png", objects)
                save(f"{clip.name}/parts", f"{index:05d}.png", parts)
            save(clip.name, "joints.npz", found.joints)
        first = int(self.protocol.skip_first)
        confusion = scores.confusion_matrix(video.parts[first:], found.parts[first:])
        return {
            **describe_objects(scores.davis_scores(video.objects, found.objects)),
            "frames": FRAMES,
            "input": [self.side, self.side],
            "confusion": confusion.tolist(),
            "truth": plain(true_joints(video)),
            "joints": plain(found.joints),
        }

    def summarize(self, results: Iterable[dict[str, Any]]) -> dict[str, float]:
        """The scores of some videos together, as fractions."""
        results = list(results)
        objects = summarize_davis({str(i): result for i, result in enumerate(results)})
        confusion = np.sum([result["confusion"] for result in results], axis=0)
        truth, found = (
            [np.array(result[name], dtype=np.float64) for result in results] for name in ("truth", "joints")
        )
        pose = describe_pose(scores.pck(truth, found, PCK_THRESHOLDS, count_lost=self.protocol.count_lost))
        return {
            **{name: objects[name] for name in ("J&F", "J", "F")},
            "mIoU": describe_confusion(confusion)["mIoU"],
            **{name: pose[name] for name in pose if name.startswith("PCK")},
        }

    def fingerprints(self, clip: RenderedClip) -> tuple[str, str]:
        """Short names for the truth and the frames, which follow from the same numbers."""
        numbers = f"rendered {HELDOUT_SEED} {clip.number} {FRAMES} {self.side}"
        digest = hashlib.sha256(numbers.encode()).hexdigest()[:16]
        return digest, digest


def open_rendered(videos: int, patch_size: int, corrections: Protocol) -> RenderedBenchmark:
    """Some held-out videos, of a size that gives every encoder the same grid."""
    knobs = replace(RENDERED, **{name: getattr(corrections, name) for name in SHARED})
    clips = [RenderedClip(f"rendered-{index:03d}", index) for index in range(videos)]
    return RenderedBenchmark(clips, knobs, GRID * patch_size)
