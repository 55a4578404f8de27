import csv
import io
import json
import re
import subprocess
import sys
import threading
import urllib.request
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from PIL import Image

import tcore.cli.show  # noqa: F401  while a traceback is printed, Python 3.11 cannot parse it in another thread
from tcore.cli.main import main
from tcore.data.rendered import RenderedVideo, render_video
from tcore.data.video import open_video
from tcore.demo.clips import SAMPLES
from tcore.demo.engine import Engine, load_engine
from tcore.demo.job import lost_labels
from tcore.demo.server import GUARD, PAGE, Demo
from tcore.errors import InputError
from tcore.evaluation.propagate import label_sources
from tcore.methods.matching import PatchMatchingModule
from tcore.methods.settings import AttentionForm
from tcore.video.detail import fit_size
from tcore.video.labels import Masks, Points
from tcore.video.mark import mark
from tcore.video.propagate import propagate
from tcore.video.tracked import LOST, LOST_POINT, Found
from tests.demo.visitor import Visitor, serve
from tests.evaluation.clips import cut, need_av, tiny_encoder, write_file

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


@cache
def rendered(key: str) -> RenderedVideo:
    number = SAMPLES[key].video
    assert isinstance(number, int)
    return render_video(7, number, split="heldout", num_frames=FRAMES, size=256)


def assert_masks(found: np.ndarray, key: str, given: dict[int, np.ndarray] | None = None) -> None:
    """The masks of the library, except for ties: features from a file are summed in another order."""
    encoder = tiny_encoder()
    protocol = Engine(encoder).protocol((256, 256))
    video = rendered(key)
    labels = given or {0: video.objects[0]}
    masks = propagate(encoder, video.frames, labels, protocol=protocol, detail="fine")
    assert (found == np.stack(list(masks))).mean() > 0.9995


def table(visitor: Visitor) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(visitor.fetch("download/tracks.csv").decode())))


def image_in(archive: bytes, number: int) -> Image.Image:
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        return Image.open(io.BytesIO(opened.read(opened.namelist()[number])))


def test_the_page_names_no_other_site_and_leaves_nothing_behind() -> None:
    with serve(Engine(tiny_encoder())) as server:
        visitor = Visitor(server)
        status, page, headers = visitor.raw("GET", "/")
        assert (status, headers["Content-Type"][:9]) == (200, "text/html")
        assert "default-src 'self'" in headers["Content-Security-Policy"]
        assert {b"app.js", b"style.css", b"icon.svg"} <= set(re.findall(rb'(?:src|href)="([a-z.]+)"', page))
        for file in PAGE.iterdir():
            body = visitor.raw("GET", f"/{file.name}")[1]
            assert body == file.read_bytes()
            assert not set(re.findall(rb"https?://[a-z0-9.]+", body)) - {b"http://www.w3.org"}, file
        assert visitor.ask("GET", "/api/info")["encoder"]["name"] == "tiny"
        assert server.folder.is_dir()
    assert not server.folder.exists()


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of pycocotools
def test_masks_are_those_of_the_library_and_downloads_hold_every_frame(visitor: Visitor) -> None:
    assert "nothing to download" in visitor.get("download/masks.zip")["error"]
    truth = visitor.get("truth")
    assert 3 < len(truth["points"]) <= 13
    runs = np.array(truth["runs"]).reshape(-1, 2)
    ids = np.repeat(runs[:, 1], runs[:, 0]).reshape(256, 256)
    np.testing.assert_array_equal(ids, rendered("walker").objects[0])
    other = Visitor(visitor.demo)  # they do not disturb each other
    other.post("sample", {"sample": "crossing"})
    other.start({0: rendered("crossing").objects[0]})
    state = visitor.run({0: ids})
    assert (state["state"], state["done"], state["kind"]) == ("done", FRAMES, "masks")
    assert all(0 < value <= 1 for value in state["confidence"])
    masks = visitor.masks(state)
    assert_masks(masks, "walker")
    assert_masks(other.masks(other.wait()), "crossing")
    archive = visitor.fetch("download/masks.zip")
    for index in range(FRAMES):
        assert image_in(archive, index).mode == "P"
        np.testing.assert_array_equal(np.asarray(image_in(archive, index)), masks[index])
    coco = json.loads(visitor.fetch("download/coco.json"))
    assert [image["file_name"] for image in coco["images"]] == [f"{index:05d}.png" for index in range(FRAMES)]
    for annotation in coco["annotations"]:
        mask = masks[annotation["image_id"] - 1] == annotation["category_id"]
        decoded = pytest.importorskip("pycocotools.mask").decode(annotation["segmentation"])
        np.testing.assert_array_equal(decoded.astype(bool), mask)
        assert annotation["iscrowd"] == 0
        left, top, width, height = annotation["bbox"]
        assert annotation["area"] == mask.sum() == mask[top : top + height, left : left + width].sum()
    assert [int(row["area"]) for row in table(visitor)] == [one["area"] for one in coco["annotations"]]
    with zipfile.ZipFile(io.BytesIO(visitor.fetch("download/yolo.zip"))) as polygons:
        assert polygons.namelist() == ["classes.txt", *(f"{index:05d}.txt" for index in range(FRAMES))]
    shapes = ElementTree.fromstring(visitor.fetch("download/cvat.xml")).findall("track/polygon[@outside='0']")
    assert len(shapes) == len(coco["annotations"])
    assert "dlc" in visitor.get("download/dlc.csv")["error"]


