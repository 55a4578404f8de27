"""Named experiments: a Config each, with what it costs and what to expect."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tcore.config import (
    Config,
    OptimConfig,
    Photometry,
    RenderedConfig,
    RuntimeConfig,
    ViewsConfig,
    VitSpec,
    flatten,
    override,
)
from tcore.errors import InputError
from tcore.methods.settings import (
    ContrastSettings,
    CrocSettings,
    DinoSettings,
    Dinov2Settings,
    IbotSettings,
    LossConfig,
    MatchingConfig,
    MethodSettings,
    OdinSettings,
    TCoReSettings,
)
from tcore.methods.settings_groups import (
    ContrastConfig,
    FrameMaskingConfig,
    HeadConfig,
    MaskingConfig,
    ObjectContrastConfig,
    PatchHeadConfig,
    PatchLossConfig,
    PatchTeacherConfig,
    PredictorConfig,
    ProjectorConfig,
    RegionConfig,
    TeacherConfig,
)
from tcore.pixel_recipes import PIXEL_RECIPES
from tcore.text import did_you_mean

VIT_TI = VitSpec(dim=192, num_heads=3)
VIT_S = VitSpec(dim=384, num_heads=6)
VIT_B = VitSpec(dim=768, num_heads=12)
VIT_L = VitSpec(dim=1024, depth=24, num_heads=16)


@dataclass(frozen=True)
class Recipe:
    """A named experiment."""

    config: Config
    says: str
    """What it is, what it costs, what to expect."""


# The released form of the patch losses produced the published numbers.
VITS16_K400 = Config(TCoReSettings(loss=LossConfig(form="release")), vit=VIT_S)

# Short runs do not get over the plateau at ln K with the published settings; these leave it at once.
QUICKSTART = Config(
    TCoReSettings(
        matching=MatchingConfig(num_heads=4),
        head=HeadConfig(hidden=256, bottleneck=64, prototypes=128, train_gains=False),
        teacher=TeacherConfig(targets="sinkhorn", momentum=(0.98, 1.0), temperature=(0.01, 0.01)),
    ),
    vit=VitSpec(dim=96, depth=4, num_heads=3, patch_size=8, layer_scale=0.5, drop_path=0.0),
    views=ViewsConfig(global_size=64, local_size=32, num_local=4),
    optim=OptimConfig(steps=600, batch=16, base_lr=0.008),
    rendered=RenderedConfig(videos=128),
    checkpoint_every=100,
    runtime=RuntimeConfig(log_every=25),
)

# Found by search (docs/LOG.md): small crops and a reach that keeps large frames from being anything new,
# positions that differ from the start, colors left alone, masks in every crop, few prototypes, LayerScale 1.
SHORT_HEAD = HeadConfig(hidden=1024, prototypes=1024, train_gains=False)
SHORT_TEACHER = TeacherConfig(targets="sinkhorn", momentum=(0.98, 1.0), temperature=(0.01, 0.01))
VITS16_TCORE_SHORT = Config(
    TCoReSettings(
        masking=MaskingConfig(probability=1.0, ratio=(0.3, 0.7)), head=SHORT_HEAD, teacher=SHORT_TEACHER
    ),
    vit=replace(VIT_S, layer_scale=1.0, drop_path=0.0, position_std=0.3, reach=3),
    views=ViewsConfig(global_size=128, local_size=64, color=0.0),
    optim=OptimConfig(steps=1000, batch=128, base_lr=1.4e-3, matching_lr=1.0),
    keep_every=500,
    runtime=RuntimeConfig(log_every=25),
)
# Within this budget the auxiliary branch gains a ViT-S nothing and costs time (docs/LOG.md).
VITS16_SHORT = override(VITS16_TCORE_SHORT, {"auxiliary": "none"})

# The other methods. How their published rows on Kinetics-400 were trained is not known: batch (256), epochs
# (400) and warm-up (20) are T-CoRe's, one frame of a video an epoch; the rest is as in the methods' own code.

# DINO (arXiv:2104.14294; ViT-S/16: the last layer has trained gains, the temperature rises over 30 epochs).
VITS16_DINO_K400 = Config(
    DinoSettings(teacher=TeacherConfig(momentum=(0.996, 1.0), temperature_by="epoch")),
    vit=replace(
        VIT_S,
        num_registers=0,
        layer_scale=None,
        drop_path_rule="linear",
        drop_path_form="sample",
        position_resize="factor",
        class_std=0.02,
    ),
    views=ViewsConfig(global_area=(0.4, 1.0), local_area=(0.05, 0.4), photometry="dino", flip_global=0.5),
    optim=OptimConfig(
        base_lr=5e-4, lr_rule="linear/256", clip_by="parameter", freeze_last_layer_epochs=1, freeze="gradient"
    ),
)

# iBOT's published ViT-S/16 (arXiv:2111.07832): DINO's encoder and optimizer, one head for frames and patches.
VITS16_IBOT_K400 = replace(
    VITS16_DINO_K400,
    method=IbotSettings(),
    views=replace(VITS16_DINO_K400.views, num_local=10, global_area=(0.25, 1.0), local_area=(0.05, 0.25)),
)

# DINOv2's default configuration (arXiv:2304.07193) with T-CoRe's drop path and learning rate. T-CoRe derives
# from its code, which flips global crops and has no registers and another resize of positions.
VITS16_DINOV2_K400 = Config(
    Dinov2Settings(),
    vit=replace(VIT_S, num_registers=0, position_resize="factor"),
    views=ViewsConfig(flip_global=0.5),
)

# Two crops of BYOL's kind, and AdamW as in MoCo v3 (arXiv:2104.02057), which decays everything and clips
# nothing. How the published rows of SimCLR and MoCo v3 on Kinetics-400 were trained is not known: batch 1,024
# is MoCo v3's on one machine, the warm-up takes its 40 epochs.
TWO_VIEWS = ViewsConfig(num_local=0, global_area=(0.08, 1.0), photometry="byol", flip_global=0.5)
MOCO_OPTIM = OptimConfig(
    batch=1024,
    warmup_epochs=40,
    warmup_peak="once",
    base_lr=1.5e-4,
    lr_rule="linear/256",
    end_lr=0.0,
    weight_decay=(0.1, 0.1),
    decay_all=True,
    clip_by="none",
)
PLAIN_VIT_S = replace(VIT_S, num_registers=0, layer_scale=None, drop_path=0.0)
SIMCLR = ContrastSettings(
    projector=ProjectorConfig(hidden=384, out=128, last_norm="scale"),
    predictor=PredictorConfig(layers=0),
    contrast=ContrastConfig(
        temperature=0.1, negatives="both-views", norm_over="both", scale="mean", momentum=None
    ),
)

# CrOC's optimizer, encoder and views are DINO's (arXiv:2303.13245; the defaults of its code, the released
# run's own are not known). There is no row on Kinetics-400: batch, epochs and warm-up are T-CoRe's.
VITS16_CROC_K400 = replace(
    VITS16_DINO_K400,
    method=CrocSettings(
        head=PatchHeadConfig(train_gains=False, patch_prototypes=8192),
        teacher=PatchTeacherConfig(momentum=(0.996, 1.0), temperature=(0.04, 0.04), temperature_epochs=0),
    ),
    views=ViewsConfig(num_local=0, global_area=(0.25, 1.0), photometry="dino", flip_global=0.5),
)


def short(
    method: MethodSettings, photometry: Photometry, *, num_local: int = 0, color: float = 1.0
) -> Config:
    """Budget, crops, encoder and data of `vits16-short` for another method, with its own views."""
    views = replace(
        VITS16_SHORT.views, num_local=num_local, photometry=photometry, color=color, flip_global=0.5
    )
    optim = replace(VITS16_SHORT.optim, matching_lr=OptimConfig.matching_lr)
    return replace(VITS16_SHORT, method=method, views=views, optim=optim)


# Self-distillation as in VITS16_SHORT: local crops, colors left alone, few prototypes with fixed gains, a
# teacher that follows within the run, masks in every crop. DINO and iBOT keep their centers and temperatures;
# DINOv2 has Sinkhorn, as in its paper.
CENTERED: dict[str, Any] = {"momentum": SHORT_TEACHER.momentum, "temperature": (0.04, 0.04)}
SHORT_MASKS = FrameMaskingConfig(probability=1.0, ratio=(0.3, 0.7), fill=False)

RECIPES: dict[str, Recipe] = {
    "vits16-k400": Recipe(
        VITS16_K400, "ViT-S/16 on Kinetics-400, 400 epochs as published: 64.7 J&F on DAVIS, 37.8 mIoU on VIP."
    ),
    "vitb16-k400": Recipe(
        replace(
            VITS16_K400,
            vit=VIT_B,
            optim=OptimConfig(epochs=200, warmup_epochs=10, batch=128, base_lr=1e-3, matching_lr=0.13),
        ),
        "ViT-B/16 on Kinetics-400, 200 epochs as published: 66.4 J&F on DAVIS, 38.9 mIoU on VIP.",
    ),
    # 8 GPUs: torchrun --nproc-per-node 8 -m tcore -- train vitl16-k400 --frames STORE
    "vitl16-k400": Recipe(
        replace(
            VITS16_K400,
            vit=VIT_L,
            optim=OptimConfig(epochs=200, warmup_epochs=10, batch=128, base_lr=1e-3, matching_lr=0.13),
            runtime=RuntimeConfig(sharding="shard"),
        ),
        "ViT-L/16 on Kinetics-400, 200 epochs with the settings of ViT-B, sharded; no published number.",
    ),
    "vits16-k400-100ep": Recipe(
        replace(VITS16_K400, optim=OptimConfig(epochs=100, warmup_epochs=10)),
        "ViT-S/16 on Kinetics-400, 100 epochs: the protocol of the paper's ablations, 64.4 J&F on DAVIS.",
    ),
    # Two stages: the features of a first run without the auxiliary branch find the neighbors of the second.
    #   tcore train vits16-imagenet --auxiliary none --frames IMAGES --run A
    #   tcore neighbors IMAGES --encoder A
    #   tcore train vits16-imagenet --frames IMAGES --run B
    "vits16-imagenet": Recipe(
        replace(
            VITS16_K400,
            method=TCoReSettings(auxiliary="past", loss=LossConfig(form="release")),
            source="images",
            optim=OptimConfig(epochs=100, warmup_epochs=10),
        ),
        "ViT-S/16 on ImageNet with neighbors (docs/images.md), 100 epochs as published: 64.1 J&F on DAVIS.",
    ),
    "vits16-dino-k400": Recipe(
        VITS16_DINO_K400,
        "DINO, ViT-S/16 on Kinetics-400, 400 epochs: 59.5 J&F on DAVIS in T-CoRe's table, protocol unknown.",
    ),
    "vits16-ibot-k400": Recipe(
        VITS16_IBOT_K400, "iBOT, ViT-S/16 on Kinetics-400, 400 epochs: 63.5 J&F on DAVIS by T-CoRe's authors."
    ),
    "vits16-dinov2-k400": Recipe(
        VITS16_DINOV2_K400,
        "DINOv2, ViT-S/16 on Kinetics-400, 400 epochs: 63.0 J&F on DAVIS by T-CoRe's authors.",
    ),
    "vits16-simclr-k400": Recipe(
        Config(SIMCLR, vit=PLAIN_VIT_S, views=replace(TWO_VIEWS, photometry="simclr"), optim=MOCO_OPTIM),
        "SimCLR, ViT-S/16 on Kinetics-400, 400 epochs: 53.9 J&F on DAVIS in the paper's table.",
    ),
    "vits16-mocov3-k400": Recipe(
        Config(
            ContrastSettings(),
            vit=replace(
                PLAIN_VIT_S, num_heads=12, positions="sincos", init="xavier", train_patch_embed=False
            ),
            views=TWO_VIEWS,
            optim=MOCO_OPTIM,
        ),
        "MoCo v3, ViT-S/16 on Kinetics-400, 400 epochs: 57.7 J&F on DAVIS in the paper's table.",
    ),
    "vits16-croc-k400": Recipe(
        VITS16_CROC_K400,
        "CrOC, ViT-S/16 on Kinetics-400, 400 epochs; 44.7 J&F on DAVIS in the table is from ImageNet.",
    ),
    # ODIN2: --discovery.init RUN --discovery.momentum 1 1, RUN one of this recipe.
    "vits16-odin-k400": Recipe(
        Config(OdinSettings(), vit=PLAIN_VIT_S, views=TWO_VIEWS, optim=replace(MOCO_OPTIM, batch=256)),
        "ODIN's form on ViT-S/16, Kinetics-400, 400 epochs; 54.1 J&F in the table is ResNet-50 on ImageNet.",
    ),
    "vits16-simclr-short": Recipe(
        # With SimCLR's colors it ended at 35.6 J&F, without them at 55.3 (docs/methods.md).
        short(replace(SIMCLR, contrast=replace(SIMCLR.contrast, temperature=0.2)), "simclr", color=0.0),
        "SimCLR on a few hundred clips of your own, minutes on one GPU.",
    ),
    "vits16-mocov3-short": Recipe(
        short(
            ContrastSettings(projector=ProjectorConfig(hidden=1024), predictor=PredictorConfig(hidden=1024)),
            "byol",
        ),
        "MoCo v3, the same.",
    ),
    "vits16-croc-short": Recipe(
        short(
            CrocSettings(
                head=PatchHeadConfig(**vars(SHORT_HEAD), patch_prototypes=1024),
                teacher=PatchTeacherConfig(**vars(SHORT_TEACHER)),
                regions=RegionConfig(cost_range="image", mean_over="all"),
            ),
            "dino",
            color=0.0,
        ),
        "CrOC, the same.",
    ),
    "vits16-odin-short": Recipe(
        short(
            OdinSettings(
                projector=ProjectorConfig(layers=2, hidden=1024, last_norm="none"),
                predictor=PredictorConfig(hidden=1024, last_norm="none"),
                contrast=ObjectContrastConfig(momentum=(0.99, 1.0)),
            ),
            "byol",
        ),
        "ODIN, the same.",
    ),
    "vits16-short": Recipe(
        VITS16_SHORT,
        "ViT-S/16 on a few hundred clips of your own, minutes on one GPU; T-CoRe without its branch.",
    ),
    "vits16-tcore-short": Recipe(VITS16_TCORE_SHORT, "The same with the auxiliary branch."),
    "vits16-dino-short": Recipe(
        short(
            DinoSettings(head=SHORT_HEAD, teacher=TeacherConfig(**CENTERED)), "dino", num_local=8, color=0.0
        ),
        "DINO, the same.",
    ),
    "vits16-ibot-short": Recipe(
        short(
            IbotSettings(
                masking=replace(SHORT_MASKS, draw="independent"),
                head=PatchHeadConfig(**vars(SHORT_HEAD)),
                teacher=PatchTeacherConfig(**CENTERED, patch_center="all"),
            ),
            "dino",
            num_local=8,
            color=0.0,
        ),
        "iBOT, the same.",
    ),
    "vits16-dinov2-short": Recipe(
        short(
            Dinov2Settings(
                masking=replace(SHORT_MASKS, largest_block=32),
                head=PatchHeadConfig(**vars(SHORT_HEAD)),
                teacher=PatchTeacherConfig(**vars(SHORT_TEACHER)),
                loss=PatchLossConfig(koleo=0.1),
            ),
            "tcore",
            num_local=8,
            color=0.0,
        ),
        "DINOv2, the same.",
    ),
    "vitti16-short": Recipe(
        replace(
            override(VITS16_TCORE_SHORT, {"head.hidden": 512}),
            vit=replace(VITS16_SHORT.vit, dim=VIT_TI.dim, num_heads=VIT_TI.num_heads),
        ),
        "The same with the branch as a ViT-Ti/16, a quarter of the weights.",
    ),
    "quickstart": Recipe(
        QUICKSTART, "A small ViT on rendered videos: learns within minutes on a laptop, needs no data."
    ),
    **{name: Recipe(*pair) for name, pair in PIXEL_RECIPES.items()},
}

# The methods that can be compared, by the names in their recipes; quickstart is T-CoRe's.
METHOD_NAMES = (
    *("tcore", "dino", "ibot", "dinov2", "simclr", "mocov3", "croc", "odin"),
    *("mae", "rcmae", "siammae", "cropmae", "rsp", "dropmae", "videomae", "maest"),
)
SMALL: dict[str, Any] = {
    "head.hidden": 256,
    "head.bottleneck": 64,
    "head.prototypes": 128,
    "head.patch_prototypes": 128,
    "projector.hidden": 256,
    "projector.out": 64,
    "predictor.hidden": 256,
    "decoder.width": 96,
    "decoder.depth": 2,
    "decoder.num_heads": 3,
    "decoder.hidden": 256,
    "latent.variables": 8,
    "latent.values": 8,
    "clip.frames": 4,
}


def quickstart(name: str) -> Config:
    """Another method with the sizes, length and data of the quickstart, and settings of its short recipe."""
    config = RECIPES[f"vits16-{name}-short"].config
    known = flatten(config)
    sizes = {setting: value for setting, value in SMALL.items() if known.get(setting) is not None}
    views, optim = replace(config.views, global_size=QUICKSTART.views.global_size), QUICKSTART.optim
    if "vit.reach" in config.method.unused:  # pixels: the encoder and the learning rate of the short recipe
        own = ("dim", "depth", "num_heads", "patch_size")
        vit = replace(config.vit, **{each: getattr(QUICKSTART.vit, each) for each in own})
        peak, batch = config.optim.peak_lr, optim.batch
        optim = replace(config.optim, steps=optim.steps, batch=batch, base_lr=peak * 256 / batch)
    else:
        vit, views = QUICKSTART.vit, replace(views, local_size=QUICKSTART.views.local_size)
        views = replace(views, num_local=min(views.num_local, QUICKSTART.views.num_local))
    if name == "cropmae":
        sizes["mask_ratio"] = 0.96  # leaves two of 64 patches, as the published one does of 196
    shared = ("rendered", "checkpoint_every", "runtime", "keep_every")
    same = {each: getattr(QUICKSTART, each) for each in shared}
    return override(replace(config, vit=vit, views=views, optim=optim, **same), sizes)


RECIPES |= {
    f"quickstart-{name}": Recipe(quickstart(name), f"{name} with the sizes and data of the quickstart.")
    for name in METHOD_NAMES[1:]
}


def recipe_of(method: str, family: str) -> str:
    """The recipe of a method in a family of recipes, by the name of the family.

    >>> recipe_of("dino", "vits16-short"), recipe_of("tcore", "vits16-short")
    ('vits16-dino-short', 'vits16-tcore-short')
    >>> recipe_of("dino", "quickstart"), recipe_of("tcore", "quickstart")
    ('quickstart-dino', 'quickstart')
    """
    if method not in METHOD_NAMES:
        raise InputError(
            f"no method {method!r}: there are {', '.join(METHOD_NAMES)}.{did_you_mean(method, METHOD_NAMES)}"
        )
    size, _, rest = family.partition("-")
    name = "-".join(filter(None, (size, method, rest)))
    if method == "tcore" and name not in RECIPES:
        name = family
    if name not in RECIPES:
        raise InputError(f"no recipe {name!r}: use a family of all methods, vits16-short or quickstart.")
    return name


def recipe(name: str, overrides: Mapping[str, Any] | None = None) -> Config:
    """The settings of a recipe, with some of them changed by their dotted names.

    >>> recipe("vits16-k400-100ep", {"optim.batch": 64}).optim.batch
    64
    """
    if name not in RECIPES:
        raise InputError(f"no recipe {name!r}: tcore --help lists them.{did_you_mean(name, RECIPES)}")
    return override(RECIPES[name].config, overrides or {})
