import csv
import io
import json
import re
import time
import zipfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tcore.cli.main import main
from tcore.config_file import save_config
from tcore.data.rendered import RenderedVideo, render_video
from tcore.demo.clips import SAMPLES
from tcore.demo.engine import CELLS, Engine, load_engine
from tcore.demo.server import GUARD, Demo
from tcore.evaluation.propagate import LabelSource
from tcore.training.build import build_model
from tcore.training.checkpoint import export
from tcore.video.labels import Masks
from tcore.video.propagate_video import carry_frames, encode_frame, propagate
from tcore.video.tracked import TrackedMasks
from tests.demo.visitor import Visitor, runs_of, serve
from tests.evaluation.clips import cut, need_av, tiny_encoder, write_file
from tests.tiny import tiny

FRAMES = 5
PLAYLIST = b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    with serve(Engine(tiny_encoder()), tmp_path_factory.mktemp("demo"), frames=FRAMES, upload_mb=1) as server:
        yield server


@pytest.fixture
def visitor(demo: Demo) -> Visitor:
    return Visitor(demo)


@lru_cache
def rendered(key: str) -> RenderedVideo:
    sample = SAMPLES[key]
    return render_video(sample.seed, sample.video, split="heldout", num_frames=FRAMES, size=256)


def sample_frames(key: str) -> np.ndarray:
    return rendered(key).frames


def truth_of(key: str) -> np.ndarray:
    return rendered(key).objects[0]


def expected_masks(key: str, first: np.ndarray) -> np.ndarray:
    encoder = tiny_encoder()
    protocol = Engine(encoder).protocol((256, 256))
    found = propagate(encoder, sample_frames(key), first, protocol=protocol, long_side=8 * CELLS)
    return np.stack(list(found))


def assert_same(found: np.ndarray, expected: np.ndarray) -> None:
    """Equal but for ties: features that were kept on disk are summed up in another order."""
    assert found.shape == expected.shape
    assert (found == expected).mean() > 0.9995


def test_the_page_is_there_at_once_and_names_no_other_place(tmp_path: Path) -> None:
    started = time.perf_counter()
    with serve(Engine(tiny_encoder()), tmp_path) as server:
        visitor = Visitor(server)
        status, page, headers = visitor.raw("GET", "/")
        assert time.perf_counter() - started < 3
        assert status == 200
        assert headers["Content-Type"].startswith("text/html")
        assert "default-src 'self'" in headers["Content-Security-Policy"]
        files = {
            "/",
            *(
                f"/{name}"
                for name in re.findall(rb'(?:src|href)="([a-z.]+)"', page)
                for name in [name.decode()]
            ),
        }
        assert {"/app.js", "/style.css", "/icon.svg"} <= files
        for file in server.site.page:
            status, body, _ = visitor.raw("GET", f"/{file}")
            assert status == 200
            addresses = set(re.findall(rb"https?://[a-z0-9.]+", body)) - {b"http://www.w3.org"}
            assert not addresses, file
        folder = server.site.folder
        assert folder.is_dir()
    assert not folder.exists()


def test_masks_are_those_of_the_library(visitor: Visitor) -> None:
    visitor.post("sample", {"sample": "walker"})
    first = truth_of("walker")
    state = visitor.run({0: first})
    assert (state["state"], state["done"], state["kind"]) == ("done", FRAMES, "masks")
    assert all(0 < value <= 1 for value in state["confidence"])
    assert_same(visitor.masks(state), expected_masks("walker", first))


def test_the_true_labels_of_a_sample_are_those_of_the_renderer(visitor: Visitor) -> None:
    visitor.post("sample", {"sample": "crossing"})
    truth = visitor.get("truth")
    runs = np.array(truth["runs"]).reshape(-1, 2)
    np.testing.assert_array_equal(np.repeat(runs[:, 1], runs[:, 0]).reshape(256, 256), truth_of("crossing"))
    assert 3 < len(truth["points"]) <= 13


