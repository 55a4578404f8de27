import csv
import io
import json
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
import zipfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tcore.cli.main import main
from tcore.config import save_config
from tcore.data.rendered import RenderedVideo, render_video
from tcore.data.video import open_video
from tcore.demo.clips import SAMPLES
from tcore.demo.engine import CELLS, Engine, load_engine
from tcore.demo.server import GUARD, PAGE, Demo
from tcore.evaluation.propagate import label_sources
from tcore.evaluation.run_clip import run_clip
from tcore.methods import build
from tcore.training.checkpoint import export
from tcore.video.labels import Masks
from tcore.video.propagate_video import propagate
from tcore.video.tracked import TrackedMasks
from tests.demo.visitor import Visitor, runs_of, serve
from tests.evaluation.clips import cut, need_av, tiny_encoder, write_file
from tests.tiny import tiny

FRAMES = 4
PLAYLIST = b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n"


@pytest.fixture(scope="module")
def demo() -> Iterator[Demo]:
    with serve(Engine(tiny_encoder()), frames=FRAMES, upload_mb=1) as server:
        yield server


@pytest.fixture
def visitor(demo: Demo) -> Visitor:
    visitor = Visitor(demo)
    visitor.post("sample", {"sample": "walker"})
    return visitor


@lru_cache
def rendered(key: str) -> RenderedVideo:
    sample = SAMPLES[key]
    return render_video(sample.seed, sample.video, split="heldout", num_frames=FRAMES, size=256)


def truth_of(key: str) -> np.ndarray:
    return rendered(key).objects[0]


def expected_masks(key: str) -> np.ndarray:
    encoder = tiny_encoder()
    protocol = Engine(encoder).protocol((256, 256))
    found = propagate(encoder, rendered(key).frames, truth_of(key), protocol=protocol, long_side=8 * CELLS)
    return np.stack(list(found))


def assert_same(found: np.ndarray, expected: np.ndarray) -> None:
    """Equal except for ties: features that were kept on disk are summed in another order."""
    assert found.shape == expected.shape
    assert (found == expected).mean() > 0.9995


def test_the_page_names_no_other_site_and_leaves_nothing_behind() -> None:
    with serve(Engine(tiny_encoder())) as server:
        visitor = Visitor(server)
        status, page, headers = visitor.raw("GET", "/")
        assert status == 200
        assert headers["Content-Type"].startswith("text/html")
        assert "default-src 'self'" in headers["Content-Security-Policy"]
        linked = {name.decode() for name in re.findall(rb'(?:src|href)="([a-z.]+)"', page)}
        assert {"app.js", "style.css", "icon.svg"} <= linked
        for file in (path.name for path in PAGE.iterdir()):
            status, body, _ = visitor.raw("GET", f"/{file}")
            assert status == 200
            assert not set(re.findall(rb"https?://[a-z0-9.]+", body)) - {b"http://www.w3.org"}, file
        assert visitor.ask("GET", "/api/info")["encoder"]["name"] == "tiny"
        assert server.folder.is_dir()
    assert not server.folder.exists()


def test_masks_are_those_of_the_library_and_downloads_hold_every_frame(visitor: Visitor) -> None:
    assert "nothing to download" in visitor.get("download/masks.zip")["error"]
    state = visitor.run({0: truth_of("walker")})
    assert (state["state"], state["done"], state["kind"]) == ("done", FRAMES, "masks")
    assert all(0 < value <= 1 for value in state["confidence"])
    masks = visitor.masks(state)
    assert_same(masks, expected_masks("walker"))
    with zipfile.ZipFile(io.BytesIO(visitor.fetch("download/masks.zip"))) as archive:
        assert archive.namelist() == [f"{index:05d}.png" for index in range(FRAMES)]
        for index, name in enumerate(archive.namelist()):
            with Image.open(io.BytesIO(archive.read(name))) as image:
                assert image.mode == "P"
                np.testing.assert_array_equal(np.asarray(image), masks[index])
    coco = json.loads(visitor.fetch("download/coco.json"))
    assert len(coco["images"]) == FRAMES
    for annotation in coco["annotations"]:
        counts = annotation["segmentation"]["counts"]
        values = np.repeat(np.arange(len(counts)) % 2, counts).reshape(256, 256).T  # down the columns
        truth = masks[annotation["image_id"] - 1] == annotation["category_id"]
        np.testing.assert_array_equal(values.astype(bool), truth)
        assert annotation["area"] == truth.sum()
        left, top, width, height = annotation["bbox"]
        assert truth[top : top + height, left : left + width].sum() == truth.sum()
    rows = list(csv.DictReader(io.StringIO(visitor.fetch("download/tracks.csv").decode())))
    assert len(rows) == len(coco["annotations"])


