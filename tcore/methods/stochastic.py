"""RSP (arXiv:2406.07398): predict a future frame from the current one and a random latent.

Three passes of one encoder: the current frame, the future frame with noise, which the posterior of the
latent may look at, and a quarter of the future frame. The decoder knows what it predicts from its memory
alone; it has two tasks: the whole future frame, and the masked patches of the future frame.
"""

from collections.abc import Mapping

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from tcore.config import Config
from tcore.methods.method import Part, named_parameters
from tcore.methods.reconstruction import PixelBatch, PixelMethod, build_frame_encoder, decoder_sizes
from tcore.methods.settings_pixel import LatentConfig, RspSettings
from tcore.model.decoder import PixelDecoder, initialize
from tcore.model.pixels import (
    balanced_divergence,
    masked_error,
    noise_seeds,
    normal_noise,
    one_hot_samples,
    pixel_targets,
    take,
    uniform_noise,
)
from tcore.model.vit import VisionTransformer

PRIOR_SAMPLES = 2  # futures that a figure shows


class Latent(nn.Module):
    """Categorical variables: what the future frame may be, given the current one, or given both."""

    def __init__(self, dim: int, width: int, variables: int, values: int) -> None:
        super().__init__()
        self.variables, self.values = variables, values
        self.posterior, self.prior = (
            nn.Sequential(nn.Linear(seen, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, variables * values))
            for seen in (2 * dim, dim)
        )
        self.embed = nn.Linear(variables * values, width)
        self.embed_memory = nn.Linear(dim, width)

    def logits(
        self, current: Float[Tensor, "b d"], future: Float[Tensor, "b d"]
    ) -> tuple[Float[Tensor, "b variables values"], Float[Tensor, "b variables values"]]:
        """Logits of posterior and prior from class tokens, in fp32."""
        shape = (self.variables, self.values)
        posterior = self.posterior(torch.cat([current, future], dim=1)).float().unflatten(1, shape)
        return posterior, self.prior(current).float().unflatten(1, shape)


class Stochastic(PixelMethod):
    """Predict the future frame from the current one and a random latent, and from some of its patches."""

    def __init__(
        self, backbone: VisionTransformer, decoder: PixelDecoder, latent: Latent, settings: LatentConfig
    ) -> None:
        super().__init__(backbone, decoder, {"future": 1.0, "masked": 1.0, "kl": settings.weight})
        self.latent, self.settings = latent, settings

    def forward(
        self, batch: PixelBatch, values: Mapping[str, float], generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """Errors of both tasks, and the divergence of posterior and prior."""
        assert batch.memory is not None
        patches, samples = self.patches(batch.target), batch.samples
        current = self.backbone.sequence(self.patches(batch.memory))
        self.observe(current)
        seeds = noise_seeds(batch.visible)
        noisy = self.backbone.sequence(patches + self.settings.noise * self.pixel_noise(seeds, patches))
        posterior, prior = self.latent.logits(current[:, 0], noisy[:, 0])
        z = straight_through(posterior, self.sample(seeds, posterior))
        future = self.decode_future(current, z, batch.visible)
        kept = self.backbone.sequence(take(patches, batch.visible), batch.visible)
        masked = self.decode_masked(kept, batch)
        targets = pixel_targets(patches, self.target)
        hidden = torch.zeros_like(targets[..., 0]).scatter(1, batch.masked, 1.0)
        divergence = balanced_divergence(posterior, prior, self.settings.balance).mean()
        return {
            "future": masked_error(future, targets, samples=samples),
            "masked": masked_error(masked, targets, hidden, samples),
            # The floor acts on the mean of a part.
            "kl": divergence.clamp(min=self.settings.floor) * (len(patches) / samples),
        }

    def pixel_noise(
        self, seeds: Int64[Tensor, "b"], patches: Float[Tensor, "b n c"]
    ) -> Float[Tensor, "b n c"]:
        """Standard normal noise that follows from each sample alone."""
        return normal_noise(seeds, patches[0].numel()).view_as(patches)

    def sample(
        self, seeds: Int64[Tensor, "b"], logits: Float[Tensor, "b variables values"], stream: int = 2
    ) -> Float[Tensor, "b variables values"]:
        """A sample of the latent, in the same way; other streams give other samples."""
        uniform = uniform_noise(seeds, logits[0].numel(), stream)
        return one_hot_samples(logits.detach(), uniform.view_as(logits))

    def decode_future(
        self,
        current: Float[Tensor, "b n d"],
        z: Float[Tensor, "b variables values"],
        visible: Int64[Tensor, "b k"],
    ) -> Float[Tensor, "b patches c"]:
        """The future frame from the current one and the latent."""
        memory = self.memory(current, z)
        found: Tensor = self.decoder(None, visible, visible, memory)
        return found

    def memory(
        self, current: Float[Tensor, "b n d"], z: Float[Tensor, "b variables values"]
    ) -> Float[Tensor, "b m w"]:
        """The latent without a position, then the current frame."""
        latent = self.latent.embed(z.flatten(1))[:, None]
        return torch.cat([latent, self.latent.embed_memory(current) + self.decoder.places()], dim=1)

    def decode_masked(self, kept: Float[Tensor, "b k d"], batch: PixelBatch) -> Float[Tensor, "b patches c"]:
        """The future frame from a quarter of its patches, which are in the memory."""
        memory = self.decoder.arrange(self.decoder.embedded(kept), batch.visible, batch.masked)
        found: Tensor = self.decoder(None, batch.visible, batch.masked, memory)
        return found

    def predictions(self, batch: PixelBatch) -> dict[str, Tensor]:
        """Of the masked patches, and of the whole future frame from samples of posterior and prior."""
        assert batch.memory is not None
        patches, seeds = self.patches(batch.target), noise_seeds(batch.visible)
        current = self.backbone.sequence(self.patches(batch.memory))
        noisy = self.backbone.sequence(patches + self.settings.noise * self.pixel_noise(seeds, patches))
        posterior, prior = self.latent.logits(current[:, 0], noisy[:, 0])
        kept = self.backbone.sequence(take(patches, batch.visible), batch.visible)
        samples = {"posterior": self.sample(seeds, posterior)}
        samples |= {f"prior {n + 1}": self.sample(seeds, prior, 3 + n) for n in range(PRIOR_SAMPLES)}
        future = {name: self.decode_future(current, z, batch.visible) for name, z in samples.items()}
        return {"prediction": take(self.decode_masked(kept, batch), batch.masked), **future}

    def parts(self) -> dict[str, Part]:
        """Encoder, decoder and latent."""
        return {**super().parts(), "latent": Part(named_parameters(self.latent))}

    def explained(self, losses: Mapping[str, float]) -> dict[str, float]:
        """Of both tasks."""
        return {"explained_future": 1 - losses["future"], "explained_masked": 1 - losses["masked"]}


def straight_through(
    logits: Float[Tensor, "b variables values"], sample: Float[Tensor, "b variables values"]
) -> Float[Tensor, "b variables values"]:
    """The value of the sample, with the gradient of the probabilities."""
    shares = logits.softmax(dim=-1)
    return sample + shares - shares.detach()


def build_stochastic(config: Config, settings: RspSettings) -> Stochastic:
    """RSP, with weights drawn from torch's generator."""
    own = settings.latent
    decoder = PixelDecoder(**decoder_sizes(config, settings.decoder), block="cross-self-mlp")
    latent = Latent(config.vit.dim, settings.decoder.width, own.variables, own.values)
    for module in (decoder, latent):
        initialize(module)
    return Stochastic(build_frame_encoder(config), decoder, latent, own)
