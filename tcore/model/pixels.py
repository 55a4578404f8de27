"""Pixels as tokens: patches, targets, errors, and the noise of the methods that reconstruct them."""

import math
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

Target = Literal["joint", "channel", "none"]
EPSILON = 1e-6  # of the targets and of the spatial dropout


def patchify(clip: Float[Tensor, "b 3 time height width"], tube: int, patch: int) -> Float[Tensor, "b n c"]:
    """Tokens of pixels: time slot by time slot, row by row; inside a token time, row, column, channel.

    >>> patchify(torch.zeros(2, 3, 4, 32, 48), 2, 16).shape
    torch.Size([2, 12, 1536])
    """
    cut = clip.unflatten(4, (-1, patch)).unflatten(3, (-1, patch)).unflatten(2, (-1, tube))
    return cut.permute(0, 2, 4, 6, 3, 5, 7, 1).flatten(4).flatten(1, 3)


def unpatchify(
    tokens: Float[Tensor, "b n c"], tube: int, patch: int, grid: tuple[int, int]
) -> Float[Tensor, "b 3 time height width"]:
    """The clip whose tokens these are."""
    cut = tokens.unflatten(2, (tube, patch, patch, 3)).unflatten(1, (-1, *grid))
    return cut.permute(0, 7, 1, 4, 2, 5, 3, 6).flatten(6).flatten(4, 5).flatten(2, 3)


def pixel_targets(patches: Float[Tensor, "*b c"], kind: Target) -> Float[Tensor, "*b c"]:
    """Pixels of each token normalized over all of them, or over those of each channel, or as they are."""
    if kind == "none":
        return patches
    if kind == "joint":
        variance, mean = torch.var_mean(patches, dim=-1, keepdim=True)
        return (patches - mean) / (variance + EPSILON).sqrt()
    channels = patches.unflatten(-1, (-1, 3))
    deviation, mean = torch.std_mean(channels, dim=-2, keepdim=True)
    return ((channels - mean) / (deviation + EPSILON)).flatten(-2)


def restored(
    prediction: Float[Tensor, "*b c"], patches: Float[Tensor, "*b c"], kind: Target
) -> Float[Tensor, "*b c"]:
    """Pixels whose targets are the prediction, by mean and deviation of the true ones; for looking at."""
    if kind == "none":
        return prediction
    if kind == "joint":
        variance, mean = torch.var_mean(patches, dim=-1, keepdim=True)
        return prediction * (variance + EPSILON).sqrt() + mean
    deviation, mean = torch.std_mean(patches.unflatten(-1, (-1, 3)), dim=-2, keepdim=True)
    return (prediction.unflatten(-1, (-1, 3)) * (deviation + EPSILON) + mean).flatten(-2)


def masked_error(
    prediction: Float[Tensor, "b n c"],
    target: Float[Tensor, "b n c"],
    mask: Float[Tensor, "b n"] | Bool[Tensor, "b n"] | None = None,
    samples: int | None = None,
) -> Float[Tensor, ""]:
    """Mean squared error of masked tokens (without a mask: of all).

    With `samples`, those of the whole step, it is this part's share of the step's mean: all samples mask
    equally many tokens.
    """
    error = (prediction.float() - target).square().mean(dim=-1)
    share = 1.0 if samples is None else error.shape[0] / samples
    return share * (error.mean() if mask is None else (error * mask).sum() / mask.sum())


def num_kept(tokens: int, ratio: float) -> int:
    """How many of these tokens the encoder sees: the kept number is cut off, in double precision.

    >>> num_kept(196, 0.95), num_kept(1568, 0.9), num_kept(40, 0.9)
    (9, 156, 3)
    """
    return int(tokens * (1 - ratio))


def fill(
    mask_token: Float[Tensor, "1 1 d"], tokens: Float[Tensor, "b k d"], visible: Int64[Tensor, "b k"], n: int
) -> Float[Tensor, "b n d"]:
    """A sequence of n places: tokens at the visible ones, the mask token elsewhere."""
    return put(mask_token.to(tokens.dtype).expand(tokens.shape[0], n, -1), tokens, visible)


def take(values: Float[Tensor, "b n c"], places: Int64[Tensor, "b k"]) -> Float[Tensor, "b k c"]:
    """The values at some places of each sample; not for gradients."""
    return values.gather(1, places[..., None].expand(-1, -1, values.shape[-1]))


def put(
    values: Float[Tensor, "b n c"], others: Float[Tensor, "b k c"], places: Int64[Tensor, "b k"]
) -> Float[Tensor, "b n c"]:
    """The values with others at some places."""
    return values.scatter(1, places[..., None].expand_as(others), others)


