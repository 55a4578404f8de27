"""Features of images, and the neighbors that they find."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from tcore.data.neighbors import load_neighbors, search
from tcore.data.render import normalize
from tcore.data.stores import open_images
from tcore.errors import InputError
from tcore.evaluation import neighbors
from tcore.evaluation.encoder import Adapted, Encoder
from tcore.evaluation.neighbors import center_crop, find_all, image_features, trained_size
from tcore.text import Progress
from tests.data.painted import Painted
from tests.data.photos import save_images
from tests.evaluation.networks import network


def tiny_encoder(seed: int = 0) -> Encoder:
    vit = network(depth=1, image_size=32)
    vit.cls_token.data += seed
    return Encoder(vit, f"tiny-{seed}")


def assert_same(one: Path, other: Path) -> None:
    a, b = load_neighbors(one), load_neighbors(other)
    assert np.array_equal(a.indices, b.indices)
    assert np.array_equal(a.cosines, b.cosines)


def test_the_feature_is_the_class_token_and_normalized() -> None:
    encoder = tiny_encoder()
    assert trained_size(encoder) == 32
    images = torch.randint(0, 255, (3, 32, 32, 3), dtype=torch.uint8)
    expected = encoder.backbone(normalize(images.permute(0, 3, 1, 2).float() / 255)).frame
    found = image_features(encoder, images)
    assert torch.allclose(found, expected / expected.norm(dim=1, keepdim=True), atol=1e-6)


def test_the_feature_of_a_foreign_model_is_the_mean_of_its_patches() -> None:
    patches = torch.randn(2, 4, 5)

    def read(images: Tensor) -> Tensor:
        return torch.cat([torch.full((2, 1, 5), 1e3), patches], dim=1)

    encoder = Encoder(Adapted(nn.Linear(1, 1), read, patch_size=14, num_prefix=1), "foreign")
    assert trained_size(encoder) == 224
    mean = patches.mean(dim=1)
    found = image_features(encoder, torch.zeros(2, 28, 28, 3, dtype=torch.uint8))
    assert torch.allclose(found, mean / mean.norm(dim=1, keepdim=True), atol=1e-6)


@pytest.mark.parametrize("shape", [(256, 256), (256, 400), (400, 256)])
def test_the_crop_is_the_middle_of_a_short_side_of_256(shape: tuple[int, int]) -> None:
    image = np.random.default_rng(0).integers(0, 255, (*shape, 3), dtype=np.uint8)
    top, left = (shape[0] - 224) // 2, (shape[1] - 224) // 2
    assert np.array_equal(center_crop(image, 224), image[top : top + 224, left : left + 224])


def test_the_file_lists_the_nearest_by_the_encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, encoder = save_images(tmp_path / "photos", 11), tiny_encoder()
    before = sorted(folder.rglob("*"))
    path = find_all(encoder, folder, k=3)
    assert path == tmp_path / "photos.neighbors.safetensors"
    assert sorted(folder.rglob("*")) == before, "something was written into the images"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["photos", path.name], "the work file was left"
    found, store = load_neighbors(path), open_images(folder)
    assert (found.k, found.encoder, found.encoder_fingerprint) == (3, "tiny-0", encoder.fingerprint())
    assert found.store_fingerprint == store.fingerprint()
    crops = np.stack([center_crop(store.read(i, [0])[0], 32) for i in range(11)])
    expected = search(image_features(encoder, torch.from_numpy(crops)), 3)
    assert np.array_equal(found.indices, expected.indices.numpy())
    assert np.allclose(found.cosines, expected.cosines.numpy(), atol=1e-6)
    # A packed store takes the file inside.
    monkeypatch.setattr(neighbors, "open_images", lambda path: Painted([1] * 8, sizes=[(40, 40)]))
    assert find_all(encoder, tmp_path, k=2) == tmp_path / "neighbors.safetensors"


@pytest.mark.parametrize("done", [12, 18])
def test_interrupted_search_resumes_and_ends_the_same(
    done: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighbors, "BATCH", 4)
    folder, encoder = save_images(tmp_path / "photos", 18), tiny_encoder()
    whole = find_all(encoder, folder, out=tmp_path / "whole")

    def stop_at(line: str) -> None:
        if line.startswith(f"features of images {done}/18"):
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(neighbors, "Progress", partial(Progress, every=0))
        with pytest.raises(KeyboardInterrupt):
            find_all(encoder, folder, out=tmp_path / "again", say=stop_at)
    (work,) = tmp_path.glob("again.*.features")
    with work.open("ab") as file:
        file.write(b"half a row")  # what a kill in the middle of a write leaves
    said: list[str] = []
    again = find_all(encoder, folder, out=tmp_path / "again", say=said.append)
    assert said[0] == f"resuming after {done} of 18 images."
    assert_same(again, whole)
    assert not list(tmp_path.glob("*.features"))


def test_a_file_of_the_same_encoder_images_and_k_is_kept(tmp_path: Path) -> None:
    folder, said = save_images(tmp_path / "photos", 8), list[str]()
    path = find_all(tiny_encoder(), folder, k=2)
    written = path.stat().st_mtime_ns
    find_all(tiny_encoder(), folder, k=2, say=said.append)
    assert path.stat().st_mtime_ns == written
    assert "exists already" in said[-1]
    for encoder, k in ((tiny_encoder(), 3), (tiny_encoder(1), 3)):
        find_all(encoder, folder, k=k)
        found = load_neighbors(path)
        assert (found.k, found.encoder) == (k, encoder.name)


def test_places_and_images_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    folder = save_images(tmp_path / ("x" * 250), 8)  # no room for a longer name beside it
    with pytest.raises(InputError, match=r"cannot write .* give --out FILE.* --neighbors FILE"):
        find_all(tiny_encoder(), folder)
    assert find_all(tiny_encoder(), folder, out=tmp_path / "n").is_file()
    photo = folder / "class0" / "image0.png"
    before = photo.read_bytes()
    with pytest.raises(InputError, match=r"image0\.png exists and holds no neighbors"):
        find_all(tiny_encoder(), folder, out=photo)
    assert photo.read_bytes() == before
    (folder / "bad.jpg").write_bytes(b"no image")
    with pytest.raises(InputError, match=r"bad\.jpg"):
        find_all(tiny_encoder(), folder, out=tmp_path / "bad")


def test_copies_are_reported_and_an_encoder_that_distinguishes_nothing_is_warned_of(tmp_path: Path) -> None:
    folder, said, encoder = save_images(tmp_path / "photos", 8), list[str](), tiny_encoder()
    with Image.open(folder / "class0" / "image0.png") as image:
        image.save(folder / "copy.png")
    find_all(encoder, folder, say=said.append)
    assert any(line.startswith("2 of 9 images have copies") for line in said)
    for parameter in encoder.parameters():
        torch.nn.init.constant_(parameter, 0.1)
    encoder.backbone.patch_embed.proj.weight.zero_()  # type: ignore[union-attr,operator]
    find_all(encoder, folder, say=said.append)
    assert said[-1].startswith("warning: this encoder")
