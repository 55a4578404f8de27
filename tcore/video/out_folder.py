"""The output folder of a propagation: new or empty, one process at a time, never somebody else's results."""

import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tcore.errors import InputError
from tcore.files import LOCKS, TEMPORARY, check_writable, lock, write_text

CARD = "propagation.json"
OUTPUTS = (CARD, "masks", "tracks.csv", "confidence.csv", "overlay.mp4")

Card = Mapping[str, Any]  # video, labels, encoder, protocol, and whether the propagation is finished


def check_out(out: Path, inputs: Card) -> None:
    """Refuse a folder that cannot be written or holds more than an unfinished run of the same inputs."""
    check_writable(out)
    if out.is_dir():
        _leftovers(out, inputs)
        with _lock(out):
            pass


@contextmanager
def own_folder(out: Path, card: Card) -> Iterator[None]:
    """Create the folder, or clear an unfinished run of the same inputs, and lock it."""
    with ExitStack() as held:
        try:
            held.enter_context(_lock(out))
            for path in _leftovers(out, card):
                for file in path.iterdir() if path.is_dir() else (path,):
                    file.unlink()
            write_card(out, card)
        except OSError as error:
            raise InputError(f"cannot write to {out}: {error.strerror or error}.") from error
        yield


def _lock(out: Path) -> AbstractContextManager[None]:
    return lock(out / LOCKS[0], f"out folder {out}", "give another --out")


def write_card(out: Path, card: Card) -> None:
    """Write what the folder holds."""
    write_text(out / CARD, json.dumps(card, indent=1) + "\n")


def _leftovers(out: Path, inputs: Card) -> list[Path]:
    """Files of an interrupted propagation of the same inputs; anything else is refused."""
    found = sorted(path for path in out.iterdir() if path.name not in LOCKS)
    others = [path for path in found if path.name not in OUTPUTS and not _temporary(path)]
    before = _unfinished(out / CARD)
    if found and (others or before is None):
        name = (others or found)[0].name
        raise InputError(f"out folder {out} already holds {name}: give a new or an empty folder as --out.")
    for name in ("video", "labels"):
        if before is not None and before.get(name) != inputs[name]:
            was = " ".join(before[name]) if isinstance(before.get(name), list) else before.get(name)
            raise InputError(
                f"out folder {out} holds an unfinished propagation with {name} {was}: "
                "give a new or an empty folder as --out."
            )
    return found


def _temporary(path: Path) -> bool:
    return path.name.startswith(".") and path.name.endswith(TEMPORARY)


def _unfinished(card: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(card.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.get("finished") is False else None