def test_coco_comes_with_the_frames_that_it_names(visitor: Visitor) -> None:
    ids = rendered("walker").objects[0]
    visitor.run({0: ids})
    with zipfile.ZipFile(io.BytesIO(visitor.fetch("download/coco.zip"))) as archive:
        coco = json.loads(archive.read("coco.json"))
        names = [image["file_name"] for image in coco["images"]]
        assert sorted(archive.namelist()) == sorted([*names, "coco.json"])
        for index, (name, image) in enumerate(zip(names, coco["images"], strict=True)):
            frame = np.asarray(Image.open(io.BytesIO(archive.read(name))))
            assert frame.shape == (image["height"], image["width"], 3)
            away = np.abs(rendered("walker").frames.astype(float) - frame).mean(axis=(1, 2, 3))
            assert away.argmin() == index
    first = [one["area"] for one in coco["annotations"] if one["image_id"] == 1]
    assert first == [(ids == label).sum() for label in np.unique(ids)[1:]]


def test_a_download_that_is_too_large_is_given_up() -> None:
    with serve(Engine(tiny_encoder()), frames=FRAMES, download_mb=0.02) as server:
        visitor = Visitor(server)
        visitor.post("sample", {"sample": "walker"})
        visitor.run({0: rendered("walker").objects[0]})
        assert "more than 0.02 MB" in visitor.get("download/coco.zip")["error"]
        assert len(visitor.fetch("download/tracks.csv")) > 0
        assert not list(server.folder.rglob("*-coco.zip"))


def test_a_corrected_frame_changes_those_around_it_and_earlier_ones_stay(visitor: Visitor) -> None:
    first, later = rendered("walker").objects[0], np.zeros_like(rendered("walker").objects[0])
    later[40:120, 60:140] = 2
    both = {0: first, 2: later}
    visitor.run({0: first})
    state = visitor.run(both, changed=2)
    assert state["start"] == 0  # between the two, labels of both are blended
    before = visitor.masks(state)
    np.testing.assert_array_equal(before[2], later)
    assert np.unique(before[3]).tolist() == [0, 2]  # after it, other objects are gone
    last = np.where(later == 2, 5, 0).astype(np.uint8)
    state = visitor.run(both | {3: last}, changed=3)
    assert (state["start"], state["share"]) == (2, 1)
    found = visitor.masks(state)
    np.testing.assert_array_equal(found[:3], before[:3])
    np.testing.assert_array_equal(found[3], last)


