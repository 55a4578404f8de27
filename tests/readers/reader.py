"""A file from outside and the function that reads it, small files, and ways to spoil them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tcore.evaluation.encoder import Encoder
from tcore.model.vit import VisionTransformer

EXTREMES = (0, 1, 127, 128, 255, 256, 32767, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1)


WORDS = (*b'null NaN 1e999 -1 99999999999999999999 " [ { } , ../'.split(), b"\n", b"\0")


SIZES: dict[str, Any] = {
    "dim": 64,
    "depth": 1,
    "num_heads": 1,
    "patch_size": 4,
    "image_size": 8,
    "num_registers": 1,
}


class Reader(NamedTuple):
    """A file that is spoilt, and the function that reads it (or the folder that it lies in)."""

    name: str
    file: Path
    read: Callable[[], object]
    share: float = 1.0
    """Of the inputs; less where reading is slow."""


def spoil(data: bytes, rng: np.random.Generator) -> bytes:
    """Some other bytes: mostly a few changes, now and then nothing but noise."""
    if rng.random() < 0.1:
        return rng.bytes(int(rng.integers(0, 200)))
    spoilt = bytearray(data)
    for _ in range(int(rng.integers(1, 5))):
        at, some = int(rng.integers(0, len(spoilt) + 1)), int(rng.integers(1, 64))
        number, size = int(rng.choice(len(EXTREMES))), int(rng.choice([1, 2, 4, 8]))
        order = "little" if rng.random() < 0.5 else "big"
        stop, other = [
            (at + 1, rng.bytes(1)),
            (len(spoilt), b""),
            (at + some, b""),
            (at, spoilt[at : at + some]),
            (at, rng.bytes(some)),
            (at + size, (EXTREMES[number] % 256**size).to_bytes(size, order)),
            (at + some % 8, WORDS[int(rng.integers(0, len(WORDS)))]),
        ][int(rng.integers(0, 7))]
        spoilt[at:stop] = other
    return bytes(spoilt)


def small_encoder() -> Encoder:
    """An encoder of a few thousand weights."""
    return Encoder(VisionTransformer(**SIZES), "small")
