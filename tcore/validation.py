"""Settings that cannot work are refused before anything starts, by name and with the value."""

import math
from collections.abc import Callable
from typing import Any

from tcore.config import Config, SandwichConfig
from tcore.config_file import flatten, from_dict, to_dict
from tcore.errors import InputError

Check = tuple[Callable[[Any], bool], str]

POSITIVE: Check = (lambda x: x > 0, "need a value above 0")
AT_LEAST_ZERO: Check = (lambda x: x >= 0, "need 0 or more")
AT_LEAST_ONE: Check = (lambda x: x is None or x >= 1, "need 1 or more")
SHARE: Check = (lambda x: 0 <= x <= 1, "need a value from 0 to 1")
BELOW_ONE: Check = (lambda x: 0 <= x < 1, "need a value from 0 up to, but not including, 1")
SHARES: Check = (lambda x: 0 <= x[0] <= x[1] <= 1, "need two rising values from 0 to 1")
AREAS: Check = (lambda x: 0 < x[0] <= x[1] <= 1, "need two rising values above 0 and up to 1")

CHECKS: dict[str, Check] = {
    "init": (lambda x: x != "", "need an encoder, as in --init runs/mine"),
    "seed": (lambda x: 0 <= x < 2**63, "need a whole number from 0 to 2**63 - 1"),
    "fps": POSITIVE,
    "checkpoint_every": AT_LEAST_ONE,
    "keep_every": AT_LEAST_ONE,
    "sandwich.offset": SHARES,
    "sandwich.current": (lambda x: 0 <= x[0] < x[1] <= 1, "need two rising values from 0 to 1"),
    "sandwich.offset_seconds": (
        lambda x: x is None or 0 < x[0] <= x[1],
        "need two rising values above 0",
    ),
    "views.num_local": AT_LEAST_ONE,
    "views.global_area": AREAS,
    "views.local_area": AREAS,
    "views.color": SHARE,
    "masking.probability": SHARE,
    "masking.ratio": SHARES,
    "masking.group": AT_LEAST_ONE,
    "vit.depth": AT_LEAST_ONE,
    "vit.patch_size": AT_LEAST_ONE,
    "vit.num_heads": AT_LEAST_ONE,
    "vit.num_registers": AT_LEAST_ZERO,
    "vit.drop_path": BELOW_ONE,
    "vit.position_std": POSITIVE,
    "vit.reach": (lambda x: x is None or x >= 1, "need 1 or more patches"),
    "matching.num_heads": AT_LEAST_ONE,
    "matching.num_blocks": AT_LEAST_ONE,
    "matching.temperature": POSITIVE,
    "head.hidden": AT_LEAST_ONE,
    "head.bottleneck": AT_LEAST_ONE,
    "head.prototypes": (lambda x: x >= 2, "need 2 or more"),
    "teacher.momentum": (lambda x: all(0 <= m <= 1 for m in x), "need two values from 0 to 1"),
    "teacher.temperature": (lambda x: all(t > 0 for t in x), "need two values above 0"),
    "teacher.temperature_epochs": AT_LEAST_ZERO,
    "teacher.center_momentum": SHARE,
    "loss.dino": AT_LEAST_ZERO,
    "loss.past_teacher": AT_LEAST_ZERO,
    "loss.future_teacher": AT_LEAST_ZERO,
    "loss.past_future": AT_LEAST_ZERO,
    "loss.koleo": AT_LEAST_ZERO,
    "loss.patch_teacher": AT_LEAST_ZERO,
    "loss.student_temperature": POSITIVE,
    "optim.epochs": AT_LEAST_ONE,
    "optim.steps": AT_LEAST_ONE,
    "optim.warmup_epochs": AT_LEAST_ZERO,
    "optim.batch": AT_LEAST_ONE,
    "optim.accumulate": AT_LEAST_ONE,
    "optim.base_lr": AT_LEAST_ZERO,
    "optim.matching_lr": AT_LEAST_ZERO,
    "optim.end_lr": AT_LEAST_ZERO,
    "optim.weight_decay": (lambda x: min(x) >= 0, "need two values of 0 or more"),
    "optim.clip": POSITIVE,
    "optim.betas": (lambda x: all(0 <= b < 1 for b in x), "need two values from 0 to below 1"),
    "optim.eps": POSITIVE,
    "optim.layer_decay": POSITIVE,
    "optim.patch_embed_lr": AT_LEAST_ZERO,
    "optim.freeze_last_layer_epochs": AT_LEAST_ZERO,
    "optim.freeze_backbone_steps": AT_LEAST_ZERO,
    "rendered.videos": AT_LEAST_ONE,
    "rendered.frames": AT_LEAST_ONE,
    "rendered.size": (lambda x: x >= 32, "need 32 or more"),
    "runtime.workers": (lambda x: x is None or x >= 0, "need 0 or more"),
    "runtime.log_every": AT_LEAST_ONE,
    "runtime.bad_samples": SHARE,
    "runtime.patience": POSITIVE,
}


