"""Golden files of the methods that reconstruct pixels."""

from collections.abc import Iterator, Mapping
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

from tcore.config import OptimConfig
from tcore.methods.conditional import Conditional
from tcore.methods.pixel_sampling import hide, make_pixel_batch
from tcore.methods.reconstruction import PixelBatch, PixelMethod, Reconstruction
from tcore.methods.settings_pixel import LatentConfig
from tcore.methods.stochastic import Latent, Stochastic, straight_through
from tcore.model.clips import ClipTransformer
from tcore.model.decoder import PixelDecoder, SpatialDropout
from tcore.model.pixels import (
    fill,
    masked_error,
    num_kept,
    patchify,
    pixel_targets,
    predicted_frames,
    spatial_dropout,
    take,
)
from tcore.model.vit import VisionTransformer
from tcore.training import optim
from tests.golden.compare import (
    Arrays,
    Check,
    Deviation,
    deviation,
    encoder_sizes,
    read_settings,
    same_names,
    tensors,
)

VALUES, GRADIENTS = 2e-5, 2e-4
Settings = Mapping[str, Any]


def sizes_of(settings: Settings, **other: Any) -> dict[str, Any]:
    """Arguments of the frame encoder, whose positions are fixed."""
    return encoder_sizes(settings, **{"positions": "grid"} | other)


def decoder_of(settings: Settings, **other: Any) -> PixelDecoder:
    """The decoder of a file's sizes; `other` are its further arguments."""
    usual = {"outputs": 3 * settings["patch"] ** 2, "hidden": settings.get("decoder_hidden")}
    return PixelDecoder(
        dim=settings["dim"],
        width=settings["decoder_dim"],
        depth=settings["decoder_depth"],
        num_heads=settings["decoder_heads"],
        grid=settings["image"] // settings["patch"],
        **usual | other,
    )


SPECIAL = {
    "time_embed_first": ("places.time", slice(0, 1)),
    "time_embed_second": ("places.time", slice(1, 2)),
    "pos_embed_spatial": ("places.space", slice(None)),
    "pos_embed_temporal": ("places.time", slice(None)),
    "pos_embed_class": ("places.frame", slice(None)),
}


def locate(model: PixelMethod, golden: str) -> tuple[nn.Parameter, slice]:
    """Our parameter for a golden name, and which part of its second axis."""
    part, _, name = golden.partition("/")
    modules = {"encoder": model.backbone, "decoder": model.decoder, "latent": getattr(model, "latent", None)}
    module = modules[part]
    name = name.replace(".self.", ".own.").replace("norm_self", "norm_own")
    for theirs, ours in (("embed_memory.", "embed_memory."), ("embed_latent.", "embed.")):
        if name.startswith(theirs):
            module, name = modules["latent"], name.replace(theirs, ours)
    if name == "pos_embed" and not hasattr(module, "pos_embed"):
        name = "places.table"
    assert module is not None
    name, which = SPECIAL.get(name, (name, slice(None)))
    return module.get_parameter(name), which


@torch.no_grad()
def load(model: PixelMethod, weights: Mapping[str, Tensor]) -> None:
    """Give a model its golden weights."""
    for name, value in weights.items():
        parameter, which = locate(model, name)
        own = parameter if which == slice(None) else parameter[:, which]
        if not parameter.requires_grad and "pos_embed" in name:
            # Fixed positions come from their formula, and are compared elsewhere.
            assert torch.allclose(own, value[:, value.shape[1] - own.shape[1] :], atol=2e-6), name
            continue
        assert own.shape == value.shape, (name, own.shape, value.shape)
        own.copy_(value)


def gradients(model: PixelMethod, arrays: Arrays, prefix: str = "grad") -> Iterator[Deviation]:
    """Every stored gradient, and sums of all; the golden names are all that is trained."""
    if sums := tensors(arrays, f"{prefix}_sums/"):
        trained = {id(p) for p in model.parameters() if p.requires_grad}
        found = {id(locate(model, name)[0]) for name in sums}
        missing = [name for name, p in model.named_parameters() if id(p) in trained ^ found]
        yield same_names(f"{prefix}: trained parameters", [], missing)

    def gradient(name: str) -> Tensor:
        parameter, which = locate(model, name)
        whole = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        return whole if which == slice(None) else whole[:, which]

    for name, golden in tensors(arrays, f"{prefix}/").items():
        yield deviation(f"{prefix}/{name}", gradient(name), golden, GRADIENTS)
    for name, golden in tensors(arrays, f"{prefix}_sums/").items():
        own = gradient(name).double()
        ours = (float(own.sum()), float(own.abs().sum()))
        yield deviation(f"{prefix}_sums/{name}", ours, golden, GRADIENTS)


