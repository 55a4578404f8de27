"""Several processes, started by torchrun, train as one: every collective of training is here.

On one process all of them are identities. Losses are divided by counts of the whole step, so what the
processes have adds up: losses, centers and gradients are sums. DistributedDataParallel and fully_shard
average gradients instead; the loss is therefore multiplied by the number of processes before `backward`.
"""

import itertools
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from tcore.device import World, world
from tcore.errors import InputError, PeerError
from tcore.model.peers import ALONE, Peers
from tcore.rendezvous import meet
from tcore.training.guard import Guard, explaining, reached

T = TypeVar("T")

# What a collective waits at most; who is `guarded` is named long before.
LAST_RESORT = timedelta(hours=12)
GPU_BACKEND = "cpu:gloo,cuda:nccl"

MET: list[Any] = []  # the store at which this process has met the others
RUNS = itertools.count()  # the same in every process


def alone() -> bool:
    """Whether there is nobody to exchange anything with."""
    return world().size == 1


def join(device: str, patience: float) -> World:
    """Join the other processes, once; GPUs talk by NCCL, everything else by gloo."""
    rank, size, _, _ = world()
    if not alone() and not dist.is_initialized():
        on_gpus = not device.startswith("cpu") and torch.cuda.is_available()
        backend, store = GPU_BACKEND if on_gpus else "gloo", _meeting_place(patience)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=LAST_RESORT)
    return world()


@contextmanager
def guarded(device: str, patience: float) -> Iterator[Guard | None]:
    """Join the other processes; one that hangs or is gone from now on is named, and the others end."""
    rank, size, _, _ = world()
    if alone():
        yield None
        return
    patience = min(max(1.0, patience), 1e7)  # nobody has looked at the settings yet
    # The thread has a connection of its own to the store; every run has its own keys.
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
    """The store of all processes, once all have come to it."""
    if not MET:
        own = dist.is_initialized()  # whoever called us has met the others before
        MET.append(dist.distributed_c10d._get_default_store() if own else meet(*world()[:2], patience))
    return MET[0]


# What one process knows, and all are to know.


def on_first(function: Callable[[], T]) -> T:
    """Do something on the first process alone; all get its result, or its error."""
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
    """Do something on the first process alone, which alone keeps the result; all get its error."""
    kept: list[T] = []
    on_first(lambda: kept.append(function()))
    return kept[0] if kept else None


def together(function: Callable[[], T]) -> T:
    """Do something on every process; where it fails on one, all get the error."""
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
    """Small things of all processes, in their order."""
    if alone():
        return [value]
    found: list[Any] = [None] * world().size
    reached()
    dist.all_gather_object(found, value)
    return found


def _raise_first(errors: Sequence[Exception | None]) -> None:
    """Raise the first error there is: on the first process to be read, on the others to stop with it."""
    for rank, error in enumerate(errors):
        if error is None:
            continue
        if not world().first:
            raise PeerError(str(error), getattr(error, "exit_code", 2))
        if rank and isinstance(error, InputError):
            raise type(error)(f"process {rank} of {len(errors)}: {error}")
        raise error


def agree(name: str, value: str) -> str:
    """A value that must be the same everywhere, such as what the videos are."""
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
    """A tensor that is still to come."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def from_first(read: Callable[[], Any]) -> Any:
    """Nested state that the first process reads, on every process; tensors travel one by one."""
    if alone():
        return read()
    held: list[Tensor] = []

    def outline(tensor: Tensor) -> Outline:
        held.append(tensor.cpu().contiguous())
        return Outline(tuple(tensor.shape), tensor.dtype)

    def receive(coming: Outline) -> Tensor:
        tensor = held.pop(0) if held else torch.empty(coming.shape, dtype=coming.dtype)
        reached()
        dist.broadcast(tensor, src=0)
        return tensor

    plan = on_first(lambda: _replace(read(), Tensor, outline))
    return _replace(plan, Outline, receive)


def _replace(state: Any, kind: type, by: Callable[[Any], Any]) -> Any:
    """Nested state with everything of a kind replaced."""
    if isinstance(state, kind):
        return by(state)
    if isinstance(state, Mapping):
        return {name: _replace(value, kind, by) for name, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(_replace(value, kind, by) for value in state)
    return state


# Numbers of a step.


def add_up(tensors: Iterable[Tensor]) -> None:
    """Sum tensors over all processes, in place and in one go."""
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


def anyone(says: bool) -> bool:
    """Whether any process says so: what one is asked to do, such as to stop, all must do at the same step."""
    return largest([float(says)])[0] > 0


def all_rows(x: Float[Tensor, "n d"]) -> Float[Tensor, "m d"]:
    """Rows of all processes, however many each has; without gradient."""
    if alone():
        return x
    counts = gather_objects(len(x))
    padded = torch.cat([x, x.new_zeros(max(counts) - len(x), x.shape[1])])
    found = [torch.empty_like(padded) for _ in counts]
    reached()
    dist.all_gather(found, padded)
    return torch.cat([rows[:count] for rows, count in zip(found, counts, strict=True)])


class GatherRows(torch.autograd.Function):
    """Rows of all processes, equally many of each; gradients go back to where the rows came from."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """All rows, in the order of the processes."""
        found = [torch.empty_like(x) for _ in range(world().size)]
        dist.all_gather(found, x.contiguous())
        return torch.cat(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """What all processes together ask of our own rows."""
        total = gradients[0].contiguous().clone()
        dist.all_reduce(total)
        return total.chunk(world().size)[world().rank]


def peers() -> Peers:
    """What the model needs of the other processes."""
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
    """A tensor as one process knows it: a sharded one is put together."""
    if not hasattr(tensor, "full_tensor"):
        return tensor
    reached()
    whole: Tensor = tensor.full_tensor()
    return whole


def whole(state: Any) -> Any:
    """Nested state with sharded tensors put together in memory; other processes than the first get none."""

    def gather(tensor: Tensor) -> Tensor | None:
        if not hasattr(tensor, "full_tensor"):
            return tensor
        found = plain(tensor).detach()
        return found.cpu() if world().first else None

    return _replace(state, Tensor, gather)
