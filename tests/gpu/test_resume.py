"""A run that is stopped and resumed on a GPU, in eager mode."""

from pathlib import Path

import pytest
import torch

from tests.runs import assert_resumes_exactly
from tests.tiny import shrunk

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("name", ["tcore-", "dinov2-", "simclr-", "mae-"])
def test_a_resumed_run_equals_an_uninterrupted_one_in_eager_mode(name: str, tmp_path: Path) -> None:
    config = shrunk(
        f"vits16-{name}short", optim__steps=4, runtime__compile="off", runtime__graphs="off", keep_every=2
    )
    assert_resumes_exactly(config, tmp_path)
