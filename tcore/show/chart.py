"""Curves as inline SVG: plain elements and classes, colored by the page that holds them."""

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from tcore.show.runs import Series

WIDTH, HEIGHT = 340, 190
POINTS = 50  # longer series are shown as so many means
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 10, 22


class Line(NamedTuple):
    """One curve: whose it is, which color of the page it has, and whether it is dashed."""

    label: str
    color: int
    dashed: bool
    series: Series


class Chart(NamedTuple):
    """Some curves under one title."""

    title: str
    lines: list[Line]


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers inside a range.

    >>> ticks(0.0, 1.0), ticks(3.9, 4.3)
    ([0.0, 0.5, 1.0], [3.9, 4.0, 4.1, 4.2, 4.3])
    """
    span = high - low
    if span <= 0 or not math.isfinite(span):
        return [low]
    rough = span / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * x for x in (1, 2, 5, 10) if power * x >= rough)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def draw_chart(chart: Chart) -> str:
    """A chart as an SVG element without any reference to the outside."""
    finite = [
        (line, [(x, y) for x, y in zip(*_lists(line.series), strict=True) if math.isfinite(y)])
        for line in chart.lines
    ]
    points = [point for _, some in finite for point in some]
    if not points:
        return ""
    (left, right), (low, high) = (_range([point[axis] for point in points]) for axis in (0, 1))

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (x - left) / (right - left) * (WIDTH - LEFT - RIGHT)
        return across, HEIGHT - BOTTOM - (y - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(_describe(chart))}">']
    for value in ticks(low, high):
        y = place(left, value)[1]
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 3:.1f}" text-anchor="end">{value:g}</text>')
    for value in ticks(left, right):
        x = place(value, low)[0]
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 6}" text-anchor="middle">{value:g}</text>')
    for line, some in finite:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in some))
        dashed = ' stroke-dasharray="5 3"' if line.dashed else ""
        name = f"<title>{escape(line.label)}</title>"
        parts.append(f'<polyline class="c{line.color % 8}"{dashed} points="{path}">{name}</polyline>')
        if len(some) <= 12:
            parts += [
                f'<circle class="c{line.color % 8}" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>'
                for x, y in (place(*point) for point in some)
            ]
    return "".join([*parts, "</svg>"])


def _lists(series: Series) -> tuple[list[float], list[float]]:
    smooth = series.smoothed(POINTS)
    return smooth.steps.tolist(), smooth.values.tolist()


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    pad = 0.5 * (abs(low) or 1.0) if high == low else 0.0
    return low - pad, high + pad


def _describe(chart: Chart) -> str:
    """The chart in words, for who cannot see it."""
    ends = (
        f"{line.label} from {line.series.values[0]:.3g} to {line.series.values[-1]:.3g}"
        for line in chart.lines
    )
    return f"{chart.title}: {'; '.join(ends)}"
