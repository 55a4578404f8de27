"""T-CoRe's golden files: every value comes from the functions that training and evaluation call."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tcore.evaluation import pose, resize, scores
from tcore.evaluation.checkpoints import translate
from tcore.evaluation.propagate import propagate_features
from tcore.evaluation.protocols import Protocol
from tcore.methods.batch import Batch, make_batch
from tcore.methods.matching import PatchMatchingModule
from tcore.methods.settings import LossConfig, LossForm
from tcore.methods.tcore import TCoRe
from tcore.model import losses
from tcore.model.heads import ProjectionHead
from tcore.model.vit import VisionTransformer
from tcore.training import optim
from tests.golden.compare import (
    SMALL,
    Arrays,
    Check,
    Deviation,
    compare,
    deviation,
    logged_values,
    read_settings,
    same_names,
    take_step,
    tensors,
)

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
    loss = LossConfig(
        form=form,
        dino=settings["w_dino"],
        past_teacher=settings["w_pt"],
        future_teacher=settings["w_ft"],
        past_future=settings["w_pf"],
        koleo=settings["w_koleo"],
        student_temperature=settings["student_temp"],
    )
    model = TCoRe(backbone, head, match, loss=loss)
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
    settings = read_settings(arrays)
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
    logged = logged_values("vits16-k400", SMALL | lengths, 7, len(arrays["lr"]))
    names = {"pmm_lr": "lr_match", "wd": "weight_decay", "teacher_temp": "teacher_temperature"}
    for name in ("lr", "pmm_lr", "wd", "momentum", "teacher_temp"):
        ours = [values[names.get(name, name)] for values in logged[: len(arrays[name])]]
        yield deviation(name, ours, arrays[name])


def rule_deviation(part: str, name: str, golden: Mapping[str, Any], **decay: Any) -> Deviation:
    """One parameter's rule beside the golden one."""
    last_layer = ("prototypes.",) if part == "head" else ()
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


FILES: dict[str, Check] = {
    "davis_metrics_multi_object.npz": Check(check_davis),
    "label_and_image_resize.npz": Check(check_resize),
    "param_groups_head_and_matching.json": Check(check_other_groups),
    "param_groups_vits16.json": Check(check_backbone_groups),
    "pck.npz": Check(check_pck),
    "pmm_forward.npz": Check(check_matching),
    "pose_label_maps.npz": Check(check_pose_maps),
    "pose_readout.npz": Check(check_pose_readout),
    "propagation_long_context.npz": Check(check_propagation),
    "propagation_short_context.npz": Check(check_propagation),
    "propagation_wide_radius.npz": Check(check_propagation),
    "schedules.npz": Check(check_schedules, key="pmm_lr"),
    "sinkhorn.npz": Check(check_sinkhorn),
    "training_step.npz": Check(check_training_step),
    "vip_miou.npz": Check(check_miou),
    "vit_forward.npz": Check(check_vit),
}
