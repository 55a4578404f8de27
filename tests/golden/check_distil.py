"""Golden files of DINO, iBOT and DINOv2, and the schedules and views of all of `distil/`."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tcore.data import photometry
from tcore.data.masking import block_mask, sample_masks
from tcore.methods.batch import Batch, make_batch
from tcore.methods.distillation import SelfDistillation
from tcore.methods.settings_groups import MaskingConfig, PatchTeacherConfig, Targets
from tcore.model.heads import ProjectionHead
from tcore.model.vit import VisionTransformer
from tcore.training.optim import Schedule
from tests.golden.compare import (
    SMALL,
    Arrays,
    Check,
    Deviation,
    compare,
    deviation,
    encoder_sizes,
    logged_values,
    read_settings,
    same_names,
    take_step,
    tensors,
)

DRAWS = 1500  # masks that are drawn for statistics


def distil_model(
    arrays: Arrays, settings: Mapping[str, Any], targets: Targets = "centering"
) -> SelfDistillation:
    """Student, teacher and centers as stored; where the student has no mask token, none learns."""
    layer_scale = 1.0 if "student/backbone.blocks.0.ls1.gamma" in arrays else None
    vit = VisionTransformer(**encoder_sizes(settings, layer_scale=layer_scale, position_resize="factor"))
    own = "student/head.patch_prototypes.gains" in arrays
    head = ProjectionHead(
        **{name: settings[name] for name in ("dim", "hidden", "bottleneck")},
        num_prototypes=settings["K"],
        train_gains="grad/head.prototypes.gains" in arrays,
        num_patch_prototypes=settings["K"] if own else None,
    )
    vit.mask_token.requires_grad_("student/backbone.mask_token" in arrays)
    model = SelfDistillation(
        vit,
        head,
        settings.get("weights", {"dino": 1.0}),
        teacher=PatchTeacherConfig(
            targets=targets,
            center_momentum=settings["center_momentum"],
            patch_center="all" if "patch_center_over" in settings else "masked",
        ),
        student_temperature=settings["student_temperature"],
    )
    for network, prefix in ((model.student, "student/"), (model.teacher, "teacher/")):
        odd = network.load_state_dict(tensors(arrays, prefix), strict=False)
        assert {*odd.missing_keys} <= {"backbone.register_tokens", "backbone.mask_token"}, odd
        assert not odd.unexpected_keys, odd
    model.frame_center.value.copy_(
        torch.from_numpy(arrays["center" if "center" in arrays else "frame_center"])
    )
    if "patch_center" in arrays:
        model.patch_center.value.copy_(torch.from_numpy(arrays["patch_center"]))
    return model


def distil_batch(arrays: Arrays) -> tuple[dict[str, Tensor], Batch]:
    """The crops of a file by kind, and their batch."""
    crops = {name: torch.from_numpy(arrays[f"views/{name}_crops"]) for name in ("global", "local")}
    none = np.zeros((len(crops["global"]), 0), dtype=bool)
    return crops, make_batch(crops["global"], crops["local"], torch.from_numpy(arrays.get("mask", none)))


def temperatures(settings: Mapping[str, Any]) -> dict[str, float]:
    """The scheduled values of the step that a file holds."""
    names = ("teacher_temperature", "patch_teacher_temperature")
    return {name: settings[name] for name in names if name in settings}


def check_losses(
    arrays: Arrays, settings: Mapping[str, Any], terms: str = "", targets: Targets = "centering"
) -> Iterator[Deviation]:
    """Losses by both twins, under the prefix `terms`; of centered targets gradients and centers too."""
    _, batch = distil_batch(arrays)
    for fused in (False, True):
        model, twin = distil_model(arrays, settings, targets), f" (fused {fused})"
        model.fused = fused
        found = model(batch, temperatures(settings))
        total = model.total(found)
        for name, value in (found | {"total": total}).items():
            if f"{terms}loss/{name}" in arrays:
                yield deviation(f"{terms}loss/{name}{twin}", value, arrays[f"{terms}loss/{name}"])
        yield same_names("terms", settings.get("weights", {"dino": 1.0}), found)
        if targets != "centering":
            continue
        total.backward()
        parameters = dict(model.student.named_parameters())
        trained = {name for name, p in parameters.items() if p.grad is not None and p.numel()}
        yield same_names("grad", set(tensors(arrays, "grad/")), trained)
        for name, golden in tensors(arrays, "grad/").items():
            yield deviation(f"grad/{name}{twin}", parameters[name].grad, golden, 1e-4)
        model.finish_step({"momentum": 1.0})
        if "after/patch_center" in arrays:
            yield deviation(
                f"after/patch_center{twin}", model.patch_center.value, arrays["after/patch_center"]
            )
        kept = "after/center" if "after/center" in arrays else "after/frame_center"
        yield deviation(f"{kept}{twin}", model.frame_center.value, arrays[kept])


def check_dino(arrays: Arrays) -> Iterator[Deviation]:
    """DINO: positions, tokens, outputs, targets, loss and gradients by both twins, states after a step."""
    settings = read_settings(arrays)
    crops, _ = distil_batch(arrays)
    yield from check_losses(arrays, settings)
    for frozen in (False, True):
        yield from check_update(arrays, settings, frozen=frozen)
    yield from check_dino_tokens(arrays, settings, crops)


def check_ibot(arrays: Arrays) -> Iterator[Deviation]:
    """iBOT: tokens, outputs, losses and gradients by both twins, centers, states after a step."""
    settings = read_settings(arrays)
    yield from check_losses(arrays, settings)
    if any(name.startswith("after/student/") for name in arrays):
        yield from check_update(arrays, settings, frozen=False)
    model, (crops, batch) = distil_model(arrays, settings).eval(), distil_batch(arrays)
    with torch.no_grad():
        for who, network, mask in (("teacher", model.teacher, None), ("student", model.student, batch.mask)):
            seen = network.backbone(crops["global"], mask)
            tokens = torch.cat([seen.frame[:, None], seen.patches], dim=1)
            patches = network.head.project(seen.patches.flatten(0, 1)) @ network.head.weights()[1].T
            outputs = {
                "frame": network.head(seen.frame),
                "patches": patches.unflatten(0, seen.patches.shape[:2]),
            }
            yield deviation(f"tokens/{who}_global", tokens, arrays[f"tokens/{who}_global"])
            yield from compare(arrays, {f"outputs/{who}_{kind}": x for kind, x in outputs.items()})
        local = model.student.head(model.student.backbone(crops["local"]).frame)
        yield deviation("outputs/student_local_frame", local, arrays["outputs/student_local_frame"])


def check_dinov2(arrays: Arrays) -> Iterator[Deviation]:
    """DINOv2: positions, tokens, outputs, and both kinds of targets with their losses; gradients, centers."""
    settings = read_settings(arrays)
    crops, batch = distil_batch(arrays)
    kinds: tuple[Targets, ...] = ("centering", "sinkhorn")
    for kind in kinds:
        yield from check_losses(arrays, settings, f"{kind}/", kind)
        model = distil_model(arrays, settings, kind).eval()
        with torch.no_grad():
            model(batch, temperatures(settings))
        asked = model.health_sample
        first, second = asked["frame_targets"].chunk(2)
        ours = {"patches": asked["patch_targets"], "frames_crossed": torch.cat([second, first])}
        yield from compare(arrays, {f"{kind}/targets/{name}": x for name, x in ours.items()})
        parts = (f"{kind}/loss/dino_local", f"{kind}/loss/dino_global")
        yield deviation(f"{kind}/loss/dino", sum(arrays[part] for part in parts), arrays[f"{kind}/loss/dino"])
    model, side = distil_model(arrays, settings).eval(), settings["local"] // settings["patch"]
    with torch.no_grad():
        yield from compare(arrays, {"positions_local": model.student.backbone.positions(side, side)})
        for who, network, mask in (("teacher", model.teacher, None), ("student", model.student, batch.mask)):
            seen = network.backbone(crops["global"], mask)
            yield from compare(
                arrays, {f"tokens/{who}_frame": seen.frame, f"tokens/{who}_patches": seen.patches}
            )
        outputs = {"frames": seen.frame, "patches": batch.at_masked(seen.patches)}
        for name, tokens in outputs.items():
            yield deviation(
                f"outputs/student_{name}", model.student.head(tokens), arrays[f"outputs/student_{name}"]
            )


@torch.no_grad()
def check_dino_tokens(
    arrays: Arrays, settings: Mapping[str, Any], crops: Mapping[str, Tensor]
) -> Iterator[Deviation]:
    """What the networks make of the crops before any step."""
    model = distil_model(arrays, settings).eval()
    side = settings["local"] // settings["patch"]
    yield from compare(arrays, {"positions_local": model.student.backbone.positions(side, side)})
    for who, network in (("student", model.student), ("teacher", model.teacher)):
        for kind, views in crops.items():
            if f"tokens/{who}_{kind}_frame" in arrays:
                tokens, name = network.backbone(views), f"tokens/{who}_{kind}"
                yield from compare(arrays, {f"{name}_frame": tokens.frame, f"{name}_patches": tokens.patches})
    frames = [model.student.backbone(views).frame for views in crops.values()]
    outputs = model.teacher.head(model.teacher.backbone(crops["global"]).frame)
    center, temperature = model.frame_center.value, settings["teacher_temperature"]
    targets = ((outputs.float() - center) / temperature).softmax(dim=-1)
    student = model.student.head(torch.cat(frames))
    yield from compare(arrays, {"outputs/student": student, "outputs/teacher": outputs, "targets": targets})


def check_update(arrays: Arrays, settings: Mapping[str, Any], *, frozen: bool) -> Iterator[Deviation]:
    """Parameters after clipping each by itself, AdamW and EMA; in the first epoch prototypes stay."""
    model = distil_model(arrays, settings)
    model.total(model(distil_batch(arrays)[1], temperatures(settings))).backward()
    take_step(model, settings, {}, not frozen, clip_by="parameter", freeze="gradient")
    model.finish_step({"momentum": settings["momentum"]})
    networks = {"student": model.student} if frozen else {"student": model.student, "teacher": model.teacher}
    for who, network in networks.items():
        prefix, state = f"after{'_frozen' * frozen}/{who}/", network.state_dict()
        for name, golden in tensors(arrays, prefix).items():
            yield deviation(prefix + name, state[name], golden, 1e-4)


def check_schedules(arrays: Arrays) -> Iterator[Deviation]:
    """Learning rates, weight decay and momenta by step, temperatures by epoch, of all methods of the set."""
    settings = read_settings(arrays)
    steps = settings["steps_per_epoch"]
    lengths = {"optim.epochs": settings["epochs"], "optim.warmup_epochs": settings["warmup_epochs"]}

    def logged(name: str, changes: dict[str, Any]) -> list[dict[str, float]]:
        warm = {"teacher.temperature_epochs": settings["temperature_epochs"]}
        return logged_values(name, SMALL | lengths | warm | changes, steps, steps * settings["epochs"])

    dino = settings["dino"]
    rates = {"optim.base_lr": dino["lr"], "optim.batch": dino["batch"], "optim.end_lr": dino["end"]}
    found = logged("vits16-dino-k400", rates)
    names = ("lr", "weight_decay", "momentum")
    yield from compare(arrays, {f"dino/{name}": [values[name] for values in found] for name in names})
    ends = {
        "teacher.temperature": settings["ibot"]["frame"],
        "teacher.patch_temperature": settings["ibot"]["patch"],
    }
    ibot = {start: logged("vits16-ibot-k400", ends | {"masking.start_epoch": start}) for start in (0, 2)}
    for name, values, key in (
        ("dino/teacher_temperature_by_epoch", found, "teacher_temperature"),
        ("ibot/teacher_temperature_by_epoch", ibot[0], "teacher_temperature"),
        ("ibot/patch_teacher_temperature_by_epoch", ibot[0], "patch_teacher_temperature"),
        ("ibot/patch_teacher_temperature_by_epoch_start_2", ibot[2], "patch_teacher_temperature"),
    ):
        yield deviation(name, [row[key] for row in values], np.repeat(arrays[name], steps))
    moco, simclr = settings["mocov3"], settings["simclr"]
    once = {"optim.warmup_peak": "once", "optim.end_lr": 0.0, "teacher.momentum": (moco["momentum"], 1.0)}
    moco_rates = {"optim.base_lr": moco["base"], "optim.batch": moco["batch"]}
    found = logged("vits16-dino-k400", once | moco_rates)  # the same rule, momentum included
    yield from compare(
        arrays, {f"mocov3/{name}": [row[name] for row in found] for name in ("lr", "momentum")}
    )
    schedule = Schedule(
        num_steps=simclr["steps"],
        warmup_steps=simclr["warmup_steps"],
        lr=simclr["base"] * simclr["batch"] / 256,
        end_lr=0.0,
        weight_decay=(0.0, 0.0),
        factors={},
        peak_once=True,
    )
    yield from compare(arrays, {"simclr/lr": [schedule.rate(step) for step in range(simclr["steps"])]})


def kolmogorov(name: str, ours: Any, golden: Any) -> Deviation:
    """Largest difference of two distributions, which is this large by chance in one of 10,000 cases."""
    a, b = np.sort(np.asarray(ours, np.float64)), np.sort(np.asarray(golden, np.float64))
    at = np.union1d(a, b)
    shares = [np.searchsorted(x, at, side="right") / len(x) for x in (a, b)]
    limit = np.sqrt(-0.5 * np.log(0.5e-4) * (1 / len(a) + 1 / len(b)))
    return Deviation(f"{name}, distribution", float(np.abs(shares[0] - shares[1]).max()), float(limit))


def frequencies(name: str, ours: np.ndarray, golden: np.ndarray, draws: int) -> Deviation:
    """Largest difference of the frequencies with which patches are masked, in standard deviations."""
    found = ours.mean(axis=0).reshape(golden.shape)
    spread = np.sqrt(golden * (1 - golden) * (1 / len(ours) + 1 / draws))
    return Deviation(
        f"{name}, by patch", float((np.abs(found - golden) / np.maximum(spread, 1e-9)).max()), 5.5
    )


def check_ibot_masks(arrays: Arrays) -> Iterator[Deviation]:
    """iBOT's masks: how many patches, by how much they fall short, which; the random numbers are others."""
    settings = read_settings(arrays)
    grid, mean, spread = settings["grid"], settings["ratios"][1], settings["spread"][1]
    rng, smallest = np.random.default_rng(0), (grid // 3) ** 2
    for name, kind in (("block", "block"), ("rand", "random")):
        masks = sample_masks(
            rng,
            DRAWS,
            grid,
            MaskingConfig(
                ratio=(mean - spread, mean + spread),
                kind="block" if kind == "block" else "random",
                draw="independent",
                smallest_block=smallest,
                fill=False,
            ),
        )
        yield kolmogorov(f"{name}/masked", masks.sum(axis=1), arrays[f"{name}/masked"])
        yield frequencies(f"{name}/frequency", masks, arrays[f"{name}/frequency"], settings["draws"])
    wanted = arrays["block/wanted"][:DRAWS]
    blocks = MaskingConfig(smallest_block=smallest, fill=False)
    masks = np.stack([block_mask(rng, grid, float(x), blocks) for x in wanted])
    shortfall = arrays["block/wanted"] - arrays["block/masked"]
    yield kolmogorov("block/wanted - masked", wanted - masks.sum(axis=1), shortfall)


def check_dinov2_masks(arrays: Arrays) -> Iterator[Deviation]:
    """DINOv2's masks, of which some fall short by a few patches."""
    settings = read_settings(arrays)
    smallest, largest = settings["smallest_block"], settings["largest_block"]
    grid, blocks = settings["grid"], MaskingConfig(smallest_block=smallest, largest_block=largest, fill=False)
    rng, wanted = np.random.default_rng(0), arrays["wanted"]
    masks = np.stack([block_mask(rng, grid, int(x), blocks) for x in wanted[:DRAWS]])
    yield kolmogorov("wanted - masked", wanted[:DRAWS] - masks.sum(axis=1), wanted - arrays["masked"])
    yield frequencies("frequency", masks, arrays["frequency"], len(wanted))
    drawn = [
        sample_masks(rng, 2, grid, MaskingConfig(ratio=tuple(settings["ratio"]), kind="random")).sum()
        for _ in wanted
    ]
    yield kolmogorov("wanted", drawn, wanted)


def check_views(arrays: Arrays) -> Iterator[Deviation]:
    """Blur of 9 taps with reflection, of 23 taps with zeros, and solarization."""
    image = torch.from_numpy(arrays["image"]).permute(2, 0, 1)[None].float() / 255
    for sigma in read_settings(arrays)["sigmas"]:
        spread = torch.tensor([sigma])
        ours = {
            "9_taps_reflect": photometry.blur(image, spread),
            "23_taps_zero": photometry.wide_blur(image, spread, 11),
        }
        for name, made in ours.items():
            golden = arrays[f"blur_{name}/{sigma}"]
            yield deviation(f"blur_{name}/{sigma}", 255 * made[0].permute(1, 2, 0), golden)
    solarized = (255 * photometry.solarize(image)).round()[0].permute(1, 2, 0)
    yield deviation("solarized_128", solarized, arrays["solarized_128"], 0.0)


FILES: dict[str, Check] = {
    "dino.npz": Check(check_dino, key="after_frozen/student/head.mlp.4.bias"),
    "dinov2.npz": Check(check_dinov2, key="sinkhorn/loss/dino"),
    "dinov2_masks.npz": Check(check_dinov2_masks, key="masked", left_out="examples (of frequency)"),
    "ibot.npz": Check(check_ibot, key="outputs/teacher_patches"),
    "ibot_masks.npz": Check(check_ibot_masks, key="block/masked", left_out="*/examples (of frequency)"),
    "ibot_separate.npz": Check(check_ibot, key="student/head.patch_prototypes.gains"),
    "schedules.npz": Check(check_schedules, key="dino/lr"),
    "views.npz": Check(check_views, key="solarized_128", left_out="blur_pillow/* (Pillow's three box blurs)"),
}
