"""A report as one HTML file: no network, light and dark, phone width, tables that sort."""

import base64
import io
import re
from html import escape
from pathlib import Path

from PIL import Image

from tcore.show.chart import draw_chart
from tcore.show.document import Block, Charts, Document, Picture, Section, Table, Text, Value
from tcore.show.report_style import SCRIPT, STYLE

WIDEST = 1400  # pixels of an embedded picture


def to_html(document: Document) -> str:
    """The whole page; everything that a user wrote is escaped."""
    links = "".join(f'<a href="#{anchor(s.title)}">{escape(s.title)}</a>' for s in document.sections)
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            '<link rel="icon" href="data:,">',
            f"<title>{escape(document.title)} - tcore report</title>",
            f"<style>{STYLE}</style></head><body>",
            f"<header><h1>{escape(document.title)}</h1><p>{escape(document.subtitle)}</p>",
            f'<nav aria-label="Sections">{links}</nav></header><main>',
            *(_section(section) for section in document.sections),
            f"</main><script>{SCRIPT}</script></body></html>\n",
        ]
    )


def anchor(title: str) -> str:
    """A heading as the name of a place in the page."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def _section(section: Section) -> str:
    blocks = "\n".join(_block(block) for block in section.blocks)
    name = anchor(section.title)
    head = f'<h2 id="{name}-title">{escape(section.title)}</h2>'
    return f'<section id="{name}" aria-labelledby="{name}-title">{head}\n{blocks}</section>'


def _block(block: Block) -> str:
    if isinstance(block, Table):
        return _table(block)
    if isinstance(block, Text):
        return f"<p>{escape(block.text)}</p>"
    if isinstance(block, Charts):
        return _charts(block)
    return _picture(block)


def _table(table: Table) -> str:
    head = "".join(
        f'<th scope="col"><button type="button">{escape(name) or "&nbsp;"}</button></th>'
        for name in table.head
    )
    rows = []
    for index, row in enumerate(table.rows):
        ours = ' class="ours"' if index < table.marked < len(table.rows) else ""
        rows.append(f"<tr{ours}>{''.join(_cell(value, table.digits) for value in row)}</tr>")
    caption = f"<caption>{escape(table.caption)}</caption>" if table.caption and not table.folded else ""
    inner = (
        f'<div class="scroll" tabindex="0"><table>{caption}<thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )
    return f"<details><summary>{escape(table.caption)}</summary>{inner}</details>" if table.folded else inner


def _cell(value: Value, digits: int) -> str:
    if value is None:
        return "<td>-</td>"
    text = show(value, digits)
    if isinstance(value, str):
        # A score with its interval: the interval is smaller.
        found = re.fullmatch(r"(-?[\d.]+) (\([\d.-]+\))", text)
        if found:
            return f'<td class="number">{found[1]} <small>{found[2]}</small></td>'
        return f"<td>{escape(text)}</td>"
    return f'<td class="number">{text}</td>'


def show(value: Value, digits: int) -> str:
    """A value of a table as text."""
    if value is None:
        return "-"
    return f"{value:.{digits}f}" if isinstance(value, float) else str(value)


def _charts(block: Charts) -> str:
    legend = "".join(
        f'<li><span class="key c{index % 8}"></span>{escape(name)}</li>'
        for index, name in enumerate(block.legend)
    )
    figures = []
    for chart in block.charts:
        several = not block.legend and len(chart.lines) > 1
        keys = "".join(
            f'<span><span class="key c{line.color % 8}{" dashed" if line.dashed else ""}"></span>'
            f"{escape(line.label)}</span>"
            for line in chart.lines
            if several
        )
        small = f"<small>{keys}</small>" if keys else ""
        figures.append(
            f"<figure><figcaption>{escape(chart.title)}{small}</figcaption>{draw_chart(chart)}</figure>"
        )
    return (
        f'<ul class="legend">{legend}</ul>' if legend else ""
    ) + f'<div class="charts">{"".join(figures)}</div>'


def _picture(picture: Picture) -> str:
    data = base64.b64encode(shrunk(picture.path)).decode("ascii")
    caption = escape(picture.caption)
    return (
        f'<figure class="picture"><figcaption>{caption}</figcaption>'
        f'<img src="data:image/jpeg;base64,{data}" alt="{caption}"></figure>'
    )


def shrunk(path: Path) -> bytes:
    """A picture as a JPEG that is no wider than a page needs."""
    with Image.open(path) as image:
        plain = image.convert("RGB")
    plain.thumbnail((WIDEST, 4 * WIDEST), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    plain.save(buffer, format="JPEG", quality=82, optimize=True)
    return buffer.getvalue()
