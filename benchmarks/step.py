"""A training step: samples/s, share of the peak, memory, and where the time goes.

`python benchmarks/step.py vits16-k400 --batch 256` on a GPU; without one, a small size. Frames are in memory
(256 x 340 pixels, noise): reading them is measured by `benchmarks/end_to_end.py`.
"""

import argparse
import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tcore import methods
from tcore.config import Config
from tcore.data.images import Frame
from tcore.data.loader import render_batch
from tcore.data.source import RawBatch
from tcore.data.stores import FrameStore
from tcore.device import peak_memory_gib
from tcore.recipes import recipe
from tcore.training import step as step_module
from tcore.training.loop import resolve
from tcore.training.optim import build_schedule
from tcore.training.step import Trainer
from tcore.training.wrapping import use_block_kernels

PEAK_TFLOPS = {"NVIDIA H200": 790.0}  # bf16 matrix products, measured
HEIGHT, WIDTH = 256, 340
COUNTED = 32  # samples whose operations are counted


class NoiseStore(FrameStore):
    """Frames of noise, made once: reading costs nothing."""

    def __init__(self, videos: int) -> None:
        self.names = [f"noise-{index}" for index in range(videos)]
        self.lengths, self.fps = np.full(videos, 20, dtype=np.int64), 30.0
        self._frames = np.random.default_rng(0).integers(0, 256, (8, HEIGHT, WIDTH, 3), dtype=np.uint8)

    def read(self, video: int, frames: Any) -> list[Frame]:
        """Some of the frames that there are."""
        return [self._frames[(video + index) % 8] for index in frames]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "recipe", nargs="?", default="vits16-k400" if torch.cuda.is_available() else "quickstart"
    )
    parser.add_argument("--batch", type=int, help="videos per step (default: the recipe's)")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--compile", choices=("auto", "on", "off"), default="auto")
    parser.add_argument("--graphs", choices=("auto", "off"), default="auto", help="CUDA graphs")
    parser.add_argument("--breakdown", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--kernels", type=int, default=0, help="name so many kernels that take most time")
    parser.add_argument("--rendered", action="store_true", help="views are made before, once")
    parser.add_argument("--attention", choices=("any", "flash", "cudnn"), default="any", help="whose kernels")
    parser.add_argument(
        "--plain",
        nargs="+",
        choices=("attention", "mlp"),
        default=[],
        help="blocks without our kernels for it",
    )
    options = parser.parse_args()
    config = recipe(options.recipe)
    if options.batch:
        config = replace(config, optim=replace(config.optim, batch=options.batch))
    runtime = replace(config.runtime, compile=options.compile, graphs=options.graphs)
    config = resolve(replace(config, runtime=runtime))
    if options.rendered:
        render_once()
    if options.attention != "any":  # torch's kernels, then
        options.plain = [*options.plain, "attention"]
    with attention_of(options.attention):
        report(config, options.recipe, options.steps, options.breakdown, options.kernels, options.plain)


def render_once() -> None:
    """Let the trainer find the views of a part made already, where it has seen the part before."""
    kept: dict[int, Any] = {}

    def render(raw: RawBatch, device: torch.device, kernels: Any) -> Any:
        if id(raw) not in kept:
            kept[id(raw)] = render_batch(raw, device, kernels)
        return kept[id(raw)]

    vars(step_module)["render_batch"] = render


def attention_of(whose: str) -> AbstractContextManager[Any]:
    """Attention by the kernels of one maker, where torch would choose."""
    if whose == "any":
        return nullcontext()
    backend = SDPBackend.CUDNN_ATTENTION if whose == "cudnn" else SDPBackend.FLASH_ATTENTION
    return sdpa_kernel([backend, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], set_priority=True)


def report(
    config: Config, name: str, steps: int, breakdown: bool, kernels: int, plain: Sequence[str]
) -> None:
    """Warm up, time, print."""
    source = methods.build_source(NoiseStore(2 * config.optim.batch), config)
    trainer = Trainer(config)
    if plain:
        use_block_kernels(trainer.method, attention="attention" not in plain, mlp="mlp" not in plain)
    schedule = build_schedule(config, trainer.method, 1000)
    raws = [pinned(source[index], trainer.device) for index in range(4 * config.optim.accumulate)]
    feed = itertools.cycle(raws)
    started = time.perf_counter()
    for step in range(4):
        trainer.step(feed, step, schedule.at(step)).metrics()
    warm = time.perf_counter() - started
    started = now(trainer)
    unread: list[Any] = []
    idle = host = 0.0
    for step in range(steps):
        began = time.perf_counter()
        unread.append(trainer.step(feed, step, schedule.at(step)))
        host += time.perf_counter() - began
        if len(unread) > 1 or step == steps - 1:
            outcome = unread.pop(0)
            outcome.metrics()
            idle += outcome.timing.idle()
    seconds = (now(trainer) - started) / steps
    memory = peak_memory_gib(trainer.device)  # before the operations are counted, by a step of its own
    speed = config.optim.samples / seconds
    gpu = torch.cuda.get_device_name() if trainer.device.type == "cuda" else "CPU"
    tflops = speed * flops_per_sample(config) / 1e12
    share = f", {tflops / PEAK_TFLOPS[gpu]:.0%} of {PEAK_TFLOPS[gpu]:.0f}" if gpu in PEAK_TFLOPS else ""
    graphs = "graphs" if trainer.graphs is not None else "no graphs"
    settings = (
        f"batch {config.optim.batch}, {config.optim.precision}, compile {config.runtime.compile}, {graphs}"
    )
    print(f"{name}, {settings}, {gpu}")
    print(
        f"{speed:.1f} samples/s ({1000 * seconds:.1f} ms a step), {tflops:.1f} TFLOP/s{share}, "
        f"peak memory {memory:.2f} GiB (warm-up {warm:.0f} s)"
    )
    per_step = 1000 / steps
    print(
        f"of a step the host is busy for {per_step * host:.0f} ms, the GPU waits for {per_step * idle:.1f} ms"
    )
    if kernels or trainer.device.type == "cuda":
        print_kernels(lambda: trainer.step(feed, steps, schedule.at(steps)).metrics(), kernels)
    if breakdown:
        print_breakdown(trainer, raws[0], seconds)


def flops_per_sample(config: Config) -> float:
    """Floating-point operations of one sample in a step as torch counts them, a multiply-add as 2."""
    # Plain and uncompiled: the counter sees neither Triton kernels nor, on a CPU, fused attention. Stochastic
    # depth is counted in full, and so are the outputs that the losses compute again in the backward pass.
    plain = replace(
        config,
        vit=replace(config.vit, drop_path=0.0),
        optim=replace(config.optim, batch=COUNTED, accumulate=1),
        runtime=replace(config.runtime, compile="off"),
    )
    trainer, raw = Trainer(plain), methods.build_source(NoiseStore(2 * COUNTED), plain)[0]
    batch = render_batch(raw, trainer.device, trainer.render)
    trainer.method.observing = False  # health figures are no part of most steps
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        trainer._backward(batch, build_schedule(plain, trainer.method, 1000).at(0).own)
    return counter.get_total_flops() / plain.optim.samples


def print_kernels(step: Callable[[], Any], count: int) -> None:
    """What the device does most of a step with."""
    with torch.profiler.profile() as seen:
        step()
    # Operations and named ranges count the time of their kernels too: on a GPU the kernels alone are wanted.
    on_gpu = [
        event
        for event in seen.key_averages()
        if "CPU" not in str(event.device_type) and not getattr(event, "is_user_annotation", False)
    ]
    copies = [event for event in on_gpu if event.key.startswith(("Memcpy", "Memset"))]
    on_gpu = [event for event in on_gpu if event not in copies]

    def of(event: Any) -> float:
        return float(event.self_device_time_total if on_gpu else event.self_cpu_time_total)

    started = sum(event.count for event in seen.key_averages() if "Launch" in event.key)
    what = f"kernels of one step, {started} launches, all streams added up"
    print_events(what, on_gpu or list(seen.key_averages()), of, count)
    if copies:
        print_events("copies and fills of memory", copies, of, 0)


def print_events(
    what: str, events: list[Any], of: Callable[[Any], float], count: int, steps: int = 1
) -> None:
    """How long all events of a profile take in a step, and those that take most of it."""
    events = sorted(events, key=of, reverse=True)
    calls = sum(event.count for event in events) // steps
    print(f"{what}: {sum(map(of, events)) / steps / 1000:.1f} ms in {calls} calls")
    for event in events[:count]:
        print(f"  {of(event) / steps / 1000:8.2f} ms {event.count // steps:6} x  {event.key[:90]}")


def print_breakdown(trainer: Trainer, raw: RawBatch, step_seconds: float) -> None:
    """Seconds of each stage by itself."""
    method, config = trainer.method, trainer.config
    values = build_schedule(config, method, 1000).at(5)
    batch = render_batch(raw, trainer.device, trainer.render)
    kept: dict[str, Any] = {}

    def forward() -> None:
        kept["losses"] = method(batch, values.own, trainer.generator)

    def update() -> None:
        trainer.optimizer.clip()
        trainer.optimizer.adamw.step()

    stages: dict[str, Callable[[], Any]] = {
        "copy of frames": lambda: raw.pixels.to(trainer.device, non_blocking=True),
        "copy and render": lambda: render_batch(raw, trainer.device, trainer.render),
        "forward": forward,
        "backward": lambda: method.total(kept["losses"]).backward(),
        "optimizer": update,
        "what follows": lambda: method.finish_step(values.own),
    }
    method.observing = False
    times: dict[str, float] = dict.fromkeys(stages, 0.0)
    with trainer._autocast():
        for repeat in range(4):
            for name, work in stages.items():
                begun = now(trainer)
                work()
                if repeat:
                    times[name] += (now(trainer) - begun) / 3
            trainer.optimizer.adamw.zero_grad(set_to_none=True)
    for name, seconds in times.items():
        print(f"  {name:16} {1000 * seconds:8.1f} ms  {seconds / step_seconds:5.1%} of the step")


def pinned(raw: RawBatch, device: torch.device) -> RawBatch:
    return raw.pin_memory() if device.type == "cuda" else raw


def now(trainer: Trainer) -> float:
    if trainer.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
