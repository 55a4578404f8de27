"""Regions of images from features, as pure functions: CrOC's clustering, k-means, labels on other views.

CrOC (arXiv:2303.13245) and ODIN (arXiv:2203.08777). All images (and heads) at once, in fixed shapes; what is
random is given.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from tcore.methods.settings_groups import RegionConfig
from tcore.model.pixels import take


def sample_noise(seeds: Int64[Tensor, "b"], count: int) -> Float[Tensor, "b {count}"]:
    """Uniform numbers between 0 and 1, a function of each sample's seed (below 2**32) alone.

    A hash of seed and place, so that a sample has the same ones on any device and number of processes.
    """
    mask = 0xFFFFFFFF

    def mix(x: Tensor) -> Tensor:
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            x = ((x ^ (x >> shift)) * factor) & mask
        return x ^ (x >> 16)

    place = torch.arange(1, count + 1, device=seeds.device)
    mixed = mix(mix(seeds & mask)[:, None] ^ mix(place))
    # 24 bits, which fp32 holds exactly, in the middle of their intervals: never 0, never 1.
    return ((mixed >> 8).float() + 0.5) / 2**24


def draw_distinct(
    probability: Float[Tensor, "r t"], noise: Float[Tensor, "r t"], count: int
) -> Int64[Tensor, "r {count}"]:
    """Distinct places, drawn one after the other by their probabilities (the exponential race)."""
    return (probability / -noise.log()).topk(count, dim=1).indices


def patch_positions(
    boxes: Float[Tensor, "v 4"], flips: Bool[Tensor, "v"], grid: int
) -> Float[Tensor, "v n 2"]:
    """Where the patches of views (top, left, height, width; mirrored or not) lie in their frame, (x, y)."""
    center = (torch.arange(grid, device=boxes.device) + 0.5) / grid
    across = torch.where(flips[:, None], 1 - center, center)
    x = boxes[:, 1, None] + across * boxes[:, 3, None] - 0.5
    y = boxes[:, 0, None] + center * boxes[:, 2, None] - 0.5
    x, y = x[:, None, :].expand(-1, grid, -1), y[:, :, None].expand(-1, -1, grid)
    return torch.stack([x, y], dim=-1).flatten(1, 2)


# CrOC. A row r is one head of one image; its t tokens are the patches of both views.


class Plan(NamedTuple):
    """Tokens assigned to k centroids: the matrix of costs, the transport plan and what it costs."""

    cost_matrix: Float[Tensor, "r t k"]
    column_marginal: Float[Tensor, "r k"]
    plan: Float[Tensor, "r t k"]
    cost: Float[Tensor, "r"]


def seed_probability(
    tokens: Float[Tensor, "r t w"], frame: Float[Tensor, "r 2 w"], temperature: float
) -> Float[Tensor, "r t"]:
    """How much each token is like the frame token of its view, as a share."""
    likeness = torch.einsum("rvnw,rvw->rvn", tokens.unflatten(1, (2, -1)), frame).flatten(1)
    return (likeness / temperature).softmax(dim=1)


def normalize_columns(plan: Float[Tensor, "*r t k"]) -> Float[Tensor, "*r t k"]:
    """Every column with sum 1; a column of zeros stays."""
    total = plan.sum(dim=-2, keepdim=True)
    return plan / torch.where(total > 0, total, 1.0)


def cluster(
    tokens: Float[Tensor, "r t w"],
    positions: Float[Tensor, "r t 2"],
    row_marginal: Float[Tensor, "r t"],
    seeds: Int64[Tensor, "r k"],
    settings: RegionConfig,
    images: int | None = None,
) -> list[Plan]:
    """Plans for k, k - 1, ..., 2 centroids: those of the seeds, then always the two most alike made one.

    Costs are brought to [0, 1] by their range over all rows, or, with `images`, in each of that many images.
    """
    centroids, places = take(tokens, seeds), take(positions, seeds)
    marginal = normalize_columns(row_marginal.gather(1, seeds)[..., None])[..., 0]
    found: list[Plan] = []
    for k in range(seeds.shape[1], 1, -1):
        alike = tokens @ F.normalize(centroids, dim=2).transpose(1, 2)
        # Not torch.cdist, whose products lose the small distances.
        distance = (positions[:, :, None] - places[:, None]).square().sum(dim=3).sqrt()
        distance = distance / distance.amax(dim=(1, 2), keepdim=True)
        cost = to_unit_range(settings.position_weight * distance - alike, images or 1)
        plan = transport(cost, row_marginal, marginal, settings)
        found.append(Plan(cost, marginal, plan, (plan * cost).sum(dim=(1, 2))))
        if k > 2:
            shares = normalize_columns(merge(plan, normalize_columns(plan).transpose(1, 2) @ tokens))
            centroids, places = shares.transpose(1, 2) @ tokens, shares.transpose(1, 2) @ positions
            marginal = torch.einsum("rtk,rt->rk", shares, row_marginal)
            marginal = marginal / marginal.sum(dim=1, keepdim=True)
    return found


def to_unit_range(cost: Float[Tensor, "r t k"], images: int) -> Float[Tensor, "r t k"]:
    """Costs mapped to [0, 1] by their smallest and largest value, those of each image by themselves."""
    grouped = cost.reshape(images, -1)
    low, high = grouped.amin(dim=1, keepdim=True), grouped.amax(dim=1, keepdim=True)
    return ((grouped - low) / (high - low)).view_as(cost)


def transport(
    cost: Float[Tensor, "r t k"],
    rows: Float[Tensor, "r t"],
    columns: Float[Tensor, "r k"],
    settings: RegionConfig,
) -> Float[Tensor, "r t k"]:
    """Sinkhorn's plan with these marginals, after a fixed number of rounds."""
    plan = (-settings.sharpness * cost).exp()
    plan = plan / plan.sum(dim=(1, 2), keepdim=True)
    for _ in range(settings.iterations):
        plan = plan * (rows / plan.sum(dim=2))[:, :, None]
        plan = plan * (columns / plan.sum(dim=1))[:, None]
    return plan.nan_to_num(nan=1e-8)


