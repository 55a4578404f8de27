"""Masks as Label Studio stores them: run lengths of red, green, blue and opacity, packed bit by bit.

The format is that of @thi.ng/rle-pack: 32 bits for the number of values, 5 for their bits less one, four
times 4 for the bits of a length less one; then runs (a one, which of the four, length less one, value) and
stretches without repetition (a zero, which of the four, length less one, values).
"""

from collections.abc import Iterator

import numpy as np
from jaxtyping import Bool

from tcore.errors import InputError
from tcore.evaluation.resize import Size
from tcore.video.formats import run_lengths

SIZES = (3, 4, 8, 16)  # bits of a length
LONGEST = 1 << SIZES[-1]
HEAD = 32 + 5 + 4 * len(SIZES)
CHANNELS = 4

Mask = Bool[np.ndarray, "height width"]


def pack_mask(mask: Mask) -> list[int]:
    """The bytes of a mask; 0 and 255 in all four channels.

    >>> pack_mask(np.array([[False, True]]))
    [0, 0, 0, 8, 57, 27, 252, 96, 17, 255, 128]
    """
    head = f"{CHANNELS * mask.size:032b}{7:05b}" + "".join(f"{size - 1:04b}" for size in SIZES)
    bits = head + "".join(_runs(mask))
    bits += "0" * (-len(bits) % 8)
    return list(int(bits, 2).to_bytes(len(bits) // 8, "big"))


def _runs(mask: Mask) -> Iterator[str]:
    for length, value in zip(*(array.tolist() for array in run_lengths(mask)), strict=True):
        left = CHANNELS * length
        while left:
            now = min(left, LONGEST)
            which = next(index for index, size in enumerate(SIZES) if now <= 1 << size)
            yield f"1{which:02b}{now - 1:0{SIZES[which]}b}{255 * value:08b}"
            left -= now


def unpack_mask(packed: list[int], size: Size) -> Mask:
    """The mask of bytes as Label Studio sends them: where it is not transparent."""
    height, width = size
    try:
        bits = "".join(f"{byte:08b}" for byte in bytes(packed))
        count, word = int(bits[:32], 2), int(bits[32:37], 2) + 1
        sizes = [int(bits[at : at + 4], 2) + 1 for at in range(37, HEAD, 4)]
        if count != CHANNELS * height * width:
            raise InputError(
                f"a brush mask of {count} values: need {CHANNELS} for each of {width}x{height} pixels."
            )
        values = np.concatenate(list(_stretches(bits, count, word, sizes)))
    except (TypeError, ValueError, OverflowError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError("a brush mask cannot be read: its bytes are damaged.") from error
    found: Mask = values.reshape(height, width, CHANNELS)[..., -1] > 0
    return found


def _stretches(bits: str, count: int, word: int, sizes: list[int]) -> Iterator[np.ndarray]:
    at, done = HEAD, 0
    while done < count:
        size = sizes[int(bits[at + 1 : at + 3], 2)]
        length = int(bits[at + 3 : at + 3 + size], 2) + 1
        start, many = at + 3 + size, 1 if bits[at] == "1" else length
        at = start + many * word
        if done + length > count or at > len(bits):
            raise ValueError(length)
        values = [int(bits[place : place + word], 2) for place in range(start, at, word)]
        yield np.repeat(np.array(values), length // many)
        done += length
