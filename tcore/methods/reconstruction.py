"""Reconstruction of masked pixels: MAE, RC-MAE, DropMAE, VideoMAE and MAE-ST.

MAE (arXiv:2111.06377) sees a quarter of the patches of a frame and predicts the pixels of the rest. RC-MAE
(arXiv:2210.02077) also asks for what a slowly moving teacher predicts; DropMAE (arXiv:2304.00571) sees two
frames, and its decoder attends less within a frame; VideoMAE (arXiv:2203.12602) and MAE-ST
(arXiv:2205.09113) see a tenth of the tubes of a clip.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from tcore.config import Config
from tcore.data.render import MEAN, STD
from tcore.methods.health import COLLAPSE_RANK, FEWEST_FRAMES, Health, State, effective_rank
from tcore.methods.limits import Range
from tcore.methods.method import Length, Method, Part, cosine, follow, named_parameters, some_rows
from tcore.methods.settings_pixel import (
    DecoderConfig,
    DropMaeSettings,
    MaeStSettings,
    PixelSettings,
    RcMaeSettings,
    VideoMaeSettings,
)
from tcore.model.clips import ClipTransformer, absorb
from tcore.model.decoder import PixelDecoder, SpatialDropout, initialize
from tcore.model.pixels import (
    Target,
    masked_error,
    patchify,
    pixel_targets,
    predicted_frames,
    put,
    restored,
    take,
)
from tcore.model.positions import PlaceKind
from tcore.model.vit import VisionTransformer, build_vit, vit_sizes

# A loss that explains less of the targets' variance than this has learned nothing yet.
NOTHING_EXPLAINED = 0.02


@dataclass(frozen=True)
class PixelBatch:
    """Frames of b samples, and which of their patches the encoder sees."""

    target: Float[Tensor, "b 3 time size size"]
    """Frames whose masked patches are predicted."""
    visible: Int64[Tensor, "b k"]
    masked: Int64[Tensor, "b m"]
    """Places of the patches that are seen, and of the others, in rising order."""
    samples: int
    """Samples of the whole step."""
    memory: Float[Tensor, "b 3 1 size size"] | None = None
    """A frame that is seen whole."""


class Reconstructed(NamedTuple):
    """What a method makes of some samples, as tokens of pixels between 0 and 1; for looking at."""

    true: Float[Tensor, "b n p"]
    made: dict[str, Float[Tensor, "b n p"]]
    """Predictions by name; where they are about masked patches alone, the others are the true ones."""
    frames: int
    """Frames of a token."""


class PixelMethod(Method):
    """What methods that predict pixels share: an encoder, a decoder, targets, health."""

    gain: Tensor
    shift: Tensor
    imagenet: Tensor

    def __init__(
        self,
        backbone: VisionTransformer,
        decoder: PixelDecoder,
        weights: Mapping[str, float],
        *,
        target: Target = "joint",
        single_frames: bool = False,
        mean: tuple[float, ...] = MEAN,
        std: tuple[float, ...] = STD,
    ) -> None:
        super().__init__(weights)
        self.backbone, self.decoder, self.target = backbone, decoder, target
        self.single_frames = single_frames
        self.tube = backbone.tube if isinstance(backbone, ClipTransformer) else 1
        ours, theirs = torch.tensor([MEAN, STD]), torch.tensor([mean, std])
        # From pixels normalized as ImageNet's to those that this method sees, and to [0, 1].
        self.register_buffer("gain", ours[1] / theirs[1], persistent=False)
        self.register_buffer("shift", (ours[0] - theirs[0]) / theirs[1], persistent=False)
        self.register_buffer("imagenet", ours, persistent=False)
        self.renormalizes = (tuple(mean), tuple(std)) != (MEAN, STD)
        # The encoder has no mask token: it does not see masked patches at all; empty tokens are not trained.
        for token in (backbone.mask_token, backbone.register_tokens, backbone.cls_token):
            token.requires_grad_(token is backbone.cls_token and token.numel() > 0)

    def patches(self, frames: Float[Tensor, "b 3 time size size"]) -> Float[Tensor, "b n c"]:
        """Tokens of pixels, as the encoder sees them."""
        return patchify(frames, self.tube, self.backbone.patch_size)

    def renormalized(self, frames: Float[Tensor, "b 3 time h w"]) -> Float[Tensor, "b 3 time h w"]:
        """Pixels by the mean and deviation that the method was published with."""
        if not self.renormalizes:
            return frames
        return frames * self.gain[:, None, None, None] + self.shift[:, None, None, None]

    def predicted(
        self, frames: Float[Tensor, "b 3 time h w"], patches: Float[Tensor, "b n c"]
    ) -> Float[Tensor, "b n p"]:
        """Pixels that predictions are about: those of the tokens, or of one frame of each (MAE-ST)."""
        if self.single_frames:
            time = frames.shape[2]
            chosen = [frames[:, :, index] for index in predicted_frames(time, time // self.tube)]
            return patchify(torch.stack(chosen, dim=2), 1, self.backbone.patch_size)
        if self.target != "channel":
            return patches
        # Targets by channel are of pixels between 0 and 1: the small number is outside of the root.
        mean, std = self.imagenet.repeat(1, patches.shape[-1] // 3)
        return patches * std + mean

    def wanted(self, batch: PixelBatch, patches: Float[Tensor, "b n c"]) -> Float[Tensor, "b m c"]:
        """Targets of the masked patches."""
        return pixel_targets(take(patches, batch.masked), self.target)

    def observe(self, tokens: Float[Tensor, "b n d"]) -> None:
        """Keep a few patch tokens for the health figures, where the step is observed."""
        if self.observing:
            rows = tokens.detach()[:, self.backbone.num_class :].flatten(0, 1)
            self.health_sample = {"patches": rows[some_rows(len(rows), self.health_rows)].float().clone()}

    @torch.no_grad()
    def reconstruct(self, batch: PixelBatch) -> Reconstructed:
        """Predictions with the mean and deviation of the true patches."""
        frames = self.renormalized(batch.target)
        pixels, made = self.predicted(frames, self.patches(frames)), dict[str, Tensor]()
        for name, prediction in self.predictions(batch).items():
            whole = prediction.shape[1] == pixels.shape[1]
            true = pixels if whole else take(pixels, batch.masked)
            found = restored(prediction.float(), true, self.target)
            made[name] = self.visible_pixels(found if whole else put(pixels, found, batch.masked))
        return Reconstructed(self.visible_pixels(pixels), made, 1 if self.single_frames else self.tube)

    def predictions(self, batch: PixelBatch) -> dict[str, Float[Tensor, "b n p"]]:
        """Predicted targets of the masked patches, or of all, by name."""
        raise NotImplementedError

    def visible_pixels(self, tokens: Float[Tensor, "b n p"]) -> Float[Tensor, "b n p"]:
        """Pixels between 0 and 1 from those that predictions are about."""
        if self.target == "channel":
            return tokens
        times = tokens.shape[-1] // 3
        mean, std = self.imagenet.repeat(1, times)
        return (tokens - self.shift.repeat(times)) / self.gain.repeat(times) * std + mean

    def parts(self) -> dict[str, Part]:
        """Encoder and decoder."""
        return {name: Part(named_parameters(getattr(self, name))) for name in ("backbone", "decoder")}

    def encoder(self) -> VisionTransformer:
        """The encoder, for frames."""
        return self.backbone.fold() if isinstance(self.backbone, ClipTransformer) else self.backbone

    def backbones(self) -> list[VisionTransformer]:
        """The one that is trained."""
        return [self.backbone]

    def compiled(self) -> list[nn.Module]:
        """The decoder."""
        return [self.decoder]

    def explained(self, losses: Mapping[str, float]) -> dict[str, float]:
        """Shares of the targets' variance that predictions explain: targets have variance 1."""
        return {"explained": 1 - losses["masked"]}

    def health(self, rows: Mapping[str, Tensor], losses: Mapping[str, float]) -> Health:
        """Rank of the features, and how much of the pixels is explained."""
        figures = {"patch_rank": effective_rank(rows["patches"]), **self.explained(losses)}
        shares = [value for name, value in figures.items() if name != "patch_rank"]
        state: State = "learning" if min(shares) > NOTHING_EXPLAINED else "plateau"
        if len(rows["patches"]) >= FEWEST_FRAMES and figures["patch_rank"] < COLLAPSE_RANK:
            state = "collapse"
        said = "  ".join(f"{name} {losses[name]:.3f}" for name in self.weights)
        share = "/".join(f"{value:.1%}" for value in shares)
        line = f"{said}  {state} (rank {figures['patch_rank']:.1f}, {share} of the variance explained)"
        warning = (
            f"collapse: all patches look alike to the encoder (effective rank {figures['patch_rank']:.1f}); "
            "try a lower --optim.base-lr."
        )
        return Health(state, figures, line, warning if state == "collapse" else None)


