"""Run folders: what they say, and whether two of them hold the same."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tcore import Config, train
from tests.training.jobs import StoppedError, stopping_at

TIMINGS = {"samples_per_second", "data_wait", "memory_gib"}


def metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of all steps."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def contents(root: Path) -> dict[str, bytes]:
    """All files of a folder."""
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def checkpoint(run: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(run / "checkpoint.pt", weights_only=True)
    return state


def assert_same_state(a: Any, b: Any) -> None:
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same_state(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same_state(x, y)
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    else:
        assert a == b


def assert_same_run(a: Path, b: Path) -> None:
    """The same losses, weights and files, bit for bit; only what was timed may differ."""
    ours, theirs = (
        [{name: value for name, value in line.items() if name not in TIMINGS} for line in metrics(run)]
        for run in (a, b)
    )
    assert ours == theirs
    assert_same_state(checkpoint(a), checkpoint(b))
    written = [{path.name: path.read_bytes() for path in run.glob("*.safetensors")} for run in (a, b)]
    for files in written:
        files.pop(
            "encoder-best.safetensors", None
        )  # a run that is scored may be compared with one that is not
    assert "encoder.safetensors" in written[0]
    assert written[0] == written[1]
    kept = [sorted(path.name for path in (run / "encoders").iterdir()) for run in (a, b)]
    assert kept[0] == kept[1]


def assert_resumes_exactly(config: Config, root: Path, frames: Path | None = None, stop: int = 3) -> Path:
    """A run that is stopped and goes on equals one that never was; the latter's folder."""
    whole = train(config, root / "whole", frames, quiet=True)
    with pytest.raises(StoppedError):
        train(config, root / "parts", frames, quiet=True, on_step=stopping_at(stop))
    assert_same_run(train(config, root / "parts", frames, quiet=True), whole)
    return whole
