"""Training on images: first without the auxiliary branch, then with neighbors."""

import json
from pathlib import Path
from typing import Any

import pytest

from tcore import Config, InputError, load_encoder, train
from tcore.data.neighbors import beside
from tcore.data.stores import open_images
from tcore.evaluation.neighbors import find_all
from tcore.training.loop import open_source
from tests.data.photos import ring, save_images
from tests.runs import assert_resumes_exactly, metrics
from tests.tiny import settings_of, tiny

NUMBER = 12


def settings(**changes: Any) -> Config:
    return tiny(source="images", auxiliary="past", runtime__workers=0, **changes)


def losses(run: Path) -> list[float]:
    return [line["total"] for line in metrics(run)]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = save_images(tmp_path / "photos", NUMBER)
    ring(NUMBER, 5, open_images(folder).fingerprint()).save(beside(folder))
    return folder


def test_two_stages_from_images_to_an_encoder(tmp_path: Path) -> None:
    folder = save_images(tmp_path / "photos", NUMBER)
    first = train(
        tiny(source="images", auxiliary="none", runtime__workers=0), tmp_path / "A", folder, quiet=True
    )
    find_all(load_encoder(first), folder)
    second = train(settings(), tmp_path / "B", folder, quiet=True)
    line = metrics(second)[-1]
    assert "past_teacher" in line
    assert not {"future_teacher", "past_future", "patch_teacher"} & line.keys()
    weights = settings_of(settings()).loss.weights()
    assert weights["past_teacher"] == 0.8
    expected = line["dino"] + 0.8 * line["past_teacher"] + 0.1 * line["koleo"]
    assert line["total"] == pytest.approx(expected, rel=1e-6)
    made_with = json.loads((second / "environment.json").read_text())
    assert str(first) in made_with["neighbors"]


def test_other_neighbors_change_the_loss_of_the_same_run(photos: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    ring(NUMBER, 5, open_images(photos).fingerprint(), first=6).save(other)
    runs = [
        train(settings(optim__steps=2), tmp_path / name, photos, neighbors=file, quiet=True)
        for name, file in (("a", None), ("b", beside(photos)), ("c", other))
    ]
    assert losses(runs[0]) == losses(runs[1]) != losses(runs[2])


def test_a_resumed_run_on_images_equals_an_uninterrupted_one(photos: Path, tmp_path: Path) -> None:
    assert_resumes_exactly(settings(optim__steps=4), tmp_path, photos)


def test_a_run_does_not_go_on_with_other_neighbors(photos: Path, tmp_path: Path) -> None:
    run = train(settings(optim__steps=2), tmp_path / "run", photos, quiet=True)
    ring(NUMBER, 5, open_images(photos).fingerprint(), first=2).save(beside(photos))
    with pytest.raises(InputError, match="other videos, images or neighbors"):
        train(settings(optim__steps=2), run, photos, quiet=True)


def test_neighbors_that_are_not_there_or_of_other_images_are_said(tmp_path: Path) -> None:
    folder = save_images(tmp_path / "photos", NUMBER)
    with pytest.raises(InputError, match=r"run tcore neighbors .*photos --encoder"):
        open_source(settings(), folder)
    ring(NUMBER, 5, "other").save(beside(folder))
    with pytest.raises(InputError, match="neighbors of other images"):
        open_source(settings(), folder)
    with pytest.raises(InputError, match="--neighbors x has no effect with source=images"):
        open_source(tiny(source="images", auxiliary="none"), folder, "x")
    with pytest.raises(InputError, match="--neighbors x has no effect with source=videos"):
        open_source(tiny(), folder, "x")
    with pytest.raises(InputError, match="source=images needs --frames IMAGES"):
        open_source(settings(), None)
