import csv
import json
import math
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image, ImageDraw

from tcore.cli.main import main
from tcore.data.rendered import render_video
from tcore.errors import InputError
from tcore.evaluation.masks import read_ids
from tcore.video.formats import FORMATS, About, choose_format, write_files
from tcore.video.labels import Masks, Points
from tcore.video.outlines import MOST, outline, trace
from tests.evaluation.clips import overlap, write_folder

SIZE = (60, 90)


def disk(y: float, x: float, radius: float) -> np.ndarray:
    rows, columns = np.ogrid[: SIZE[0], : SIZE[1]]
    return (rows - y) ** 2 + (columns - x) ** 2 <= radius**2


@pytest.fixture(scope="module")
def frames() -> np.ndarray:
    """Object 2 is a ring with an island in it, and far away a second part; object 9 leaves and returns."""
    ids = np.zeros((4, *SIZE), np.uint8)
    for index, frame in enumerate(ids):
        frame[disk(30, 28 + index, 24) & ~disk(30, 28 + index, 14)] = 2
        frame[disk(30, 28 + index, 6)] = 2
        frame[50:58, 70:88] = 2
        if index != 2:
            frame[disk(20, 70, 11)] = 9
    return ids


def about(given: Masks | Points) -> About:
    return About(given, SIZE, lambda index: f"img{index + 1}.jpg")


def written(name: str, given: Masks | Points, labels: np.ndarray, out: Path) -> Path:
    write_files(out, choose_format(name, given).write(about(given), enumerate(labels)))
    return out


def filled(polygon: np.ndarray, scale: int = 8) -> np.ndarray:
    """A polygon's pixels by Pillow, which draws its edges as well: large, so that they do not matter."""
    image = Image.new("1", (scale * SIZE[1], scale * SIZE[0]))
    ImageDraw.Draw(image).polygon([(scale * x, scale * y) for x, y in polygon.tolist()], fill=1)
    half = scale // 2
    return np.asarray(image)[half::scale, half::scale]


def inside(polygon: np.ndarray) -> np.ndarray:
    """Pixels from whose center a line to the right crosses the polygon an odd number of times."""
    (x, y), (x_next, y_next) = polygon.T, np.roll(polygon, -1, axis=0).T
    column, row = np.arange(SIZE[1])[None, :] + 0.5, np.arange(SIZE[0])[:, None] + 0.5
    found = np.zeros(SIZE, dtype=bool)
    for place in np.flatnonzero(y != y_next):
        crossed = (y[place] <= row) != (y_next[place] <= row)
        share = (row - y[place]) / (y_next[place] - y[place])
        found ^= crossed & (column < x[place] + share * (x_next[place] - x[place]))
    return found


def test_outlines_are_exact_and_simplified_ones_nearly_so(frames: np.ndarray) -> None:
    mask = frames[0] == 2
    assert len(trace(mask)) == 4  # outside, hole, island, second part
    np.testing.assert_array_equal(inside(outline(mask, 0)), mask)
    assert overlap(inside(outline(mask)), mask) > 0.97
    rows, columns = np.ogrid[:240, :320]
    large = (rows - 120) ** 2 + 0.7 * (columns - 150) ** 2 < 100**2
    assert len(outline(large)) < len(outline(large, 0)) / 4
    noise = np.zeros(SIZE, dtype=bool)
    noise[:14, :20] = np.random.default_rng(0).random((14, 20)) > 0.5  # pixels that touch at corners alone
    assert len(trace(noise)) < MOST
    np.testing.assert_array_equal(inside(outline(noise, 0)), noise)
    np.testing.assert_array_equal(inside(outline(np.ones(SIZE, bool))), np.ones(SIZE, bool))


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of pycocotools
def test_coco_masks_are_read_by_pycocotools(frames: np.ndarray, tmp_path: Path) -> None:
    coco = pytest.importorskip("pycocotools.coco")
    given = Masks({0: frames[0]})
    found = coco.COCO(written("coco", given, frames, tmp_path) / "coco.json")
    assert [image["file_name"] for image in found.loadImgs(found.getImgIds())] == [
        f"img{number}.jpg" for number in (1, 2, 3, 4)
    ]
    assert [one["name"] for one in found.loadCats(found.getCatIds())] == ["object 2", "object 9"]
    for index, ids in enumerate(frames):
        seen = found.loadAnns(found.getAnnIds(imgIds=index + 1, iscrowd=False))
        assert [one["category_id"] for one in seen] == sorted(set(np.unique(ids)) - {0})
        for one in seen:
            mask = found.annToMask(one)
            np.testing.assert_array_equal(mask, ids == one["category_id"])
            assert (one["area"], one["iscrowd"]) == (mask.sum(), 0)
            x, y, width, height = one["bbox"]
            assert mask[y : y + height, x : x + width].sum() == mask.sum()
    full = np.ones((1, *SIZE), np.uint8)  # begins with the object
    found = coco.COCO(written("coco", Masks({0: full[0]}), full, tmp_path / "full") / "coco.json")
    np.testing.assert_array_equal(found.annToMask(found.loadAnns([1])[0]), full[0])


