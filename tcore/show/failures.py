"""The worst clips of a score card, and the frame where each breaks."""

import math
from collections.abc import Mapping
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
from tcore.show.plotting import COLORS, FAINT, drawing, show_picture
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


def worst(card: Card, benchmark: str) -> list[tuple[str, float]]:
    """Clips of a benchmark with their main score, worst first; those without one are left out."""
    score = find_benchmark(benchmark).score_names[0]
    clips = card["benchmarks"][benchmark]["clips"].items()
    found = [
        (title, float(clip[score])) for title, clip in clips if not math.isnan(clip.get(score, math.nan))
    ]
    return sorted(found, key=lambda one: one[1])


def find_failures(
    card: Card, encoder: Encoder, roots: Mapping[str, Path], *, count: int = 4, say: Say = silent
) -> list[Failure]:
    """Run the worst clips of a card again, with the encoder and the settings that it was made with."""
    own, wanted = encoder.fingerprint(), card["encoder"]["weights"]
    if own != wanted:
        raise InputError(
            f"the card was made with other weights ({wanted}) than {encoder.name} has ({own}): "
            "evaluate again, or give --encoder."
        )
    lacking = [name for name in card["benchmarks"] if find_benchmark(name).on_disk and name not in roots]
    if set(lacking) == set(card["benchmarks"]):
        names = " and ".join(f"--{name} DIR" for name in lacking)
        raise InputError(f"the clips of this card are in its datasets: give {names}.")
    known = {field.name for field in fields(Protocol)}
    found = []
    for benchmark, result in card["benchmarks"].items():
        if benchmark in lacking:
            continue
        protocol = Protocol(**{name: value for name, value in result["protocol"].items() if name in known})
        for clip, score in worst(card, benchmark)[:count]:
            say(f"{benchmark}  {clip}")
            size = tuple(result["clips"][clip]["input"])
            source = roots.get(benchmark, len(result["clips"]))
            opened = find_benchmark(benchmark).open(source, protocol, binary=result["binary"], size=size)
            labels = label_clip(encoder, opened, clip)
            scores = score_frames(labels)
            found.append(Failure(benchmark, clip, score, *breaking_frame(scores), scores, labels))
    return found


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


def failures_figure(failures: list[Failure], out: Path, *, title: str = "") -> None:
    """Draw a row for each clip: its first frame, truth and prediction where it breaks, its scores."""
    text = f"Breaks: first of {LASTING} frames in a row with a mean below {BROKEN:g}."
    with drawing(out, (9.8, 2.0 * len(failures) + 0.7), title, text=text) as figure:
        axes = figure.subplots(len(failures), 4, squeeze=False, width_ratios=(1, 1, 1, 1.5))
        for row, failure in enumerate(failures):
            labels, at = failure.labels, failure.breaks
            score = find_benchmark(failure.benchmark).score_names[0]
            head = f"{failure.clip}  {score} {100 * failure.score:.1f}"
            show_picture(axes[row, 0], paint(labels, labels.truth, 0), head)
            axes[row, 0].title.set_fontweight("bold")
            word = "breaks at" if failure.lasting else "worst at"
            show_picture(axes[row, 1], paint(labels, labels.truth, at), f"truth, {word} frame {at}")
            show_picture(axes[row, 2], paint(labels, labels.found, at), f"prediction, frame {at}")
            _draw_scores(axes[row, 3], failure, row + 1 == len(failures))


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
