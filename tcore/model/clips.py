"""An encoder of clips: tokens are tubes of frames; it folds into an encoder of frames."""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tcore.model.positions import PlaceKind, Places
from tcore.model.vit import VisionTransformer


class ClipTransformer(VisionTransformer):
    """A Vision Transformer that sees `slots` time slots of `tube` frames each.

    `sizes` are the arguments of the frame encoder that it folds into; blocks, tokens and norm are the same.

    >>> sizes = dict(dim=48, depth=1, num_heads=3, image_size=32, num_registers=0, class_token=False)
    >>> clips = ClipTransformer(sizes, "line", tube=2, slots=4)
    >>> clips.sequence(torch.zeros(1, 16, 1536)).shape, clips.fold().pos_embed.shape
    (torch.Size([1, 16, 48]), torch.Size([1, 4, 48]))
    """

    def __init__(self, sizes: Mapping[str, Any], places: PlaceKind, *, tube: int, slots: int) -> None:
        super().__init__(**sizes)
        self.frame_sizes, self.tube = dict(sizes), tube
        if tube > 1:
            cut = (tube, self.patch_size, self.patch_size)
            self.patch_embed.proj = nn.Conv3d(3, self.dim, kernel_size=cut, stride=cut)  # type: ignore[assignment]
        del self.pos_embed
        grid, class_token = self.native_grid, self.class_token
        self.places = Places(places, dim=self.dim, grid=grid, slots=slots, class_token=class_token)

    def table(self) -> Float[Tensor, "1 n d"]:
        """Positions of all tubes, that of the class token first."""
        return self.places()

    @torch.no_grad()
    def fold(self) -> VisionTransformer:
        """The frame encoder that this is for a frame repeated over the first time slot."""
        with torch.random.fork_rng(devices=[]):
            frames = VisionTransformer(**self.frame_sizes)
        whole = {name: _whole(value) for name, value in self.state_dict().items()}
        places = {name: whole.pop(name) for name in list(whole) if name.startswith("places.")}
        frames.load_state_dict(fold_tube(whole, _first_slot(places, whole, frames)))
        return frames.to(next(iter(whole.values())).device)


def fold_tube(state: Mapping[str, Tensor], positions: Float[Tensor, "1 n d"]) -> dict[str, Tensor]:
    """Weights of a clip encoder as those of a frame encoder: all frames of a tube are the same frame.

    `positions` are those of the first time slot, that of the class token first.
    """
    weight = state["patch_embed.proj.weight"]
    flat = weight.sum(dim=2) if weight.ndim == 5 else weight
    return {**state, "patch_embed.proj.weight": flat, "pos_embed": positions}


def absorb(
    state: Mapping[str, Tensor], gain: Float[Tensor, "3"], shift: Float[Tensor, "3"]
) -> dict[str, Tensor]:
    """The same encoder for other pixels: what it saw was pixel * gain + shift."""
    weight, bias = state["patch_embed.proj.weight"], state["patch_embed.proj.bias"]
    shifted = bias + (weight.flatten(2).sum(dim=2) * shift).sum(dim=1)
    scaled = weight * gain[:, None, None]
    return {**state, "patch_embed.proj.weight": scaled, "patch_embed.proj.bias": shifted}


def _first_slot(
    places: Mapping[str, Tensor], state: dict[str, Tensor], frames: VisionTransformer
) -> Float[Tensor, "1 n d"]:
    """Positions of the first time slot; a vector of time becomes part of the patch embedding's bias."""
    if "places.space" in places:
        return torch.cat(
            [places["places.frame"], places["places.space"] + places["places.time"][:, :1]], dim=1
        )
    if "places.time" in places:
        state["patch_embed.proj.bias"] = state["patch_embed.proj.bias"] + places["places.time"][0, 0]
    return places["places.table"][:, : frames.pos_embed.shape[1]]


def _whole(value: Any) -> Tensor:
    """A tensor that may be sharded, put together."""
    found: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return found
