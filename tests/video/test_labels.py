import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw

from tcore.errors import InputError
from tcore.evaluation.masks import davis_palette
from tcore.video.labels import Masks, Points, read_labels

RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)


def save(path: Path, pixels: np.ndarray, mode: str = "") -> Path:
    image = Image.fromarray(pixels)
    if mode == "P":
        image.putpalette(davis_palette())
    image.save(path)
    return path


def masks(*paths: Path, **stems: int) -> tuple[dict[int, np.ndarray], list[str]]:
    said: list[str] = []
    found = read_labels(paths, stems, said.append)
    assert isinstance(found, Masks)
    return found.frames, said


def squares() -> np.ndarray:
    ids = np.zeros((40, 50), dtype=np.uint8)
    ids[5:15, 5:20] = 1
    ids[20:35, 25:45] = 2
    return ids


def painted(scale: int, colors: list[tuple[int, int, int]], ground: tuple[int, int, int]) -> Image.Image:
    """A disc and a triangle that overlap, `scale` times as large as 80x60."""
    image = Image.new("RGB", (80 * scale, 60 * scale), ground)
    draw = ImageDraw.Draw(image)
    draw.ellipse([scale * v for v in (10, 10, 45, 45)], fill=colors[0])
    draw.polygon([(scale * x, scale * y) for x, y in ((40, 5), (75, 30), (35, 55))], fill=colors[1])
    return image


@pytest.mark.parametrize("mode", ["P", "L", "1", "RGB", "16 bits", "palette colors", "transparent"])
def test_ids_are_read_from_every_kind_of_image(mode: str, tmp_path: Path) -> None:
    ids = squares() > 0 if mode in ("1", "transparent") else 3 * squares()
    pixels: np.ndarray = ids
    if mode == "RGB":
        pixels = np.repeat(ids[..., None], 3, axis=2)
    elif mode == "16 bits":
        pixels = ids.astype(np.uint16)
    elif mode == "palette colors":
        pixels = np.array(davis_palette(), dtype=np.uint8).reshape(256, 3)[ids]
    elif mode == "transparent":
        pixels = np.where(ids[..., None], (200, 10, 200, 255), (200, 10, 200, 0)).astype(np.uint8)
    frames, said = masks(save(tmp_path / "first.png", pixels, mode))
    np.testing.assert_array_equal(frames[0], ids)
    assert bool(said) == (mode in ("palette colors", "transparent"))  # how colors were numbered


@pytest.mark.parametrize(
    ("colors", "ground"),
    [
        ([RED, GREEN], (0, 0, 0)),
        ([(255, 255, 0), (128, 0, 64)], (255, 255, 255)),
        ([BLUE, (40, 200, 120)], (90, 160, 220)),
    ],
)
def test_anti_aliased_edges_are_repaired_and_said(
    colors: list[tuple[int, int, int]], ground: tuple[int, int, int], tmp_path: Path
) -> None:
    smooth = painted(4, colors, ground).resize((80, 60), Image.Resampling.BOX)
    assert len(np.unique(np.asarray(smooth).reshape(-1, 3), axis=0)) > 20
    smooth.save(tmp_path / "first.png")
    frames, said = masks(tmp_path / "first.png")
    hard = np.asarray(painted(4, colors, ground))[2::4, 2::4]
    expected = np.zeros((60, 80), dtype=np.uint8)
    for number, color in enumerate(sorted(colors), start=1):
        expected[(hard == color).all(axis=2)] = number
    assert set(np.unique(frames[0])) == {0, 1, 2}
    assert (frames[0] != expected).mean() < 0.02  # only pixels that an edge cuts in halves may differ
    assert any("blended edge colors" in line and "3 main colors" in line for line in said)


@pytest.mark.parametrize("filter_", ["BILINEAR", "BICUBIC", "LANCZOS"])
@pytest.mark.parametrize("scale", [0.8, 2.5])
def test_masks_that_were_resized_with_any_filter_are_repaired(
    filter_: str, scale: float, tmp_path: Path
) -> None:
    size = (int(160 * scale), int(120 * scale))
    original = painted(2, [(220, 20, 60), (30, 144, 255)], (0, 0, 0))
    original.resize(size, Image.Resampling[filter_]).save(tmp_path / "first.png")
    frames, _ = masks(tmp_path / "first.png")
    assert set(np.unique(frames[0])) == {0, 1, 2}
    hard = np.asarray(original.resize(size, Image.Resampling.NEAREST))
    expected = np.where(hard[..., 0] == 220, 2, np.where(hard[..., 2] == 255, 1, 0))
    assert (frames[0] != expected).mean() < 0.02


