"""The picture of images and their neighbors, and the commands around it."""

from pathlib import Path

import numpy as np
import pytest
from jaxtyping import UInt8
from PIL import Image

from tcore.cli.main import main
from tcore.data.neighbors import beside, load_neighbors
from tcore.data.stores import open_images
from tcore.errors import InputError
from tcore.show.neighbors import APART, CAPTION, GAP, SIDE, neighbors_picture, thumbnail
from tests.data.photos import ring, save_images


def picture(path: Path) -> UInt8[np.ndarray, "height width 3"]:
    with Image.open(path) as image:
        assert image.format == "PNG"
        return np.asarray(image)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = save_images(tmp_path / "photos", 9)
    ring(9, 4, open_images(folder).fingerprint()).save(beside(folder))
    return folder


def test_each_image_stands_beside_its_neighbors(photos: Path, tmp_path: Path) -> None:
    neighbors_picture(photos, tmp_path / "n.png", number=3, seed=1)
    sheet = picture(tmp_path / "n.png")
    assert sheet.shape == (CAPTION + 3 * (SIDE + CAPTION + GAP), SIDE + APART + 4 * (SIDE + GAP) + GAP, 3)
    store = open_images(photos)
    row, shown = CAPTION + SIDE + CAPTION + GAP, np.random.default_rng(1).choice(9, 3, replace=False)[1]
    for column, image in enumerate([shown, (shown + 1) % 9, (shown + 2) % 9]):
        left = GAP + (column > 0) * APART + column * SIDE + max(0, column - 1) * GAP
        expected = np.asarray(thumbnail(store.read(int(image), [0])[0]))
        assert np.array_equal(sheet[row : row + SIDE, left : left + SIDE], expected)
    caption = sheet[row + SIDE : row + SIDE + CAPTION, GAP + SIDE + APART :]
    assert caption.min() < 100, "no cosine is written under a neighbor"


def test_more_rows_than_images_show_all_images(photos: Path, tmp_path: Path) -> None:
    neighbors_picture(photos, tmp_path / "n.png", number=50)
    assert picture(tmp_path / "n.png").shape[0] == CAPTION + 9 * (SIDE + CAPTION + GAP)
    with pytest.raises(InputError, match="images=0: need 1 or more"):
        neighbors_picture(photos, tmp_path / "n.png", number=0)


def test_the_commands_find_neighbors_and_draw_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_images(tmp_path / "photos", 7)
    main("neighbors photos --encoder random:vitti16 --k 2".split())
    assert capsys.readouterr().out == f"neighbors: {tmp_path}/photos.neighbors.safetensors\n"
    assert load_neighbors(tmp_path / "photos.neighbors.safetensors").k == 2
    main("figure neighbors photos --out n.png --images 2".split())
    assert capsys.readouterr().out == "picture: n.png\n"
    assert picture(tmp_path / "n.png").shape[0] == CAPTION + 2 * (SIDE + CAPTION + GAP)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("neighbors", "needs images and an encoder"),
        ("neighbors photos --encoder random:vitti16 --kk 3", "unknown flag --kk; did you mean --k?"),
        ("figure", None),
        ("figure neighbors", "no figure 'neighbors'; did you mean neighbors?"),
        ("figure neighbors photos", "needs a store and a file"),
        ("train vits16-imagenet", "needs --frames IMAGES, a folder of images"),
        ("train quickstart --source images", "auxiliary=both: with source=images"),
    ],
)
def test_what_is_missing_is_said_in_a_line(
    arguments: str, says: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    if says is None:
        main(arguments.split())
        assert "neighbors, dynamics" in capsys.readouterr().out
        return
    with pytest.raises(SystemExit) as stop:
        main(arguments.split())
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1
