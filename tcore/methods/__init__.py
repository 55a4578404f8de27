"""Training methods, one a file; `build` and `build_sampling` pick the one that a run's settings name."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # settings.py must be readable without torch
    from tcore.config import Config
    from tcore.data.source import Sampling, Source
    from tcore.data.stores import FrameStore
    from tcore.device import World
    from tcore.methods.method import Method


def build(config: "Config") -> "Method":
    """The method of a run, with weights drawn from its seed."""
    import torch

    from tcore.methods.conditional import build_conditional
    from tcore.methods.contrast import build_contrast
    from tcore.methods.distillation import build_distillation
    from tcore.methods.reconstruction import build_reconstruction
    from tcore.methods.regions import build_croc, build_odin
    from tcore.methods.settings import (
        ContrastSettings,
        CrocSettings,
        DinoSettings,
        MaskedSettings,
        OdinSettings,
    )
    from tcore.methods.settings_pixel import CropMaeSettings, PixelSettings, RspSettings, SiamMaeSettings
    from tcore.methods.stochastic import build_stochastic
    from tcore.methods.tcore import build_tcore

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        if isinstance(config.method, DinoSettings | MaskedSettings):
            return build_distillation(config, config.method)
        if isinstance(config.method, ContrastSettings):
            return build_contrast(config, config.method)
        if isinstance(config.method, CrocSettings):
            return build_croc(config, config.method)
        if isinstance(config.method, OdinSettings):
            return build_odin(config, config.method)
        if isinstance(config.method, SiamMaeSettings | CropMaeSettings):
            return build_conditional(config, config.method)
        if isinstance(config.method, RspSettings):
            return build_stochastic(config, config.method)
        if isinstance(config.method, PixelSettings):
            return build_reconstruction(config, config.method)
        return build_tcore(config, config.method)


def build_sampling(config: "Config", fps: float | None = None) -> "Sampling":
    """How a run draws its samples from a store of this frame rate (unknown: `fps` of the settings)."""
    from tcore.methods.pixel_sampling import PixelSampling
    from tcore.methods.sampling import FrameSampling, RegionSampling, SandwichSampling
    from tcore.methods.settings import CrocSettings, FrameSettings, OdinSettings
    from tcore.methods.settings_pixel import PixelSettings

    if isinstance(config.method, CrocSettings | OdinSettings):
        return RegionSampling.of(config, config.method)
    if isinstance(config.method, FrameSettings):
        return FrameSampling.of(config, config.method)
    if isinstance(config.method, PixelSettings):
        return PixelSampling.of(config, config.method, fps or config.fps)
    return SandwichSampling.of(config, config.method, fps or config.fps)


def build_source(store: "FrameStore", config: "Config", share: "World | None" = None) -> "Source":
    """The samples of a run, drawn from a store."""
    import numpy as np

    from tcore.data.source import Source
    from tcore.device import ALONE

    rates = [] if store.rates is None else sorted({rate for rate in store.rates.tolist() if rate > 0})
    by_rate = {rate: build_sampling(config, rate) for rate in rates}
    # Where every video has its own rate, that of the store, which may be unknown, is not asked for.
    known = store.rates is not None and not np.isnan(store.rates).any()
    usual = by_rate[rates[0]] if known else build_sampling(config, store.fps)
    return Source(store, config, usual, share or ALONE, by_rate)