def test_the_overlay_is_a_video_of_all_frames(visitor: Visitor, tmp_path: Path) -> None:
    need_av()
    visitor.run({0: truth_of("walker")})
    (tmp_path / "overlay.mp4").write_bytes(visitor.fetch("download/overlay.mp4"))
    frames = list(open_video(tmp_path / "overlay.mp4"))
    assert len(frames) == FRAMES
    assert np.abs(frames[0].astype(int) - rendered("walker").frames[0]).mean() > 10  # painted over


def test_the_true_labels_of_a_sample_are_those_of_the_renderer(visitor: Visitor) -> None:
    truth = visitor.get("truth")
    runs = np.array(truth["runs"]).reshape(-1, 2)
    np.testing.assert_array_equal(np.repeat(runs[:, 1], runs[:, 0]).reshape(256, 256), truth_of("walker"))
    assert 3 < len(truth["points"]) <= 13


def test_a_corrected_frame_restarts_the_run_and_earlier_frames_stay(visitor: Visitor) -> None:
    first = truth_of("walker")
    before = visitor.masks(visitor.run({0: first}))
    corrected = np.zeros_like(first)
    corrected[40:120, 60:140] = 2
    state = visitor.run({0: first, 2: corrected}, changed=2)
    assert state["start"] == 2
    found = visitor.masks(state)
    np.testing.assert_array_equal(found[:2], before[:2])
    np.testing.assert_array_equal(found[2], corrected)
    encoder = tiny_encoder()
    protocol = Engine(encoder).protocol((256, 256))
    track = TrackedMasks(Masks({0: first, 2: corrected}), (256, 256), (256, 256), 8, protocol)
    labeled = list(run_clip(encoder, rendered("walker").frames, track.given, (256, 256), protocol))
    assert_same(found[3], track.read(3, labeled[3][1]).values)


def test_points_are_propagated_and_written(visitor: Visitor) -> None:
    state = visitor.run({0: [[100.0, 90.5], None, [30, 200]]}, "points", names=["head", "hidden", "foot"])
    assert state["points"][0][:2] == [[100.0, 90.5, 1.0], None]
    assert state["points"][FRAMES - 1][0] is not None
    rows = list(csv.DictReader(io.StringIO(visitor.fetch("download/tracks.csv").decode())))
    assert len(rows) == 3 * FRAMES
    assert (rows[0]["name"], float(rows[0]["x"]), float(rows[0]["y"])) == ("head", 100.0, 90.5)
    assert rows[1]["x"] == ""
    coco = json.loads(visitor.fetch("download/coco.json"))
    assert coco["categories"][0]["keypoints"] == ["head", "hidden", "foot"]
    assert coco["annotations"][0]["keypoints"] == [100.0, 90.5, 2, 0, 0, 0, 30.0, 200.0, 2]
    assert coco["annotations"][0]["bbox"] == [30.0, 90.5, 70.0, 109.5]
    assert "tracks" in visitor.get("download/masks.zip")["error"]


