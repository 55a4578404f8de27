"""Masks and frames of a benchmark on disk: found by their layout, read one at a time."""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from tcore.data.images import BAD_IMAGE, image_problem, open_image
from tcore.data.stores import list_images
from tcore.errors import InputError
from tcore.files import read_text

Ids = UInt8[np.ndarray, "height width"]
VOID = 255


@dataclass(frozen=True)
class MaskClip:
    """One video of a mask benchmark: its frames, and the masks that belong to them."""

    name: str
    frames: tuple[Path, ...]
    masks: tuple[Path, ...]

    @property
    def length(self) -> int:
        """Number of frames."""
        return len(self.frames)


def read_ids(path: Path) -> Ids:
    """Ids of a mask: indices of a palette image, values of a gray one."""
    try:
        with open_image(path) as image:
            if image.mode not in ("P", "L", "1"):
                raise InputError(
                    f"mask {path} is a {image.mode} image: need ids as a palette or 8-bit gray PNG."
                )
            return np.asarray(image).astype(np.uint8)
    except BAD_IMAGE as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"cannot read mask {path}: {image_problem(error, path)}.") from error


def as_binary(ids: Ids) -> Ids:
    """One object: everything above 0, 255 included."""
    return (ids > 0).astype(np.uint8)


def refuse_binary_look(ids: Ids, path: Path) -> None:
    """Refuse a truth of 0 and 255 alone, which is one object and not a background with a void."""
    found = set(np.unique(ids).tolist())
    if VOID in found and found <= {0, VOID}:
        raise InputError(f"mask {path} holds only 0 and 255: this is one object; add --binary.")


def encode_ids(ids: Ids) -> bytes:
    """Ids as an indexed PNG with the palette of the benchmarks."""
    image, file = Image.fromarray(ids), io.BytesIO()
    image.putpalette(davis_palette())
    image.save(file, format="PNG")
    return file.getvalue()


def davis_palette() -> list[int]:
    """The palette of the benchmark's masks: the bits of an id spread over red, green and blue."""
    colors = np.zeros((256, 3), dtype=np.uint8)
    ids = np.arange(256)
    for bit in range(8):
        for channel in range(3):
            colors[:, channel] |= (((ids >> (3 * bit + channel)) & 1) << (7 - bit)).astype(np.uint8)
    return colors.ravel().tolist()


def need_folder(root: Path, candidates: Sequence[str], what: str) -> Path:
    """The first of some folders that is there; an error says which were tried and what was found instead."""
    if not root.is_dir():
        state = "is a file" if root.exists() else "does not exist"
        raise InputError(f"dataset {root} {state}: give the folder that holds {candidates[0]}.")
    for candidate in candidates:
        if (root / candidate).is_dir():
            return root / candidate
    found = ", ".join(sorted(f"{p.name}/" if p.is_dir() else p.name for p in root.iterdir())[:8]) or "nothing"
    raise InputError(f"no {what} under {root / candidates[0]}; found {found}.")


def read_list(path: Path) -> list[str]:
    """Lines of an official list; a name that leads out of the dataset is refused."""
    try:
        lines = read_text(path).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}.") from error
    for line in lines:
        if ".." in Path(line.strip()).parts or Path(line.strip()).is_absolute() or "\0" in line:
            raise InputError(f"{path} names {line.strip()!r}, which leads out of the dataset.")
    return lines


def chosen_names(root: Path, lists: Sequence[str], frames: Path) -> tuple[list[str], bool]:
    """Clips that the official list names, or all that are there; and whether there was a list."""
    for name in lists:
        if (root / name).is_file():
            return [line.strip() for line in read_list(root / name) if line.strip()], True
    return sorted(p.name for p in frames.iterdir() if p.is_dir() and p.name[0] != "."), False


def find_mask_clips(
    root: Path,
    images: Path,
    masks: Path,
    lists: Sequence[str],
    find_clip: Callable[[str, Path, Path], MaskClip],
) -> tuple[list[MaskClip], bool]:
    """Clips of a dataset, and whether an official list chose them."""
    names, listed = chosen_names(root, lists, images)
    if not names:
        raise InputError(f"no clips under {images}: need a folder of frames for each.")
    return [find_clip(name, images, masks) for name in names], listed


def list_pair(name: str, images: Path, masks: Path) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """Frames and masks of one clip; an error says which folder is not there."""
    for folder, what in ((images / name, "frames"), (masks / name, "masks")):
        if not folder.is_dir():
            raise InputError(f"clip {name} has no {what}: {folder} does not exist.")
    return list_images(images / name), list_images(masks / name)
