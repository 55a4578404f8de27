"""A visitor of the demo without a browser: real requests over HTTP."""

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import numpy as np

from tcore.demo.engine import Engine
from tcore.demo.limits import Limits
from tcore.demo.server import GUARD, Demo
from tcore.video.formats import run_lengths
from tests.show.browser import wait_for


@contextmanager
def serve(engine: Engine, **limits: Any) -> Iterator[Demo]:
    """The demo on a free port."""
    demo = Demo(engine, Limits(**limits))
    thread = threading.Thread(target=demo.serve)
    thread.start()
    try:
        yield demo
    finally:
        demo.stop()
        thread.join()


class Visitor:
    """Asks as the page does; an error is the sentence that a person would read."""

    def __init__(self, demo: Demo) -> None:
        self.demo = demo
        self.path = f"/api/visit/{self.ask('POST', '/api/visit')['id']}"

    def raw(
        self, method: str, path: str, body: bytes | None = None, **headers: str
    ) -> tuple[int, bytes, http.client.HTTPMessage]:
        connection = http.client.HTTPConnection("127.0.0.1", self.demo.port, timeout=30)
        with closing(connection):
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read(), answer.headers

    def ask(self, method: str, path: str, data: Any = None) -> Any:
        body = data if isinstance(data, bytes) else json.dumps(data or {}).encode()
        posted = (body, {GUARD: "1"}) if method == "POST" else (None, {})
        status, answer, _ = self.raw(method, path, posted[0], **posted[1])
        content = json.loads(answer)
        assert (status == 200) == ("error" not in content or "state" in content), (status, content)
        return content

    def get(self, what: str) -> Any:
        return self.ask("GET", f"{self.path}/{what}")

    def post(self, what: str, data: Any = None) -> Any:
        return self.ask("POST", f"{self.path}/{what}", data)

    def fetch(self, what: str) -> bytes:
        status, body, _ = self.raw("GET", f"{self.path}/{what}")
        assert status == 200, body
        return body

    def start(self, given: dict[int, Any], kind: str = "masks", **more: Any) -> Any:
        labels = {frame: _runs(ids) if kind == "masks" else ids for frame, ids in given.items()}
        return self.post("run", {"kind": kind, "given": labels} | more)

    def run(self, given: dict[int, Any], kind: str = "masks", **more: Any) -> Any:
        """Start a run and wait for its end."""
        started = self.start(given, kind, **more)
        assert "clip" in started, started
        return self.wait()

    def wait(self) -> Any:
        return wait_for(lambda: (state := self.get("state"))["state"] != "running" and state, "the run")

    def masks(self, state: dict[str, Any]) -> np.ndarray:
        size = (state["clip"]["height"], state["clip"]["width"])
        found = [np.frombuffer(self.fetch(f"mask/{i}"), np.uint8) for i in range(state["done"])]
        return np.stack([ids.reshape(size) for ids in found])


def _runs(ids: np.ndarray) -> list[int]:
    return [int(value) for run in zip(*run_lengths(ids), strict=True) for value in run]
