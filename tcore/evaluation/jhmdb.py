"""JHMDB: clips of frames with 15 joints."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float

from tcore.data.stores import list_images
from tcore.errors import InputError
from tcore.evaluation.masks import need_folder, read_list
from tcore.evaluation.matfile import read_mat
from tcore.evaluation.pose import annotated_pixels

INPUT_SIZE = (320, 320)
NUM_JOINTS = 15


@dataclass(frozen=True)
class JointClip:
    """One video of the pose benchmark."""

    name: str
    frames: tuple[Path, ...]
    annotation: Path

    @property
    def length(self) -> int:
        """Number of frames."""
        return len(self.frames)


def find_clips(root: Path) -> tuple[list[JointClip], bool]:
    """Test clips of split 1, or all clips where there are no splits; and whether there were."""
    images = need_folder(root, ("Rename_Images",), "frames")
    joints = need_folder(root, ("joint_positions",), "joints")
    names, listed = chosen_clips(root, images)
    if not names:
        raise InputError(f"no clips under {images}: need folders ACTION/CLIP of frames.")
    return [find_clip(action, name, images, joints) for action, name in names], listed


def chosen_clips(root: Path, images: Path) -> tuple[list[tuple[str, str]], bool]:
    """Actions and names of the test clips of split 1, or of all; and whether there were splits."""
    splits = root / "splits"
    listed = splits.is_dir() and any(splits.glob("*_test_split1.txt"))
    return (_listed(splits) if listed else _all(images)), listed


def find_clip(action: str, name: str, images: Path, joints: Path) -> JointClip:
    """One clip; an error says what it lacks."""
    annotation = joints / action / name / "joint_positions.mat"
    if not (images / action / name).is_dir():
        raise InputError(f"clip {action}/{name} has no frames: {images / action / name} does not exist.")
    if not annotation.is_file():
        raise InputError(f"clip {action}/{name} has no joints: {annotation} does not exist.")
    return JointClip(f"{action}/{name}", list_images(images / action / name), annotation)


def _listed(splits: Path) -> list[tuple[str, str]]:
    """Lines `<clip>.avi 2` of each action's list are the test clips."""
    found = []
    for path in sorted(splits.glob("*_test_split1.txt")):
        action = path.name.removesuffix("_test_split1.txt")
        for line in read_list(path):
            name, _, part = line.strip().rpartition(" ")
            if part == "2":
                found.append((action, name.strip().removesuffix(".avi")))
    return found


def _all(images: Path) -> list[tuple[str, str]]:
    folders = sorted(p for p in images.glob("*/*") if p.is_dir() and p.name[0] != ".")
    return [(p.parent.name, p.name) for p in folders]


def read_truth(clip: JointClip) -> Float[np.ndarray, "2 joints frames"]:
    """True joints in 0-based pixels (x, y), NaN where one is lost."""
    arrays = read_mat(clip.annotation)
    positions = arrays.get("pos_img")
    if positions is None or positions.ndim != 3 or positions.shape[:2] != (2, NUM_JOINTS):
        shape = None if positions is None else positions.shape
        raise InputError(f"{clip.annotation}: pos_img is {shape}, need (2, {NUM_JOINTS}, frames).")
    if positions.shape[2] != len(clip.frames):
        raise InputError(
            f"clip {clip.name} has {len(clip.frames)} frames, but joints of {positions.shape[2]}."
        )
    return annotated_pixels(positions)
