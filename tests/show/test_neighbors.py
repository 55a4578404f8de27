"""The figure of images and their neighbors, and the commands around it."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tcore.cli.main import main
from tcore.data.neighbors import beside, load_neighbors
from tcore.data.stores import open_images
from tcore.show.samples import neighbors_figure, thumbnail
from tests.data.photos import ring, save_images


def test_each_image_stands_beside_its_neighbors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_images(tmp_path / "photos", 9)
    store = open_images(folder)
    ring(9, 4, store.fingerprint()).save(beside(folder))
    drawn: list[Any] = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, out, **rest: drawn.append(figure))
    monkeypatch.setattr("tcore.show.plotting.atomic", lambda out: nullcontext(out))
    neighbors_figure(folder, tmp_path / "n.png", number=3, seed=1)
    neighbors_figure(folder, tmp_path / "n.png", number=50)
    assert [len(figure.axes) for figure in drawn] == [3 * 5, 9 * 5]
    image = int(np.random.default_rng(1).choice(9, 3, replace=False)[1])
    for column in range(5):
        axes = drawn[0].axes[5 + column]
        expected = thumbnail(store.read((image + column) % 9, [0])[0])
        assert np.array_equal(axes.get_images()[0].get_array(), expected)
        assert axes.get_title(loc="left").startswith("0." if column else "image")


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
    assert (tmp_path / "n.png").stat().st_size > 5000
