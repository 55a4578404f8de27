"""Does the matching module match? `python benchmarks/matching.py RUN [--frames STORE] [--batches 4]`.

The cross-entropy at masked patches (mean of past_teacher and future_teacher) of a trained run, when the
module looks at the past and the future as in training, at those of other videos, and at the very crop that
has the holes, without them. A module that matches patches finds the answer in the last; one that reads what
kind of scene it is does not.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from tcore import methods
from tcore.config import Config, flatten, load_config
from tcore.data.loader import load, render_batch
from tcore.device import choose_device
from tcore.errors import InputError
from tcore.methods import build
from tcore.methods.batch import Batch
from tcore.methods.tcore import TCoRe
from tcore.training.checkpoint import CHECKPOINT, CONFIG, load_newest
from tcore.training.loop import open_store

BATCH = 64
FIRST_STEP = 10**6  # batches that no run of ours has seen


def views_to_look_at(batch: Batch) -> dict[str, tuple[Tensor, Tensor]]:
    """What the module is given as past and future, by name."""
    assert batch.past is not None
    assert batch.future is not None
    crop = batch.teacher_crops[batch.masked]
    return {
        "past and future": (batch.past, batch.future),
        "those of another video": (batch.past.roll(1, 0), batch.future.roll(1, 0)),
        "the crop itself, without holes": (crop, crop),
    }


@torch.no_grad()
def measure(model: TCoRe, batches: Iterator[Batch], temperature: float) -> dict[str, float]:
    """Cross-entropy at masked patches by what the module looks at, mean over batches."""
    sums: dict[str, list[float]] = {}
    for batch in batches:
        for name, (past, future) in views_to_look_at(batch).items():
            found = model(replace(batch, past=past, future=future), {"teacher_temperature": temperature})
            sums.setdefault(name, []).append(float(found["past_teacher"] + found["future_teacher"]) / 2)
    return {name: sum(values) / len(values) for name, values in sums.items()}


def load_run(run: Path, device: torch.device) -> tuple[Config, TCoRe]:
    """Settings and networks of a run, for small batches; nothing of them is random."""
    config = load_config(run / CONFIG)
    model = build(config).to(device)
    if not isinstance(model, TCoRe) or model.match is None:
        raise InputError(f"run {run} has no patch matching module: train T-CoRe with --auxiliary both.")
    # A checkpoint of our own: weights and plain values.
    path = load_newest(run / CHECKPOINT, lambda path: path, print)
    if path is None:
        raise InputError(f"run {run} has no checkpoint: train it first.")
    saved = torch.load(path, map_location=device, weights_only=True)
    model.load_state_dict(saved["model"])
    model.eval()
    optim = replace(config.optim, batch=BATCH, accumulate=1)
    return replace(config, optim=optim, runtime=replace(config.runtime, workers=0)), model


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--frames", help="store or folder of clips (default: rendered videos)")
    parser.add_argument("--batches", type=int, default=4, help=f"batches of {BATCH} videos")
    given = parser.parse_args()
    device = choose_device("auto")
    config, model = load_run(given.run, device)
    source = methods.build_source(open_store(config, given.frames), config)
    raw = load(source, FIRST_STEP, FIRST_STEP + given.batches, device)
    batches = (render_batch(part, device) for part in raw)
    found = measure(model, batches, flatten(config)["teacher.temperature"][1])
    print("| the module looks at | cross-entropy at masked patches |\n|---|---|")
    for name, value in found.items():
        print(f"| {name} | {value:.3f} |")


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        print(f"matching.py: error: {error}", file=sys.stderr)
        sys.exit(2)