def draw_mask(arrays: Arrays, settings: Settings) -> Tensor:
    """The mask that follows from the stored noise."""
    noise = arrays["noise/mask"]
    return torch.from_numpy(hide(noise.astype(np.float64), num_kept(noise.shape[1], settings["mask_ratio"])))


def at_places(made: Tensor, batch: PixelBatch) -> Tensor:
    """Tokens in the order visible, masked, at their places."""
    order = torch.cat([batch.visible, batch.masked], dim=1)
    return fill(made.new_zeros(1, 1, made.shape[-1]), made, order, order.shape[1])


def in_golden_order(tokens: Tensor, batch: PixelBatch, kept: Any, prefix: int) -> Tensor:
    """Encoder tokens in the order of the golden list of kept patches."""
    places = torch.from_numpy(kept)
    found = (places[:, :, None] == batch.visible[:, None]).int().argmax(dim=2)
    return torch.cat([tokens[:, :prefix], take(tokens[:, prefix:], found)], dim=1)


def check_masking(arrays: Arrays, batch: PixelBatch, mask: Tensor) -> Iterator[Deviation]:
    yield deviation("mid/mask", mask, arrays["mid/mask"], 0.0)
    yield deviation("mid/ids_keep", batch.visible, np.sort(arrays["mid/ids_keep"], axis=1), 0.0)


def check_losses(
    arrays: Arrays, model: PixelMethod, batch: PixelBatch, prefix: str = "loss"
) -> Iterator[Deviation]:
    """Losses of a whole step by the function that training calls; gradients are left in the parameters."""
    model.zero_grad()
    found = model(batch, {})
    total = model.total(found)
    total.backward()
    yield deviation(f"{prefix}/total", total, arrays[f"{prefix}/total"], VALUES)
    for name, value in found.items():
        if f"{prefix}/{name}" in arrays:
            yield deviation(f"{prefix}/{name}", value, arrays[f"{prefix}/{name}"], VALUES)


def check_self_decoder(
    arrays: Arrays, model: PixelMethod, batch: PixelBatch, patches: Tensor
) -> Iterator[Deviation]:
    """Tokens of the encoder and predictions at all places, of a decoder with self-attention alone."""
    with torch.no_grad():
        tokens = model.backbone.sequence(take(patches, batch.visible), batch.visible)
        if "mid/encoder" in arrays:
            prefix = model.backbone.num_class
            golden = arrays["mid/encoder"]
            ours = in_golden_order(tokens, batch, arrays["mid/ids_keep"], prefix)
            yield deviation("mid/encoder", ours[:, ours.shape[1] - golden.shape[1] :], golden, VALUES)
        decoder = model.decoder
        x = decoder.arrange(decoder.embedded(tokens), batch.visible, batch.masked)
        made = at_places(decoder.decode(x, first=decoder.num_prefix), batch)
        yield deviation("mid/prediction", made, arrays["mid/prediction"], VALUES)


def check_mae(arrays: Arrays) -> Iterator[Deviation]:
    settings, images = read_settings(arrays), torch.from_numpy(arrays["input/images"])[:, :, None]
    model = Reconstruction(VisionTransformer(**sizes_of(settings)), decoder_of(settings))
    load(model, tensors(arrays, "weights/"))
    mask = draw_mask(arrays, settings)
    batch = make_pixel_batch(images, mask)
    yield from check_masking(arrays, batch, mask)
    patches = model.patches(images)
    yield deviation("mid/patches", patches, arrays["mid/patches"], 0.0)
    yield from check_self_decoder(arrays, model, batch, patches)
    prediction = torch.from_numpy(arrays["mid/prediction"])
    plain = masked_error(prediction, pixel_targets(patches, "none"), mask)
    yield deviation("loss/plain_pixels", plain, arrays["loss/plain_pixels"], VALUES)
    yield from check_losses(arrays, model, batch)
    yield from gradients(model, arrays)


