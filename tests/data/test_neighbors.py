"""The search against a plain twin that holds the whole matrix, and the file of its result."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from safetensors.numpy import save_file
from torch import Tensor

from tcore.data.neighbors import (
    COPY,
    beside,
    best_of_rows,
    check_neighbors,
    find_neighbors,
    load_neighbors,
    search,
)
from tcore.errors import InputError
from tests.data.photos import ring


def features(n: int, dim: int = 16, seed: int = 0) -> Float[Tensor, "n d"]:
    return F.normalize(torch.randn(n, dim, generator=torch.Generator().manual_seed(seed)), dim=1)


def plain(x: Float[Tensor, "n d"], k: int) -> tuple[Int64[Tensor, "n k"], Float[Tensor, "n k"]]:
    """Every pair at once, sorted; copies last."""
    cosines = (x.double() @ x.double().T).fill_diagonal_(-torch.inf)
    order = torch.where(cosines > COPY, cosines - 10, cosines).sort(dim=1, descending=True).indices[:, :k]
    return order, cosines.gather(1, order).float()


@pytest.mark.parametrize(("n", "budget"), [(6, 1), (65, 4096), (700, 100_000), (700, 2**28)])
def test_the_search_finds_what_the_whole_matrix_shows(n: int, budget: int) -> None:
    x = features(n)
    found = search(x, 5, budget=budget)
    places, cosines = plain(x, 5)
    assert torch.equal(found.indices, places)
    assert torch.allclose(found.cosines, cosines, atol=1e-6)
    assert not found.copies.any()


def test_groups_of_columns_lose_nothing() -> None:
    block = torch.randn(7, 64 * 9 + 13, generator=torch.Generator().manual_seed(1))
    # All the largest in one group, in the tail, and in as many groups as there are places.
    block[0, 64:70] += 10
    block[1, -3:] += 10
    block[2, ::64] += 10
    values, columns = best_of_rows(block, 5)
    expected = block.topk(5, dim=1)
    assert torch.equal(values, expected.values)
    assert torch.equal(columns, expected.indices)


@pytest.mark.parametrize("budget", [2000, 2**28])
def test_copies_of_an_image_come_after_all_others_and_are_counted(budget: int) -> None:
    x = features(60)
    x[7], x[40] = x[3], x[3]
    found = search(x, 5, budget=budget)
    assert not set(found.indices[3].tolist()) & {7, 40}
    assert found.cosines[3].max() < 0.999
    # By their cosines, because three copies are equally near to a fourth image.
    assert torch.allclose(found.cosines, plain(x, 5)[1], atol=1e-6)
    assert found.copies.nonzero().squeeze(1).tolist() == [3, 7, 40]
    assert found.copies[[3, 7, 40]].tolist() == [2, 2, 2]


def test_copies_are_offered_where_nothing_else_is_there() -> None:
    x = features(4)
    x[1], x[2] = x[0], x[0]
    found = search(x, 3)
    assert found.indices[0].tolist()[0] == 3
    assert set(found.indices[0].tolist()) == {1, 2, 3}
    assert found.cosines[0, 1:].tolist() == pytest.approx([1.0, 1.0], abs=1e-6)


@pytest.mark.parametrize("k", [0, 6])
def test_more_neighbors_than_others_are_refused(k: int) -> None:
    with pytest.raises(InputError, match=f"k={k}: .* 6 images.*--k"):
        search(features(6), k)


def test_a_file_comes_back_as_it_was(tmp_path: Path) -> None:
    made = ring(9, 4, "abc")
    made.save(tmp_path / "x.safetensors")
    loaded = load_neighbors(tmp_path / "x.safetensors")
    assert np.array_equal(loaded.indices, made.indices)
    assert np.array_equal(loaded.cosines, made.cosines)
    assert (loaded.encoder, loaded.encoder_fingerprint, loaded.store_fingerprint) == (
        "a ring",
        "0" * 16,
        "abc",
    )
    assert loaded.fingerprint() == made.fingerprint() != ring(9, 4, "abc", first=2).fingerprint()


def test_neighbors_lie_inside_a_packed_store_or_beside_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    with pytest.raises(InputError, match=r"no neighbors of .*photos.*tcore neighbors .*photos --encoder"):
        find_neighbors(folder)
    ring(9, 4, "abc").save(beside(folder))
    assert find_neighbors(f"{folder}/") == tmp_path / "photos.neighbors.safetensors"
    ring(9, 4, "abc").save(folder / "neighbors.safetensors")
    assert find_neighbors(folder) == folder / "neighbors.safetensors"
    assert beside(folder / "..").name == f"{tmp_path.name}.neighbors.safetensors"


def test_neighbors_of_other_images_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"x lists neighbors of other images \(fingerprint abc, the store has"
    ):
        check_neighbors(ring(9, 4, "abc"), Path("x"), 9, "abd")
    with pytest.raises(InputError, match="do not fit 8 images"):
        check_neighbors(ring(9, 4, "abc"), Path("x"), 8, "abc")


def test_files_of_other_kinds_are_refused_by_name(tmp_path: Path) -> None:
    save_file({"a": np.zeros(3)}, tmp_path / "other.safetensors")
    (tmp_path / "broken.safetensors").write_bytes(b"no safetensors")
    for name, says in (("other", "holds no neighbors"), ("broken", "cannot read"), ("gone", "cannot read")):
        with pytest.raises(InputError, match=f"{says}.*") as error:
            load_neighbors(tmp_path / f"{name}.safetensors")
        assert name in str(error.value)
