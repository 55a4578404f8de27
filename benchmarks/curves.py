"""The same training twice, plain in fp32 and fast in bf16, to see whether the curves lie on each other.

`python benchmarks/curves.py --frames STORE --out docs/curves.png`: 300 steps of a ViT-S/16 (LayerScale .1,
gains fixed, K 2,048; crops of 128 and 64); without a GPU, a small model, and nothing is compiled. These
settings leave the start-up plateau at a learning rate so low that rounding does not grow into another run;
docs/LOG.md has others, and how far apart they end. Without a store: rendered videos.
Plain: eager, fp32, all rows x K held. Fast: compiled, bf16,
losses in chunks. Seed, samples, views, masks and stochastic depth are the same for both.
`--set teacher.momentum=[0.99,1]` changes a setting of both.

Wanted, of losses smoothed over 20 steps: both runs learn (dino ends 10% or more below its plateau, ln K),
and every loss of one is within 2% of the other's, everywhere (koleo may pass 0; a loss that does is compared
with its mean size where it is smaller than that). Exit code 1 where it is not so.
"""

import argparse
import json
import math
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from tcore import methods
from tcore.config import Compile, Config, flatten
from tcore.data.loader import load
from tcore.data.stores import FrameStore
from tcore.methods.distillation import SelfDistillation
from tcore.recipes import recipe
from tcore.training.loop import resolve
from tcore.training.optim import build_schedule
from tcore.training.step import Trainer

sys.path.insert(0, str(Path(__file__).parent))
from end_to_end import rendered_store

SMOOTH = 20
FALL, APART = 0.1, 0.02
LOSSES = ("dino", "past_teacher", "future_teacher", "past_future", "koleo")
SETTINGS: dict[str, Any] = {
    "loss.form": "paper",
    "vit.layer_scale": 0.1,
    "head.prototypes": 2048,
    "head.train_gains": False,
    "optim.batch": 256,
    "views.global_size": 128,
    "views.local_size": 64,
    "views.local_area": (0.25, 1.0),
    "teacher.targets": "sinkhorn",
    "teacher.temperature": (0.01, 0.01),
    "teacher.momentum": (0.9, 1.0),
    "optim.base_lr": 3e-4,
}
SMALL: dict[str, Any] = {
    "vit.dim": 48,
    "vit.depth": 2,
    "vit.num_heads": 3,
    "views.global_size": 64,
    "views.local_size": 32,
    "views.num_local": 2,
    "head.hidden": 128,
    "head.bottleneck": 32,
    "head.prototypes": 64,
    "vit.layer_scale": 0.5,
    "vit.drop_path": 0.0,
    "views.local_area": (0.05, 0.32),
    "teacher.momentum": (0.98, 1.0),
    "optim.base_lr": 8e-3,
    "optim.batch": 8,
}

Curves = dict[str, np.ndarray]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--small", action=argparse.BooleanOptionalAction, default=not on_gpu)
    parser.add_argument("--steps", type=int, help="default: 300, small 80")
    parser.add_argument("--batch", type=int, help="default: 256, small 8")
    parser.add_argument("--frames", type=Path, help="a store or frame folders (default: rendered videos)")
    parser.add_argument("--videos", type=int, help="rendered (default: 160, small 16)")
    parser.add_argument("--compile", choices=("auto", "on", "off"), default="auto", help="of the fast run")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="settings of both runs")
    parser.add_argument("--out", type=Path, help="a picture (needs matplotlib)")
    parser.add_argument("--json", type=Path, help="the losses of both")
    options = parser.parse_args()
    settings = SETTINGS | (SMALL if options.small else {})
    for name, _, value in (word.partition("=") for word in options.set):
        found = json.loads(value)
        settings[name] = tuple(found) if isinstance(found, list) else found
    settings["optim.steps"] = options.steps or (80 if options.small else 300)
    settings["optim.batch"] = options.batch or settings["optim.batch"]
    if settings["optim.steps"] <= SMOOTH:
        parser.error(f"--steps {settings['optim.steps']}: need more than {SMOOTH}, which are smoothed over")
    config = recipe("vits16-k400", settings)
    with tempfile.TemporaryDirectory() as folder:
        videos = options.videos or (16 if options.small else 160)
        store = options.frames or rendered_store(Path(folder), videos)
        plain, fast = (losses(name, form(config, name, options.compile), store) for name in ("plain", "fast"))
    if options.json:
        listed = {"plain": plain, "fast": fast}
        options.json.write_text(
            json.dumps({name: {loss: x.tolist() for loss, x in run.items()} for name, run in listed.items()})
        )
    if options.out:
        draw(plain, fast, options.out)
    raise SystemExit(0 if report(plain, fast, math.log(flatten(config)["head.prototypes"])) else 1)


