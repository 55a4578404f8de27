"""How much memory a step takes at its peak, from the settings alone.

What the backward pass needs was counted tensor by tensor: those that autograd keeps of a block, of the
matching module and of the head, eager and compiled, in fp32 and bf16. Tests count them again.
"""

import math
from typing import NamedTuple

import torch

from tcore.config import Config
from tcore.data import render
from tcore.device import choose_dtype
from tcore.model import fused
from tcore.training.build import compiles

GIB = 2**30
FRAME_PIXELS = 256 * 340
"""Pixels of a frame where nothing better is known: what `tcore prepare` makes of most videos."""


class Kept(NamedTuple):
    """Bytes that autograd keeps of a token for each channel of the encoder."""

    stream: float
    """Of a block, for every token: the residual stream that it begins with."""
    branches: float
    """Of a block, for tokens whose residuals are computed: all but a share drop_path of the samples."""
    last: float
    """Of the last block, for a token of which keys and values alone are made."""
    match: float
    """Of a matching block, for every patch of a masked crop and each side."""


# By (compiled, bf16). Compiled, a block keeps the stream and computes the rest of it again.
KEPT = {
    (True, True): Kept(4, 32, 14, 36),
    (True, False): Kept(4, 64, 18, 60),
    (False, True): Kept(0, 40, 14, 42),
    (False, False): Kept(0, 72, 18, 60),
}
# What the losses hold at once, as a multiple of a chunk of outputs: in fused_triton.py, where gradients take
# the place of outputs; in plain torch, where both are fp32 and have copies, by (two sides compared, bf16).
TRITON_CHUNKS = 1.4
PLAIN_CHUNKS = {(False, False): 4.6, (True, False): 6.1, (False, True): 9.8, (True, True): 10.4}
# Copies of the prototypes, student's and teacher's, and their gradient, in bytes for each weight.
PROTOTYPE_BYTES = 20
# Bytes per token and channel that the gradient of a block takes beside what it frees.
GRADIENT_BYTES = {True: 16, False: 24}
# Bytes per token and channel of a block without gradient: teacher and auxiliary branch.
FORWARD_BYTES = {True: 24, False: 40}
# Cutting views out of frames: pixels of its chunk as floats, their rows, and what is between two passes.
RENDER_COPIES = 2.5
# Libraries' workspaces and small tensors. The process's own share of a GPU (CUDA context, about 0.5 GiB) and
# gaps between allocations are not in it: they are what the margin of a plan is for. On a CPU: the interpreter
# with its libraries, as one machine counted it.
GPU_OVERHEAD, CPU_OVERHEAD = 0.2 * GIB, 0.45 * GIB


class Memory(NamedTuple):
    """Bytes at the peak of a step in one process, by what they are for."""

    state: float
    """Weights, gradients, AdamW's two moments, teacher."""
    activations: float
    """What the backward pass needs of encoder, matching module and head."""
    losses: float
    """Rows of K outputs that exist at a time, prototypes, targets that are held."""
    views: float
    """Views, the frames they come from, and work in passing where that is the peak."""
    overhead: float

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self)

    def in_gib(self) -> str:
        """The total and its parts, for a person."""
        parts = ", ".join(f"{name} {value / GIB:.2f}" for name, value in self._asdict().items())
        return f"{self.total / GIB:.2f} GiB ({parts})"


class _Sizes(NamedTuple):
    """What there is of everything in one part of a step in one process."""

    samples: int
    masked: float
    """Global crops that carry a mask."""
    holes: float
    sides: int
    large: int
    """Patches of a global crop."""
    small: int
    global_tokens: int
    local_tokens: int
    """Tokens of all global and of all local crops."""
    working: int
    """Bytes of a number that the networks compute with."""


