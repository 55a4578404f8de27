"""Contrastive learning: batch norm over all processes, projectors, and losses of views and of regions.

SimCLR (arXiv:2002.05709), MoCo v3 (arXiv:2104.02057) and DetCon (arXiv:2103.10957), whose loss is ODIN's.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from tcore.methods.settings_groups import LastNorm
from tcore.model.losses import ALONE, Peers

EPS = 1e-5  # of the batch norms


class Centered(NamedTuple):
    """Rows without their group's mean, and mean, variance and number of the rows of all processes."""

    x: Float[Tensor, "g n c"]
    mean: Float[Tensor, "g c"]
    variance: Float[Tensor, "g c"]
    rows: Float[Tensor, "g 1"]


def center_rows(
    x: Float[Tensor, "g n c"], counted: Bool[Tensor, "g n"] | None = None, peers: Peers = ALONE
) -> Centered:
    """Statistics of each group over all processes, with gradient; rows that are not `counted` take no part.

    One exchange: every process centers its own rows, and the moments are put together.
    """
    weight = x.new_ones(x.shape[:2]) if counted is None else counted.to(x.dtype)
    count = weight.sum(dim=1, keepdim=True)
    share = (weight / count.clamp(min=1))[..., None]
    own_mean = (share * x).sum(dim=1)
    # Everything but the mean is computed from centered rows: so gradients have a mean of 0, to the last bit.
    centered = x - own_mean[:, None]
    own_variance = (share * centered.square()).sum(dim=1)
    moments = peers.rows(torch.cat([own_mean, own_variance, count], dim=1)[None])
    means, variances, counts = moments.split([x.shape[2], x.shape[2], 1], dim=2)
    total = counts.sum(dim=0)
    shares = counts / total.clamp(min=1)
    mean = (shares * means).sum(dim=0)
    variance = (shares * (variances + (means - mean).square())).sum(dim=0)
    return Centered(centered + (own_mean - mean)[:, None], mean, variance, total)


