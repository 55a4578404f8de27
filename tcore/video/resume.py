"""Resuming a run that was stopped or killed: the soft labels of its finished frames stay in its folder."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tcore.data.part import PartOfVideo
from tcore.data.video import FolderVideo, Video
from tcore.errors import InputError, reason
from tcore.evaluation.protocols import FINER, Detail
from tcore.files import LOCKS, TEMPORARY, digest, lock, open_regular, parse_line
from tcore.video.both_ways import SoftLabels
from tcore.video.formats import FILES

UNFINISHED = "unfinished.bin"  # a line of JSON, then soft labels
CARD = "propagation.json"
OWN = {UNFINISHED, CARD, "confidence.csv", "overlay.mp4", *FILES}
DIGITS = 16  # of checksums
HEAD = 1 << 20  # bytes of that line at most
Settings = Mapping[str, Any]


class DoneError(InputError):
    """The folder holds what the command would make."""


def digest_video(source: Video) -> str:
    """One word for the files of a video: their names, sizes, and when they were changed."""
    whole = source.whole if isinstance(source, PartOfVideo) else source
    files = whole.files if isinstance(whole, FolderVideo) else [whole.path]
    stats = [(file.name, file.stat()) for file in files]
    return digest([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats], DIGITS)


def find_unfinished(folder: Path, settings: Settings) -> Detail | None:
    """The detail of a run of the same command that was stopped; a folder with anything else is refused."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    names -= {name for name in names if name in LOCKS or (name[0] == "." and name.endswith(TEMPORARY))}
    head = _head(folder / UNFINISHED) if UNFINISHED in names else None
    if head is None and CARD in names:
        card = parse_line(_first_bytes(folder / CARD), {"command": str})
        if card and card["command"] == digest(settings, DIGITS):
            raise DoneError(
                f"out folder {folder} already holds the result of this very command: "
                "give another --out to repeat it."
            )
    for name in sorted(names - ({UNFINISHED} if head is None else OWN)):
        raise InputError(f"out folder {folder} already holds {name}: give a new or an empty folder as --out.")
    if head is None:  # killed before there was anything to keep
        return None
    before = head["settings"]
    others = [name for name in {**before, **settings} if before.get(name) != settings.get(name)]
    if others:
        raise InputError(
            f"out folder {folder} holds an unfinished run with other settings ({', '.join(others)}) "
            "or of an earlier version: rerun that command to resume it, or give another --out."
        )
    return next(detail for detail in FINER if detail == head["detail"])


@contextmanager
def keep_unfinished(folder: Path, settings: Settings, detail: Detail) -> Iterator[SoftLabels]:
    """The soft labels of a run, with those that an earlier one has left; nobody else can use the folder."""
    was_there, path = folder.is_dir(), folder / UNFINISHED
    head = json.loads(json.dumps({"detail": detail, "settings": settings}))
    try:
        with lock(folder / LOCKS[0], f"out folder {folder}", "give another --out"):
            if not path.exists() or _head(path) != head:
                path.write_text(json.dumps(head) + "\n", encoding="utf-8")
            with path.open("r+b") as file:
                file.readline()
                kept = SoftLabels(file)
                try:
                    yield kept
                except BaseException as error:
                    with suppress(OSError):  # the disk may be full
                        file.close()
                    bad = isinstance(error, InputError) and error.exit_code != 130  # it stays bad
                    if bad or kept.empty:
                        path.unlink()
                    raise
    finally:
        if not was_there:
            with suppress(OSError):  # it is not empty
                folder.rmdir()


def _head(path: Path) -> Any:
    """The first line of an unfinished run; None where it was cut off."""
    line, end, _ = _first_bytes(path).partition(b"\n")
    shape = {"detail": lambda one: one in tuple(FINER), "settings": {str: object}}
    return parse_line(line, shape) if end else None


def _first_bytes(path: Path) -> bytes:
    try:
        with open_regular(path) as file:
            return file.read(HEAD)
    except OSError as error:
        raise InputError(f"cannot read {path}: {reason(error)}; give another --out.") from error