def validate(config: Config) -> Config:
    """The same settings, or an error that names the first one that cannot work."""
    config = from_dict(to_dict(config), "")  # kinds and choices, also of settings made in Python
    values = flatten(config)
    for name, value in values.items():
        numbers = value if isinstance(value, tuple) else (value,)
        if any(isinstance(x, float) and not math.isfinite(x) for x in numbers):
            raise InputError(f"{name}={value}: need a finite number.")
    for name, (holds, need) in CHECKS.items():
        if not holds(values[name]):
            raise InputError(f"{name}={values[name]}: {need}.")
    _check_images(config)
    _check_sandwich(config)
    _check_sizes(config)
    _check_length(config)
    return config


def _check_images(config: Config) -> None:
    """An image has neighbors in the place of the past: no future, no offsets, no other moment."""
    if config.source != "images":
        return
    if config.auxiliary not in ("past", "none"):
        raise InputError(
            f"auxiliary={config.auxiliary}: with source=images one neighbor stands in place of the past; "
            "use --auxiliary past (or none, for the run whose features find the neighbors)."
        )
    if config.sandwich != SandwichConfig():
        raise InputError("sandwich.* has no effect with source=images: leave those settings out.")
    if not config.views.fixed_time:
        raise InputError("views.fixed_time=False: an image has no other moment; not with source=images.")
    if config.views.auxiliary_box != "central":
        raise InputError(
            f"views.auxiliary_box={config.views.auxiliary_box}: a neighbor shows something else at that "
            "place; not with source=images."
        )


def _check_sandwich(config: Config) -> None:
    current, offset = config.sandwich.current, config.sandwich.offset
    inside = current[0] - offset[1] >= 0 and current[1] + offset[1] <= 1
    seconds = config.sandwich.offset_seconds
    if seconds is None and not inside:
        raise InputError(
            f"sandwich.offset={offset} reaches outside the video from sandwich.current={current}: "
            "need current[0] - offset[1] >= 0 and current[1] + offset[1] <= 1."
        )
    repeats = config.sandwich.short_videos == "repeat"
    if seconds is not None and repeats:
        raise InputError(
            f"sandwich.short_videos=repeat does not go with sandwich.offset_seconds={seconds}: "
            "videos shorter than those seconds have no such offset; use skip."
        )
    if seconds is None and offset[0] == 0 and not repeats:
        raise InputError(
            f"sandwich.offset={offset} allows no distance at all, which makes every video too short: "
            "need a first value above 0."
        )
    aligned = config.views.fixed_space and config.views.fixed_time
    if config.auxiliary != "none" and not aligned:
        raise InputError(
            f"views.fixed_space={config.views.fixed_space}, views.fixed_time={config.views.fixed_time} is an "
            f"ablation without auxiliary branch, but auxiliary={config.auxiliary}: add --auxiliary none."
        )
    if config.sandwich.frames != "past-future" and config.auxiliary != "both":
        raise InputError(
            f"sandwich.frames={config.sandwich.frames} chooses the sides of two auxiliary frames, "
            f"but auxiliary={config.auxiliary}: use --auxiliary both."
        )


def _check_sizes(config: Config) -> None:
    vit, patch = config.vit, config.vit.patch_size
    for name in ("global_size", "local_size"):
        size = getattr(config.views, name)
        if size < patch or size % patch:
            raise InputError(f"views.{name}={size}: need a multiple of vit.patch_size={patch}.")
    if vit.dim < 1 or vit.dim % vit.num_heads:
        raise InputError(f"vit.dim={vit.dim}: need a multiple of vit.num_heads={vit.num_heads}.")
    if config.auxiliary != "none" and vit.dim % config.matching.num_heads:
        raise InputError(
            f"matching.num_heads={config.matching.num_heads}: need a divisor of vit.dim={vit.dim}."
        )
    grid = config.views.global_size // patch
    if config.masking.kind == "block" and grid < 2 and config.masking.probability > 0:
        raise InputError(f"views.global_size={config.views.global_size}: block masks need 2 x 2 patches.")


def _check_length(config: Config) -> None:
    optim = config.optim
    if optim.batch % optim.accumulate:
        raise InputError(f"optim.accumulate={optim.accumulate}: need a divisor of optim.batch={optim.batch}.")
    if optim.steps is None and optim.warmup_epochs >= optim.epochs:
        raise InputError(f"optim.warmup_epochs={optim.warmup_epochs}: need fewer than {optim.epochs} epochs.")