def test_ids_in_one_channel_are_not_taken_for_noise(tmp_path: Path) -> None:
    pixels = np.zeros((200, 200, 3), dtype=np.uint8)
    pixels[5:9, 5:9, 0] = 1
    pixels[20:24, 20:24, 0] = 2
    pixels[50:52, 5:20, 0] = 3
    pixels[60, 60, 0] = 4
    pixels[100:150, 100:150, 0] = 40
    frames, _ = masks(save(tmp_path / "first.png", pixels))
    expected = np.where(pixels[..., 0] == 40, 5, pixels[..., 0])  # numbered in their order
    np.testing.assert_array_equal(frames[0], expected)


def test_thin_and_flat_objects_are_not_taken_for_edges(tmp_path: Path) -> None:
    pixels = np.zeros((60, 80, 3), dtype=np.uint8)
    pixels[5:25, 5:25] = (255, 0, 0)
    pixels[30:50, 30:50] = (128, 0, 0)  # half way from black to red, but flat
    pixels[55, 5:75] = (100, 0, 0)  # as well, and thin, but nowhere between the two
    pixels[2, 5:75] = (0, 0, 255)
    frames, said = masks(save(tmp_path / "first.png", pixels))
    assert len(np.unique(frames[0])) == 5
    assert not any("blended" in line for line in said)


def test_an_edge_never_becomes_a_third_object_elsewhere(tmp_path: Path) -> None:
    pixels = np.zeros((60, 80, 3), dtype=np.uint8)
    pixels[5:25, 5:25] = (255, 255, 0)
    pixels[4, 5:25] = (128, 128, 0)
    pixels[40:55, 50:70] = (120, 120, 20)  # looks like the edge, but is far from it
    frames, _ = masks(save(tmp_path / "first.png", pixels))
    third = frames[0][45, 60]
    assert (frames[0] == third).sum() == 15 * 20


def test_smooth_white_on_black_is_one_object(tmp_path: Path) -> None:
    smooth = painted(4, [(255, 255, 255)] * 2, (0, 0, 0)).resize((80, 60), Image.Resampling.BOX).convert("L")
    smooth.save(tmp_path / "first.png")
    frames, said = masks(tmp_path / "first.png")
    np.testing.assert_array_equal(np.unique(frames[0]), [0, 1])
    assert (frames[0] != (np.asarray(smooth) >= 128)).mean() < 0.01
    assert any("blended" in line for line in said)


def test_255_is_the_one_object_or_a_void(tmp_path: Path) -> None:
    frames, said = masks(save(tmp_path / "first.png", np.where(squares() > 0, 255, 0).astype(np.uint8)))
    np.testing.assert_array_equal(frames[0], squares() > 0)
    assert "255 is taken as object 1" in said[0]
    void = squares()
    void[0:3] = 255
    frames, said = masks(save(tmp_path / "first.png", void, "P"))
    np.testing.assert_array_equal(frames[0], squares())
    assert "150 pixels of id 255" in said[0]


def test_further_masks_are_placed_by_name_or_number_and_share_their_colors(tmp_path: Path) -> None:
    first = np.asarray(painted(1, [BLUE, GREEN], (0, 0, 0)))
    later = np.asarray(painted(1, [RED, GREEN], (0, 0, 0)))
    paths = [
        save(tmp_path / "anything.png", first),
        save(tmp_path / "00012.png", later),
        save(tmp_path / "mask_7.png", first),
        save(tmp_path / "00020.png", first),
    ]
    frames, said = masks(*paths, **{"00020": 19})
    assert list(frames) == [0, 7, 12, 19]
    blue, green = frames[0][27, 20], frames[0][30, 60]
    assert frames[12][30, 60] == green
    assert len({0, blue, green, frames[12][27, 20]}) == 4
    assert f"#00ff00 is {green}" in said[-1]


