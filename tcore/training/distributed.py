"""Training with several processes, started by torchrun: all collectives are in this file.

With one process each of them is the identity. Losses are divided by the counts of the whole step, so losses,
centers and gradients of a step are sums over the processes. DistributedDataParallel and fully_shard average
gradients; the loss is therefore multiplied by the number of processes before `backward`.
"""

import itertools
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from torch.utils._pytree import tree_map_only

from tcore.device import World, world
from tcore.errors import InputError, PeerError
from tcore.model.losses import ALONE, Peers
from tcore.rendezvous import meet
from tcore.training.guard import Guard, explaining, reached

T = TypeVar("T")

# Time-out of collectives; the guard ends a job that hangs long before.
LAST_RESORT = timedelta(hours=12)
GPU_BACKEND = "cpu:gloo,cuda:nccl"

MET: list[Any] = []  # the store that this process shares with the others, once they have met
RUNS = itertools.count()  # numbers the runs of this process; all processes count alike


def alone() -> bool:
    """Whether this is the only process."""
    return world().size == 1


def join(device: str, patience: float) -> World:
    """Join the process group, once; GPUs communicate by NCCL, everything else by gloo."""
    rank, size, _, _ = world()
    if not alone() and not dist.is_initialized():
        on_gpus = not device.startswith("cpu") and torch.cuda.is_available()
        backend, store = GPU_BACKEND if on_gpus else "gloo", _meeting_place(patience)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=LAST_RESORT)
    return world()


@contextmanager
def guarded(device: str, patience: float) -> Iterator[Guard | None]:
    """Join the process group; if a process hangs or dies from now on, the others name it and end."""
    rank, size, _, _ = world()
    if alone():
        yield None
        return
    patience = min(max(1.0, patience), 1e7)  # the settings are not checked yet
    # The guard's thread has its own connection to the store; every run has its own keys.
    guard = Guard(_meeting_place(patience).clone(), f"guard/{next(RUNS)}", rank, size, patience)
    guard.begin()
    ended: BaseException | None = None
    try:
        with explaining(guard):
            join(device, patience)
            yield guard
    except BaseException as error:
        ended = error
        raise
    finally:
        guard.end(ended)


def _meeting_place(patience: float) -> Any:
    """The store that all processes share; waits until all have arrived."""
    if not MET:
        own = dist.is_initialized()  # the caller has created a process group
        MET.append(dist.distributed_c10d._get_default_store() if own else meet(*world()[:2], patience))
    return MET[0]


# Objects.


def on_first(function: Callable[[], T]) -> T:
    """Run a function on the first process only; all processes get its result, or its error."""
    if alone():
        return function()
    box: list[Any] = [None, None]
    if world().first:
        try:
            box[0] = function()
        except (InputError, OSError) as error:
            box[1] = error
    reached()
    dist.broadcast_object_list(box, src=0)
    _raise_first([box[1]])
    result: T = box[0]
    return result


def only_first(function: Callable[[], T]) -> T | None:
    """Run a function on the first process only, and return its result there; all processes get its error."""
    kept: list[T] = []
    on_first(lambda: kept.append(function()))
    return kept[0] if kept else None


def together(function: Callable[[], T]) -> T:
    """Run a function on every process; if it fails on one, all processes raise the error."""
    if alone():
        return function()
    result: Any = None
    error: Exception | None = None
    try:
        result = function()
    except (InputError, OSError) as failed:
        error = failed
    _raise_first(gather_objects(error))
    done: T = result
    return done


def gather_objects(value: T) -> list[T]:
    """A small object of each process, ordered by rank."""
    if alone():
        return [value]
    found: list[Any] = [None] * world().size
    reached()
    dist.all_gather_object(found, value)
    return found


def _raise_first(errors: Sequence[Exception | None]) -> None:
    """Raise the first error: as it is on the first process, which prints it, and silently on the others."""
    for rank, error in enumerate(errors):
        if error is None:
            continue
        if not world().first:
            raise PeerError(str(error), getattr(error, "exit_code", 2))
        if rank and isinstance(error, InputError):
            raise type(error)(f"process {rank} of {len(errors)}: {error}")
        raise error