class BatchNorm(nn.Module):
    """Batch norm in fp32 with the statistics of all processes, each group of rows separately.

    Running statistics are kept as the originals keep them; training never reads them.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, dim: int, *, scale: bool = True, shift: bool = True) -> None:
        super().__init__()
        self.register_parameter("weight", nn.Parameter(torch.ones(dim)) if scale else None)
        self.register_parameter("bias", nn.Parameter(torch.zeros(dim)) if shift else None)
        self.register_buffer("running_mean", torch.zeros(dim))
        self.register_buffer("running_var", torch.ones(dim))

    def forward(
        self, x: Float[Tensor, "g n c"], counted: Bool[Tensor, "g n"] | None = None, peers: Peers = ALONE
    ) -> Float[Tensor, "g n c"]:
        """Rows of each group, brought to mean 0 and variance 1, then scaled and shifted."""
        with torch.autocast(x.device.type, enabled=False):
            x, mean, variance, count = center_rows(x.float(), counted, peers)
            self._follow(mean, variance * count / (count - 1).clamp(min=1))
            x = x * (variance + EPS).rsqrt()[:, None]
            x = x if self.weight is None else x * self.weight
            return x if self.bias is None else x + self.bias

    @torch.no_grad()
    def _follow(self, means: Float[Tensor, "g c"], variances: Float[Tensor, "g c"]) -> None:
        for mean, variance in zip(means, variances, strict=True):
            self.running_mean.lerp_(mean, 0.1)
            self.running_var.lerp_(variance, 0.1)


class Projector(nn.Sequential):
    """Linear layers with batch norm and ReLU between them; also the predictor after it.

    >>> projector = Projector(dim=8, hidden=16, out=4, layers=2)
    >>> projector(torch.randn(2, 5, 8)).shape
    torch.Size([2, 5, 4])
    """

    def __init__(
        self,
        *,
        dim: int,
        hidden: int,
        out: int,
        layers: int,
        last_norm: LastNorm = "plain",
        bias: bool = False,
    ) -> None:
        modules: list[nn.Module] = []
        for _ in range(layers - 1):
            modules += [nn.Linear(dim, hidden, bias=bias), BatchNorm(hidden), nn.ReLU()]
            dim = hidden
        modules.append(nn.Linear(dim, out, bias=False))
        if last_norm != "none":
            modules.append(BatchNorm(out, scale=last_norm == "scale", shift=False))
        super().__init__(*modules)

    def forward(
        self, x: Float[Tensor, "g n c"], counted: Bool[Tensor, "g n"] | None = None, peers: Peers = ALONE
    ) -> Float[Tensor, "g n d"]:
        """Rows of each group; rows that are not `counted` do not count in the norms."""
        for layer in self:
            x = layer(x, counted, peers) if isinstance(layer, BatchNorm) else layer(x)
        return x.float()


def contrast_rows(
    queries: Float[Tensor, "2 n d"],
    keys: Float[Tensor, "2 m d"],
    temperature: float,
    *,
    both_views: bool,
    first: int = 0,
) -> Float[Tensor, "2 n"]:
    """Cross-entropy of finding one's other view among the keys of all samples, of normalized rows.

    Sample i of ours is sample `first` + i of the keys. Negatives are other views of other samples, or
    `both_views` of them, and never the row itself.
    """
    with torch.autocast(queries.device.type, enabled=False):
        place = first + torch.arange(queries.shape[1], device=queries.device)
        logits = queries @ keys.flip(0).transpose(1, 2) / temperature
        if both_views:
            oneself = place[:, None] == torch.arange(keys.shape[1], device=keys.device)
            own = (queries @ keys.transpose(1, 2) / temperature).masked_fill(oneself, -torch.inf)
            logits = torch.cat([logits, own], dim=2)
        rows = F.cross_entropy(logits.flatten(0, 1), place.repeat(2), reduction="none")
        return rows.unflatten(0, (2, -1))


def object_contrast_rows(
    queries: Float[Tensor, "2 b r d"],
    keys: Float[Tensor, "2 m r d"],
    ids: Int64[Tensor, "2 b r"],
    key_ids: Int64[Tensor, "2 m r"],
    temperature: float,
    *,
    first: int = 0,
) -> Float[Tensor, "2 b r"]:
    """DetCon's cross-entropy of finding the same region of the same image in its other view.

    Negatives are all other regions of both views. Regions of one id are one: as a positive they share its
    weight, as queries they are weighted down by their number. A negative id takes no part at all; a region
    without partner has loss 0.
    """
    with torch.autocast(queries.device.type, enabled=False):
        b = ids.shape[1]
        image = torch.arange(keys.shape[1], device=ids.device)
        same_image = (first + torch.arange(b, device=ids.device))[:, None, None, None] == image[:, None]
        there = (key_ids >= 0)[:, None, None]

        def sides(keys: Tensor, key_ids: Tensor) -> tuple[Tensor, Tensor]:
            """Logits with the regions of a view, and which of them are the same region."""
            logits = torch.einsum("vbrd,vmsd->vbrms", queries, keys) / temperature
            return logits, same_image & (ids[..., None, None] == key_ids[:, None, None])

        other, positive = sides(keys.flip(0), key_ids.flip(0))
        own, oneself = sides(keys, key_ids)
        other = other.masked_fill(~there.flip(0), -torch.inf)
        own = own.masked_fill(oneself | ~there, -torch.inf)
        logits = torch.cat([other, own], dim=3).flatten(3)
        positive = positive & there.flip(0) & (ids >= 0)[..., None, None]
        share = positive.flatten(3) / positive.flatten(3).sum(dim=3, keepdim=True).clamp(min=1)
        agreement = (share * other.flatten(3).masked_fill(~positive.flatten(3), 0.0)).sum(dim=3)
        found = positive.flatten(3).any(dim=3)
        # Where nothing takes part there is no softmax: any finite number will do, its weight is 0.
        normalizer = logits.masked_fill(~found[..., None], 0.0).logsumexp(dim=3)
        copies = (ids[..., None] == ids[..., None, :]).sum(dim=3)
        return torch.where(found, (normalizer - agreement) / copies, 0.0)