def test_yolo_polygons_filled_again_are_the_masks(frames: np.ndarray, tmp_path: Path) -> None:
    out = written("yolo", Masks({0: frames[0]}), frames, tmp_path)
    names = (out / "classes.txt").read_text().splitlines()
    for index, ids in enumerate(frames):
        lines = (out / "labels" / f"img{index + 1}.txt").read_text().splitlines()
        assert len(lines) == len(np.unique(ids)) - 1  # one for each object
        for line in lines:
            number, *places = line.split()
            polygon = np.array(places, dtype=np.float64).reshape(-1, 2)
            assert 0 <= polygon.min() <= polygon.max() <= 1
            label = int(names[int(number)].split()[1])
            assert overlap(filled(polygon * SIZE[::-1]), ids == label) > 0.95


def test_cvat_tracks_hold_a_polygon_per_frame_and_say_where_an_object_is_gone(
    frames: np.ndarray, tmp_path: Path
) -> None:
    out = written("cvat", Masks({0: frames[0]}), frames, tmp_path)
    root = ElementTree.parse(out / "annotations.xml").getroot()
    assert root.findtext("version") == "1.1"
    assert root.findtext("meta/task/size") == "4"
    assert [one.text for one in root.findall("meta/task/labels/label/name")] == ["object 2", "object 9"]
    tracks = root.findall("track")
    assert [track.get("label") for track in tracks] == ["object 2", "object 9"]
    assert [shape.get("outside") for shape in tracks[1]] == ["0", "0", "1", "0"]
    for track, label in zip(tracks, (2, 9), strict=True):
        for shape in track.findall("polygon[@outside='0']"):
            places = [pair.split(",") for pair in shape.attrib["points"].split(";")]
            mask = frames[int(shape.attrib["frame"])] == label
            assert overlap(filled(np.array(places, dtype=np.float64)), mask) > 0.95


def test_objects_with_a_name_are_called_by_it_in_every_format_that_has_classes(frames: np.ndarray) -> None:
    named = about(Masks({0: frames[0]}))._replace(called={9: "dog & ball"})
    for form, said in (
        ("coco", '"dog & ball"'),
        ("yolo", "object 2\ndog & ball"),
        ("cvat", "dog &amp; ball"),
    ):
        text = b"".join(part for _, part in choose_format(form, named.given).write(named, enumerate(frames)))
        assert said in text.decode()
        assert "object 9" not in text.decode()


@pytest.fixture(scope="module")
def points() -> tuple[Points, np.ndarray]:
    """Three points; the second is lost in frame 1, and the third has a name that needs quotes."""
    names = ("head", "left, paw", 'tail "<&\x07')
    values = np.random.default_rng(1).uniform(1, 50, (3, 3, 3))
    values[..., 2] /= 50
    values[1, 1, :2] = math.nan
    first = {name: (x, y) for name, (x, y, _) in zip(names, values[0].tolist(), strict=True)}
    return Points(names, {0: first}), values


