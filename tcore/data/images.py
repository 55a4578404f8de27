"""Images as videos of one frame: a folder of them as a store, and a neighbor in the place of the past."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tcore.config import Config
from tcore.data.frames import FolderStore, Frame, FrameStore, NoFramesError, read_image
from tcore.data.neighbors import Neighbors
from tcore.data.samples import NEIGHBOR, WHOLE, Share, Source
from tcore.data.views import CURRENT, PAST
from tcore.errors import InputError


class ImageStore(FrameStore):
    """The images of a folder, at any depth; each is a video of one frame, named by its relative path."""

    def __init__(self, folders: FolderStore) -> None:
        self.root = folders.root
        self.names = [
            name if folder == "." else f"{folder}/{name}"
            for folder, files in zip(folders.names, folders.files, strict=True)
            for name in files
        ]
        self.lengths = np.ones(len(self.names), dtype=np.int64)

    def read(self, video: int, frames: Sequence[int]) -> list[Frame]:
        """Decode the one frame, as often as it is asked for."""
        image = read_image(self.root / self.names[video])
        return [image for _ in frames]


def open_images(path: str | Path) -> FrameStore:
    """A store of single images: a packed one, or any folder of images."""
    if not Path(path).is_dir():
        what = "is a file" if Path(path).exists() else "does not exist"
        raise InputError(f"image store {path} {what}: give a folder of images, at any depth.")
    try:
        store = FrameStore.open(path)
    except NoFramesError as error:
        raise InputError(
            f"no images under {path}: give a folder of JPEG or PNG files, at any depth."
        ) from error
    if isinstance(store, FolderStore):
        return ImageStore(store)
    if not holds_images(store):
        raise InputError(
            f"{path} holds videos of up to {int(store.lengths.max())} frames, not single images: "
            "use --source videos, or pack images with tcore prepare IMAGES STORE --images."
        )
    return store


def holds_images(store: FrameStore) -> bool:
    """Whether every video of a store is a single image."""
    return bool((np.asarray(store.lengths) == 1).all())


class ImageSource(Source):
    """Images whose past is one of their neighbors, drawn for every step and slot."""

    def __init__(self, store: FrameStore, config: Config, neighbors: Neighbors, share: Share = WHOLE) -> None:
        super().__init__(store, config, share)
        self.neighbors = neighbors

    def fingerprint(self) -> str:
        """A short name for the images and their neighbors."""
        return f"{super().fingerprint()}-{self.neighbors.fingerprint()}"

    def neighbor(self, step: int, slot: int, image: int) -> int:
        """The neighbor that the auxiliary branch sees, each of the k with the same probability."""
        rng = np.random.default_rng((self.config.seed, NEIGHBOR, step, slot))
        choices = self.neighbors.indices[image]
        return int(choices[rng.integers(len(choices))])

    def frames(
        self, step: int, slot: int, clip: int, rng: np.random.Generator, masked: bool
    ) -> dict[int, Frame]:
        """The image, and where it has a mask one of its neighbors."""
        image = int(self.clips.video[clip])
        found = {PAST: self.store.read(self.neighbor(step, slot, image), [0])[0]} if masked else {}
        return found | {CURRENT: self.store.read(image, [0])[0]}
