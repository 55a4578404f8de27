"""Decoders that turn what an encoder saw of a frame or clip into the pixels of the rest."""

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn

from tcore.model.attention import Attention
from tcore.model.pixels import fill, spatial_dropout
from tcore.model.positions import PlaceKind, Places
from tcore.model.vit import Block, Mlp

BlockKind = Literal["self", "cross-mlp-self", "cross-self-mlp"]


class CrossAttention(nn.Module):
    """Multi-head attention of queries to a memory."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, 2 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(
        self, x: Float[Tensor, "b n d"], memory: Float[Tensor, "b m d"], dropout: float = 0.0
    ) -> Float[Tensor, "b n d"]:
        """Let every token look at the memory."""
        q = self.q(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        k, v = self.kv(memory).unflatten(-1, (2, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
        return self.proj(seen.transpose(1, 2).flatten(2))


class CrossBlock(nn.Module):
    """Attention to a memory, attention of the tokens among themselves, and an MLP.

    `cross-mlp-self` norms after each residual (SiamMAE and CropMAE as released with CropMAE);
    `cross-self-mlp` before each, and the memory too (RSP). Dropout draws from torch's own generator.
    """

    def __init__(self, dim: int, num_heads: int, hidden: int, kind: BlockKind, dropout: float) -> None:
        super().__init__()
        self.kind, self.dropout = kind, dropout
        self.cross = CrossAttention(dim, num_heads)
        self.own = Attention(dim, num_heads)
        self.mlp = Mlp(dim, hidden)
        self.norm_cross, self.norm_own, self.norm_mlp = (nn.LayerNorm(dim, eps=1e-6) for _ in range(3))
        if kind == "cross-self-mlp":
            self.norm_memory = nn.LayerNorm(dim, eps=1e-6)

    def forward(self, x: Float[Tensor, "b n d"], memory: Float[Tensor, "b m d"]) -> Float[Tensor, "b n d"]:
        """Add the three residuals."""
        if self.kind == "cross-self-mlp":
            x = x + self.cross(self.norm_cross(x), self.norm_memory(memory))
            x = x + self.own(self.norm_own(x))
            return x + self.mlp(self.norm_mlp(x))
        rate = self.dropout if self.training else 0.0

        def drop(values: Tensor) -> Tensor:
            return F.dropout(values, rate, rate > 0)

        x = self.norm_cross(x + drop(self.cross(x, memory, rate)))
        x = self.norm_mlp(x + drop(self.mlp.fc2(drop(F.gelu(self.mlp.fc1(x))))))
        return self.norm_own(x + drop(self._attend(x, rate)))

    def _attend(self, x: Float[Tensor, "b n d"], rate: float) -> Float[Tensor, "b n d"]:
        q, k, v = self.own.qkv(x).unflatten(-1, (3, self.own.num_heads, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, dropout_p=rate)
        return self.own.proj(seen.transpose(1, 2).flatten(2))


class SpatialDropout:
    """DropMAE's attention dropout: its share, and the noise that decides, drawn for every block anew."""

    def __init__(self, ratio: float, generator: torch.Generator | None = None) -> None:
        self.ratio, self.generator = ratio, generator

    def noise(self, block: int, logits: Float[Tensor, "b heads n n"]) -> Float[Tensor, "b heads n half"]:
        """Standard exponential noise for the pairs of tokens within a frame."""
        empty = torch.empty_like(logits[..., : logits.shape[-1] // 2], dtype=torch.float32)
        return empty.exponential_(generator=self.generator)

    def attend(self, attention: Attention, x: Float[Tensor, "b n d"], block: int) -> Float[Tensor, "b n d"]:
        """Self-attention in which some tokens of the own frame are not seen; no gradient of the choice."""
        q, k, v = attention.qkv(x).unflatten(-1, (3, attention.num_heads, -1)).permute(2, 0, 3, 1, 4)
        with torch.no_grad():
            logits = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
            _, dropped = spatial_dropout(logits, self.noise(block, logits), self.ratio)
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=~dropped)
        return attention.proj(seen.transpose(1, 2).flatten(2))


class PixelDecoder(nn.Module):
    """From tokens of the visible patches to the pixels of the masked ones.

    Tokens go through it in the order class token, visible, masked: attention knows no order, and so nothing
    has to be moved to its place.

    >>> decoder = PixelDecoder(dim=48, width=32, depth=1, num_heads=4, grid=2, outputs=192)
    >>> visible, masked = torch.tensor([[0, 3]]), torch.tensor([[1, 2]])
    >>> decoder(torch.zeros(1, 3, 48), visible, masked).shape
    torch.Size([1, 2, 192])
    """

    def __init__(
        self,
        *,
        dim: int,
        width: int,
        depth: int,
        num_heads: int,
        grid: int,
        outputs: int,
        block: BlockKind = "self",
        hidden: int | None = None,
        dropout: float = 0.0,
        places: PlaceKind = "grid",
        slots: int = 1,
        class_token: Literal["encoder", "own", "none"] = "encoder",
        embed_bias: bool = True,
    ) -> None:
        super().__init__()
        self.num_prefix = int(class_token != "none")
        self.embed = nn.Linear(dim, width, bias=embed_bias)
        self.mask_token = nn.Parameter(torch.empty(1, 1, width))
        # MAE-ST's starts at 0.
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width)) if class_token == "own" else None
        self.places = Places(places, dim=width, grid=grid, slots=slots, class_token=self.num_prefix > 0)
        blocks: list[nn.Module] = [
            Block(width, num_heads, None)
            if block == "self"
            else CrossBlock(width, num_heads, hidden or 4 * width, block, dropout)
            for _ in range(depth)
        ]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.pred = nn.Linear(width, outputs)
        nn.init.normal_(self.mask_token, std=0.02)

    def forward(
        self,
        tokens: Float[Tensor, "b k d"] | None,
        visible: Int64[Tensor, "b v"],
        masked: Int64[Tensor, "b m"],
        memory: Float[Tensor, "b r w"] | None = None,
    ) -> Float[Tensor, "b out c"]:
        """Predictions at the masked places; without `tokens`, from the memory alone, at all places."""
        if tokens is None:
            x = (self.mask_token + self.places()).expand(len(visible), -1, -1)
            return self.decode(x, memory)[:, self.num_prefix :]
        x = self.arrange(self.embedded(tokens), visible, masked)
        return self.decode(x, memory, first=x.shape[1] - masked.shape[1])

    def embedded(self, tokens: Float[Tensor, "b k d"]) -> Float[Tensor, "b k w"]:
        """The encoder's tokens in the decoder's width; a class token of its own takes the place of theirs."""
        x = self.embed(tokens if self.cls_token is None else tokens[:, 1:])
        if self.cls_token is None:
            return x
        return torch.cat([self.cls_token.to(x.dtype).expand(len(x), -1, -1), x], dim=1)

    def arrange(
        self, x: Float[Tensor, "b k w"], visible: Int64[Tensor, "b v"], masked: Int64[Tensor, "b m"]
    ) -> Float[Tensor, "b n w"]:
        """Class token, visible tokens and mask tokens, each with its position."""
        table = self.places()[0]
        front, patches = table[: self.num_prefix].expand(len(x), -1, -1), table[self.num_prefix :]
        seen = x + torch.cat([front, patches[visible]], dim=1)
        return torch.cat([seen, self.mask_token + patches[masked]], dim=1)

    def in_place(self, x: Float[Tensor, "b k w"], visible: Int64[Tensor, "b k"]) -> Float[Tensor, "b n w"]:
        """The same in the order of the places, for attention that must know which frame a token is of."""
        table = self.places()[:, self.num_prefix :]
        return fill(self.mask_token, x, visible, table.shape[1]) + table

    def decode(
        self,
        x: Float[Tensor, "b n w"],
        memory: Float[Tensor, "b r w"] | None = None,
        first: int = 0,
        drop: SpatialDropout | None = None,
    ) -> Float[Tensor, "b out c"]:
        """Predictions of the tokens from the `first` on."""
        for number, block in enumerate(self.blocks):
            if isinstance(block, CrossBlock):
                x = block(x, memory)
            elif drop is not None:
                assert isinstance(block, Block)
                x = x + drop.attend(block.attn, block.norm1(x), number)
                x = x + block.transform(x)
            else:
                x = block(x)
        return self.pred(self.norm(x[:, first:]))


def initialize(module: nn.Module, *, split: bool = False) -> None:
    """Matrices of linear layers and patch embeddings by Xavier's rule, biases of linear layers 0, as in MAE.

    With `split`, queries, keys and values are three matrices (MAE-ST); in the cross-attention of SiamMAE
    they are parts of one.
    """
    for name, inner in module.named_modules():
        if isinstance(inner, nn.Linear):
            for matrix in inner.weight.chunk(3 if split and name.endswith("qkv") else 1):
                nn.init.xavier_uniform_(matrix)
            if inner.bias is not None:
                nn.init.zeros_(inner.bias)
        elif isinstance(inner, nn.Conv2d | nn.Conv3d):
            nn.init.xavier_uniform_(inner.weight.view(inner.weight.shape[0], -1))
    for inner in module.modules():
        if isinstance(inner, CrossBlock) and inner.kind == "cross-mlp-self":
            width = inner.cross.q.in_features
            for part in (inner.cross.q, inner.cross.kv):
                nn.init.uniform_(part.weight, -((6 / (4 * width)) ** 0.5), (6 / (4 * width)) ** 0.5)
