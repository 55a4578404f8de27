"""Rendered videos: deterministic, exact in their labels, and not solved by standing still."""

import inspect
from functools import cache

import numpy as np
import pytest
from jaxtyping import Bool, Float

from tcore.data import rendered
from tcore.data.rendered import JOINT_NAMES, PART_NAMES, RenderedVideo
from tcore.data.rendered_varied import draw_photograph, render_varied
from tcore.errors import InputError

render_video = inspect.unwrap(rendered.render_video)  # rendered anew every time, unlike in other tests


@cache
def heldout(video: int) -> RenderedVideo:
    return render_video(0, video, split="heldout")


def by_name(video: RenderedVideo, joint: str) -> Float[np.ndarray, "time 3"]:
    return video.joints[:, JOINT_NAMES.index(joint)]


def test_the_same_numbers_give_the_same_video_whatever_its_length() -> None:
    short, long, again = (render_video(0, 4, num_frames=n, size=64) for n in (4, 9, 9))
    for part in ("frames", "objects", "parts", "joints"):
        np.testing.assert_array_equal(getattr(long, part), getattr(again, part))
        np.testing.assert_array_equal(getattr(long, part)[:4], getattr(short, part))


def test_split_seed_and_number_each_make_another_video() -> None:
    looks = {
        render_video(seed, video, split=split, num_frames=1, size=32).frames.tobytes()
        for seed in range(2)
        for video in range(2)
        for split in ("train", "heldout")
    }
    assert len(looks) == 8


def test_labels_and_mean_colors_do_not_depend_on_the_size() -> None:
    for number in range(2):
        small, large = (render_video(0, number, num_frames=4, size=size) for size in (64, 128))
        # Every small pixel is the common corner of four large ones.
        corners = np.stack([large.objects[:, i::2, j::2] for i in (0, 1) for j in (0, 1)])
        agree = (corners == small.objects).any(0)
        assert agree.mean() > 0.995
        pooled = large.frames.reshape(4, 64, 2, 64, 2, 3).mean((2, 4))
        assert np.abs(pooled - small.frames).mean() < 12
        assert np.abs(pooled.mean((1, 2)) - small.frames.mean((1, 2))).max() < 2
        np.testing.assert_allclose((small.joints[..., :2] + 0.5) * 2, large.joints[..., :2] + 0.5, atol=1e-3)


@pytest.mark.parametrize("video", range(6))
def test_every_object_shows_in_the_first_frame_and_parts_lie_on_the_last_one(video: int) -> None:
    objects, parts = heldout(video).objects, heldout(video).parts
    count = int(objects.max())
    assert 3 <= count <= 5
    for i in range(1, count + 1):
        assert (objects[0] == i).mean() >= 0.03
        assert ((objects == i).mean((1, 2)) > 0.005).mean() > 0.5
    np.testing.assert_array_equal(parts > 0, objects == count)
    assert parts.max() == len(PART_NAMES) - 1


@pytest.mark.parametrize("video", range(6))
def test_visible_joints_lie_on_the_figure_and_hidden_ones_have_a_reason(video: int) -> None:
    rendered = heldout(video)
    figure = rendered.objects.max()
    for t, joints in enumerate(rendered.joints):
        for name, (x, y, visible) in zip(JOINT_NAMES, joints, strict=True):
            column, row = round(float(x)), round(float(y))
            inside = 0 <= column < 128 and 0 <= row < 128
            if visible:
                assert inside
                assert rendered.objects[t, row, column] == figure, name
            elif inside:
                # Something is in front of it: another object or another limb, but never the ground.
                assert rendered.objects[t, row, column] != 0, name
    assert rendered.joints[..., 2].mean() > 0.4


BONES = (
    ("face", "face", "head"),
    ("right_elbow", "right_wrist", "right_forearm"),
    ("left_knee", "left_ankle", "left_shin"),
)


