"""VIP (Zhou et al., ACM MM 2018, arXiv:1808.00661): masks of body parts, 20 classes."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from tcore.evaluation import scores
from tcore.evaluation.benchmarks.benchmark import Clip, MaskBenchmark, Result
from tcore.evaluation.masks import Ids
from tcore.evaluation.protocols import Protocol
from tcore.evaluation.resize import Size, input_size


class Vip(MaskBenchmark):
    """Body parts of the first mask, scored by the mean IoU of one confusion matrix of all frames."""

    name = "vip"
    score_names = ("mIoU",)
    kind = "parts"
    options = ("size", "skip_first")
    official_clips = (50,)
    official_list = "lists/val_videos.txt names 50"
    images = ("Images",)
    masks = ("Annotations/Category_ids",)
    lists = ("lists/val_videos.txt",)
    recognized_by = (*masks, *lists)

    @classmethod
    def adapt(cls, chosen: Protocol) -> Protocol:
        """Published scores mix labels from 10 keys here."""
        return replace(super().adapt(chosen), topk=10)

    def own_size(self, frame: Size, patch_size: int) -> Size:
        """Long side 880, the other one floored to a multiple of 64."""
        return self.protocol.finer(input_size(frame, 1, long=880, multiple=64), patch_size)

    def first_labels(self, clip: Clip) -> tuple[Ids, int]:
        """The first mask of a clip, and the number of classes."""
        return self.read_truth(clip, 0), scores.NUM_CLASSES

    def is_scored(self, clip: Clip, index: int) -> bool:
        """All frames; published scores count the first one, whose labels are given."""
        return index > 0 or not self.protocol.skip_first

    def score_clip(self, clip: Clip, found: Iterable[Ids]) -> Result:
        """The confusion matrix of one clip."""
        confusion = np.zeros((scores.NUM_CLASSES, scores.NUM_CLASSES), dtype=np.int64)
        for truth, ids in self.pairs(clip, found):
            confusion += scores.confusion_matrix(truth, ids)
        return {"frames": len(clip.frames), "confusion": confusion.tolist()}

    def total(self, results: Iterable[Result]) -> Result:
        """Mean IoU, and that of every class that occurs."""
        confusion = np.sum([result["confusion"] for result in results], axis=0)
        iou = scores.class_iou(confusion)
        classes = {str(index): float(value) for index, value in enumerate(iou) if not np.isnan(value)}
        return {"mIoU": scores.mean_iou(confusion), "classes": classes}
