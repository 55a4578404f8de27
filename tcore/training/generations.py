"""A checkpoint and the one before it, with checksums: damage is noticed, and the other one is used."""

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tcore.errors import InputError
from tcore.files import atomic, read_json, write_text


def previous(path: Path) -> Path:
    """Where the generation before lies.

    >>> previous(Path("run/checkpoint.pt")).name
    'checkpoint.previous.pt'
    """
    return path.with_name(f"{path.stem}.previous{path.suffix}")


def checksums(path: Path) -> Path:
    """The file with the checksums of both generations."""
    return path.with_suffix(".json")


def exists(path: Path) -> bool:
    """Whether there is a generation to go on from."""
    return path.exists() or previous(path).exists()


def write_generation(path: Path, save: Callable[[Path], str]) -> None:
    """Write a file with `save`, which returns its SHA-256; the one that was there is kept as the previous."""
    with atomic(path) as temporary:
        digest = save(temporary)
        # First the checksums, then the files: whenever this stops, whatever lies there is known by its own.
        known = [digest, *_known(path)]
        write_text(checksums(path), json.dumps({"sha256": known[:3]}, indent=2) + "\n")
        if path.exists():
            path.replace(previous(path))


def newest_intact(path: Path, say: Callable[[str], None]) -> Path | None:
    """The newest generation that is as it was written, or None; `say` hears of those that are not."""
    known, found = _known(path), [place for place in (path, previous(path)) if place.exists()]
    for place in found:
        if not known:
            say(f"warning: {checksums(path)} is missing or unreadable: {place} cannot be verified.")
            return place
        if sha256(place) in known:
            if place != path and len(found) == 1:
                say(f"warning: {path} is missing: going on from {place}, the checkpoint before it.")
            return place
        if place == path and len(found) == 2:
            say(f"warning: {path} is damaged (not the SHA-256 that was written): trying {found[1]}.")
            # Out of the way, so that the next checkpoint does not push out the good one.
            with suppress(FileNotFoundError):
                path.replace(path.with_name(f"{path.stem}.damaged{path.suffix}"))
    if found:
        listed = " and ".join(map(str, found))
        raise InputError(
            f"cannot read checkpoint {listed}: damaged (the SHA-256 is not the one that was written); "
            "restore it from a copy, or remove it to begin the run anew."
        )
    return None


def sha256(path: Path) -> str:
    """Checksum of a file; an unreadable one has none that is known."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return f"unreadable: {error.strerror}"


def _known(path: Path) -> list[str]:
    """Checksums of the generations, the newest first."""
    try:
        found = read_json(checksums(path))["sha256"]
        return [str(digest) for digest in found]
    except (InputError, KeyError, TypeError):
        return []
