"""Raw batches from reading processes, and their pixels on the training device."""

import warnings
from collections.abc import Generator
from functools import lru_cache

import torch
from jaxtyping import UInt8
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tcore.config import Config
from tcore.data.batch import Batch, make_batch
from tcore.data.buffer import pad
from tcore.data.render import PLAIN, Kernels, render
from tcore.data.samples import RawBatch, Source
from tcore.data.stores import RenderedStore
from tcore.data.views import ViewPlan
from tcore.data.workers import start_worker
from tcore.device import num_cores
from tcore.errors import InputError


def render_batch(raw: RawBatch, config: Config, device: torch.device, kernels: Kernels = PLAIN) -> Batch:
    """Pixels: every view of a batch, made on the training device."""
    frames = pad(send(raw.pixels, device), raw.sizes)
    wanted = {
        "teacher": raw.global_,
        "student": raw.student,
        "past": raw.past if config.auxiliary in ("past", "both") else None,
        "future": raw.future if config.auxiliary in ("future", "both") else None,
    }
    plans = {name: plan for name, plan in wanted.items() if plan is not None}
    # Crops of one size in one go: a GPU makes them sooner than the host asks for one kind after the other.
    together = ViewPlan.concatenate(list(plans.values()))
    made = render(frames, together, config.views.global_size, kernels).split([len(p) for p in plans.values()])
    crops = dict(zip(plans, made, strict=True))
    return make_batch(
        crops.get("student", crops["teacher"]),
        render(frames, raw.local, config.views.local_size, kernels),
        raw.mask,
        crops.get("past"),
        crops.get("future"),
        teacher_crops=crops["teacher"],
        counts=raw.counts,
    )


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
