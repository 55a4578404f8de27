"""Spoilt files of every kind: a reader gives a value or says in one line what is wrong, and never hangs."""

import ast
import os
import resource
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import numpy as np
import pytest

from tcore.errors import InputError
from tests.readers import make_readers
from tests.readers.reader import Reader, spoil

ROOT = Path(__file__).parent.parent / "tcore"
# The long campaign; the one in docs/reliability.md had a million inputs.
INPUTS, SEED = (
    int(os.environ.get(f"TCORE_FUZZ_{name}", usual)) for name, usual in (("INPUTS", 10_000), ("SEED", 1))
)
# A reader of a small file that takes longer hangs: seconds of work, and of waiting on a busy machine.
LIMITS = ((signal.ITIMER_PROF, signal.SIGPROF, 10), (signal.ITIMER_REAL, signal.SIGALRM, 120))


class HangError(Exception):
    """A reader took too long."""


@contextmanager
def time_limit() -> Iterator[None]:
    """Interrupt what takes too long."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise HangError

    before = {number: signal.signal(number, stop) for _, number, _ in LIMITS}
    for timer, _, seconds in LIMITS:
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for timer, number, _ in LIMITS:
            signal.setitimer(timer, 0)
            signal.signal(number, before[number])


def try_reader(reader: Reader, what: str) -> str:
    """Let a reader read whatever is there; `read` or `refused`, anything else is an error."""
    try:
        with time_limit():
            reader.read()
    except InputError:
        return "refused"
    except Exception as error:
        raise AssertionError(f"{reader.name}: {error!r} of {what}") from error
    return "read"


# What is only a hint: a file that cannot be read is passed over, or made again.
HINTS = {
    "bytes of a frame",
    "checkpoint.json",
    "matching.safetensors",
    "best encoder",
    "environment.json",
    "environment.json of a report",
    "lock.json",
    "parts/*.json",
    "skipped.csv",
    "kept clip",
    "commands.json",
    "lab.json",
    "lab.json of a table",
    "videos that killed a process",
    "image that is packed",
}
# Readers of what nobody else writes.
OWN = {
    "tcore.demo.clips:Clip.frame": "an array of the page's own folder",
    "tcore.demo.clips:container_of": "the first bytes of an upload, which the page has just written",
    "tcore.demo.job:Job.features": "an array of the page's own folder",
    "tcore.demo.job:Job.labels": "an array of the page's own folder",
    "tcore.demo.server:Demo._constants": "the page itself, a part of the package",
    "tcore.files:is_alive": "the kernel's list of processes",
    "tcore.lab.runs:run_command": "the log of a process that has just ended",
    "tcore.video.box_network:load_box_network": "weights, a part of the package",
}


def campaign(root: Path, inputs: int, seed: int) -> Counter[tuple[str, str]]:
    """Share some inputs among all readers; the others' files are whole meanwhile."""
    rng, outcomes = np.random.default_rng(seed), Counter[tuple[str, str]]()
    readers = make_readers(root)
    ends = np.cumsum([reader.share for reader in readers])
    counts = np.diff(np.round(ends * inputs / ends[-1]).astype(int), prepend=0)
    for reader, count in zip(readers, counts.tolist(), strict=True):
        whole = reader.file.read_bytes()
        for _ in range(count):
            data = spoil(whole, rng)
            reader.file.write_bytes(data)
            outcomes[reader.name, try_reader(reader, repr(data))] += 1
        reader.file.write_bytes(whole)
        reader.read()
    return outcomes


def test_spoilt_files_are_read_or_refused_and_nothing_else(tmp_path: Path) -> None:
    outcomes = campaign(tmp_path, inputs=1500, seed=0)
    assert outcomes.total() == 1500
    read_often = {name for (name, what), count in outcomes.items() if what == "read" and count >= 20}
    # Hints and free text are never refused.
    assert read_often - HINTS - {"metrics.jsonl", "metrics.jsonl of a report", "list of clips", "truth"} <= {
        name for name, what in outcomes if what == "refused"
    }


