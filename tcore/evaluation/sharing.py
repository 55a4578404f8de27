"""Several processes, started by torchrun, share the clips of an evaluation."""

import os
import sys
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from tcore.device import world
from tcore.rendezvous import meet

JOIN = 600.0  # seconds that the processes wait for one another to start
WAIT = timedelta(hours=12)  # how long a process that has finished waits for the others


def join() -> tuple[int, int]:
    """Which process this is, and of how many; without torchrun there is one."""
    here = world()
    if here.size > 1 and not dist.is_initialized():
        store = meet(here.rank, here.size, JOIN)
        dist.init_process_group("gloo", store=store, rank=here.rank, world_size=here.size, timeout=WAIT)
    return here.rank, here.size


def gather(values: dict[str, Any]) -> dict[str, Any]:
    """The values of all processes together."""
    found: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, values)
    return {name: value for each in found for name, value in each.items()}


def leave() -> None:
    """Wait until all processes have finished; one of several ends here, with exit code 0."""
    if dist.is_initialized():
        dist.barrier()
        sys.stdout.flush()
        sys.stderr.flush()
        # Threads of PyTorch's engine may outlive the interpreter's end, which then aborts: exit at once.
        os._exit(0)
