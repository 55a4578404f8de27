from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import tcore
from tcore.errors import InputError
from tcore.evaluation.encoder import Encoder
from tcore.video.box_network import likely_in_box
from tcore.video.mark import STEPS_TO, Marker, link, walk
from tcore.video.motion import fit_affine, follow
from tests.evaluation.clips import overlap


@pytest.fixture(scope="module")
def disk() -> np.ndarray:
    """The object: a disk left of the middle."""
    y, x = np.mgrid[:96, :128]
    return np.asarray((x - 50) ** 2 + (y - 44) ** 2 < 24**2)


@pytest.fixture(scope="module")
def frame(disk: np.ndarray) -> np.ndarray:
    """A red disk before a greenish ground, both noisy."""
    noise = np.random.default_rng(0).integers(-30, 30, (96, 128, 3))
    return (
        np.where(disk[..., None], (180, 60, 50), (70, 120, 80)).__add__(noise).clip(0, 255).astype(np.uint8)
    )


@pytest.fixture(scope="module")
def marker(frame: np.ndarray, encoder: Encoder) -> Marker:
    return Marker(frame, encoder)


def test_a_box_becomes_the_object_in_it(marker: Marker, disk: np.ndarray) -> None:
    found = marker.mark(box=(26, 20, 49, 49))
    assert overlap(found, disk) > 0.9
    assert not found[:20].any()  # nothing outside of the box


def test_the_network_finds_an_object_that_leaves_the_middle_of_its_box_free() -> None:
    noise = np.random.default_rng(1).integers(-20, 20, (120, 160, 3))
    truth = np.zeros((120, 160), bool)
    truth[30:90, 50:68] = truth[72:90, 50:110] = True
    corner = (np.where(truth[..., None], (160, 90, 80), (110, 110, 110)) + noise).astype(np.uint8)
    likely = likely_in_box(torch.from_numpy(corner).permute(2, 0, 1) / 255, (50, 30, 60, 60))
    assert likely[truth].mean() > 0.7 > 0.2 > likely[30:72, 68:110].mean()


def test_a_box_at_the_border_of_the_frame_is_as_good(encoder: Encoder, frame: np.ndarray) -> None:
    half = frame[:, 50:]
    y, x = np.mgrid[:96, :78]
    truth = x**2 + (y - 44) ** 2 < 24**2
    assert overlap(tcore.mark(half, encoder, box=(0, 20, 24, 49)), truth) > 0.85


def test_the_mirror_image_of_a_frame_gives_the_mirror_image_of_what_is_likely(frame: np.ndarray) -> None:
    pixels = torch.from_numpy(frame).permute(2, 0, 1) / 255
    likely = likely_in_box(pixels, (26, 20, 50, 50))
    np.testing.assert_allclose(likely_in_box(pixels.flip(2), (52, 20, 50, 50)), likely[:, ::-1], atol=1e-5)
    assert likely[44, 50] > 0.9 > 0.1 > likely[22, 28]


@pytest.mark.parametrize("box", [(-1e7, -1e7, 2e7, 2e7), (-40, 20, 116, 49), (50.2, 44.1, 0.7, 0.8)])
def test_boxes_larger_than_the_frame_across_its_border_or_of_one_pixel_are_fine(
    box: tuple[float, ...], marker: Marker
) -> None:
    assert marker.mark(box=box).shape == (96, 128)


@pytest.mark.parametrize("how", ["click", "scribble", "brush"])
def test_other_marks_become_the_object(how: str, marker: Marker, disk: np.ndarray) -> None:
    line = np.zeros_like(disk)
    line[44, 36:64] = True
    generous = (
        np.roll(disk, 4, axis=1) | np.roll(disk, -4, axis=1) | np.roll(disk, 4, 0) | np.roll(disk, -4, 0)
    )
    marks: dict[str, dict[str, Any]] = {
        "click": {"clicks": [(50, 44)]},
        "scribble": {"scribble": line},
        "brush": {"brush": generous},
    }
    assert overlap(marker.mark(**marks[how]), disk) > 0.85


def test_a_click_beside_the_object_takes_its_surroundings_away(
    encoder: Encoder, frame: np.ndarray, disk: np.ndarray
) -> None:
    two = frame.copy()
    two[60:90, 90:120] = frame[30:60, 36:66]  # the same red once more
    marker, other = Marker(two, encoder), np.zeros_like(disk)
    other[60:90, 90:120] = True
    before = marker.mark(clicks=[(50, 44), (105, 75)])
    after = marker.mark(clicks=[(50, 44)], clicks_not=[(105, 75)])
    assert before[other].mean() > 0.8
    assert after[other].mean() < 0.2 < 0.8 < overlap(after & ~other, disk)


def test_frames_and_marks_may_be_tensors_images_and_lists(encoder: Encoder, frame: np.ndarray) -> None:
    expected = tcore.mark(frame, encoder, box=(26, 20, 49, 49))
    for same in (torch.from_numpy(frame), torch.from_numpy(frame).permute(2, 0, 1), Image.fromarray(frame)):
        np.testing.assert_array_equal(tcore.mark(same, encoder, box=np.array([26, 20, 49, 49])), expected)
    np.testing.assert_array_equal(
        tcore.mark(frame, encoder, clicks=[50, 44]),
        tcore.mark(frame, encoder, clicks=torch.tensor([[50.0, 44.0]])),
    )


