"""Recipes of the methods that reconstruct pixels: as published, and short twins; docs/methods.md has sources.

Kinetics-400 has 239,789 videos. Published gaps and strides need a store of 8 frames per second
(`tcore prepare VIDEOS STORE --fps 8`); the short twins count frames of any store.
"""

from dataclasses import replace

from tcore.config import Config, OptimConfig, RuntimeConfig, ViewsConfig, VitSpec
from tcore.methods.settings_pixel import (
    ClipConfig,
    CropMaeSettings,
    DropMaeSettings,
    MaeSettings,
    MaeStSettings,
    PairConfig,
    RcMaeSettings,
    RspSettings,
    SiamMaeSettings,
    VideoMaeSettings,
)

# Without registers, LayerScale and stochastic depth; positions resized as RSP and CropMAE evaluate.
VIT = VitSpec(num_registers=0, layer_scale=None, drop_path=0.0, position_resize="factor", positions="grid")
OPTIM = OptimConfig(
    epochs=400,
    warmup_epochs=40,
    warmup_peak="once",
    batch=4096,
    base_lr=1.5e-4,
    lr_rule="linear/256",
    end_lr=0.0,
    weight_decay=(0.05, 0.05),
    betas=(0.9, 0.95),
    clip_by="none",
)
SMALL, LARGE = ViewsConfig(global_area=(0.2, 1.0)), ViewsConfig(global_area=(0.5, 1.0))
SIAM_OPTIM = replace(OPTIM, batch=2048, base_lr=1e-4, warmup_epochs=20)

PUBLISHED: dict[str, tuple[Config, str]] = {
    "mae": (
        Config(MaeSettings(), vit=VIT, views=SMALL, optim=OPTIM),
        "MAE: 96 M frames; 53.5 J&F on DAVIS in the paper's table, copied from RSP's.",
    ),
    "rcmae": (
        Config(RcMaeSettings(), vit=VIT, views=SMALL, optim=replace(OPTIM, epochs=1600)),
        "RC-MAE: 384 M frames; published on ImageNet alone (49.2 J&F on DAVIS), no recipe for videos.",
    ),
    "siammae": (
        Config(SiamMaeSettings(), vit=VIT, views=LARGE, optim=SIAM_OPTIM),
        "SiamMAE as re-implemented with CropMAE: 96 M pairs; 57.9 J&F on DAVIS in the paper's table.",
    ),
    "cropmae": (
        Config(CropMaeSettings(), vit=VIT, views=LARGE, optim=SIAM_OPTIM),
        "CropMAE: 96 M frames; 58.6 J&F on DAVIS in the paper's table.",
    ),
    "rsp": (
        Config(
            RspSettings(),
            vit=VIT,
            views=LARGE,
            optim=replace(OPTIM, batch=1536, repeat=2, epochs=200, warmup_epochs=20),
        ),
        "RSP: 96 M pairs, two of a video at a time; 60.1 J&F on DAVIS by its own protocol.",
    ),
    "dropmae": (
        Config(
            DropMaeSettings(),
            vit=replace(VIT, class_token=False),
            views=SMALL,
            optim=replace(OPTIM, epochs=1600),
        ),
        "DropMAE: 384 M pairs; published for ViT-B/16 alone (53.4 J&F on DAVIS); gaps from 1/8 s, not 1/30.",
    ),
    "videomae": (
        Config(
            VideoMaeSettings(),
            vit=replace(VIT, class_token=False, positions="learned"),
            views=ViewsConfig(),
            optim=replace(OPTIM, batch=1024, epochs=1600, end_lr=4e-5, warmup_peak="twice"),
        ),
        "VideoMAE: 384 M clips of 16 frames; 39.3 J&F on DAVIS in the paper's table.",
    ),
    "maest": (
        Config(
            MaeStSettings(),
            vit=replace(VIT, positions="learned"),
            views=LARGE,
            optim=replace(
                OPTIM, batch=512, repeat=4, base_lr=1.6e-3, warmup_epochs=20, clip=0.02, clip_by="all"
            ),
        ),
        "MAE-ST: 384 M clips, four of a video at a time; batch uncertain, published for ViT-L (54.6 J&F).",
    ),
}

# Spacing of the short twins in frames of the store, and their batch: not as published.
SHORT_PAIR, SHORT_CLIP = PairConfig(gap_frames=(1, 6)), ClipConfig(frames=8, stride_frames=1)
SHORT_BATCH = {"siammae": 256, "cropmae": 256, "rsp": 128, "dropmae": 128, "videomae": 128, "maest": 64}


def short(name: str) -> tuple[Config, str]:
    """The short twin of a method: a few hundred clips, 1,000 steps."""
    config, said = PUBLISHED[name]
    called = said.split()[0].rstrip(":")
    method, spacing, batch = config.method, "", SHORT_BATCH.get(name, 512)
    if isinstance(method, SiamMaeSettings | RspSettings | DropMaeSettings):
        method = replace(method, pair=SHORT_PAIR)
        spacing = "; pairs 1 to 6 frames of the store apart, not the published spacing"
    elif isinstance(method, VideoMaeSettings | MaeStSettings):
        method = replace(method, clip=SHORT_CLIP)
        spacing = "; clips of 8 consecutive frames of the store, not the published spacing"
    optim = replace(config.optim, steps=1000, batch=batch, base_lr=1e-3 * 256 / batch, repeat=1)
    runtime = RuntimeConfig(log_every=25)
    made = replace(config, method=method, optim=optim, keep_every=500, runtime=runtime)
    return made, f"{called} on a few hundred clips of your own, minutes on one GPU{spacing}."


PIXEL_RECIPES: dict[str, tuple[Config, str]] = {
    **{
        f"vits16-{name}-k400": (made, f"ViT-S/16 on Kinetics-400, {says}")
        for name, (made, says) in PUBLISHED.items()
    },
    **{f"vits16-{name}-short": short(name) for name in PUBLISHED},
}