def test_a_patch_says_where_its_label_came_from(visitor: Visitor) -> None:
    before = visitor.get("inspect?frame=3&row=9&column=14&offset=2")
    assert (before["labeled"], before["sources"]) == (False, [])
    masks = visitor.masks(visitor.run({0: truth_of("walker")}))
    engine = Engine(tiny_encoder())
    features = [engine.encode(frame, (256, 256)) for frame in rendered("walker").frames]
    propagator = engine.protocol((256, 256)).propagator()
    found_rows = label_sources(features, [(row, 14) for row in range(32)], propagator)
    # A patch whose label comes from many places: where frame 0 is the best, its copies fill them all.
    row = max(range(32), key=lambda row: len(found_rows[row]))
    expected = found_rows[row]
    assert len({source.frame for source in expected}) > 1
    found = visitor.get(f"inspect?frame=3&row={row}&column=14&offset=2")
    assert found["labeled"]
    places = [tuple(source[name] for name in ("frame", "row", "column")) for source in found["sources"]]
    assert places == [source[:3] for source in expected]
    weights = [source["weight"] for source in found["sources"]]
    assert weights == pytest.approx([source.weight for source in expected])
    for source in found["sources"]:
        assert source["label"] == masks[source["frame"], 8 * source["row"] + 4, 8 * source["column"] + 4]
    (match,) = found["matches"]  # there is no later frame
    assert (match["side"], match["frame"], len(match["map"])) == ("past", 1, 32 * 32)
    assert match["map"][32 * match["best"]["row"] + match["best"]["column"]] == 1
    assert -1 <= match["best"]["value"] <= 1
    assert visitor.get("inspect?frame=0&row=9&column=14&offset=2")["given"]
    for query, said in (("row=99&offset=2", "row 99"), ("row=9&offset=2&kind=attention", "matching module")):
        assert said in visitor.get(f"inspect?frame=3&column=14&{query}")["error"]


def test_the_matching_module_of_a_run_attends_to_other_frames(tmp_path: Path) -> None:
    config = tiny()
    save_config(config, tmp_path / "config.json")
    method = build(config)
    modules = {"encoder": method.encoder(), **method.extras()}
    export(tmp_path, 0, {f"{name}.safetensors": m.state_dict() for name, m in modules.items()}, config)
    engine = load_engine(tmp_path)
    frames = rendered("walker").frames[:, :64, :96]
    past, future = engine.attention(frames[1], [frames[0], frames[2]], (64, 96), 3, 5)
    for values in (past, future):
        assert values.shape == (8, 12)
        assert float(values.sum()) == pytest.approx(1)
    assert not torch.equal(past, future)
    engine.close()


def test_a_run_can_be_canceled_and_another_one_started() -> None:
    with serve(Engine(tiny_encoder()), frames=30) as server:
        visitor = Visitor(server)
        visitor.post("sample", {"sample": "walker"})
        everything = {"kind": "masks", "given": {0: [256 * 256, 1]}}
        assert visitor.post("run", everything)["state"] == "running"
        assert "in progress" in visitor.post("run", everything)["error"]
        stopped = visitor.post("cancel")
        assert stopped["state"] == "canceled"
        assert stopped["done"] < 30
        assert visitor.post("run", everything)["state"] == "running"
        # A new clip takes the place of one with a run in progress.
        assert visitor.post("sample", {"sample": "light"})["state"] == "idle"


def test_visitors_do_not_disturb_each_other(demo: Demo) -> None:
    keys = ("walker", "crossing")
    visitors = [Visitor(demo) for _ in keys]
    for key, one in zip(keys, visitors, strict=True):
        one.post("sample", {"sample": key})
    for key, one in zip(keys, visitors, strict=True):
        one.post("run", {"kind": "masks", "given": {0: runs_of(truth_of(key))}})
    for key, one in zip(keys, visitors, strict=True):
        assert_same(one.masks(one.wait()), expected_masks(key))


def test_light_requests_do_not_wait_for_a_computation(visitor: Visitor) -> None:
    busy = threading.Event()
    held = visitor.demo.engine.submit(busy.wait, 30)
    try:
        slow = "inspect?frame=0&row=1&column=1&offset=1"
        waiting = [threading.Thread(target=visitor.get, args=(slow,)) for _ in range(50)]
        for thread in waiting:
            thread.start()
        started = time.perf_counter()
        key = visitor.get("state")["clip"]["key"]
        assert visitor.fetch(f"frame/{key}/0")[:2] == b"\xff\xd8"
        assert time.perf_counter() - started < 10
        assert not held.done()
    finally:
        busy.set()
    for thread in waiting:
        thread.join()
    seconds = visitor.get("estimate")
    assert 0 < seconds["total"] <= FRAMES * (seconds["encode"] + seconds["step"])


