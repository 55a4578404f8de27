"""Whether a step fits into memory, and if not, in how many parts it would."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from tcore.config import Config
from tcore.training.memory import FRAME_PIXELS, GIB, Memory, estimate

MARGIN = 0.1
"""Share of the memory there is that a plan leaves free: for gaps, the CUDA context, an estimate too low."""

GPU_CONTEXT = 0.5 * GIB
"""What a process takes of a GPU before it has a single tensor there, about."""


class Place(NamedTuple):
    """Where a step is to be made."""

    memory: float
    """Bytes that a process may use."""
    device: str = "cuda"
    processes: int = 1
    frame_pixels: int = FRAME_PIXELS

    def needs(self, config: Config) -> Memory:
        """What a step takes there."""
        return estimate(config, self.processes, self.device, self.frame_pixels)

    def has_room(self, config: Config) -> bool:
        """Whether a step fits, with the margin left free."""
        return self.needs(config).total <= (1 - MARGIN) * self.memory


def in_parts(config: Config, accumulate: int) -> Config:
    """The same step in another number of parts."""
    return replace(config, optim=replace(config.optim, accumulate=accumulate))


def possible_parts(config: Config, processes: int) -> list[int]:
    """Numbers of parts that give every process equally many videos of every part.

    >>> possible_parts(Config(), 1), possible_parts(Config(), 4)
    ([1, 2, 4, 8, 16, 32, 64, 128, 256], [1, 2, 4, 8, 16, 32, 64])
    """
    own = config.optim.batch // processes
    return [parts for parts in range(1, own + 1) if config.optim.batch % (processes * parts) == 0]


def fewest_parts(config: Config, place: Place, above: int = 0) -> int | None:
    """The smallest number of parts, larger than `above`, that fits; none where a single video does not.

    Parts of whole groups of masks come first: all of them have the same shapes, which is what compiles well.
    """
    batch, group = config.optim.batch, config.masking.group
    fitting = [
        parts
        for parts in possible_parts(config, place.processes)
        if parts > above and place.has_room(in_parts(config, parts))
    ]
    whole = [parts for parts in fitting if batch // (place.processes * parts) % group == 0]
    return min(whole or fitting, default=None)


def largest_part(config: Config, place: Place) -> int:
    """The largest number of videos that a process could compute at a time, in whole groups where they fit."""

    def has_room(videos: int) -> bool:
        optim = replace(config.optim, batch=videos * place.processes, accumulate=1)
        return place.has_room(replace(config, optim=optim))

    unit = config.masking.group if has_room(config.masking.group) else 1
    low, high = 0, 1  # in units: fits, does not fit
    while has_room(high * unit):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if has_room(middle * unit) else (low, middle)
    return low * unit


def verdict(config: Config, place: Place) -> str:
    """Whether the step fits, and what to do where it does not."""
    optim, there = config.optim, f"{place.memory / GIB:.1f} GiB"
    kept = f"{MARGIN:.0%} kept free"
    needs = f"{place.needs(config).total / GIB:.1f} of {there}"
    if place.has_room(config):
        most = largest_part(config, place)
        each = " in each process" if place.processes > 1 else ""
        return (
            f"fits: batch {optim.batch} in {_parts(optim.accumulate)} ({needs}, {kept}; "
            f"up to {most:,} {config.source} at a time would fit{each})"
        )
    refused = f"does not fit: batch {optim.batch} in {_parts(optim.accumulate)} ({needs}, {kept})"
    parts = fewest_parts(config, place, above=optim.accumulate)
    if parts is None:
        smaller = "a smaller encoder (--vit.dim, --vit.depth), fewer --views.num-local or --head.prototypes"
        return f"{refused}, nor does any other number of parts: use {smaller}, or more memory"
    taken = place.needs(in_parts(config, parts)).total / GIB
    own = optim.batch // (place.processes * parts)
    return (
        f"{refused}; {own} {config.source} at a time would ({taken:.1f} GiB): add --optim.accumulate {parts}"
    )


def advice(config: Config, place: Place) -> str:
    """What to try after a step ran out of memory, as the end of a sentence."""
    parts = fewest_parts(config, place, above=config.optim.accumulate)
    if parts is None:
        return "a smaller --optim.batch, a smaller encoder or fewer --views.num-local"
    taken = place.needs(in_parts(config, parts)).total / GIB
    own = config.optim.batch // (place.processes * parts)
    return f"--optim.accumulate {parts} ({own} {config.source} at a time, about {taken:.1f} GiB)"


def _parts(count: int) -> str:
    return "1 part" if count == 1 else f"{count} parts"


def free_memory(device: torch.device) -> float:
    """Bytes that this process could have: of the GPU, what it has of it included, or of the machine."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return float(free + torch.cuda.memory_reserved(device))
    return min([_available(), *_container_limit()])


def _available() -> float:
    """Memory of the machine that could be had without swapping; all of it where only that is known."""
    if sys.platform == "linux":
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return 1024.0 * int(line.split()[1])
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _container_limit() -> list[float]:
    """What a container (cgroup v2) leaves, where it has a limit."""
    group = Path("/sys/fs/cgroup")
    try:
        most, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        cached = int(stat.get("inactive_file", 0))  # files that were read: given back when it is needed
    except (OSError, ValueError):  # no such file, or the word "max": no limit
        return []
    return [float(most - used + cached)]
