"""The verb around single images: neighbors."""

import sys
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from tcore.cli.parsing import check_flags, parse
from tcore.errors import InputError


@dataclass(frozen=True)
class NeighborsCommand:
    """Find the nearest other images of every image, for training with --source images."""

    store: Positional[str] = ""
    """A folder of images at any depth, or a packed store of images."""
    encoder: str = ""
    """A run trained with --auxiliary none, or any other encoder that `tcore evaluate` knows."""
    k: int = 5
    """Neighbors of each image."""
    out: Path | None = None
    """File to write (default: neighbors.safetensors in a packed store, IMAGES.neighbors.safetensors)."""


def neighbors_verb(argv: list[str]) -> None:
    """`tcore neighbors`: which images stand in for the past of which."""
    check_flags(argv, "tcore neighbors", NeighborsCommand())
    command = parse(NeighborsCommand, argv, "tcore neighbors", NeighborsCommand())
    if not command.store or not command.encoder:
        raise InputError("tcore neighbors needs images and an encoder: tcore neighbors IMAGES --encoder RUN.")
    from tcore.device import choose_device
    from tcore.evaluation.encoders import load_encoder
    from tcore.evaluation.neighbors import find_all

    encoder = load_encoder(command.encoder).to(choose_device("auto"))
    path = find_all(
        encoder,
        command.store,
        k=command.k,
        out=command.out,
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    print(f"neighbors: {path}")