def form(config: Config, name: str, wish: Compile = "auto") -> Config:
    """The settings of one of the two runs."""
    plain = name == "plain"
    return replace(
        config,
        optim=replace(config.optim, precision="fp32" if plain else "bf16"),
        runtime=replace(config.runtime, compile="off" if plain else wish),
    )


def losses(name: str, config: Config, store: Path) -> Curves:
    """Every loss of every step."""
    config = resolve(config)
    source = methods.build_source(FrameStore.open(store), config)
    torch.set_float32_matmul_precision("highest")
    trainer = Trainer(config)
    schedule = build_schedule(config, trainer.method, source.steps_per_epoch)
    assert isinstance(trainer.method, SelfDistillation)
    trainer.method.fused = name == "fast"
    assert config.optim.steps is not None
    parts = load(source, 0, config.optim.steps, trainer.device)
    found: list[dict[str, float]] = []
    started = time.perf_counter()
    for step in range(config.optim.steps):
        found.append(trainer.step(parts, step, schedule.at(step)).check())
        if (step + 1) % 50 == 0 or step + 1 == config.optim.steps:
            took = time.perf_counter() - started
            line = f"{name}: step {step + 1}, dino {found[-1]['dino']:.3f}, {took:.0f} s"
            print(line, file=sys.stderr, flush=True)
    return {loss: np.array([line[loss] for line in found]) for loss in LOSSES}


def smooth(values: np.ndarray) -> np.ndarray:
    """Means over windows of steps."""
    return np.convolve(values, np.ones(SMOOTH) / SMOOTH, mode="valid")


class Comparison(NamedTuple):
    """One loss of both runs, smoothed."""

    plain: float
    fast: float
    """At the end."""
    apart: float
    """Largest distance, as a share of the loss."""


def compare(plain: np.ndarray, fast: np.ndarray) -> Comparison:
    """How far two curves are apart."""
    a, b = smooth(plain), smooth(fast)
    size = np.abs(a)
    if a.min() <= 0 <= a.max():
        size = np.maximum(size, max(size.mean(), 1e-12))
    return Comparison(float(a[-1]), float(b[-1]), float((np.abs(a - b) / size).max()))


def fall(values: np.ndarray, plateau: float) -> float:
    """Share by which a smoothed loss has fallen below the plateau, or below its highest value if less.

    That is not the first: while the centers are still 0, the first losses lie below the plateau, and those
    with sharp targets above it.
    """
    curve = smooth(values)
    return float(1 - curve[-1] / min(plateau, curve.max()))


def report(plain: Curves, fast: Curves, plateau: float) -> bool:
    """Print every comparison with its verdict; whether all is well."""
    passed = []

    def say(line: str, well: bool) -> None:
        passed.append(well)
        print(f"{line}: {'passed' if well else 'FAILED'}", flush=True)

    steps = len(plain["dino"])
    for name, run in (("fp32 plain", plain), ("bf16 fast", fast)):
        fallen = fall(run["dino"], plateau)
        say(
            f"dino of {name} is {fallen:.1%} below its plateau after {steps} steps (wanted {FALL:.0%})",
            fallen >= FALL,
        )
    for loss in LOSSES:
        found = compare(plain[loss], fast[loss])
        say(
            f"{loss:14} at the end {found.plain:8.4f} fp32 plain, {found.fast:8.4f} bf16 fast, "
            f"at most {found.apart:.2%} apart (wanted {APART:.0%})",
            found.apart <= APART,
        )
    return all(passed)


def draw(plain: Curves, fast: Curves, path: Path) -> None:
    """Both runs in one panel for each loss."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(LOSSES), figsize=(15, 3), layout="constrained")
    for axis, name in zip(axes, LOSSES, strict=True):
        steps = np.arange(SMOOTH, len(plain[name]) + 1)
        axis.plot(steps, smooth(plain[name]), label="fp32, plain", linewidth=3, color="0.75")
        axis.plot(steps, smooth(fast[name]), label="bf16, fast", linewidth=1, color="C3")
        axis.set_title(f"{name}, at most {compare(plain[name], fast[name]).apart:.2%} apart", fontsize=9)
        axis.set_xlabel(f"step (mean of {SMOOTH})")
    axes[0].legend(frameon=False)
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
