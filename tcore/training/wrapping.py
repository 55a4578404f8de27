"""The method on its device: compiled, and over several processes in torch's wrappers."""

import inspect
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tcore.config import Compile
from tcore.data import render
from tcore.device import world
from tcore.errors import InputError
from tcore.methods.method import Method
from tcore.model.attention import Attention, FastAttention
from tcore.model.fused import PLAIN, Kernels
from tcore.model.vit import Block, Mlp, run_block
from tcore.training import distributed

COMPILED = "TORCHINDUCTOR_CACHE_DIR"


def keep_compiled() -> None:
    """Keep compiled kernels in the user's cache: the first step of the next run comes sooner.

    By default PyTorch keeps them in a temporary folder, which containers and restarts empty.
    """
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tcore" / "compiled"
        cache.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # no home, or none to write to: PyTorch's own choice
        return
    if os.access(cache, os.W_OK):
        os.environ.setdefault(COMPILED, str(cache))


def compile_method(method: Method, *, fixed_shapes: bool = True, sharded: bool = False) -> None:
    """Compile what takes the time: blocks and further modules; what is random stays outside the graphs.

    Their shapes are few, and fixed where the method says so. The number of masked patches is not: the
    losses have their own kernels.
    """
    keep_compiled()
    # Replicas gather gradients from hooks of their own; cutting graphs at their buckets would gain nothing.
    torch._dynamo.config.optimize_ddp = False
    # Up to seven graphs serve a step: four kinds of crops and three ends of the student; torch allows eight.
    torch._dynamo.config.recompile_limit = 16
    dynamic = False if fixed_shapes else None
    if sharded:
        # A block is put together by hooks around its forward, which must stay outside the graph.
        forward = torch.compile(Block.forward, dynamic=dynamic)
        for backbone in method.backbones():
            for block in backbone.blocks:
                block.forward = partial(forward, block)  # type: ignore[arg-type]
    else:
        run = torch.compile(run_block, dynamic=dynamic)
        for backbone in method.backbones():
            backbone.run_block = run
    for module in method.compiled():
        module.forward = torch.compile(module.forward, dynamic=dynamic)
    if next(method.parameters()).is_cuda:
        read_rows_once()
        method.kernels = loss_kernels()
        if not sharded:
            use_block_kernels(method)


def read_rows_once() -> None:
    """Let the compiler hold whole rows in a program, where this torch can be told."""
    import torch._inductor.config  # takes seconds

    if hasattr(torch._inductor.config, "inductor_choices_class"):
        from tcore.training.one_pass import OnePass  # imports the compiler

        torch._inductor.config.inductor_choices_class = OnePass


def use_block_kernels(method: Method, attention: bool = True, mlp: bool = True) -> None:
    """Let the blocks of all encoders use our kernels for a GPU, or do without, where Triton is not there."""
    try:
        from tcore.model import attention_triton, gelu_triton
    except ImportError:
        return
    for backbone in method.backbones():
        for module in backbone.modules():
            if isinstance(module, Attention):
                own = FastAttention(attention_triton.takes, attention_triton.attend)
                module.fast = own if attention else None
            elif isinstance(module, Mlp):
                module.fast = gelu_triton.mlp if mlp else None


def loss_kernels() -> Kernels:
    """The losses' kernels for a GPU, or the plain ones where Triton is not there."""
    try:
        from tcore.model import fused_triton
    except ImportError:
        return PLAIN
    return Kernels(fused_triton.row_stats, fused_triton.row_gradients)


def compile_render(device: torch.device) -> render.Kernels:
    """The pixel work that a compiler or a kernel of our own makes faster."""
    if device.type == "cuda":
        try:
            from tcore.data.photometry_triton import colors
            from tcore.data.resample_triton import resize
        except ImportError:
            pass
        else:
            return render.Kernels(render.resampling_matrix, colors, resize)
    return render.Kernels(torch.compile(render.resampling_matrix, dynamic=True))


def compiles(wish: Compile, device: torch.device) -> bool:
    """Whether a run is compiled: auto on CUDA, where it pays after a minute."""
    return wish == "on" or (wish == "auto" and device.type == "cuda")


def replicate(method: Method) -> nn.Module:
    """Every process holds the whole model; gradients are averaged while the backward pass still runs."""
    if distributed.alone():
        return method
    # Centers are summed by their counts, so the wrapper must leave buffers alone; torch 2.13 renamed that.
    replicas: Any = nn.parallel.DistributedDataParallel
    known = inspect.signature(replicas.__init__).parameters
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    replicated: nn.Module = replicas(method, gradient_as_bucket_view=True, **{buffers: False})
    return replicated


def shard(method: Method) -> nn.Module:
    """Every process holds a share of every parameter; blocks are put together when they are needed."""
    if distributed.alone():
        return method
    from torch.distributed.fsdp import fully_shard  # optional, and takes seconds

    if any(p.requires_grad and not p.numel() for p in method.parameters()):
        raise InputError(
            "runtime.sharding=shard: vit.num_registers=0 leaves this method a weight without elements, which "
            "cannot be shared out; use --runtime.sharding replicate, or --vit.num-registers 4."
        )
    mesh = init_device_mesh(next(method.parameters()).device.type, (world().size,))
    for backbone in method.backbones():
        for block in backbone.blocks:
            fully_shard(block, mesh=mesh)
    fully_shard(method, mesh=mesh)
    return method


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
    from torch.distributed.tensor import distribute_tensor  # optional, and takes seconds

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
