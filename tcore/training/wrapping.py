"""The model over several processes, in torch's wrappers, which exchange weights and gradients themselves."""

import inspect
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from tcore.device import world
from tcore.model.tcore import TCoRe
from tcore.training import distributed


class NamedLosses(nn.Module):
    """A model whose losses come as a dict, in which torch's wrappers find the tensors."""

    def __init__(self, model: TCoRe) -> None:
        super().__init__()
        self.model = model

    def forward(self, *arguments: Any) -> dict[str, Tensor]:
        """The losses by name."""
        return self.model(*arguments).named()


def replicate(model: TCoRe) -> nn.Module:
    """Every process holds the whole model; gradients are averaged while the backward pass still runs."""
    wrapped = NamedLosses(model)
    if distributed.alone():
        return wrapped
    # Centers are summed by their counts, so the wrapper must leave buffers alone; torch 2.13 renamed that.
    replicas: Any = nn.parallel.DistributedDataParallel
    known = inspect.signature(replicas.__init__).parameters
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    replicated: nn.Module = replicas(wrapped, gradient_as_bucket_view=True, **{buffers: False})
    return replicated


def shard(model: TCoRe) -> nn.Module:
    """Every process holds a share of every parameter; blocks are put together when they are needed."""
    wrapped = NamedLosses(model)
    if distributed.alone():
        return wrapped
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    kind = next(model.parameters()).device.type
    mesh = init_device_mesh(kind, (world().size,))
    for network in (model.student, model.teacher):
        for block in network.backbone.blocks:
            fully_shard(block, mesh=mesh)
    fully_shard(wrapped, mesh=mesh)
    return wrapped


def before_last(wrapped: nn.Module) -> AbstractContextManager[Any]:
    """For all parts of a step but the last: replicas keep their gradients to themselves.

    Shards do not: each holds but its share of the gradients, which is what saves the memory.
    """
    if isinstance(wrapped, nn.parallel.DistributedDataParallel):
        return wrapped.no_sync()
    return nullcontext()


def like(full: Tensor, own: Any) -> Tensor:
    """A whole tensor in the form of our own: a share of it, where that is sharded."""
    if not hasattr(own, "full_tensor"):
        return full
    from torch.distributed.tensor import distribute_tensor

    # Every process has all of it: no need to send anything.
    return distribute_tensor(full.to(own.device), own.device_mesh, own.placements, src_data_rank=None)


def load_weights(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy whole weights into a module, which may be sharded."""
    own = module.state_dict()
    module.load_state_dict({name: like(x, own.get(name)) for name, x in state.items()})


def load_moments(adamw: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Give an optimizer back its whole state; its parameters may be sharded."""
    parameters = [p for group in adamw.param_groups for p in group["params"]]
    moments = {
        index: {name: x if name == "step" else like(x, parameters[index]) for name, x in values.items()}
        for index, values in state["state"].items()
    }
    adamw.load_state_dict({**state, "state": moments})
