"""The verb around experiments: lab."""

import shlex
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import FlagCreatePairsOff, Positional

from tcore.cli_parsing import check_flags, parse
from tcore.errors import InputError


@dataclass(frozen=True)
class LabCommand:
    """Train and score the rows of an ablation table, and write one table beside the paper's."""

    table: Positional[str] = ""
    """branch, alignment, offsets or masks; or a JSON file: [{"name": "slow", "flags": "--seed 1"}, ...]."""
    out: Path | None = None
    """Folder for runs, scores, lab.md, lab.png and lab.json; the same command goes on there."""
    recipe: str = "quickstart"
    """Settings that every row starts from."""
    frames: str | None = None
    """Training data, as for tcore train."""
    budget: int | None = None
    """Steps of a run (default: the recipe's own length)."""
    seeds: int = 1
    """Runs of every row, seeds 0, 1, ..."""
    rows: tuple[str, ...] = ()
    """Some rows only; others that are in OUT already stay in the table."""
    davis: Path | None = None
    """Score on a dataset laid out like DAVIS (default: held-out rendered videos)."""
    binary: FlagCreatePairsOff[bool] = False
    """DAVIS-2016: any id above 0 is the one object."""
    size: tuple[int, int] | None = None
    """Another input size for scoring (height, width), to save time."""
    videos: int = 24
    """Held-out rendered videos to score on, without --davis."""
    extra: str = ""
    """More flags for every training, in quotes: --extra "--optim.batch 8 --vit.depth 4"."""
    health: tuple[Path, ...] = ()
    """Train nothing: which health figure foretells the score, over these runs or those in these folders."""
    gpus: tuple[str, ...] = ()
    """GPUs by number, a run at a time on each; one named twice takes two (default: one run at a time)."""


def lab_verb(argv: list[str]) -> None:
    """`tcore lab`: an ablation table of one's own."""
    # The flags of --extra are not ours to check.
    quoted = [f"--extra={word}" if argv[i - 1] == "--extra" and i else word for i, word in enumerate(argv)]
    argv = [word for word in quoted if word != "--extra"]
    check_flags(argv, "tcore lab", LabCommand())
    command = parse(LabCommand, argv, "tcore lab", LabCommand())
    from tcore.evaluation.benchmarks import open_benchmark
    from tcore.evaluation.protocols import TCORE
    from tcore.recipes import recipe
    from tcore.show.health_scores import health_lines
    from tcore.show.lab import Plan, lab
    from tcore.show.tables import TABLES

    if command.health:
        if command.table or command.out is not None:
            raise InputError("--health reads runs that are there: give it alone, tcore lab --health RUN ...")
        print("\n".join(health_lines(command.health)))
        return
    if not command.table or command.out is None:
        raise InputError(
            f"tcore lab needs a table and --out OUT: one of {', '.join(TABLES)}, or a JSON file "
            "(or --health RUN ..., which trains nothing)."
        )
    if command.seeds < 1 or (command.budget is not None and command.budget < 1):
        raise InputError(f"--seeds {command.seeds} --budget {command.budget}: need 1 or more.")
    if command.videos < 1:
        raise InputError(f"--videos {command.videos}: need 1 or more.")
    recipe(command.recipe)  # what is wrong is said here, not after the first run
    if command.davis is not None:
        open_benchmark("davis", command.davis, TCORE, binary=command.binary).check()
    plan = Plan(
        command.recipe,
        command.frames,
        command.budget,
        command.davis,
        command.binary,
        command.size,
        command.videos,
        tuple(shlex.split(command.extra)),
    )
    lines = lab(
        command.table,
        command.out,
        plan,
        seeds=command.seeds,
        only=command.rows,
        devices=command.gpus or ("",),
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    print("\n".join(lines))
    _write_health(command.out)


def _write_health(out: Path) -> None:
    """Beside the table: which health figure foretells the score, where there are runs enough to ask."""
    from tcore.files import write_text
    from tcore.show.health_scores import health_lines

    with suppress(InputError):  # too few
        lines = health_lines([out])
        write_text(out / "health.md", "\n".join(lines) + "\n")
        print("\n".join(("", *lines)))
