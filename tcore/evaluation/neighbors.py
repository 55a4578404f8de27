"""Nearest neighbors of images by the features of an encoder; an interrupted search can be resumed."""

import os
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Float32, UInt8
from PIL import Image
from torch import Tensor

from tcore.data.images import Frame, ahead
from tcore.data.neighbors import NEIGHBORS, Found, Neighbors, beside, check_k, load_neighbors, search
from tcore.data.render import normalize
from tcore.data.stores import FrameStore, ImageStore, open_images
from tcore.device import num_cores
from tcore.errors import InputError, reason
from tcore.evaluation.encoder import Encoder
from tcore.evaluation.resize import input_size
from tcore.files import check_regular
from tcore.model.vit import Tokens, VisionTransformer
from tcore.text import Progress, Say, silent

BATCH = 64  # images that are encoded together; fixed, so that a resumed search gives the same numbers
GPU_BUDGET = 2**32  # bytes of similarities held at a time on a GPU
MARGIN = 224 / 256  # side of the center crop, as a share of the image's short side


def find_all(
    encoder: Encoder, images: str | Path, *, k: int = 5, out: str | Path | None = None, say: Say = silent
) -> Path:
    """Write the k nearest other images of every image, inside a packed store or beside a folder."""
    store = open_images(images)
    check_k(k, len(store))
    # A packed store is ours to write to; a user's own folder of images is not.
    path = beside(images) if isinstance(store, ImageStore) else Path(images) / NEIGHBORS
    path = path if out is None else Path(out)
    key = (encoder.fingerprint(), store.fingerprint())
    if _is_done(path, key, k):
        say(f"{path} exists already, for this encoder and these images.")
        return path
    work = path.with_name(f"{path.name}.{'-'.join(key)}.features")
    features = encode_all(encoder, store, work, say)
    device = next(encoder.parameters()).device
    budget = {"budget": GPU_BUDGET} if device.type == "cuda" else {}
    searched = Progress("neighbors of images", len(store), say=say)
    found = search(torch.from_numpy(features).to(device), k, progress=searched.update, **budget)
    for line in report(found):
        say(line)
    indices, cosines = found.indices.cpu().numpy().astype(np.int32), found.cosines.cpu().numpy()
    Neighbors(indices, cosines, encoder.name, *key).save(path)
    work.unlink()
    return path


def _is_done(path: Path, key: tuple[str, str], k: int) -> bool:
    """Whether the file exists, made from the same; a file of another kind is not overwritten."""
    try:
        found = load_neighbors(path)
    except InputError as error:
        if isinstance(error.__cause__, OSError):  # it does not exist
            return False
        raise InputError(f"{path} exists and holds no neighbors: give another --out.") from error
    return (found.encoder_fingerprint, found.store_fingerprint, found.k) == (*key, k)


def trained_size(encoder: Encoder) -> int:
    """Side of the images that the encoder was trained on; 224 for foreign models."""
    if isinstance(encoder.backbone, VisionTransformer):
        return encoder.backbone.native_grid * encoder.patch_size
    return input_size((224, 224), encoder.patch_size)[0]


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
    tokens = encoder.backbone(normalize(images.permute(0, 3, 1, 2).float() / 255))
    feature = tokens.frame if isinstance(tokens, Tokens) else tokens.patches.mean(dim=1)
    return F.normalize(feature.float(), dim=1)


def encode_all(
    encoder: Encoder, store: FrameStore, work: Path, say: Say = silent
) -> Float32[np.ndarray, "n d"]:
    """Features of all images, through a work file of theirs that grows batch by batch."""
    device, size, n = next(encoder.parameters()).device, trained_size(encoder), len(store)
    dim = image_features(encoder, torch.zeros(1, size, size, 3, dtype=torch.uint8, device=device)).shape[1]

    def crops(first: int) -> UInt8[Tensor, "b size size 3"]:
        read = (store.read(image, [0])[0] for image in range(first, min(first + BATCH, n)))
        return torch.from_numpy(np.stack([center_crop(image, size) for image in read]))

    try:
        work.parent.mkdir(parents=True, exist_ok=True)
        work.touch()
        check_regular(work)
    except OSError as error:
        raise InputError(
            f"cannot write {work} ({reason(error)}): give --out FILE, and train with --neighbors FILE."
        ) from error
    with work.open("r+b") as file:
        # A batch that was written in part is written again.
        rows = file.seek(0, os.SEEK_END) // (4 * dim)
        done = n if rows >= n else rows // BATCH * BATCH
        file.seek(4 * dim * done)
        if done:
            say(f"resuming after {done} of {n} images.")
        progress = Progress("features of images", n, done, say=say)
        for images in ahead(crops, range(done, n, BATCH), min(16, num_cores())):
            features = image_features(encoder, images.to(device)).cpu().numpy()
            if not np.isfinite(features).all():
                raise InputError(f"encoder {encoder.name} gives features that are not finite.")
            file.write(features.tobytes())
            file.flush()
            os.fsync(file.fileno())
            done += len(features)
            progress.update(done)
    # Not mapped: a file that is cut off while in use would end the process.
    return np.fromfile(work, np.float32, n * dim).reshape(n, dim)


def report(found: Found) -> list[str]:
    """How near the neighbors are, and a warning where they mean little."""
    nearest, furthest = found.cosines[:, 0], found.cosines[:, -1]
    n = len(nearest)
    said = [f"mean cosine of the first neighbor {nearest.mean():.3f}, of the last {furthest.mean():.3f}"]
    if copied := int((found.copies > 0).sum()):
        said.append(f"{copied} of {n} images have copies (cosine above 1 - 1e-5), which are ranked last")
    # Features that do not distinguish images make every image a copy of every other.
    if int((found.copies >= n // 2).sum()) > n // 2:
        said.append("warning: this encoder does not distinguish most images; its neighbors mean nothing.")
    return said