def merge(plan: Float[Tensor, "r t k"], centroids: Float[Tensor, "r k w"]) -> Float[Tensor, "r t j"]:
    """One column less: the two whose centroids are most alike are added up, and stand last."""
    k = plan.shape[2]
    alike = centroids @ centroids.transpose(1, 2)
    upper = torch.ones(k, k, dtype=torch.bool, device=plan.device).triu(1)
    pair = alike.masked_fill(~upper, -torch.inf).flatten(1).argmax(dim=1)
    both = torch.stack([pair // k, pair % k], dim=1)
    column = torch.arange(k, device=plan.device)
    merged = (column == both[:, :1]) | (column == both[:, 1:])
    kept = (column + k * merged).argsort(dim=1)[:, : k - 2]  # the others, in their order
    rest = plan.gather(2, kept[:, None].expand(-1, plan.shape[1], -1))
    return torch.cat([rest, (plan * merged[:, None]).sum(dim=2, keepdim=True)], dim=2)


def assign(plans: list[Plan], most: int) -> Float[Tensor, "2 r n {most}"]:
    """Each patch to one region, by the cheapest plan of up to `most` centroids; columns are by view.

    Every region of a view has weights that summed to 1 before each patch kept its largest alone.
    """
    considered = [plan for plan in plans if plan.plan.shape[2] <= most]
    best = torch.stack([plan.cost for plan in considered]).argmin(dim=0)
    padded = torch.stack([F.pad(plan.plan, (0, most - plan.plan.shape[2])) for plan in considered])
    chosen = padded[best, torch.arange(best.shape[0], device=best.device)]
    by_view = normalize_columns(chosen.unflatten(1, (2, -1)).transpose(0, 1))
    return by_view * (by_view == by_view.amax(dim=3, keepdim=True))


# ODIN.


def k_means(
    features: Float[Tensor, "b n d"], start: Int64[Tensor, "b k"], iterations: int
) -> Int64[Tensor, "b n"]:
    """Labels of normalized features, from centers at these cells; an empty cluster keeps its center."""
    x = F.normalize(features.float(), dim=2)
    centers = take(x, start)

    def nearest() -> Tensor:
        return (centers.square().sum(dim=2)[:, None] - 2 * x @ centers.transpose(1, 2)).argmin(dim=2)

    for _ in range(iterations):
        member = F.one_hot(nearest(), start.shape[1]).to(x.dtype)
        count = member.sum(dim=1)[..., None]
        centers = torch.where(count > 0, member.transpose(1, 2) @ x / count.clamp(min=1), centers)
    return nearest()


def carry_labels(
    labels: Int64[Tensor, "b n"],
    box: Float[Tensor, "b 4"],
    boxes: Float[Tensor, "b 4"],
    flips: Bool[Tensor, "b"],
    grid: int,
) -> Int64[Tensor, "b m"]:
    """Labels of a square grid of cells in `box`, at the centers of the cells of other views of the frame."""
    side = round(labels.shape[1] ** 0.5)
    start, size = box[:, None, :2].flip(2), box[:, None, 2:].flip(2)  # (x, y)
    inside = (patch_positions(boxes, flips, grid) + 0.5 - start) / size
    column, row = (side * inside).long().clamp(0, side - 1).unbind(dim=2)
    return labels.gather(1, row * side + column)


def pool(
    features: Float[Tensor, "v n d"], labels: Int64[Tensor, "v n"], clusters: int
) -> tuple[Float[Tensor, "v {clusters} d"], Bool[Tensor, "v {clusters}"]]:
    """Mean of the features under each label (0 where there are none), and which labels occur."""
    member = F.one_hot(labels, clusters).to(features.dtype)
    count = member.sum(dim=1)
    return (member.transpose(1, 2) @ features) / count.clamp(min=1)[..., None], count > 0
