"""Processes that exchange tensors on GPUs: NCCL with as many as there are, gloo with two on one."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.jobs import work, work_together
from tests.training.test_distributed import VARIANTS, assert_same_losses

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

PLAIN: dict[str, Any] = {"optim__precision": "fp32", "runtime__compile": "off", "runtime__device": "cuda"}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of one process on a GPU."""
    root = tmp_path_factory.mktemp("alone")
    for name, changes in VARIANTS.items():
        work(root / name, **changes, **PLAIN)
    return root


@pytest.mark.parametrize("kind", ["replicate", "shard"])
def test_nccl_on_every_gpu_there_is_trains_as_one_process_does(
    alone: Path, tmp_path: Path, kind: str
) -> None:
    count = torch.cuda.device_count()
    jobs = [
        {"run": str(tmp_path / name), "runtime__sharding": kind, **changes, **PLAIN}
        for name, changes in VARIANTS.items()
    ]
    work_together(count, jobs, *(["exchanging"] if count == 1 else []))
    for name in VARIANTS:
        assert_same_losses(tmp_path / name, alone / name)


def test_two_processes_on_one_gpu_train_as_one_does(alone: Path, tmp_path: Path) -> None:
    jobs = [{"run": str(tmp_path / name), **changes, **PLAIN} for name, changes in VARIANTS.items()]
    work_together(2, jobs, "sharing a GPU")
    for name in VARIANTS:
        assert_same_losses(tmp_path / name, alone / name)
