"""The backend of Label Studio, asked with requests as Label Studio sends them."""

import base64
import http.client
import io
import json
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tcore.cli.main import main
from tcore.demo.engine import Engine
from tcore.demo.label_studio import TOKEN, LabelStudio
from tcore.demo.limits import Limits
from tcore.errors import InputError
from tcore.video.brush import pack_mask, unpack_mask
from tcore.video.mark import mark
from tcore.video.propagate import propagate
from tests.evaluation.clips import tiny_encoder

FRAMES = np.full((3, 48, 64, 3), 60, np.uint8)
for _index in range(3):
    FRAMES[_index, 12:36, 12 + 8 * _index : 36 + 8 * _index] = (220, 40, 40)
FIRST = FRAMES[0, :, :, 0] > 100
SEQUENCE = '<View><Image name="img" valueList="$frames"/><BrushLabels name="tag" toName="img"/></View>'
SINGLE = SEQUENCE.replace("valueList", "value")


def png(frame: np.ndarray) -> bytes:
    content = io.BytesIO()
    Image.fromarray(frame).save(content, "PNG")
    return content.getvalue()


ADDRESSES = [f"data:image/png;base64,{base64.b64encode(png(frame)).decode()}" for frame in FRAMES]


def brush(mask: np.ndarray, index: int, label: str = "Dog") -> dict[str, Any]:
    return {
        "id": "Zx81",
        "type": "brushlabels",
        "from_name": "tag",
        "to_name": "img",
        "original_width": mask.shape[1],
        "original_height": mask.shape[0],
        "image_rotation": 0,
        "item_index": index,
        "value": {"format": "rle", "rle": pack_mask(mask), "brushlabels": [label]},
    }


@contextmanager
def serving(studio: str = "http://127.0.0.1:1", host: str = "127.0.0.1") -> Iterator[LabelStudio]:
    server = LabelStudio(Engine(tiny_encoder()), Limits(frames=4), studio, host)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join()


@pytest.fixture(scope="module")
def backend() -> Iterator[LabelStudio]:
    with serving() as server:
        yield server


def ask(
    backend: LabelStudio, method: str, path: str, data: Any = None, **headers: str
) -> tuple[int, dict[str, Any]]:
    with closing(http.client.HTTPConnection("127.0.0.1", backend.port, timeout=30)) as connection:
        body = None if data is None else json.dumps(data)
        connection.request(method, path, body, {"Content-Type": "application/json", **headers})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


def predict(
    backend: LabelStudio,
    frames: Any,
    regions: list[dict[str, Any]],
    config: str = SEQUENCE,
    saved: bool = False,
) -> Any:
    """The request of Label Studio for one task, with regions of the annotation being made, or a saved one."""
    task = {"id": 7, "data": {"frames": frames}, "annotations": [{"id": 3, "result": regions}] * saved}
    context = None if saved else {"result": regions}
    data = {
        "tasks": [task],
        "model_version": "",
        "project": "1.1700000000",
        "label_config": config,
        "params": {"login": None, "password": None, "context": context},
    }
    status, answer = ask(backend, "POST", "/predict", data)
    return answer["results"][0]["result"] if status == 200 else answer["error"]


@pytest.mark.parametrize("saved", [False, True])
def test_a_mask_on_one_image_of_a_sequence_is_propagated_to_the_others(
    backend: LabelStudio, saved: bool
) -> None:
    found = predict(backend, ADDRESSES, [brush(FIRST, 0)], saved=saved)
    wanted = list(propagate(tiny_encoder(), FRAMES, FIRST.astype(np.uint8), detail="fine"))
    assert [region["item_index"] for region in found] == [1, 2]  # what a person painted stays theirs
    for region in found:
        assert (region["from_name"], region["to_name"]) == ("tag", "img")
        assert region["value"]["brushlabels"] == ["Dog"]
        size = (region["original_height"], region["original_width"])
        mask = unpack_mask(region["value"]["rle"], size)
        assert (mask == (np.asarray(wanted[region["item_index"]]) == 1)).mean() > 0.999


def test_a_rectangle_or_key_points_on_an_image_become_a_mask(backend: LabelStudio) -> None:
    box = {"type": "rectanglelabels", "value": {"x": 10, "y": 10, "width": 60, "height": 80}}
    box["value"]["rectanglelabels"] = ["Dog"]  # type: ignore[index]
    (region,) = predict(backend, ADDRESSES[0], [box], SINGLE)
    assert "item_index" not in region
    mask = unpack_mask(region["value"]["rle"], (48, 64))
    np.testing.assert_array_equal(mask, mark(FRAMES[0], tiny_encoder(), box=(6.4, 4.8, 38.4, 38.4)))
    points = [
        {"type": "keypointlabels", "is_positive": on, "value": {"x": x, "y": 50, "keypointlabels": ["Dog"]}}
        for on, x in ((1, 37.5), (0, 90))
    ]
    (region,) = predict(backend, ADDRESSES[0], points, SINGLE)
    assert unpack_mask(region["value"]["rle"], (48, 64))[24, 24]