def estimate(
    config: Config, processes: int = 1, device: str = "cuda", frame_pixels: int = FRAME_PIXELS
) -> Memory:
    """Memory of one process at the peak of a step; compared with measurements in docs/performance.md.

    >>> from tcore import recipe
    >>> [round(estimate(recipe(name)).total / GIB, 1) for name in ("vits16-k400", "vitb16-k400")]
    [31.9, 32.5]
    """
    on_gpu = torch.device(device).type == "cuda"
    sizes = _sizes(config, processes, device)
    compiled = compiles(config.runtime.compile, torch.device(device))
    bf16 = sizes.working == 2
    state = _state(config, processes)
    blocks, others = _activations(config, sizes, KEPT[compiled, bf16], compiled)
    losses, held = _losses(config, sizes, compiled and on_gpu, on_gpu)
    views = _views(config, sizes, frame_pixels)
    # The peak is where the gradients begin, at the losses; or, with little of those, in the blocks.
    gradient = GRADIENT_BYTES[bf16] * config.vit.dim
    at_losses = blocks + others + losses
    in_local = blocks + gradient * sizes.local_tokens
    in_global = blocks * sizes.global_tokens / (sizes.global_tokens + sizes.local_tokens)
    in_global += gradient * sizes.global_tokens
    deepest = max(at_losses, in_local + held, in_global + held)
    # With very little of all that, it is where views are made or where the teacher looks at them.
    passing = max(
        _passing(config, sizes, on_gpu, frame_pixels),
        held * 7 if config.teacher.targets == "sinkhorn" else 0.0,
    )
    activations = max(blocks + others, deepest - losses)
    return Memory(
        state,
        activations,
        losses,
        views + max(0.0, passing - activations - losses),
        GPU_OVERHEAD if on_gpu else CPU_OVERHEAD,
    )


