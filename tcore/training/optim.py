"""Schedules as functions of the step, parameter groups, clipping and the update itself."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tcore.training import distributed

Part = str  # "backbone", "head" or "match"
Parts = Mapping[Part, Sequence[tuple[str, nn.Parameter]]]


def linear(step: int, start: float, end: float, num_steps: int) -> float:
    """Value `step` of `num_steps` evenly spaced ones from start to end, both included."""
    return start if num_steps < 2 else start + (end - start) * step / (num_steps - 1)


def cosine(step: int, start: float, end: float, num_steps: int) -> float:
    """Half a cosine from start toward an end that is not quite reached."""
    return end + (start - end) / 2 * (1 + math.cos(math.pi * step / num_steps))


def warmup_cosine(step: int, peak: float, end: float, warmup_steps: int, num_steps: int) -> float:
    """Linear from 0 to the peak, then a cosine that starts at the peak again."""
    if step < warmup_steps:
        return linear(step, 0.0, peak, warmup_steps)
    return cosine(step - warmup_steps, peak, end, num_steps - warmup_steps)


def teacher_temperature(step: int, start: float, end: float, warmup_steps: int) -> float:
    """Linear over the warm-up, then constant."""
    return linear(step, start, end, warmup_steps) if step < warmup_steps else end


class StepValues(NamedTuple):
    """Everything that a schedule says of one step."""

    lr: float
    matching_lr: float
    last_layer_lr: float
    backbone_lr: float
    weight_decay: float
    momentum: float
    teacher_temperature: float


@dataclass(frozen=True)
class Schedule:
    """The schedules of a run: peaks, ends and lengths in steps."""

    num_steps: int
    warmup_steps: int
    lr: float
    matching_lr: float
    end_lr: float
    weight_decay: tuple[float, float]
    momentum: tuple[float, float]
    teacher_temperature: tuple[float, float]
    temperature_steps: int
    frozen_steps: int = 0
    frozen_backbone_steps: int = 0

    def at(self, step: int) -> StepValues:
        """The values of one step, all at the same index."""
        lr = warmup_cosine(step, self.lr, self.end_lr, self.warmup_steps, self.num_steps)
        return StepValues(
            lr=lr,
            matching_lr=warmup_cosine(step, self.matching_lr, self.end_lr, self.warmup_steps, self.num_steps),
            last_layer_lr=0.0 if step < self.frozen_steps else lr,
            # AdamW at rate 0 neither moves nor decays a weight, but knows its gradients when it begins to.
            backbone_lr=0.0 if step < self.frozen_backbone_steps else lr,
            weight_decay=cosine(step, *self.weight_decay, self.num_steps),
            momentum=cosine(step, *self.momentum, self.num_steps),
            teacher_temperature=teacher_temperature(step, *self.teacher_temperature, self.temperature_steps),
        )


class Rule(NamedTuple):
    """How one parameter is trained."""

    lr_multiplier: float
    decayed: bool
    is_last_layer: bool


def parameter_rule(
    part: Part, name: str, *, depth: int, layer_decay: float = 1.0, patch_embed_lr: float = 1.0
) -> Rule:
    """The rule for a parameter by its name; no decay on biases, norms and LayerScale."""
    multiplier = 1.0
    if part == "backbone":
        multiplier = layer_decay ** (depth + 1 - _layer(name, depth))
        if name.startswith("patch_embed."):
            multiplier *= patch_embed_lr
    exempt = name.endswith("bias") or "norm" in name or name.endswith("gamma")
    return Rule(multiplier, not exempt, part == "head" and name.startswith("prototypes."))


def _layer(name: str, depth: int) -> int:
    """0 for tokens, positions and patch embedding; i + 1 for block i; depth + 1 for the final norm."""
    if name.startswith("blocks."):
        return int(name.split(".")[1]) + 1
    return depth + 1 if name.startswith("norm.") else 0


class Optimizer:
    """AdamW over backbone, head and matching module, each clipped by itself."""

    def __init__(
        self,
        parts: Parts,
        *,
        depth: int,
        clip: float = 3.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        layer_decay: float = 1.0,
        patch_embed_lr: float = 1.0,
    ) -> None:
        self.clip_at = clip
        self.parameters = {part: [p for _, p in named] for part, named in parts.items()}
        grouped: dict[tuple[Part, Rule], list[nn.Parameter]] = {}
        for part, named in parts.items():
            for name, parameter in named:
                rule = parameter_rule(
                    part, name, depth=depth, layer_decay=layer_decay, patch_embed_lr=patch_embed_lr
                )
                grouped.setdefault((part, rule), []).append(parameter)
        self._rules = list(grouped)
        on_gpu = all(p.is_cuda for group in grouped.values() for p in group)
        self.adamw = torch.optim.AdamW(
            [{"params": params} for params in grouped.values()], betas=betas, eps=eps, fused=on_gpu
        )

    def clip(self) -> dict[Part, Tensor]:
        """Clip the gradients of each part by itself; the norms are those before clipping."""
        norms = {}
        for part, parameters in self.parameters.items():
            gradients = [p.grad for p in parameters if p.grad is not None]
            norms[part] = distributed.plain(torch.nn.utils.get_total_norm(gradients))
            torch.nn.utils.clip_grads_with_norm_(parameters, self.clip_at, norms[part])
        return norms

    def step(self, values: StepValues) -> None:
        """Update every parameter with the values of this step and forget the gradients."""
        for group, (part, rule) in zip(self.adamw.param_groups, self._rules, strict=True):
            lr = values.lr
            if part == "match":
                lr = values.matching_lr
            elif part == "backbone":
                lr = values.backbone_lr
            elif rule.is_last_layer:
                lr = values.last_layer_lr
            group["lr"] = lr * rule.lr_multiplier
            group["weight_decay"] = values.weight_decay if rule.decayed else 0.0
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
