"""Settings on disk: saved with the run, loaded back equal, compared with a readable difference."""

import dataclasses
import json
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from tcore.config import Config
from tcore.errors import InputError
from tcore.files import read_json, write_text
from tcore.text import did_you_mean

# How a run is carried out may change when it is resumed; what is learned may not.
OPERATIONAL = ("runtime.", "checkpoint_every", "keep_every")

# Names of settings in run folders of earlier versions.
RENAMED = {"colour": "color"}


def to_dict(config: Config) -> dict[str, Any]:
    """The settings as JSON knows them."""
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    return plain


def from_dict(values: Any, where: str = "config.") -> Config:
    """Settings from JSON; an unknown name or a value of another type is an error that names it.

    `where` goes before the name, with what joins the two: `config.`, or `runs/mine/config.json: `.
    """
    config: Config = _read(Config, values, where)
    return config


def save_config(config: Config, path: Path) -> None:
    """Write the settings as JSON."""
    write_text(path, json.dumps(to_dict(config), indent=2) + "\n")


def load_config(path: Path) -> Config:
    """Read settings that `save_config` wrote."""
    if not path.exists():
        raise InputError(f"{path.parent} is no run folder (no {path.name}): give one that tcore train made.")
    return from_dict(read_json(path, "settings from "), f"{path}: ")


def flatten(config: Config) -> dict[str, Any]:
    """Every setting by its dotted name.

    >>> flatten(Config())["loss.past_future"]
    20.0
    """

    def walk(values: Any, prefix: str) -> dict[str, Any]:
        flat: dict[str, Any] = {}
        for name in (f.name for f in dataclasses.fields(values)):
            value = getattr(values, name)
            if dataclasses.is_dataclass(value):
                flat |= walk(value, f"{prefix}{name}.")
            else:
                flat[prefix + name] = value
        return flat

    return walk(config, "")


def differences(config: Config, other: Config) -> dict[str, tuple[Any, Any]]:
    """Settings in which two runs differ, apart from how they are carried out."""
    ours, theirs = flatten(config), flatten(other)
    return {
        name: (ours[name], theirs[name])
        for name in ours
        if ours[name] != theirs[name] and not name.startswith(OPERATIONAL)
    }


def _read(kind: Any, value: Any, where: str) -> Any:
    """A value of the annotated kind from what JSON gave."""
    origin, arguments = get_origin(kind), get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(kind, value, where)
    if origin in (Union, types.UnionType):
        options = [option for option in arguments if option is not type(None)]
        return None if value is None else _read(options[0], value, where)
    if origin is tuple and isinstance(value, list) and len(value) == len(arguments):
        return tuple(_read(k, v, where) for k, v in zip(arguments, value, strict=True))
    if origin is Literal and value in arguments:
        return value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(kind, type) and type(value) is kind:
        return value
    wanted = " or ".join(map(str, arguments)) if origin is Literal else getattr(kind, "__name__", str(kind))
    raise InputError(f"{where}={value!r}: need {wanted}.")


def _read_dataclass(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise InputError(f"{where.rstrip('.: ')}={value!r} should be a group of settings.")
    hints = get_type_hints(kind)
    value = {RENAMED.get(name, name): inner for name, inner in value.items()}
    for name in value:
        if name not in hints:
            place = where.rstrip(".: ")
            raise InputError(f"{place} holds an unknown setting {name!r}.{did_you_mean(name, hints)}")
    # Groups end with the dot that goes before what is in them.
    ends = {name: "." if dataclasses.is_dataclass(hints[name]) else "" for name in value}
    return kind(**{name: _read(hints[name], v, f"{where}{name}{ends[name]}") for name, v in value.items()})
