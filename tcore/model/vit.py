"""The frame encoder: a Vision Transformer with registers, masks and stochastic depth by subset."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from safetensors.torch import load, save
from torch import Tensor, nn

from tcore.config import Resize, VitSpec
from tcore.errors import InputError
from tcore.files import open_regular, write_bytes
from tcore.model.attention import LARGE, Attention, Seen, tiles_within_reach, within_reach, working_dtype
from tcore.model.positions import ResizePositions, grid_positions, resize_positions
from tcore.model.subset import (
    Share,
    Subset,
    Take,
    Wanted,
    add_residual,
    draw_gates,
    draw_subsets,
    gates,
    scale_by,
)

CARD_FORMAT = "tcore-encoder-1"  # of the JSON file beside an encoder's weights, which says how it is built


class Tokens(NamedTuple):
    """What the encoder makes of a frame, after the final norm."""

    frame: Float[Tensor, "b d"]
    registers: Float[Tensor, "b r d"]
    patches: Float[Tensor, "b n d"]
    keys: Float[Tensor, "b n d"] | None = None
    """Where asked for: keys of the last block of all tokens, heads side by side."""


class Mlp(nn.Module):
    """Two linear layers with an exact GELU between them."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)
        self.fast: Callable[[Tensor, nn.Linear, nn.Linear], Tensor] | None = None
        """The same by kernels for a GPU, in bf16; the trainer sets it."""

    def forward(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
        """Transform each token by itself."""
        if self.fast is not None and working_dtype(x) == torch.bfloat16:
            return self.fast(x, self.fc1, self.fc2)
        return self.fc2(F.gelu(self.fc1(x)))


class LayerScale(nn.Module):
    """A learned gain per channel on a residual."""

    def __init__(self, dim: int, initial: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((dim,), initial))

    def forward(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
        """Scale each channel."""
        return x * self.gamma


class Block(nn.Module):
    """A pre-norm transformer block whose residuals can be computed for a random subset of the batch."""

    def __init__(self, dim: int, num_heads: int, layer_scale: float | None) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = Attention(dim, num_heads)
        self.ls1 = nn.Identity() if layer_scale is None else LayerScale(dim, layer_scale)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = Mlp(dim, 4 * dim)
        self.ls2 = nn.Identity() if layer_scale is None else LayerScale(dim, layer_scale)

    def attend(
        self, x: Float[Tensor, "b n d"], first_only: bool = False, seen: Seen = None
    ) -> Float[Tensor, "b q d"]:
        """Residual of the attention half."""
        return self.ls1(self.attn(self.norm1(x), first_only, seen))

    def transform(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
        """Residual of the MLP half."""
        return self.ls2(self.mlp(self.norm2(x)))

    def forward(
        self,
        x: Float[Tensor, "b n d"],
        attended: Share = None,
        transformed: Share = None,
        first_only: bool = False,
        some: Subset | None = None,
        seen: Seen = None,
        keys: bool = False,
    ) -> Float[Tensor, "m q d"]:
        """Add both residuals, each for its own share of the batch.

        The last block may be asked for `some` samples, with gates as shares, for the first token alone, or
        for nothing but its `keys`.
        """
        if keys:
            return self.attn.keys(self.norm1(x))
        if some is not None:
            attended, transformed = (
                None if gate is None else gate[some.rows] for gate in (attended, transformed)
            )
            x = Take.apply(x, *some)  # type: ignore[no-untyped-call]
        if first_only:
            assert not isinstance(attended, Subset)
            x = x[:, :1] + scale_by(attended, self.attend(x, first_only=True))
        else:
            x = add_residual(x, partial(self.attend, seen=seen), attended)
        return add_residual(x, self.transform, transformed)


def run_block(
    block: nn.Module,
    x: Float[Tensor, "b n d"],
    attended: Share,
    transformed: Share,
    first_only: bool = False,
    some: Subset | None = None,
    seen: Seen = None,
    keys: bool = False,
) -> Float[Tensor, "m q d"]:
    """One block; compiled, a few graphs serve all blocks of a network."""
    result: Tensor = block(x, attended, transformed, first_only, some, seen, keys)
    return result


class PatchEmbed(nn.Module):
    """Cut an image into patches and project each to the width of the encoder."""

    def __init__(self, dim: int, patch_size: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, dim, kernel_size=patch_size, stride=patch_size)

    def forward(self, images: Float[Tensor, "b 3 height width"]) -> Float[Tensor, "b n d"]:
        """Patches in row-major order."""
        # The convolution as a matrix product: its patches do not overlap, and GPUs are far better at it.
        side = self.proj.stride[0]
        grid = images.to(working_dtype(images)).unflatten(3, (-1, side)).unflatten(2, (-1, side))
        pixels = grid.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        return F.linear(pixels, self.proj.weight.flatten(1), self.proj.bias)


class VisionTransformer(nn.Module):
    """The frame encoder of T-CoRe; parameter names are those of the released checkpoints.

    >>> encoder = VisionTransformer(dim=48, depth=2, num_heads=3, image_size=64)
    >>> tokens = encoder(torch.zeros(1, 3, 64, 96))
    >>> tokens.frame.shape, tokens.patches.shape
    (torch.Size([1, 48]), torch.Size([1, 24, 48]))
    """

    def __init__(
        self,
        *,
        dim: int = 384,
        depth: int = 12,
        num_heads: int = 6,
        patch_size: int = 16,
        image_size: int = 224,
        num_registers: int = 4,
        layer_scale: float | None = 1e-5,
        drop_path: float = 0.0,
        drop_path_rule: Literal["uniform", "linear"] = "uniform",
        drop_path_form: Literal["subset", "sample"] = "subset",
        reach: int | None = None,
        position_std: float = 0.02,
        position_resize: Resize = "size",
        class_token: bool = True,
        class_std: float = 1e-6,
        positions: Literal["learned", "sincos", "grid"] = "learned",
        init: Literal["trunc-normal", "xavier"] = "trunc-normal",
        train_patch_embed: bool = True,
    ) -> None:
        super().__init__()
        self.dim, self.depth, self.num_heads, self.reach = dim, depth, num_heads, reach
        self.patch_size, self.num_registers = patch_size, num_registers
        self.num_class, self.class_token, self.position_kind = int(class_token), class_token, positions
        self.num_prefix = self.num_class + num_registers
        self.native_grid = image_size // patch_size
        self.position_resize: Resize = position_resize
        self.drop_path, self.drop_path_form = drop_path, drop_path_form
        shares = torch.linspace(0, drop_path, depth).tolist()
        self.drop_rates = [drop_path] * depth if drop_path_rule == "uniform" else shares
        self.cls_token = nn.Parameter(torch.empty(1, self.num_class, dim))
        self.pos_embed = nn.Parameter(torch.empty(1, self.num_class + self.native_grid**2, dim))
        self.register_tokens = nn.Parameter(torch.empty(1, num_registers, dim))
        self.mask_token = nn.Parameter(torch.zeros(1, dim))
        self.patch_embed = PatchEmbed(dim, patch_size)
        self.blocks = nn.ModuleList(Block(dim, num_heads, layer_scale) for _ in range(depth))
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.run_block = run_block
        if positions != "learned":
            fixed = self.fixed_positions(self.native_grid, self.native_grid)
            self.pos_embed = nn.Parameter(fixed, requires_grad=False)
        else:
            nn.init.trunc_normal_(self.pos_embed, std=position_std)
        nn.init.normal_(self.cls_token, std=class_std)
        nn.init.normal_(self.register_tokens, std=1e-6)
        self._initialize(init)
        self.patch_embed.requires_grad_(train_patch_embed)

    def _initialize(self, init: Literal["trunc-normal", "xavier"]) -> None:
        """Start the matrices; by Xavier's rule that of q, k and v counts as three, and patches take part."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                if init == "trunc-normal":
                    nn.init.trunc_normal_(module.weight, std=0.02)
                else:
                    for matrix in module.weight.chunk(3 if name.endswith("qkv") else 1):
                        nn.init.xavier_uniform_(matrix)
                nn.init.zeros_(module.bias)
        if init == "xavier":
            nn.init.xavier_uniform_(self.patch_embed.proj.weight.view(self.dim, -1))
            nn.init.zeros_(self.patch_embed.proj.bias)  # type: ignore[arg-type]

    def forward(
        self,
        images: Float[Tensor, "b 3 height width"],
        mask: Bool[Tensor, "b n"] | None = None,
        generator: torch.Generator | None = None,
        stochastic_depth: bool = True,
        wanted: Wanted | Literal["all", "frames", "keys"] = "all",
    ) -> Tokens:
        """Encode images of any size that is a multiple of the patch; masked patches are not seen.

        The last block computes only the tokens that are wanted; the others are not in the result. Wanted
        "keys" are all tokens and the keys of the last block.
        """
        height, width = images.shape[-2:]
        if height % self.patch_size or width % self.patch_size:
            raise InputError(
                f"image size {width}x{height} is not a multiple of the patch size {self.patch_size}: "
                "resize or crop the frames first."
            )
        x = self.patch_embed(images)
        if mask is not None:
            x = torch.where(mask[..., None], self.mask_token.to(x.dtype), x)
        rows, columns = height // self.patch_size, width // self.patch_size
        seen: Seen = None
        if self.reach is not None:
            # Training keeps the form that its losses were computed with.
            tiled = rows * columns > LARGE and not self.training and not torch.is_grad_enabled()
            within = tiles_within_reach if tiled else within_reach
            seen = within(self.reach, rows, columns, self.num_prefix, x.device)
        position = self.positions(rows, columns)
        frame = (self.cls_token + position[:, : self.num_class]).expand(x.shape[0], -1, -1)
        registers = self.register_tokens.expand(x.shape[0], -1, -1)
        x = torch.cat([frame, registers, x + position[:, self.num_class :]], dim=1)
        shares: list[Share] = [None] * (2 * len(self.blocks))
        if self.training and stochastic_depth and self.drop_path > 0:
            draw = draw_subsets if self.drop_path_form == "subset" else draw_gates
            rates = [rate for rate in self.drop_rates for _ in range(2)]
            shares[:] = draw(rates, x.shape[0], generator, x.device)
        pairs = list(zip(shares[::2], shares[1::2], strict=True))
        in_full = len(pairs) - (wanted != "all")
        for block, pair in zip(self.blocks[:in_full], pairs[:in_full], strict=True):
            x = self.run_block(block, x, *pair, seen=seen)
        if wanted == "keys":
            keys = self.run_block(self.blocks[-1], x, None, None, keys=True)
            x = self.norm(self.run_block(self.blocks[-1], x, *pairs[-1], seen=seen))
            return self._tokens(x[:, 0], x)._replace(keys=keys)
        if wanted != "all":
            return self._finish(x, gates(pairs[-1][0]), gates(pairs[-1][1]), wanted, seen)
        x = self.norm(x)
        return self._tokens(x[:, 0] if self.num_class else x[:, self.num_prefix :].mean(dim=1), x)

    def sequence(
        self, pixels: Float[Tensor, "b k c"], visible: Int64[Tensor, "b k"] | None = None
    ) -> Float[Tensor, "b n d"]:
        """Tokens of some patches alone (without `visible`: of all), after the final norm, class token first.

        Patches come as pixels with the channels last, as `pixels.patchify` makes them: those that are not
        seen are not even projected.
        """
        weight = self.patch_embed.proj.weight
        x = F.linear(pixels, weight.movedim(1, -1).flatten(1), self.patch_embed.proj.bias)
        position = self.table()
        front, patches = position[:, : self.num_class], position[0, self.num_class :]
        frame = (self.cls_token + front).expand(x.shape[0], -1, -1)
        x = torch.cat([frame, x + (patches if visible is None else patches[visible])], dim=1)
        for block in self.blocks:
            x = self.run_block(block, x, None, None)
        return self.norm(x)

    def table(self) -> Float[Tensor, "1 n d"]:
        """Positions of all tokens that it is trained on, that of the class token first."""
        return self.pos_embed

    def _finish(
        self,
        x: Float[Tensor, "b n d"],
        attended: Float[Tensor, "b"] | None,
        transformed: Float[Tensor, "b"] | None,
        wanted: Wanted | Literal["frames"],
        seen: Seen,
    ) -> Tokens:
        """The last block, for what is wanted alone: keys and values of all tokens, queries and MLP of few."""

        def last(first_only: bool, some: Subset | None) -> Tensor:
            made = self.run_block(self.blocks[-1], x, attended, transformed, first_only, some, seen)
            return self.norm(made)

        if wanted == "frames":
            frames = last(True, None)
            return self._tokens(frames[:, 0], frames[:0])
        whole, frames = last(False, wanted.whole), last(True, wanted.frame_only)
        both = torch.cat([whole[:, 0], frames[:, 0]])
        rows = torch.cat([wanted.whole.rows, wanted.frame_only.rows])
        return self._tokens(Take.apply(both, rows.argsort(), rows), whole)  # type: ignore[no-untyped-call]

    def _tokens(self, frame: Float[Tensor, "b d"], x: Float[Tensor, "m n d"]) -> Tokens:
        return Tokens(frame, x[:, self.num_class : self.num_prefix], x[:, self.num_prefix :])

    def sizes(self) -> dict[str, Any]:
        """What an encoder card holds to build this network again: fields of VitSpec, and the image size."""
        names = ("dim", "depth", "num_heads", "patch_size", "num_registers", "reach")
        sizes = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if not any(name.endswith(".gamma") for name, _ in self.named_parameters()):
            sizes["layer_scale"] = None
        if self.position_resize != "size":
            sizes["position_resize"] = self.position_resize
        if self.position_kind != "learned":
            sizes["positions"] = self.position_kind
        if not self.class_token:
            sizes["class_token"] = False
        return sizes | {"image_size": self.native_grid * self.patch_size}

    @torch.no_grad()
    def frame_attention(self, images: Float[Tensor, "b 3 height width"]) -> Float[Tensor, "b heads n"]:
        """Where the frame token of the last block looks among the patches; for looking at."""
        last = self.blocks[-1]
        assert isinstance(last, Block)
        normed: list[Tensor] = []
        hook = last.norm1.register_forward_hook(lambda module, given, made: normed.append(made))
        try:
            self(images, stochastic_depth=False)
        finally:
            hook.remove()
        return last.attn.first_map(normed[0])[:, :, self.num_prefix :]

    def fixed_positions(self, rows: int, columns: int) -> Float[Tensor, "1 n d"]:
        """Positions that follow from a formula; 0 for the class token."""
        patches = grid_positions(rows, columns, self.dim, row_first=self.position_kind == "sincos")
        return F.pad(patches, (0, 0, self.num_class, 0))[None]

    def positions(self, rows: int, columns: int) -> Float[Tensor, "1 n d"]:
        """Position embedding for a grid; the native one as it is, others by bicubic resize in fp32."""
        native = self.native_grid
        if (rows, columns) == (native, native):
            return self.pos_embed
        if self.position_resize == "exact":
            return self.fixed_positions(rows, columns).to(self.pos_embed)
        grid = (
            self.pos_embed[:, self.num_class :].float().view(1, native, native, self.dim).permute(0, 3, 1, 2)
        )
        antialias = self.position_resize == "size"
        if grid.is_cuda and torch.is_grad_enabled():
            grid = ResizePositions.apply(grid, rows, columns, antialias)  # type: ignore[no-untyped-call]
        else:
            grid = resize_positions(grid, rows, columns, antialias=antialias)
        patches = grid.flatten(2).transpose(1, 2)
        return torch.cat([self.pos_embed[:, : self.num_class], patches.to(self.pos_embed)], dim=1)


def vit_sizes(vit: VitSpec, image_size: int) -> dict[str, Any]:
    """Arguments of the encoder of a run."""
    sizes = dict(vars(vit)) | {"image_size": image_size}
    del sizes["auxiliary_drop_path"]  # a setting of the method
    return sizes


def build_vit(vit: VitSpec, image_size: int) -> VisionTransformer:
    """An encoder with a position embedding for images of this size."""
    return VisionTransformer(**vit_sizes(vit, image_size))


def load_safetensors(path: Path) -> dict[str, Tensor]:
    """Weights of a file; read, not mapped: a mapped file that is cut off in use ends the process (SIGBUS)."""
    with open_regular(path) as file:
        return load(file.read())


def save_safetensors(tensors: Mapping[str, Tensor], path: Path, about: dict[str, str] | None = None) -> None:
    """Write weights atomically; `about` goes into the metadata of the same file."""
    plain = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    write_bytes(path, save(plain, metadata=about))
