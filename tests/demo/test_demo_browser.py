"""The demo in a real browser; screenshots land in the folder of each test (pytest --basetemp DIR)."""

import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tcore.data.video import h264_encoder
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


def open_sample(browser: Browser, demo: Demo, key: str = "walker") -> None:
    browser.open(demo.url)
    wait_for(lambda: browser.run("return document.querySelectorAll('[data-sample]').length"), "the samples")
    browser.click(f"[data-sample={key}]")
    wait_for(lambda: browser.text("#estimate").startswith("About"), "the estimate")


def run(browser: Browser) -> None:
    browser.click("#run")
    wait_done(browser)


def wait_done(browser: Browser) -> None:
    wait_for(
        lambda: (
            browser.text("#run-text").startswith("Done")
            and browser.run("return document.querySelector('#cancel').hidden")
        ),
        "the end of the run",
    )


def scrub(browser: Browser, frame: int) -> None:
    browser.run(
        "const s = document.querySelector('#scrub'); s.value = arguments[0];"
        "s.dispatchEvent(new Event('input'))",
        frame,
    )
    wait_for(lambda: browser.text("#frame-text").startswith(f"{frame} /"), f"frame {frame}")


def stage_color(browser: Browser, x: float, y: float) -> list[int]:
    """The color of the stage at a place, in shares of its width and height."""
    found: list[int] = browser.run(
        "const c = document.querySelector('#stage'); return [...c.getContext('2d').getImageData("
        "Math.round(arguments[0] * c.width), Math.round(arguments[1] * c.height), 1, 1).data]",
        x,
        y,
    )
    return found


def downloaded(browser: Browser, name: str) -> bytes:
    file = browser.downloads / name
    browser.click(f"[data-file='{name}']")
    wait_for(lambda: file.is_file() and file.stat().st_size, name)
    return file.read_bytes()


