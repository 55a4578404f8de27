"""Raw batches from reading processes, and their pixels on the training device."""

import warnings
from collections.abc import Generator
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import UInt8
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tcore.data.render import PLAIN, Kernels, render
from tcore.data.source import RawBatch, Source, pad
from tcore.data.stores import RenderedStore
from tcore.data.views import ViewPlan
from tcore.data.workers import start_worker
from tcore.device import num_cores
from tcore.errors import InputError


def render_batch(raw: RawBatch, device: torch.device, kernels: Kernels = PLAIN) -> Any:
    """The method's batch, with the pixels of every view made on the training device."""
    sides = raw.sampling.sides
    frames = pad(send(raw.pixels, device), raw.sizes)
    crops: dict[str, Tensor] = {}
    for side in dict.fromkeys(sides.values()):
        # Crops of one size in one go: a GPU makes them sooner than the host asks for one kind after another.
        plans = {name: raw.plans[name] for name in sides if sides[name] == side}
        together = ViewPlan.concatenate(list(plans.values()))
        made = render(frames, together, side, kernels, raw.sampling.filter).split(
            [len(plan) for plan in plans.values()]
        )
        crops |= dict(zip(plans, made, strict=True))
    return raw.sampling.batch(crops, raw)


def send(pixels: UInt8[Tensor, " bytes"], device: torch.device) -> UInt8[Tensor, " bytes"]:
    """Frames on the device; a GPU copies them while it still works on the step before."""
    if device.type != "cuda":
        return pixels.to(device)
    beside = _copy_stream(device)
    with torch.cuda.stream(beside):
        sent = pixels.to(device, non_blocking=True)
    now = torch.cuda.current_stream(device)
    now.wait_stream(beside)
    sent.record_stream(now)  # the memory must not be taken again before the step has read it
    return sent


@lru_cache(maxsize=8)
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class Carrier(Dataset[RawBatch | InputError]):
    """Carries bad input out of a reading process as a value; raised there, it would become a traceback."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def __getitem__(self, index: int) -> RawBatch | InputError:
        try:
            return self.source[index]
        except InputError as error:
            return error


def num_workers(source: Source) -> int:
    """Reading processes of a source."""
    if source.config.runtime.workers is not None:
        return source.config.runtime.workers
    return 0 if isinstance(source.store, RenderedStore) else max(1, min(16, num_cores() // source.share.here))


def load(
    source: Source, first_step: int, num_steps: int, device: torch.device
) -> Generator[RawBatch, None, None]:
    """Parts of steps `first_step` to `num_steps` - 1, in order, read ahead by worker processes."""
    accumulate = source.config.optim.accumulate
    indices = range(first_step * accumulate, num_steps * accumulate)
    workers = num_workers(source)
    with warnings.catch_warnings():
        # More processes than cores have been asked for by name: no accident to be warned of, twice.
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        loader = DataLoader(
            Carrier(source),
            batch_size=None,
            sampler=indices,
            num_workers=workers,
            pin_memory=device.type == "cuda",
            prefetch_factor=2 if workers else None,
            worker_init_fn=start_worker,
        )
        items = iter(loader)
    for item in items:
        if isinstance(item, InputError):
            raise item
        yield item
