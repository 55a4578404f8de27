"""The k nearest other images of every image: exact search in bounded memory, the file, and its use."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32, Int32, Int64
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from torch import Tensor

from tcore.config import Config
from tcore.data.images import Frame
from tcore.data.source import NEIGHBOR, Sampling, Source
from tcore.data.stores import FrameStore
from tcore.device import ALONE, World
from tcore.errors import InputError
from tcore.files import check_regular, write_bytes

NEIGHBORS = "neighbors.safetensors"
FORMAT = "tcore-neighbors-1"
MADE_WITH = ("encoder", "encoder_fingerprint", "store_fingerprint")
# Features with a larger cosine are of the same picture, saved twice. Not closer to 1: sums of some hundred
# products in fp32 are off by up to 1e-6, and so is the cosine of a feature with itself.
COPY = 1 - 1e-5
# Subtracted from the cosines of copies: below every other image (cosines reach -1), in the same order.
DEMOTED = 4.0
# Columns per group in the search for the largest of a row.
GROUP = 64
BUDGET = 2**28  # bytes of similarities that are held at a time

Progress = Callable[[int], None]  # images done


@dataclass(frozen=True, eq=False)
class Neighbors:
    """Neighbors of every image, the nearest first, and what they were found with."""

    indices: Int32[np.ndarray, "n k"]
    cosines: Float32[np.ndarray, "n k"]
    encoder: str
    encoder_fingerprint: str
    store_fingerprint: str

    @property
    def k(self) -> int:
        """Neighbors of each image."""
        return int(self.indices.shape[1])

    def fingerprint(self) -> str:
        """A short hash of the indices, which changes when the neighbors do."""
        return hashlib.sha256(np.ascontiguousarray(self.indices).tobytes()).hexdigest()[:16]

    def save(self, path: Path) -> None:
        """Write the file atomically."""
        metadata = {name: getattr(self, name) for name in MADE_WITH} | {"format": FORMAT, "k": str(self.k)}
        write_bytes(path, save({"indices": self.indices, "cosines": self.cosines}, metadata))


def load_neighbors(path: Path) -> Neighbors:
    """Read a file that `Neighbors.save` wrote."""
    try:
        check_regular(path)
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise InputError(f"{path} holds no neighbors (format {metadata.get('format')!r}).")
            indices, cosines = file.get_tensor("indices"), file.get_tensor("cosines")
            if indices.ndim != 2 or indices.shape != cosines.shape or indices.dtype != np.int32:
                raise InputError(f"{path} is damaged: indices are {indices.dtype} of shape {indices.shape}.")
            return Neighbors(indices, cosines.astype(np.float32), *(metadata[name] for name in MADE_WITH))
    except (OSError, SafetensorError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"cannot read neighbors from {path}: {error}; run tcore neighbors again.") from error


def beside(folder: str | Path) -> Path:
    """Where the neighbors of a plain folder of images are stored: never inside it."""
    place = Path(folder).absolute()  # the name as it was typed: a link is not followed
    place = place.resolve() if place.name == ".." else place
    return place.with_name(f"{place.name}.{NEIGHBORS}")


def find_neighbors(store: str | Path) -> Path:
    """The neighbors of a store: inside a packed one, beside a folder of images."""
    places = (Path(store) / NEIGHBORS, beside(store))
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise InputError(
            f"no neighbors of {store} (neither {places[0]} nor {places[1]}): run "
            f"tcore neighbors {store} --encoder ENCODER first, or give --neighbors FILE."
        )
    return found


def check_neighbors(neighbors: Neighbors, path: Path, num_images: int, store_fingerprint: str) -> None:
    """Refuse neighbors of other images."""
    if neighbors.store_fingerprint != store_fingerprint:
        raise InputError(
            f"{path} lists neighbors of other images (fingerprint {neighbors.store_fingerprint}, the store "
            f"has {store_fingerprint}): run tcore neighbors on this store, or give another --neighbors."
        )
    indices = neighbors.indices
    if indices.shape[0] != num_images or not indices.size or indices.min() < 0 or indices.max() >= num_images:
        raise InputError(f"{path} is damaged: its indices do not fit {num_images} images; make it again.")


class ImageSource(Source):
    """Images whose past is one of their neighbors, drawn for every step and slot."""

    def __init__(
        self,
        store: FrameStore,
        config: Config,
        sampling: Sampling,
        neighbors: Neighbors,
        share: World = ALONE,
    ) -> None:
        super().__init__(store, config, sampling, share)
        self.neighbors = neighbors

    def fingerprint(self) -> str:
        """A short name for the images and their neighbors."""
        return f"{super().fingerprint()}-{self.neighbors.fingerprint()}"

    def neighbor(self, step: int, slot: int, image: int) -> int:
        """The neighbor that the auxiliary branch sees, each of the k with the same probability."""
        rng = np.random.default_rng((self.config.seed, NEIGHBOR, step, slot))
        choices = self.neighbors.indices[image]
        return int(choices[rng.integers(len(choices))])

    def read_frames(
        self, step: int, slot: int, clip: int, rng: np.random.Generator, needed: Sequence[str]
    ) -> dict[str, Frame]:
        """The image itself as the current frame, and a neighbor for every other one."""
        image = int(self.clips.video[clip])
        videos = {name: image if name == "current" else self.neighbor(step, slot, image) for name in needed}
        return {name: self.store.read(video, [0])[0] for name, video in videos.items()}


class Found(NamedTuple):
    """Neighbors by index, the nearest first; and how many copies each image has."""

    indices: Int64[Tensor, "n k"]
    cosines: Float[Tensor, "n k"]
    copies: Int64[Tensor, "n"]


@torch.no_grad()
def search(
    features: Float[Tensor, "n d"], k: int, *, budget: int = BUDGET, progress: Progress = lambda done: None
) -> Found:
    """The k nearest others by cosine of normalized fp32 features, exactly, on the device that holds them.

    About `budget` bytes of similarities are held at a time: those of a few images with all others. Copies of
    an image (cosine above 1 - 1e-5) come after all others.
    """
    n = len(features)
    check_k(k, n)
    rows = max(1, budget // (4 * n))
    found: list[Found] = []
    # TF32 keeps 10 bits, which would change who is nearest.
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        for first in range(0, n, rows):
            found.append(_search_rows(features, slice(first, min(first + rows, n)), k))
            progress(min(first + rows, n))
    finally:
        torch.set_float32_matmul_precision(before)
    return Found(*(torch.cat(parts) for parts in zip(*found, strict=True)))


def _search_rows(features: Float[Tensor, "n d"], rows: slice, k: int) -> Found:
    """The neighbors of some images; their similarities are freed before the next are computed."""
    block = features[rows] @ features.T
    block[:, rows].diagonal().fill_(-torch.inf)  # no image is its own neighbor
    copies = torch.zeros(len(block), dtype=torch.int64, device=block.device)
    if block.max() > COPY:
        row, column = (block > COPY).nonzero(as_tuple=True)
        block[row, column] -= DEMOTED
        copies += torch.bincount(row, minlength=len(block))
    scores, indices = best_of_rows(block, k)
    return Found(indices, torch.where(scores < -DEMOTED / 2, scores + DEMOTED, scores), copies)


def check_k(k: int, num_images: int) -> None:
    """Refuse more neighbors than there are other images."""
    if not 1 <= k < num_images:
        raise InputError(f"k={k}: need 1 or more, and fewer than the {num_images} images; change --k.")


def best_of_rows(block: Float[Tensor, "r c"], k: int) -> tuple[Tensor, Tensor]:
    """Values and columns of the k largest of every row.

    The k largest lie in the k groups of columns with the largest maxima: one pass over the block finds
    those, and only their members are sorted.
    """
    rows, columns = block.shape
    whole = columns // GROUP * GROUP
    if whole <= k * GROUP:
        found = block.topk(k, dim=1)
        return found.values, found.indices
    groups = block[:, :whole].unflatten(1, (-1, GROUP)).amax(dim=2).topk(k, dim=1).indices
    members = groups[:, :, None] * GROUP + torch.arange(GROUP, device=block.device)
    tail = torch.arange(whole, columns, device=block.device).expand(rows, -1)
    candidates = torch.cat([members.flatten(1), tail], dim=1)
    found = block.gather(1, candidates).topk(k, dim=1)
    return found.values, candidates.gather(1, found.indices)