@pytest.mark.parametrize(
    ("marks", "said"),
    [
        ({}, "give a box, clicks"),
        ({"box": (200, 0, 5, 5)}, "box 200 0 5 5"),
        ({"box": (1, 1, 0, 5)}, "box 1 1 0 5"),
        ({"box": (1, 2, 3)}, "need 4 numbers"),
        ({"clicks": [(500, 3)]}, "x 500, y 3"),
        ({"clicks": [(1, float("nan"))]}, "all finite"),
        ({"clicks": "here"}, "'here'"),
        ({"scribble": np.zeros((96, 128))}, "the scribble is empty"),
        ({"brush": np.ones((3, 4), bool)}, "the brush is 4x3"),
        ({"brush": np.ones(3)}, "need rows x columns"),
    ],
)
def test_marks_that_mean_nothing_are_refused(marks: dict[str, Any], said: str, marker: Marker) -> None:
    with pytest.raises(InputError, match=said):
        marker.mark(**marks)


@pytest.mark.parametrize(
    ("frame", "said"),
    [(np.zeros((9, 9, 3)), "float64"), (np.zeros((5, 9, 9, 3), np.uint8), "5x9x9x3"), ("no.png", "no.png")],
)
def test_frames_that_are_none_are_refused(frame: Any, said: str, encoder: Encoder) -> None:
    with pytest.raises(InputError, match=said):
        tcore.mark(frame, encoder, clicks=[(1, 1)])


def test_the_walk_solves_its_equations() -> None:
    generator = torch.Generator().manual_seed(0)
    colors, places = (torch.rand(3, 5, 6, generator=generator) for _ in range(2))
    links = [link(colors, places, step) for step in STEPS_TO]
    pull, target = (torch.rand(5, 6, generator=generator) for _ in range(2))
    cells = torch.arange(30).view(5, 6)
    matrix = torch.diag(pull.flatten())
    for here, there, strength in links:
        for a, b, held in zip(cells[here].flatten(), cells[there].flatten(), strength.flatten(), strict=True):
            matrix[a, a] += held
            matrix[b, b] += held
            matrix[a, b] -= held
            matrix[b, a] -= held
    expected = torch.linalg.solve(matrix, (pull * target).flatten()).view(5, 6)
    torch.testing.assert_close(walk(links, pull, target, target), expected, atol=1e-4, rtol=1e-4)


def moving_clip(shift: tuple[int, int], own: tuple[int, int]) -> tuple[list[np.ndarray], np.ndarray]:
    """Three frames of a corner before a ground with the same texture, and the mask of the second one."""
    rng = np.random.default_rng(2)
    blurred = F.avg_pool2d(torch.from_numpy(rng.random((2, 3, 160, 200))).float(), 3, 1)
    ground, texture = (blurred * 255).permute(0, 2, 3, 1).to(torch.uint8).numpy()
    frames, truth = list[np.ndarray](), np.zeros((96, 128), bool)
    truth[20:76, 30:50] = truth[56:76, 30:90] = True
    for time in (-1, 0, 1):
        behind, before = (
            np.roll(one, (time * by[1], time * by[0]), (0, 1))
            for one, by in ((ground, shift), (texture, own))
        )
        there = np.roll(truth, (time * own[1], time * own[0]), (0, 1))
        frames.append(np.where(there[..., None], before[:96, :128], behind[:96, :128]))
    return frames, truth


def test_an_object_that_looks_like_the_ground_is_found_by_its_motion(encoder: Encoder) -> None:
    (before, frame, after), truth = moving_clip((3, 1), (-2, 0))
    box = (30, 20, 60, 56)
    alone = overlap(tcore.mark(frame, encoder, box=box), truth)
    one = overlap(tcore.mark(frame, encoder, box=box, nearby=[after]), truth)
    both = overlap(tcore.mark(frame, encoder, box=box, nearby=[before, Image.fromarray(after)]), truth)
    assert alone + 0.2 < one
    assert alone + 0.3 < both


@pytest.mark.parametrize("marks", [{"box": (30, 20, 60, 56)}, {"clicks": [(40, 40)]}])
def test_nearby_frames_in_which_nothing_moves_change_no_pixel(
    marks: dict[str, Any], encoder: Encoder
) -> None:
    (_, frame, _), _ = moving_clip((0, 0), (0, 0))
    alone = tcore.mark(frame, encoder, **marks)
    np.testing.assert_array_equal(tcore.mark(frame, encoder, **marks, nearby=[frame, frame]), alone)


def test_a_nearby_frame_of_another_size_is_refused(encoder: Encoder, frame: np.ndarray) -> None:
    with pytest.raises(InputError, match="nearby frame is 120x90, the marked one 128x96"):
        tcore.mark(frame, encoder, box=(26, 20, 49, 49), nearby=[frame, frame[:90, :120]])


def test_motion_is_found_and_most_of_it_is_the_background() -> None:
    (_, frame, after), truth = moving_clip((4, -2), (-2, 3))
    pair = [torch.from_numpy(one).permute(2, 0, 1)[None] / 255 for one in (frame, after)]
    flow = follow(pair[0], pair[1])
    inside = flow[0, :, torch.from_numpy(truth)].median(dim=1).values
    torch.testing.assert_close(inside, torch.tensor([-2.0, 3.0]), atol=0.2, rtol=0)
    background, usual = fit_affine(flow, torch.ones(96, 128))
    torch.testing.assert_close(background[0, :, 48, 64], torch.tensor([4.0, -2.0]), atol=0.2, rtol=0)
    assert usual < 1