def check_rcmae(arrays: Arrays) -> Iterator[Deviation]:
    settings, images = read_settings(arrays), torch.from_numpy(arrays["input/images"])[:, :, None]
    momentum = (settings["momentum"],) * 2
    model = Reconstruction(
        VisionTransformer(**sizes_of(settings)),
        decoder_of(settings),
        momentum=momentum,
        consistency=settings["gamma"],
    )
    assert model.teacher is not None
    other = Reconstruction(model.teacher.backbone, model.teacher.decoder)
    load(model, tensors(arrays, "weights/"))
    load(other, tensors(arrays, "teacher/"))
    model.teacher.requires_grad_(False)
    mask = draw_mask(arrays, settings)
    batch = make_pixel_batch(images, mask)
    yield from check_masking(arrays, batch, mask)
    yield from check_self_decoder(arrays, model, batch, model.patches(images))
    taught = {"mid/prediction": arrays["mid/teacher_prediction"]}
    yield from check_self_decoder(taught, other, batch, model.patches(images))
    yield from check_losses(arrays, model, batch)
    yield from gradients(model, arrays)
    adamw = OptimConfig(clip_by="none", betas=(0.9, 0.95))
    optimizer = optim.Optimizer(model.parts(), adamw, settings["depth"])
    rates = dict.fromkeys(("backbone", "decoder"), float(settings["lr"]))
    optimizer.step(optim.StepValues(settings["lr"], rates, True, settings["weight_decay"], {}))
    model.finish_step({"momentum": settings["momentum"]})
    for who, owner in (("student", model), ("teacher", other)):
        for name, golden in tensors(arrays, f"after/{who}/").items():
            yield deviation(f"after/{who}/{name}", locate(owner, name)[0], golden, VALUES)


def check_conditional(arrays: Arrays) -> Iterator[Deviation]:
    """SiamMAE and CropMAE: memory, queries, the first block, predictions, loss and gradients."""
    settings = read_settings(arrays)
    target, reference = (torch.from_numpy(arrays[f"input/{x}"])[:, :, None] for x in ("target", "reference"))
    decoder = decoder_of(settings, block="cross-mlp-self", dropout=settings["dropout"])
    model = Conditional(VisionTransformer(**sizes_of(settings)), decoder)
    load(model, tensors(arrays, "weights/"))
    mask = draw_mask(arrays, settings)
    batch = make_pixel_batch(target, mask, memory=reference)
    yield from check_masking(arrays, batch, mask)
    with torch.no_grad():
        memory = model.backbone.sequence(model.patches(reference))
        yield deviation("mid/memory", memory, arrays["mid/memory"], VALUES)
        tokens = model.backbone.sequence(take(model.patches(target), batch.visible), batch.visible)
        ours = in_golden_order(tokens, batch, arrays["mid/ids_keep"], 1)
        yield deviation("mid/encoder", ours, arrays["mid/encoder"], VALUES)
        x = decoder.arrange(decoder.embedded(tokens), batch.visible, batch.masked)
        block = decoder.blocks[0](x, decoder.embed(memory))
        for name, made in (("queries", x), ("decoder_block_0", block)):
            placed = torch.cat([made[:, :1], at_places(made[:, 1:], batch)], dim=1)
            yield deviation(f"mid/{name}", placed, arrays[f"mid/{name}"], VALUES)
        prediction = at_places(decoder.decode(x, decoder.embed(memory), first=1), batch)
        yield deviation("mid/prediction", prediction, arrays["mid/prediction"], VALUES)
    yield from check_losses(arrays, model, batch)
    yield from gradients(model, arrays)


def rsp_model(arrays: Arrays, settings: Settings, floor: float) -> Stochastic:
    """RSP with the stored noise in place of its own."""
    model = Stochastic(
        VisionTransformer(**sizes_of(settings)),
        decoder_of(settings, block="cross-self-mlp"),
        Latent(settings["dim"], settings["decoder_dim"], settings["stoch"], settings["discrete"]),
        LatentConfig(
            noise=settings["noise_scale"],
            weight=settings["kl_scale"],
            balance=settings["kl_balance"],
            floor=floor,
        ),
    )
    load(model, tensors(arrays, "weights/"))
    return model


