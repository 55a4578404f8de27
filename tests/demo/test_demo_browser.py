"""The demo in a real browser; screenshots land in the folder of each test (pytest --basetemp DIR)."""

import io
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tcore.demo.engine import Engine
from tcore.demo.server import Demo
from tests.demo.visitor import serve
from tests.evaluation.clips import need_av, tiny_encoder, write_file
from tests.show.browser import Browser, wait_for, why_no_browser

pytestmark = [pytest.mark.long, pytest.mark.skipif(bool(why_no_browser()), reason=why_no_browser())]
FRAMES = 12


@pytest.fixture(scope="module")
def demo() -> Iterator[Demo]:
    with serve(Engine(tiny_encoder()), frames=FRAMES) as server:
        yield server


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with Browser(tmp_path) as window:
        window.resize(1280, 900)
        yield window
        # Refusals are answered with status 400; reading colors back is what only these tests do.
        expected = ("status of 400", "getImageData")
        assert not [line for line in window.complaints() if not any(word in line for word in expected)]


def ask(browser: Browser, selector: str, what: str) -> Any:
    """A property of an element."""
    return browser.run(f"return document.querySelector(arguments[0]).{what}", selector)


def count(browser: Browser, selector: str) -> int:
    return int(browser.run("return document.querySelectorAll(arguments[0]).length", selector))


def open_page(browser: Browser, demo: Demo) -> None:
    browser.open(demo.url)
    wait_for(lambda: count(browser, "[data-sample]"), "the samples")


def wait_ready(browser: Browser) -> None:
    wait_for(lambda: browser.text("#estimate").startswith("About"), "the estimate")


def open_sample(browser: Browser, demo: Demo) -> None:
    open_page(browser, demo)
    browser.click("[data-sample=walker]")
    wait_ready(browser)


def wait_done(browser: Browser, word: str = "Done") -> None:
    wait_for(lambda: browser.text("#run-text").startswith(word) and ask(browser, "#cancel", "hidden"), word)


def run(browser: Browser) -> None:
    browser.click("#run")
    wait_done(browser)


def scrub(browser: Browser, frame: int) -> None:
    event = "dispatchEvent(new Event('input'))"
    browser.run(f"const s = document.querySelector('#scrub'); s.value = {frame}; s.{event}")
    wait_for(lambda: browser.text("#frame-text").startswith(f"{frame} /"), f"frame {frame}")


def stage_color(browser: Browser, x: int, y: int) -> list[int]:
    """The color of the stage at a pixel of the clip."""
    pixel = f"getContext('2d').getImageData({x} * c.width / 256, {y} * c.height / 256, 1, 1).data"
    return list(browser.run(f"const c = document.querySelector('#stage'); return [...c.{pixel}]"))


def downloaded(browser: Browser, name: str) -> bytes:
    file = browser.downloads / name
    browser.click(f"[data-file='{name}']")
    wait_for(lambda: file.is_file() and file.stat().st_size, name)
    return file.read_bytes()


def downloaded_masks(browser: Browser) -> list[np.ndarray]:
    with zipfile.ZipFile(io.BytesIO(downloaded(browser, "masks.zip"))) as archive:
        return [np.asarray(Image.open(io.BytesIO(archive.read(name)))) for name in archive.namelist()]


