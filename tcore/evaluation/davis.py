"""DAVIS and data laid out like it: clips of frames with masks of object ids."""

from pathlib import Path

from tcore.errors import InputError
from tcore.evaluation.masks import (
    Ids,
    MaskClip,
    as_binary,
    find_mask_clips,
    list_pair,
    need_folder,
    read_ids,
    refuse_binary_look,
)

LISTS = ("ImageSets/2017/val.txt", "ImageSets/480p/val.txt", "ImageSets/2016/val.txt", "ImageSets/val.txt")


def find_clips(root: Path) -> tuple[list[MaskClip], bool]:
    """Clips of a dataset, and whether an official list chose them."""
    images = need_folder(root, ("JPEGImages/480p", "JPEGImages"), "frames")
    masks = need_folder(root, ("Annotations/480p", "Annotations"), "masks")
    return find_mask_clips(root, images, masks, LISTS, find_clip)


def find_clip(name: str, images: Path, masks: Path) -> MaskClip:
    """One clip; an error says what it lacks."""
    frames, labels = list_pair(name, images, masks)
    if not frames or not labels:
        raise InputError(f"clip {name} has {len(frames)} frames and {len(labels)} masks; need both.")
    missing = {p.stem for p in frames} ^ {p.stem for p in labels}
    # Only the first mask is needed to propagate; test sets have no other.
    if missing and len(labels) != 1:
        first = sorted(missing)[0]
        raise InputError(f"clip {name}: {first} has a frame or a mask, but not both ({len(missing)} such).")
    if len(labels) == 1 and labels[0].stem != frames[0].stem:
        raise InputError(
            f"clip {name}: the only mask is {labels[0].name}, but the first frame is {frames[0].name}."
        )
    return MaskClip(name, frames, labels)


def read_truth(clip: MaskClip, index: int, binary: bool) -> Ids:
    """The true ids of a frame; frame 0 is checked for what looks like a single object."""
    ids = read_ids(clip.masks[index])
    if binary:
        return as_binary(ids)
    if index == 0:
        refuse_binary_look(ids, clip.masks[0])
    return ids
