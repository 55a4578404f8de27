"""A run and its scores, made once for the tests that look at them."""

from pathlib import Path

from tcore import evaluate, load_encoder, train
from tests.tiny import tiny


def make_run(folder: Path) -> Path:
    """A run of six steps with two kept encoders."""
    return train(tiny(keep_every=3), folder, quiet=True)


def make_card(run: Path) -> Path:
    """A score card of three rendered videos, inside the run."""
    evaluate(load_encoder(run), rendered=3, out=run / "eval")
    return run / "eval"
