"""A run that takes a second: real objects, small."""

from typing import Any

from tcore import Config, methods, recipe
from tcore.config import flatten, override
from tcore.methods.method import Method
from tcore.methods.settings import TCoReSettings
from tcore.methods.tcore import TCoRe

TINY: dict[str, Any] = {
    "vit.dim": 32,
    "vit.depth": 2,
    "vit.num_heads": 2,
    "vit.patch_size": 8,
    "vit.drop_path": 0.1,
    "views.global_size": 32,
    "views.local_size": 16,
    "views.num_local": 2,
    "matching.num_heads": 2,
    "head.hidden": 32,
    "head.bottleneck": 16,
    "head.prototypes": 32,
    "optim.steps": 6,
    "optim.batch": 4,
    "rendered.videos": 5,
    "rendered.frames": 10,
    "rendered.size": 32,
    "checkpoint_every": 2,
    "runtime.log_every": 2,
}


def tiny(**changes: Any) -> Config:
    """Tiny settings, some of them changed; a dot in a name is written as two underscores."""
    return recipe("quickstart", TINY | {name.replace("__", "."): value for name, value in changes.items()})


def flags_of(settings: dict[str, Any]) -> list[str]:
    """Settings as words of a command line."""
    named = {f"--{name.replace('_', '-')}": str(value) for name, value in settings.items()}
    return [word for flag in named.items() for word in flag]


# What else some recipes have that must be small.
NARROW: dict[str, Any] = {
    "projector.hidden": 32,
    "projector.out": 16,
    "predictor.hidden": 32,
    "head.patch_prototypes": 32,
    "discovery.clusters": 4,
    "decoder.width": 32,
    "decoder.depth": 1,
    "decoder.num_heads": 2,
    "decoder.hidden": 32,
    "latent.variables": 3,
    "latent.values": 4,
}


def shrunk(name: str, **changes: Any) -> Config:
    """A recipe with the sizes of a tiny run, as far as it has them, some settings changed as in `tiny`."""
    config = recipe(name)
    known = flatten(config)
    own = {setting: value for setting, value in NARROW.items() if known.get(setting) is not None}
    sizes = {setting: value for setting, value in TINY.items() if setting in known} | own
    for setting in ("views.num_local", "vit.drop_path", *config.method.unused):  # 0 stays 0
        if not known[setting] or setting in config.method.unused:
            sizes.pop(setting, None)
    return change(override(config, sizes), **changes)


def change(config: Config, **values: Any) -> Config:
    """The same settings with some changed: whole groups, or single ones as in `tiny`."""
    return override(config, {name.replace("__", "."): value for name, value in values.items()})


def settings_of(config: Config) -> TCoReSettings:
    """The method's settings of a run of T-CoRe."""
    assert isinstance(config.method, TCoReSettings)
    return config.method


def as_tcore(method: Method) -> TCoRe:
    """A method of which a test knows that it is T-CoRe."""
    assert isinstance(method, TCoRe)
    return method


def build(config: Config) -> TCoRe:
    """The T-CoRe model of a run."""
    return as_tcore(methods.build(config))