class Teacher(nn.Module):
    """A copy of encoder and decoder that follows them."""

    def __init__(self, backbone: VisionTransformer, decoder: PixelDecoder) -> None:
        super().__init__()
        self.backbone, self.decoder = copy.deepcopy(backbone), copy.deepcopy(decoder)
        self.requires_grad_(False).eval()


class Reconstruction(PixelMethod):
    """Predict the masked pixels of a frame, of two frames, or of a clip.

    >>> backbone = VisionTransformer(dim=48, depth=1, num_heads=3, image_size=32, num_registers=0)
    >>> decoder = PixelDecoder(dim=48, width=32, depth=1, num_heads=4, grid=2, outputs=768)
    >>> places = torch.tensor([[2], [0]]), torch.tensor([[0, 1, 3], [1, 2, 3]])
    >>> batch = PixelBatch(torch.rand(2, 3, 1, 32, 32), *places, samples=2)
    >>> list(Reconstruction(backbone, decoder)(batch, {}))
    ['masked']
    """

    def __init__(
        self,
        backbone: VisionTransformer,
        decoder: PixelDecoder,
        *,
        target: Target = "joint",
        single_frames: bool = False,
        mean: tuple[float, ...] = MEAN,
        std: tuple[float, ...] = STD,
        momentum: Range | None = None,
        consistency: float = 1.0,
        attention_dropout: float | None = None,
        key_bias: bool = True,
    ) -> None:
        weights = {"masked": 1.0} | ({} if momentum is None else {"consistency": consistency})
        super().__init__(
            backbone, decoder, weights, target=target, single_frames=single_frames, mean=mean, std=std
        )
        self.momentum, self.key_bias = momentum, key_bias
        self.attention_dropout = attention_dropout
        self.teacher = None if momentum is None else Teacher(backbone, decoder)

    def train(self, mode: bool = True) -> "Reconstruction":
        """Switch the student; a teacher always evaluates."""
        super().train(mode)
        if self.teacher is not None:
            self.teacher.eval()
        return self

    def forward(
        self, batch: PixelBatch, values: Mapping[str, float], generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """Errors at the masked patches."""
        frames = self.renormalized(batch.target)
        patches = self.patches(frames)
        seen = take(patches, batch.visible)
        tokens = self.backbone.sequence(seen, batch.visible)
        self.observe(tokens)
        prediction = self.predict(tokens, batch, generator)
        wanted = self.wanted(batch, self.predicted(frames, patches))
        losses = {"masked": masked_error(prediction, wanted, samples=batch.samples)}
        if self.teacher is not None:
            with torch.no_grad():
                taught = self.teacher.backbone.sequence(seen, batch.visible)
                asked = self.teacher.decoder(taught, batch.visible, batch.masked)
            losses["consistency"] = masked_error(prediction, asked.float(), samples=batch.samples)
        return losses

    def predictions(self, batch: PixelBatch) -> dict[str, Float[Tensor, "b m p"]]:
        """Of the masked patches."""
        patches = self.patches(self.renormalized(batch.target))
        tokens = self.backbone.sequence(take(patches, batch.visible), batch.visible)
        return {"prediction": self.predict(tokens, batch, torch.Generator(patches.device).manual_seed(0))}

    def predict(
        self, tokens: Float[Tensor, "b k d"], batch: PixelBatch, generator: torch.Generator | None
    ) -> Float[Tensor, "b m c"]:
        """Pixels of the masked patches."""
        if self.attention_dropout is None:
            found: Tensor = self.decoder(tokens, batch.visible, batch.masked)
            return found
        drop = SpatialDropout(self.attention_dropout, generator)
        x = self.decoder.in_place(self.decoder.embedded(tokens), batch.visible)
        return take(self.decoder.decode(x, drop=drop), batch.masked)

    def values(self, step: int, length: Length) -> dict[str, float]:
        """Momentum of the teacher, where there is one."""
        return {} if self.momentum is None else {"momentum": cosine(step, *self.momentum, length.num_steps)}

    @torch.no_grad()
    def finish_step(self, values: Mapping[str, float]) -> None:
        """Let a teacher follow the student; keep biases of keys at 0 where they are not trained (VideoMAE).

        Such a bias cannot change the attention: its gradient is rounding, which Adam would blow up.
        """
        if self.teacher is not None:
            student = (*self.backbone.parameters(), *self.decoder.parameters())
            follow(self.teacher.parameters(), student, values["momentum"])
        if not self.key_bias:
            for module in (self.backbone, self.decoder):
                for name, bias in module.named_parameters():
                    if name.endswith("qkv.bias"):
                        bias.view(3, -1)[1].zero_()

    def encoder(self) -> VisionTransformer:
        """The encoder for frames that are normalized as ImageNet's; the teacher's, where there is one."""
        if self.teacher is not None:
            return self.teacher.backbone
        encoder = super().encoder()
        if self.renormalizes:
            encoder.load_state_dict(absorb(encoder.state_dict(), self.gain, self.shift))
        return encoder

    def backbones(self) -> list[VisionTransformer]:
        """Student's and teacher's."""
        return [self.backbone] if self.teacher is None else [self.backbone, self.encoder()]

    def compiled(self) -> list[nn.Module]:
        """Decoders; not one with random attention, which draws in every block."""
        if self.attention_dropout is not None:
            return []
        return [self.decoder] if self.teacher is None else [self.decoder, self.teacher.decoder]

    def parts(self) -> dict[str, Part]:
        """Encoder and decoder; where keys have no bias, the mask token has no decay either (VideoMAE)."""
        parts = super().parts()
        if not self.key_bias:
            parts["decoder"] = replace(parts["decoder"], undecayed=("mask_token",))
        return parts


def decoder_sizes(config: Config, decoder: DecoderConfig) -> dict[str, Any]:
    """Arguments that all decoders of frames share."""
    return {
        "dim": config.vit.dim,
        "width": decoder.width,
        "depth": decoder.depth,
        "num_heads": decoder.num_heads,
        "grid": config.views.global_size // config.vit.patch_size,
        "outputs": 3 * config.vit.patch_size**2,
    }


def build_frame_encoder(config: Config) -> VisionTransformer:
    """An encoder of frames with initial values as in MAE."""
    backbone = build_vit(config.vit, config.views.global_size)
    initialize(backbone)
    nn.init.normal_(backbone.cls_token, std=0.02)
    return backbone


def build_reconstruction(config: Config, settings: PixelSettings) -> Reconstruction:
    """MAE and its relatives, with weights drawn from torch's generator."""
    if isinstance(settings, VideoMaeSettings | MaeStSettings):
        return _build_clips(config, settings)
    two = isinstance(settings, DropMaeSettings)
    made = PixelDecoder(
        **decoder_sizes(config, settings.decoder),
        slots=2 if two else 1,
        class_token="none" if two else "encoder",
    )
    initialize(made)
    if isinstance(settings, DropMaeSettings):
        pairs = ClipTransformer(vit_sizes(config.vit, config.views.global_size), "grid", tube=1, slots=2)
        initialize(pairs)
        return Reconstruction(pairs, made, attention_dropout=settings.attention_dropout)
    backbone = build_frame_encoder(config)
    if isinstance(settings, RcMaeSettings):
        momentum, consistency = settings.teacher.momentum, settings.consistency
        return Reconstruction(backbone, made, momentum=momentum, consistency=consistency)
    return Reconstruction(backbone, made)


def _build_clips(config: Config, settings: VideoMaeSettings | MaeStSettings) -> Reconstruction:
    """VideoMAE or MAE-ST: in most pieces they differ."""
    clip, slots = settings.clip, settings.clip.frames // settings.clip.tube
    tubes = isinstance(settings, VideoMaeSettings)
    places: PlaceKind = "line" if tubes else "separable"
    vit, sizes = vit_sizes(config.vit, config.views.global_size), decoder_sizes(config, settings.decoder)
    backbone = ClipTransformer(vit, places, tube=clip.tube, slots=slots)
    sizes["outputs"] *= clip.tube if tubes else 1
    made = PixelDecoder(
        **sizes,
        places=places,
        slots=slots,
        class_token="none" if tubes else "own",
        embed_bias=not tubes,
    )
    if tubes:  # patch embedding and the map to the decoder start as PyTorch has it
        for part in (backbone.blocks, made.blocks, made.pred):
            initialize(part)
        nn.init.trunc_normal_(made.mask_token, std=0.02, a=-0.02, b=0.02)
        return Reconstruction(backbone, made, target="channel", key_bias=False)
    initialize(backbone, split=True)
    initialize(made, split=True)
    nn.init.normal_(backbone.cls_token, std=0.02)
    return Reconstruction(backbone, made, single_frames=True, mean=(0.45,) * 3, std=(0.225,) * 3)
