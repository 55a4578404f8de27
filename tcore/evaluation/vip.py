"""VIP: clips of frames with masks of body parts, 20 classes."""

from pathlib import Path

from tcore.errors import InputError
from tcore.evaluation.masks import MaskClip, find_mask_clips, list_pair, need_folder

NUM_CLASSES = 20
LISTS = ("lists/val_videos.txt",)
LONG_SIDE, MULTIPLE = 880, 64


def find_clips(root: Path) -> tuple[list[MaskClip], bool]:
    """Clips of a dataset, and whether the official list chose them."""
    images = need_folder(root, ("Images",), "frames")
    masks = need_folder(root, ("Annotations/Category_ids",), "masks")
    return find_mask_clips(root, images, masks, LISTS, find_clip)


def find_clip(name: str, images: Path, masks: Path) -> MaskClip:
    """One clip; an error says what it lacks."""
    frames, labels = list_pair(name, images, masks)
    if {p.stem for p in frames} != {p.stem for p in labels} or not frames:
        raise InputError(f"clip {name} has {len(frames)} frames and {len(labels)} masks; need one for each.")
    return MaskClip(name, frames, labels)
