"""The schedules of a run, parameter groups, clipping and the update itself."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tcore.config import Config, OptimConfig
from tcore.methods.method import Length, Method, Part, cosine, warmup_cosine
from tcore.training import distributed


class StepValues(NamedTuple):
    """The scheduled values of one step."""

    lr: float
    """Learning rate of a part with factor 1."""
    rates: Mapping[str, float]
    """Learning rates by part; `last_layer` is that of the last layer, where a part has one."""
    last_layer: bool
    """Whether the last layer is trained yet."""
    weight_decay: float
    own: Mapping[str, float]
    """The method's own values."""

    def logged(self) -> dict[str, float]:
        """What goes into metrics.jsonl."""
        rates = {f"lr_{part}": rate for part, rate in self.rates.items()}
        return {"lr": self.lr, **rates, "weight_decay": self.weight_decay, **self.own}


@dataclass(frozen=True)
class Schedule:
    """The schedules of a run: peaks, ends and lengths in steps."""

    num_steps: int
    warmup_steps: int
    lr: float
    end_lr: float
    weight_decay: tuple[float, float]
    factors: Mapping[str, float]
    """Factors on the peak learning rate, by part."""
    own: Callable[[int], Mapping[str, float]] = lambda step: {}
    """The method's own values, by step."""
    last_layer: str = ""
    """The part that has a last layer."""
    frozen_last_layer_steps: int = 0
    frozen_backbone_steps: int = 0
    peak_once: bool = False

    def rate(self, step: int, factor: float = 1.0) -> float:
        """Learning rate of a part with this factor at the peak; all parts end at the same rate."""
        peak, lengths = self.lr * factor, (self.warmup_steps, self.num_steps)
        return warmup_cosine(step, peak, self.end_lr, *lengths, peak_once=self.peak_once)

    def at(self, step: int) -> StepValues:
        """The values of one step, all at the same index."""
        rates = {part: self.rate(step, factor) for part, factor in self.factors.items()}
        if step < self.frozen_backbone_steps:
            # AdamW at rate 0 neither moves nor decays a weight, but its moments follow the gradients.
            rates["backbone"] = 0.0
        last_layer = step >= self.frozen_last_layer_steps
        if self.last_layer:
            rates["last_layer"] = rates[self.last_layer] if last_layer else 0.0
        return StepValues(
            lr=self.rate(step),
            rates=rates,
            last_layer=last_layer,
            weight_decay=cosine(step, *self.weight_decay, self.num_steps),
            own=self.own(step),
        )


def run_length(config: Config, steps_per_epoch: int) -> Length:
    """How long a run is, given in epochs or in steps."""
    optim = config.optim
    num_steps = optim.epochs * steps_per_epoch if optim.steps is None else optim.steps
    return Length(num_steps, steps_per_epoch, in_epochs=optim.steps is None)


def build_schedule(config: Config, method: Method, steps_per_epoch: int) -> Schedule:
    """The schedules of a run; where its length is given in steps, warm-ups are shares of it."""
    optim, length = config.optim, run_length(config, steps_per_epoch)
    return Schedule(
        num_steps=length.num_steps,
        warmup_steps=length.warmup(optim.warmup_epochs, 0.05),
        lr=optim.peak_lr,
        end_lr=optim.end_lr,
        weight_decay=optim.weight_decay,
        factors={name: part.lr for name, part in method.parts().items()},
        last_layer=next((name for name, part in method.parts().items() if part.last_layer), ""),
        own=lambda step: method.values(step, length),
        frozen_last_layer_steps=optim.freeze_last_layer_epochs * steps_per_epoch,
        frozen_backbone_steps=optim.freeze_backbone_steps,
        peak_once=optim.warmup_peak == "once",
    )


class Rule(NamedTuple):
    """How one parameter is trained."""

    lr_multiplier: float
    decayed: bool
    is_last_layer: bool


