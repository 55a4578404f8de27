"""Weights on disk."""

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save
from torch import Tensor

from tcore.files import write_bytes

CARD_FORMAT = "tcore-encoder-1"  # of the JSON file beside an encoder's weights, which says how it is built


def save_safetensors(tensors: Mapping[str, Tensor], path: Path, about: dict[str, str] | None = None) -> None:
    """Write weights atomically; `about` goes into the metadata of the same file."""
    plain = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    write_bytes(path, save(plain, metadata=about))
