"""Golden files of the methods that reconstruct pixels."""

import re
from collections.abc import Iterator, Mapping
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

from tcore import methods
from tcore.config import OptimConfig
from tcore.data import boxes
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
from tcore.model.positions import grid_positions, line_positions
from tcore.model.vit import VisionTransformer
from tcore.recipes import recipe
from tcore.training import optim
from tests.golden.compare import (
    Arrays,
    Check,
    Deviation,
    deviation,
    encoder_sizes,
    logged_values,
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


def check_positions(arrays: Arrays) -> Iterator[Deviation]:
    """Fixed positions, by their names: grid/dimD_sideS with a row of zeros first, line/dimD_lengthN."""
    for name, golden in arrays.items():
        kind, _, rest = name.partition("/")
        dim, count = (int("".join(filter(str.isdigit, piece))) for piece in rest.split("_"))
        if kind == "grid":
            ours = torch.cat([torch.zeros(1, dim), grid_positions(count, count, dim)])
        else:
            ours = line_positions(count, dim)
        yield deviation(name, ours, golden, VALUES)


# Sizes that make the networks of a recipe small.
SMALL = {"vit.dim": 16, "vit.depth": 2, "vit.num_heads": 1, "views.global_size": 32}
SMALL |= {"decoder.width": 16, "decoder.depth": 2, "decoder.num_heads": 1}


def check_schedules(arrays: Arrays) -> Iterator[Deviation]:
    """Learning rates of MAE and VideoMAE, and both readings of RC-MAE's momentum."""
    settings = read_settings(arrays)
    steps, epochs = settings["steps_per_epoch"], settings["epochs"]
    lengths = {
        "optim.epochs": epochs,
        "optim.warmup_epochs": settings["warmup"],
        "optim.batch": 256,
        "optim.base_lr": settings["peak"],
        "optim.end_lr": settings["end"],
    }
    for name, key in (("mae", "lr_mae"), ("videomae", "lr_videomae")):
        logged = logged_values(f"vits16-{name}-k400", SMALL | lengths, steps, steps * epochs)
        yield deviation(key, [values["lr"] for values in logged], arrays[key], VALUES)
    momenta = {"teacher.momentum": (settings["momentum"], 1.0)}
    logged = logged_values("vits16-rcmae-k400", SMALL | lengths | momenta, steps, steps * epochs)
    meant = [values["momentum"] for values in logged]
    yield deviation("momentum_rcmae_meant", meant, arrays["momentum_rcmae_meant"], VALUES)
    # As released, the schedule is read at the step within the epoch: close to its first value throughout.
    used = [meant[step % steps] for step in range(steps * epochs)]
    yield deviation("momentum_rcmae_used", used, arrays["momentum_rcmae_used"], VALUES)


def check_clips(golden: Mapping[str, Any]) -> Iterator[Deviation]:
    """Frames of a clip for given draws."""
    for number, case in enumerate(golden["videomae"]):
        length = case["num_frames"]
        starts = boxes.num_starts(length, 16, 4)
        yield deviation(f"videomae {number} starts", starts, case["number_of_starts"], 0.0)
        yield deviation(
            f"videomae {number}", boxes.strided_clip(length, 16, 4, case["start"]), case["frames"], 0.0
        )
    for number, case in enumerate(golden["mae_st"]):
        ours = boxes.spread_clip(case["num_frames"], 16, 16 * 4 / 30 * case["fps"], case["uniform"])
        yield deviation(f"mae_st {number}", ours, case["frames"], 0.0)


def check_crops(golden: Mapping[str, Any]) -> Iterator[Deviation]:
    """VideoMAE's list of crops, and the shape of a box that is drawn in one try."""
    for case in golden["multi_scale_crop"]:
        width, height = case["frame"]
        shapes = boxes.multi_scale_shapes((height, width), case["size"])
        name = f"multi_scale_crop {width}x{height}"
        yield deviation(name, [(w, h) for h, w in shapes], case["pairs_w_h"], 0.0)
        for shape in shapes:
            places = boxes.multi_scale_places((height, width), shape)
            theirs = case["offsets_x_y"][f"{shape[1]}x{shape[0]}"]
            yield deviation(f"{name} {shape}", [(x, y) for y, x in places], theirs, 0.0)
    for number, case in enumerate(golden["single_try_box"]):
        width, height = case["frame_w_h"]
        shape = boxes.one_try_shape((height, width), case["share"], case["aspect"])
        yield deviation(f"single_try_box {number}", shape, case["top_left_height_width"][2:], 0.0)


# Names of the released decoders, where the golden list of decayed parameters keeps them.
RELEASED = {
    r"self_attn\.in_proj_": "own.qkv.",
    r"self_attn\.out_proj": "own.proj",
    r"multihead_attn\.in_proj_": "cross.kv.",
    r"multihead_attn\.out_proj": "cross.proj",
    r"linear([12])": r"mlp.fc\1",
    r"norm_kv1": "norm_memory",
    r"cattn": "cross",
    r"mlp2": "mlp",
    r"norm4": "norm_mlp",
    r"attn\.[qv]_bias": "attn.qkv.bias",
    r"attn\.[qkv]\.": "attn.qkv.",
}


def our_name(golden: str, method: str) -> str:
    """A name that `locate` knows; the three norms of a cross block are alike."""
    names = dict(RELEASED)
    if golden.startswith("decoder/blocks") and method in ("rsp", "siammae", "cropmae"):
        names |= {r"\.attn\.": ".own.", r"norm[123]\b": "norm_cross"}
    for theirs, ours in names.items():
        golden = re.sub(theirs, ours, golden)
    return golden


def check_decay(golden: Mapping[str, Any]) -> Iterator[Deviation]:
    """Which parameters of each method are decayed, not decayed, or frozen."""
    for group, status in golden.items():
        for method in group.partition(" (")[0].split(", "):
            config = recipe(f"vits16-{method.replace('_', '')}-k400", SMALL)
            model = methods.build(config)
            assert isinstance(model, PixelMethod)
            optimizer = optim.Optimizer(model.parts(), config.optim, 2)
            optimizer.step(optim.StepValues(0.0, dict.fromkeys(model.parts(), 0.0), True, 1.0, {}))
            decayed = {id(p): g["weight_decay"] for g in optimizer.adamw.param_groups for p in g["params"]}
            says = {0.0: "not decayed", 1.0: "decayed", None: "frozen"}
            kept = {n: s for n, s in status.items() if "pos_embed" not in n or s != "frozen"}
            ours = {n: says[decayed.get(id(locate(model, our_name(n, method))[0]))] for n in kept}
            wrong = [name for name in kept if ours[name] != kept[name]]
            yield same_names(f"{method}: decay", [], wrong)


FILES: dict[str, Check] = {
    "clips.json": Check(check_clips),
    "cropmae.npz": Check(check_conditional),
    "crops.json": Check(check_crops),
    "decay_groups.json": Check(check_decay),
    "dropmae.npz": Check(check_dropmae),
    "frame_encoder.npz": Check(check_frame_encoder),
    "mae.npz": Check(check_mae),
    "mae_st.npz": Check(check_mae_st),
    "positions.npz": Check(check_positions),
    "rcmae.npz": Check(check_rcmae),
    "rsp.npz": Check(check_rsp),
    "schedules.npz": Check(
        check_schedules, "lr_mae", left_out="lr_set_after_step (a slip of the released loop)"
    ),
    "siammae.npz": Check(check_conditional),
    "videomae.npz": Check(check_videomae),
}