def predicted_frames(frames: int, tokens_in_time: int) -> list[int]:
    """Which frames a clip's tokens predict where each predicts one (MAE-ST).

    >>> predicted_frames(16, 8)
    [0, 2, 4, 6, 8, 10, 12, 15]
    """
    return torch.linspace(0, frames - 1, tokens_in_time).long().tolist()


def spatial_dropout(
    logits: Float[Tensor, "b heads n n"], noise: Float[Tensor, "b heads n half"], ratio: float
) -> tuple[Float[Tensor, "b heads n half"], Bool[Tensor, "b heads n n"]]:
    """Weights and choice of DropMAE's attention dropout (arXiv:2304.00571): pairs within a frame.

    Tokens are those of two frames, one frame after the other. Of each head, int(ratio * (half - 1)) * n
    pairs are drawn without replacement, in proportion to the weights: the largest of weight / exponential.
    """
    n = logits.shape[-1]
    half = n // 2
    shares = logits.softmax(dim=-1)
    own = torch.cat([shares[..., :half, :half], shares[..., half:, half:]], dim=-2) + EPSILON
    other = torch.cat([shares[..., :half, half:], shares[..., half:, :half]], dim=-2)
    itself = torch.eye(half, dtype=torch.bool, device=logits.device).repeat(2, 1)
    own = own.masked_fill(itself, 0.0)
    weights = own / own.sum(dim=-1, keepdim=True) * (other.amax(dim=-1, keepdim=True) + EPSILON)
    count = int(ratio * (half - 1)) * n
    dropped = torch.zeros_like(logits, dtype=torch.bool)
    if count:
        race = (weights / noise).flatten(-2)
        last = race.topk(count, dim=-1, sorted=False).values.amin(dim=-1)
        chosen = (race >= last[..., None]).unflatten(-1, (n, half))
        dropped[..., :half, :half], dropped[..., half:, half:] = chosen[..., :half, :], chosen[..., half:, :]
    return weights, dropped


def balanced_divergence(
    posterior: Float[Tensor, "b variables values"], prior: Float[Tensor, "b variables values"], balance: float
) -> Float[Tensor, "b"]:
    """KL divergence of categorical variables from logits, summed over the variables of a sample.

    The share `balance` of its gradient goes to the posterior, the rest to the prior.
    """

    def divergence(p: Tensor, q: Tensor) -> Tensor:
        p, q = p.log_softmax(dim=-1), q.log_softmax(dim=-1)
        return (p.exp() * (p - q)).sum(dim=(-2, -1))

    to_posterior, to_prior = divergence(posterior, prior.detach()), divergence(posterior.detach(), prior)
    return balance * to_posterior + (1 - balance) * to_prior


def noise_seeds(visible: Int64[Tensor, "b k"]) -> Int64[Tensor, "b"]:
    """A number for each sample from its kept patches, which were drawn for it alone.

    Noise that follows from it is the same on any number of processes and in any parts of a step.
    """
    return _scramble(_scramble(visible * 2654435761 + 1).sum(dim=1))


def uniform_noise(seeds: Int64[Tensor, "b"], count: int, stream: int) -> Float[Tensor, "b {count}"]:
    """Numbers between 0 and 1, both excluded: a function of seed, stream and place alone, on any device."""
    places = torch.arange(count, device=seeds.device) * 2654435761 + stream * 40503
    mixed = _scramble(_scramble(places) ^ _scramble(seeds + 977 * (stream + 1))[:, None])
    return ((mixed >> 8).float() + 0.5) / 2**24


def normal_noise(seeds: Int64[Tensor, "b"], count: int) -> Float[Tensor, "b {count}"]:
    """Standard normal numbers, in the same way (Box and Muller)."""
    radius = (-2 * uniform_noise(seeds, count, 0).log()).sqrt()
    return radius * torch.cos(2 * math.pi * uniform_noise(seeds, count, 1))


def one_hot_samples(
    logits: Float[Tensor, "b variables values"], uniform: Float[Tensor, "b variables values"]
) -> Float[Tensor, "b variables values"]:
    """One value of each categorical variable, drawn by the Gumbel-max rule."""
    drawn = (logits - (-uniform.log()).log()).argmax(dim=-1)
    return torch.nn.functional.one_hot(drawn, logits.shape[-1]).to(logits.dtype)


def _scramble(x: Int64[Tensor, "*n"]) -> Int64[Tensor, "*n"]:
    """The finalizer of MurmurHash3 on the low 32 bits."""
    x = x & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return x ^ (x >> 16)
