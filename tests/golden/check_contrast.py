"""Golden files of SimCLR, MoCo v3, CrOC and ODIN."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tcore.methods.batch import make_batch
from tcore.methods.contrast import Contrast
from tcore.methods.regions import Croc, RegionBatch
from tcore.methods.settings_groups import ContrastConfig, RegionConfig, TeacherConfig
from tcore.model.clustering import (
    assign,
    carry_labels,
    cluster,
    k_means,
    patch_positions,
    pool,
    seed_probability,
)
from tcore.model.contrast import Projector, contrast_rows, object_contrast_rows
from tcore.model.heads import ProjectionHead
from tcore.model.positions import grid_positions
from tcore.model.vit import VisionTransformer
from tests.golden.compare import (
    Arrays,
    Check,
    Deviation,
    compare,
    deviation,
    encoder_sizes,
    read_settings,
    same_names,
    take_step,
    tensors,
)

CLUSTERINGS = 2e-4  # they amplify rounding
HEADS = ("region_prototypes", "patch_prototypes")  # theirs, ours


def tensor(arrays: Arrays, name: str) -> Tensor:
    return torch.from_numpy(arrays[name])


def both(arrays: Arrays, name: str) -> Tensor:
    """The arrays of the first and the second view."""
    return torch.stack([tensor(arrays, f"{name}_{view}") for view in ("first", "second")])


def load(module: nn.Module, state: Mapping[str, Tensor], absent: set[str]) -> None:
    """Load what is stored; running statistics start anew, and `absent` weights do not exist there."""
    odd = module.load_state_dict(state, strict=False)
    missing = {name for name in odd.missing_keys if "running_" not in name}
    assert missing == absent, odd
    assert not odd.unexpected_keys, odd


def gradients(
    arrays: Arrays, prefix: str, module: nn.Module, rename: Mapping[str, str] | None = None
) -> Iterator[Deviation]:
    """Every gradient of a module; those that vanish in exact arithmetic are compared absolutely."""
    settings, grads = read_settings(arrays), tensors(arrays, prefix)
    found = {(rename or {}).get(n, n): p.grad for n, p in module.named_parameters() if p.grad is not None}
    yield same_names(prefix, grads, (name for name, grad in found.items() if grad.numel()))
    for name, golden in grads.items():
        zero = name in settings.get("vanishing_gradients", ())
        yield near(f"{prefix}{name}", found[name], golden * (not zero), 1e-4)


def near(name: str, ours: Tensor, golden: Tensor, tolerance: float = 1e-5) -> Deviation:
    """The deviation; what vanishes in exact arithmetic is compared absolutely."""
    if float(golden.abs().max()) < 1e-6:
        return Deviation(name, float((ours - golden).abs().max()), 1e-6)
    return deviation(name, ours, golden, tolerance)


def frame_encoder(settings: Mapping[str, Any], **own: Any) -> VisionTransformer:
    """The backbone of a golden file: its mask token does not learn."""
    backbone = VisionTransformer(**encoder_sizes(settings, **own))
    backbone.mask_token.requires_grad_(False)
    return backbone


# SimCLR.


def check_simclr(arrays: Arrays) -> Iterator[Deviation]:
    """Layers of the projector, similarities, rows of the loss, and gradients."""
    settings = read_settings(arrays)
    features = tensor(arrays, "features").requires_grad_()
    sizes = {"dim": settings["dim"], "hidden": settings["dim"], "out": settings["out"]}
    projector = Projector(**sizes, layers=3, last_norm="scale")
    places = {"weight": 0, "scale": 1, "bias": 1}
    names = {
        f"{3 * int(layer) + places[kind]}.{'bias' if kind == 'bias' else 'weight'}": f"{layer}.{kind}"
        for layer, kind in (name.split(".") for name in tensors(arrays, "projector/"))
    }
    stored = tensors(arrays, "projector/")
    load(projector, {ours: stored[theirs] for ours, theirs in names.items()}, set())
    x = features[None]
    for index, layer in enumerate(projector):
        x = layer(x)
        if isinstance(layer, nn.ReLU) or index == len(projector) - 1:
            yield deviation(f"layers/{index // 3}", x[0], arrays[f"layers/{index // 3}"])
    z = F.normalize(projector(features[None]), dim=-1).reshape(2, settings["pairs"], -1)
    similarities = (z.flatten(0, 1) @ z.flatten(0, 1).T / settings["temperature"]).fill_diagonal_(0)
    rows = contrast_rows(z, z, settings["temperature"], both_views=True)
    first, second = rows.mean(dim=1)
    ours = {"projections": z.flatten(0, 1), "rows": rows.flatten(), "similarities": similarities}
    ours |= {"loss/first": first, "loss/second": second, "loss/sum": first + second}
    ours["loss/mean"] = (first + second) / 2
    yield from compare(arrays, ours)
    (first + second).backward()
    yield from gradients(arrays, "grad/projector.", projector, names)
    yield deviation("grad/features", features.grad, arrays["grad/features"], 1e-4)


# MoCo v3.


def moco_model(arrays: Arrays, settings: Mapping[str, Any]) -> Contrast:
    """Student, predictor and teacher as stored, the teacher before its move."""
    backbone = frame_encoder(settings, positions="sincos", train_patch_embed=False)
    hidden, out = settings["hidden"], settings["out"]
    model = Contrast(
        backbone,
        Projector(dim=settings["dim"], hidden=hidden, out=out, layers=3),
        Projector(dim=out, hidden=hidden, out=out, layers=2),
        ContrastConfig(temperature=settings["temperature"], momentum=(settings["momentum"], 1.0)),
    )
    student, absent = tensors(arrays, "student/"), {"backbone.register_tokens", "backbone.mask_token"}
    assert model.teacher is not None
    assert model.predictor is not None
    load(model.student, {k: v for k, v in student.items() if not k.startswith("predictor.")}, absent)
    load(model.teacher, tensors(arrays, "teacher/"), absent)
    load(model.predictor, tensors(arrays, "student/predictor."), set())
    return model


def check_mocov3(arrays: Arrays) -> Iterator[Deviation]:
    """Tokens, projections, queries, keys, losses, gradients, and every state after a step."""
    settings = read_settings(arrays)
    model, views = moco_model(arrays, settings), ("first", "second")
    assert model.teacher is not None
    assert model.predictor is not None
    crops = torch.cat([tensor(arrays, f"views/{view}") for view in views])
    # Its code moves the teacher inside the step; ours did at the end of the step before.
    model.finish_step({"momentum": settings["momentum"]})
    yield from states(arrays, "after/teacher/", model.teacher, 1e-5)
    batch = make_batch(crops, None, torch.zeros(len(crops), 0, dtype=torch.bool))
    found = model(batch, {})
    model.total(found).backward()
    yield deviation("loss/contrast", found["contrast"], arrays["loss/contrast"])
    trained = nn.ModuleDict({"predictor": model.predictor, **dict(model.student.named_children())})
    frozen = {name for name, p in trained.named_parameters() if not p.requires_grad}
    yield same_names("frozen", settings["frozen"], frozen - {"backbone.mask_token"})
    yield from gradients(arrays, "grad/", trained)
    for prefix, module in (("after/running/", trained), ("after/teacher_running/", model.teacher)):
        running = {name: x for name, x in module.state_dict().items() if "running_" in name}
        yield same_names(prefix, tensors(arrays, prefix), running)
        for name, golden in tensors(arrays, prefix).items():
            yield near(f"{prefix}{name}", running[name], golden)
    yield from check_mocov3_rows(arrays, settings)
    for name, parameter in trained.named_parameters():  # of rows this few, rounding is all that differs
        if parameter.grad is not None and parameter.numel():
            parameter.grad = tensor(arrays, f"grad/{name}").clone()
    lr = settings["lr"]
    rates = {"projector": lr, "predictor": lr}
    take_step(model, settings | {"clip": 1.0}, rates, clip_by="none", decay_all=True)
    yield from states(arrays, "after/student/", trained, 2e-4)


@torch.no_grad()
def check_mocov3_rows(arrays: Arrays, settings: Mapping[str, Any]) -> Iterator[Deviation]:
    """What lies on the way to the loss."""
    model, views = moco_model(arrays, settings), ("first", "second")
    assert model.teacher is not None
    assert model.predictor is not None
    model.finish_step({"momentum": settings["momentum"]})
    crops = torch.cat([tensor(arrays, f"views/{view}") for view in views])
    tokens, seen = model.student.backbone(crops), model.teacher.backbone(crops)
    every = torch.cat([tokens.frame[:, None], tokens.patches], dim=1).chunk(2)
    projected = model.student.projector(tokens.frame.unflatten(0, (2, -1)))
    queries, keys = model.predictor(projected), model.teacher.projector(seen.frame.unflatten(0, (2, -1)))
    rows = contrast_rows(
        F.normalize(queries, dim=-1), F.normalize(keys, dim=-1), settings["temperature"], both_views=False
    )
    named = {"tokens/student_": every, "projections/student_": projected, "queries/": queries, "keys/": keys}
    named["loss/"] = 2 * settings["temperature"] * rows.mean(dim=1)
    for name, values in named.items():
        yield from compare(arrays, {f"{name}{view}": x for view, x in zip(views, values, strict=True)})


def states(arrays: Arrays, prefix: str, module: nn.Module, tolerance: float) -> Iterator[Deviation]:
    """Parameters after a step."""
    parameters = dict(module.named_parameters())
    absent = {"backbone.register_tokens", "backbone.mask_token"}
    yield same_names(prefix, tensors(arrays, prefix), set(parameters) - absent)
    for name, golden in tensors(arrays, prefix).items():
        yield deviation(prefix + name, parameters[name], golden, tolerance)


def check_mocov3_parts(arrays: Arrays) -> Iterator[Deviation]:
    """Fixed positions of two sizes."""
    settings = read_settings(arrays)
    for name, dim, side in (
        ("positions_small", settings["dim_small"], settings["grid_small"]),
        ("positions_224_dim16", 16, 14),
    ):
        patches = grid_positions(side, side, dim, row_first=True)
        yield deviation(name, F.pad(patches, (0, 0, 1, 0))[None], arrays[name])


# CrOC.


def croc_model(arrays: Arrays, settings: Mapping[str, Any], *, fused: bool) -> Croc:
    """Student, teacher and centers as stored."""
    backbone = frame_encoder(settings)
    head = ProjectionHead(
        dim=settings["dim"],
        hidden=settings["hidden"],
        bottleneck=settings["bottleneck"],
        num_prototypes=settings["K"],
        num_patch_prototypes=settings["Kc"],
    )
    regions = RegionConfig(
        weight=settings["region_weight"],
        seeds=settings["n_tokens"],
        most=settings["n_centroids_max"],
        position_weight=settings["pos_alpha"],
        sharpness=settings["sinkhorn_lambda"],
        iterations=settings["sinkhorn_iterations"],
        marginal_temperature=settings["marginals_temp_r"],
    )
    teacher = TeacherConfig(center_momentum=settings["center_momentum"])
    temperature = settings["student_temperature"]
    model = Croc(backbone, head, regions, teacher=teacher, student_temperature=temperature, fused=fused)
    absent = {"backbone.register_tokens", "backbone.mask_token"}
    for network, prefix in ((model.student, "student/"), (model.teacher, "teacher/")):
        state = tensors(arrays, prefix)
        load(network, {name.replace(*HEADS): x for name, x in state.items()}, absent)
    model.frame_center.value.copy_(tensor(arrays, "frame_center"))
    model.patch_center.value.copy_(tensor(arrays, "region_center"))
    return model


class FixedSeeds(Croc):
    """CrOC whose clusters start from given tokens."""

    seeds: Tensor

    def draw_seeds(self, marginal: Tensor, batch: RegionBatch) -> Tensor:
        """Those of the golden file."""
        return self.seeds


def check_croc(arrays: Arrays) -> Iterator[Deviation]:
    """Positions, keys, clusters, regions, outputs, losses and gradients by both twins, centers."""
    settings = read_settings(arrays)
    crops, boxes, flips = (tensor(arrays, name) for name in ("views/crops", "boxes", "flips"))
    views = make_batch(crops, None, torch.zeros(len(crops), 0, dtype=torch.bool))
    batch = RegionBatch(views, boxes, flips, torch.arange(settings["batch"]))
    grid = settings["image"] // settings["patch"]
    places = patch_positions(boxes.flatten(0, 1), flips.flatten(), grid)
    yield deviation("positions", places.unflatten(0, (2, -1)), arrays["positions"])
    yield from check_croc_clusters(arrays, settings)
    values = {"teacher_temperature": settings["teacher_temperature"], "momentum": 1.0}
    values["patch_teacher_temperature"] = settings["region_teacher_temperature"]
    for fused in (False, True):
        model = croc_model(arrays, settings, fused=fused)
        model.__class__ = FixedSeeds
        assert isinstance(model, FixedSeeds)
        model.seeds = tensor(arrays, "seeds")
        found = model(batch, values)
        total = model.total(found)
        total.backward()
        ours = {f"loss/{name}": value for name, value in (found | {"total": total}).items()}
        yield from compare(arrays, ours)
        names = {name: name.replace(HEADS[1], HEADS[0]) for name, _ in model.student.named_parameters()}
        yield from gradients(arrays, "grad/", model.student, names)
        model.finish_step(values)
        yield deviation("after/frame_center", model.frame_center.value, arrays["after/frame_center"])
        yield deviation("after/region_center", model.patch_center.value, arrays["after/region_center"])
        yield from check_croc_outputs(arrays, model, batch)


def check_croc_clusters(arrays: Arrays, settings: Mapping[str, Any]) -> Iterator[Deviation]:
    """Every step of the clustering, from the stored keys, positions and seeds."""
    videos, heads = settings["batch"], settings["heads"]
    keys = F.normalize(tensor(arrays, "keys/teacher").unflatten(0, (2, -1)), dim=-1).transpose(0, 1)
    tokens, places = keys[:, :, 1:].flatten(1, 2), tensor(arrays, "positions")
    places = places.transpose(0, 1).flatten(1, 2).repeat_interleave(heads, 0)
    share = seed_probability(tokens, keys[:, :, 0], settings["marginals_temp_r"])
    yield from compare(arrays, {"probability": share, "row_marginal": share})
    regions = croc_model(arrays, settings, fused=False).regions
    plans = cluster(tokens, places, share, tensor(arrays, "seeds"), regions)
    for plan in plans:
        ours = {f"clusters_{plan.plan.shape[2]}/{name}": x for name, x in plan._asdict().items()}
        yield from compare(arrays, ours, CLUSTERINGS)
    yield deviation("assignments", assign(plans, regions.most), arrays["assignments"], CLUSTERINGS)
    assert len(share) == videos * heads


@torch.no_grad()
def check_croc_outputs(arrays: Arrays, model: FixedSeeds, batch: RegionBatch) -> Iterator[Deviation]:
    """Tokens, keys, regions and outputs of both networks, regions in the order of the file."""
    heads, crops = model.teacher.backbone.num_heads, batch.views.global_crops
    seen = model.teacher.backbone(crops, wanted="keys")
    assert seen.keys is not None
    keys = seen.keys.unflatten(2, (heads, -1)).transpose(1, 2).flatten(0, 1)
    found = model.find_regions(seen, batch)
    yield from compare(arrays, {"keys/teacher": keys})
    yield deviation("valid", found.valid.flatten().nonzero()[:, 0], sorted(arrays["valid"]), 0.0)
    order = tensor(arrays, "valid")
    for who, network in (("teacher", model.teacher), ("student", model.student)):
        tokens = network.backbone(crops)
        regions = model.region_vectors(tokens, found).unflatten(0, (2, -1))[:, order]
        every = torch.cat([tokens.frame[:, None], tokens.patches], dim=1)
        rows = network.head.project(regions.flatten(0, 1))
        ours = {f"tokens/{who}": every, f"outputs/{who}": network.head(tokens.frame)}
        yield from compare(arrays, ours)
        ours = {f"regions/{who}_first": regions[0], f"regions/{who}_second": regions[1]}
        ours[f"outputs/{who}_regions"] = rows @ network.head.weights()[1].T
        yield from compare(arrays, ours, CLUSTERINGS)


# ODIN.


def check_odin(arrays: Arrays) -> Iterator[Deviation]:
    """DetCon-B's loss, and every part of our reading of ODIN."""
    settings = read_settings(arrays)
    predictions = both(arrays, "detcon/prediction").requires_grad_()
    targets, ids = F.normalize(both(arrays, "detcon/target"), dim=-1), both(arrays, "detcon/ids")
    once = torch.arange(ids.shape[2]).expand_as(ids)
    for name, which in (("loss_each_id_once", once), ("loss", ids)):
        queries = F.normalize(predictions, dim=-1)
        rows = object_contrast_rows(queries, targets, which, which, settings["detcon_temperature"])
        loss = rows.mean(dim=(1, 2)).sum()
        yield deviation(f"detcon/{name}", loss, arrays[f"detcon/{name}"])
    loss.backward()
    yield deviation("detcon/grad", predictions.grad, both(arrays, "detcon/grad"), 1e-4)
    features, start = tensor(arrays, "odin/discovery_features").flatten(1, 2), arrays["odin/start_cells"]
    labels, again = (
        k_means(features, torch.from_numpy(start), settings["kmeans_iterations"] + more) for more in (0, 1)
    )
    golden = arrays["odin/labels_discovery"].reshape(labels.shape)
    yield deviation("odin/labels_discovery", labels, golden, 0.0)
    cells = F.normalize(features, dim=-1)
    centers, _ = pool(cells, labels, settings["clusters"])
    apart = (cells - centers.gather(1, labels[..., None].expand_as(cells))).square().sum(dim=(1, 2))
    still = (labels == again).all(dim=1)  # elsewhere the last centers are not yet the means
    yield deviation("odin/inertia", apart[still], tensor(arrays, "odin/inertia")[still])
    grid = arrays["odin/labels_views"].shape[2]
    boxes, flips = tensor(arrays, "odin/boxes"), tensor(arrays, "odin/flips")
    around, pairs = tensor(arrays, "odin/box_discovery"), zip(boxes, flips, strict=True)
    carried = torch.stack([carry_labels(labels, around, *view, grid) for view in pairs])
    yield deviation("odin/labels_views", carried, arrays["odin/labels_views"].reshape(carried.shape), 0.0)
    yield from check_odin_regions(arrays, settings, carried)


