"""Processes that exchange tensors on GPUs: NCCL with as many as there are, gloo with two on one."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.jobs import work_together
from tests.training.test_distributed import VARIANTS, assert_same_losses

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),  # torch itself, on Python 3.12
]

PLAIN: dict[str, Any] = {"optim__precision": "fp32", "runtime__compile": "off", "runtime__device": "cuda"}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of one process on a GPU."""
    root = tmp_path_factory.mktemp("alone")
    work_together(1, jobs(root), "exact pixels")
    return root


def jobs(root: Path, **more: Any) -> list[dict[str, Any]]:
    return [{"run": str(root / name), **changes, **PLAIN, **more} for name, changes in VARIANTS.items()]


@pytest.mark.parametrize("kind", ["replicate", "shard"])
def test_nccl_on_every_gpu_there_is_trains_as_one_process_does(
    alone: Path, tmp_path: Path, kind: str
) -> None:
    count = torch.cuda.device_count()
    ways = ["exact pixels", *(["exchanging"] if count == 1 else [])]
    work_together(count, jobs(tmp_path, runtime__sharding=kind), *ways)
    for name in VARIANTS:
        assert_same_losses(tmp_path / name, alone / name)


def test_two_processes_on_one_gpu_train_as_one_does(alone: Path, tmp_path: Path) -> None:
    work_together(2, jobs(tmp_path), "exact pixels", "sharing a GPU")
    for name in VARIANTS:
        assert_same_losses(tmp_path / name, alone / name)