def test_a_corrected_frame_starts_the_run_anew_and_what_lies_before_it_stays(visitor: Visitor) -> None:
    visitor.post("sample", {"sample": "walker"})
    first = truth_of("walker")
    before = visitor.masks(visitor.run({0: first}))
    corrected = np.zeros_like(first)
    corrected[40:120, 60:140] = 2
    state = visitor.run({0: first, 3: corrected}, changed=3)
    assert state["start"] == 3
    found = visitor.masks(state)
    np.testing.assert_array_equal(found[:3], before[:3])
    np.testing.assert_array_equal(found[3], corrected)
    encoder = tiny_encoder()
    protocol = Engine(encoder).protocol((256, 256))
    track = TrackedMasks(Masks({0: first, 3: corrected}), (256, 256), (256, 256), 8, protocol)
    carried = list(carry_frames(encoder, sample_frames("walker"), track, (256, 256), protocol))
    assert_same(found[4], track.read(4, carried[4][1]).values)


def test_points_are_carried_and_written(visitor: Visitor) -> None:
    visitor.post("sample", {"sample": "light"})
    state = visitor.run({0: [[100.0, 90.5], None, [30, 200]]}, "points", names=["head", "hidden", "foot"])
    assert state["points"][0][:2] == [[100.0, 90.5, 1.0], None]
    assert state["points"][4][0] is not None
    rows = list(csv.DictReader(io.StringIO(visitor.fetch("download/tracks.csv").decode())))
    assert len(rows) == 3 * FRAMES
    assert (rows[0]["name"], float(rows[0]["x"]), float(rows[0]["y"])) == ("head", 100.0, 90.5)
    assert rows[1]["x"] == ""
    coco = json.loads(visitor.fetch("download/coco.json"))
    assert coco["categories"][0]["keypoints"] == ["head", "hidden", "foot"]
    assert coco["annotations"][0]["keypoints"] == [100.0, 90.5, 2, 0, 0, 0, 30.0, 200.0, 2]
    assert "points have no masks" in visitor.get("download/masks.zip")["error"].lower()


def test_downloads_hold_every_frame(visitor: Visitor) -> None:
    visitor.post("sample", {"sample": "walker"})
    assert "nothing to download" in visitor.get("download/masks.zip")["error"]
    masks = visitor.masks(visitor.run({0: truth_of("walker")}))
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
    from tcore.data.video import open_video

    visitor.post("sample", {"sample": "walker"})
    visitor.run({0: truth_of("walker")})
    path = tmp_path / "overlay.mp4"
    path.write_bytes(visitor.fetch("download/overlay.mp4"))
    frames = list(open_video(path))
    assert len(frames) == FRAMES
    assert np.abs(frames[0].astype(int) - sample_frames("walker")[0].astype(int)).mean() > 10  # painted over


def by_length(item: tuple[list[LabelSource], int]) -> int:
    return len(item[0])


def test_a_patch_tells_where_its_label_came_from(visitor: Visitor) -> None:
    visitor.post("sample", {"sample": "walker"})
    before = visitor.get("look?frame=3&row=9&column=14&offset=2")
    assert (before["labeled"], before["sources"]) == (False, [])
    masks = visitor.masks(visitor.run({0: truth_of("walker")}))
    encoder = tiny_encoder()
    propagator = Engine(encoder).protocol((256, 256)).propagator()
    features = [encode_frame(encoder, frame, (256, 256)) for frame in sample_frames("walker")]
    propagator.start(features[0], torch.zeros(32, 32, 1))
    for frame in features[1:3]:
        propagator.step(frame)
    # A patch whose label comes from many places: where frame 0 is the best, its copies fill them all.
    expected, row = max(((propagator.sources(features[3], row, 14), row) for row in range(32)), key=by_length)
    assert len({source.frame for source in expected}) > 1
    found = visitor.get(f"look?frame=3&row={row}&column=14&offset=2")
    assert found["labeled"]
    places = [tuple(source[name] for name in ("frame", "row", "column")) for source in found["sources"]]
    assert places == [source[:3] for source in expected]
    weights = [source["weight"] for source in found["sources"]]
    assert weights == pytest.approx([source.weight for source in expected])
    for source in found["sources"]:
        assert source["label"] == masks[source["frame"], 8 * source["row"] + 4, 8 * source["column"] + 4]
    assert [(match["side"], match["frame"]) for match in found["matches"]] == [("past", 1), ("future", 4)]
    for match in found["matches"]:
        assert len(match["map"]) == 32 * 32
        assert match["map"][32 * match["best"]["row"] + match["best"]["column"]] == 1
        assert -1 <= match["best"]["value"] <= 1
    assert visitor.get("look?frame=0&row=9&column=14&offset=2")["given"]
    assert "no patch" in visitor.get("look?frame=3&row=99&column=14&offset=2")["error"].lower()
    assert "matching module" in visitor.get("look?frame=3&row=9&column=14&offset=2&kind=attention")["error"]


