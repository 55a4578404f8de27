"""Numeric arrays from MATLAB 5 files: as much of the format as joint annotations need."""

import struct
import zlib
from pathlib import Path

import numpy as np

from tcore.errors import InputError
from tcore.files import read_bytes

# Codes of the format: type of a data element -> numpy's name for it.
NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
MATRIX, COMPRESSED = 14, 15
LARGEST = 1 << 28  # no annotation is larger; a header that says so is broken or hostile


def read_mat(path: Path) -> dict[str, np.ndarray]:
    """The real numeric arrays of a file, by name; whatever else it holds is passed over."""
    try:
        data = read_bytes(path)
        order = {b"IM": "<", b"MI": ">"}[data[126:128]]
        arrays = {}
        position = 128
        while position + 8 <= len(data):
            kind, body, position = _element(data, position, order)
            if kind == COMPRESSED:
                kind, body, _ = _element(_inflate(body), 0, order)
            if kind == MATRIX and (named := _matrix(body, order)) is not None:
                arrays[named[0]] = named[1]
        return arrays
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}.") from error
    except (KeyError, ValueError, IndexError, struct.error, zlib.error, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: no MATLAB 5 file, or a broken one.") from error


def _inflate(body: bytes) -> bytes:
    inflater = zlib.decompressobj()
    data = inflater.decompress(body, LARGEST)
    if inflater.unconsumed_tail:
        raise ValueError("too large")
    return data


def _element(data: bytes, position: int, order: str) -> tuple[int, bytes, int]:
    """Kind and bytes of the data element at a position, and where the next one begins."""
    kind, size = struct.unpack_from(order + "II", data, position)
    if kind >> 16:  # a small element holds its bytes beside its kind
        if kind >> 16 > 4:
            raise ValueError("a small element holds 4 bytes at most")
        return kind & 0xFFFF, data[position + 4 : position + 4 + (kind >> 16)], position + 8
    start, end = position + 8, position + 8 + size
    if end > len(data):
        raise ValueError("cut off")
    # Elements are padded to 8 bytes, compressed ones are not.
    return kind, data[start:end], end if kind == COMPRESSED else (end + 7) // 8 * 8


def _matrix(body: bytes, order: str) -> tuple[str, np.ndarray] | None:
    """Name and values of a real numeric matrix."""
    _, flags, position = _element(body, 0, order)
    matrix_class, is_complex = flags[0], bool(flags[1] & 8)
    if order == ">":
        matrix_class, is_complex = flags[3], bool(flags[2] & 8)
    if not 6 <= matrix_class <= 15 or is_complex:
        return None
    _, shape, position = _element(body, position, order)
    _, name, position = _element(body, position, order)
    kind, values, _ = _element(body, position, order)
    dimensions = np.frombuffer(shape, order + "i4")
    array = np.frombuffer(values, order + NUMBERS[kind]).reshape(dimensions, order="F")
    return name.decode("ascii"), array.astype(np.float64)
