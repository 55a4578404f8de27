"""Controls that have learned nothing, scored as encoders are: what a score must beat to mean something."""

from typing import NoReturn

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from tcore.errors import InputError
from tcore.evaluation.encoder import Adapted, Encoder
from tcore.text import to_stderr

PATCH = 16
CONTROLS = ("control:copy", "control:color")


def load_control(name: str) -> Encoder:
    """`copy`: labels stay where they are in the first frame; `color`: a patch is its mean color."""
    if name == "colour":
        to_stderr(f"tcore: control:colour is now called {CONTROLS[1]}.")
        name = "color"
    if name == "color":
        mean = mean_color()
        color = Adapted(mean, mean, patch_size=PATCH, num_prefix=0)
        return Encoder(color, CONTROLS[1], "control: the features of a patch are its mean color")
    if name == "copy":
        return copy_first()
    raise InputError(f"no encoder 'control:{name}': there are {' and '.join(CONTROLS)}.")


def copy_first(patch_size: int = PATCH) -> "CopyFirst":
    """The control that copies labels."""
    blind = Adapted(mean_color(), no_features, patch_size=patch_size, num_prefix=0)
    return CopyFirst(blind, CONTROLS[0], "control: the labels of the first frame stay there")


def raw_patches(patch_size: int) -> "RawPatches":
    """The control whose features are pixels."""
    blind = Adapted(mean_color(), no_features, patch_size=patch_size, num_prefix=0)
    return RawPatches(blind, "raw color patches")


class RawPatches(Encoder):
    """The pixels of each patch are its features."""

    def forward(
        self, frames: UInt8[Tensor, "time height width 3"]
    ) -> Float[Tensor, "time channels rows columns"]:
        """Colors between -0.5 and 0.5."""
        return F.pixel_unshuffle(frames.permute(0, 3, 1, 2).float() / 255 - 0.5, self.patch_size)


class CopyFirst(Encoder):
    """Copies labels without using the frames."""

    copies = True

    def fingerprint(self) -> str:
        """A name of its own, because there are no weights: the controls' results must not be mixed up."""
        return "copy-first-frame"

    def need_features(self) -> None:
        """There are none."""
        no_features()


def no_features(images: Tensor | None = None) -> NoReturn:
    """Refuse: copied labels have no features."""
    raise InputError(f"{CONTROLS[0]} has no features: it can be scored (tcore evaluate), nothing else.")


def mean_color() -> nn.Conv2d:
    """Red, green and blue of every patch, and a constant: features are compared by their direction alone."""
    mean = nn.Conv2d(3, 4, PATCH, stride=PATCH)
    with torch.no_grad():
        mean.weight.zero_()
        for channel in range(3):
            mean.weight[channel, channel] = 1 / PATCH**2
        mean.bias.copy_(torch.tensor([0.0, 0.0, 0.0, 1.0]))  # type: ignore[union-attr]
    return mean
