"""A report as Markdown: the same tables; curves as first, lowest and last values; pictures as links."""

import os
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from tcore.show.document import Block, Charts, Document, Table, Text, Value
from tcore.show.report_html import show


def to_markdown(document: Document, folder: Path) -> str:
    """The whole text; pictures are linked from `folder`, where the file will lie."""
    lines = [f"# {plain(document.title)}", "", plain(document.subtitle), ""]
    for section in document.sections:
        lines += [f"## {section.title}", ""]
        for block in section.blocks:
            lines += [*_block(block, folder), ""]
    return "\n".join(lines).rstrip() + "\n"


def _block(block: Block, folder: Path) -> list[str]:
    if isinstance(block, Table):
        text = [block.caption, ""] if block.caption else []
        return [*map(plain, text), *_table(block.head, block.rows, block.digits)]
    if isinstance(block, Text):
        return [plain(block.text)]
    if isinstance(block, Charts):
        return _curves(block)
    link = quote(os.path.relpath(block.path, folder).replace(os.sep, "/"))
    return [f"![{plain(block.caption)}]({link})"]


def _curves(block: Charts) -> list[str]:
    rows: list[tuple[Value, ...]] = []
    for chart in block.charts:
        for line in chart.lines:
            values = line.series.values
            name = chart.title if line.label == chart.title else f"{chart.title}, {line.label}"
            rows.append((name, *(f"{x:.4g}" for x in (values[0], values.min(), values[-1]))))
    return _table(("curve", "first", "lowest", "last"), rows, 3)


def _table(head: tuple[str, ...], rows: Sequence[tuple[Value, ...]], digits: int) -> list[str]:
    lines = ["| " + " | ".join(plain(name) for name in head) + " |", "|" + "---|" * len(head)]
    return lines + ["| " + " | ".join(plain(show(x, digits)) for x in row) + " |" for row in rows]


def plain(text: str) -> str:
    """Text that means nothing but itself in Markdown."""
    for mark in ("\\", "|", "<", "`", "*", "[", "]"):
        text = text.replace(mark, "\\" + mark)
    return " ".join(text.split())
