"""Health against score: over several runs, which training figure ranks the runs as the score does.

    python experiments/health_scores.py RUN RUN ... | LAB_FOLDER

The study and its outcome are in experiments/README.md.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from tcore.errors import InputError
from tcore.evaluation.trajectory import way_of
from tcore.files import read_json
from tcore.show.runs import Run, read_run
from tcore.training.journal import METRICS

SCORE = "J&F"
FEWEST = 3  # two runs are always in order
LAST = 20  # steps whose mean is the last loss: single ones are noisy
SHUFFLES = 1000


class Observation(NamedTuple):
    """The figures at the end of a training, and the score of its encoder on a benchmark."""

    name: str
    figures: dict[str, float]
    score: float
    benchmark: str


class Link(NamedTuple):
    """Rank correlation (Spearman, -1 to 1) between a figure and the score."""

    figure: str
    correlation: float
    runs: int


def ranks(values: Sequence[float]) -> Float[np.ndarray, " n"]:
    """Ranks from 1; equal values share their mean rank.

    >>> ranks([3.0, 1.0, 3.0]).tolist()
    [2.5, 1.0, 2.5]
    """
    _, place, counts = np.unique(np.array(values, dtype=np.float64), return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2)[place.reshape(-1)].astype(np.float64)


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Rank correlation; None for fewer than three pairs, or where one side is constant.

    >>> spearman([1, 2, 3, 4], [10, 20, 40, 30])
    0.8
    """
    if len(a) < FEWEST or len(set(a)) == 1 or len(set(b)) == 1:
        return None
    return round(float(np.corrcoef(ranks(a), ranks(b))[0, 1]), 12)


def health_against_score(runs: Sequence[Observation]) -> list[Link]:
    """Every figure that at least three runs have, the closest to the score first."""
    links = []
    for figure in dict.fromkeys(name for run in runs for name in run.figures):
        pairs = [(run.figures[figure], run.score) for run in runs if figure in run.figures]
        found = spearman(*zip(*pairs, strict=True))
        if found is not None:
            links.append(Link(figure, found, len(pairs)))
    return sorted(links, key=lambda link: (-abs(link.correlation), -link.runs, link.figure))


def by_chance(runs: Sequence[Observation], best: float, seed: int = 0) -> float:
    """Share of shuffles of the scores for which some figure correlates as well as the best one did."""
    rng = np.random.default_rng(seed)
    scores = [run.score for run in runs]
    hits = 0
    for _ in range(SHUFFLES):
        shuffled = [
            run._replace(score=scores[i]) for run, i in zip(runs, rng.permutation(len(runs)), strict=True)
        ]
        links = health_against_score(shuffled)
        hits += bool(links) and abs(links[0].correlation) >= abs(best) - 1e-9
    return hits / SHUFFLES


def observe(run: Run) -> Observation | None:
    """The last figures of a run and its score; None if it was not scored."""
    scored = _score(run)
    if scored is None or not run.metrics:
        return None
    figures = {}
    for name in ("total", *run.losses()):
        values = [line[name] for line in run.metrics[-LAST:] if isinstance(line.get(name), int | float)]
        if values:
            figures[f"loss {name}"] = float(np.mean(values))
    health: dict[str, Any] = next((line["health"] for line in reversed(run.metrics) if "health" in line), {})
    figures |= {name: float(value) for name, value in health.items() if isinstance(value, int | float)}
    cycles = [row["cycle"] for row in run.checkpoints.values() if "cycle" in row]
    figures |= {"cycle": float(cycles[-1])} if cycles else {}
    return Observation(str(run.path), figures, scored[1], scored[0])


def _score(run: Run) -> tuple[str, float] | None:
    """Benchmark (with a name for how it was scored) and J&F of the run's card, or of its last scored step."""
    beside = run.path.parent / "scores" / "results.json"
    cards = [*run.cards.values()]
    if not cards and run.path.name == "run" and beside.is_file():  # ROW/seed-0/run and ROW/seed-0/scores
        cards = [read_json(beside, "scores ")]
    try:
        found = [(way_of(card), {n: r["scores"] for n, r in card["benchmarks"].items()}) for card in cards]
        found += [(row["way"], row["scores"]) for row in list(run.checkpoints.values())[-1:]]
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"scores of {run.path} are not a score card ({error!r}): evaluate it again."
        ) from error
    for way, scores in found:
        for name, values in scores.items():
            if SCORE in values:
                return f"{name} ({way})", float(values[SCORE])
    return None


def find_runs(paths: Sequence[str | Path]) -> list[Path]:
    """Run folders among these folders or below them, as in the folder of a lab."""
    found: dict[Path, None] = {}
    for path in map(Path, paths):
        if not path.is_dir():
            raise InputError(f"{path} is not a folder: give run folders, or the folder of a lab.")
        here = [path] if (path / METRICS).is_file() else []
        found |= dict.fromkeys(here or sorted(file.parent for file in path.glob(f"*/**/{METRICS}")))
    return list(found)


def health_lines(paths: Sequence[str | Path]) -> list[str]:
    """The table, and which figure to watch."""
    places = find_runs(paths)
    seen, unreadable = [], []
    for path in places:
        try:
            seen += [one] if (one := observe(read_run(path))) is not None else []
        except InputError as error:
            unreadable.append(str(error))
    counts = Counter(one.benchmark for one in seen)
    benchmark = counts.most_common(1)[0][0] if counts else ""
    runs = [one for one in seen if one.benchmark == benchmark]
    if len(runs) < FEWEST:
        raise InputError(
            f"{len(runs)} of {len(places)} runs have metrics and a {SCORE} scored the same way: "
            f"need {FEWEST} or more (tcore evaluate RUN --out RUN/scores, or tcore train --evaluate-every)."
            + (f" Left out: {unreadable[0]}" if unreadable else "")
        )
    return [*_lines(runs, len(places), benchmark), *(f"Left out: {error}" for error in unreadable)]


def _lines(runs: Sequence[Observation], given: int, benchmark: str) -> Iterator[str]:
    links = health_against_score(runs)
    left = f" ({given - len(runs)} more have no such score)" if given > len(runs) else ""
    yield f"# Health against score: {len(runs)} runs{left}, {SCORE} on {benchmark}"
    yield ""
    yield "| figure at the end of training | Spearman with the score | runs |"
    yield "|---|---|---|"
    for link in links:
        yield f"| {link.figure} | {link.correlation:+.2f} | {link.runs} |"
    yield ""
    if not links:
        yield "No figure differs between these runs."
        return
    best = links[0]
    which = "a higher" if best.correlation > 0 else "a lower"
    chance = by_chance(runs, best.correlation)
    few = ": these runs are too few to tell" if chance > 0.05 else ""
    yield (
        f"Watch {best.figure} ({which} value goes with a better score). With shuffled scores, some figure "
        f"does as well in {chance:.0%} of {SHUFFLES} draws{few}."
    )


if __name__ == "__main__":
    try:
        print("\n".join(health_lines(sys.argv[1:])))
    except InputError as error:
        sys.exit(f"error: {error}")
