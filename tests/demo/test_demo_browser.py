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
    browser.click("[data-tool=brush]")
    browser.drag("#stage", (0.2, 0.35), (0.25, 0.4), (0.3, 0.45))
    assert stage_color(browser, 64, 102) != before
    browser.click("[data-object='2']")
    browser.click("[data-tool=rectangle]")
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
    with zipfile.ZipFile(io.BytesIO(downloaded(browser, "coco.zip"))) as frames:
        assert frames.namelist()[0] == "00000.jpg"
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


def red_square(folder: Path, height: int, width: int, side: int) -> Path:
    """A video of a red square on gray that moves to the right, its first corner at a quarter of the frame."""
    frames = np.full((6, height, width, 3), 60, np.uint8)
    top, left = height // 4, width // 4
    for index in range(6):
        frames[index, top : top + side, left + 4 * index : left + 4 * index + side] = (220, 40, 40)
    return write_file(folder / f"{width}x{height}.mp4", frames)


def upload(browser: Browser, file: Path) -> None:
    browser.type("#file", str(file))
    wait_for(lambda: browser.text("#clip-text").startswith("Your video"), "the video")
    wait_ready(browser)


def shown_color(browser: Browser, x: float, y: float) -> list[int]:
    """The color of the stage at shares of its width and height."""
    script = "const c = document.querySelector('#stage'); return [...c.getContext('2d').getImageData("
    script += "arguments[0] * c.width, arguments[1] * c.height, 1, 1).data]"
    return list(browser.run(script, x, y))


@pytest.mark.parametrize("window", [(1280, 900), (390, 844)])
@pytest.mark.parametrize("size", [(120, 200), (256, 144)])
def test_frame_timeline_and_run_fit_the_window(
    browser: Browser, demo: Demo, tmp_path: Path, window: tuple[int, int], size: tuple[int, int]
) -> None:
    browser.resize(*window)
    open_page(browser, demo)
    upload(browser, red_square(tmp_path, *size, 40))
    for selector in ("#stage", "#thumbs", "#scrub", "#timeline", "#play", "#run", "#tools [data-tool=box]"):
        box = browser.run(
            "const b = document.querySelector(arguments[0]).getBoundingClientRect();"
            "return [b.left, b.top, b.right, b.bottom]",
            selector,
        )
        assert min(box[:2]) >= 0, selector
        assert (box[2], box[3]) <= window, selector
        assert box[3] <= window[1], selector
    shape = (ask(browser, "#stage", "clientHeight"), ask(browser, "#stage", "clientWidth"))
    assert max(shape) > 300
    assert shape[0] / shape[1] == pytest.approx(size[0] / size[1], rel=0.02)
    assert browser.run("return [scrollX, scrollY]") == [0, 0]
    assert ask(browser, "html", "scrollWidth") <= window[0]
    browser.screenshot(tmp_path / "fits.png", whole=False)


def test_boxes_clicks_and_scribbles_become_the_object_as_they_are_drawn(
    browser: Browser, demo: Demo, tmp_path: Path
) -> None:
    open_page(browser, demo)
    upload(browser, red_square(tmp_path, 128, 256, 64))  # 1/4 to 1/2 of the width, 1/4 to 3/4 of the height
    plain = shown_color(browser, 0.37, 0.5)

    def marked(x: float = 0.37, y: float = 0.5) -> bool:
        return shown_color(browser, x, y) != (plain if (x, y) == (0.37, 0.5) else background)

    background = shown_color(browser, 0.6, 0.5)
    assert ask(browser, "[data-tool=box]", "ariaPressed") == "true"
    browser.drag("#stage", (0.2, 0.15), (0.4, 0.5), (0.56, 0.85), release=False)
    wait_for(marked, "the object, before the button is released")
    browser.release()
    wait_for(lambda: not browser.text("#hint").startswith("Finding"), "the answer")
    assert marked()
    assert not marked(0.6, 0.5)  # not the box, but what is in it
    browser.screenshot(tmp_path / "box.png", whole=False)
    browser.click("#undo")
    assert not marked()
    browser.click("[data-tool=click]")
    browser.drag("#stage", (0.37, 0.5))
    wait_for(marked, "the object at a click")
    browser.click("[data-tool=not]")
    browser.drag("#stage", (0.6, 0.5))
    wait_for(lambda: not browser.text("#hint").startswith("Finding"), "the answer")
    assert marked()
    browser.click("#undo")
    browser.click("#undo")
    assert not marked()
    browser.click("[data-tool=scribble]")
    browser.drag("#stage", (0.3, 0.4), (0.4, 0.6))
    wait_for(marked, "the object under a scribble")
    wait_for(lambda: not browser.text("#hint").startswith("Finding"), "the answer")
    run(browser)
    masks = downloaded_masks(browser)
    assert masks[0][64, 96] == 1
    assert masks[0][5, 5] == 0


