"""Neighbors of images by the features of an encoder; killed and started again, the work goes on."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Float32, UInt8
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tcore.data.images import Frame
from tcore.data.neighbors import (
    NEIGHBORS,
    Found,
    Neighbors,
    beside,
    check_k,
    load_neighbors,
    search,
)
from tcore.data.stores import FrameStore, ImageStore, open_images
from tcore.device import num_cores
from tcore.errors import InputError
from tcore.evaluation.encoder import Encoder
from tcore.evaluation.resize import normalize_images
from tcore.model.vit import Tokens, VisionTransformer
from tcore.text import Progress

BATCH = 64  # images that are encoded together; fixed, so that work that goes on gives the same numbers
GPU_BUDGET = 2**32  # bytes of similarities held at a time on a GPU
MARGIN = 224 / 256  # side of the center crop, as a share of the image's short side

Said = Callable[[str], None]


class Key(NamedTuple):
    """What features are of, by fingerprints."""

    encoder: str
    store: str


def find_all(
    encoder: Encoder,
    images: str | Path,
    *,
    k: int = 5,
    out: str | Path | None = None,
    say: Said = lambda line: None,
    workers: int | None = None,
) -> Path:
    """Write the k nearest other images of every image, inside a packed store or beside a folder."""
    store = open_images(images)
    check_k(k, len(store))
    path = Path(out) if out is not None else default_place(store, images)
    key = Key(encoder.fingerprint(), store.fingerprint())
    if _is_done(path, key, k):
        say(f"{path} is there already, of this encoder and these images.")
        return path
    work = path.with_name(f"{path.name}.{key.encoder}-{key.store}.work")
    features = encode_all(encoder, store, work, key, say, workers)
    device = next(encoder.parameters()).device
    budget = {"budget": GPU_BUDGET} if device.type == "cuda" else {}
    searched = Progress("neighbors of images", len(store), say=say)
    found = search(torch.tensor(features).to(device), k, progress=searched.update, **budget)
    for line in report(found):
        say(line)
    neighbors = Neighbors(
        found.indices.cpu().numpy().astype(np.int32),
        found.cosines.cpu().numpy(),
        encoder.name,
        key.encoder,
        key.store,
    )
    neighbors.save(path)
    work.unlink()
    return path


def default_place(store: FrameStore, path: str | Path) -> Path:
    """Inside a packed store, which is ours to write to; beside a user's own folder of images."""
    return beside(path) if isinstance(store, ImageStore) else Path(path) / NEIGHBORS


def _is_done(path: Path, key: Key, k: int) -> bool:
    """Whether the file is there, made of the same; what is no file of neighbors is not written over."""
    try:
        found = load_neighbors(path)
    except InputError as error:
        if isinstance(error.__cause__, OSError):  # not there
            return False
        raise InputError(f"{path} is there and holds no neighbors: give another --out.") from error
    return (found.encoder_fingerprint, found.store_fingerprint, found.k) == (*key, k)


