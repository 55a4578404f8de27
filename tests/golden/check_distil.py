"""Golden files of DINO, iBOT and DINOv2, and the schedules and views of all of `distil/`."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tcore.methods.batch import make_batch
from tcore.methods.distillation import SelfDistillation
from tcore.model import losses
from tcore.model.heads import ProjectionHead
from tcore.model.vit import VisionTransformer
from tests.golden.compare import (
    Arrays,
    Check,
    Deviation,
    compare,
    deviation,
    logged_values,
    same_names,
    take_step,
    tensors,
)


def dino_model(arrays: Arrays, settings: Mapping[str, Any]) -> SelfDistillation:
    """Student, teacher and center as stored; nothing is masked, so no mask token learns."""
    same = ("dim", "depth", "layer_scale")
    other = {"num_heads": "heads", "patch_size": "patch", "image_size": "image", "num_registers": "registers"}
    sizes = {name: settings[name] for name in same} | {name: settings[key] for name, key in other.items()}
    vit = VisionTransformer(**sizes, position_resize="factor")
    own = {name: settings[name] for name in ("dim", "hidden", "bottleneck", "train_gains")}
    head = ProjectionHead(**own, num_prototypes=settings["K"])
    vit.mask_token.requires_grad_(False)
    model = SelfDistillation(
        vit,
        head,
        {"dino": 1.0},
        student_temperature=settings["student_temperature"],
        center_momentum=settings["center_momentum"],
    )
    absent = {"backbone.register_tokens", "backbone.mask_token"}
    for network, prefix in ((model.student, "student/"), (model.teacher, "teacher/")):
        odd = network.load_state_dict(tensors(arrays, prefix), strict=False)
        assert set(odd.missing_keys) == absent, odd
        assert not odd.unexpected_keys, odd
    model.frame_center.value.copy_(torch.from_numpy(arrays["center"]))
    return model


def check_dino(arrays: Arrays) -> Iterator[Deviation]:
    """DINO: positions, tokens, outputs, targets, loss and gradients by both twins, states after a step."""
    settings = json.loads(str(arrays["settings"]))
    crops = {name: torch.from_numpy(arrays[f"views/{name}_crops"]) for name in ("global", "local")}
    batch = make_batch(
        crops["global"], crops["local"], torch.zeros(len(crops["global"]), 0, dtype=torch.bool)
    )
    values = {"teacher_temperature": settings["teacher_temperature"], "momentum": settings["momentum"]}
    for fused in (False, True):
        model = dino_model(arrays, settings)
        model.fused = fused
        found = model(batch, values)
        model.total(found).backward()
        yield deviation(f"loss/dino (fused {fused})", found["dino"], arrays["loss/dino"])
        parameters = dict(model.student.named_parameters())
        trained = {name for name, p in parameters.items() if p.grad is not None and p.numel()}
        yield same_names("grad", set(tensors(arrays, "grad/")), trained)
        for name, golden in tensors(arrays, "grad/").items():
            yield deviation(f"grad/{name} (fused {fused})", parameters[name].grad, golden, 1e-4)
    yield from check_dino_update(arrays, settings, model, frozen=False)
    yield deviation("after/center", model.frame_center.value, arrays["after/center"])
    frozen = dino_model(arrays, settings)
    frozen.total(frozen(batch, values)).backward()
    yield from check_dino_update(arrays, settings, frozen, frozen=True)
    yield from check_dino_tokens(arrays, settings, crops)


@torch.no_grad()
def check_dino_tokens(
    arrays: Arrays, settings: Mapping[str, Any], crops: Mapping[str, Tensor]
) -> Iterator[Deviation]:
    """What the networks make of the crops before any step."""
    model = dino_model(arrays, settings).eval()
    side = settings["local"] // settings["patch"]
    yield from compare(arrays, {"positions_local": model.student.backbone.positions(side, side)})
    for who, network in (("student", model.student), ("teacher", model.teacher)):
        for kind, views in crops.items():
            if f"tokens/{who}_{kind}_frame" in arrays:
                tokens, name = network.backbone(views), f"tokens/{who}_{kind}"
                yield from compare(arrays, {f"{name}_frame": tokens.frame, f"{name}_patches": tokens.patches})
    frames = [model.student.backbone(views).frame for views in crops.values()]
    outputs = model.teacher.head(model.teacher.backbone(crops["global"]).frame)
    targets = losses.centering_targets(outputs, model.frame_center.value, settings["teacher_temperature"])
    student = model.student.head(torch.cat(frames))
    yield from compare(arrays, {"outputs/student": student, "outputs/teacher": outputs, "targets": targets})


def check_dino_update(
    arrays: Arrays, settings: Mapping[str, Any], model: SelfDistillation, *, frozen: bool
) -> Iterator[Deviation]:
    """Parameters after clipping each by itself, AdamW and EMA; in the first epoch prototypes stay."""
    take_step(model, settings, {}, not frozen, clip_by="parameter", freeze="gradient")
    model.finish_step({"momentum": settings["momentum"]})
    networks = {"student": model.student} if frozen else {"student": model.student, "teacher": model.teacher}
    for who, network in networks.items():
        prefix, state = f"after{'_frozen' * frozen}/{who}/", network.state_dict()
        for name, golden in tensors(arrays, prefix).items():
            yield deviation(prefix + name, state[name], golden, 1e-4)


def check_dino_schedules(arrays: Arrays) -> Iterator[Deviation]:
    """DINO's entries: learning rate, weight decay and momentum by step, temperature by epoch."""
    settings = json.loads(str(arrays["settings"]))
    steps = settings["steps_per_epoch"]
    lengths = {
        "optim.epochs": settings["epochs"],
        "optim.warmup_epochs": settings["warmup_epochs"],
        "teacher.temperature_epochs": settings["temperature_epochs"],
        "optim.base_lr": settings["dino"]["lr"],
        "optim.batch": settings["dino"]["batch"],
        "optim.end_lr": settings["dino"]["end"],
    }
    logged = logged_values("vits16-dino-k400", lengths, steps, steps * settings["epochs"])
    names = ("lr", "weight_decay", "momentum")
    yield from compare(arrays, {f"dino/{name}": [values[name] for values in logged] for name in names})
    by_epoch = np.repeat(arrays["dino/teacher_temperature_by_epoch"], steps)
    yield deviation("dino/teacher_temperature_by_epoch", [x["teacher_temperature"] for x in logged], by_epoch)


FILES: dict[str, Check] = {
    "dino.npz": Check(check_dino, key="after_frozen/student/head.mlp.4.bias"),
    "schedules.npz": Check(check_dino_schedules, key="dino/lr"),
}
