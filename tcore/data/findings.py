"""The result of a check: lines for a person, figures for a program, and whether training would fail."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from tcore.data.images import ahead
from tcore.text import Progress, list_some

Level = Literal["advice", "warning", "error"]
LEVELS: tuple[Level, ...] = ("advice", "warning", "error")
Item = TypeVar("Item")
Found = TypeVar("Found")

SHOWN = 20  # errors, before the rest is counted
COLUMN, BAR = 12, 40  # width of a line's name and of the longest bar, in characters


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

    def add_errors(self, problems: Sequence[str]) -> None:
        """Add an error for each of the first problems, and one that counts the rest."""
        for text in problems[:SHOWN]:
            self.add("error", text)
        if len(problems) > SHOWN:
            self.add("error", f"{len(problems) - SHOWN:,} more such problems; --json FILE lists them all.")

    @property
    def exit_code(self) -> int:
        """1 where training (or the benchmark) would fail."""
        return int(any(problem.level == "error" for problem in self.problems))

    def text(self) -> str:
        """The report for a person: errors last, where they are seen."""
        problems = sorted(self.problems, key=lambda problem: LEVELS.index(problem.level))
        verdict = "there are errors: see above" if self.exit_code else "no errors found"
        lines = [f"{problem.level}: {problem.text}" for problem in problems]
        return "\n".join([f"{self.path}: {self.kind}", "", *self.lines, "", *lines, verdict])

    def to_json(self) -> dict[str, Any]:
        """The report for a machine."""
        problems = [problem._asdict() for problem in self.problems]
        about = {"path": self.path, "kind": self.kind, "ok": not self.exit_code, "problems": problems}
        return about | self.figures


def bars(values: np.ndarray, edges: Sequence[int]) -> list[str]:
    """A histogram in characters: bin i holds edges[i] <= value < edges[i + 1]; the last bin has no end.

    >>> bars(np.array([1, 1, 5]), (0, 2, 4))
    ['0-1  ████████████████████████████████████████ 2', '2-3   0', ' 4+  ████████████████████ 1']
    """
    counts = np.histogram(values, [*edges, np.inf])[0].tolist()
    labels = [f"{a}-{b - 1}" if b > a + 1 else f"{a}" for a, b in itertools.pairwise(edges)]
    labels.append(f"{edges[-1]}+")
    filled = [i for i, number in enumerate(counts) if number]
    shown = range(filled[0], filled[-1] + 1) if filled else range(0)
    width = max((len(labels[i]) for i in shown), default=0)
    lengths = [max(1, round(BAR * number / max(counts))) if number else 0 for number in counts]
    return [f"{labels[i]:>{width}}  {'█' * lengths[i]} {counts[i]:,}" for i in shown]


def commonest(values: Iterable[str]) -> str:
    """The commonest values with their counts.

    >>> commonest(["a", "b", "a"])
    'a (2), b (1)'
    """
    counts = Counter(values).most_common()
    return list_some([f"{value} ({number:,})" for value, number in counts], 4)


def for_each(
    work: Callable[[Item], Found], items: Sequence[Item], what: str, threads: int
) -> Iterator[Found]:
    """Do some work on every item, in threads, in order; the progress goes to stderr."""
    progress = Progress(what, len(items))
    for found in ahead(work, items, max(1, threads)):
        progress.advance()
        yield found