@pytest.mark.parametrize(("start", "end", "part"), BONES)
def test_parts_are_symmetric_about_the_middle_of_their_joints(start: str, end: str, part: str) -> None:
    mirrored_on_ground: list[Bool[np.ndarray, " n"]] = []
    off_center_on_ground: list[Bool[np.ndarray, " n"]] = []
    for video in map(heldout, range(8)):
        middles = (by_name(video, start) + by_name(video, end))[:, :2] / 2
        for objects, parts, middle in zip(video.objects, video.parts, middles, strict=True):
            pixels = np.argwhere(parts == PART_NAMES.index(part))[:, ::-1]
            for shift, found in ((0.0, mirrored_on_ground), (1.0, off_center_on_ground)):
                mirrored = np.rint(2 * (middle + shift) - pixels).astype(int)
                x, y = mirrored[((mirrored >= 0) & (mirrored < 128)).all(1)].T
                found.append(objects[y, x] == 0)
    # The mirror image may be hidden by something else, but the ground is behind everything.
    assert np.concatenate(mirrored_on_ground).mean() < 0.03
    # So sharp is this test: it would see joints that are off by a pixel.
    assert np.concatenate(off_center_on_ground).mean() > 0.05


def test_objects_move_smoothly_and_the_light_changes() -> None:
    assert np.mean([np.ptp(video.frames.mean((1, 2, 3))) for video in map(heldout, range(8))]) > 10
    for number in range(8):
        joints = heldout(number).joints[..., :2]
        step = np.linalg.norm(np.diff(joints, axis=0), axis=2)
        bend = np.linalg.norm(np.diff(joints, n=2, axis=0), axis=2)
        assert step.max() < 24
        assert 1 < step.mean() < 10
        assert bend.mean() < 0.6 * step.mean()


def test_mean_color_hardly_tells_objects_from_the_ground() -> None:
    nearer = []
    for video in map(heldout, range(8)):
        frame, ids = video.frames[0].astype(float), video.objects[0]
        means = np.stack([frame[ids == i].mean(0) for i in range(int(ids.max()) + 1)])
        guess = np.linalg.norm(frame[:, :, None] - means, axis=3).argmin(2)
        nearer.append(np.mean([(guess == i)[ids == i].mean() for i in range(len(means))]))
        # Texture is there: pixels spread more within an object than the objects' means among themselves.
        spread = np.mean([frame[ids == i].std(0).mean() for i in range(len(means))])
        assert spread > 0.5 * means.std(0).mean()
    assert 0.25 < np.mean(nearer) < 0.7


@pytest.mark.parametrize(
    ("seed", "video", "num_frames", "size"), [(-1, 0, 2, 64), (0, -1, 2, 64), (0, 0, 0, 64), (0, 0, 2, 16)]
)
def test_numbers_out_of_range_are_refused_by_name(seed: int, video: int, num_frames: int, size: int) -> None:
    with pytest.raises(
        InputError, match=rf"video {video} of seed {seed}, {num_frames} frames of {size} pixels"
    ):
        render_video(seed, video, num_frames=num_frames, size=size)


def test_varied_videos_are_a_function_of_their_number_and_move() -> None:
    first, again, other = (render_varied(0, number, num_frames=6, size=64) for number in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    for frames in (first, other):
        assert frames.shape == (6, 64, 64, 3)
        assert frames.dtype == np.uint8
        assert frames.std() > 8
        assert np.abs(frames[5].astype(int) - frames[0]).mean() > 2
    assert (first != other).any()


def test_varied_textures_have_the_falling_spectrum_of_photographs() -> None:
    tile = draw_photograph(np.random.default_rng(0), 128, np.full(3, 0.5, np.float32)).mean(axis=0)
    power = np.abs(np.fft.fft2(tile - tile.mean())) ** 2
    radii = np.hypot(*np.meshgrid(np.fft.fftfreq(128), np.fft.fftfreq(128)))
    low, high = (power[(radii > a) & (radii < b)].mean() for a, b in ((0.02, 0.05), (0.2, 0.5)))
    assert low > 20 * high