def test_paint_run_inspect_and_download(browser: Browser, demo: Demo, tmp_path: Path) -> None:
    open_sample(browser, demo)
    before = stage_color(browser, 0.25, 0.4)
    browser.drag("#stage", (0.2, 0.35), (0.25, 0.4), (0.3, 0.45))
    assert stage_color(browser, 0.25, 0.4) != before
    browser.click("[data-object='2']")
    browser.click("[data-tool=box]")
    browser.drag("#stage", (0.5, 0.4), (0.75, 0.9))
    browser.screenshot(tmp_path / "1-painted.png")
    run(browser)
    assert f"{FRAMES} frames" in browser.text("#run-text")
    with zipfile.ZipFile(io.BytesIO(downloaded(browser, "masks.zip"))) as archive:
        assert len(archive.namelist()) == FRAMES
        with Image.open(io.BytesIO(archive.read("00000.png"))) as image:
            first = np.asarray(image)
        with Image.open(io.BytesIO(archive.read(f"{FRAMES - 1:05d}.png"))) as image:
            last = np.asarray(image)
    # What was painted is what the first mask holds, and it was propagated to the last.
    assert first[round(0.4 * 256), round(0.25 * 256)] == 1
    assert (first[105:225, 131:190] == 2).all()
    assert first[10, 10] == 0
    assert set(np.unique(last)) & {1, 2}
    assert downloaded(browser, "tracks.csv").startswith(b"frame,object,x,y")
    assert b'"annotations"' in downloaded(browser, "coco.json")
    if h264_encoder() is not None:
        assert b"ftyp" in downloaded(browser, "overlay.mp4")[:16]

    scrub(browser, 8)
    browser.click("[data-tool=inspect]")
    browser.drag("#stage", (0.6, 0.5))
    wait_for(
        lambda: browser.run("return document.querySelectorAll('#matches figure').length == 2"), "matches"
    )
    assert 0 < browser.run("return document.querySelectorAll('#sources li').length") <= 7
    assert "its label is mixed from" in browser.text("#inspect-text")
    browser.screenshot(tmp_path / "2-inspected-1280.png")
    browser.click("#sources li:last-child button")
    wait_for(lambda: not browser.text("#frame-text").startswith("8 /"), "the frame of the source")
    browser.resize(390, 844)
    browser.screenshot(tmp_path / "3-inspected-390.png")
    asked = browser.run("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert asked
    assert all(name.startswith((demo.url, f"blob:{demo.url}")) for name in asked)


def test_a_file_that_is_not_a_video_is_refused_in_a_sentence(
    browser: Browser, demo: Demo, tmp_path: Path
) -> None:
    open_sample(browser, demo)
    file = tmp_path / "notes.mp4"
    file.write_text("no video")
    browser.type("#file", str(file))
    wait_for(lambda: not browser.run("return document.querySelector('#alert').hidden"), "the message")
    assert "not a video" in browser.text("#alert")
    browser.screenshot(tmp_path / "refused.png")
    assert "Walker" not in browser.text("#alert")
    browser.click("#alert button")
    assert browser.run("return document.querySelector('#alert').hidden")


def test_an_uploaded_video_is_propagated(browser: Browser, demo: Demo, tmp_path: Path) -> None:
    need_av()
    frames = np.full((6, 120, 200, 3), 60, np.uint8)
    for index in range(6):
        frames[index, 40:80, 30 + 10 * index : 80 + 10 * index] = (220, 40, 40)
    file = write_file(tmp_path / "mine.mp4", frames)
    browser.open(demo.url)
    wait_for(lambda: browser.run("return document.querySelectorAll('[data-sample]').length"), "the samples")
    browser.type("#file", str(file))
    wait_for(lambda: browser.text("#estimate").startswith("About"), "the estimate")
    assert "6 frames of 200 × 120" in browser.text("#clip-text")
    browser.click("[data-tool=box]")
    browser.drag("#stage", (0.16, 0.34), (0.39, 0.65))
    run(browser)
    with zipfile.ZipFile(io.BytesIO(downloaded(browser, "masks.zip"))) as archive:
        assert len(archive.namelist()) == 6


def test_a_run_can_be_canceled(browser: Browser, tmp_path: Path) -> None:
    with serve(Engine(tiny_encoder()), frames=30) as server:
        open_sample(browser, server)
        browser.click("#truth")
        wait_for(lambda: not browser.run("return document.querySelector('#run').disabled"), "the true labels")
        browser.click("#run")
        wait_for(lambda: browser.run("return !document.querySelector('#cancel').hidden"), "the button")
        browser.click("#cancel")
        wait_for(lambda: browser.text("#run-text").startswith("Canceled"), "the end")
        browser.screenshot(tmp_path / "canceled.png")
        assert browser.run("return document.querySelector('#run').disabled") is False
        browser.open("about:blank")


def test_a_corrected_frame_is_run_again_from_there(browser: Browser, demo: Demo, tmp_path: Path) -> None:
    open_sample(browser, demo)
    browser.click("#truth")
    run(browser)
    scrub(browser, 5)
    browser.click("[data-object='3']")
    browser.drag("#stage", (0.7, 0.1), (0.9, 0.1))
    assert browser.text("#run") == "Run again from frame 5"
    browser.screenshot(tmp_path / "corrected.png")
    run(browser)
    masks = zipfile.ZipFile(io.BytesIO(downloaded(browser, "masks.zip")))
    with masks, Image.open(io.BytesIO(masks.read("00005.png"))) as image:
        assert np.asarray(image)[26, 205] == 3
    scrub(browser, 5)
    browser.click("#undo")
    assert browser.text("#run") == "Run again from frame 0"
    # A reload finds the clip, what was propagated, and what was marked.
    browser.open(demo.url)
    wait_for(lambda: browser.text("#estimate").startswith("About"), "the clip of before")
    assert browser.run("return document.querySelector('[data-file=\"masks.zip\"]').disabled") is False


def test_a_run_is_one_from_the_click_on(browser: Browser, demo: Demo) -> None:
    open_sample(browser, demo)
    browser.click("#truth")
    run(browser)
    done, waits, starts = browser.run(
        "const [run, file] = ['#run', '[data-file=\"masks.zip\"]'].map((s) => document.querySelector(s));"
        "let starts = 0; const ask = window.fetch;"
        "window.fetch = (where, ...rest) => "
        "{ starts += String(where).endsWith('/run'); return ask(where, ...rest); };"
        "run.click(); run.click(); file.click();"
        "return [document.querySelector('#run-text').textContent, file.disabled && run.disabled, starts]"
    )
    assert (done, waits, starts) == ("Starting …", True, 1)
    wait_done(browser)


def test_keypoints_are_clicked_and_dragged(browser: Browser, demo: Demo, tmp_path: Path) -> None:
    open_sample(browser, demo)
    browser.click("input[value=points]")
    browser.drag("#stage", (0.3, 0.3))
    browser.drag("#stage", (0.6, 0.5))
    browser.drag("#stage", (0.6, 0.5), (0.7, 0.5))
    assert browser.run("return document.querySelectorAll('[data-object]').length") == 2
    run(browser)
    browser.screenshot(tmp_path / "points.png")
    rows = downloaded(browser, "tracks.csv").decode().splitlines()
    assert len(rows) == 1 + 2 * FRAMES
    assert float(rows[2].split(",")[2]) == pytest.approx(0.7 * 256, abs=2)


def test_everything_works_from_the_keyboard(browser: Browser, demo: Demo, tmp_path: Path) -> None:
    left, right, down = "\ue012", "\ue014", "\ue015"
    open_sample(browser, demo)
    browser.keys("#stage", "r" + left + " " + right * 8 + down * 8 + " ")
    browser.screenshot(tmp_path / "keyboard.png")
    browser.keys("#run", "\ue007")
    wait_done(browser)
    browser.keys("#stage", "..i ")
    wait_for(lambda: browser.text("#inspect-text").startswith("Frame 2,"), "the answer")
    masks = zipfile.ZipFile(io.BytesIO(downloaded(browser, "masks.zip")))
    with masks, Image.open(io.BytesIO(masks.read("00000.png"))) as image:
        assert (np.asarray(image) > 0).sum() == 33 * 33
    unnamed = browser.run(
        "return [...document.querySelectorAll('button, input, canvas, progress')].filter((e) => "
        "!(e.textContent.trim() || e.getAttribute('aria-label') || e.getAttribute('aria-hidden') "
        "|| e.labels?.length)).map((e) => e.outerHTML)"
    )
    assert unnamed == []


@pytest.mark.parametrize(("width", "height"), [(390, 844), (1280, 900)])
def test_nothing_sticks_out_at_any_width(
    browser: Browser, demo: Demo, tmp_path: Path, width: int, height: int
) -> None:
    browser.resize(width, height)
    open_sample(browser, demo, "crossing")
    assert browser.run("return document.documentElement.scrollWidth") <= width
    browser.screenshot(tmp_path / f"width-{width}.png")
