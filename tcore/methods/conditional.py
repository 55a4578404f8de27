"""Reconstruction of a frame from another one: SiamMAE and CropMAE.

SiamMAE (arXiv:2305.14344) sees an earlier frame whole and 5% of a later one; CropMAE (arXiv:2403.17823) sees
a crop whole and two patches of a smaller crop of it. The decoder carries pixels from one to the other.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from tcore.config import Config
from tcore.methods.reconstruction import PixelBatch, PixelMethod, build_frame_encoder, decoder_sizes
from tcore.methods.settings_pixel import CropMaeSettings, SiamMaeSettings
from tcore.model.decoder import PixelDecoder, initialize
from tcore.model.pixels import masked_error, take
from tcore.model.vit import VisionTransformer


class Conditional(PixelMethod):
    """Predict the masked pixels of a frame from a few visible patches and from a frame that is seen whole."""

    def __init__(self, backbone: VisionTransformer, decoder: PixelDecoder) -> None:
        super().__init__(backbone, decoder, {"masked": 1.0})

    def forward(
        self, batch: PixelBatch, values: Mapping[str, float], generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """The error at the masked patches."""
        assert batch.memory is not None
        patches = self.patches(batch.target)
        memory = self.backbone.sequence(self.patches(batch.memory))
        self.observe(memory)
        tokens = self.backbone.sequence(take(patches, batch.visible), batch.visible)
        with seeded(generator, patches.device):
            prediction = self.decoder(tokens, batch.visible, batch.masked, self.decoder.embed(memory))
        return {"masked": masked_error(prediction, self.wanted(batch, patches), samples=batch.samples)}

    def predictions(self, batch: PixelBatch) -> dict[str, Tensor]:
        """Of the masked patches."""
        assert batch.memory is not None
        memory = self.decoder.embed(self.backbone.sequence(self.patches(batch.memory)))
        seen = take(self.patches(batch.target), batch.visible)
        tokens = self.backbone.sequence(seen, batch.visible)
        return {"prediction": self.decoder(tokens, batch.visible, batch.masked, memory)}


@contextmanager
def seeded(generator: torch.Generator | None, device: torch.device) -> Iterator[None]:
    """Let dropout, which takes no generator, draw from the seed of one."""
    # What records a CUDA graph, which must not be seeded then, seeds it before every replay.
    if generator is None or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        yield
        return
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(generator.initial_seed())
        yield


def build_conditional(config: Config, settings: SiamMaeSettings | CropMaeSettings) -> Conditional:
    """SiamMAE or CropMAE, which differ in their samples alone; weights drawn from torch's generator."""
    decoder = PixelDecoder(
        **decoder_sizes(config, settings.decoder),
        block="cross-mlp-self",
        hidden=settings.decoder.hidden,
        dropout=settings.decoder.dropout,
    )
    initialize(decoder)
    return Conditional(build_frame_encoder(config), decoder)
