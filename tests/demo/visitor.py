"""A visitor of the demo without a browser: real requests over HTTP."""

import http.client
import itertools
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from tcore.demo.engine import Engine
from tcore.demo.server import GUARD, Demo, Limits
from tests.show.browser import wait_for


@contextmanager
def serve(engine: Engine, **limits: int) -> Iterator[Demo]:
    """The demo on a free port."""
    demo = Demo(engine, limits=Limits(**limits))
    thread = threading.Thread(target=demo.serve)
    thread.start()
    try:
        yield demo
    finally:
        demo.stop()
        thread.join()


class Visitor:
    """Asks as the page does; an error is the sentence that a person would read."""

    def __init__(self, demo: Demo, path: str = "") -> None:
        self.demo = demo
        self.path = path or f"/api/visit/{self.ask('POST', '/api/visit')['id']}"

    def raw(
        self, method: str, path: str, body: bytes | None = None, **headers: str
    ) -> tuple[int, bytes, http.client.HTTPMessage]:
        connection = http.client.HTTPConnection("127.0.0.1", self.demo.port, timeout=30)
        try:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body, named)
            answer = connection.getresponse()
            return answer.status, answer.read(), answer.headers
        finally:
            connection.close()

    def ask(self, method: str, path: str, data: Any = None) -> Any:
        body = data if isinstance(data, bytes) else json.dumps(data or {}).encode()
        headers = {GUARD: "1"} if method == "POST" else {}
        status, answer, _ = self.raw(method, path, body if method == "POST" else None, **headers)
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

    def run(
        self, given: dict[int, Any], kind: str = "masks", changed: int = 0, **more: Any
    ) -> dict[str, Any]:
        """Start a run and wait for its end."""
        labels = {frame: runs_of(ids) if kind == "masks" else ids for frame, ids in given.items()}
        started = self.post("run", {"kind": kind, "given": labels, "changed": changed, **more})
        assert "clip" in started, started
        return self.wait()

    def wait(self) -> dict[str, Any]:
        found: dict[str, Any] = wait_for(
            lambda: (state := self.get("state"))["state"] != "running" and state, "the run"
        )
        return found

    def masks(self, state: dict[str, Any]) -> np.ndarray:
        size = (state["clip"]["height"], state["clip"]["width"])
        found = [np.frombuffer(self.fetch(f"mask/{i}"), np.uint8) for i in range(state["done"])]
        return np.stack([ids.reshape(size) for ids in found])


def runs_of(ids: np.ndarray) -> list[int]:
    """[length, id, length, id, ...]."""
    groups = itertools.groupby(ids.ravel().tolist())
    return [value for label, run in groups for value in (len(list(run)), label)]
