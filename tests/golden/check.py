"""Compare the code with golden tensors: `python tests/golden/check.py DIR`.

One row per file with its largest deviation (per array, relative to the array's largest value).
This file only compares: every value comes from the functions that training and evaluation call.
"""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tcore import methods
from tcore.config import OptimConfig
from tcore.evaluation import pose, resize, scores
from tcore.evaluation.checkpoints import translate
from tcore.evaluation.propagate import propagate_features
from tcore.evaluation.protocols import Protocol
from tcore.methods.distillation import Batch, SelfDistillation, make_batch
from tcore.methods.matching import PatchMatchingModule
from tcore.methods.settings import LossForm
from tcore.methods.tcore import TCoRe
from tcore.model import losses
from tcore.model.heads import ProjectionHead
from tcore.model.vit import VisionTransformer
from tcore.recipes import recipe
from tcore.training import optim

Arrays = Mapping[str, np.ndarray[Any, Any]]


class Deviation(NamedTuple):
    """How far one array is from its golden twin, and how far it may be."""

    name: str
    value: float
    tolerance: float


def deviation(name: str, ours: Any, golden: Any, tolerance: float = 1e-5) -> Deviation:
    """Largest difference relative to the largest golden value; another shape or NaN is infinitely far."""
    a = np.asarray(ours.detach() if isinstance(ours, Tensor) else ours, dtype=np.float64)
    b = np.asarray(golden, dtype=np.float64)
    if a.shape != b.shape:
        return Deviation(f"{name} has shape {a.shape}, golden {b.shape}", float("inf"), tolerance)
    if a.size == 0:
        return Deviation(name, 0.0, tolerance)
    scale = np.abs(b).max() or 1.0
    value = float(np.abs(a - b).max() / scale)
    return Deviation(name, value if np.isfinite(value) else float("inf"), tolerance)


def compare(arrays: Arrays, ours: Mapping[str, Any], tolerance: float = 1e-5) -> Iterator[Deviation]:
    """Several arrays beside the golden ones of the same names."""
    for name, values in ours.items():
        yield deviation(name, values, arrays[name], tolerance)


def same_names(what: str, golden: Iterable[str], ours: Iterable[str]) -> Deviation:
    """A golden set that leaves something out, or holds something else, does not agree."""
    odd = sorted(set(golden) ^ set(ours))
    return Deviation(f"{what} lacks or adds {odd[:3]}" if odd else what, float("inf") if odd else 0.0, 0.0)


def tensors(arrays: Arrays, prefix: str) -> dict[str, Tensor]:
    """The arrays under a prefix as tensors, without it."""
    return {k[len(prefix) :]: torch.from_numpy(v) for k, v in arrays.items() if k.startswith(prefix)}


MATCHING_NAMES = {
    "auxiliary_cross_attn": "cross_attention",
    "auxiliary_self_attn": "self_attention",
    "auxiliary_layer_norm": "norm",
    "auxiliary_linear": "linear",
    "decoder.": "blocks.",
}
HEAD_NAMES = {"last_layer.weight_g": "prototypes.gains", "last_layer.weight_v": "prototypes.directions"}
STEP_NAMES = {"dino_head.": "head.", "auxiliary.auxiliary_decoder.": "match."}


def rename(name: str, names: Mapping[str, str]) -> str:
    """Our name for a released one."""
    for released, ours in names.items():
        name = name.replace(released, ours)
    return name


def our_name(name: str) -> str:
    """Our name for a parameter of a whole released training state."""
    return rename(name, STEP_NAMES | MATCHING_NAMES | HEAD_NAMES)


def small_vit(state: Mapping[str, Tensor], num_heads: int) -> VisionTransformer:
    """A ViT with the sizes of its golden weights."""
    found = translate(state, "golden weights", {"num_heads": num_heads})
    vit = VisionTransformer(**found.sizes)
    vit.load_state_dict(found.state)
    return vit.eval()


@torch.no_grad()
def check_vit(arrays: Arrays) -> Iterator[Deviation]:
    """Tokens of square, masked, tall and wide images."""
    vit = small_vit(tensors(arrays, "state/"), num_heads=3)
    for case in ("square", "square_masked", "tall", "wide"):
        views = tensors(arrays, f"{case}/")
        tokens = vit(views["image"], views.get("mask"))
        parts = {"cls": tokens.frame, "registers": tokens.registers, "patches": tokens.patches}
        yield from compare(arrays, {f"{case}/{part}": values for part, values in parts.items()})


