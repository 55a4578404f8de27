"""`tcore figure`: kinds that show runs, score cards and stores."""

import sys
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from tcore.cli.parsing import check_flags, need_out, parse
from tcore.errors import InputError


@dataclass(frozen=True)
class NeighborsFigure:
    """Images beside their neighbors, with the cosine under each."""

    store: Positional[str] = ""
    """A folder of images, or a packed store of images, whose neighbors were found."""
    out: Path | None = None
    """PNG or PDF to write."""
    images: int = 8
    """Images to show, one per row."""
    seed: int = 0
    """Which images."""
    neighbors: Path | None = None
    """Another file of neighbors than the one inside or beside the store."""


@dataclass(frozen=True)
class DynamicsFigure:
    """Losses, health and scores over the steps of one or several runs."""

    runs: Positional[tuple[Path, ...]] = ()
    """Run folders; scores are there after tcore evaluate RUN --every-checkpoint or train --evaluate-every."""
    out: Path | None = None
    """PNG or PDF to write."""


@dataclass(frozen=True)
class SandwichFigure:
    """What the loader feeds: past, current, future, crops and masks."""

    run: Positional[Path] = Path()
    """A run folder: its settings and its frames."""
    out: Path | None = None
    """PNG or PDF to write."""
    frames: str | None = None
    """Other frames than those of the run: a store, a folder, or rendered."""
    rows: int = 4
    """Samples to show."""


@dataclass(frozen=True)
class FailuresFigure:
    """The worst clips of a score card, and where they break."""

    card: Positional[Path] = Path()
    """results.json of tcore evaluate, or its folder."""
    out: Path | None = None
    """PNG or PDF to write."""
    count: int = 4
    """Clips of every benchmark."""
    encoder: str | None = None
    """The encoder, where it is no longer where the card says."""
    davis: Path | None = None
    """The dataset that the card was made with."""
    vip: Path | None = None
    """The dataset that the card was made with."""
    jhmdb: Path | None = None
    """The dataset that the card was made with."""


def neighbors(argv: list[str]) -> None:
    """Images beside their neighbors."""
    prog = "tcore figure neighbors"
    check_flags(argv, prog, NeighborsFigure())
    command = parse(NeighborsFigure, argv, prog, NeighborsFigure())
    if not command.store or command.out is None:
        raise InputError(f"{prog} needs a store and a file: {prog} STORE --out FILE.png.")
    from tcore.show.samples import neighbors_figure

    neighbors_figure(
        command.store, command.out, number=command.images, seed=command.seed, neighbors=command.neighbors
    )
    print(f"picture: {command.out}")


def dynamics(argv: list[str]) -> None:
    """Curves of runs."""
    prog = "tcore figure dynamics"
    check_flags(argv, prog, DynamicsFigure())
    command = parse(DynamicsFigure, argv, prog, DynamicsFigure())
    out = need_out(command.out, prog)
    from tcore.show.dynamics import dynamics_figure
    from tcore.show.runs import read_runs

    runs = read_runs(command.runs)
    dynamics_figure(runs, out, title=", ".join(run.name for run in runs))
    print(f"picture: {out}")


def sandwich(argv: list[str]) -> None:
    """Training samples of a run."""
    prog = "tcore figure sandwich"
    check_flags(argv, prog, SandwichFigure())
    command = parse(SandwichFigure, argv, prog, SandwichFigure())
    out = need_out(command.out, prog)
    if command.run == Path():
        raise InputError(
            f"{prog} needs a run: {prog} RUN --out FILE.png (tcore check --sheet takes a store)."
        )
    from tcore.show.samples import sandwich_figure

    count = sandwich_figure(command.run, out, frames=command.frames, rows=command.rows)
    print(f"{count} samples; picture: {out}")


def failures(argv: list[str]) -> None:
    """The worst clips of a score card."""
    prog = "tcore figure failures"
    check_flags(argv, prog, FailuresFigure())
    command = parse(FailuresFigure, argv, prog, FailuresFigure())
    out = need_out(command.out, prog)
    if command.card == Path():
        raise InputError(f"{prog} needs a score card: {prog} results.json --out FILE.png.")
    from tcore.evaluation.encoders import load_encoder
    from tcore.show.failures import failures_figure, find_failures, read_card
    from tcore.show.plotting import check_out, title_of

    check_out(out)
    card = read_card(command.card)
    encoder = load_encoder(command.encoder or card["encoder"]["name"])
    roots = {n: root for n in ("davis", "vip", "jhmdb") if (root := getattr(command, n)) is not None}
    found = find_failures(
        card, encoder, roots, count=command.count, say=lambda line: print(line, file=sys.stderr, flush=True)
    )
    failures_figure(found, out, title=f"worst clips of {title_of(encoder.name, '')}")
    for one in found:
        word = "breaks" if one.lasting else "worst"
        print(f"{one.clip}  {100 * one.score:.1f}  {word} at frame {one.breaks}")
    print(f"picture: {out}")