def agree(name: str, value: str) -> str:
    """Check that a value is the same on all processes, such as the fingerprint of the videos."""
    found = gather_objects((value, socket.gethostname()))
    for rank, (other, host) in enumerate(found):
        if other != found[0][0]:
            raise InputError(
                f"process {rank} on {host} sees another {name} ({other}) than process 0 ({found[0][0]}): "
                "every machine needs the same files under the same path."
            )
    return value


@dataclass(frozen=True)
class Outline:
    """Shape and type of a tensor that is yet to be received."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def from_first(read: Callable[[], Any]) -> Any:
    """Nested state that the first process reads, sent to every process; tensors are sent one by one."""
    if alone():
        return read()
    held: list[Tensor] = []

    def outline(tensor: Tensor) -> Outline:
        held.append(tensor.cpu().contiguous())
        return Outline(tuple(tensor.shape), tensor.dtype)

    def receive(expected: Outline) -> Tensor:
        tensor = held.pop(0) if held else torch.empty(expected.shape, dtype=expected.dtype)
        reached()
        dist.broadcast(tensor, src=0)
        return tensor

    outlines = on_first(lambda: tree_map_only(Tensor, outline, read()))
    return tree_map_only(Outline, receive, outlines)


# Tensors and numbers of a step.


def add_up(tensors: Iterable[Tensor]) -> None:
    """Sum tensors over all processes, in place, with one collective."""
    if alone():
        return
    parts = list(tensors)
    together = torch.cat([part.detach().float().flatten() for part in parts])
    reached()
    dist.all_reduce(together)
    for part, total in zip(parts, together.split([part.numel() for part in parts]), strict=True):
        part.detach().copy_(total.view_as(part))


def largest(values: Sequence[float]) -> list[float]:
    """The largest of each value over all processes."""
    if alone():
        return list(values)
    found = torch.tensor(values, dtype=torch.float64)
    reached()
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.tolist()


def all_rows(x: Float[Tensor, "n d"]) -> Float[Tensor, "m d"]:
    """Rows of all processes, which may have different numbers of them; without gradient."""
    if alone():
        return x
    counts = gather_objects(len(x))
    padded = torch.cat([x, x.new_zeros(max(counts) - len(x), x.shape[1])])
    found = [torch.empty_like(padded) for _ in counts]
    reached()
    dist.all_gather(found, padded)
    return torch.cat([rows[:count] for rows, count in zip(found, counts, strict=True)])


class GatherRows(torch.autograd.Function):
    """Rows of all processes, equally many of each; gradients flow back to the process of each row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """All rows, ordered by rank."""
        found = [torch.empty_like(x) for _ in range(world().size)]
        dist.all_gather(found, x.contiguous())
        return torch.cat(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """The sum of all processes' gradients with respect to this process's rows."""
        total = gradients[0].contiguous().clone()
        dist.all_reduce(total)
        return total.chunk(world().size)[world().rank]


def peers() -> Peers:
    """The collectives that a method needs."""
    if alone():
        return ALONE

    def reduced(operation: Any) -> Callable[[Tensor], Tensor]:
        def reduce(x: Tensor) -> Tensor:
            x = x.clone()
            dist.all_reduce(x, operation)
            return x

        return reduce

    sums, largest = reduced(dist.ReduceOp.SUM), reduced(dist.ReduceOp.MAX)
    return Peers(world().rank, sums, largest, GatherRows.apply, world().size)


# Sharded tensors.


def plain(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded."""
    if not hasattr(tensor, "full_tensor"):
        return tensor
    reached()
    whole: Tensor = tensor.full_tensor()
    return whole


def whole(state: Any) -> Any:
    """Nested state with sharded tensors gathered on the CPU of the first process; the others get None."""

    def gather(tensor: Tensor) -> Tensor | None:
        if not hasattr(tensor, "full_tensor"):
            return tensor
        found = plain(tensor).detach()
        return found.cpu() if world().first else None

    return tree_map_only(Tensor, gather, state)