@torch.no_grad()
def check_matching(arrays: Arrays) -> Iterator[Deviation]:
    """Output of the patch matching module, also for faint inputs, and its attention."""
    current, auxiliary = torch.from_numpy(arrays["current"]), torch.from_numpy(arrays["auxiliary"])
    match = PatchMatchingModule(dim=current.shape[-1], num_heads=4, gain=4.0)
    state = tensors(arrays, "state/")
    match.load_state_dict({f"blocks.0.{rename(k, MATCHING_NAMES)}": v for k, v in state.items()})
    faint = float(arrays["faint_scale"])
    attention = match.attention(current, auxiliary)
    ours = {
        "output": match(current, auxiliary),
        "faint_output": match(current * faint, auxiliary * faint),
        "cross_attention": attention.cross,
        "self_attention": attention.self_,
    }
    yield from compare(arrays, ours)


def golden_model(arrays: Arrays, settings: Mapping[str, Any], form: LossForm) -> TCoRe:
    """The model of the golden training step."""
    state = tensors(arrays, "state/")
    backbone = small_vit(tensors(arrays, "state/student.backbone."), settings["heads"])
    head = ProjectionHead(
        dim=settings["embed_dim"],
        hidden=settings["head_hidden"],
        bottleneck=settings["bottleneck"],
        num_prototypes=settings["prototypes"],
    )
    match = PatchMatchingModule(
        dim=settings["embed_dim"], num_heads=settings["pmm_heads"], gain=settings["attn_mul"]
    )
    names = ("dino", "past_teacher", "future_teacher", "past_future", "koleo")
    given = (settings[f"w_{name}"] for name in ("dino", "pt", "ft", "pf", "koleo"))
    weights = dict(zip(names, given, strict=True))
    model = TCoRe(
        backbone, head, match, weights=weights, form=form, student_temperature=settings["student_temp"]
    )
    centers = {
        "frame_center.value": state.pop("dino_loss.center").flatten(),
        "patch_center.value": state.pop("ibot_patch_loss.center").flatten(),
    }
    model.load_state_dict({our_name(k): v for k, v in state.items()} | centers)
    return model


def golden_batch(arrays: Arrays) -> Batch:
    """The batch of the golden training step; auxiliary views of the masked crops alone."""
    views = tensors(arrays, "batch/")
    mask = views["collated_masks"]
    masked = mask.any(dim=1)
    return make_batch(
        views["collated_global_crops"],
        views["collated_local_crops"],
        mask,
        views["collated_global_crops_past"][masked],
        views["collated_global_crops_future"][masked],
    )