def test_the_longest_idle_visitor_makes_room() -> None:
    with serve(Engine(tiny_encoder()), visitors=2, frames=2) as server:
        first, second = Visitor(server), Visitor(server)
        first.post("sample", {"sample": "walker"})
        second.post("sample", {"sample": "walker"})
        first.get("state")
        third = Visitor(server)
        assert second.raw("GET", f"{second.path}/state")[0] == 410
        assert first.get("state")["clip"]["frames"] == 2
        assert "no clip" in third.get("state")["error"]
        assert len(list(server.folder.iterdir())) == 2


def test_an_uploaded_video_is_shortened_shrunk_and_exported_at_its_own_size(
    visitor: Visitor, tmp_path: Path
) -> None:
    need_av()
    frames = np.zeros((FRAMES + 3, 360, 720, 3), np.uint8)
    frames[:, 100:200, 100:300] = 255
    state = visitor.post("upload", write_file(tmp_path / "a.mp4", frames).read_bytes())
    clip = state["clip"]
    assert (clip["frames"], clip["height"], clip["width"]) == (FRAMES, 320, 640)
    assert (clip["rows"], clip["columns"]) == (28, 56)
    assert f"first {FRAMES} frames of {FRAMES + 3}" in clip["remarks"][0]
    with Image.open(io.BytesIO(visitor.fetch(f"frame/{clip['key']}/0"))) as image:
        assert image.size == (640, 320)
    ids = np.zeros((320, 640), np.uint8)
    ids[89:178, 89:267] = 1
    visitor.run({0: ids})
    with zipfile.ZipFile(io.BytesIO(visitor.fetch("download/masks.zip"))) as archive:
        last = io.BytesIO(archive.read(archive.namelist()[-1]))
    with Image.open(last) as image:
        assert image.size == (720, 360)


def test_files_that_are_not_videos_are_refused_in_a_sentence(visitor: Visitor, tmp_path: Path) -> None:
    need_av()
    small = np.zeros((3, 64, 64, 3), np.uint8)
    damaged = cut(write_file(tmp_path / "damaged.mp4", small), 0.1).read_bytes()
    for data in (b"hello, this is text", PLAYLIST, damaged, b""):
        said = visitor.post("upload", data)["error"]
        assert said[0].isupper()
        assert said.endswith(".")
        assert str(visitor.demo.folder) not in said
    # A playlist names other files: FFmpeg must never see it.
    assert "give mp4, mov" in visitor.post("upload", PLAYLIST)["error"]
    assert "1 MB" in visitor.post("upload", b"x" * 1_200_000)["error"]
    assert visitor.raw("POST", f"{visitor.path}/upload", b"x" * 1_200_000, **{GUARD: "1"})[0] == 413
    # The clip before is still there, and nothing else.
    state = visitor.get("state")
    assert state["clip"]["name"] == "Walker"
    folder = visitor.demo.folder / visitor.path.rpartition("/")[2]
    assert [path.name for path in folder.iterdir()] == [state["clip"]["key"]]


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ({"kind": "masks", "given": {}}, "frame 0"),
        ({"kind": "masks", "given": {"0": [4, 1]}}, "256x256"),
        ({"kind": "masks", "given": {"0": [256 * 256, 0]}}, "all background"),
        ({"kind": "masks", "given": {"0": [256 * 256, 99]}}, "at most 20"),
        ({"kind": "masks", "given": {"0": [256 * 256, 1], "7": [256 * 256, 1]}}, "frame 7"),
        ({"kind": "points", "names": ["a"], "given": {"0": [[400, 2]]}}, "outside"),
        ({"kind": "points", "names": ["a", "b"], "given": {"0": [[4, 2]]}}, "cannot be read"),
        ({"kind": "boxes", "given": {}}, "masks or points"),
        ({"given": 3}, "cannot be read"),
        (b"[1", "not json"),
    ],
)
def test_labels_that_cannot_be_propagated_are_refused(visitor: Visitor, labels: object, said: str) -> None:
    assert said.lower() in visitor.post("run", labels)["error"].lower()


