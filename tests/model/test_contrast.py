import pytest
import torch
import torch.nn.functional as F

from tcore.model.contrast import BatchNorm, Projector, contrast_rows, object_contrast_rows
from tcore.model.losses import Peers


def test_rows_that_do_not_count_take_no_part_in_the_norm() -> None:
    generator = torch.Generator().manual_seed(1)
    x, rest = torch.randn(1, 6, 3, generator=generator), 100 * torch.randn(1, 4, 3, generator=generator)
    counted = torch.arange(10)[None] < 6
    found = BatchNorm(3)(torch.cat([x, rest], dim=1), counted)
    torch.testing.assert_close(found[:, :6], BatchNorm(3)(x))


def test_norm_over_two_processes_is_that_of_all_rows_even_where_one_counts_fewer() -> None:
    x = torch.randn(1, 8, 3, generator=torch.Generator().manual_seed(2))
    counted = torch.tensor([[True] * 4 + [True, False, False, False]])
    whole = BatchNorm(3)(x, counted)
    halves = list(zip(x.split(4, dim=1), counted.split(4, dim=1), strict=True))
    sent: list[torch.Tensor] = []

    def note(rows: torch.Tensor) -> torch.Tensor:
        sent.append(rows)
        return rows

    for half in halves:
        BatchNorm(3)(*half, Peers(rows=note, size=2))
    for rank, half in enumerate(halves):
        found = BatchNorm(3)(*half, Peers(rank, rows=lambda rows: torch.cat(sent), size=2))
        torch.testing.assert_close(found, whole[:, 4 * rank : 4 * rank + 4])


def test_projector_ends_with_the_norm_that_is_asked_for() -> None:
    x = torch.randn(2, 9, 4, generator=torch.Generator().manual_seed(3))
    plain = Projector(dim=4, hidden=8, out=6, layers=2, last_norm="plain")
    found = plain(x)
    torch.testing.assert_close(found.mean(dim=1), torch.zeros(2, 6), atol=1e-6, rtol=0)
    ends = {"none": ["3.weight"], "plain": ["3.weight"], "scale": ["3.weight", "4.weight"]}
    for norm, names in ends.items():
        projector = Projector(dim=4, hidden=8, out=6, layers=2, last_norm=norm)  # type: ignore[arg-type]
        assert [name for name, _ in projector.named_parameters() if name[0] in "34"] == names


@pytest.mark.parametrize("both_views", [False, True])
def test_contrast_of_a_share_of_the_samples_is_that_share_of_the_whole(both_views: bool) -> None:
    generator = torch.Generator().manual_seed(4)
    queries, keys = F.normalize(torch.randn(2, 2, 6, 5, generator=generator), dim=-1)
    whole = contrast_rows(queries, keys, 0.2, both_views=both_views)
    second = contrast_rows(queries[:, 3:], keys, 0.2, both_views=both_views, first=3)
    torch.testing.assert_close(second, whole[:, 3:])


def test_contrast_is_the_log_of_the_choices_where_all_are_alike() -> None:
    same = F.normalize(torch.ones(2, 4, 3), dim=-1)
    for both_views, choices in ((False, 4), (True, 7)):
        rows = contrast_rows(same, same, 0.1, both_views=both_views)
        torch.testing.assert_close(rows, torch.tensor(float(choices)).log().expand(2, 4))


def test_regions_of_negative_id_take_no_part() -> None:
    generator = torch.Generator().manual_seed(5)
    queries, keys = F.normalize(torch.randn(2, 2, 3, 2, 4, generator=generator), dim=-1)
    ids = torch.arange(2).expand(2, 3, 2).clone()
    ids[:, 1] = -1  # as if the middle image were not there
    rows = object_contrast_rows(queries, keys, ids, ids, 0.1)
    without = object_contrast_rows(
        queries[:, ::2], keys[:, ::2], ids[:, ::2].contiguous(), ids[:, ::2].contiguous(), 0.1
    )
    torch.testing.assert_close(rows[:, ::2], without)
    assert not rows[:, 1].any()
    share = object_contrast_rows(queries[:, 2:], keys, ids[:, 2:], ids, 0.1, first=2)
    torch.testing.assert_close(share, rows[:, 2:])


def test_one_region_an_image_is_contrast_of_both_views() -> None:
    generator = torch.Generator().manual_seed(6)
    queries, keys = F.normalize(torch.randn(2, 2, 5, 4, generator=generator), dim=-1)
    ids = torch.zeros(2, 5, 1, dtype=torch.long)
    rows = object_contrast_rows(queries[:, :, None], keys[:, :, None], ids, ids, 0.3)
    torch.testing.assert_close(rows[..., 0], contrast_rows(queries, keys, 0.3, both_views=True))
