"""What the three benchmarks have in common, and what each one computes for a clip and for all clips."""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tcore.data.images import BAD_IMAGE, open_image, read_image
from tcore.errors import InputError
from tcore.evaluation import davis, jhmdb, scores, vip
from tcore.evaluation.encoder import Encoder
from tcore.evaluation.masks import VOID, Ids, MaskClip, read_ids
from tcore.evaluation.pose import grid_to_pixels, joint_label_map, pixels_to_grid, read_out
from tcore.evaluation.protocols import Protocol, Size
from tcore.evaluation.resize import input_size
from tcore.evaluation.run_clip import read_ahead, run_clip, run_masks
from tcore.evaluation.score import (
    PCK_THRESHOLDS,
    describe_confusion,
    describe_objects,
    describe_pose,
    plain,
    summarize_davis,
)

Save = Callable[[str, str, Any], None]  # clip, file name, ids or joints
Clip = MaskClip | jhmdb.JointClip


@dataclass(frozen=True)
class Benchmark:
    """Clips of a dataset, what to compute for one, and how to sum up over some."""

    name: str
    root: Path
    clips: list[Clip]
    listed: bool
    protocol: Protocol
    binary: bool = False
    fixed_size: Size | None = None
    """Another input size than the protocol's, to save time; not comparable."""
    thinned: bool = False
    """Some of the clips only, to save time."""

    @property
    def clips_from(self) -> str:
        """Who chose the clips."""
        chosen = "the official list" if self.listed else "all clips found"
        return f"some of {chosen}" if self.thinned else chosen

    def run(self, encoder: Encoder, clip: Clip, save: Save | None) -> dict[str, Any]:
        """The result of one clip as plain numbers."""
        if isinstance(clip, jhmdb.JointClip):
            return self._run_joints(encoder, clip, save)
        return (
            self._run_parts(encoder, clip, save)
            if self.name == "vip"
            else self._run_objects(encoder, clip, save)
        )

    def summarize(self, results: Iterable[dict[str, Any]]) -> dict[str, float]:
        """The scores of some clips together, as fractions."""
        results = list(results)
        if self.name == "davis":
            total = summarize_davis({str(i): result for i, result in enumerate(results)})
            return {name: total[name] for name in ("J&F", "J", "F")}
        if self.name == "vip":
            confusion = np.sum([result["confusion"] for result in results], axis=0)
            return {"mIoU": describe_confusion(confusion)["mIoU"]}
        truth, found = (
            [np.array(result[name], dtype=np.float64) for result in results] for name in ("truth", "joints")
        )
        pck = scores.pck(truth, found, PCK_THRESHOLDS, count_lost=self.protocol.count_lost)
        described = describe_pose(pck)
        return {name: described[name] for name in described if name.startswith("PCK")}

    def input_size(self, encoder: Encoder, frame: Size) -> Size:
        """The size at which frames of a clip go in."""
        patch_size = encoder.patch_size
        if self.fixed_size is not None:
            return input_size(self.fixed_size, patch_size)
        if self.name == "vip":
            return input_size(frame, patch_size, long=vip.LONG_SIDE, multiple=vip.MULTIPLE)
        if self.name == "jhmdb":
            return input_size(jhmdb.INPUT_SIZE, patch_size)
        return self.protocol.input_size(frame, patch_size)

    def fingerprints(self, clip: Clip) -> tuple[str, str]:
        """Short names for the truth that a clip is scored against, and for its frames."""
        truth = [clip.annotation] if isinstance(clip, jhmdb.JointClip) else clip.masks
        return fingerprint(truth), fingerprint(clip.frames)

    def check(self) -> None:
        """Refuse clips of objects that cannot be scored, as far as their ends show it."""
        for clip in self.clips:
            assert isinstance(clip, MaskClip)
            self._first_objects(clip)
            for frame in (clip.frames[0], clip.frames[-1]):
                read_image(frame)

    def _first_objects(self, clip: MaskClip) -> tuple[Ids, int]:
        """The first mask of a clip, and how many objects there are."""
        if len(clip.frames) < 3 or len(clip.masks) < 3:
            raise InputError(f"clip {clip.name} has {len(clip.masks)} masks; J and F need at least 3.")
        first = davis.read_truth(clip, 0, self.binary)
        count = int(first[first != VOID].max(initial=0))
        if count == 0:
            raise InputError(f"clip {clip.name}: the first mask {clip.masks[0]} is all background.")
        return first, count

    def _run_objects(self, encoder: Encoder, clip: MaskClip, save: Save | None) -> dict[str, Any]:
        first, count = self._first_objects(clip)
        size = self.input_size(encoder, frame_size(clip.frames[0]))
        values: list[list[tuple[float, float]]] = [[] for _ in range(count)]
        found = run_masks(encoder, clip.frames, first, size, self.protocol, count + 1)
        for index, ids in enumerate(found):
            if save:
                save(clip.name, clip.frames[index].stem + ".png", ids)
            if 0 < index < len(clip.frames) - 1:
                truth = davis.read_truth(clip, index, self.binary)
                same_size(truth, ids, clip.masks[index])
                for number, kept in enumerate(values, start=1):
                    pair = truth[None] == number, ids[None] == number
                    kept.append(
                        (
                            float(scores.region_similarity(*pair)[0]),
                            float(scores.boundary_similarity(*pair)[0]),
                        )
                    )
        return describe_objects([scores.object_scores(*np.array(kept).T) for kept in values]) | {
            "input": list(size)
        }

    def _run_parts(self, encoder: Encoder, clip: MaskClip, save: Save | None) -> dict[str, Any]:
        first = read_ids(clip.masks[0])
        size = self.input_size(encoder, frame_size(clip.frames[0]))
        confusion = np.zeros((vip.NUM_CLASSES, vip.NUM_CLASSES), dtype=np.int64)
        found = run_masks(encoder, clip.frames, first, size, self.protocol, vip.NUM_CLASSES)
        for index, ids in enumerate(found):
            if save:
                save(clip.name, clip.frames[index].stem + ".png", ids)
            truth = read_ids(clip.masks[index])
            same_size(truth, ids, clip.masks[index])
            if index > 0 or not self.protocol.skip_first:
                confusion += scores.confusion_matrix(truth, ids)
        return {"frames": len(clip.frames), "confusion": confusion.tolist(), "input": list(size)}

    def _run_joints(self, encoder: Encoder, clip: jhmdb.JointClip, save: Save | None) -> dict[str, Any]:
        truth = jhmdb.read_truth(clip)
        image = frame_size(clip.frames[0])
        size = self.input_size(encoder, image)
        grid = (size[0] // encoder.patch_size, size[1] // encoder.patch_size)
        points = pixels_to_grid(truth[:, :, 0], image, grid)
        stamps = joint_label_map(points.T, grid, corrected_border=self.protocol.round_border)
        first = torch.from_numpy(stamps).float()
        labels = run_clip(encoder, read_ahead(clip.frames), first, size, self.protocol)
        cells = np.stack([read_out(maps.cpu()).double().numpy() for _, maps in labels], axis=2)
        joints = grid_to_pixels(cells, image, grid)
        if save:
            save(clip.name, "joints.npz", joints)
        return {
            "frames": len(clip.frames),
            "truth": plain(truth),
            "joints": plain(joints),
            "input": list(size),
        }


def open_benchmark(
    name: str,
    root: Path,
    protocol: Protocol,
    *,
    binary: bool = False,
    size: Size | None = None,
    most: int | None = None,
) -> Benchmark:
    """A benchmark by its name: its clips are found, nothing is read yet; `most` takes some of them."""
    found: tuple[list[Any], bool] = {"davis": davis, "vip": vip, "jhmdb": jhmdb}[name].find_clips(root)
    if name == "vip":  # mixes labels from 10 keys, as published
        protocol = replace(protocol, topk=10)
    clips = spread(found[0], most)
    return Benchmark(name, root, clips, found[1], protocol, binary, size, len(clips) < len(found[0]))


def spread(clips: list[Any], most: int | None) -> list[Any]:
    """At most so many, evenly spread over all.

    >>> spread(["a", "b", "c", "d", "e"], 3)
    ['a', 'c', 'e']
    """
    if most is None or most >= len(clips):
        return clips
    if most < 1:
        raise InputError(f"clips={most}: need 1 or more.")
    last = len(clips) - 1
    return [clips[round(index * last / max(1, most - 1))] for index in range(most)]


def frame_size(path: Path) -> Size:
    """Height and width of an image, from its header where that can be read."""
    try:
        with open_image(path) as image:
            return image.height, image.width
    except BAD_IMAGE:
        return read_image(path).shape[:2]  # raises the readable error


def same_size(truth: Ids, ids: Ids, path: Path) -> None:
    """A mask of another size than the first one cannot be compared."""
    if truth.shape != ids.shape:
        raise InputError(
            f"mask {path} is {truth.shape[0]}x{truth.shape[1]}, the first one {ids.shape[0]}x{ids.shape[1]}."
        )


def fingerprint(files: Iterable[Path]) -> str:
    """A short name for the bytes of some files."""
    digest = hashlib.sha256()
    for path in files:
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]