def test_the_matching_module_of_a_run_looks_into_other_frames(tmp_path: Path) -> None:
    config = tiny()
    save_config(config, tmp_path / "config.json")
    export(tmp_path, 0, build_model(config).state_dict(), config)
    engine = load_engine(tmp_path)
    frames = sample_frames("walker")[:, :64, :96]
    past, future = engine.attention(frames[1], [frames[0], frames[2]], (64, 96), 3, 5)
    for look in (past, future):
        assert look.shape == (8, 12)
        assert float(look.sum()) == pytest.approx(1)
    assert not torch.equal(past, future)
    engine.close()


def test_a_run_can_be_cancelled_and_another_one_begun(tmp_path: Path) -> None:
    with serve(Engine(tiny_encoder()), tmp_path, frames=30) as server:
        visitor = Visitor(server)
        visitor.post("sample", {"sample": "walker"})
        everything = {"kind": "masks", "given": {0: [256 * 256, 1]}}
        assert visitor.post("run", everything)["state"] == "running"
        assert "under way" in visitor.post("run", everything)["error"]
        stopped = visitor.post("cancel")
        assert stopped["state"] == "cancelled"
        assert stopped["done"] < 30
        assert visitor.post("run", everything)["state"] == "running"
        # A new clip takes the place of one that is being worked on.
        assert visitor.post("sample", {"sample": "light"})["state"] == "idle"


def test_visitors_do_not_disturb_each_other(demo: Demo) -> None:
    keys = ("walker", "crossing")
    visitors = [Visitor(demo) for _ in keys]
    for key, one in zip(keys, visitors, strict=True):
        one.post("sample", {"sample": key})
    for key, one in zip(keys, visitors, strict=True):
        one.post("run", {"kind": "masks", "given": {0: runs_of(truth_of(key))}})
    for key, one in zip(keys, visitors, strict=True):
        assert_same(one.masks(one.wait()), expected_masks(key, truth_of(key)))


def test_the_visitor_who_was_away_longest_makes_room(tmp_path: Path) -> None:
    with serve(Engine(tiny_encoder()), tmp_path, visitors=2, frames=2) as server:
        first, second = Visitor(server), Visitor(server)
        first.post("sample", {"sample": "walker"})
        second.post("sample", {"sample": "walker"})
        first.get("state")
        third = Visitor(server)
        assert "put away" in second.get("state")["error"]
        assert second.raw("GET", f"{second.path}/state")[0] == 410
        assert first.get("state")["clip"]["frames"] == 2
        assert "no clip" in third.get("state")["error"]
        assert len(list(server.site.folder.iterdir())) == 2


def test_an_uploaded_video_is_cut_shrunk_and_written_at_its_own_size(
    visitor: Visitor, tmp_path: Path
) -> None:
    need_av()
    frames = np.zeros((FRAMES + 3, 360, 720, 3), np.uint8)
    frames[:, 100:200, 100:300] = 255
    state = visitor.post("upload", write_file(tmp_path / "a.mp4", frames).read_bytes())
    clip = state["clip"]
    assert (clip["frames"], clip["height"], clip["width"]) == (FRAMES, 320, 640)
    assert (clip["rows"], clip["columns"]) == (28, 56)
    assert "first 5 frames of 8" in clip["remarks"][0]
    with Image.open(io.BytesIO(visitor.fetch(f"frame/{clip['key']}/0"))) as image:
        assert image.size == (640, 320)
    ids = np.zeros((320, 640), np.uint8)
    ids[89:178, 89:267] = 1
    visitor.run({0: ids})
    with zipfile.ZipFile(io.BytesIO(visitor.fetch("download/masks.zip"))) as archive:
        last = io.BytesIO(archive.read("00004.png"))
    with Image.open(last) as image:
        assert image.size == (720, 360)


