"""Every reader of files from outside, with a small valid file for each."""

from pathlib import Path

from tests.readers.data import label_readers, prepare_readers, store_readers, video_readers
from tests.readers.reader import Reader
from tests.readers.runs import lab_readers, run_readers, weight_readers


def make_readers(root: Path) -> list[Reader]:
    """Valid files under a folder, and their readers."""
    folders = (root / name for name in ("store", "labels", "weights", "videos", "unfinished", "run", "lab"))
    labels, weights, videos = label_readers, weight_readers, video_readers
    makers = (store_readers, labels, weights, videos, prepare_readers, run_readers, lab_readers)
    return [reader for make, folder in zip(makers, folders, strict=True) for reader in make(folder)]
