"""The shapes that functions announce are looked at while the tests run."""

import importlib
from pathlib import Path

import numpy as np
import pytest
import torch
from jaxtyping import TypeCheckError

from tcore.data.render import normalize
from tcore.evaluation.benchmarks.rendered import Propagated
from tcore.evaluation.cycle import random_regions
from tcore.model.losses import koleo_loss

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU shapes are not looked at")


@pytest.mark.parametrize("folder", ["data", "evaluation", "model", "show", "training"])
def test_every_module_but_those_of_kernels_is_looked_at(folder: str) -> None:
    for path in (ROOT / "tcore" / folder).rglob("*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if path.stem != "__init__" and not path.stem.endswith("_triton"):
            assert type(importlib.import_module(name).__loader__).__name__ == "CheckingLoader", name


def test_a_tensor_of_another_shape_than_announced_is_refused() -> None:
    with pytest.raises(TypeCheckError, match="images"):
        normalize(torch.zeros(3, 8))
    with pytest.raises(TypeCheckError):
        koleo_loss(torch.zeros(4, dtype=torch.int64), 4)
    with pytest.raises(TypeCheckError):
        random_regions(np.zeros(2), 4)  # type: ignore[arg-type]


def test_so_is_a_dataclass_of_one() -> None:
    ids, joints = np.zeros((2, 4, 5), np.uint8), np.zeros((2, 15, 2))
    for _ in range(2):
        Propagated(ids, ids, joints)
    with pytest.raises(TypeCheckError):
        Propagated(ids, ids[0], joints)
