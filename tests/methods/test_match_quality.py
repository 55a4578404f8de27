"""Whether the matching module matches: true places in rendered videos, shares of attention, the figure."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tcore.cli.main import main
from tcore.data.rendered import find_scene, follow, render_video
from tcore.evaluation.benchmarks.rendered import true_joints
from tcore.methods.match_quality import (
    CROSS,
    PLAIN,
    STILL,
    KnownMotion,
    Matcher,
    Tally,
    describe,
    measure_matching,
    rendered_motion,
)
from tcore.methods.matching import PatchMatchingModule
from tcore.model.vit import VisionTransformer
from tcore.show.matching import cross_entropies, davis_motion
from tests.evaluation.layouts import heldout_videos, write_davis
from tests.methods import tiny_models

GRID = 4


def matcher() -> Matcher:
    torch.manual_seed(0)
    backbone = VisionTransformer(dim=32, depth=1, num_heads=2, patch_size=8, image_size=8 * GRID)
    return Matcher(backbone.eval(), PatchMatchingModule(dim=32, num_heads=2).eval())


def sample(shift: float = 0.0) -> KnownMotion:
    """Three times the same noise; its patches are said to be some columns away."""
    noise = np.random.default_rng(0).integers(0, 256, (8 * GRID, 8 * GRID, 3), dtype=np.uint8)
    mask = np.zeros((GRID, GRID), dtype=bool)
    mask[1:3, 1] = True
    cells = np.argwhere(np.ones_like(mask)).astype(float) + np.array([0.0, shift])
    objects = np.zeros((3, GRID * GRID), np.uint8)
    objects[:, :6] = 1  # of the masked patches, the first one
    return KnownMotion(np.stack([noise] * 3), mask, objects, np.stack([cells] * 2))


@pytest.mark.parametrize("video", range(3))
def test_pixels_are_followed_to_where_they_are(video: int) -> None:
    """Joints are placed by other formulas; parts that hold one carry it along."""
    made = render_video(7, video, split="heldout", num_frames=15, size=64)
    scene, joints = find_scene(7, video, split="heldout"), true_joints(made)
    points = joints[:, :, 10].T
    seen = np.isfinite(points).all(axis=1) & (points >= 0).all(axis=1) & (points.round() < 64).all(axis=1)
    there = follow(scene, made, 10, 14, points[seen])
    found = np.isfinite(there).all(axis=1) & np.isfinite(joints[0, seen, 14])
    assert found.sum() > 3
    np.testing.assert_allclose(there[found], joints[:, seen, 14].T[found], atol=0.02)
    np.testing.assert_allclose(follow(scene, made, 10, 10, points[seen]), points[seen], atol=1e-9)


def test_shares_are_those_of_attention_on_the_true_place_and_object() -> None:
    found = measure_matching(matcher(), [sample()])
    assert found[STILL].place == found[STILL].hits == 1
    assert found[STILL].place_chance == pytest.approx(5 / GRID**2)  # itself and four neighbors
    assert found[STILL].times_chance()["place"] == pytest.approx(GRID**2 / 5)
    assert math.isnan(found[STILL].moved)
    assert found[PLAIN].hits == 1  # nothing is as similar as the patch itself
    assert 0.3 < found[CROSS].times_chance()["place"] < 3  # nothing is learned yet
    assert found[CROSS].object_chance == pytest.approx(6 / GRID**2)
    model = matcher()
    following = PatchMatchingModule(dim=32, num_heads=1, temperature=0.01, form="motion", start="identity")
    followed = measure_matching(model._replace(match=following), [sample()])
    assert followed[CROSS].hits == 1  # visible patches find themselves where they are, so masked ones do
    away = measure_matching(matcher(), [sample(shift=2.0)])
    assert away[STILL].place == away[STILL].moved == away[PLAIN].hits == 0
    assert away[CROSS].moved == away[CROSS].place > 0
    assert any("true place" in line for line in describe(found))


def test_places_and_objects_that_are_not_known_do_not_count() -> None:
    tally = Tally()
    attention = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]])
    near = torch.tensor([[True, False, False], [False, False, False]])
    tally.add(attention, torch.tensor([2, 0]), near, torch.zeros(2, 3, dtype=torch.bool))
    found = tally.result()
    assert (found.place, found.moved, found.hits) == (0.5, 0.5, 1.0)
    assert found.place_chance == pytest.approx(1 / 3)
    assert math.isnan(found.object)


def test_rendered_motion_is_masked_and_mostly_known() -> None:
    first, again = (next(iter(rendered_motion(1, 64, 8))) for _ in range(2))
    assert first.frames.shape == (3, 64, 64, 3)
    assert 0.3 < first.mask.mean() < 0.6
    assert first.places is not None
    assert 0.5 < np.isfinite(first.places).mean() <= 1
    np.testing.assert_array_equal(first.mask, again.mask)
    np.testing.assert_array_equal(first.places, again.places)


def test_clips_on_disk_tell_objects_alone(tmp_path: Path) -> None:
    root = write_davis(tmp_path / "davis", heldout_videos(2, num_frames=5, size=64))
    clips = list(davis_motion(root, 32, 8, binary=True))
    assert len(clips) == 2
    assert clips[0].frames.shape == (3, 32, 32, 3)
    assert set(np.unique(clips[0].objects)) <= {0, 1}
    found = measure_matching(matcher(), clips)
    assert math.isnan(found[CROSS].place)
    assert 0 < found[CROSS].object_chance < 1
    assert "true place" not in describe(found)[0]


def test_figure_and_numbers_of_a_run(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "matching.png"
    main(["figure", "matching", str(whole), "--videos", "2", "--batches", "1", "--out", str(out)])
    said = capsys.readouterr().out
    assert out.stat().st_size > 10_000
    numbers = json.loads(out.with_suffix(".json").read_text())["rendered"]
    assert list(numbers) == [CROSS, PLAIN, STILL]
    assert numbers[CROSS]["times_chance"]["place"] == pytest.approx(
        numbers[CROSS]["place"] / numbers[CROSS]["place_chance"]
    )
    assert "cross-entropy, the crop itself, unmasked" in said
    with pytest.raises(SystemExit):
        main(["figure", "matching", "random:vitti16", "--out", str(out)])


class Copying(nn.Module):
    """A matching module that takes every patch from its own place."""

    needs_scene = False

    def forward(self, current: Tensor, auxiliary: Tensor, scene: None) -> Tensor:
        return auxiliary


class Blind(nn.Module):
    """One that does not look at the other frames."""

    needs_scene = False

    def forward(self, current: Tensor, auxiliary: Tensor, scene: None) -> Tensor:
        return current


def test_a_module_that_finds_the_patch_is_distinguished_from_one_that_does_not_look() -> None:
    model, batch = tiny_models.model(targets="sinkhorn").eval(), tiny_models.batch(videos=6)
    model.match = Copying()  # type: ignore[assignment]
    found = cross_entropies(model, [batch], tiny_models.TEMPERATURE)
    best = found.pop("the crop itself, unmasked")
    assert all(best < other - 0.1 for other in found.values())

    model.match = Blind()  # type: ignore[assignment]
    assert len({round(value, 5) for value in cross_entropies(model, [batch], 0.05).values()}) == 1
