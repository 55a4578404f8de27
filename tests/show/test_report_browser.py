"""A report in a real browser, opened from disk: no request, no complaint, tables that sort."""

from pathlib import Path

import pytest

from tcore.show.report import write_report
from tests.show.browser import Browser, why_no_browser

pytestmark = [pytest.mark.long, pytest.mark.skipif(bool(why_no_browser()), reason=why_no_browser())]

TABLE = """
const long = (t) => t.querySelector('th button') && t.tBodies[0].rows.length > 2;
const table = [...document.querySelectorAll('table')].find(long);
"""
COLUMN = TABLE + "return [...table.tBodies[0].rows].map((row) => row.cells[0].textContent)"
CLICK = TABLE + "table.querySelector('th button').click()"


def test_a_report_opens_from_disk_and_its_tables_sort(run: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    write_report([run], report)
    with Browser(tmp_path) as browser:
        for width in (1280, 390):
            browser.resize(width, 900)
            browser.open(report.as_uri())
            browser.screenshot(tmp_path / f"report-{width}.png")
            assert browser.run("return document.documentElement.scrollWidth") <= width
        asked = browser.run("return performance.getEntriesByType('resource').map((e) => e.name)")
        assert [name for name in asked if not name.startswith("data:")] == []
        browser.run(CLICK)
        up = browser.run(COLUMN)
        browser.run(CLICK)
        down = browser.run(COLUMN)
        assert up != down
        assert sorted(up) == sorted(down)
        assert browser.complaints() == []
