"""Figures of a run for its report: drawn where they are missing or older than the encoder."""

from collections.abc import Callable
from pathlib import Path

from tcore.errors import InputError
from tcore.evaluation.encoders import load_encoder
from tcore.show.runs import Run

FOLDER = "figures"
SUFFIXES = (".png", ".jpg", ".jpeg")


def find_pictures(run: Path) -> list[Path]:
    """Pictures in a run folder and in its figures."""
    found = [path for folder in (run, run / FOLDER) if folder.is_dir() for path in sorted(folder.iterdir())]
    return [path for path in found if path.suffix.lower() in SUFFIXES and path.name[0] != "."]


def draw_figures(run: Run, say: Callable[[str], None] = lambda line: None) -> None:
    """Draw attention, PCA and propagation of a run on a held-out rendered video, into its folder."""
    weights = run.path / "encoder.safetensors"
    if run.config is None or not weights.is_file():
        return
    for name, draw in DRAWN.items():
        out = run.path / FOLDER / f"{name}.png"
        if out.is_file() and out.stat().st_mtime >= weights.stat().st_mtime:
            continue
        if name == "propagation" and (run.path / "propagation.png").is_file():
            continue  # the quickstart's own
        try:
            draw(run, out)
        except InputError as error:
            say(f"{run.name}: {name} is not drawn: {error}")


def _attention(run: Run, out: Path) -> None:
    from tcore.show.attention import attend, attention_figure
    from tcore.show.clips import Times, open_clip
    from tcore.show.matcher import load_matcher

    encoder = load_encoder(run.path)
    clip = open_clip((), Times(), encoder.patch_size)
    found = attend(encoder, clip, matcher=load_matcher(run.path))
    attention_figure(clip, found, out, patch_size=encoder.patch_size)


def _pca(run: Run, out: Path) -> None:
    from tcore.show.clips import evenly, open_clip
    from tcore.show.pca import pca_figure

    encoder = load_encoder(run.path)
    pca_figure(encoder, open_clip((), evenly(5), encoder.patch_size), out)


def _propagation(run: Run, out: Path) -> None:
    from tcore.show.carried import carry_rendered
    from tcore.show.propagation import propagation_figure

    propagation_figure(list(carry_rendered(load_encoder(run.path), "rendered").values()), out)


def _failures(run: Run, out: Path) -> None:
    from tcore.show.failures import failures_figure, find_failures

    encoder = load_encoder(run.path)
    own = encoder.fingerprint()
    cards = [
        c for c in run.cards.values() if "synthetic" in c["benchmarks"] and c["encoder"]["weights"] == own
    ]
    if cards:
        failures_figure(find_failures(cards[0], encoder, {}), out)


DRAWN: dict[str, Callable[[Run, Path], None]] = {
    "attention": _attention,
    "pca": _pca,
    "propagation": _propagation,
    "failures": _failures,
}