def parameter_rule(
    part: str,
    name: str,
    *,
    depth: int,
    last_layer: tuple[str, ...] = (),
    layer_decay: float = 1.0,
    patch_embed_lr: float = 1.0,
    decay_all: bool = False,
) -> Rule:
    """The rule for a parameter by its name; no decay on biases, norms and LayerScale unless on all."""
    multiplier = 1.0
    if part == "backbone":
        multiplier = layer_decay ** (depth + 1 - _layer(name, depth))
        if name.startswith("patch_embed."):
            multiplier *= patch_embed_lr
    exempt = name.endswith("bias") or "norm" in name or name.endswith("gamma")
    return Rule(multiplier, decay_all or not exempt, name.startswith(last_layer))


def _layer(name: str, depth: int) -> int:
    """0 for tokens, positions and patch embedding; i + 1 for block i; depth + 1 for the final norm."""
    if name.startswith("blocks."):
        return int(name.split(".")[1]) + 1
    return depth + 1 if name.startswith("norm.") else 0


class Optimizer:
    """AdamW over the parts of a method, each clipped separately."""

    def __init__(self, parts: Mapping[str, Part], settings: OptimConfig, depth: int) -> None:
        self.settings = settings
        self.parameters = {name: [p for _, p in part.parameters] for name, part in parts.items()}
        grouped: dict[tuple[str, Rule], list[nn.Parameter]] = {}
        for name, part in parts.items():
            for inner, parameter in part.parameters:
                rule = parameter_rule(
                    name,
                    inner,
                    depth=depth,
                    last_layer=part.last_layer,
                    layer_decay=settings.layer_decay,
                    patch_embed_lr=settings.patch_embed_lr,
                    decay_all=settings.decay_all,
                )
                if inner in part.undecayed:
                    rule = rule._replace(decayed=False)
                grouped.setdefault((name, rule), []).append(parameter)
        self._rules = list(grouped)
        on_gpu = all(p.is_cuda for group in grouped.values() for p in group)
        self.adamw = torch.optim.AdamW(
            [{"params": params} for params in grouped.values()],
            betas=settings.betas,
            eps=settings.eps,
            fused=on_gpu,
        )

    def clip(self) -> dict[str, Tensor]:
        """Clip gradients per part, per parameter or all together; returns the parts' norms before that."""
        norms = {part: _norm(parameters) for part, parameters in self.parameters.items()}
        total = torch.stack(list(norms.values())).norm() if self.settings.clip_by == "all" else None
        for part, parameters in self.parameters.items():
            if total is not None:
                torch.nn.utils.clip_grads_with_norm_(parameters, self.settings.clip, total)
            elif self.settings.clip_by == "part":
                torch.nn.utils.clip_grads_with_norm_(parameters, self.settings.clip, norms[part])
            elif self.settings.clip_by == "parameter":
                _clip_each(parameters, self.settings.clip)
        return norms

    def step(self, values: StepValues) -> None:
        """Update every parameter with the values of this step and forget the gradients."""
        for group, (part, rule) in zip(self.adamw.param_groups, self._rules, strict=True):
            rate = values.rates["last_layer" if rule.is_last_layer else part]
            group["lr"] = rate * rule.lr_multiplier
            group["weight_decay"] = values.weight_decay if rule.decayed else 0.0
            if rule.is_last_layer and not values.last_layer and self.settings.freeze == "gradient":
                for parameter in group["params"]:
                    parameter.grad = None
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)


def _clip_each(parameters: list[nn.Parameter], most: float) -> None:
    """Clip every gradient by its own norm, all in a few calls: many small ones keep a GPU waiting."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if any(hasattr(x, "full_tensor") for x in gradients):  # shares, whose norm is that of all processes
        for parameter in parameters:
            nn.utils.clip_grads_with_norm_([parameter], most, _norm([parameter]))
    elif gradients:  # to the same bits
        norms = torch.stack(list(torch._foreach_norm(gradients)))
        norms = torch.linalg.vector_norm(norms[:, None], dim=1)
        torch._foreach_mul_(gradients, list((most / (norms + 1e-6)).clamp(max=1.0).unbind()))


def _norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Norm of all gradients together, over all processes."""
    return distributed.plain(nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
