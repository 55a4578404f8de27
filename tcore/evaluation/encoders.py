"""Encoders for evaluation: what a run exported, or an untrained network."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, UInt8
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from tcore.errors import InputError
from tcore.evaluation.resize import normalize_images
from tcore.model.vit import VisionTransformer

# Width, depth and heads of the usual sizes.
SIZES = {"vitti16": (192, 12, 3), "vits16": (384, 12, 6), "vitb16": (768, 12, 12), "vitl16": (1024, 24, 16)}


class Encoder(nn.Module):
    """A frozen frame encoder: uint8 frames in, a grid of features out."""

    def __init__(self, backbone: VisionTransformer, name: str) -> None:
        super().__init__()
        self.backbone = backbone.eval().requires_grad_(False)
        self.name = name
        self.patch_size = backbone.patch_size

    def fingerprint(self) -> str:
        """A short name for the weights; another one means another encoder."""
        digest = hashlib.sha256()
        for name, value in sorted(self.backbone.state_dict().items()):
            digest.update(name.encode() + value.detach().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]

    @torch.no_grad()
    def forward(
        self, frames: UInt8[Tensor, "time height width 3"]
    ) -> Float[Tensor, "time channels rows columns"]:
        """Features of the patches, after the final norm; the size must be a multiple of the patch."""
        return self.features(normalize_images(frames.permute(0, 3, 1, 2).float() / 255))

    @torch.no_grad()
    def features(
        self, images: Float[Tensor, "time 3 height width"]
    ) -> Float[Tensor, "time channels rows columns"]:
        """The same for images that are scaled and normalised already."""
        grid = tuple(side // self.patch_size for side in images.shape[-2:])
        return self.backbone(images).patches.transpose(1, 2).unflatten(2, grid)


def load_encoder(spec: str | Path) -> Encoder:
    """The encoder of a run folder, of an encoder.safetensors with its encoder.json, or random:vits16.

    >>> import tempfile, tcore
    >>> config = tcore.recipe("quickstart", {"optim.steps": 1, "optim.batch": 2, "rendered.videos": 2})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = tcore.train(config, folder + "/run", quiet=True)
    ...     encoder = tcore.load_encoder(run)
    >>> encoder(torch.zeros(2, 64, 96, 3, dtype=torch.uint8)).shape
    torch.Size([2, 96, 8, 12])
    """
    if str(spec).startswith("random:"):
        return untrained(str(spec))
    path = Path(spec)
    file = path / "encoder.safetensors" if path.is_dir() else path
    if not file.is_file():
        what = "holds no encoder.safetensors" if path.is_dir() else "does not exist"
        raise InputError(f"encoder {path} {what}: give a run folder or an encoder.safetensors file.")
    backbone = VisionTransformer(**_read_card(file))
    try:
        state = load_file(str(file))
    except (SafetensorError, OSError) as error:
        raise InputError(f"cannot read encoder {file}: {error}.") from error
    load_strictly(backbone, state, file)
    return Encoder(backbone, str(spec))


def untrained(spec: str) -> Encoder:
    """A network at the published initialisation, always the same one."""
    name = spec.removeprefix("random:")
    if name not in SIZES:
        raise InputError(f"no encoder {spec!r}: there are {', '.join(f'random:{size}' for size in SIZES)}.")
    dim, depth, num_heads = SIZES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Encoder(VisionTransformer(dim=dim, depth=depth, num_heads=num_heads), spec)


def load_strictly(module: nn.Module, state: dict[str, Tensor], source: Path) -> None:
    """Load weights; every missing, unexpected or misshapen one is an error that lists them."""
    expected = {name: tuple(value.shape) for name, value in module.state_dict().items()}
    found = {name: tuple(value.shape) for name, value in state.items()}
    problems = [f"missing {name}" for name in expected if name not in found]
    problems += [f"unexpected {name}" for name in found if name not in expected]
    problems += [
        f"{name} is {found[name]}, expected {expected[name]}"
        for name in expected
        if name in found and found[name] != expected[name]
    ]
    if problems:
        raise InputError(f"weights in {source} do not fit: {'; '.join(problems)}.")
    module.load_state_dict(state)


def _read_card(file: Path) -> dict[str, Any]:
    """Sizes of the encoder; kept encoders share the card of their run."""
    candidates = (file.with_name("encoder.json"), file.parent.parent / "encoder.json")
    card = next((path for path in candidates if path.is_file()), None)
    if card is None:
        raise InputError(f"no encoder.json beside {file}: it says how the encoder is built.")
    try:
        vit: dict[str, Any] = json.loads(card.read_text(encoding="utf-8"))["vit"]
        return vit
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"cannot read {card}: {error!r}.") from error
