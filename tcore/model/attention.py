"""Attention of tokens among themselves, everywhere or within reach."""

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn


def scaled_attention(
    q: Float[Tensor, "b heads n w"],
    k: Float[Tensor, "b heads m w"],
    v: Float[Tensor, "b heads m w"],
    scale: float | None = None,
    seen: Bool[Tensor, "n m"] | None = None,
) -> Float[Tensor, "b heads n w"]:
    """Scaled dot-product attention; an empty batch, which fused kernels refuse, stays empty."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale) if q.shape[0] else q


def working_dtype(tensor: Tensor) -> torch.dtype:
    """The precision that products are computed in: the autocast's where there is one."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype


class Attention(nn.Module):
    """Multi-head self-attention with one joint projection for queries, keys and values."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(
        self, x: Float[Tensor, "b n d"], first_only: bool = False, seen: Bool[Tensor, "n n"] | None = None
    ) -> Float[Tensor, "b q d"]:
        """Let every token look at those it has seen, or the first alone at every other."""
        b, n, d = x.shape
        width = d // self.num_heads
        if first_only:
            weight, bias = self.qkv.weight, self.qkv.bias
            q = F.linear(x[:, :1], weight[:d], bias[:d]).view(b, 1, self.num_heads, width).transpose(1, 2)
            k, v = (
                F.linear(x, weight[d:], bias[d:]).view(b, n, 2, self.num_heads, width).permute(2, 0, 3, 1, 4)
            )
        else:
            q, k, v = self.qkv(x).view(b, n, 3, self.num_heads, width).permute(2, 0, 3, 1, 4)
        x = scaled_attention(q, k, v, seen=None if first_only else seen)
        return self.proj(x.transpose(1, 2).reshape(b, q.shape[2], d))

    def map(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b heads n n"]:
        """How much every token looks at every other, per head; rows sum to 1."""
        q, k, _ = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(dim=-1)


def tokens_seen(
    reach: int, rows: int | torch.SymInt, columns: int | torch.SymInt, num_prefix: int, device: torch.device
) -> Bool[Tensor, "n n"]:
    """Which tokens each one looks at: patches up to `reach` rows and columns away, and all that are no patch.

    >>> tokens_seen(1, 1, 4, 1, torch.device("cpu"))[1:, 1:].int()
    tensor([[1, 1, 0, 0],
            [1, 1, 1, 0],
            [0, 1, 1, 1],
            [0, 0, 1, 1]], dtype=torch.int32)
    """
    # The stubs of torch do not know that its functions take the sizes of a graph.
    counts: tuple[Any, Any] = (rows, columns)
    sides = (torch.arange(count, device=device) for count in counts)
    row, column = (F.pad(place.flatten(), (num_prefix, 0)) for place in torch.meshgrid(*sides, indexing="ij"))
    near = ((row[:, None] - row).abs() <= reach) & ((column[:, None] - column).abs() <= reach)
    no_patch = torch.arange(row.shape[0], device=device) < num_prefix
    return near | no_patch[:, None] | no_patch


@lru_cache(maxsize=4)  # global and local crops of a run, and a few sizes of frames
def within_reach(
    reach: int, rows: int, columns: int, num_prefix: int, device: torch.device
) -> Bool[Tensor, "n n"] | None:
    """The same, made once; None where the reach leaves nothing out."""
    if reach >= max(rows, columns) - 1:
        return None
    return tokens_seen(reach, rows, columns, num_prefix, device)
