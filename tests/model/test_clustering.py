import torch
import torch.nn.functional as F

from tcore.model.clustering import (
    Clustering,
    assign,
    carry_labels,
    cluster,
    draw_distinct,
    k_means,
    merge,
    patch_positions,
    pool,
    sample_noise,
)


def test_noise_is_a_function_of_the_samples_seed_and_uniform() -> None:
    seeds = torch.tensor([3, 2**32 - 1, 77])
    noise = sample_noise(seeds, 20_000)
    assert torch.equal(noise[1:], sample_noise(seeds[1:], 20_000))
    assert torch.equal(noise[:, :100], sample_noise(seeds, 100))
    assert noise.min() > 0
    assert noise.max() < 1
    shares = torch.histc(noise, 10, 0, 1) / noise.numel()
    torch.testing.assert_close(shares, torch.full((10,), 0.1), atol=5e-3, rtol=0)
    correlations = torch.corrcoef(torch.cat([noise, sample_noise(seeds + 1, 20_000), noise.roll(1, 1)]))
    assert (correlations - torch.eye(9)).abs().max() < 0.04


def test_distinct_places_are_drawn_by_their_probabilities() -> None:
    probability = torch.tensor([0.6, 0.3, 0.1]).expand(4000, 3)
    drawn = draw_distinct(probability, sample_noise(torch.arange(4000), 3), 2)
    assert (drawn[:, 0] != drawn[:, 1]).all()
    first = torch.bincount(drawn[:, 0], minlength=3) / 4000
    torch.testing.assert_close(first, probability[0], atol=0.03, rtol=0)
    after_first = drawn[drawn[:, 0] == 0, 1]  # 3 to 1 among what is left
    assert abs(float((after_first == 1).float().mean()) - 0.75) < 0.04


def test_positions_follow_box_and_flip() -> None:
    boxes = torch.tensor([[10.0, 20.0, 8.0, 4.0]] * 2)
    found = patch_positions(boxes, torch.tensor([False, True]), 2).view(2, 2, 2, 2)
    torch.testing.assert_close(found[0, 0, 0], torch.tensor([20.5, 11.5]))
    torch.testing.assert_close(found[0, 1, 1], torch.tensor([22.5, 15.5]))
    torch.testing.assert_close(found[1], found[0].flip(1))


def test_merge_adds_the_two_most_alike_and_puts_them_last() -> None:
    plan = torch.arange(8.0).view(1, 2, 4)
    centroids = F.normalize(torch.tensor([[[1.0, 0], [0, 1.0], [0.9, 0.1], [-1.0, 0]]]), dim=2)
    torch.testing.assert_close(merge(plan, centroids), torch.tensor([[[1.0, 3.0, 2.0], [5.0, 7.0, 10.0]]]))


def test_patches_of_two_things_end_in_two_regions_that_both_views_share() -> None:
    generator = torch.Generator().manual_seed(0)
    # The left half of either view shows one thing, the right half the other.
    thing = (torch.arange(16) % 4 >= 2).long()
    tokens = F.one_hot(thing, 8).float().repeat(2, 1)[None] + 0.02 * torch.randn(
        1, 32, 8, generator=generator
    )
    places = patch_positions(torch.tensor([[0.0, 0, 40, 40], [4, 0, 36, 40]]), torch.zeros(2).bool(), 4)
    marginal = torch.full((1, 32), 1 / 32)
    seeds = torch.tensor([[0, 5, 2, 19, 31]])
    plans = cluster(F.normalize(tokens, dim=2), places.flatten(0, 1)[None], marginal, seeds, Clustering())
    weights = assign(plans[-1:], 4)  # two centroids
    assert weights.shape == (2, 1, 16, 4)
    assert not weights[..., 2:].any()
    first, second = weights[:, 0].argmax(dim=2)
    assert torch.equal(first, second)
    assert len(first[thing == 0].unique()) == len(first[thing == 1].unique()) == 1


def test_range_of_costs_by_image_makes_an_image_independent_of_the_others() -> None:
    generator = torch.Generator().manual_seed(1)
    tokens = F.normalize(torch.randn(4, 18, 6, generator=generator), dim=2)
    places = 50 * torch.rand(4, 18, 2, generator=generator)
    marginal = torch.rand(4, 18, generator=generator).softmax(dim=1)
    seeds = torch.tensor([[0, 3, 9, 12, 17]] * 4)
    given = (tokens, places, marginal, seeds)
    whole = cluster(*given, Clustering(), images=2)  # two heads each
    half = cluster(tokens[2:], places[2:], marginal[2:], seeds[2:], Clustering(), images=1)
    for a, b in zip(whole, half, strict=True):
        torch.testing.assert_close(a.plan[2:], b.plan)
    coupled = cluster(*given, Clustering())
    assert not torch.allclose(coupled[0].cost_matrix[2:], half[0].cost_matrix)


def test_k_means_finds_clusters_and_an_empty_one_keeps_its_center() -> None:
    x = torch.tensor([[1.0, 0], [0.99, 0.1], [0, 1.0], [0.1, 0.99], [1.0, 0.05]])[None]
    assert k_means(x, torch.tensor([[0, 2]]), 5).tolist() == [[0, 0, 1, 1, 0]]
    twice = torch.tensor([[1.0, 0], [1.0, 0], [0, 1.0]])[None]  # ties go to the lower index
    assert k_means(twice, torch.tensor([[0, 1, 2]]), 3).tolist() == [[0, 0, 2]]


def test_labels_move_to_the_cells_of_a_view_and_regions_are_means() -> None:
    labels = torch.arange(4).view(1, 4)  # 2 x 2 cells over 40 x 40 pixels
    around, box = torch.tensor([[10.0, 10, 40, 40]]), torch.tensor([[10.0, 10, 20, 40]])  # its upper half
    for flip, expected in ((False, [0, 1, 0, 1]), (True, [1, 0, 1, 0])):
        carried = carry_labels(labels, around, box, torch.tensor([flip]), 2)
        assert carried.tolist() == [expected]
    features = torch.tensor([[[1.0], [2.0], [3.0], [4.0]]])
    regions, present = pool(features, torch.tensor([[0, 1, 0, 1]]), 3)
    assert regions.tolist() == [[[2.0], [3.0], [0.0]]]
    assert present.tolist() == [[True, True, False]]
