"""Encoders through torch.hub: torch.hub.load(REPOSITORY, "tcore", encoder="PATH-or-spec")."""

from typing import TYPE_CHECKING

dependencies = ["torch", "numpy", "PIL", "safetensors", "jaxtyping"]

if TYPE_CHECKING:
    from tcore.evaluation.encoder import Encoder


def tcore(encoder: str, layer: int = -1) -> "Encoder":
    """An encoder: uint8 frames (time, height, width, RGB) in, a grid of features out.

    `encoder` is a run folder, an exported or foreign checkpoint, random:vits16, timm:NAME or hf:NAME.
    """
    from tcore.evaluation.encoders import load_encoder

    return load_encoder(encoder, layer)
