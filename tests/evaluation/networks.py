"""A tiny network whose every weight matters, images for it, and packages that may not be installed."""

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tcore.evaluation.encoder import Encoder
from tcore.model.vit import VisionTransformer

# Heads of 16 channels, which no shape tells.
SIZES = {"dim": 32, "depth": 3, "num_heads": 2, "patch_size": 8, "image_size": 24, "num_registers": 2}


def network(**changes: Any) -> VisionTransformer:
    """Always the same weights; nothing is left at 0, 1 or another gentle start."""
    vit = VisionTransformer(**(SIZES | changes))
    generator = torch.Generator().manual_seed(0)
    for parameter in vit.parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    return vit


def encoder(**changes: Any) -> Encoder:
    return Encoder(network(**changes), "mine")


def images(rows: int = 2, columns: int = 5, patch: int = 8) -> Tensor:
    return torch.randn(2, 3, patch * rows, patch * columns, generator=torch.Generator().manual_seed(1))


def need(package: str) -> Any:
    """The package; the test is skipped where it does not import."""
    try:
        return importlib.import_module(package)
    except (ImportError, RuntimeError) as error:  # beside another torch it can fail with either
        pytest.skip(f"{package} does not import here: {error}")
