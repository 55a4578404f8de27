"""Attention of tokens among themselves, everywhere or within reach."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

TILE = 8  # rows and columns of queries that share their keys
# Of keys and values at a time on a GPU; on a CPU what fits into its cache, and no new pages.
TILE_BYTES = 1 << 28
LARGE = 1024  # patches of a grid above which attention is computed tile by tile, outside of training


class Tiles(NamedTuple):
    """Attention within reach, tile by tile: work and memory grow with the grid, not with its square.

    Every number is that of a token; what is beyond the border of the grid is token 0.
    """

    queries: Int[Tensor, "tiles q"]
    keys: Int[Tensor, "tiles k"]
    """Tokens that are no patch, and patches of the tile with a halo of `reach`."""
    seen: Bool[Tensor, "tiles 1 q k"]
    order: Int[Tensor, "n"]
    """Where each token is among those that are no patch and all queries."""
    num_prefix: int


def scaled_attention(
    q: Float[Tensor, "b heads n w"],
    k: Float[Tensor, "b heads m w"],
    v: Float[Tensor, "b heads m w"],
    scale: float | None = None,
    seen: Bool[Tensor, "*tiles n m"] | None = None,
) -> Float[Tensor, "b heads n w"]:
    """Scaled dot-product attention; an empty batch, which fused kernels refuse, stays empty."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale) if q.shape[0] else q


def working_dtype(tensor: Tensor) -> torch.dtype:
    """The precision that products are computed in: the autocast's where there is one."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype


Seen = Bool[Tensor, "n n"] | Tiles | None  # which tokens each one looks at; None: all


class FastAttention(NamedTuple):
    """Kernels for a GPU that compute the same where they take the case."""

    takes: Callable[[torch.dtype, int, int], bool]
    """By precision, number of tokens and width of a head."""
    attend: Callable[[Tensor, Tensor, int, Bool[Tensor, "n n"] | None], Tensor]
    """From the joint projection, its bias (for the gradient), the number of heads, and what is seen."""


class Attention(nn.Module):
    """Multi-head self-attention with one joint projection for queries, keys and values."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.fast: FastAttention | None = None
        """Kernels for a GPU; the trainer sets them."""

    def forward(
        self, x: Float[Tensor, "b n d"], first_only: bool = False, seen: Seen = None
    ) -> Float[Tensor, "b q d"]:
        """Let every token look at those it has seen, or the first alone at every other."""
        b, n, d = x.shape
        width = d // self.num_heads
        if isinstance(seen, Tiles) and not first_only:
            return self.proj(tiled_attention(self.qkv(x), seen, self.num_heads))
        if self.fast is not None and not first_only and self.fast.takes(working_dtype(x), n, width):
            assert not isinstance(seen, Tiles)
            # The kernels give the gradient of the bias, too.
            joint = F.linear(x, self.qkv.weight, self.qkv.bias.detach())
            return self.proj(self.fast.attend(joint, self.qkv.bias, self.num_heads, seen))
        if first_only:
            weight, bias = self.qkv.weight, self.qkv.bias
            q = F.linear(x[:, :1], weight[:d], bias[:d]).view(b, 1, self.num_heads, width).transpose(1, 2)
            k, v = (
                F.linear(x, weight[d:], bias[d:]).view(b, n, 2, self.num_heads, width).permute(2, 0, 3, 1, 4)
            )
        else:
            q, k, v = self.qkv(x).view(b, n, 3, self.num_heads, width).permute(2, 0, 3, 1, 4)
        x = scaled_attention(q, k, v, seen=None if first_only or isinstance(seen, Tiles) else seen)
        return self.proj(x.transpose(1, 2).reshape(b, q.shape[2], d))

    def keys(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
        """The keys of all heads side by side."""
        d = x.shape[2]
        return F.linear(x, self.qkv.weight[d : 2 * d], self.qkv.bias[d : 2 * d])

    def first_map(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b heads n"]:
        """How much the first token looks at every other, per head; rows sum to 1."""
        q, k, _ = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return (q[:, :, :1] @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(dim=-1)[:, :, 0]


def tiled_attention(qkv: Float[Tensor, "b n triple"], tiles: Tiles, num_heads: int) -> Float[Tensor, "b n d"]:
    """What masked attention computes, from the tokens that each tile sees; the twin of a mask of n x n."""
    b, n, triple = qkv.shape
    d, rows = triple // 3, qkv.flatten(0, 1)
    image = n * torch.arange(b, device=qkv.device)[:, None]

    def heads(x: Tensor, batch: int) -> Float[Tensor, "batch heads m w"]:
        return x.reshape(batch, -1, num_heads, d // num_heads).transpose(1, 2)

    q, k, v = (heads(x, b) for x in qkv.split(d, dim=-1))
    # What is no patch sees everything, and is seen by all.
    found = [scaled_attention(q[:, :, : tiles.num_prefix], k, v).transpose(1, 2).flatten(2)]
    of_tile = b * tiles.keys.shape[1] * 2 * d * qkv.element_size()
    at_once = max(1, (TILE_BYTES if qkv.is_cuda else TILE_BYTES >> 5) // of_tile)
    for queries, keys, seen in zip(*(x.split(at_once) for x in tiles[:3]), strict=True):
        # Rows of a matrix, because other dimensions are first copied as a whole.
        asking, asked = ((image + x.flatten()).flatten() for x in (queries, keys))
        q = heads(rows[:, :d].index_select(0, asking), b * len(keys))
        k, v = (heads(x, b * len(keys)) for x in rows[:, d:].index_select(0, asked).split(d, dim=-1))
        x = scaled_attention(q, k, v, seen=seen.repeat(b, 1, 1, 1) if b > 1 else seen)
        found.append(x.transpose(1, 2).reshape(b, -1, d))
    return torch.cat(found, dim=1).index_select(1, tiles.order)


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


@lru_cache(maxsize=4)
def tiles_within_reach(reach: int, rows: int, columns: int, num_prefix: int, device: torch.device) -> Tiles:
    """The same as tiles of queries, each with its keys."""

    def cut(halo: int) -> tuple[Tensor, Tensor]:
        """Rows and columns of the tiles with a halo."""
        around = torch.arange(-halo, TILE + halo, device=device)
        starts = (torch.arange(0, side, TILE, device=device)[:, None] + around for side in (rows, columns))
        down, right = starts
        shape = (len(down), len(right), len(around), len(around))
        row, column = down[:, None, :, None].expand(shape), right[None, :, None, :].expand(shape)
        return row.flatten(2).flatten(0, 1), column.flatten(2).flatten(0, 1)

    def tokens(row: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
        inside = (row >= 0) & (row < rows) & (column >= 0) & (column < columns)
        return inside, torch.where(inside, num_prefix + row * columns + column, 0)

    (row, column), (key_row, key_column) = cut(0), cut(reach)
    (real, queries), (inside, keys) = tokens(row, column), tokens(key_row, key_column)
    near = ((row[:, :, None] - key_row[:, None]).abs() <= reach) & (
        (column[:, :, None] - key_column[:, None]).abs() <= reach
    )
    seen = F.pad(near & inside[:, None], (num_prefix, 0), value=True)
    prefix = torch.arange(num_prefix, device=device).expand(len(keys), -1)
    place = real.flatten().nonzero()[:, 0]
    place = place[queries.flatten()[place].argsort()] + num_prefix
    order = torch.cat([prefix[0], place])
    return Tiles(queries, torch.cat([prefix, keys], dim=1), seen[:, None], order, num_prefix)
