"""Several processes, started by torchrun, share the clips of an evaluation."""

import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# A process that is done waits for the others this long; one that has come, so many seconds.
PATIENCE = timedelta(hours=12)
COMING = 600.0


def join() -> tuple[int, int]:
    """Which process this is, and of how many; without torchrun there is one."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count > 1 and not dist.is_initialized():
        from tcore.training.meeting import meet

        rank = int(os.environ["RANK"])
        store = meet(rank, count, COMING)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=PATIENCE)
    return (dist.get_rank(), count) if count > 1 else (0, 1)


def own_device() -> str:
    """The GPU of this process where there is one, otherwise the CPU."""
    if not torch.cuda.is_available():
        return "cpu"
    return f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % torch.cuda.device_count()}"


def deal(costs: Sequence[int], count: int) -> list[list[int]]:
    """Items for each process so that all take about as long: the largest first, to who has least.

    >>> deal([5, 1, 4, 3], 2)
    [[0, 1], [2, 3]]
    """
    hands: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        least = loads.index(min(loads))
        hands[least].append(item)
        loads[least] += costs[item]
    return [sorted(hand) for hand in hands]


def gather(values: dict[str, Any]) -> dict[str, Any]:
    """What all processes have found."""
    if not dist.is_initialized():
        return values
    found: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, values)
    return {name: value for each in found for name, value in each.items()}


def leave() -> None:
    """Part from the other processes when all is done; one of several ends here, with exit code 0."""
    if dist.is_initialized():
        dist.barrier()
        sys.stdout.flush()
        sys.stderr.flush()
        # Threads of PyTorch's engine may outlive the interpreter's end, which then aborts: leave at once.
        os._exit(0)
