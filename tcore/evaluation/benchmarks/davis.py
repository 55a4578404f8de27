"""DAVIS 2016 and 2017 (Perazzi et al., CVPR 2016; Pont-Tuset et al., arXiv:1704.00675): masks of objects."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from tcore.data.findings import Findings
from tcore.data.images import read_image
from tcore.errors import InputError
from tcore.evaluation import scores
from tcore.evaluation.benchmarks.benchmark import Clip, MaskBenchmark, Result
from tcore.evaluation.masks import VOID, Ids, read_ids
from tcore.evaluation.protocols import Protocol
from tcore.text import count

OBJECTS = 61  # of DAVIS-2017 val


class Davis(MaskBenchmark):
    """Objects of the first mask, scored by region (J) and boundary (F) on all frames but the ends."""

    name = "davis"
    score_names = ("J&F", "J", "F")
    options = ("size", "binary")
    official_clips = (30, 20)
    official_list = "ImageSets/2017/val.txt names 30 (DAVIS-2017 val; 20 in DAVIS-2016)"
    images = ("JPEGImages/480p", "JPEGImages")
    masks = ("Annotations/480p", "Annotations")
    lists = (
        "ImageSets/2017/val.txt",
        "ImageSets/480p/val.txt",
        "ImageSets/2016/val.txt",
        "ImageSets/val.txt",
    )
    recognized_by = ("JPEGImages", "ImageSets")
    first_mask_is_enough = True

    @classmethod
    def adapt(cls, chosen: Protocol) -> Protocol:
        """Every protocol was published for this benchmark."""
        return chosen

    def read_truth(self, clip: Clip, index: int) -> Ids:
        """The true ids of a frame; frame 0 is checked for what looks like a single object."""
        ids = super().read_truth(clip, index)
        if index == 0 and not self.binary and set(np.unique(ids)) in ({VOID}, {0, VOID}):
            raise InputError(
                f"mask {clip.truth[0]} holds only 0 and 255: this is one object, not unlabeled pixels; "
                "add --binary."
            )
        return ids

    def first_labels(self, clip: Clip) -> tuple[Ids, int]:
        """The first mask of a clip, and its largest id plus one; what cannot be scored is refused."""
        if len(clip.frames) < 3 or len(clip.truth) < 3:
            raise InputError(f"clip {clip.name} has {len(clip.truth)} masks; J and F need at least 3.")
        first = self.read_truth(clip, 0)
        objects = scores.num_objects(first)
        if objects == 0:
            raise InputError(f"clip {clip.name}: the first mask {clip.truth[0]} is all background.")
        return first, objects + 1

    def is_scored(self, clip: Clip, index: int) -> bool:
        """All frames but the first and the last."""
        return 0 < index < len(clip.frames) - 1

    def score_clip(self, clip: Clip, found: Iterable[Ids]) -> Result:
        """J and F of every object."""
        return describe_objects(scores.object_scores(self.pairs(clip, found), self.first_labels(clip)[1] - 1))

    def total(self, results: Iterable[Result]) -> Result:
        """J, F and J&F: means over all objects of all sequences."""
        objects = [one for s in results for one in s.get("objects", {"1": s}).values()]
        j, f = (float(np.mean([one[name]["mean"] for one in objects])) for name in ("J", "F"))
        return {"J&F": (j + f) / 2, "J": j, "F": f}

    def describe(self, results: dict[str, Result]) -> Result:
        """The result of every clip."""
        return results

    def check(self) -> None:
        """Refuse clips that cannot be scored, as far as their ends show it."""
        for clip in self.clips:
            self.first_labels(clip)
            for frame in (clip.frames[0], clip.frames[-1]):
                read_image(frame)

    @classmethod
    def report(cls, findings: Findings, root: Path, clips: Sequence[Any]) -> None:
        """Count the objects of the first masks; ids of 0 and 255 alone are a truth of one object."""
        first = [set(np.unique(read_ids(clip.truth[0])).tolist()) for clip in clips]
        binary = sum(VOID in ids and ids <= {0, VOID} for ids in first)
        objects = binary + sum(max(ids - {VOID}, default=0) for ids in first)
        findings.say("objects", f"{objects:,} in the first masks", objects=objects, binary=binary)
        if binary:
            findings.add(
                "advice",
                f"masks of {count(binary, 'clip')} hold only 0 and 255, as DAVIS-2016: use --binary.",
            )
        if first_only := sum(len(clip.truth) == 1 for clip in clips):
            findings.add(
                "warning",
                f"{first_only:,} of {len(clips):,} clips have no masks beyond the first frame, as in the "
                "test sets: labels can be propagated through them, but not scored; use val.",
            )
        elif not binary and len(clips) == cls.official_clips[0] and objects != OBJECTS:
            findings.add("warning", f"{objects} objects, but DAVIS-2017 val has {OBJECTS}: other masks?")


def describe_objects(objects: list[Float[np.ndarray, "2 frames"]]) -> Result:
    """Means over the objects of a sequence, and each object where there are several."""
    each = [dict(zip(("J", "F"), map(scores.object_statistics, one), strict=True)) for one in objects]
    described: Result = {"frames": objects[0].shape[1]}
    for name in ("J", "F"):
        described[name] = {part: float(np.mean([one[name][part] for one in each])) for part in each[0][name]}
    if len(each) > 1:
        described["objects"] = {str(number): one for number, one in enumerate(each, start=1)}
    return described
