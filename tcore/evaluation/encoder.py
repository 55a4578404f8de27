"""An encoder: frames in, a grid of features out, whichever network is inside.

Controls that have learned nothing are encoders too: what a score must beat to mean something.
"""

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tcore.data.arrays import as_clip
from tcore.data.render import MEAN, STD, normalize
from tcore.errors import InputError
from tcore.evaluation.resize import input_size
from tcore.model.vit import VisionTransformer
from tcore.text import format_size

MOST_PREFIX = 16  # tokens before the patches (CLS, registers) of a model that does not say how many it has


class PatchTokens(NamedTuple):
    """The patch tokens of a foreign model, after its final norm."""

    patches: Float[Tensor, "b n d"]


class Adapted(nn.Module):
    """A foreign model with the interface of ours: normalized images in, patch tokens out."""

    gain: Tensor
    shift: Tensor

    def __init__(
        self,
        model: nn.Module,
        read: Callable[[Tensor], Tensor],
        *,
        patch_size: int,
        num_prefix: int | None = None,
        mean: Sequence[float] = MEAN,
        std: Sequence[float] = STD,
    ) -> None:
        super().__init__()
        self.model = model.float()
        for module in model.modules():
            if type(module) is nn.Conv2d and module.padding_mode == "zeros" and module.padding != "same":
                module.forward = partial(exact_convolution, module)  # type: ignore[method-assign]
        self.read, self.patch_size, self.num_prefix = read, patch_size, num_prefix
        # Images arrive normalized by the ImageNet statistics; the model may expect others.
        ours, theirs = torch.tensor([MEAN, STD]), torch.tensor([mean, std])
        self.register_buffer("gain", (ours[1] / theirs[1])[:, None, None], persistent=False)
        self.register_buffer("shift", ((ours[0] - theirs[0]) / theirs[1])[:, None, None], persistent=False)
        self.renormalizes = (tuple(mean), tuple(std)) != (MEAN, STD)

    def forward(self, images: Float[Tensor, "b 3 height width"]) -> PatchTokens:
        """Patch tokens; the tokens before them are dropped, and must be as many as the model says."""
        rows, columns = (side // self.patch_size for side in images.shape[-2:])
        x = self.read(images * self.gain + self.shift if self.renormalizes else images)
        if x.ndim == 4 and x.shape[-2:] == (rows, columns):
            x = x.flatten(2).transpose(1, 2)
        spare = x.shape[1] - rows * columns
        allowed = range(MOST_PREFIX + 1) if self.num_prefix is None else (self.num_prefix,)
        if x.ndim != 3 or spare not in allowed:
            raise InputError(
                f"the model turns images of {tuple(images.shape[-2:])} into {tuple(x.shape)}, expected "
                f"{rows}x{columns} patches after {self.num_prefix or 'few'} other tokens: it cannot be used."
            )
        return PatchTokens(x[:, spare:])


def exact_convolution(conv: nn.Conv2d, images: Tensor) -> Tensor:
    """A convolution in fp32: PyTorch rounds to TF32 on CUDA, and has only a flag of the process instead."""
    padding = (0, 0) if isinstance(conv.padding, str) else conv.padding
    how = (conv.stride, padding, conv.dilation, False, (0, 0), conv.groups)
    # Not a benchmark, not deterministic, by cuDNN, without TF32.
    return torch._convolution(images, conv.weight, conv.bias, *how, False, False, True, False)


class Encoder(nn.Module):
    """A frozen frame encoder: uint8 frames in, a grid of features out.

    From `tcore.load_encoder("default")`, a run folder, or another name. Features of a video, the frames that
    look most like the first one, and a mask through all of them:

    >>> import tcore
    >>> encoder = tcore.load_encoder("default")
    >>> video = tcore.FrameStore.rendered(videos=1, frames=6, size=64).read(0, range(6))
    >>> features = encoder(video)  # or encoder(tcore.read_video("clip.mp4"))
    >>> features.shape  # time, channels, height / 16, width / 16
    torch.Size([6, 192, 4, 4])
    >>> looks = torch.nn.functional.normalize(features.mean(dim=(2, 3)), dim=1)
    >>> nearest = (looks @ looks[0]).argsort(descending=True)
    >>> int(nearest[0])
    0
    >>> mask = tcore.mark(video[0], encoder, box=(16, 16, 32, 32))
    >>> [labeled.frame for labeled in tcore.propagate(encoder, video, mask)]
    [0, 1, 2, 3, 4, 5]
    """

    copies = False
    """Whether labels are copied from the first frame, without any features."""

    def __init__(self, backbone: VisionTransformer | Adapted, name: str, report: str = "") -> None:
        super().__init__()
        self.backbone = backbone.eval().requires_grad_(False)
        self.name = name
        self.patch_size = backbone.patch_size
        self.report = report
        self.variant = ""
        """What differs from the encoder as it was trained, for its fingerprint."""
        self.notes: list[str] = []
        """What a score card must say about how it was trained."""

    def need_features(self) -> None:
        """Refuse, before anything is written, an encoder without features."""

    def fingerprint(self) -> str:
        """A short name for the weights and the reach; encoders with different ones differ."""
        digest = hashlib.sha256()
        for name, value in sorted(self.backbone.state_dict().items()):
            # As bytes, because numpy has no bfloat16.
            content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            digest.update(name.encode() + content.numpy().tobytes())
        if self.reach is not None:
            digest.update(f"reach {self.reach}".encode())
        digest.update(self.variant.encode())
        return digest.hexdigest()[:16]

    @property
    def reach(self) -> int | None:
        """How many patches away attention goes; None: everywhere, or unknown."""
        return self.backbone.reach if isinstance(self.backbone, VisionTransformer) else None

    def identity(self) -> dict[str, Any]:
        """What a result records about its encoder."""
        known: dict[str, Any] = {"name": self.name, "weights": self.fingerprint()}
        known |= {"notes": self.notes} if self.notes else {}
        return known if self.reach is None else known | {"reach": self.reach}

    @torch.no_grad()
    def forward(self, frames: Any) -> Float[Tensor, "time channels rows columns"]:
        """Features of the patches, after the final norm; the size must be a multiple of the patch.

        `frames` are uint8, time x height x width x RGB: a tensor, an array, or a list of frames of any kind;
        a single frame is a clip of one.
        """
        clip = as_clip(frames).to(next(self.parameters()).device)
        height, width = clip.shape[1:3]
        if height % self.patch_size or width % self.patch_size:
            fits = format_size(*input_size((height, width), self.patch_size))
            raise InputError(
                f"frames of {format_size(height, width)} do not divide into patches of {self.patch_size}: "
                f"resize or crop them, for example to {fits}."
            )
        return self.features(normalize(clip.permute(0, 3, 1, 2).float() / 255))

    @torch.no_grad()
    def features(
        self, images: Float[Tensor, "time 3 height width"]
    ) -> Float[Tensor, "time channels rows columns"]:
        """Features of images that are scaled and normalized already."""
        grid = tuple(side // self.patch_size for side in images.shape[-2:])
        return self.backbone(images).patches.transpose(1, 2).unflatten(2, grid)


class CopyFirst(Encoder):
    """Copies labels without using the frames."""

    copies = True

    def fingerprint(self) -> str:
        """A name of its own, because there are no weights: the controls' results must not be mixed up."""
        return "copy-first-frame"

    def need_features(self) -> None:
        """There are none."""
        no_features()


def load_control(name: str, patch_size: int = 16) -> Encoder:
    """`copy`: labels stay as in the first frame; a patch is its mean `color`, or all its `pixels`."""
    mean = mean_color(patch_size)
    if name == "color":
        color = Adapted(mean, mean, patch_size=patch_size, num_prefix=0)
        return Encoder(color, "control:color", "control: the features of a patch are its mean color")
    if name == "pixels":
        unfold, half, one = nn.PixelUnshuffle(patch_size), (0.5,) * 3, (1.0,) * 3
        pixels = Adapted(mean, unfold, patch_size=patch_size, num_prefix=0, mean=half, std=one)
        return Encoder(pixels, "control:pixels", "control: the features of a patch are its pixels")
    if name == "copy":
        blind = Adapted(mean, no_features, patch_size=patch_size, num_prefix=0)
        return CopyFirst(blind, "control:copy", "control: the labels of the first frame stay there")
    raise InputError(
        f"no encoder 'control:{name}': there are control:copy, control:color and control:pixels."
    )


def no_features(images: Tensor | None = None) -> NoReturn:
    """Refuse: copied labels have no features."""
    raise InputError("control:copy has no features: it can be scored (tcore evaluate), nothing else.")


def mean_color(patch_size: int) -> nn.Conv2d:
    """Red, green and blue of every patch, and a constant: features are compared by their direction alone."""
    mean = nn.Conv2d(3, 4, patch_size, stride=patch_size)
    with torch.no_grad():
        weights = torch.eye(4, 3)[:, :, None, None] / patch_size**2
        mean.weight.copy_(weights.expand_as(mean.weight))
        mean.bias.copy_(torch.tensor([0.0, 0.0, 0.0, 1.0]))  # type: ignore[union-attr]
    return mean
