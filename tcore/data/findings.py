"""What a check found: lines for a person, figures for a machine, and whether training would go wrong."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from tcore.text import Progress, silent, to_stderr

Level = Literal["error", "warning", "advice"]
Item = TypeVar("Item")
Found = TypeVar("Found")

COLUMN, BAR = 12, 40  # width of a line's name and of the longest bar, in characters
NAMED = 5  # examples that are named before the rest is counted


class Problem(NamedTuple):
    """Something to know: an error stops training, a warning spoils it, advice may help it."""

    level: Level
    text: str


@dataclass
class Findings:
    """What a check found, line by line; `figures` holds the same for machines."""

    kind: str
    path: str
    lines: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def say(self, name: str, text: str, *more: str, **figures: Any) -> None:
        """Add a named line, lines below it, and its figures."""
        self.lines.append(f"{name:{COLUMN}}{text}")
        self.lines += [" " * COLUMN + line for line in more]
        self.figures |= figures

    def add(self, level: Level, text: str) -> None:
        """Add a problem: a sentence that says what it is and what to do."""
        self.problems.append(Problem(level, text))

    @property
    def exit_code(self) -> int:
        """1 where training (or the benchmark) would go wrong."""
        return int(any(problem.level == "error" for problem in self.problems))

    def text(self) -> str:
        """The report for a person: errors last, where they are seen."""
        rank = {"advice": 0, "warning": 1, "error": 2}
        told = [f"{p.level}: {p.text}" for p in sorted(self.problems, key=lambda p: rank[p.level])]
        verdict = "something here would go wrong" if self.exit_code else "nothing here stands in the way"
        return "\n".join([f"{self.path}: {self.kind}", "", *self.lines, "", *told, verdict])

    def to_json(self) -> dict[str, Any]:
        """The report for a machine."""
        problems = [problem._asdict() for problem in self.problems]
        return {
            "path": self.path,
            "kind": self.kind,
            "ok": not self.exit_code,
            "problems": problems,
            **self.figures,
        }


def count(number: int, noun: str) -> str:
    """A number of things.

    >>> count(1, "video"), count(1200, "video")
    ('1 video', '1,200 videos')
    """
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def name_some(names: Sequence[str]) -> str:
    """A few names, and how many more there are.

    >>> name_some(["a", "b", "c", "d", "e", "f", "g"])
    'a, b, c, d, e and 2 more'
    """
    more = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def bars(values: np.ndarray, edges: Sequence[float], labels: Sequence[str]) -> list[str]:
    """A histogram in characters: bin i holds edges[i] <= value < edges[i + 1]; the last bin has no end."""
    counts = np.histogram(values, [*edges, np.inf])[0].tolist()
    filled = [i for i, count in enumerate(counts) if count]
    shown = range(filled[0], filled[-1] + 1) if filled else range(0)
    width = max((len(labels[i]) for i in shown), default=0)
    lengths = [max(1, round(BAR * count / max(counts))) if count else 0 for count in counts]
    return [f"{labels[i]:>{width}}  {'█' * lengths[i]} {counts[i]:,}" for i in shown]


def commonest(values: Iterable[str], shown: int = 4) -> str:
    """The commonest values with their counts.

    >>> commonest(["a", "b", "a"])
    'a (2), b (1)'
    """
    counts = Counter(values).most_common()
    more = f" and {len(counts) - shown:,} others" if len(counts) > shown else ""
    return ", ".join(f"{value} ({count:,})" for value, count in counts[:shown]) + more


def say_seconds(seconds: float) -> str:
    """A duration in the unit that a person would choose.

    >>> [say_seconds(s) for s in (0.3, 10, 540, 7200)]
    ['0.3 s', '10.0 s', '9.0 min', '2.0 h']
    """
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"


def for_each(
    work: Callable[[Item], Found], items: Sequence[Item], what: str, threads: int, quiet: bool = False
) -> Iterator[Found]:
    """Do some work on every item, in threads, in order; tells stderr how far it is and when it will end."""
    progress = Progress(what, len(items), say=silent if quiet else to_stderr)
    pool = ThreadPoolExecutor(max(1, threads))
    try:
        for found in pool.map(work, items):
            progress.advance()
            yield found
    finally:
        pool.shutdown(cancel_futures=True)