def check_odin_regions(arrays: Arrays, settings: Mapping[str, Any], labels: Tensor) -> Iterator[Deviation]:
    """Pooling, projector, predictor, loss and gradients; masks that a view lacks take no part."""
    clusters = settings["clusters"]
    student = both(arrays, "odin/features_student").requires_grad_()
    videos, dim = student.shape[1], student.shape[3]
    hidden, out = arrays["odin/student/projector.3.weight"].shape[::-1]
    own: dict[str, Any] = {"hidden": hidden, "out": out, "layers": 2, "last_norm": "none", "bias": True}
    online = nn.ModuleDict({"projector": Projector(dim=dim, **own), "predictor": Projector(dim=out, **own)})
    target = nn.ModuleDict({"projector": Projector(dim=dim, **own)})
    load(online, tensors(arrays, "odin/student/"), set())
    load(target, tensors(arrays, "odin/teacher/"), set())

    def pooled(features: Tensor) -> tuple[Tensor, Tensor]:
        found, present = pool(features.flatten(0, 1), labels.flatten(0, 1), clusters)
        return found.unflatten(0, (2, videos)).flatten(1, 2), present.unflatten(0, (2, videos)).all(dim=0)

    regions, valid = pooled(student)
    yield deviation("odin/valid", valid, arrays["odin/valid"], 0.0)
    counted = valid.flatten().expand(2, -1)
    queries = online["predictor"](online["projector"](regions, counted), counted)
    keys = target["projector"](pooled(both(arrays, "odin/features_teacher"))[0], counted)
    ids = torch.where(valid, torch.arange(clusters), -1).expand(2, -1, -1)
    asked, seen = (F.normalize(x, dim=-1).unflatten(1, (videos, clusters)) for x in (queries, keys))
    rows = object_contrast_rows(asked, seen, ids, ids, settings["temperature"])
    first, second = rows.sum(dim=(1, 2)) / valid.sum()
    (first + second).backward()
    ours = {"odin/loss_first": first, "odin/loss_second": second, "odin/loss": first + second}
    for index, view in enumerate(("first", "second")):
        ours |= {
            f"odin/query_{view}": queries[index, counted[0]],
            f"odin/key_{view}": keys[index, counted[0]],
        }
    yield from compare(arrays, ours)
    yield deviation("odin/grad_features", student.grad, both(arrays, "odin/grad_features"), 1e-4)
    yield from gradients(arrays, "odin/grad/", online)


STEM = "lars/* (there is no ResNet to train with it) and the convolution stem stem* (no recipe has it)"
FILES: dict[str, Check] = {
    "simclr.npz": Check(check_simclr, key="projector/0.scale"),
    "mocov3.npz": Check(check_mocov3, key="grad/predictor.0.weight"),
    "mocov3_parts.npz": Check(check_mocov3_parts, key="positions_small", left_out=STEM),
    "croc.npz": Check(check_croc, key="clusters_2/plan"),
    "odin.npz": Check(check_odin, key="odin/labels_views"),
}
