"""From words to a command: its dataclass is the parser, the settings of a recipe are flags."""

import os
from dataclasses import dataclass, field, fields, make_dataclass
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import tyro
from tyro.conf import DisallowNone, FlagCreatePairsOff, PositionalMetavarFromFieldName, arg

from tcore.config import Config
from tcore.errors import InputError, PeerError
from tcore.evaluation import benchmarks
from tcore.text import did_you_mean, to_stderr

Switch = FlagCreatePairsOff[bool]
"""A flag that is off unless it is given."""
Settings = Annotated[Config, arg(name="")]
"""The settings of a run, as flags without a prefix."""

# Flags of earlier versions.
RENAMED = {"--views.colour": "--views.color", "--synthetic": "--rendered"}

Command = TypeVar("Command")


@dataclass(frozen=True)
class WithDatasets:
    """A command with a flag for every benchmark that is read from a folder, such as --davis DIR."""

    def datasets(self) -> dict[str, Any]:
        """The folders that were given, by the name of their benchmark."""
        given = {name: getattr(self, name, None) for name in benchmarks.datasets()}
        return {name: root for name, root in given.items() if root is not None}


def parse(kind: Any, argv: list[str], prog: str) -> Any:
    """A command, or one of a union of them, from its arguments; tyro says what is wrong, with exit code 2."""
    first = os.environ.get("RANK", "0") == "0"
    argv = [_current(word, quiet=not first) for word in argv]
    names = [one.__name__.lower() for one in get_args(kind)]
    if names and argv and argv[0] not in names and not argv[0].startswith("-"):
        raise InputError(
            f"no {prog.split()[-1]} {argv[0]!r}: there are {', '.join(names)}.{did_you_mean(argv[0], names)}"
        )
    kind = reduce(or_, map(_with_datasets, get_args(kind) or (kind,)))
    markers = (PositionalMetavarFromFieldName, *(() if hasattr(kind, "config") else (DisallowNone,)))
    try:
        return tyro.cli(kind, args=argv, prog=prog, console_outputs=first, config=markers)
    except SystemExit as stop:
        if first:
            raise
        raise PeerError("the first process says what is wrong", int(stop.code or 0)) from None


def parse_settings(kind: type[Command], argv: list[str], prog: str, config: Config) -> Command:
    """A command whose settings begin as `config`; those of its method are flags like all others."""
    method = getattr(config, "method", None)
    own = [("method", Annotated[type(method), arg(name="")], field(default=method))] if method else []
    flags = make_dataclass("Settings", own, bases=(Config,), frozen=True)
    default: Any = field(default=flags(**_values(config)))
    command = make_dataclass(
        kind.__name__,
        [("config", Annotated[flags, arg(name="")], default)],
        bases=(kind,),
        frozen=True,
        namespace={"__doc__": kind.__doc__},
    )
    found = parse(command, argv, prog)
    values = {item.name: getattr(found, item.name) for item in fields(command)}
    return kind(**values | {"config": Config(**_values(found.config))})


def at_least(least: int, **values: int | None) -> None:
    """Refuse numbers that are too small, by the name of their flag."""
    for name, value in values.items():
        if value is not None and value < least:
            raise InputError(f"--{name.replace('_', '-')} {value}: need {least} or more.")


def _with_datasets(kind: Any) -> Any:
    """A command with its flags for datasets, from the list of benchmarks."""
    if not issubclass(kind, WithDatasets):
        return kind
    flags: list[Any] = [
        (name, Annotated[Path | None, arg(help=f"A dataset that holds {folders}.")], None)
        for name, folders in benchmarks.BENCHMARKS.items()
        if folders
    ]
    own = {"__doc__": kind.__doc__}
    return make_dataclass(kind.__name__, flags, bases=(kind,), frozen=True, kw_only=True, namespace=own)


def _values(config: Config) -> dict[str, Any]:
    return {item.name: getattr(config, item.name) for item in fields(Config)}


def _current(word: str, quiet: bool) -> str:
    """A flag by the name it has today."""
    flag, is_set, value = word.partition("=")
    if flag not in RENAMED:
        return word
    if not quiet:
        to_stderr(f"tcore: {flag} is now called {RENAMED[flag]}.")
    return RENAMED[flag] + is_set + value
