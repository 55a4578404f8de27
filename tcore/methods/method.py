"""The interface between a training method and the trainer; and schedules."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tcore.methods.health import Health
from tcore.model.fused import PLAIN, Kernels
from tcore.model.losses import ALONE, Peers
from tcore.model.vit import VisionTransformer

HEALTH_ROWS = 256  # rows of each kind that the health figures are computed from, over all processes


# Schedules as functions of the step.


def linear(step: int, start: float, end: float, num_steps: int) -> float:
    """Value `step` of `num_steps` evenly spaced ones from start to end, both included."""
    return start if num_steps < 2 else start + (end - start) * step / (num_steps - 1)


def cosine(step: int, start: float, end: float, num_steps: int) -> float:
    """Half a cosine from start toward an end that is not quite reached."""
    return end + (start - end) / 2 * (1 + math.cos(math.pi * step / num_steps))


def warmup_cosine(
    step: int, peak: float, end: float, warmup_steps: int, num_steps: int, *, peak_once: bool = False
) -> float:
    """Linear from 0 to the peak, then a cosine that starts at the peak (again, unless `peak_once`)."""
    if step < warmup_steps:
        return linear(step, 0.0, peak, warmup_steps + peak_once)
    return cosine(step - warmup_steps, peak, end, num_steps - warmup_steps)


def warmup_linear(step: int, start: float, end: float, warmup_steps: int) -> float:
    """Linear over the warm-up, then constant."""
    return linear(step, start, end, warmup_steps) if step < warmup_steps else end


@dataclass(frozen=True)
class Length:
    """How long a run is: given in epochs, or in steps, of which warm-ups are then fixed shares."""

    num_steps: int
    steps_per_epoch: int
    in_epochs: bool = True

    def warmup(self, epochs: int, share: float) -> int:
        """Steps of a warm-up of this many epochs, or of this share of a run that is given in steps."""
        return epochs * self.steps_per_epoch if self.in_epochs else round(share * self.num_steps)


# The method.


@dataclass(frozen=True)
class Part:
    """Trained parameters with one learning-rate factor, whose gradients are clipped together."""

    parameters: list[tuple[str, nn.Parameter]]
    """By their names within the part."""
    lr: float = 1.0
    """Factor on the peak learning rate."""
    last_layer: tuple[str, ...] = ()
    """Prefixes of the names that `optim.freeze_last_layer_epochs` applies to; empty: none."""
    undecayed: tuple[str, ...] = ()
    """Names without weight decay, beside biases, norms and LayerScale."""


class Method(nn.Module):
    """A training method: what it minimizes, and which encoder comes out.

    The trainer knows nothing else of it. What a batch is, is between the method and its `Sampling`.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        super().__init__()
        self.weights = dict(weights)
        """Weights of the losses by their names."""
        self.peers: Peers = ALONE
        """What it can ask of the other processes."""
        self.kernels: Kernels = PLAIN
        """Kernels for the losses; the trainer sets faster ones on a GPU."""
        self.observing, self.health_rows = True, HEALTH_ROWS
        self.health_sample: dict[str, Tensor] = {}
        """Where `observing`: a few detached rows of the last forward pass, by name."""

    def forward(
        self, batch: Any, values: Mapping[str, float], generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """Losses of (a part of) a step by name: shares of the step's sums, in the order they are logged."""
        raise NotImplementedError

    def total(self, losses: Mapping[str, Tensor]) -> Tensor:
        """The number that is minimized."""
        return torch.stack([self.weights[name] * loss for name, loss in losses.items()]).sum()

    def values(self, step: int, length: Length) -> dict[str, float]:
        """The method's own schedules at a step, by the names that are logged."""
        return {}

    def parts(self) -> dict[str, Part]:
        """Trained parameters by part; the encoder's part is called `backbone`."""
        raise NotImplementedError

    def sums(self) -> list[Tensor]:
        """Tensors that the processes of a step add up before it ends (centers)."""
        return []

    def finish_step(self, values: Mapping[str, float]) -> None:
        """Update what moves after the optimizer: teacher, centers, queues."""

    def encoder(self) -> VisionTransformer:
        """What is exported and scored."""
        raise NotImplementedError

    def backbones(self) -> list[VisionTransformer]:
        """Every encoder of the method: they start from `--init`, and are compiled and sharded by block."""
        return [self.encoder()]

    def compiled(self) -> list[nn.Module]:
        """Further modules that are worth compiling as a whole."""
        return []

    live: tuple[str, ...] = ()
    """Values that `forward` reads as numbers, which may be tensors."""
    switches: tuple[str, ...] = ()
    """Values that `forward` decides by; it reads no others."""
    graphed_health = True
    """Whether a step that is observed can be recorded as a CUDA graph too, like any other."""

    def in_fixed_shapes(self, batch: Any) -> Any:
        """The same batch in the shapes that all steps have, for a CUDA graph; one process has all of it."""
        return batch

    def fixed_shapes(self, videos: int, batch: int) -> bool:
        """Whether all parts of this many videos, of a step of `batch`, have tensors of the same shapes."""
        return True

    def health(self, rows: Mapping[str, Tensor], losses: Mapping[str, float]) -> Health:
        """Whether it learns, from the health samples of a whole step and its losses."""
        raise NotImplementedError

    def extras(self) -> dict[str, nn.Module]:
        """Further modules that a run exports, by the name of their file."""
        return {}

    def warnings(self, videos: int) -> list[str]:
        """Lines about settings without effect, for parts of this many videos."""
        return []


def named_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The trained parameters of a module."""
    return [(name, p) for name, p in module.named_parameters() if p.requires_grad]


def own_shares(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """What this process holds of each parameter: all of it, unless it is sharded."""
    return [p.to_local() if hasattr(p, "to_local") else p for p in parameters]


def follow(teacher: Iterable[nn.Parameter], student: Iterable[nn.Parameter], momentum: float) -> None:
    """Move some parameters toward others."""
    torch._foreach_lerp_(own_shares(teacher), own_shares(student), 1 - momentum)


def some_rows(count: int, most: int) -> slice:
    """Evenly spaced rows: neighboring patches of one frame say little about a batch."""
    stride = max(1, count // most)
    return slice(0, min(count, stride * most), stride)


def drop_path_seed(seed: int, step: int, part: int, rank: int = 0) -> int:
    """The seed from which a process draws what is random inside the network, for a part of a step."""
    stream = (seed, 4, step, part, *((rank,) if rank else ()))
    return int(np.random.SeedSequence(stream).generate_state(1, np.uint64)[0]) >> 1
