"""The verb around data: prepare."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import FlagCreatePairsOff, Positional

from tcore.cli.parsing import check_flags, parse
from tcore.data.prepare import merge, prepare
from tcore.errors import InputError
from tcore.text import to_stderr


@dataclass(frozen=True)
class PrepareCommand:
    """Turn a folder of videos, frame folders or images into a packed store for `tcore train`."""

    source: Positional[str] = ""
    """A folder of video files, frame folders or images (--images), at any depth; or rendered:N videos."""
    store: Positional[str] = ""
    """New folder for the store; after a stop, the same command goes on there."""
    fps: float | None = None
    """Frames kept per second of video (default 2); for frame folders, what they were taken at."""
    short_side: int | None = None
    """Larger frames are made smaller (default 256 for videos; frames and images stay as they are)."""
    quality: int = 90
    """JPEG quality of frames that are encoded."""
    images: FlagCreatePairsOff[bool] = False
    """Take every image as a video of one frame."""
    workers: int | None = None
    """Processes side by side (default: one per core)."""
    part: str | None = None
    """Do part i of n (i/n) alone, for example on another machine; --merge puts the parts together."""
    merge: FlagCreatePairsOff[bool] = False
    """Put the parts in STORE together: tcore prepare STORE --merge."""
    engine: str = "processes"
    """Who does the work: processes of this machine, the machines of a ray cluster, or here, one process."""


def prepare_verb(argv: list[str]) -> None:
    """`tcore prepare`: anybody's videos become training data."""
    check_flags(argv, "tcore prepare", PrepareCommand())
    command = parse(PrepareCommand, argv, "tcore prepare", PrepareCommand())
    if command.merge:
        where = command.store or command.source
        if not where:
            raise InputError("tcore prepare --merge needs the store: tcore prepare STORE --merge.")
        print("\n".join(merge(Path(where)).lines()))
        return
    if not command.source or not command.store:
        raise InputError("tcore prepare needs a source and a store: tcore prepare SOURCE STORE.")
    from tcore.device import num_cores

    part = _part(command.part)
    summary = prepare(
        Path(command.source),
        Path(command.store),
        fps=command.fps,
        short_side=command.short_side,
        quality=command.quality,
        images=command.images,
        workers=num_cores() if command.workers is None else command.workers,
        part=part,
        engine=command.engine,
        say=to_stderr,
    )
    if summary:
        print("\n".join(summary.lines()))
    else:
        print(
            f"part {command.part} is done; when all are: tcore prepare {shlex.quote(command.store)} --merge"
        )


def _part(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
    if not match:
        raise InputError(f"--part {text!r}: need i/n, such as 1/8.")
    return int(match[1]), int(match[2])
