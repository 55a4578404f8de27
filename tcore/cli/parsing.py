"""Arguments to a command: parsed by tyro from its dataclass; whatever is wrong becomes one line."""

import ast
import contextlib
import dataclasses
import difflib
import io
import re
from pathlib import Path
from typing import Any, TypeVar

import tyro

from tcore.cli.help import help_text
from tcore.config import Config
from tcore.config_file import flatten
from tcore.errors import InputError

Command = TypeVar("Command")

# What tyro says of a value, and what we say that is needed instead (nothing: the kinds that it names).
COMPLAINTS = {
    r"Error parsing (?P<flag>\S+): no type matching (?P<kinds>.+) could be .* from \[(?P<values>.*)\]": "",
    r"Error parsing (?P<flag>\S+): invalid literal for int.*: (?P<values>'.*')": "a whole number",
    r"Error parsing (?P<flag>\S+): could not convert string to float: (?P<values>'.*')": "a number",
    r"Error parsing (?P<flag>\S+): Could not find .* arguments: \[(?P<values>.*)\]": "other values",
    r"invalid choice (?P<values>'.*') for argument '(?P<flag>\S+)'. Expected one of (?P<kinds>\(.*\))": "",
    r"Missing value for argument '(?P<flag>\S+)'(?P<values>). Expected (?P<kinds>.*)": "",
}


def parse(kind: type[Command], argv: list[str], prog: str, default: Command) -> Command:
    """Parse with tyro; its boxed error becomes one line, and help is our own."""
    if "-h" in argv or "--help" in argv:
        print(help_text(default, prog))
        raise SystemExit(0)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(kind, args=argv, prog=prog, default=default)
    except SystemExit:
        raise InputError(f"{_condense(said.getvalue())} See {prog} --help.") from None


def _condense(box: str) -> str:
    """The message of a tyro error box, without the box and the help below it."""
    lines = [re.sub(r"[╭╮╰╯│]", "", re.sub(r"\x1b\[[0-9;]*m", "", line)).strip() for line in box.splitlines()]
    message: list[str] = []
    for line in lines[1:]:  # the first line is the title of the box
        is_rule = len(line) > 5 and set(line) <= {"─", "-"}  # hyphens where the terminal has nothing else
        if is_rule and message:
            break
        message += [] if is_rule else [line]
    text = " ".join(" ".join(message).split()).split(" Got errors:")[0].rstrip(".")
    for pattern, need in COMPLAINTS.items():
        if found := re.fullmatch(pattern, text):
            values = " ".join(_quoted(found["values"]))
            wanted = need or " or ".join(_in_words(kind) for kind in _kinds(found["kinds"]))
            return f"{' '.join(filter(None, (found['flag'], values)))}: need {wanted}."
    return text + "." if text else "these arguments cannot be read."


def _quoted(text: str) -> list[str]:
    """Values as tyro quotes them: 'a', 'b'."""
    try:
        return [str(value) for value in ast.literal_eval(f"[{text}]")]
    except (SyntaxError, ValueError):  # its box broke them
        return [text]


def _kinds(text: str) -> list[str]:
    """Kinds of values as tyro writes them: {None}|INT|{everywhere}, ('past', 'both') or 2 values."""
    kinds = [kind.strip(" {}'") for kind in re.split(r"[|,]", text.strip("()"))]
    return [kind for kind in kinds if kind not in ("", "None")]


def _in_words(kind: str) -> str:
    numbers = {"INT": "a whole number", "FLOAT": "a number", "INT INT": "two whole numbers"}
    return numbers.get(kind, "1 value" if kind == "1 values" else kind)


def check_flags(argv: list[str], prog: str, default: Any) -> None:
    """Refuse an unknown flag with the nearest known one."""
    known = _flags(default)
    for word in argv:
        flag = word.split("=", 1)[0].replace("_", "-")
        if flag.startswith("--") and flag not in known:
            raise InputError(f"unknown flag {flag}{suggest(flag, known)} See {prog} --help.")


def _flags(default: Any) -> list[str]:
    """Every flag that a command understands."""
    values: dict[str, Any] = {}
    for name in (f.name for f in dataclasses.fields(default)):
        value = getattr(default, name)
        values |= flatten(value) if isinstance(value, Config) else {name: value}
    flags = ["--help"]
    for name, value in values.items():
        group, _, last = name.replace("_", "-").rpartition(".")
        prefix = f"--{group}." if group else "--"
        flags.append(prefix + last)
        if isinstance(value, bool):
            flags.append(f"{prefix}no-{last}")
    return flags


def suggest(word: str, known: list[str]) -> str:
    """The end of a sentence about an unknown word: the nearest known one, where there is one."""
    # A word that is part of a setting's own name (--lr) is nearer to it than any spelling says.
    inside = [name for name in known if word.strip("-") in name.rpartition(".")[2]]
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.75) or inside
    near = near or difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else "."


def gather_values(argv: list[str], flag: str) -> list[str]:
    """Values of a flag that is given several times, behind one flag at the end."""
    rest: list[str] = []
    values: list[str] = []
    taking = False
    for word in argv:
        if word == flag or word.startswith(f"{flag}="):
            taking = word == flag
            values += [] if taking else [word.partition("=")[2]]
        elif taking and not word.startswith("-"):
            values.append(word)
        else:
            taking = False
            rest.append(word)
    return [*rest, flag, *values] if values else rest


def need_out(out: Path | None, prog: str) -> Path:
    """The file that --out names."""
    if out is None:
        raise InputError(f"{prog} needs --out FILE: the ending says what is written.")
    return out
