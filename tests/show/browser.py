"""A real browser for tests: headless Chromium, told what to do in the W3C WebDriver protocol."""

import base64
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key of an element, by the standard


def why_no_browser() -> str:
    """What is missing for a browser, or nothing."""
    if not (shutil.which("chromium") or shutil.which("google-chrome")):
        return "no chromium is installed (Debian: apt install chromium)"
    return "" if shutil.which("chromedriver") else "no chromedriver (Debian: apt install chromium-driver)"


class Browser:
    """One window; downloads go to a folder."""

    def __init__(self, downloads: Path, width: int = 1280, height: int = 900) -> None:
        self.downloads = downloads
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._driver = subprocess.Popen(
            ["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._url = f"http://127.0.0.1:{port}"
        # 127.0.0.1 is never behind a proxy.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        flags = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-proxy-server",
            "--hide-scrollbars",
        ]
        options = {
            "args": [*flags, f"--window-size={width},{height}"],
            "binary": shutil.which("chromium") or shutil.which("google-chrome"),
            "prefs": {"download.default_directory": str(downloads)},
        }
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        try:
            wait_for(self._alive, "chromedriver")
            answer = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        except BaseException:
            self._driver.kill()
            self._driver.wait()
            raise
        self._session = f"/session/{answer['sessionId']}"

    def __enter__(self) -> "Browser":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._call("DELETE", self._session)
        finally:
            self._driver.terminate()
            self._driver.wait()

    def open(self, url: str) -> None:
        self._post("url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        return self._post("execute/sync", {"script": script, "args": list(arguments)})

    def click(self, selector: str) -> None:
        self._post(f"element/{self._find(selector)}/click", {})

    def type(self, selector: str, text: str) -> None:
        """Type into an element; into a file input, the path of a file."""
        self._post(f"element/{self._find(selector)}/value", {"text": text})

    def text(self, selector: str) -> str:
        return str(self.run("return document.querySelector(arguments[0]).textContent", selector))

    def drag(self, selector: str, *places: tuple[float, float], release: bool = True) -> None:
        """Press at a place, in shares of an element's width and height, and move on to others."""
        # Places of pointers count from the visible part of the page.
        self.run("document.querySelector(arguments[0]).scrollIntoView({block: 'center'})", selector)
        box = self.run(
            "const b = document.querySelector(arguments[0]).getBoundingClientRect();"
            "return [b.left, b.top, b.width, b.height]",
            selector,
        )
        points = [(round(box[0] + x * box[2]), round(box[1] + y * box[3])) for x, y in places]
        moves = [{"type": "pointerMove", "x": x, "y": y, "duration": 40} for x, y in points]
        steps = [
            moves[0],
            {"type": "pointerDown", "button": 0},
            *moves[1:],
            *([{"type": "pointerUp", "button": 0}] if release else []),
        ]
        mouse = {"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": steps}
        self._post("actions", {"actions": [mouse]})

    def release(self) -> None:
        """Let go of the mouse, where it is."""
        up = [{"type": "pointerUp", "button": 0}]
        mouse = {"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": up}
        self._post("actions", {"actions": [mouse]})

    def keys(self, selector: str, keys: str) -> None:
        self.run("document.querySelector(arguments[0]).focus()", selector)
        steps = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self._post("actions", {"actions": [{"type": "key", "id": "keyboard", "actions": steps}]})

    def resize(self, width: int, height: int) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        command = {"cmd": "Emulation.setDeviceMetricsOverride", "params": metrics}
        self._post("goog/cdp/execute", command)

    def screenshot(self, path: Path, whole: bool = True) -> None:
        """A picture of the page, of all of it where it is longer than the window."""
        command = {"cmd": "Page.captureScreenshot", "params": {"captureBeyondViewport": whole}}
        path.write_bytes(base64.b64decode(self._post("goog/cdp/execute", command)["data"]))

    def complaints(self) -> list[str]:
        """Errors and warnings of the browser's console since the last call."""
        entries = self._post("se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING")]

    def _find(self, selector: str) -> str:
        return str(self._post("element", {"using": "css selector", "value": selector})[ELEMENT])

    def _post(self, what: str, data: dict[str, Any]) -> Any:
        return self._call("POST", f"{self._session}/{what}", data)

    def _alive(self) -> bool:
        try:
            return bool(self._call("GET", "/status")["ready"])
        except OSError:
            return False

    def _call(self, method: str, path: str, data: dict[str, Any] | None = None) -> Any:
        body = None if data is None else json.dumps(data).encode()
        request = urllib.request.Request(
            self._url + path, body, {"Content-Type": "application/json"}, method=method
        )
        try:
            with self._opener.open(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(json.load(error)["value"]["message"]) from None


def wait_for(condition: Callable[[], Any], what: str, seconds: float = 60.0) -> Any:
    """The first true value of a condition; an assertion names it where there is none in time."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"waited {seconds:.0f} s for {what}"
        time.sleep(0.05)
    return found
