"""The eight methods that reconstruct pixels: what they see, predict, export and refuse."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tcore import Config, InputError, load_encoder, methods, recipe, train
from tcore.config import validate
from tcore.data.loader import render_batch
from tcore.data.render import MEAN, STD
from tcore.data.stores import FrameStore, open_mixture
from tcore.device import World
from tcore.methods.pixel_sampling import PixelSampling
from tcore.methods.reconstruction import PixelBatch, PixelMethod, Reconstruction
from tcore.model.pixels import fill, noise_seeds, normal_noise, patchify, uniform_noise, unpatchify
from tcore.show.reconstruction import columns, reconstruction_figure
from tests.evaluation.clips import write_folder
from tests.methods.test_methods import OTHER_PIXELS, PIXELS, SAME, small_settings
from tests.runs import checkpoint, metrics
from tests.tiny import shrunk

NAMES = PIXELS + OTHER_PIXELS


def small(name: str, **changes: Any) -> Config:
    """The short recipe of a method, made small; a dot in a name is written as two underscores."""
    settings = small_settings(name, **{"optim__steps": 2, "runtime__log_every": 1} | changes)
    return shrunk(settings.pop("recipe"), **settings)


def build(config: Config) -> PixelMethod:
    method = methods.build(config)
    assert isinstance(method, PixelMethod)
    return method


def read(config: Config, step: int = 0, share: World | None = None) -> PixelBatch:
    store = FrameStore.rendered(videos=5, frames=12, size=48)
    raw = methods.build_source(store, config, share).read(step, 0)
    found = render_batch(raw, torch.device("cpu"))
    assert isinstance(found, PixelBatch)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_each_method_trains_and_exports_an_encoder_of_frames(name: str, tmp_path: Path) -> None:
    config = small(name)
    run = train(config, tmp_path / "run", quiet=True)
    last = metrics(run)[-1]
    assert last["total"] > 0
    assert last["health"]["state"] in ("learning", "plateau", "collapse")
    assert last["health"]["patch_rank"] >= 1
    encoder = load_encoder(run)
    assert len(encoder.notes) == (name not in ("mae", "rcmae", "cropmae"))
    assert encoder(torch.zeros(1, 32, 48, 3, dtype=torch.uint8)).shape == (1, 32, 4, 6)
    # What is exported sees a frame as training does: repeated over the first time slot, where it sees clips.
    method = build(config)
    method.load_state_dict(checkpoint(run)["model"])
    frame = torch.randn(2, 3, 32, 32)
    clip = frame[:, :, None].expand(-1, -1, method.tube, -1, -1)
    backbone = method.backbone
    if isinstance(method, Reconstruction):
        clip = method.renormalized(clip)
        backbone = backbone if method.teacher is None else method.teacher.backbone
    places = torch.arange(16).expand(2, -1)
    seen = backbone.sequence(method.patches(clip), places)[:, backbone.num_class :]
    assert torch.allclose(encoder.backbone(frame).patches, seen, atol=1e-5)
    for key, value in encoder.backbone.state_dict().items():
        if name == "videomae" and key.endswith("qkv.bias"):  # its keys have none
            query, keys, _ = value.view(3, -1)
            assert query.any()
            assert not keys.any()


@pytest.mark.parametrize("name", NAMES)
def test_two_halves_of_a_step_add_up_to_the_whole(name: str) -> None:
    config = small(name, **SAME.get(name, {}))
    method = build(config)

    def gradients(batches: list[PixelBatch]) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        method.zero_grad()
        sums: dict[str, float] = {}
        for batch in batches:
            losses = method(batch, {"momentum": 0.99})
            method.total(losses).backward()
            sums = {key: sums.get(key, 0.0) + float(value.detach()) for key, value in losses.items()}
        return sums, {key: p.grad.clone() for key, p in method.named_parameters() if p.grad is not None}

    whole, whole_gradients = gradients([read(config)])
    halves, half_gradients = gradients([read(config, share=World(rank, 2)) for rank in range(2)])
    assert halves == pytest.approx(whole, rel=1e-5)
    for key, gradient in whole_gradients.items():
        largest = float(gradient.abs().max()) + 1e-6
        assert float((half_gradients[key] - gradient).abs().max()) <= 1e-4 * largest, key


# What is the same on any number of processes: no dropout, and RSP away from the floor of its divergence.


def test_what_is_seen_and_what_is_masked_are_all_patches() -> None:
    for name in NAMES:
        batch = read(small(name))
        slots = {"dropmae": 2, "videomae": 4, "maest": 4}.get(name, 1)
        every = torch.cat([batch.visible, batch.masked], dim=1).sort(dim=1).values
        assert torch.equal(every, torch.arange(16 * slots).expand(4, -1))
        if name == "videomae":  # the same places at all times
            assert torch.equal(
                (batch.visible % 16).view(4, 4, -1), (batch.visible[:, None, :2] % 16).expand(4, 4, 2)
            )


def test_masks_differ_between_samples_and_steps() -> None:
    config = small("mae")
    batch, other = read(config), read(config, step=1)
    assert len({tuple(row) for row in batch.visible.tolist()}) > 1
    assert not torch.equal(batch.visible, other.visible)


def sampling(config: Config, fps: float | None = None) -> PixelSampling:
    made = methods.build_sampling(config, fps)
    assert isinstance(made, PixelSampling)
    return made


def test_pairs_have_the_published_gaps_in_frames_of_the_store() -> None:
    for name, gaps in (("siammae", (4, 47)), ("rsp", (4, 48)), ("dropmae", (4, 49))):
        native = sampling(recipe(f"vits16-{name}-k400"), 30.0)
        drawn = [native.frames(300, np.random.default_rng(seed)) for seed in range(400)]
        apart = [frames[native.names[1]] - frames[native.names[0]] for frames in drawn]
        assert (min(apart), max(apart)) == gaps
        assert min(frames[native.names[0]] for frames in drawn) < 20
        slow = sampling(recipe(f"vits16-{name}-k400"), 8.0)
        drawn = [slow.frames(80, np.random.default_rng(seed)) for seed in range(200)]
        apart = [frames[slow.names[1]] - frames[slow.names[0]] for frames in drawn]
        assert (min(apart), max(apart)) == (1, {"siammae": 12, "rsp": 12, "dropmae": 13}[name])


def test_videos_too_short_for_a_gap_give_what_they_have() -> None:
    for name in ("siammae", "rsp", "dropmae"):
        made = sampling(small(name))
        for seed in range(20):
            first, second = made.frames(3, np.random.default_rng(seed)).values()
            assert 0 <= first < second <= 2
        assert made.usable(np.array([1, 2, 3])).tolist() == [False, True, True]


@pytest.mark.parametrize("name", ["siammae", "rsp", "dropmae", "videomae", "maest"])
def test_store_too_slow_for_the_published_spacing_is_refused_with_the_rate_it_needs(name: str) -> None:
    with pytest.raises(InputError, match=r"store of (7\.5|8) frames per second.*has 2.*--fps 8"):
        sampling(recipe(f"vits16-{name}-k400"), 2.0)
    sampling(recipe(f"vits16-{name}-k400"), 7.6)
    sampling(recipe(f"vits16-{name}-short"), 2.0)


def test_short_twins_say_that_their_spacing_is_not_published() -> None:
    for name in ("siammae", "rsp", "dropmae", "videomae", "maest"):
        assert "not the published spacing" in sampling(small(name)).warnings()[0]
        assert not sampling(recipe(f"vits16-{name}-k400"), 8.0).warnings()
    assert not sampling(small("mae")).warnings()


def test_clips_are_consecutive_frames_and_share_one_box() -> None:
    made = sampling(small("videomae"))
    frames = list(made.frames(20, np.random.default_rng(3)).values())
    assert np.diff(frames).tolist() == [1] * 7
    plan = made.views(dict.fromkeys(made.names, (48, 64)), np.random.default_rng(0))["global"]
    assert len(np.unique(plan.box, axis=0)) == 1
    assert plan.frame.tolist() == list(range(8))
    assert not plan.flip.any()


def test_views_are_shared_own_or_nested() -> None:
    sizes = {"past": (48, 64), "current": (48, 64), "future": (48, 64)}
    draws = [np.random.default_rng(seed) for seed in range(60)]
    shared = [sampling(small("siammae")).views(sizes, rng) for rng in draws]
    assert all(np.array_equal(v["memory"].box, v["global"].box) for v in shared)
    assert all(np.array_equal(v["memory"].flip, v["global"].flip) for v in shared)
    own = [sampling(small("dropmae")).views(sizes, rng)["global"] for rng in draws]
    assert any(not np.array_equal(*plan.box) for plan in own)
    assert any(plan.flip[0] != plan.flip[1] for plan in own)
    for views in (sampling(small("cropmae")).views(sizes, rng) for rng in draws):
        (top, left, height, width), (y, x, h, w) = views["memory"].box[0], views["global"].box[0]
        assert top <= y <= y + h <= top + height
        assert left <= x <= x + w <= left + width
        assert 0.25 < h * w / (height * width) < 0.65


def test_repeated_samples_of_a_video_are_in_one_step_and_count_as_samples() -> None:
    config = small("rsp", optim__batch=2, optim__repeat=2)
    source = methods.build_source(FrameStore.rendered(videos=5, frames=12, size=48), config)
    chosen = source.chosen(0)
    assert chosen[0] == chosen[1] != chosen[2] == chosen[3]
    assert config.optim.peak_lr == pytest.approx(config.optim.base_lr * 2 / 256)
    batch = read(config)
    assert batch.samples == len(batch.target) == 4
    assert not torch.equal(batch.target[0], batch.target[1])


def test_noise_follows_from_the_sample_alone_and_has_the_right_spread() -> None:
    batch = read(small("rsp"))
    seeds = noise_seeds(batch.visible)
    assert torch.equal(noise_seeds(batch.visible[1:2]), seeds[1:2])
    normal = normal_noise(torch.arange(40), 5000)
    assert abs(float(normal.mean())) < 0.01
    assert float(normal.std()) == pytest.approx(1.0, abs=0.01)
    uniform = uniform_noise(torch.arange(40), 5000, 2)
    assert float(uniform.min()) > 0
    assert float(uniform.max()) < 1
    assert float(uniform.mean()) == pytest.approx(0.5, abs=0.005)
    assert abs(float(torch.corrcoef(normal[:2])[0, 1])) < 0.06


def test_tokens_of_pixels_become_the_clip_again() -> None:
    clip = torch.randn(2, 3, 4, 16, 24)
    assert torch.equal(unpatchify(patchify(clip, 2, 8), 2, 8, (2, 3)), clip)
    places = torch.tensor([[2, 0]])
    filled = fill(torch.full((1, 1, 1), 9.0), torch.tensor([[[1.0], [2.0]]]), places, 4)
    assert filled.flatten().tolist() == [2.0, 9.0, 1.0, 9.0]


def test_dropout_of_the_decoder_follows_from_the_seed_of_the_part() -> None:
    config = small("siammae")
    method, batch = build(config), read(config)

    def loss(seed: int | None) -> float:
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        return float(method(batch, {}, generator)["masked"].detach())

    state = torch.get_rng_state()
    assert loss(1) == loss(1) != loss(2)
    assert torch.equal(state, torch.get_rng_state())


def write_frames(folder: Path, count: int, rate: str | None = None) -> None:
    write_folder(folder, np.zeros((count, 48, 48, 3), np.uint8))
    if rate is not None:
        (folder / "fps.txt").write_text(rate)


def test_a_folder_of_frames_may_have_a_rate_of_its_own(tmp_path: Path) -> None:
    write_frames(tmp_path / "native", 40, "30\n")
    write_frames(tmp_path / "slow", 40, "8")
    config = shrunk("vits16-siammae-k400", mask_ratio=0.8)
    source = methods.build_source(FrameStore.open(tmp_path), config)
    gaps = {}
    for video, name in enumerate(source.store.names):
        drawn = [source.sampling_of(video).frames(40, np.random.default_rng(seed)) for seed in range(200)]
        gaps[name] = min(pair["current"] - pair["past"] for pair in drawn)
    assert gaps == {"native": 4, "slow": 1}
    assert len(source.read(0, 0).sizes) == 2 * config.optim.batch
    write_frames(tmp_path / "unknown", 40)
    with pytest.raises(InputError, match="this one has 2"):  # the settings' own rate
        methods.build_source(FrameStore.open(tmp_path), config)
    (tmp_path / "slow" / "fps.txt").write_text("fast")
    with pytest.raises(InputError, match=r"fps.txt holds 'fast'"):
        FrameStore.open(tmp_path)


def test_mixed_stores_keep_their_rates(tmp_path: Path) -> None:
    write_frames(tmp_path / "a" / "native", 4, "30")
    store = open_mixture(f"{tmp_path / 'a'}+{tmp_path / 'a'}*2", 0)
    assert store.rates is not None
    assert store.rates.tolist() == [30.0, 30.0, 30.0]


@pytest.mark.parametrize("name", ["siammae", "rsp", "dropmae", "maest"])
def test_reconstructions_are_drawn_beside_what_was_seen(name: str, tmp_path: Path) -> None:
    method, batch = build(small(name)).eval(), read(small(name))
    found = columns(method, batch)
    assert (
        list(found)
        == {
            "siammae": ["seen whole", "frame", "seen", "prediction"],
            "rsp": ["seen whole", "frame", "seen", "prediction", "posterior", "prior 1", "prior 2"],
            "dropmae": ["frame 1", "seen 1", "prediction 1", "frame 2", "seen 2", "prediction 2"],
            "maest": ["frame 1", "seen 1", "prediction 1", "frame 4", "seen 4", "prediction 4"],
        }[name]
    )
    first = next(key for key in found if key.startswith("frame"))
    mean, std = (torch.tensor(x)[:, None, None] for x in (MEAN, STD))
    true = (255 * (batch.target[0, :, 0] * std + mean)).permute(1, 2, 0)
    assert np.abs(found[first][0] - true.numpy()).max() <= 1
    seen = found[first.replace("frame", "seen")][0].reshape(4, 8, 4, 8, 3).swapaxes(1, 2).reshape(16, -1)
    gray = (seen == 128).all(axis=1)
    assert set(np.flatnonzero(~gray)) == {place for place in batch.visible[0].tolist() if place < 16}


def test_figure_of_reconstructions_comes_from_a_run(tmp_path: Path) -> None:
    run = train(small("mae"), tmp_path / "run", quiet=True)
    assert reconstruction_figure(run, tmp_path / "out.png", rows=2) == ["frame", "seen", "prediction"]
    assert (tmp_path / "out.png").stat().st_size > 1000
    (run / "checkpoint.pt").unlink()
    with pytest.raises(InputError, match=r"checkpoint.pt"):
        reconstruction_figure(run, tmp_path / "out.png")


def test_teacher_follows_and_is_exported() -> None:
    config = small("rcmae")
    method = build(config)
    assert isinstance(method, Reconstruction)
    assert method.teacher is not None
    with torch.no_grad():
        method.backbone.cls_token.add_(1.0)
    before = method.teacher.backbone.cls_token.clone()
    method.finish_step({"momentum": 0.75})
    assert torch.allclose(method.encoder().cls_token, before + 0.25)


def test_images_can_be_reconstructed_too() -> None:
    for name in ("mae", "rcmae", "cropmae"):
        validate(small(name, source="images"))