def check_rsp(arrays: Arrays) -> Iterator[Deviation]:
    settings = read_settings(arrays)
    current, future = (torch.from_numpy(arrays[f"input/{x}"])[:, :, None] for x in ("current", "future"))
    mask = draw_mask(arrays, settings)
    batch = make_pixel_batch(future, mask, memory=current)
    yield from check_masking(arrays, batch, mask)
    noise = torch.from_numpy(arrays["noise/pixels"])[:, :, None]
    sample, prior_sample = (torch.from_numpy(arrays[f"noise/{x}_sample"]) for x in ("posterior", "prior"))
    for floor, prefix in ((settings["kl_freebit"], ""), (settings["kl_floor_case"], "_floored")):
        model = rsp_model(arrays, settings, floor)
        with (
            patch.object(model, "pixel_noise", lambda seeds, patches: patchify(noise, 1, settings["patch"])),
            patch.object(model, "sample", lambda seeds, logits: sample),
        ):
            yield from check_losses(arrays, model, batch, f"loss{prefix}")
        yield from gradients(model, arrays, f"grad{prefix}")
    model = rsp_model(arrays, settings, settings["kl_freebit"])
    with torch.no_grad():
        patches = model.patches(future)
        noisy = model.backbone.sequence(
            patches + model.settings.noise * patchify(noise, 1, settings["patch"])
        )
        tokens = model.backbone.sequence(model.patches(current))
        posterior, prior = model.latent.logits(tokens[:, 0], noisy[:, 0])
        z = straight_through(posterior, sample)
        kept = model.backbone.sequence(take(patches, batch.visible), batch.visible)
        from_prior = model.decode_future(tokens, prior_sample, batch.visible)
        ours = {
            "current_tokens": tokens,
            "noisy_future_tokens": noisy,
            "posterior_logits": posterior.flatten(1),
            "prior_logits": prior.flatten(1),
            "memory": model.memory(tokens, z),
            "future_prediction": model.decode_future(tokens, z, batch.visible),
            "future_prediction_prior": from_prior,
            "masked_encoder": in_golden_order(kept, batch, arrays["mid/ids_keep"], 1),
            "masked_prediction": model.decode_masked(kept, batch),
        }
        for name, value in ours.items():
            yield deviation(f"mid/{name}", value, arrays[f"mid/{name}"], VALUES)
        guessed = masked_error(from_prior, pixel_targets(patches, "joint"))
        yield deviation("loss/future_prior", guessed, arrays["loss/future_prior"], VALUES)


def check_dropmae(arrays: Arrays) -> Iterator[Deviation]:
    settings = read_settings(arrays)
    frames = torch.stack([torch.from_numpy(arrays[f"input/{x}"]) for x in ("first", "second")], dim=2)
    sizes = sizes_of(settings, class_token=False)
    decoder = decoder_of(settings, slots=2, class_token="none")
    ratio = settings["attention_dropout"]
    model = Reconstruction(ClipTransformer(sizes, "grid", tube=1, slots=2), decoder, attention_dropout=ratio)
    load(model, tensors(arrays, "weights/"))
    mask = draw_mask(arrays, settings)
    batch = make_pixel_batch(frames, mask)
    yield from check_masking(arrays, batch, mask)
    races = [torch.from_numpy(arrays[f"noise/race_{i}"]) for i in range(settings["decoder_depth"])]
    chosen: dict[int, tuple[Tensor, Tensor]] = {}

    def noise(self: SpatialDropout, block: int, logits: Tensor) -> Tensor:
        chosen[block] = spatial_dropout(logits, races[block], ratio)
        return races[block]

    with patch.object(SpatialDropout, "noise", noise):
        with torch.no_grad():
            tokens = model.backbone.sequence(take(model.patches(frames), batch.visible), batch.visible)
            ours = in_golden_order(tokens, batch, arrays["mid/ids_keep"], 0)
            yield deviation("mid/encoder", ours, arrays["mid/encoder"], VALUES)
            x = decoder.in_place(decoder.embedded(tokens), batch.visible)
            made = decoder.decode(x, drop=SpatialDropout(ratio))
            yield deviation("mid/prediction", made, arrays["mid/prediction"], VALUES)
        yield from check_losses(arrays, model, batch)
    for block, (weights, dropped) in chosen.items():
        yield deviation(f"mid/drop_weights_{block}", weights, arrays[f"mid/drop_weights_{block}"], VALUES)
        yield deviation(f"mid/dropped_{block}", dropped, arrays[f"mid/dropped_{block}"], 0.0)
    yield from gradients(model, arrays)