def check_losses_and_gradients(
    arrays: Arrays, settings: Mapping[str, Any], form: LossForm, gradients: str
) -> Iterator[Deviation]:
    """Every loss and every gradient of one form, and what lies on the way."""
    model, batch = golden_model(arrays, settings, form), golden_batch(arrays)
    # Positions among all crops, as the golden file counts them.
    patches = batch.mask.shape[1]
    positions = batch.masked[batch.masked_patches // patches] * patches + batch.masked_patches % patches
    yield deviation("mask_indices_list", positions, arrays["batch/mask_indices_list"], 0.0)
    yield deviation("masks_weight", batch.patch_weights, arrays["batch/masks_weight"])
    found = model(batch, {"teacher_temperature": settings["teacher_temp"]})
    total = model.total(found)
    total.backward()
    sample = model.health_sample
    ours = {f"loss_{form}/{name}": value for name, value in (found | {"total": total}).items()}
    ours["targets/patches"] = sample["patch_targets"]
    ours |= {f"logits/{side}": model.student.head(sample[f"from_{side}"]) for side in ("past", "future")}
    yield from compare(arrays, ours)
    parameters = dict(model.named_parameters())
    trained = {name for name, parameter in parameters.items() if parameter.requires_grad}
    yield same_names(gradients, map(our_name, tensors(arrays, f"{gradients}/")), trained)
    for name, golden in tensors(arrays, f"{gradients}/").items():
        yield deviation(f"{gradients}/{name}", parameters[our_name(name)].grad, golden, 1e-4)
    model.finish_step({"momentum": 1.0})
    yield deviation("after/dino_center", model.frame_center.value, arrays["after/dino_center"].ravel())
    yield deviation("after/patch_center", model.patch_center.value, arrays["after/patch_center"].ravel())


def take_step(
    model: SelfDistillation,
    settings: Mapping[str, Any],
    rates: dict[str, float],
    last: bool = True,
    **own: Any,
) -> None:
    """Clip and AdamW with the golden settings; where not `last`, prototypes stay."""
    betas, eps = tuple(settings["betas"]), settings["eps"]
    adamw = OptimConfig(clip=settings["clip"], betas=betas, eps=eps, **own)
    optimizer = optim.Optimizer(model.parts(), adamw, settings["depth"])
    optimizer.clip()
    lr = settings["lr"]
    every = dict.fromkeys(("backbone", "head", "last_layer"), lr) | rates
    optimizer.step(optim.StepValues(lr, every, last, settings["weight_decay"], {}))


def check_update(arrays: Arrays, settings: Mapping[str, Any]) -> Iterator[Deviation]:
    """Parameters after clip, AdamW and EMA, fed with the golden gradients."""
    model = golden_model(arrays, settings, "release")
    parameters = dict(model.named_parameters())
    for name, gradient in tensors(arrays, "grad/").items():
        parameters[our_name(name)].grad = gradient.clone()
    take_step(model, settings, {"match": settings["matching_lr"]})
    model.finish_step({"momentum": settings["teacher_momentum"]})
    after = {our_name(name) for name in tensors(arrays, "after/") if not name.endswith("_center")}
    yield same_names("after", after, parameters)
    for name, golden in tensors(arrays, "after/").items():
        if not name.endswith("_center"):
            yield deviation(f"after/{name}", parameters[our_name(name)], golden)


def check_training_step(arrays: Arrays) -> Iterator[Deviation]:
    """One whole step: losses and gradients in both forms, centers, parameters after the update."""
    settings = json.loads(str(arrays["settings"]))
    yield from check_losses_and_gradients(arrays, settings, "release", "grad")
    yield from check_losses_and_gradients(arrays, settings, "paper", "grad_paper")
    yield from check_update(arrays, settings)


def check_sinkhorn(arrays: Arrays) -> Iterator[Deviation]:
    """Targets that use all prototypes equally."""
    targets = losses.sinkhorn_targets(
        torch.from_numpy(arrays["outputs"]), float(arrays["temperature"]), int(arrays["iterations"])
    )
    yield deviation("targets", targets, arrays["targets"])


def check_schedules(arrays: Arrays) -> Iterator[Deviation]:
    """Learning rates, weight decay, momentum and temperature of 12 epochs of 7 steps."""
    lengths = {"optim.epochs": 12, "optim.warmup_epochs": 3, "teacher.temperature_epochs": 5}
    logged = logged_values("vits16-k400", lengths, 7, len(arrays["lr"]))
    names = {"pmm_lr": "lr_match", "wd": "weight_decay", "teacher_temp": "teacher_temperature"}
    for name in ("lr", "pmm_lr", "wd", "momentum", "teacher_temp"):
        ours = [values[names.get(name, name)] for values in logged[: len(arrays[name])]]
        yield deviation(name, ours, arrays[name])


def logged_values(
    name: str, changes: dict[str, Any], steps_per_epoch: int, count: int
) -> list[dict[str, float]]:
    """What a recipe, its networks made small, logs of its first steps."""
    small = {"vit.dim": 16, "vit.depth": 1, "vit.num_heads": 1, "head.hidden": 8, "head.prototypes": 8}
    config = recipe(name, small | changes)
    schedule = optim.build_schedule(config, methods.build(config), steps_per_epoch=steps_per_epoch)
    return [schedule.at(step).logged() for step in range(count)]


def rule_deviation(part: str, name: str, golden: Mapping[str, Any], **decay: Any) -> Deviation:
    """One parameter's rule beside the golden one."""
    last_layer = "prototypes." if part == "head" else ""
    rule = optim.parameter_rule(part, name, depth=12, last_layer=last_layer, **decay)
    # The release decays the matching module's in_proj_bias by accident of its name; ours does not.
    decayed = 0.0 if name.endswith("in_proj_bias") else golden["wd_multiplier"]
    ours = (rule.lr_multiplier, float(rule.decayed), float(rule.is_last_layer))
    theirs = (golden["lr_multiplier"], decayed, float(golden.get("is_last_layer", False)))
    return deviation(f"{part}.{name}", ours, theirs)


def check_backbone_groups(golden: Mapping[str, Any]) -> Iterator[Deviation]:
    """Shape, learning rate and decay of every parameter of ViT-S/16."""
    shapes = {name: list(p.shape) for name, p in VisionTransformer().named_parameters()}
    yield same_names("parameters", golden, shapes)
    for name in golden.keys() & shapes.keys():
        yield deviation(f"{name} shape", shapes[name], golden[name]["shape"])
        yield rule_deviation("backbone", name, golden[name], layer_decay=0.9, patch_embed_lr=0.2)


def check_other_groups(golden: Mapping[str, Any]) -> Iterator[Deviation]:
    """Learning rate, decay and schedule of every parameter of head and matching module."""
    parts = {"head": ProjectionHead(num_prototypes=8), "match": PatchMatchingModule()}
    ours = {f"{part}.{name}" for part, module in parts.items() for name, _ in module.named_parameters()}
    theirs = {rename(k, {"matching.": "match."} | MATCHING_NAMES | HEAD_NAMES): v for k, v in golden.items()}
    yield same_names("parameters", theirs, ours)
    for full in theirs.keys() & ours:
        part, name = full.split(".", 1)
        own_schedule = theirs[full].get("own_schedule", False)
        yield deviation(f"{full} own schedule", float(part == "match"), float(own_schedule))
        yield rule_deviation(part, name, theirs[full], layer_decay=0.9, patch_embed_lr=0.2)


def check_resize(arrays: Arrays) -> Iterator[Deviation]:
    """Ids to the grid and back, exactly; images within rounding."""
    input_size = arrays["ids_at_input"].shape
    grid = arrays["grid"].shape
    ids = torch.from_numpy(arrays["ids"])
    soft = torch.from_numpy(arrays["soft_grid"])
    yield deviation("ids_at_input", resize.resize_ids(ids, input_size), arrays["ids_at_input"], 0.0)
    ours = resize.ids_to_grid(ids, input_size=input_size, grid=grid[:2], num_classes=grid[2])
    yield deviation("grid", ours, arrays["grid"])
    for name in ("ids_from_soft_at_input", "ids_from_soft"):
        back = resize.grid_to_ids(soft, input_size=input_size, output_size=arrays[name].shape)
        yield deviation(name, back, arrays[name], 0.0)
    image = resize.resize_images(torch.from_numpy(arrays["image"]), arrays["image_resized"].shape[:2])
    yield deviation("image_resized", image.permute(1, 2, 0), arrays["image_resized"])


def check_propagation(arrays: Arrays) -> Iterator[Deviation]:
    """Labels carried through a clip with the repeated-first-frame rule."""
    ours = propagate_features(
        torch.from_numpy(arrays["features"]),
        torch.from_numpy(arrays["first_labels"]),
        Protocol(
            context=int(arrays["context"]),
            radius=float(arrays["radius"]),
            topk=int(arrays["topk"]),
            temperature=float(arrays["temperature"]),
            first_frame="repeated",
        ),
    )
    yield deviation("predictions", torch.stack(list(ours)), arrays["predictions"])


def check_pose_maps(arrays: Arrays) -> Iterator[Deviation]:
    """Joints to label maps."""
    maps = arrays["maps"]
    ours = pose.joint_label_map(
        arrays["points"].astype(np.float64), maps.shape[1:], sigma=float(arrays["sigma"])
    )
    yield deviation("maps", ours[:, :, 1:].transpose(2, 0, 1), maps)


def check_pose_readout(arrays: Arrays) -> Iterator[Deviation]:
    """Label maps to joints, empty channels included."""
    ours = pose.read_out(torch.from_numpy(arrays["label_maps"]), topk=int(arrays["topk"]))
    yield deviation("coordinates", ours, arrays["coordinates"])


def check_davis(arrays: Arrays) -> Iterator[Deviation]:
    """J and F of several objects, frame by frame and in short."""
    ours = scores.davis_scores(arrays["ground_truth"], arrays["prediction"])
    for number, one in enumerate(ours, start=1):
        yield from compare(arrays, {f"J_{number}": one[0], f"F_{number}": one[1]}, 1e-6)
    statistics = [[list(scores.object_statistics(values).values()) for values in one] for one in ours]
    yield deviation("statistics", statistics, arrays["statistics"], 1e-6)


def check_pck(arrays: Arrays) -> Iterator[Deviation]:
    """PCK pooled over clips, at every threshold of the file."""
    clips = sorted(name.removeprefix("pos_img_") for name in arrays if name.startswith("pos_img_"))
    truth, found = [], []
    for clip in clips:
        height, width = (int(side) for side in arrays[f"image_size_{clip}"])
        truth.append(pose.annotated_pixels(arrays[f"pos_img_{clip}"]))
        found.append(pose.grid_to_pixels(arrays[f"pred_grid_{clip}"], (height, width)))
    thresholds = {name: float(name.split("@")[1]) for name in arrays if name.startswith("pck@")}
    ours = scores.pck(truth, found, list(thresholds.values())).pck
    for name, value in zip(thresholds, ours, strict=True):
        yield deviation(name, [100 * value], arrays[name], 1e-6)


def check_miou(arrays: Arrays) -> Iterator[Deviation]:
    """One confusion matrix over all frames of all videos."""
    frames = [name.removesuffix("/ground_truth") for name in arrays if name.endswith("/ground_truth")]
    confusion = sum(
        scores.confusion_matrix(arrays[f"{frame}/ground_truth"], arrays[f"{frame}/prediction"])
        for frame in frames
    )
    assert isinstance(confusion, np.ndarray)
    yield deviation("miou", scores.mean_iou(confusion), arrays["miou"], 1e-6)


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


# The other methods' tensors; a folder that holds dino.npz is such a set.
DISTIL: dict[str, Callable[[Any], Iterator[Deviation]]] = {
    "dino.npz": check_dino,
    "schedules.npz": check_dino_schedules,
}

KNOWN: dict[str, Callable[[Any], Iterator[Deviation]]] = {
    "davis_metrics_multi_object.npz": check_davis,
    "label_and_image_resize.npz": check_resize,
    "param_groups_head_and_matching.json": check_other_groups,
    "param_groups_vits16.json": check_backbone_groups,
    "pck.npz": check_pck,
    "pmm_forward.npz": check_matching,
    "pose_label_maps.npz": check_pose_maps,
    "pose_readout.npz": check_pose_readout,
    "propagation_long_context.npz": check_propagation,
    "propagation_short_context.npz": check_propagation,
    "propagation_wide_radius.npz": check_propagation,
    "schedules.npz": check_schedules,
    "sinkhorn.npz": check_sinkhorn,
    "training_step.npz": check_training_step,
    "vip_miou.npz": check_miou,
    "vit_forward.npz": check_vit,
}


class Row(NamedTuple):
    """One line of the report."""

    file: str
    passed: bool
    text: str


def read(path: Path) -> Any:
    """The arrays or the JSON of a golden file."""
    if path.suffix == ".json":
        return json.loads(path.read_text(encoding="utf-8"))
    with np.load(path, allow_pickle=False) as arrays:
        return dict(arrays)


def check_file(path: Path) -> Row:
    """Compare one file; the row names the array that is farthest off for its tolerance."""
    if not path.is_file():
        return Row(path.name, False, "missing")
    try:
        arrays = read(path)
        # Files of one name are told apart by their keys.
        known = DISTIL if path.name in DISTIL and ("dino/lr" in arrays or path.name not in KNOWN) else KNOWN
        deviations = list(known[path.name](arrays))
    except Exception as error:
        return Row(path.name, False, f"cannot be compared: {error!r}")
    if not deviations:
        return Row(path.name, False, "holds nothing to compare")
    worst = max(deviations, key=lambda d: d.value / d.tolerance if d.tolerance else d.value * 1e12)
    passed = all(d.value <= d.tolerance for d in deviations)
    text = f"{len(deviations):4d} arrays, largest deviation {worst.value:.1e} ({worst.name})"
    return Row(path.name, passed, text)


def check_folder(folder: Path) -> list[Row]:
    """A row for every known file, and one for every file that is none of them."""
    # The package keeps its own files of other kinds here; golden sets are .npz and .json.
    ours = {"__init__.py", "check.py", "test_golden.py", "README.md"}
    found = {path.name for path in folder.iterdir() if path.is_file()} if folder.is_dir() else set()
    known = DISTIL if "dino.npz" in found else KNOWN
    unknown = [Row(name, False, "unknown file") for name in sorted(found - known.keys() - ours)]
    return [check_file(folder / name) for name in known] + unknown


def main(arguments: list[str]) -> int:
    """Print the report; 0 where everything agrees."""
    if len(arguments) != 1:
        print("usage: python tests/golden/check.py DIR", file=sys.stderr)
        return 2
    rows = check_folder(Path(arguments[0]))
    for row in rows:
        print(f"{'ok  ' if row.passed else 'FAIL'}  {row.file:36}  {row.text}")
    failed = sum(not row.passed for row in rows)
    print(f"{len(rows) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
