"""One tiny run, trained and scored once, for all tests that look at it."""

from pathlib import Path

import pytest

from tcore import evaluate, load_encoder, train
from tests.tiny import tiny


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps with two kept encoders, and a score card of two rendered videos in `eval`."""
    folder = train(tiny(keep_every=3), tmp_path_factory.mktemp("runs") / "tiny", quiet=True)
    evaluate(load_encoder(folder), rendered=2, out=folder / "eval")
    return folder