def check_videomae(arrays: Arrays) -> Iterator[Deviation]:
    settings, clip = read_settings(arrays), torch.from_numpy(arrays["input/clip"])
    slots = settings["frames"] // settings["tube"]
    sizes = sizes_of(settings, class_token=False, positions="learned")
    decoder = decoder_of(
        settings,
        outputs=3 * settings["tube"] * settings["patch"] ** 2,
        places="line",
        slots=slots,
        class_token="none",
        embed_bias=False,
    )
    backbone = ClipTransformer(sizes, "line", tube=settings["tube"], slots=slots)
    model = Reconstruction(backbone, decoder, target="channel", key_bias=False)
    load(model, tensors(arrays, "weights/"))
    for name, module in (("encoder", backbone), ("decoder", decoder)):
        yield deviation(f"fixed/{name}", module.places(), arrays[f"fixed/{name}_pos_embed"], VALUES)
    batch = make_pixel_batch(clip, torch.from_numpy(arrays["input/mask"]))
    with torch.no_grad():
        patches = model.patches(clip)
        tokens = backbone.sequence(take(patches, batch.visible), batch.visible)
        x = decoder.arrange(decoder.embedded(tokens), batch.visible, batch.masked)
        ours = {
            "encoder": tokens,
            "decoder_in": x,
            "prediction": decoder(tokens, batch.visible, batch.masked),
            "target": model.wanted(batch, model.predicted(clip, patches)),
        }
    for name, value in ours.items():
        yield deviation(f"mid/{name}", value, arrays[f"mid/{name}"], VALUES)
    yield from check_losses(arrays, model, batch)
    yield from gradients(model, arrays)
    with torch.no_grad():
        folded = model.encoder()(torch.from_numpy(arrays["frame/image"])).patches
    yield deviation("frame/tokens", folded, arrays["frame/tokens"], VALUES)


def check_mae_st(arrays: Arrays) -> Iterator[Deviation]:
    settings, clip = read_settings(arrays), torch.from_numpy(arrays["input/clip"])
    slots = settings["frames"] // settings["tube"]
    sizes = sizes_of(settings, positions="learned")
    decoder = decoder_of(settings, places="separable", slots=slots, class_token="own")
    backbone = ClipTransformer(sizes, "separable", tube=settings["tube"], slots=slots)
    model = Reconstruction(backbone, decoder, single_frames=True)
    load(model, tensors(arrays, "weights/"))
    mask = draw_mask(arrays, settings)
    batch = make_pixel_batch(clip, mask)
    yield from check_masking(arrays, batch, mask)
    frames = predicted_frames(settings["frames"], settings["predicted_frames"])
    yield deviation("mid/target_frames", frames, arrays["mid/target_frames"], 0.0)
    patches = model.patches(clip)
    yield deviation("mid/patches", model.predicted(clip, patches), arrays["mid/patches"], 0.0)
    yield from check_self_decoder(arrays, model, batch, patches)
    yield from check_losses(arrays, model, batch)
    yield from gradients(model, arrays)
    with torch.no_grad():
        folded = model.encoder()(torch.from_numpy(arrays["frame/image"]))
    tokens = torch.cat([folded.frame[:, None], folded.patches], dim=1)
    yield deviation("frame/tokens", tokens, arrays["frame/tokens"], VALUES)


@torch.no_grad()
def check_frame_encoder(arrays: Arrays) -> Iterator[Deviation]:
    """The encoder of frames on other grids, whose positions are resized as CropMAE's evaluation does."""
    settings = read_settings(arrays)
    vit = VisionTransformer(**sizes_of(settings, position_resize="factor"))
    small = {"decoder_dim": 8, "decoder_depth": 1, "decoder_heads": 1}
    holder = Reconstruction(vit, decoder_of({**settings, **small}))
    load(holder, tensors(arrays, "weights/"))
    for case in settings["cases"]:
        image = torch.from_numpy(arrays[f"{case}/image"])
        tokens = vit(image)
        rows, columns = (side // settings["patch"] for side in image.shape[-2:])
        yield deviation(
            f"{case}/positions", vit.positions(rows, columns), arrays[f"{case}/positions"], VALUES
        )
        yield deviation(f"{case}/cls", tokens.frame, arrays[f"{case}/cls"], VALUES)
        yield deviation(f"{case}/patches", tokens.patches, arrays[f"{case}/patches"], VALUES)


FILES: dict[str, Check] = {
    "cropmae.npz": Check(check_conditional),
    "dropmae.npz": Check(check_dropmae),
    "frame_encoder.npz": Check(check_frame_encoder),
    "mae.npz": Check(check_mae),
    "mae_st.npz": Check(check_mae_st),
    "rcmae.npz": Check(check_rcmae),
    "rsp.npz": Check(check_rsp),
    "siammae.npz": Check(check_conditional),
    "videomae.npz": Check(check_videomae),
}