def test_bad_masks_are_named(tmp_path: Path) -> None:
    first = save(tmp_path / "first.png", squares())
    noise = np.random.default_rng(0).integers(0, 255, (40, 50, 3), dtype=np.uint8)
    (tmp_path / "damaged.png").write_bytes(first.read_bytes()[:60])
    (tmp_path / "points.csv").write_text("frame,name,x,y\n0,a,1,2\n")
    for paths, named in (
        ([first, save(tmp_path / "other.png", squares())], r"other\.png"),
        ([first, save(tmp_path / "00000.png", squares())], r"both for frame 0"),
        ([tmp_path / "gone.png"], r"gone\.png"),
        ([tmp_path / "first.jpg"], r"first\.jpg"),
        ([], r"none"),
        ([tmp_path / "damaged.png"], r"damaged\.png"),
        ([save(tmp_path / "noise.png", noise)], r"2000 colors"),
        ([first, tmp_path / "points.csv"], r"points\.csv"),
    ):
        with pytest.raises(InputError, match=named):
            masks(*paths)


def test_points_are_read_from_csv_and_json_alike(tmp_path: Path) -> None:
    rows = [(0, "left hand", 3.5, 4.0), (0, "head", 10.0, 1.0), (6, "head", 12.0, 2.0)]
    text = "\ufeffFrame, name,x,y,confidence\r\n" + "".join(
        f"{f},{n},{x},{y},1\r\n\r\n" for f, n, x, y in rows
    )
    (tmp_path / "points.csv").write_bytes((text + "6,left hand,,,0\r\n").encode())
    listed = [{"frame": f, "name": n, "x": x, "y": y} for f, n, x, y in rows]
    listed.append({"frame": 6, "name": "left hand", "x": None, "y": None})
    (tmp_path / "points.json").write_text(json.dumps(listed))
    for name in ("points.csv", "points.json"):
        found = read_labels([tmp_path / name], {})
        assert isinstance(found, Points)
        assert found.names == ("left hand", "head")
        assert found.frames[0] == {"left hand": (3.5, 4.0), "head": (10.0, 1.0)}
        assert found.frames[6]["head"] == (12.0, 2.0)
        assert np.isnan(found.frames[6]["left hand"]).all()


CSV, JSON = "frame,name,x,y\n", '[{"frame": 0, "name": %s, "x": %s, "y": 1}]'


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "frame,name,x\n0,a,1\n", r"line 2: .*need a frame"),
        ("a.csv", CSV + "0,a,1,2\n0,b,1\n", r"line 3: 3 cells"),
        ("a.csv", CSV + "0,a,one,2\n", r"line 2: .*'one'"),
        ("a.csv", CSV + "1.5,a,1,2\n", r"line 2: .*'1\.5'"),
        ("a.csv", CSV + "0,,1,2\n", r"line 2: .*'name': ''"),
        ("a.csv", CSV + "0,a,1,\n", r"line 2: .*'y': ''"),
        ("a.csv", CSV + "0,a,1,2\n0,a,1,3\n", r"line 3: .*'a' of frame 0"),
        ("a.csv", CSV + '0,"a,1,2\n', r"a\.csv"),
        ("a.csv", "", r"a\.csv hold no points"),
        ("a.json", '[{"frame": 0,\n "name": }]', r"a\.json: .*line 2"),
        ("a.json", "[3]", r"entry 1: 3 is not"),
        ("a.json", '[{"frame": 0, "name": "a", "x": 1}]', r"entry 1: .*need a frame"),
        ("a.json", JSON % ('"a"', "true"), r"entry 1: .*True"),
        ("a.json", JSON % ('"a"', "[1]"), r"entry 1: .*\[1\]"),
        ("a.json", "[" * 100_000, r"a\.json"),
        ("a.csv", CSV + "0,F\udcfce,1,2\n", r"a\.csv"),  # not UTF-8
    ],
)
def test_malformed_tables_are_named_with_the_line(name: str, text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(InputError, match=message) as caught:
        read_labels([tmp_path / name], {})
    assert "\n" not in str(caught.value)
