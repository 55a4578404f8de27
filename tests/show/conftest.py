"""One tiny run with a score card, for all tests that look at it."""

import shutil
from pathlib import Path

import pytest

from tcore import evaluate, load_encoder


@pytest.fixture(scope="session")
def run(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps with two kept encoders, and a score card of two rendered videos in `eval`."""
    folder = shutil.copytree(whole, tmp_path_factory.mktemp("runs") / "tiny")
    evaluate(load_encoder(folder), rendered=2, out=folder / "eval")
    return folder
