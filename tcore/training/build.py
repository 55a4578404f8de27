"""From settings to the objects that a run is made of."""

from functools import partial

import torch

from tcore.config import Compile, Config
from tcore.data import render
from tcore.model.fused import PLAIN, Kernels
from tcore.model.heads import ProjectionHead
from tcore.model.matching import PatchMatchingModule
from tcore.model.tcore import TCoRe
from tcore.model.vit import Block, build_vit, run_block
from tcore.training.optim import Optimizer, Schedule


def build_model(config: Config) -> TCoRe:
    """The networks of a run, initialized from its seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        backbone = build_vit(config.vit, config.views.global_size)
        head = ProjectionHead(
            dim=config.vit.dim,
            hidden=config.head.hidden,
            bottleneck=config.head.bottleneck,
            num_prototypes=config.head.prototypes,
            train_gains=config.head.train_gains,
        )
        match = None if config.auxiliary == "none" else build_matching(config)
    return TCoRe(
        backbone,
        head,
        match,
        form=config.loss.form,
        targets=config.teacher.targets,
        student_temperature=config.loss.student_temperature,
        center_momentum=config.teacher.center_momentum,
        auxiliary_drop_path=config.vit.auxiliary_drop_path,
        koleo_global=config.loss.koleo_global,
    )


def build_matching(config: Config) -> PatchMatchingModule:
    """The patch matching module of a run."""
    matching = config.matching
    return PatchMatchingModule(
        dim=config.vit.dim,
        num_heads=matching.num_heads,
        gain=matching.gain,
        num_blocks=matching.num_blocks,
        temperature=matching.temperature,
    )


def compile_model(model: TCoRe, *, fixed_shapes: bool = True, sharded: bool = False) -> None:
    """Compile what takes the time: blocks and matching module; what is random stays outside the graphs.

    Their shapes are few, and fixed where each process has whole groups of masks. The number of masked
    patches is not: the losses have their own kernels.
    """
    import torch._dynamo  # takes seconds

    # Replicas gather gradients from hooks of their own; cutting graphs at their buckets would gain nothing.
    torch._dynamo.config.optimize_ddp = False
    # Up to seven graphs serve a step: four kinds of crops and three ends of the student; torch allows eight.
    torch._dynamo.config.recompile_limit = 16
    dynamic = False if fixed_shapes else None
    if sharded:
        # A block is put together by hooks around its forward, which must stay outside the graph.
        forward = torch.compile(Block.forward, dynamic=dynamic)
        for network in (model.student, model.teacher):
            for block in network.backbone.blocks:
                block.forward = partial(forward, block)  # type: ignore[arg-type]
    else:
        run = torch.compile(run_block, dynamic=dynamic)
        model.student.backbone.run_block = model.teacher.backbone.run_block = run
    if model.match is not None:
        model.match.forward = torch.compile(model.match.forward, dynamic=dynamic)  # type: ignore[method-assign]
    if next(model.parameters()).is_cuda:
        model.kernels = loss_kernels()


def loss_kernels() -> Kernels:
    """The losses' kernels for a GPU, or the plain ones where Triton is not there."""
    try:
        from tcore.model import fused_triton
    except ImportError:
        return PLAIN
    return Kernels(fused_triton.row_stats, fused_triton.row_gradients)


def compile_render(device: torch.device) -> render.Kernels:
    """The pixel work that a compiler or a kernel of our own makes faster."""
    matrix = torch.compile(render.resampling_matrix, dynamic=True)
    if device.type == "cuda":
        try:
            from tcore.data.photometry_triton import colors
        except ImportError:
            return render.Kernels(matrix)
        return render.Kernels(matrix, colors)
    return render.Kernels(matrix)


def compiles(wish: Compile, device: torch.device) -> bool:
    """Whether a run is compiled: auto on CUDA, where it pays after a minute."""
    return wish == "on" or (wish == "auto" and device.type == "cuda")


def build_optimizer(model: TCoRe, config: Config) -> Optimizer:
    """AdamW over the trained parts of a model."""
    optim = config.optim
    return Optimizer(
        model.parts(),
        depth=config.vit.depth,
        clip=optim.clip,
        betas=optim.betas,
        eps=optim.eps,
        layer_decay=optim.layer_decay,
        patch_embed_lr=optim.patch_embed_lr,
    )


def build_schedule(config: Config, steps_per_epoch: int) -> Schedule:
    """The schedules of a run; given in steps, warm-ups are fractions of it."""
    optim, teacher = config.optim, config.teacher
    if optim.steps is None:
        num_steps = optim.epochs * steps_per_epoch
        warmup_steps = optim.warmup_epochs * steps_per_epoch
        temperature_steps = teacher.temperature_epochs * steps_per_epoch
    else:
        num_steps = optim.steps
        warmup_steps, temperature_steps = round(0.05 * num_steps), round(0.075 * num_steps)
    return Schedule(
        num_steps=num_steps,
        warmup_steps=warmup_steps,
        lr=optim.peak_lr,
        matching_lr=optim.peak_lr * optim.matching_lr,
        end_lr=optim.end_lr,
        weight_decay=optim.weight_decay,
        momentum=teacher.momentum,
        teacher_temperature=teacher.temperature,
        temperature_steps=temperature_steps,
        frozen_steps=optim.freeze_last_layer_epochs * steps_per_epoch,
        frozen_backbone_steps=optim.freeze_backbone_steps,
    )