def test_marks_land_where_they_are_made_in_an_enlarged_frame(browser: Browser, demo: Demo) -> None:
    open_sample(browser, demo)
    browser.click("[data-tool=brush]")
    for _ in range(4):
        browser.click("#zoom-in")
    assert browser.text("#zoom-fit") == "506 %"
    corner = stage_color(browser, 8, 8)
    browser.click("[data-tool=move]")
    browser.drag("#stage", (0.1, 0.1), (0.95, 0.95), (0.1, 0.1), (0.95, 0.95))
    browser.drag("#stage", (0.1, 0.1), (0.95, 0.95))
    browser.drag("#stage", (0.1, 0.1), (0.95, 0.95))
    assert stage_color(browser, 8, 8) != corner  # the corner at the top left of the frame is shown
    browser.click("[data-tool=brush]")
    browser.drag("#stage", (0.8, 0.8))
    browser.keys("#stage", "0")
    assert browser.text("#zoom-fit") == "100 %"
    run(browser)
    rows, columns = np.nonzero(downloaded_masks(browser)[0])
    assert (rows.mean(), columns.mean()) == pytest.approx((0.8 * 256 / 5.06, 0.8 * 256 / 5.06), abs=1.5)


def test_a_real_sample_has_thumbnails_and_plays_when_done(
    browser: Browser, demo: Demo, tmp_path: Path
) -> None:
    need_av()
    open_page(browser, demo)
    browser.click("[data-sample=dog]")
    wait_for(lambda: ask(browser, "#thumbs", "dataset.shown"), "thumbnails")
    wait_ready(browser)
    assert "640 × 360" in browser.text("#clip-text")
    browser.drag("#thumbs", (0.97, 0.5))
    wait_for(lambda: browser.text("#frame-text").startswith(f"{FRAMES - 1} /"), "the last frame")
    browser.drag("#thumbs", (0.02, 0.5))
    browser.click("[data-tool=rectangle]")
    browser.drag("#stage", (0.35, 0.5), (0.55, 0.75))
    run(browser)
    wait_for(lambda: browser.text("#play") == "Pause", "playing")
    before = browser.text("#frame-text")
    wait_for(lambda: browser.text("#frame-text") != before, "another frame")
    browser.screenshot(tmp_path / "dog.png", whole=False)
    browser.click("#play")
    assert browser.text("#play") == "Play"


def test_the_grid_is_coarse_or_fine(browser: Browser, demo: Demo) -> None:
    open_sample(browser, demo)
    assert "a grid of 32 × 32 patches" in browser.text("#clip-text")
    browser.click("#truth")
    run(browser)
    browser.click("input[value=coarse]")
    wait_for(lambda: "a grid of 16 × 16 patches" in browser.text("#clip-text"), "the coarse grid")
    wait_ready(browser)
    assert ask(browser, "[data-file='masks.zip']", "disabled")
    run(browser)
    assert len(downloaded_masks(browser)) == FRAMES


def test_lost_objects_and_points_are_shown_and_the_frame_to_correct_is_proposed(
    browser: Browser, demo: Demo, tmp_path: Path
) -> None:
    open_sample(browser, demo)
    browser.click("[data-tool=rectangle]")
    browser.drag("#stage", (0.4, 0.4), (0.9, 0.9))
    browser.click("[data-object='2']")
    browser.run("const s = document.querySelector('#size'); s.value = 3; s.dispatchEvent(new Event('input'))")
    browser.click("[data-tool=brush]")
    browser.drag("#stage", (0.03, 0.03))  # far smaller than a patch
    run(browser)
    assert "Lost: object 2 at frame 1" in browser.text("#run-text")
    assert ask(browser, "#timeline", "dataset.lost") == "2"
    browser.click("#suggest")
    wait_for(lambda: browser.text("#frame-text").startswith("1 /"), "the frame that is proposed")
    assert ask(browser, "#stage", "ariaLabel") == "Frame 1; lost: object 2"
    assert ask(browser, "[data-object='2']", "className") == "lost"
    browser.screenshot(tmp_path / "lost.png", whole=False)
    # What was run for objects is not what points will be.
    assert ask(browser, "[data-file='coco.json']", "disabled") is False
    browser.click("input[value=points]")
    assert browser.run("return [...document.querySelectorAll('[data-file]')].every((b) => b.disabled)")
    scrub(browser, 0)
    browser.drag("#stage", (0.3, 0.3))
    browser.drag("#stage", (0.6, 0.5))
    run(browser)
    scrub(browser, 4)
    browser.click("[data-tool=eraser]")
    x, y = browser.run(
        "return fetch(`/api/visit/${sessionStorage.visit}/state`).then((a) => a.json())"
        ".then((s) => s.points[4][1].slice(0, 2))"
    )
    browser.drag("#stage", ((x + 0.5) / 256, (y + 0.5) / 256))
    run(browser)
    scrub(browser, 6)
    wait_for(lambda: ask(browser, "#stage", "ariaLabel") == "Frame 6; lost: point 2", "the lost point")
    browser.screenshot(tmp_path / "lost-point.png", whole=False)


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
    browser.click("[data-tool=rectangle]")
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
    browser.click("[data-tool=brush]")
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
    scrub(browser, 0)
    browser.keys("#stage", "..i ")
    wait_for(lambda: browser.text("#inspect-text").startswith("Frame 2,"), "the answer")
    assert (downloaded_masks(browser)[0] > 0).sum() == 33 * 33
    unnamed = browser.run(
        "return [...document.querySelectorAll('button, input, canvas, progress')].filter((e) => "
        "!(e.textContent.trim() || e.getAttribute('aria-label') || e.getAttribute('aria-hidden') "
        "|| e.labels?.length)).map((e) => e.outerHTML)"
    )
    assert unnamed == []
