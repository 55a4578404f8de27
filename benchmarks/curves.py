"""The same training twice, plain in fp32 and fast in bf16, to see whether the curves lie on each other.

`python benchmarks/curves.py --out docs/curves.png`: 300 steps of a ViT-S/16 with settings that leave the
start-up plateau (LayerScale .1, gains fixed, K 2,048). Prints the largest distance of the smoothed losses.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from tcore.config import Config
from tcore.data.frames import FrameStore
from tcore.data.loader import Source, load
from tcore.recipes import recipe
from tcore.training.build import build_schedule
from tcore.training.loop import resolve
from tcore.training.step import Trainer

sys.path.insert(0, str(Path(__file__).parent))
from end_to_end import rendered_store

SMOOTH = 20
LOSSES = ("dino", "past_teacher", "future_teacher", "past_future", "koleo")
SETTINGS = {
    "vit.layer_scale": 0.1,
    "head.prototypes": 2048,
    "head.train_gains": False,
    "optim.batch": 64,
    "views.global_size": 128,
    "views.local_size": 64,
    "teacher.momentum": (0.98, 1.0),
    "optim.base_lr": 4e-3,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--videos", type=int, default=160)
    parser.add_argument("--out", type=Path, help="a picture (needs matplotlib)")
    parser.add_argument("--json", type=Path, help="the losses of both")
    options = parser.parse_args()
    config = recipe("vits16-k400", {**SETTINGS, "optim.steps": options.steps, "loss.form": "paper"})
    with tempfile.TemporaryDirectory() as folder:
        store = rendered_store(Path(folder), options.videos)
        plain = replace(
            config,
            optim=replace(config.optim, precision="fp32"),
            runtime=replace(config.runtime, compile="off"),
        )
        fast = replace(
            config,
            optim=replace(config.optim, precision="bf16"),
            runtime=replace(config.runtime, compile="on"),
        )
        curves = {name: losses(settings, store) for name, settings in (("fast", fast), ("plain", plain))}
    report(curves)
    if options.json:
        listed = {name: {loss: x.tolist() for loss, x in found.items()} for name, found in curves.items()}
        options.json.write_text(json.dumps(listed))
    if options.out:
        draw(curves, options.out)


def losses(config: Config, store: Path) -> dict[str, np.ndarray]:
    """Every loss of every step."""
    config = resolve(config)
    source = Source(FrameStore.open(store), config)
    trainer, schedule = Trainer(config), build_schedule(config, source.steps_per_epoch)
    trainer.model.fused = config.runtime.compile == "on"
    torch.set_float32_matmul_precision("highest")
    assert config.optim.steps is not None
    parts = load(source, 0, config.optim.steps, trainer.device)
    found = [trainer.step(parts, step, schedule.at(step)).check() for step in range(config.optim.steps)]
    return {name: np.array([line[name] for line in found]) for name in LOSSES}


def smooth(values: np.ndarray) -> np.ndarray:
    return np.convolve(values, np.ones(SMOOTH) / SMOOTH, mode="valid")


def report(curves: dict[str, dict[str, np.ndarray]]) -> None:
    plain, fast = curves["plain"], curves["fast"]
    dino = smooth(plain["dino"])
    print(
        f"dino {dino[0]:.3f} -> {dino[-1]:.3f} ({dino[-1] / dino[0] - 1:+.1%} in {len(plain['dino'])} steps)"
    )
    for name in LOSSES:
        a, b = smooth(plain[name]), smooth(fast[name])
        apart = np.abs(a - b) / np.abs(a)
        print(
            f"{name:16} fp32 plain {a[-1]:8.4f}  bf16 fast {b[-1]:8.4f}  largest distance {apart.max():.2%}"
        )


def draw(curves: dict[str, dict[str, np.ndarray]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(LOSSES), figsize=(15, 3), layout="constrained")
    for axis, name in zip(axes, LOSSES, strict=True):
        axis.plot(smooth(curves["plain"][name]), label="fp32, plain", linewidth=3, color="0.75")
        axis.plot(smooth(curves["fast"][name]), label="bf16, fast", linewidth=1, color="C3")
        axis.set_title(name)
        axis.set_xlabel("step")
    axes[0].legend(frameon=False)
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    main()