def test_setup_and_health_answer_as_label_studio_expects(backend: LabelStudio) -> None:
    assert ask(backend, "GET", "/health")[1]["status"] == "UP"
    setup = {"project": "1.17", "schema": SEQUENCE, "hostname": "http://x", "access_token": "secret"}
    assert ask(backend, "POST", "/setup", setup) == (200, {"model_version": "tcore tiny"})
    assert ask(backend, "POST", "/webhook", {"action": "ANNOTATION_CREATED"})[0] == 201
    assert ask(backend, "GET", "/versions")[1] == {"versions": ["tcore tiny"]}
    assert predict(backend, ADDRESSES, []) == []  # nothing is marked yet


@pytest.mark.parametrize(
    ("frames", "regions", "config", "said"),
    [
        (ADDRESSES, [], "<View/>", "no brush"),
        (ADDRESSES, [], '<!DOCTYPE x [<!ENTITY a "b">]><View/>', "declarations"),
        (ADDRESSES, [], "<View", "no XML"),
        (5, [], SEQUENCE, "data.frames"),
        (ADDRESSES * 2, [], SEQUENCE, "at most 4"),
        (ADDRESSES, [brush(FIRST, 9)], SEQUENCE, "image 9"),
        (ADDRESSES, [brush(FIRST[:10], 0)], SEQUENCE, "64x10"),
        (ADDRESSES, [brush(FIRST, 0) | {"value": {"rle": [0, 0, 48, 0, 1]}}], SEQUENCE, "damaged"),
        (ADDRESSES, [brush(FIRST, 0) | {"value": {"rle": [255] * 9}}], SEQUENCE, "4 for each"),
        (ADDRESSES, [{"type": "keypointlabels", "value": {"x": "a"}}], SEQUENCE, "cannot be read"),
        (["data:image/png;base64,!!"], [brush(FIRST, 0)], SEQUENCE, "damaged"),
        (["http://169.254.169.254/latest"], [brush(FIRST, 0)], SEQUENCE, "only place that is asked"),
        (["file:///etc/passwd"], [brush(FIRST, 0)], SEQUENCE, "only place that is asked"),
    ],
)
def test_what_cannot_be_answered_is_refused_in_a_sentence(
    backend: LabelStudio, frames: Any, regions: list[Any], config: str, said: str
) -> None:
    assert said in predict(backend, frames, regions, config)


def test_images_are_fetched_from_label_studio_with_its_token(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None]] = []

    class Studio(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append((self.path, self.headers["Authorization"]))
            away = self.path.startswith("/away")
            self.send_response(302 if away else 200)
            if away:
                self.send_header("Location", "http://127.0.0.1:1/")
            self.end_headers()
            self.wfile.write(b"" if away else png(FRAMES[len(asked) - 1]))

        def log_message(self, *_: Any) -> None:
            pass

    monkeypatch.setenv(TOKEN, "abc")
    monkeypatch.setenv("no_proxy", "*")
    with HTTPServer(("127.0.0.1", 0), Studio) as studio:
        threading.Thread(target=studio.serve_forever, daemon=True).start()
        with serving(f"http://127.0.0.1:{studio.server_port}") as backend:
            found = predict(backend, ["/data/upload/1/a.png", "/data/upload/1/b.png"], [brush(FIRST, 0)])
            assert [region["item_index"] for region in found] == [1]
            assert asked == [("/data/upload/1/a.png", "Token abc"), ("/data/upload/1/b.png", "Token abc")]
            assert "annot get image /away" in predict(backend, ["/away"], [brush(FIRST, 0)])
        studio.shutdown()


def test_other_machines_need_the_token_and_pages_are_refused(backend: LabelStudio) -> None:
    assert ask(backend, "GET", "/health", Origin="http://evil.example")[0] == 403
    with serving(host="0.0.0.0") as server:
        assert ask(server, "GET", "/health")[0] == 401
        for password, status in ((server.token, 200), ("guess", 401)):
            secret = base64.b64encode(f"tcore:{password}".encode()).decode()
            assert ask(server, "GET", "/health", Authorization=f"Basic {secret}")[0] == status


def test_an_address_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "random:vitti16", "--label-studio", "localhost"])
    assert "--label-studio localhost: give its address" in capsys.readouterr().err


def test_brush_masks_are_those_of_label_studio() -> None:
    mask = np.random.default_rng(0).random((40, 50)) > 0.9
    mask[10:30, 5:] = True
    packed = pack_mask(mask)
    np.testing.assert_array_equal(unpack_mask(packed, mask.shape), mask)
    with pytest.raises(InputError, match="damaged"):
        unpack_mask(packed[:40], mask.shape)
    brushes = pytest.importorskip(
        "label_studio_sdk.converter.brush", reason="label-studio-sdk is not installed"
    )
    theirs = brushes.decode_rle(packed).reshape(40, 50, 4)[:, :, 3]
    np.testing.assert_array_equal(theirs > 0, mask)
    flat = np.repeat(255 * mask.astype(np.uint8).ravel(), 4)
    np.testing.assert_array_equal(unpack_mask(brushes.encode_rle(flat), mask.shape), mask)
