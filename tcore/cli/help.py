"""Help for a command, from its dataclass: names, kinds and values of all flags, and what they are for."""

import ast
import dataclasses
import inspect
import shutil
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from tyro.conf import FlagCreatePairsOff, Positional

WIDEST = 110
COLUMN = 34  # where descriptions begin
KINDS = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH"}


class Entry(NamedTuple):
    """One line of help."""

    name: str
    says: str
    positional: bool


def help_text(default: Any, prog: str) -> str:
    """Everything that a command understands, with the values that hold unless others are given."""
    own = list(_entries(default, ""))
    names = [entry.name for entry in own if entry.positional]
    parts = [
        f"usage: {' '.join([prog, *names])} [flags]",
        "",
        *textwrap.wrap(inspect.getdoc(type(default)) or "", _width()),
        "",
        *_lines([entry for entry in own if entry.positional]),
        *_lines([entry for entry in own if not entry.positional]),
    ]
    for name, group in _groups(default):
        parts += [f"\n{name}: {inspect.getdoc(type(group))}", *_lines(list(_entries(group, f"{name}.")))]
    if any(".[no-]" in line for line in parts):
        parts.append("\nA flag with [no-] is turned on by --group.name and off by --group.no-name.")
    return "\n".join(parts)


def _groups(default: Any) -> Iterator[tuple[str, Any]]:
    """Settings inside settings; the outermost (`config`) has no name of its own on the command line."""
    for name, value in _fields(default):
        if dataclasses.is_dataclass(value):
            own = [(inner, group) for inner, group in _fields(value) if dataclasses.is_dataclass(group)]
            yield from own or [(name, value)]


def _entries(settings: Any, prefix: str) -> Iterator[Entry]:
    """Flags of one group; those of `config` itself stand beside the command's own."""
    hints, says = get_type_hints(type(settings), include_extras=True), _docs(type(settings))
    for name, value in _fields(settings):
        if not dataclasses.is_dataclass(value):
            yield _entry(prefix + name.replace("_", "-"), hints[name], value, says.get(name, ""))
        elif any(dataclasses.is_dataclass(inner) for _, inner in _fields(value)):
            yield from _entries(value, prefix)


def _entry(name: str, hint: Any, value: Any, says: str) -> Entry:
    markers: tuple[Any, ...] = ()
    if get_origin(hint) is Annotated:
        hint, *marks = get_args(hint)
        markers = tuple(marks)
    if Positional in markers:
        return Entry(name.upper() + ("..." if get_origin(hint) is tuple else ""), says, True)
    if hint is bool and FlagCreatePairsOff in markers:
        return Entry(f"--{name}", says, False)
    if hint is bool:
        group, dot, last = name.rpartition(".")
        return Entry(f"--{group}{dot}[no-]{last}", f"{says} [{'on' if value else 'off'}]", False)
    shown = "" if value in (None, "", ()) else f" [{_value(value)}]"
    return Entry(f"--{name} {_kind(hint)}", says + shown, False)


def _kind(hint: Any) -> str:
    """What kind of value a flag wants."""
    if get_origin(hint) is Literal:
        return "|".join(map(str, get_args(hint)))
    inner = [_kind(part) for part in get_args(hint) if part not in (type(None), ...)]
    if get_origin(hint) in (Union, types.UnionType):
        return "|".join(inner)
    if get_origin(hint) is tuple:
        return f"{inner[0]}..." if ... in get_args(hint) else " ".join(inner)
    return KINDS[hint]


def _value(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(_value, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _docs(kind: type) -> dict[str, str]:
    """The line below each field."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(tree, ast.ClassDef)
    found: dict[str, str] = {}
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
            found[ast.unparse(field.target)] = inspect.cleandoc(ast.literal_eval(below.value))
    return found


def _fields(settings: Any) -> list[tuple[str, Any]]:
    return [(field.name, getattr(settings, field.name)) for field in dataclasses.fields(settings)]


def _lines(entries: list[Entry]) -> Iterator[str]:
    """Names on the left, descriptions on the right; a long name has a line of its own."""
    for entry in entries:
        name = f"  {entry.name}"
        says = textwrap.wrap(entry.says, _width() - COLUMN, break_on_hyphens=False) or [""]
        if len(name) > COLUMN - 2:
            yield name
            name = ""
        yield f"{name:{COLUMN}}{says[0]}".rstrip()
        yield from (" " * COLUMN + line for line in says[1:])


def _width() -> int:
    return max(60, min(WIDEST, shutil.get_terminal_size().columns))