def test_labels_of_a_frame_in_the_middle_go_both_ways(visitor: Visitor) -> None:
    middle = rendered("walker").objects[2]
    state = visitor.run({2: middle}, changed=2)
    assert (state["done"], state["given"]) == (FRAMES, [2])
    assert_masks(visitor.masks(state), "walker", {2: middle})
    sources = visitor.get("inspect?frame=0&row=9&column=14&offset=2")["sources"]
    assert {source["frame"] for source in sources} <= {1, 2}
    assert sum(source["weight"] for source in sources) == pytest.approx(1)


def test_points_are_propagated_and_written(visitor: Visitor) -> None:
    state = visitor.run({0: [[100.0, 90.5], None, [30, 200]]}, "points", names=["head", "hidden", "foot"])
    assert state["points"][0][:2] == [[100.0, 90.5, 1.0], None]
    assert state["points"][FRAMES - 1][0] is not None
    frames, protocol = rendered("walker").frames, Engine(tiny_encoder()).protocol((256, 256))
    given = [[100.0, 90.5], [np.nan, np.nan], [30, 200]]
    same = list(propagate(tiny_encoder(), frames, given, protocol=protocol, detail="fine"))
    for found, wanted in zip(state["points"], same, strict=True):
        np.testing.assert_allclose([found[0][2], found[2][2]], np.array(wanted.each)[[0, 2]], atol=1e-3)
    rows = table(visitor)
    assert len(rows) == 3 * FRAMES
    assert (rows[0]["name"], float(rows[0]["x"]), float(rows[0]["y"])) == ("head", 100.0, 90.5)
    assert rows[1]["x"] == ""
    coco = json.loads(visitor.fetch("download/coco.json"))
    assert coco["categories"][0]["keypoints"] == ["head", "hidden", "foot"]
    assert coco["annotations"][0]["keypoints"] == [100.0, 90.5, 2, 0, 0, 0, 30.0, 200.0, 2]
    assert coco["annotations"][0]["bbox"] == [30.0, 90.5, 70.0, 109.5]
    assert visitor.fetch("download/dlc.csv").decode().splitlines()[3].startswith("0,100.000,90.500,1.0000,,,")
    assert "tracks" in visitor.get("download/masks.zip")["error"]


def test_a_patch_says_where_its_label_came_from(visitor: Visitor) -> None:
    before = visitor.get("inspect?frame=3&row=9&column=14&offset=2")
    assert (before["labeled"], before["sources"]) == (False, [])
    masks = visitor.masks(visitor.run({0: rendered("walker").objects[0]}))
    engine = Engine(tiny_encoder())
    features = [engine.encode(frame, (256, 256)) for frame in rendered("walker").frames]
    protocol = engine.protocol((256, 256))
    by_row = label_sources(features, [(row, 14) for row in range(32)], protocol)
    # A patch whose label comes from many places: where frame 0 is the best, its copies fill them all.
    row = max(range(32), key=lambda row: len(by_row[row]))
    assert len({source.frame for source in by_row[row]}) > 1
    found = visitor.get(f"inspect?frame=3&row={row}&column=14&offset=2")
    for source, expected in zip(found["sources"], by_row[row], strict=True):
        frame, y, x = source["frame"], source["row"], source["column"]
        assert (frame, y, x) == expected[:3]
        assert source["weight"] == pytest.approx(expected.weight)
        assert source["label"] == masks[frame, 8 * y + 4, 8 * x + 4]
    (match,) = found["matches"]  # there is no later frame
    assert (match["side"], match["frame"], len(match["map"])) == ("past", 1, 32 * 32)
    assert match["map"][32 * match["best"]["row"] + match["best"]["column"]] == 1
    assert visitor.get("inspect?frame=0&row=9&column=14&offset=2")["given"]
    for query, said in (("row=99&offset=2", "row 99"), ("row=9&offset=2&kind=attention", "matching module")):
        assert said in visitor.get(f"inspect?frame=3&column=14&{query}")["error"]


def test_a_long_side_makes_the_grid_smaller_and_must_have_room_for_a_patch() -> None:
    with pytest.raises(InputError, match="long side of 8"):
        load_engine("default", "coarse", long_side=8)
    whole, small = load_engine("default", "coarse"), load_engine("default", "coarse", long_side=427)
    assert (whole.input_size((480, 854), "fine"), small.input_size((480, 854), "fine")) == (
        (960, 1696),
        (480, 848),
    )
    assert small.input_size((96, 128), "coarse") == whole.input_size((96, 128), "coarse")
    for engine in (whole, small):
        engine.close()


