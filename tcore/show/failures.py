"""The worst clips of a score card, and the frame where each breaks."""

import math
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from tcore.errors import InputError
from tcore.evaluation.benchmarks import find_benchmark
from tcore.evaluation.card import Card, rename_old
from tcore.evaluation.encoder import Encoder
from tcore.evaluation.protocols import Protocol
from tcore.files import read_json
from tcore.show.plotting import (
    COLORS,
    FAINT,
    caption,
    check_out,
    new_figure,
    save_figure,
    show_picture,
    styled,
)
from tcore.show.propagation import SCORES, PropagatedClip, label_clip, paint, score_frames
from tcore.text import Say, silent

BROKEN = 0.5  # a frame below this is broken
LASTING = 3  # a clip breaks where this many frames in a row, or all that are left, are broken


@dataclass(frozen=True)
class Failure:
    """One of the worst clips of a card."""

    benchmark: str
    clip: str
    score: float
    breaks: int
    """The frame where it breaks, or the worst one if it does not."""
    lasting: bool
    scores: Float[np.ndarray, " time"]
    labels: PropagatedClip


def read_card(path: Path) -> Card:
    """A score card from results.json, or from the folder that holds it."""
    file = path / "results.json" if path.is_dir() else path
    try:
        card: Card = read_json(file, "score card ")
    except InputError as error:
        raise InputError(f"{str(error).rstrip('.')}; tcore evaluate --out writes it.") from error
    if not isinstance(card, dict) or "benchmarks" not in card:
        raise InputError(f"{file} is not a score card of tcore evaluate: it has no benchmarks.")
    return card | {"benchmarks": rename_old(card["benchmarks"])}


def worst(card: Card, count: int) -> list[tuple[str, str, float]]:
    """Benchmark, clip and main score of the worst clips of every benchmark, worst first."""
    found = []
    for name, result in card["benchmarks"].items():
        score = find_benchmark(name).main_score
        values = [
            (float(clip[score]), title)
            for title, clip in result["clips"].items()
            if score in clip and not math.isnan(clip[score])
        ]
        found += [(name, title, value) for value, title in sorted(values)[:count]]
    return found


def find_failures(
    card: Card,
    encoder: Encoder,
    roots: dict[str, Path],
    *,
    count: int = 4,
    say: Say = silent,
) -> list[Failure]:
    """Run the worst clips of a card again, with the encoder and the settings that it was made with."""
    if encoder.fingerprint() != card["encoder"]["weights"]:
        raise InputError(
            f"the card was made with other weights ({card['encoder']['weights']}) than {encoder.name} has "
            f"({encoder.fingerprint()}): evaluate again, or give --encoder."
        )
    on_disk = [name for name in card["benchmarks"] if find_benchmark(name).on_disk]
    chosen = [entry for entry in worst(card, count) if entry[0] not in on_disk or entry[0] in roots]
    if not chosen:
        names = " and ".join(f"--{name} DIR" for name in on_disk)
        raise InputError(f"the clips of this card are in its datasets: give {names}.")
    found = []
    for index, (benchmark, clip, score) in enumerate(chosen):
        say(f"{index + 1}/{len(chosen)}  {benchmark}  {clip}")
        labels = _run_again(card, encoder, benchmark, clip, roots)
        scores = score_frames(labels)
        breaks, lasting = breaking_frame(scores)
        found.append(Failure(benchmark, clip, score, breaks, lasting, scores, labels))
    return found


def _run_again(
    card: Card, encoder: Encoder, benchmark: str, clip: str, roots: dict[str, Path]
) -> PropagatedClip:
    result = card["benchmarks"][benchmark]
    known = {field.name for field in fields(Protocol)}
    protocol = Protocol(**{name: value for name, value in result["protocol"].items() if name in known})
    source = roots[benchmark] if find_benchmark(benchmark).on_disk else len(result["clips"])
    size = tuple(result["clips"][clip]["input"])
    opened = find_benchmark(benchmark).open(source, protocol, binary=result["binary"], size=size)
    return label_clip(encoder, opened, clip)


def breaking_frame(scores: Float[np.ndarray, " time"]) -> tuple[int, bool]:
    """The first frame from which a clip stays broken for a while, or the worst one; and whether it broke.

    >>> breaking_frame(np.array([1.0, 0.9, 0.3, 0.8, 0.4, 0.3, 0.2, 0.6]))
    (4, True)
    >>> breaking_frame(np.array([1.0, 0.9, 0.7, 0.8]))
    (2, False)
    """
    known = np.flatnonzero(~np.isnan(scores))
    if len(known) == 0:
        return 0, False
    broken = scores[known] < BROKEN
    for place, index in enumerate(known.tolist()):
        if index > 0 and broken[place : place + LASTING].all():
            return index, True
    return int(known[np.argmin(scores[known])]), False


@styled
def failures_figure(failures: list[Failure], out: Path, *, title: str = "") -> None:
    """Draw a row for each clip: its first frame, truth and prediction where it breaks, its scores."""
    check_out(out)
    figure = new_figure(9.8, 2.0 * len(failures) + 0.7)
    axes = figure.subplots(len(failures), 4, squeeze=False, width_ratios=(1, 1, 1, 1.5))
    for row, failure in enumerate(failures):
        labels, at = failure.labels, failure.breaks
        head = f"{failure.clip}  {find_benchmark(failure.benchmark).main_score} {100 * failure.score:.1f}"
        show_picture(axes[row, 0], paint(labels, labels.truth, 0), head)
        axes[row, 0].title.set_fontweight("bold")
        word = "breaks at" if failure.lasting else "worst at"
        show_picture(axes[row, 1], paint(labels, labels.truth, at), f"truth, {word} frame {at}")
        show_picture(axes[row, 2], paint(labels, labels.found, at), f"prediction, frame {at}")
        _draw_scores(axes[row, 3], failure, row + 1 == len(failures))
    caption(figure, f"Breaks: first of {LASTING} frames in a row with a mean below {BROKEN:g}.")
    save_figure(figure, out, title)


def _draw_scores(axes: Axes, failure: Failure, last: bool) -> None:
    axes.plot(failure.scores, color=COLORS[0], linewidth=1.6)
    axes.axhline(BROKEN, color=FAINT, linewidth=0.8, linestyle=":")
    axes.axvline(failure.breaks, color=COLORS[1], linewidth=1.2)
    axes.set_ylim(0, 1.02)
    axes.set_xlim(0, len(failure.scores) - 1)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    axes.tick_params(labelsize=7.5, length=2.5)
    axes.set_ylabel(SCORES[failure.labels.kind], labelpad=1)
    if last:
        axes.set_xlabel("frame", labelpad=1)