def input_size(encoder: Encoder) -> int:
    """Side of the images that go in: the one the encoder was trained at; 224 for foreign models."""
    if isinstance(encoder.backbone, VisionTransformer):
        return encoder.backbone.native_grid * encoder.patch_size
    return max(1, 224 // encoder.patch_size) * encoder.patch_size


def center_crop(image: Frame, size: int) -> UInt8[np.ndarray, "size size 3"]:
    """The middle of an image, bicubic with antialias: 224 out of a short side of 256, or in proportion."""
    height, width = image.shape[:2]
    side = min(height, width) * MARGIN
    left, top = (width - side) / 2, (height - side) / 2
    box = (left, top, left + side, top + side)
    return np.asarray(Image.fromarray(image).resize((size, size), Image.Resampling.BICUBIC, box=box))


@torch.no_grad()
def image_features(encoder: Encoder, images: UInt8[Tensor, "b size size 3"]) -> Float[Tensor, "b d"]:
    """The normalized class token after the final norm; of foreign models the mean of the patch tokens."""
    tokens = encoder.backbone(normalize_images(images.permute(0, 3, 1, 2).float() / 255))
    feature = tokens.frame if isinstance(tokens, Tokens) else tokens.patches.mean(dim=1)
    return F.normalize(feature.float(), dim=1)


class Crops(Dataset[UInt8[Tensor, "b size size 3"] | InputError]):
    """Batch i of a store's images, ready to go in; bad input is carried out of the process as a value."""

    def __init__(self, store: FrameStore, size: int) -> None:
        self.store, self.size = store, size

    def __getitem__(self, batch: int) -> UInt8[Tensor, "b size size 3"] | InputError:
        first, last = batch * BATCH, min((batch + 1) * BATCH, len(self.store))
        try:
            images = (self.store.read(image, [0])[0] for image in range(first, last))
            return torch.from_numpy(np.stack([center_crop(image, self.size) for image in images]))
        except InputError as error:
            return error


def encode_all(
    encoder: Encoder,
    store: FrameStore,
    work: Path,
    key: Key,
    say: Said = lambda line: None,
    workers: int | None = None,
) -> Float32[np.ndarray, "n d"]:
    """Features of all images, by way of a work file that is appended to batch by batch."""
    device = next(encoder.parameters()).device
    size = input_size(encoder)
    header = json.dumps([*key, len(store), BATCH]).encode() + b"\n"
    dim = image_features(encoder, torch.zeros(1, size, size, 3, dtype=torch.uint8, device=device)).shape[1]
    done = _finished_batches(work, header, 4 * dim, len(store))
    if done:
        say(f"going on after {min(done * BATCH, len(store))} of {len(store)} images.")
    progress = Progress("features of images", len(store), done * BATCH, say=say)
    with _open_work(work, "r+b" if done else "wb") as file:
        file.write(header)
        file.seek(len(header) + 4 * dim * min(done * BATCH, len(store)))
        for crops in _read_ahead(Crops(store, size), done, -(-len(store) // BATCH), workers):
            features = image_features(encoder, crops.to(device)).cpu().numpy()
            if not np.isfinite(features).all():
                raise InputError(f"encoder {encoder.name} gives features that are not finite.")
            file.write(features.tobytes())
            file.flush()
            os.fsync(file.fileno())
            done += 1
            progress.update(min(done * BATCH, len(store)))
    return np.memmap(work, np.float32, "r", offset=len(header), shape=(len(store), dim))


def _open_work(work: Path, mode: str) -> BinaryIO:
    """The work file; where it cannot be, neither can the result."""
    try:
        work.parent.mkdir(parents=True, exist_ok=True)
        return cast(BinaryIO, work.open(mode))
    except OSError as error:
        raise InputError(
            f"cannot write {work} ({error.strerror}): give --out FILE in a place that can be written, "
            "and train with --neighbors FILE."
        ) from error


def _finished_batches(work: Path, header: bytes, row_bytes: int, num_images: int) -> int:
    """Whole batches in the work file of a run that was stopped; 0 where it is of other work."""
    try:
        with work.open("rb") as file:
            if file.read(len(header)) != header:
                return 0
    except OSError:  # there is none
        return 0
    rows = (work.stat().st_size - len(header)) // row_bytes
    return -(-num_images // BATCH) if rows >= num_images else rows // BATCH


def _read_ahead(crops: Crops, first: int, last: int, workers: int | None) -> Iterator[Tensor]:
    """Batches in order, read by worker processes."""
    workers = min(16, num_cores(), last - first) if workers is None else workers
    loader = DataLoader(crops, batch_size=None, sampler=range(first, last), num_workers=workers)
    for batch in loader:
        if isinstance(batch, InputError):
            raise batch
        yield batch


def report(found: Found) -> list[str]:
    """How near the neighbors are, and what of them is not as it seems."""
    nearest, furthest = found.cosines[:, 0], found.cosines[:, -1]
    n = len(nearest)
    said = [
        f"cosine of the first neighbor {nearest.mean():.3f} on average, of the last {furthest.mean():.3f}"
    ]
    copied = int((found.copies > 0).sum())
    if copied:
        said.append(
            f"{copied} of {n} images have copies (cosine above 1 - 1e-5): offered only after all others"
        )
    # Features that tell nothing apart make every image a copy of every other.
    if int((found.copies >= n // 2).sum()) > n // 2:
        said.append("warning: this encoder tells most images not apart; its neighbors mean nothing.")
    return said
