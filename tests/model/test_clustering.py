import torch
import torch.nn.functional as F

from tcore.methods.settings_groups import RegionConfig
from tcore.model.clustering import cluster, draw_distinct, k_means, sample_noise


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


def test_range_of_costs_by_image_makes_an_image_independent_of_the_others() -> None:
    generator = torch.Generator().manual_seed(1)
    tokens = F.normalize(torch.randn(4, 18, 6, generator=generator), dim=2)
    places = 50 * torch.rand(4, 18, 2, generator=generator)
    marginal = torch.rand(4, 18, generator=generator).softmax(dim=1)
    seeds = torch.tensor([[0, 3, 9, 12, 17]] * 4)
    given = (tokens, places, marginal, seeds)
    whole = cluster(*given, RegionConfig(), images=2)  # two heads each
    half = cluster(tokens[2:], places[2:], marginal[2:], seeds[2:], RegionConfig(), images=1)
    for a, b in zip(whole, half, strict=True):
        torch.testing.assert_close(a.plan[2:], b.plan)
    coupled = cluster(*given, RegionConfig())
    assert not torch.allclose(coupled[0].cost_matrix[2:], half[0].cost_matrix)


def test_k_means_finds_clusters_and_an_empty_one_keeps_its_center() -> None:
    x = torch.tensor([[1.0, 0], [0.99, 0.1], [0, 1.0], [0.1, 0.99], [1.0, 0.05]])[None]
    assert k_means(x, torch.tensor([[0, 2]]), 5).tolist() == [[0, 0, 1, 1, 0]]
    twice = torch.tensor([[1.0, 0], [1.0, 0], [0, 1.0]])[None]  # ties go to the lower index
    assert k_means(twice, torch.tensor([[0, 1, 2]]), 3).tolist() == [[0, 0, 2]]