@pytest.mark.long
def test_ten_thousand_spoilt_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begun, memory = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcomes = campaign(tmp_path, INPUTS, SEED)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) / 2**20
    with capsys.disabled():
        print(f"\n{outcomes.total():,} inputs, {time.monotonic() - begun:.0f} s, {grown:.2f} GiB more")
        for name in dict.fromkeys(name for name, _ in outcomes):
            print(f"| {name} | {outcomes[name, 'refused']:,} | {outcomes[name, 'read']:,} |")
    assert outcomes.total() == INPUTS
    assert grown < 2


def test_pipes_and_folders_in_place_of_any_file_are_refused_at_once(tmp_path: Path) -> None:
    wrong = []
    for reader in make_readers(tmp_path):
        aside = reader.file.with_name("aside")
        reader.file.rename(aside)
        for make in (os.mkfifo, os.mkdir):
            make(reader.file)
            begun = time.monotonic()
            try:
                outcome = try_reader(reader, make.__name__)
            except AssertionError as error:
                # A folder where a file is to be written: the command line makes one line of this, too.
                outcome = "refused" if isinstance(error.__cause__, IsADirectoryError) else str(error)
            if time.monotonic() - begun > 30 or (outcome != "refused" and reader.name not in HINTS):
                wrong.append((reader.name, make.__name__, outcome))
            if reader.file.is_dir():
                shutil.rmtree(reader.file)
            reader.file.unlink(missing_ok=True)
        aside.rename(reader.file)
    assert wrong == []


def reads_a_file(call: ast.Call) -> bool:
    """Whether a call reads a file: one of our helpers, or a function of a library that is given a name."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    helper = isinstance(call.func, ast.Name)
    mode = next((x.value for x in call.args if isinstance(x, ast.Constant) and isinstance(x.value, str)), "r")
    if name in ("read_text", "read_bytes"):
        return helper or not call.args  # with arguments it is a method of a store
    if name == "open":
        library = ast.unparse(call.func) in ("av.open", "Image.open", "os.open")
        plain = helper or not call.args or isinstance(call.args[0], ast.Constant)
        return (library or plain) and "w" not in mode and "a" not in mode
    owner = ast.unparse(call.func).rpartition(".")[0]
    named = name in ("read_json", "open_regular", "safe_open", "load_file", "fromfile", "memmap", "pread")
    return (
        named
        or (name == "load" and owner in ("np", "torch", "json"))
        or (name == "reader" and owner == "csv")
        or (name == "ZipFile" and mode == "r")
    )


def reading_functions() -> set[str]:
    """All functions of the package that read files, as module:function."""
    found = set[str]()

    def visit(node: ast.AST, module: str, place: tuple[str, ...]) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                inside = "<locals>." if isinstance(child, ast.FunctionDef) else ""
                visit(child, module, (*place, f"{child.name}.{inside}"))
                continue
            if isinstance(child, ast.Call) and reads_a_file(child):
                found.add(f"{module}:{''.join(place).removesuffix('<locals>.').removesuffix('.')}")
            visit(child, module, place)

    for path in sorted(ROOT.rglob("*.py")):
        module = ".".join(path.relative_to(ROOT.parent).with_suffix("").parts)
        visit(ast.parse(path.read_text(encoding="utf-8")), module, ())
    return found


def test_every_function_that_reads_files_is_fuzzed(tmp_path: Path) -> None:
    ran = set[str]()

    def note(frame: FrameType, event: str, value: object) -> None:
        if event == "call" and frame.f_globals.get("__name__", "").startswith("tcore"):
            ran.add(f"{frame.f_globals['__name__']}:{frame.f_code.co_qualname}")

    readers = make_readers(tmp_path)
    sys.setprofile(note)
    try:
        for reader in readers:
            reader.read()
    finally:
        sys.setprofile(None)
    # A new one needs a Reader in tests/readers.
    assert reading_functions() - ran == set(OWN)