def _sizes(config: Config, processes: int, device: str) -> _Sizes:
    views, vit, masking = config.views, config.vit, config.masking
    samples = math.ceil(config.optim.batch / (processes * config.optim.accumulate))
    large, small = ((size // vit.patch_size) ** 2 for size in (views.global_size, views.local_size))
    masked = 2 * samples * masking.probability
    if (
        samples % masking.group and samples < config.optim.batch
    ):  # a share of a group: some parts have more masked crops than others
        masked = min(2 * samples, masked + 3 * math.sqrt(masked * (1 - masking.probability)))
    extra = 1 + vit.num_registers
    dtype = choose_dtype(config.optim.precision, torch.device(device))
    return _Sizes(
        samples=samples,
        masked=masked,
        holes=masked * large * sum(masking.ratio) / 2,
        sides={"none": 0, "past": 1, "future": 1, "both": 2}[config.auxiliary],
        large=large,
        small=small,
        global_tokens=2 * samples * (large + extra),
        local_tokens=views.num_local * samples * (small + extra),
        working=dtype.itemsize,
    )


def _state(config: Config, processes: int) -> float:
    """Weights, gradients, two moments and the teacher, all fp32; of a sharded model a share of them."""
    count = count_parameters(config)
    state = 4.0 * (4 * count.trained + count.teacher)
    if config.runtime.sharding == "replicate" or processes == 1:
        return state
    # Put together while it is needed: two blocks, and all that is no block, of student and teacher.
    others = count.trained - config.vit.depth * count.block
    return state / processes + 4.0 * (2 * 2 * count.block + 3 * others)


class Parameters(NamedTuple):
    """Numbers of parameters."""

    trained: int
    teacher: int
    block: int
    """Of one block of the encoder."""


def count_parameters(config: Config) -> Parameters:
    """Parameters of the networks, without building them."""
    vit, head, dim = config.vit, config.head, config.vit.dim
    block = 12 * dim**2 + 15 * dim
    patches = (config.views.global_size // vit.patch_size) ** 2
    # One token for the frame and one for masks, positions of frame and patches, the last norm, the embedding.
    tokens = (1 + 1 + 1 + patches + vit.num_registers + 2) * dim
    backbone = vit.depth * block + tokens + (3 * vit.patch_size**2 + 1) * dim
    projection = (dim + 1) * head.hidden + (head.hidden + 1) * (head.hidden + head.bottleneck)
    prototypes = head.prototypes * (head.bottleneck + 1)
    match = 0 if config.auxiliary == "none" else config.matching.num_blocks * (9 * dim**2 + 15 * dim)
    network = backbone + projection + prototypes
    fixed = 0 if head.train_gains else head.prototypes
    return Parameters(network + match - fixed, network, block)


def _activations(config: Config, sizes: _Sizes, kept: Kept, compiled: bool) -> tuple[float, float]:
    """Bytes kept of the encoder, and of all else."""
    vit, head = config.vit, config.head
    tokens = sizes.global_tokens + sizes.local_tokens
    computed = 1 - vit.drop_path
    statistics = 16 + 4 * vit.num_heads  # of two norms, and one number of each head
    block = tokens * (kept.stream * vit.dim + computed * (kept.branches * vit.dim + statistics))
    if sizes.working == 2:  # the weights in bf16, of each of two compiled passes
        block += 24 * vit.dim**2 * (2 if compiled else 1)
    patches = sizes.samples * (2 * sizes.large + config.views.num_local * sizes.small)
    pixels = patches * 3 * vit.patch_size**2 * sizes.working
    # The last block makes all tokens of masked crops alone, with every residual; of these it keeps a copy.
    whole = sizes.masked * (sizes.large + 1 + vit.num_registers)
    last = whole * ((4 + kept.stream + kept.branches) * vit.dim + statistics)
    last += (tokens - whole) * kept.last * vit.dim
    # The final norm keeps its input; its output is looked at by all that follows.
    encoder = (vit.depth - 1) * block + last + pixels + whole * 8 * vit.dim

    looked_at = sizes.masked * sizes.large
    heads = 8 * config.matching.num_heads
    match = looked_at * sizes.sides * config.matching.num_blocks * (kept.match * vit.dim + heads)
    rows = sizes.samples * (2 + config.views.num_local) + sizes.holes * max(1, sizes.sides)
    project = rows * sizes.working * (4 * head.hidden + vit.dim + 2 * head.bottleneck)
    # Patches of masked crops, of the student and of each side.
    return encoder, match + project + looked_at * 4 * vit.dim * (1 + sizes.sides)


def _losses(config: Config, sizes: _Sizes, triton: bool, on_gpu: bool) -> tuple[float, float]:
    """Bytes at the peak of the losses, and of targets that are held from the teacher on."""
    head, views = config.head, 2 + config.views.num_local
    budget, row = fused.GPU_CHUNK if on_gpu else fused.CPU_CHUNK, head.prototypes * sizes.working
    of_frames = min(budget, row * sizes.samples * (views + 6))
    of_holes = min(budget, row * sizes.holes * (max(1, sizes.sides) + 1))
    if triton:
        at_once = TRITON_CHUNKS * max(of_frames, of_holes)
    else:
        bf16 = sizes.working == 2
        at_once = max(PLAIN_CHUNKS[False, bf16] * of_frames, PLAIN_CHUNKS[sizes.sides == 2, bf16] * of_holes)
    prototypes = PROTOTYPE_BYTES * head.prototypes * head.bottleneck
    held = 0.0
    if config.teacher.targets == "sinkhorn":
        held = 4 * head.prototypes * (2 * sizes.samples + sizes.holes)
    return at_once + prototypes + held, held


def _views(config: Config, sizes: _Sizes, frame_pixels: int) -> float:
    """Bytes of all views, and of the frames that they were cut from."""
    views = config.views
    pixels: float = (
        2 * sizes.samples * views.global_size**2 * (1 if views.fixed_space and views.fixed_time else 2)
    )
    pixels += sizes.samples * views.num_local * views.local_size**2
    pixels += sizes.masked * sizes.sides * views.global_size**2
    frames = 2 + sizes.sides if not views.fixed_time else 1 + sizes.sides
    return 3 * (4 * pixels + frame_pixels * frames * sizes.samples)


def _passing(config: Config, sizes: _Sizes, on_gpu: bool, frame_pixels: int) -> float:
    """Bytes that are needed for a while before the student begins: cutting views, the teacher."""
    views = config.views
    most = max(2, views.num_local, sizes.sides) * sizes.samples
    chunk = min(render.GPU_CHUNK if on_gpu else render.CPU_CHUNK, most * frame_pixels * 3 * 4)
    pixels = RENDER_COPIES * chunk + 3 * 4 * most * max(views.global_size, views.local_size) ** 2
    return max(pixels, FORWARD_BYTES[sizes.working == 2] * config.vit.dim * sizes.global_tokens)
