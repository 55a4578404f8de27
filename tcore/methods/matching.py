"""The patch matching module: restore masked patches of the current frame from those of another one."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from tcore.methods.motion import Scene, follow_motion, forget_places
from tcore.methods.settings import AttentionForm, AttentionStart
from tcore.model.attention import scaled_attention


class HeadedAttention(nn.Module):
    """Multi-head attention from one set of tokens to another; in_proj rows are queries, keys, values."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        temperature: float = 1.0,
        form: AttentionForm = "dot",
        start: AttentionStart = "xavier",
    ) -> None:
        super().__init__()
        self.num_heads, self.form = num_heads, form
        self.scale = 1.0 / ((math.sqrt(dim // num_heads) if form == "dot" else 1.0) * temperature)
        self.in_proj_weight = nn.Parameter(torch.empty(3 * dim, dim))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * dim))
        self.out_proj = nn.Linear(dim, dim)
        nn.init.xavier_uniform_(self.in_proj_weight)
        nn.init.zeros_(self.out_proj.bias)
        if start == "identity":  # begins by comparing features as they are
            with torch.no_grad():
                self.in_proj_weight.copy_(torch.eye(dim).repeat(3, 1))
                self.out_proj.weight.copy_(torch.eye(dim))

    def _project(
        self, query: Tensor, source: Tensor, scene: Scene | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        def split(x: Tensor, part: int) -> Tensor:
            rows = slice(part * x.shape[-1], (part + 1) * x.shape[-1])
            x = F.linear(x, self.in_proj_weight[rows], self.in_proj_bias[rows])
            return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

        whole = source
        if scene is not None:  # compare content only, without a gradient; values keep everything
            query = forget_places(query.detach(), scene.places, ~scene.masked)
            source = forget_places(source.detach(), scene.places)
        q, k, v = split(query, 0), split(source, 1), split(whole, 2)
        return (q, k, v) if self.form == "dot" else (F.normalize(q, dim=-1), F.normalize(k, dim=-1), v)

    def forward(
        self, query: Float[Tensor, "b n d"], source: Float[Tensor, "b m d"], scene: Scene | None = None
    ) -> Float[Tensor, "b n d"]:
        """Attention of the queries over the source."""
        q, k, v = self._project(query, source, scene)
        if scene is None:
            x = scaled_attention(q, k, v, self.scale)
        else:
            x = follow_motion(q, k, self.scale, scene).to(v.dtype) @ v
        return self.out_proj(x.transpose(1, 2).flatten(2))

    def map(
        self, query: Float[Tensor, "b n d"], source: Float[Tensor, "b m d"], scene: Scene | None = None
    ) -> Float[Tensor, "b heads n m"]:
        """Attention of every query over the source, per head; rows sum to 1."""
        q, k, _ = self._project(query, source, scene)
        if scene is not None:
            return follow_motion(q, k, self.scale, scene)
        return (q @ k.transpose(-1, -2) * self.scale).softmax(dim=-1)


class MatchingBlock(nn.Module):
    """Cross-attention with a gain, self-attention, linear; each with a residual and a norm after it."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        gain: float,
        temperature: float,
        form: AttentionForm = "dot",
        start: AttentionStart = "xavier",
    ) -> None:
        super().__init__()
        self.gain = gain
        self.cross_attention = HeadedAttention(dim, num_heads, temperature, form, start)
        self.norm1 = nn.LayerNorm(dim, eps=1e-5)
        self.self_attention = HeadedAttention(dim, num_heads)
        self.norm2 = nn.LayerNorm(dim, eps=1e-5)
        self.linear = nn.Linear(dim, dim)
        self.norm3 = nn.LayerNorm(dim, eps=1e-5)

    def cross(
        self, current: Float[Tensor, "b n d"], auxiliary: Float[Tensor, "b m d"], scene: Scene | None = None
    ) -> Float[Tensor, "b n d"]:
        """The current patches after cross-attention to the auxiliary ones."""
        return self.norm1(self.gain * self.cross_attention(current, auxiliary, scene) + current)

    def forward(
        self, current: Float[Tensor, "b n d"], auxiliary: Float[Tensor, "b m d"], scene: Scene | None = None
    ) -> Float[Tensor, "b n d"]:
        """Restore the current patches from the auxiliary ones."""
        x = self.cross(current, auxiliary, scene)
        x = self.norm2(self.self_attention(x, x) + x)
        return self.norm3(self.linear(x) + x)


class MatchingAttention(NamedTuple):
    """Where the patches of the current frame look, mean over heads; rows sum to 1."""

    cross: Float[Tensor, "b n m"]
    self_: Float[Tensor, "b n n"]


class PatchMatchingModule(nn.Module):
    """Match patches across time; one set of weights serves both directions.

    >>> match = PatchMatchingModule(dim=48, num_heads=4)
    >>> current, past = torch.randn(2, 16, 48), torch.randn(2, 16, 48)
    >>> match(current, past).shape, match.attention(current, past).cross.shape
    (torch.Size([2, 16, 48]), torch.Size([2, 16, 16]))
    """

    def __init__(
        self,
        *,
        dim: int = 384,
        num_heads: int = 16,
        gain: float = 4.0,
        num_blocks: int = 1,
        temperature: float = 1.0,
        form: AttentionForm = "dot",
        start: AttentionStart = "xavier",
    ) -> None:
        super().__init__()
        self.needs_scene = form == "motion"
        """Whether it must be told which patches are masked, and what the encoder says about places alone."""
        self.blocks = nn.ModuleList(
            [MatchingBlock(dim, num_heads, gain, temperature, form, start) for _ in range(num_blocks)]
        )

    def forward(
        self, current: Float[Tensor, "b n d"], auxiliary: Float[Tensor, "b m d"], scene: Scene | None = None
    ) -> Float[Tensor, "b n d"]:
        """Restore the current patches; the output of one block is the current frame of the next."""
        for block in self.blocks:
            current = block(current, auxiliary, scene)
        return current

    @torch.no_grad()
    def attention(
        self, current: Float[Tensor, "b n d"], auxiliary: Float[Tensor, "b m d"], scene: Scene | None = None
    ) -> MatchingAttention:
        """Attention of the last block, for looking at; training never computes it."""
        last, current = self._last(current, auxiliary, scene)
        cross = last.cross_attention.map(current, auxiliary, scene)
        crossed = last.cross(current, auxiliary, scene)
        return MatchingAttention(cross.mean(dim=1), last.self_attention.map(crossed, crossed).mean(dim=1))

    @torch.no_grad()
    def cross_attention(
        self, current: Float[Tensor, "b n d"], auxiliary: Float[Tensor, "b m d"], scene: Scene | None = None
    ) -> Float[Tensor, "b heads n m"]:
        """Where each head of the last block looks in the auxiliary frame; rows sum to 1."""
        last, current = self._last(current, auxiliary, scene)
        return last.cross_attention.map(current, auxiliary, scene)

    def _last(self, current: Tensor, auxiliary: Tensor, scene: Scene | None) -> tuple[MatchingBlock, Tensor]:
        """The last block, and what it is given."""
        for block in self.blocks[:-1]:
            current = block(current, auxiliary, scene)
        last = self.blocks[-1]
        assert isinstance(last, MatchingBlock)
        return last, current
