"""Labels of a first frame carried through the frames of a clip on disk, one frame at a time."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tcore.data.images import Frame, read_image
from tcore.evaluation.encoder import Encoder
from tcore.evaluation.masks import VOID, Ids
from tcore.evaluation.propagate import Precision
from tcore.evaluation.protocols import Protocol
from tcore.evaluation.resize import grid_to_ids, ids_to_grid, normalize_images, resize_images

Size = tuple[int, int]
THREADS = 4  # enough to read and write beside the fastest GPU
AHEAD = 8  # frames that wait, decoded


def encode(
    encoder: Encoder, frame: Frame, size: Size, precision: Precision = "fp32"
) -> Float[Tensor, "channels rows columns"]:
    """Features of one frame at the input size."""
    device = next(encoder.parameters()).device
    image = torch.from_numpy(frame.copy()).to(device)
    with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"), exact_convolutions():
        return encoder.features(normalize_images(resize_images(image, size))[None])[0].float()


@contextmanager
def exact_convolutions() -> Iterator[None]:
    """What is called fp32 is fp32: CUDA convolutions round to 10 bits unless they are told not to."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def read_ahead(paths: Iterable[Path]) -> Iterator[Frame]:
    """Frames in order, decoded by threads while the others are worked on; few are held at a time."""
    pool = ThreadPoolExecutor(THREADS)
    waiting: deque[Future[Frame]] = deque()
    try:
        for path in paths:
            waiting.append(pool.submit(read_image, path))
            if len(waiting) > AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def write_behind(write: Callable[..., None]) -> Iterator[Callable[..., None]]:
    """Calls that write files, made by threads; all are done at the end, and the first error is raised."""
    waiting: deque[Future[None]] = deque()
    with ThreadPoolExecutor(THREADS) as pool:

        def later(*values: Any) -> None:
            waiting.append(pool.submit(write, *values))
            if len(waiting) > 4 * AHEAD:
                waiting.popleft().result()

        yield later
        while waiting:
            waiting.popleft().result()


def carry(
    encoder: Encoder, frames: Sequence[Path], size: Size, protocol: Protocol, first: Tensor
) -> Iterator[Float[Tensor, "rows columns classes"]]:
    """Soft labels of every frame; each is encoded once, and only the context is held."""
    if encoder.copies:
        yield from repeat(first, len(frames))
        return
    propagator = protocol.propagator()
    for index, frame in enumerate(read_ahead(frames)):
        features = encode(encoder, frame, size, protocol.precision)
        if index == 0:
            first = first.to(features.device)
            propagator.start(features, first)
            yield first
        else:
            yield propagator.step(features)


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
