"""The verb that looks at data before anything is trained on it: check."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import FlagCreatePairsOff, Positional, arg

from tcore.cli.parsing import check_flags, parse
from tcore.config import Config
from tcore.errors import InputError
from tcore.recipes import recipe


@dataclass(frozen=True)
class CheckCommand:
    """Look at a frame store, video files, images or a benchmark before anything is trained on them."""

    path: Positional[str] = ""
    """Frame store, folder of video files or images, or a dataset laid out like DAVIS, VIP or JHMDB."""
    recipe: str = "vits16-k400"
    """Recipe whose settings the data is checked against; settings are flags, as for tcore train."""
    kind: Literal["auto", "frames", "images", "videos", "davis", "vip", "jhmdb"] = "auto"
    """What the folder holds, where it is taken for something else."""
    sample: int = 2000
    """Videos whose frames are looked at, drawn from the seed."""
    full: FlagCreatePairsOff[bool] = False
    """Look at every frame of every video."""
    sheet: Path | None = None
    """Picture (PNG) to draw: training samples with their crops and masks."""
    json: Path | None = None
    """File to write everything found to, for machines."""
    config: Annotated[Config, arg(name="")] = field(default_factory=Config)


def parse_check(argv: list[str]) -> CheckCommand:
    """The command that `tcore check` was given: a recipe with some settings changed."""
    check_flags(argv, "tcore check", CheckCommand())
    if "-h" in argv or "--help" in argv:
        name = CheckCommand().recipe
    else:
        name = parse(CheckCommand, argv, "tcore check", CheckCommand()).recipe
    return parse(CheckCommand, argv, "tcore check", CheckCommand(config=recipe(name)))


def check_verb(argv: list[str]) -> None:
    """`tcore check`: exit code 1 where training, or the benchmark, would go wrong."""
    command = parse_check(argv)
    if not command.path:
        raise InputError("tcore check needs a folder: a frame store, videos, images, or a benchmark.")
    from tcore.show.check import check

    findings = check(
        Path(command.path),
        command.config,
        kind=command.kind,
        sample=command.sample,
        full=command.full,
        sheet=command.sheet,
        report=command.json,
    )
    # A file's name may hold bytes that are no text.
    encoding = sys.stdout.encoding or "utf-8"
    print(findings.text().encode(encoding, "replace").decode(encoding))
    if findings.exit_code:
        raise SystemExit(findings.exit_code)
