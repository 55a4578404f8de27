"""`tcore figure KIND`: pictures, a function for each kind."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from tcore.cli_parsing import check_flags, parse, suggest
from tcore.errors import InputError


@dataclass(frozen=True)
class NeighborsFigure:
    """Images beside their neighbours, with the cosine under each."""

    store: Positional[str] = ""
    """A folder of images, or a packed store of images, whose neighbours were found."""
    out: Path | None = None
    """PNG to write."""
    images: int = 8
    """Images to show, one per row."""
    seed: int = 0
    """Which images."""
    neighbors: Path | None = None
    """Another file of neighbours than the one inside or beside the store."""


def figure_verb(argv: list[str]) -> None:
    """`tcore figure`: draw a picture of a kind."""
    kinds = ", ".join(FIGURES)
    if not argv or argv[0] in ("-h", "--help"):
        print(f"usage: tcore figure KIND ... --out FILE.png\nkinds: {kinds} (tcore figure KIND --help)")
        return
    if argv[0] not in FIGURES:
        hint = suggest(argv[0], list(FIGURES))
        raise InputError(f"no figure {argv[0]!r}{hint} There is {kinds}.")
    FIGURES[argv[0]](argv[1:])


def _neighbors(argv: list[str]) -> None:
    prog = "tcore figure neighbors"
    check_flags(argv, prog, NeighborsFigure())
    command = parse(NeighborsFigure, argv, prog, NeighborsFigure())
    if not command.store or command.out is None:
        raise InputError(f"{prog} needs a store and a file: {prog} STORE --out FILE.png.")
    from tcore.show.neighbors import neighbors_picture

    neighbors_picture(
        command.store, command.out, number=command.images, seed=command.seed, neighbors=command.neighbors
    )
    print(f"picture: {command.out}")


FIGURES: dict[str, Callable[[list[str]], None]] = {"neighbors": _neighbors}