def test_requests_of_other_sites_are_refused(visitor: Visitor) -> None:
    own = f"http://127.0.0.1:{visitor.demo.port}"
    assert visitor.raw("GET", "/api/info", Host="evil.example")[0] == 403
    assert visitor.raw("GET", "/api/info", Host="localhost:1")[0] == 200
    assert visitor.raw("GET", "/api/info", Origin="http://evil.example")[0] == 403
    assert visitor.raw("POST", "/api/visit", b"{}", Origin=own)[0] == 403  # a form of another site
    assert visitor.raw("POST", "/api/visit", b"{}", Origin="null", **{GUARD: "1"})[0] == 403
    assert visitor.raw("POST", "/api/visit", b"{}", Origin=own, **{GUARD: "1"})[0] == 200
    assert visitor.raw("OPTIONS", "/api/visit")[0] == 405  # other sites may not even ask
    for path in (
        "/../server.py",
        "/..%2fserver.py",
        "/page/index.html",
        "//etc/passwd",
        "/api/visit/../info",
        f"{visitor.path}/download/..%2f..%2fx.zip",
        f"{visitor.path}/mask/{'9' * 5000}",
    ):
        assert visitor.raw("GET", path)[0] == 404, path
    assert visitor.raw("GET", f"{visitor.path}/download/x.zip")[0] == 400
    assert visitor.raw("GET", "/api/visit/guessed/state")[0] == 410


def test_a_bug_is_an_error_for_the_page_too(visitor: Visitor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tcore.demo.server.state_message", lambda job: 1 / 0)
    status, body, headers = visitor.raw("GET", f"{visitor.path}/state")
    assert (status, headers["X-Content-Type-Options"]) == (500, "nosniff")
    assert "ZeroDivisionError" in json.loads(body)["error"]


def test_a_body_that_stops_is_given_up(visitor: Visitor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tcore.demo.server.STALL_S", 0.2)
    with socket.create_connection(("127.0.0.1", visitor.demo.port), timeout=30) as connection:
        head = f"POST {visitor.path}/upload HTTP/1.1\r\nHost: localhost\r\n{GUARD}: 1\r\n"
        connection.sendall(f"{head}Content-Length: 1000\r\n\r\nabc".encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 408")
    assert visitor.get("state")["clip"]["name"] == "Walker"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--port", "70000"], "--port 70000"),
        (["--max-frames", "0"], "--max-frames 0"),
        (["nowhere"], "encoder nowhere does not exist"),
    ],
)
def test_a_command_that_cannot_work_is_one_line(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["demo", *argv])
    assert stop.value.code == 2
    assert said in capsys.readouterr().err


def test_a_taken_port_and_a_missing_package_are_named(
    demo: Demo, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["demo", "random:vitti16", "--no-browser", "--port", str(demo.port)]
    with pytest.raises(SystemExit):
        main(command)
    assert f"cannot listen on 127.0.0.1:{demo.port}" in capsys.readouterr().err
    monkeypatch.delitem(sys.modules, "tcore.demo.server")
    monkeypatch.setitem(sys.modules, "uvicorn", None)  # importing it fails
    with pytest.raises(SystemExit):
        main(command)
    assert "pip install starlette uvicorn" in capsys.readouterr().err


@pytest.mark.long
def test_the_command_serves_until_it_is_stopped() -> None:
    argv = [sys.executable, "-m", "tcore", "demo", "random:vitti16", "--no-browser", "--port", "0"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith("encoder: ")
        address = process.stdout.readline().split()[1]
        with urllib.request.urlopen(f"{address}api/info") as answer:
            assert json.load(answer)["encoder"]["name"] == "random:vitti16"
        process.terminate()
        assert process.stderr.read() == "stopped.\n"
    assert process.returncode == 0