def test_deeplabcut_table_holds_every_point_with_its_likelihood(
    points: tuple[Points, np.ndarray], tmp_path: Path
) -> None:
    given, values = points
    with (written("dlc", given, values, tmp_path) / "dlc.csv").open(newline="") as file:
        scorer, parts, coordinates, *rows = csv.reader(file)
    assert scorer == ["scorer"] + 9 * ["tcore"]
    assert parts == ["bodyparts", *(name for name in given.names for _ in range(3))]
    assert coordinates == ["coords", *3 * ["x", "y", "likelihood"]]
    assert [row[0] for row in rows] == ["0", "1", "2"]
    found = np.array([[float(cell or "nan") for cell in row[1:]] for row in rows]).reshape(3, 3, 3)
    np.testing.assert_allclose(found, values, atol=1e-3)


def test_points_are_keypoints_in_coco_and_tracks_in_cvat(
    points: tuple[Points, np.ndarray], tmp_path: Path
) -> None:
    given, values = points
    found = json.loads((written("coco", given, values, tmp_path) / "coco.json").read_text())
    assert found["categories"][0]["keypoints"] == list(given.names)
    keypoints = np.array([one["keypoints"] for one in found["annotations"]]).reshape(3, 3, 3)
    assert (keypoints[..., 2] == 2 * ~np.isnan(values[..., 0])).all()
    np.testing.assert_allclose(keypoints[..., :2], np.nan_to_num(values[..., :2]), atol=6e-3)
    root = ElementTree.parse(written("cvat", given, values, tmp_path) / "annotations.xml").getroot()
    tracks = root.findall("track")
    assert [track.get("label") for track in tracks] == ["head", "left, paw", 'tail "<&?']
    assert [shape.get("outside") for shape in tracks[1].findall("points")] == ["0", "1", "0"]
    x, y = map(float, tracks[0][2].attrib["points"].split(","))
    np.testing.assert_allclose((x - 0.5, y - 0.5), values[2, 0, :2], atol=6e-3)


def test_formats_refuse_labels_that_they_cannot_hold(points: tuple[Points, np.ndarray]) -> None:
    masks = Masks({0: np.ones(SIZE, np.uint8)})
    for name in ("davis", "yolo"):
        with pytest.raises(InputError, match=f"{name}.*tracks, coco, cvat, dlc"):
            choose_format(name, points[0])
    with pytest.raises(InputError, match=r"dlc.*davis"):
        choose_format("dlc", masks)
    with pytest.raises(InputError, match="png"):
        choose_format("png", masks)
    assert (choose_format(None, masks), choose_format(None, points[0])) == (
        FORMATS["davis"],
        FORMATS["tracks"],
    )


def test_command_writes_a_format_beside_the_confidence_and_names_frames_by_their_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    video = render_video(0, 1, split="heldout", num_frames=3, size=64)
    clip = write_folder(tmp_path / "clip", video.frames)
    Image.fromarray(video.objects[0]).save(tmp_path / "first.png")
    (tmp_path / "p.csv").write_text("frame,name,x,y\n0,dot,20,20\n")
    command = ["propagate", "control:color", str(clip), "--no-overlay", "--labels"]
    masks, dot = [*command, str(tmp_path / "first.png")], [*command, str(tmp_path / "p.csv")]
    main([*masks, "--out", str(tmp_path / "a"), "--format", "coco"])
    main([*masks, "--out", str(tmp_path / "b")])
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [
        "coco.json",
        "confidence.csv",
        "propagation.json",
    ]
    coco = json.loads((tmp_path / "a" / "coco.json").read_text())
    assert [image["file_name"] for image in coco["images"]] == ["00000.png", "00001.png", "00002.png"]
    areas = {(one["image_id"], one["category_id"]): one["area"] for one in coco["annotations"]}
    for index in range(3):
        ids = read_ids(tmp_path / "b" / "masks" / f"{index:05d}.png")
        for label in np.unique(ids[ids > 0]).tolist():
            assert areas.pop((index + 1, label)) == (ids == label).sum()
    assert not areas
    capsys.readouterr()
    for wrong in ([*masks, "--format", "dlc"], [*dot, "--format", "yolo"]):
        with pytest.raises(SystemExit) as stop:
            main([*wrong, "--out", str(tmp_path / "c")])
        assert stop.value.code == 2
        assert wrong[-1] in capsys.readouterr().err
        assert not (tmp_path / "c").exists()