def test_paint_run_inspect_and_download(browser: Browser, demo: Demo, tmp_path: Path) -> None:
    open_sample(browser, demo)
    before = stage_color(browser, 64, 102)
    browser.drag("#stage", (0.2, 0.35), (0.25, 0.4), (0.3, 0.45))
    assert stage_color(browser, 64, 102) != before
    browser.click("[data-object='2']")
    browser.click("[data-tool=box]")
    browser.drag("#stage", (0.5, 0.4), (0.75, 0.9))
    browser.screenshot(tmp_path / "1-painted.png")
    run(browser)
    assert f"{FRAMES} frames" in browser.text("#run-text")
    first, *_, last = masks = downloaded_masks(browser)
    assert len(masks) == FRAMES
    # What was painted is what the first mask holds, and it was propagated to the last.
    assert (first[102, 64], first[10, 10]) == (1, 0)
    assert (first[105:225, 131:190] == 2).all()
    assert set(np.unique(last)) & {1, 2}
    assert downloaded(browser, "tracks.csv").startswith(b"frame,object,x,y")
    assert b'"annotations"' in downloaded(browser, "coco.json")
    scrub(browser, 8)
    browser.click("[data-tool=inspect]")
    browser.drag("#stage", (0.6, 0.5))
    wait_for(lambda: count(browser, "#matches figure") == 2, "matches")
    assert 0 < count(browser, "#sources li") <= 7
    assert "its label is mixed from" in browser.text("#inspect-text")
    browser.click("#sources li:last-child button")
    wait_for(lambda: not browser.text("#frame-text").startswith("8 /"), "the frame of the source")
    for width, height in ((1280, 900), (390, 844)):
        browser.resize(width, height)
        assert ask(browser, "html", "scrollWidth") <= width  # nothing sticks out
        browser.screenshot(tmp_path / f"2-inspected-{width}.png")
    asked = browser.run("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert asked
    assert all(name.startswith((demo.url, f"blob:{demo.url}")) for name in asked)


def test_an_uploaded_video_is_propagated_and_other_files_are_refused(
    browser: Browser, demo: Demo, tmp_path: Path
) -> None:
    need_av()
    open_page(browser, demo)
    file = tmp_path / "notes.mp4"
    file.write_text("no video")
    browser.type("#file", str(file))
    wait_for(lambda: not ask(browser, "#alert", "hidden"), "the message")
    assert "not a video" in browser.text("#alert")
    browser.click("#alert button")
    assert ask(browser, "#alert", "hidden")
    frames = np.full((6, 120, 200, 3), 60, np.uint8)
    for index in range(6):
        frames[index, 40:80, 30 + 10 * index : 80 + 10 * index] = (220, 40, 40)
    browser.type("#file", str(write_file(tmp_path / "mine.mp4", frames)))
    wait_ready(browser)
    assert "6 frames of 200 × 120" in browser.text("#clip-text")
    browser.click("[data-tool=box]")
    browser.drag("#stage", (0.16, 0.34), (0.39, 0.65))
    run(browser)
    assert len(downloaded_masks(browser)) == 6


def test_a_run_can_be_canceled(browser: Browser) -> None:
    with serve(Engine(tiny_encoder()), frames=30) as server:
        open_sample(browser, server)
        browser.click("#truth")
        wait_for(lambda: not ask(browser, "#run", "disabled"), "the true labels")
        browser.click("#run")
        wait_for(lambda: not ask(browser, "#cancel", "hidden"), "the button")
        browser.click("#cancel")
        wait_done(browser, "Canceled")
        assert ask(browser, "#run", "disabled") is False
        browser.open("about:blank")


def test_a_corrected_frame_is_run_again_from_the_marked_one_before(browser: Browser, demo: Demo) -> None:
    open_sample(browser, demo)
    browser.click("#truth")
    run(browser)
    said, waits, starts = browser.run(  # a run is one from the click on
        "const [run, file] = ['#run', '[data-file=\"masks.zip\"]'].map((s) => document.querySelector(s));"
        "let starts = 0; const ask = window.fetch;"
        "window.fetch = (where, ...rest) => "
        "{ starts += String(where).endsWith('/run'); return ask(where, ...rest); };"
        "run.click(); run.click(); file.click();"
        "return [document.querySelector('#run-text').textContent, file.disabled && run.disabled, starts]"
    )
    assert (said, waits, starts) == ("Starting …", True, 1)
    wait_done(browser)
    scrub(browser, 5)
    browser.click("[data-object='3']")
    browser.drag("#stage", (0.7, 0.1), (0.9, 0.1))
    assert browser.text("#run") == "Run again from frame 0"
    run(browser)
    assert downloaded_masks(browser)[5][26, 205] == 3
    scrub(browser, 5)
    browser.click("#undo")
    assert browser.text("#run") == "Run again from frame 0"
    # A reload finds the clip, what was propagated, and what was marked.
    browser.open(demo.url)
    wait_ready(browser)
    assert ask(browser, "[data-file='masks.zip']", "disabled") is False


def test_keypoints_are_clicked_and_dragged(browser: Browser, demo: Demo) -> None:
    open_sample(browser, demo)
    browser.click("input[value=points]")
    browser.drag("#stage", (0.3, 0.3))
    browser.drag("#stage", (0.6, 0.5))
    browser.drag("#stage", (0.6, 0.5), (0.7, 0.5))
    assert count(browser, "[data-object]") == 2
    run(browser)
    rows = downloaded(browser, "tracks.csv").decode().splitlines()
    assert len(rows) == 1 + 2 * FRAMES
    assert float(rows[2].split(",")[2]) == pytest.approx(0.7 * 256, abs=2)


def test_everything_works_from_the_keyboard(browser: Browser, demo: Demo) -> None:
    left, right, down = "\ue012", "\ue014", "\ue015"
    open_sample(browser, demo)
    browser.keys("#stage", "r" + left + " " + right * 8 + down * 8 + " ")
    browser.keys("#run", "\ue007")
    wait_done(browser)
    browser.keys("#stage", "..i ")
    wait_for(lambda: browser.text("#inspect-text").startswith("Frame 2,"), "the answer")
    assert (downloaded_masks(browser)[0] > 0).sum() == 33 * 33
    unnamed = browser.run(
        "return [...document.querySelectorAll('button, input, canvas, progress')].filter((e) => "
        "!(e.textContent.trim() || e.getAttribute('aria-label') || e.getAttribute('aria-hidden') "
        "|| e.labels?.length)).map((e) => e.outerHTML)"
    )
    assert unnamed == []
