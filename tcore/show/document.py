"""A report as data: sections of tables, texts, charts and pictures, before it becomes HTML or Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tcore.show.chart import Chart

Value = str | float | int | None


@dataclass(frozen=True)
class Table:
    """Rows under a head; numbers are shown with so many digits after the point."""

    head: tuple[str, ...]
    rows: Sequence[tuple[Value, ...]]
    caption: str = ""
    digits: int = 1
    folded: bool = False
    """Long ones are folded away at first."""
    marked: int = 0
    """So many first rows are ours; the others are there for comparison."""


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Charts:
    """Curves with one legend: names by color."""

    charts: list[Chart]
    legend: list[str]


@dataclass(frozen=True)
class Picture:
    """A picture on disk and what it shows."""

    path: Path
    caption: str


Block = Table | Text | Charts | Picture


@dataclass(frozen=True)
class Section:
    """A heading and what is under it."""

    title: str
    blocks: list[Block]


@dataclass(frozen=True)
class Document:
    """A whole report."""

    title: str
    subtitle: str
    sections: list[Section]
