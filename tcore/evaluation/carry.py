"""Labels of a first frame carried through the frames of a clip on disk, one frame at a time."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tcore.data.frames import Frame, read_image
from tcore.evaluation.encoder import Encoder
from tcore.evaluation.masks import VOID, Ids
from tcore.evaluation.protocols import Protocol
from tcore.evaluation.resize import grid_to_ids, ids_to_grid, normalize_images, resize_images

Size = tuple[int, int]


def encode(encoder: Encoder, frame: Frame, size: Size) -> Float[Tensor, "channels rows columns"]:
    """Features of one frame at the input size."""
    device = next(encoder.parameters()).device
    image = torch.from_numpy(frame.copy()).to(device)
    return encoder.features(normalize_images(resize_images(image, size))[None])[0]


def carry(
    encoder: Encoder, frames: Sequence[Path], size: Size, protocol: Protocol, first: Tensor
) -> Iterator[Float[Tensor, "rows columns classes"]]:
    """Soft labels of every frame; each is encoded once, and only the context is held."""
    propagator = protocol.propagator()
    features = encode(encoder, read_image(frames[0]), size)
    first = first.to(features.device)
    propagator.start(features, first)
    yield first
    for path in frames[1:]:
        yield propagator.step(encode(encoder, read_image(path), size))


def carry_ids(
    encoder: Encoder, frames: Sequence[Path], first: Ids, size: Size, protocol: Protocol, num_classes: int
) -> Iterator[Ids]:
    """Ids of every frame at the size of the first mask, the first one through the same path."""
    ids = torch.from_numpy(np.where(first == VOID, 0, first).astype(np.uint8))
    grid = (size[0] // encoder.patch_size, size[1] // encoder.patch_size)
    soft = ids_to_grid(
        ids, input_size=size, grid=grid, num_classes=num_classes, nearest=protocol.labels == "nearest"
    )
    output_size = (first.shape[0], first.shape[1])
    for labels in carry(encoder, frames, size, protocol, soft):
        yield (
            grid_to_ids(labels, input_size=size, output_size=output_size, stretch=protocol.stretch)
            .cpu()
            .numpy()
        )