def test_files_that_are_no_videos_are_refused_in_a_sentence(visitor: Visitor, tmp_path: Path) -> None:
    need_av()
    visitor.post("sample", {"sample": "walker"})
    small = np.zeros((3, 64, 64, 3), np.uint8)
    broken = cut(write_file(tmp_path / "broken.mp4", small), 0.1).read_bytes()
    for data in (b"hello, this is text", PLAYLIST, broken, b""):
        said = visitor.post("upload", data)["error"]
        assert said[0].isupper()
        assert said.endswith(".")
        assert str(visitor.demo.site.folder) not in said
    # A playlist names other files: FFmpeg must never see it.
    assert "give mp4, mov" in visitor.post("upload", PLAYLIST)["error"]
    assert "at most 1 MB" in visitor.post("upload", b"x" * 1_200_000)["error"]
    assert visitor.raw("POST", f"{visitor.path}/upload", b"x" * 1_200_000, **{GUARD: "1"})[0] == 413
    # The clip before is still there, and nothing else.
    assert visitor.get("state")["clip"]["name"] == "Walker"
    folder = visitor.demo.site.folder / visitor.path.rpartition("/")[2]
    assert [path.name for path in folder.iterdir()] == [visitor.get("state")["clip"]["key"]]


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
    ],
)
def test_labels_that_cannot_be_carried_are_refused(visitor: Visitor, labels: object, said: str) -> None:
    visitor.post("sample", {"sample": "walker"})
    assert said.lower() in visitor.post("run", labels)["error"].lower()


def test_strangers_are_refused(visitor: Visitor) -> None:
    own = f"http://127.0.0.1:{visitor.demo.server_address[1]}"
    assert visitor.raw("GET", "/api/info", Host="evil.example")[0] == 403
    assert visitor.raw("GET", "/api/info", Host="localhost:1")[0] == 200
    assert visitor.raw("GET", "/api/info", Origin="http://evil.example")[0] == 403
    assert visitor.raw("POST", "/api/visit", b"{}", Origin=own)[0] == 403  # a form of another site
    assert visitor.raw("POST", "/api/visit", b"{}", Origin="null", **{GUARD: "1"})[0] == 403
    assert visitor.raw("POST", "/api/visit", b"{}", Origin=own, **{GUARD: "1"})[0] == 200
    assert visitor.raw("OPTIONS", "/api/visit")[0] == 501  # other sites may not even ask
    for path in (
        "/../server.py",
        "/..%2fserver.py",
        "/page/index.html",
        "//etc/passwd",
        "/api/visit/../info",
    ):
        assert visitor.raw("GET", path)[0] == 404, path
    assert visitor.raw("GET", f"{visitor.path}/download/..%2f..%2fx.zip")[0] == 404
    assert visitor.raw("GET", "/api/visit/guessed/state")[0] == 410


def test_the_time_is_told_before_the_run(visitor: Visitor) -> None:
    visitor.post("sample", {"sample": "walker"})
    told = visitor.get("estimate")
    assert told["encode"] > 0
    assert told["step"] > 0
    assert told["total"] <= FRAMES * (told["encode"] + told["step"])


def test_without_an_encoder_the_page_says_how_to_get_one(tmp_path: Path) -> None:
    with serve(None, tmp_path) as server:
        visitor = Visitor(server)
        told = visitor.ask("GET", "/api/info")
        assert told["encoder"] is None
        assert told["training"]["command"] == f"tcore quickstart --run {tmp_path / 'run'}"
        assert "no encoder yet" in visitor.post("sample", {"sample": "walker"})["error"].lower()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--port", "70000"], "--port 70000"),
        (["--max-frames", "0"], "--max-frames 0"),
        (["--prot", "1"], "did you mean --port?"),
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


def test_a_port_that_is_taken_is_named(demo: Demo, capsys: pytest.CaptureFixture[str]) -> None:
    port = str(demo.server_address[1])
    with pytest.raises(SystemExit):
        main(["demo", "random:vitti16", "--no-browser", "--port", port])
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err
