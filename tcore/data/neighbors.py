"""The k nearest other images of every image: exact search in bounded memory, the file, and its use."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
from tcore.data.source import NEIGHBOR, WHOLE, Sampling, Share, Source
from tcore.data.stores import FrameStore
from tcore.errors import InputError
from tcore.files import write_bytes

NEIGHBORS = "neighbors.safetensors"
FORMAT = "tcore-neighbors-1"
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
        metadata = {
            "format": FORMAT,
            "k": str(self.k),
            "encoder": self.encoder,
            "encoder_fingerprint": self.encoder_fingerprint,
            "store_fingerprint": self.store_fingerprint,
        }
        write_bytes(path, save({"indices": self.indices, "cosines": self.cosines}, metadata))


def load_neighbors(path: Path) -> Neighbors:
    """Read a file that `Neighbors.save` wrote."""
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise InputError(f"{path} holds no neighbors (format {metadata.get('format')!r}).")
            indices, cosines = file.get_tensor("indices"), file.get_tensor("cosines")
            names = ("encoder", "encoder_fingerprint", "store_fingerprint")
            if indices.ndim != 2 or indices.shape != cosines.shape or indices.dtype != np.int32:
                raise InputError(f"{path} is damaged: indices are {indices.dtype} of shape {indices.shape}.")
            return Neighbors(indices, cosines.astype(np.float32), *(metadata[name] for name in names))
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
        share: Share = WHOLE,
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
        """The image, and a neighbor for whatever else is needed."""
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
    features: Float[Tensor, "n d"],
    k: int,
    *,
    budget: int = BUDGET,
    progress: Progress = lambda done: None,
) -> Found:
    """The k nearest others by cosine of normalized fp32 features, exactly, on the device that holds them.

    No more than about `budget` bytes of similarities are held at a time, in blocks of rows by columns; the
    best k of the blocks so far are merged with those of the next. Copies of an image (cosine above
    1 - 1e-5) come after all others.
    """
    check_k(k, len(features))
    n = len(features)
    rows, columns = block_size(n, budget)
    places = torch.empty(n, k, dtype=torch.int64, device=features.device)
    cosines = torch.empty(n, k, dtype=torch.float32, device=features.device)
    copies = torch.zeros(n, dtype=torch.int64, device=features.device)
    with exact_products():
        for top in range(0, n, rows):
            mine = slice(top, min(top + rows, n))
            scores = torch.full((mine.stop - top, k), -torch.inf, device=features.device)
            best = places[mine]  # a view: written in place
            for left in range(0, n, columns):
                block = _search_block(features, mine, slice(left, min(left + columns, n)), k)
                both = torch.cat([scores, block.cosines], dim=1)
                scores, order = both.topk(k, dim=1)
                best.copy_(torch.cat([best, block.indices], dim=1).gather(1, order))
                copies[mine] += block.copies
            cosines[mine] = torch.where(scores < -DEMOTED / 2, scores + DEMOTED, scores)
            progress(mine.stop)
    return Found(places, cosines, copies)


def _search_block(features: Float[Tensor, "n d"], mine: slice, theirs: slice, k: int) -> Found:
    """The best of one block; its similarities are freed before those of the next are computed."""
    block = features[mine] @ features[theirs].T
    _leave_out_self(block, mine.start, theirs.start)
    copies = _demote_copies(block)
    scores, columns = best_of_rows(block, k)
    return Found(columns + theirs.start, scores, copies)


def check_k(k: int, num_images: int) -> None:
    """Refuse more neighbors than there are other images."""
    if k < 1:
        raise InputError(f"k={k}: need 1 or more.")
    if num_images <= k:
        others = max(0, num_images - 1)
        raise InputError(f"k={k}, but each of {num_images} images has {others} others: use a smaller --k.")


def block_size(n: int, budget: int) -> tuple[int, int]:
    """Rows and columns of a block of fp32 similarities within a budget of bytes, wider than high."""
    cells = max(GROUP, budget // 4)
    rows = min(n, int(cells**0.5) // 2)
    columns = cells // rows
    return rows, columns - (columns % GROUP if columns > GROUP else 0)


@contextmanager
def exact_products() -> Iterator[None]:
    """Matrix products in full fp32: TF32 keeps 10 bits, which would change who is nearest."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def best_of_rows(block: Float[Tensor, "r c"], k: int) -> tuple[Tensor, Tensor]:
    """Values and columns of the k largest of every row (of all, where there are fewer).

    The k largest lie in the k groups of columns with the largest maxima: one pass over the block finds
    those, and only their members are sorted.
    """
    rows, columns = block.shape
    whole = columns // GROUP * GROUP
    if whole <= k * GROUP:
        found = block.topk(min(k, columns), dim=1)
        return found.values, found.indices
    groups = block[:, :whole].unflatten(1, (-1, GROUP)).amax(dim=2).topk(k, dim=1).indices
    members = groups[:, :, None] * GROUP + torch.arange(GROUP, device=block.device)
    tail = torch.arange(whole, columns, device=block.device).expand(rows, -1)
    candidates = torch.cat([members.flatten(1), tail], dim=1)
    found = block.gather(1, candidates).topk(k, dim=1)
    return found.values, candidates.gather(1, found.indices)


def _leave_out_self(block: Float[Tensor, "r c"], top: int, left: int) -> None:
    """Exclude each image from its own neighbors."""
    first = max(top, left)
    inside = min(top + block.shape[0], left + block.shape[1]) - first
    if inside > 0:
        block[first - top :, first - left :].diagonal()[:inside] = -torch.inf


def _demote_copies(block: Float[Tensor, "r c"]) -> Int64[Tensor, " r"]:
    """Move copies below all other images, in place; returns how many each row has."""
    found = torch.zeros(block.shape[0], dtype=torch.int64, device=block.device)
    having = (block.amax(dim=1) > COPY).nonzero().squeeze(1)
    if len(having):
        rows = block[having]
        copies = rows > COPY
        found[having] = copies.sum(dim=1)
        block[having] = torch.where(copies, rows - DEMOTED, rows)
    return found