@pytest.mark.parametrize("form", ["dot", "motion"])
def test_the_matching_module_attends_to_other_frames(form: AttentionForm) -> None:
    engine = load_engine("default", "coarse")
    assert engine.matcher is not None
    if form != "dot":
        match = PatchMatchingModule(dim=engine.matcher.backbone.dim, num_heads=1, form=form, start="identity")
        engine.matcher = engine.matcher._replace(match=match)
    frames = rendered("walker").frames[:, :64, :96]
    past, future = engine.attention(frames[1], [frames[0], frames[2]], (64, 96), "coarse", 3, 5)
    assert past.shape == future.shape == (64 // engine.encoder.patch_size, 96 // engine.encoder.patch_size)
    assert (float(past.sum()), float(future.sum())) == pytest.approx((1, 1))
    assert not torch.equal(past, future)
    engine.close()


def test_a_run_can_be_canceled_and_another_one_started() -> None:
    with serve(Engine(tiny_encoder()), frames=30) as server:
        visitor = Visitor(server)
        visitor.post("sample", {"sample": "walker"})
        everything = {0: np.ones((256, 256), np.uint8)}
        assert visitor.start(everything)["state"] == "running"
        assert "in progress" in visitor.start(everything)["error"]
        stopped = visitor.post("cancel")
        assert stopped["state"] == "canceled"
        assert stopped["done"] < 30
        assert visitor.start(everything)["state"] == "running"
        # A new clip takes the place of one with a run in progress.
        assert visitor.post("sample", {"sample": "light"})["state"] == "idle"


def test_light_requests_do_not_wait_for_a_computation(visitor: Visitor) -> None:
    busy = threading.Event()
    held = visitor.demo.engine.submit(busy.wait, 30)
    with ThreadPoolExecutor(50) as pool:
        try:
            pool.map(visitor.get, ["inspect?frame=0&row=1&column=1&offset=1"] * 50)
            key = visitor.get("state")["clip"]["key"]
            assert visitor.fetch(f"frame/{key}/0")[:2] == b"\xff\xd8"
            assert not held.done()  # it ends by itself after 30 s
        finally:
            busy.set()
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
        assert len(list(server.folder.glob("*/"))) == 2


def test_an_uploaded_video_is_shortened_shrunk_and_exported_at_its_own_size(
    visitor: Visitor, tmp_path: Path
) -> None:
    need_av()
    frames = np.zeros((FRAMES + 3, 540, 720, 3), np.uint8)
    frames[:, 100:200, 100:300] = 255
    state = visitor.post("upload", write_file(tmp_path / "a.mp4", frames).read_bytes())
    clip = state["clip"]
    assert (clip["frames"], clip["height"], clip["width"]) == (FRAMES, 480, 640)
    # The size and the grid of tcore propagate: a short side of 480, cells of 8 pixels.
    assert (clip["rows"], clip["columns"]) == fit_size((540, 720), 1, "fine") == (60, 80)
    assert f"first {FRAMES} frames of {FRAMES + 3}" in clip["remarks"][0]
    assert "720x540 are shown and labeled at 640x480, as by tcore propagate" in clip["remarks"][1]
    assert Image.open(io.BytesIO(visitor.fetch(f"frame/{clip['key']}/0"))).size == (640, 480)
    ids = np.zeros((480, 640), np.uint8)
    ids[89:178, 89:267] = 1
    visitor.run({0: ids})
    assert image_in(visitor.fetch("download/masks.zip"), FRAMES - 1).size == (720, 540)
    with zipfile.ZipFile(io.BytesIO(archive := visitor.fetch("download/coco.zip"))) as opened:
        named = json.loads(opened.read("coco.json"))["images"][0]
    assert image_in(archive, 0).size == (named["width"], named["height"]) == (640, 480)
    (tmp_path / "overlay.mp4").write_bytes(visitor.fetch("download/overlay.mp4"))
    overlay = list(open_video(tmp_path / "overlay.mp4"))
    assert len(overlay) == FRAMES
    assert np.abs(overlay[0].astype(int)[120:150, 120:200] - 255).mean() > 10  # painted over white


def test_the_real_sample_is_a_small_clip_of_the_package(visitor: Visitor) -> None:
    need_av()
    clip = visitor.post("sample", {"sample": "dog"})["clip"]
    assert (clip["frames"], clip["width"], clip["height"], clip["sample"]) == (FRAMES, 640, 360, False)
    assert (PAGE.parent / "dog.mp4").stat().st_size < 10**6


def test_a_mark_becomes_the_object_and_bad_marks_are_refused(visitor: Visitor) -> None:
    box = {"frame": 1, "box": [30, 40, 90, 80], "clicks_not": [[40, 45]]}
    runs = np.array(visitor.post("mark", box)["runs"]).reshape(-1, 2)
    mask = np.repeat(runs[:, 1], runs[:, 0]).reshape(256, 256)
    before, frame, after = rendered("walker").frames[:3]
    near = [before, after]
    expected = mark(frame, tiny_encoder(), box=(30, 40, 90, 80), clicks_not=[(40, 45)], nearby=near)
    np.testing.assert_array_equal(mask, expected)
    assert 0 < mask.sum() == mask[40:120, 30:120].sum()
    for wrong, said in (
        ({"frame": 99}, "frame 99"),
        ({"frame": 0}, "othing is marked"),
        ({"frame": 0, "clicks": [[4000, 2]]}, "outside"),
        ({"frame": 0, "clicks": [[1, 2]] * 101}, "100 clicks"),
        ({"frame": 0, "clicks": [3]}, "cannot be read"),
        ({"frame": 0, "scribble": [5, 1]}, "256x256"),
        ({"box": [1, 2, 3, 4]}, "cannot be read"),
        ({"frame": 0, "box": [1, 2, 3]}, "cannot be read"),
    ):
        assert said in visitor.post("mark", wrong)["error"]


def test_the_grid_may_be_changed_between_runs(visitor: Visitor) -> None:
    labels = {0: rendered("walker").objects[0]}
    visitor.run(labels)
    state = visitor.post("detail", {"detail": "coarse"})
    assert (state["clip"]["rows"], state["clip"]["detail"], state["done"]) == (16, "coarse", 0)
    assert visitor.run(labels)["done"] == FRAMES
    assert "o detail 'finest'" in visitor.post("detail", {"detail": "finest"})["error"]


def test_what_is_lost_is_listed_and_the_frame_to_correct_is_proposed(visitor: Visitor) -> None:
    speck = np.zeros((256, 256), np.uint8)
    speck[128:, 128:] = 1
    speck[0, 0] = 2  # far smaller than a cell
    state = visitor.run({1: speck}, changed=1)
    assert state["lost"] == [[2], [], [2], [2]]
    assert state["suggest"] == {"frame": 0, "object": 2, "lost": True}


def test_lost_is_what_the_command_calls_lost_and_otherwise_the_least_certain_frame_is_proposed(
    visitor: Visitor,
) -> None:
    ids = np.zeros((8, 8), np.uint8)
    ids[:, 4:] = 7
    ids[:, 2:4] = 3
    masks, points = Masks({0: ids}), Points(("a", "b"), {0: {"a": (1.0, 1.0), "b": (2.0, 2.0)}})
    unsure = Found(ids, 0.6, 1.0, (LOST + 0.01, LOST - 0.01))  # both are still in the frame
    assert lost_labels(masks, 1, unsure) == (7,)
    assert lost_labels(masks, 0, unsure) == ()
    assert lost_labels(points, 1, Found(np.zeros((2, 3)), 0.6, 1.0, (LOST_POINT - 0.01, LOST - 0.01))) == (1,)
    half = np.zeros((256, 256), np.uint8)
    half[:, 128:] = 5
    state = visitor.run({1: half}, changed=1)
    assert state["lost"] == [[], [], [], []]
    assert (state["suggest"]["object"], state["suggest"]["lost"]) == (5, False)
    assert state["suggest"]["frame"] != 1


def test_files_that_are_not_videos_are_refused_in_a_sentence(visitor: Visitor, tmp_path: Path) -> None:
    need_av()
    small = np.zeros((3, 64, 64, 3), np.uint8)
    damaged = cut(write_file(tmp_path / "damaged.mp4", small), 0.1).read_bytes()
    for data in (b"hello, this is text", PLAYLIST, damaged, b""):
        assert re.fullmatch(r"[A-Z][^/]+\.", visitor.post("upload", data)["error"])
    # A playlist names other files: FFmpeg must never see it.
    assert "give mp4, mov" in visitor.post("upload", PLAYLIST)["error"]
    assert "1 MB" in visitor.post("upload", b"x" * 1_200_000)["error"]
    # The clip before is still there, and nothing else.
    state = visitor.get("state")
    assert state["clip"]["name"] == "Walker"
    folder = visitor.demo.folder / visitor.path.rpartition("/")[2]
    assert [path.name for path in folder.iterdir()] == [state["clip"]["key"]]


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ({"kind": "masks", "given": {}}, "no frame"),
        ({"kind": "masks", "given": {"0": [4, 1]}}, "256x256"),
        ({"kind": "masks", "given": {"0": [256 * 256, 0]}}, "all that is given is background"),
        ({"kind": "masks", "given": {"0": [256 * 256, 99]}}, "at most 20"),
        ({"kind": "masks", "given": {"0": [256 * 256, 1], "7": [256 * 256, 1]}}, "frame 7"),
        ({"kind": "points", "names": ["a"], "given": {"0": [[400, 2]]}}, "outside"),
        ({"kind": "points", "names": ["a", "b"], "given": {"0": [[4, 2]]}}, "cannot be read"),
        ({"given": 3}, "cannot be read"),
        (b"[1", "not a json object"),
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
    unknown = "/../server.py /..%2fserver.py /page/index.html //etc/passwd /api/train".split()
    for path in (*unknown, f"{visitor.path}/download/..%2f..%2fx.zip", f"{visitor.path}/mask/{'9' * 5000}"):
        assert visitor.raw("GET", path)[0] == 404, path
    assert visitor.raw("GET", f"{visitor.path}/download/x.zip")[0] == 400
    for path in ("guessed/state", "../info"):
        assert visitor.raw("GET", f"/api/visit/{path}")[0] == 410


def test_a_bug_is_an_error_for_the_page_too(visitor: Visitor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tcore.demo.messages.state", lambda job: 1 / 0)
    status, body, headers = visitor.raw("GET", f"{visitor.path}/state")
    assert (status, headers["X-Content-Type-Options"]) == (500, "nosniff")
    assert json.loads(body)["error"] == "The program failed: its terminal says why."


def test_a_taken_port_and_a_missing_package_are_named(
    demo: Demo, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = f"demo random:vitti16 --no-browser --detail coarse --port {demo.port}".split()
    with pytest.raises(SystemExit):
        main(command)
    said = capsys.readouterr().err
    assert said.startswith("loading the encoder random:vitti16")  # before the seconds that it takes
    assert f"cannot listen on 127.0.0.1:{demo.port}" in said
    for name in ("server", "http"):
        monkeypatch.delitem(sys.modules, f"tcore.demo.{name}")
    monkeypatch.setitem(sys.modules, "uvicorn", None)  # importing it fails
    with pytest.raises(SystemExit):
        main(command)
    assert "pip install starlette uvicorn" in capsys.readouterr().err


@pytest.mark.long
def test_the_command_serves_until_it_is_stopped() -> None:
    argv = [sys.executable, "-m", "tcore", "demo", "random:vitti16", "--no-browser", "--port", "0"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "encoder: random:vitti16\n"
        with urllib.request.urlopen(process.stdout.readline().split()[1]) as answer:
            assert b"app.js" in answer.read()
        process.terminate()
        said = process.communicate()[1]
        assert said.endswith("\nstopped.\n")
        assert "a frame here" in said
        assert "--every" not in said  # a flag of another command
    assert process.returncode == 0
