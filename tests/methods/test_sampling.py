"""Which three frames make a sample."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tcore.config import Config, validate
from tcore.errors import InputError
from tcore.methods import build_sampling
from tcore.methods.limits import Range
from tcore.methods.sampling import Sandwich, sample_sandwich, usable
from tcore.methods.settings import SandwichConfig, Sides
from tests.tiny import change

PUBLISHED_OFFSETS: list[Range] = [(0.05, 0.15), (0.10, 0.20), (0.15, 0.25), (0.20, 0.30)]


def draw(
    num_frames: int,
    *,
    count: int = 1500,
    offset: Range = (0.15, 0.25),
    offset_frames: tuple[int, int] | None = None,
    frames: Sides = "past-future",
) -> list[Sandwich]:
    rng = np.random.default_rng(num_frames)
    return [
        sample_sandwich(num_frames, rng, SandwichConfig(offset=offset, frames=frames), offset_frames)
        for _ in range(count)
    ]


def between(first: int, last: int) -> set[int]:
    """Whole numbers, both ends included."""
    return set(range(first, last + 1))


def is_usable(num_frames: int, offset: Range = (0.15, 0.25), seconds: tuple[int, int] | None = None) -> bool:
    return bool(usable(np.array([num_frames]), SandwichConfig(offset=offset), seconds)[0])


@pytest.mark.parametrize(
    ("num_frames", "current", "offset"),
    [
        (7, between(2, 3), {1}),
        (10, between(3, 6), between(1, 2)),
        (20, between(6, 13), between(3, 5)),
        (33, between(9, 22), between(4, 8)),
        (90, between(27, 61), between(13, 22)),  # 0.7 * 90 is 62.99..., cut off at 62
        (300, between(90, 209), between(45, 75)),
    ],
)
def test_every_frame_of_the_ranges_is_drawn_and_none_outside(
    num_frames: int, current: set[int], offset: set[int]
) -> None:
    drawn = draw(num_frames)
    assert {s.current for s in drawn} == current
    assert {s.current - s.past for s in drawn} == offset
    assert {s.future - s.current for s in drawn} == offset


@pytest.mark.parametrize(
    ("offset", "expected"),
    list(zip(PUBLISHED_OFFSETS, [between(2, 6), between(4, 8), between(6, 10), between(8, 12)], strict=True)),
)
def test_offsets_of_the_ablation_are_reached_at_both_ends(offset: Range, expected: set[int]) -> None:
    drawn = draw(40, offset=offset)
    assert {s.current - s.past for s in drawn} == {s.future - s.current for s in drawn} == expected


def test_current_frame_and_both_offsets_are_uniform_and_independent() -> None:
    drawn = draw(20, count=8 * 3 * 3 * 60)
    cells = np.zeros((8, 3, 3))
    for past, current, future in drawn:
        cells[current - 6, current - past - 3, future - current - 3] += 1
    # Chi-square with 71 degrees of freedom: mean 71, deviation 12.
    assert 71 - 4 * 12 < ((cells - 60) ** 2 / 60).sum() < 71 + 4 * 12


@given(st.floats(0, 0.5), st.floats(0, 1), st.floats(0, 1), st.integers(1, 400))
@settings(max_examples=150, deadline=None)
def test_settings_that_keep_the_rule_never_leave_the_video(
    largest: float, first: float, width: float, num_frames: int
) -> None:
    start = largest + first * (1 - 2 * largest)
    current = (start, start + width * (1 - largest - start))
    assume(current[0] - largest >= 0)
    assume(current[1] + largest <= 1)
    rng = np.random.default_rng(num_frames)
    for _ in range(5):
        drawn = sample_sandwich(
            num_frames, rng, SandwichConfig(current=current, offset=(largest / 2, largest))
        )
        if int(current[0] * num_frames) < int(current[1] * num_frames):
            assert all(0 <= frame < num_frames for frame in drawn)


def test_settings_that_leave_the_video_are_refused_by_name_and_value() -> None:
    for offset in PUBLISHED_OFFSETS:
        validate(change(Config(), sandwich=SandwichConfig(offset=offset)))
    for current in [(0.2, 0.6), (0.4, 0.8), (0.7 - 0.4, 0.7)]:  # the last one by its last bit
        with pytest.raises(InputError, match=r"sandwich\.offset=\(0\.2, 0\.3\).*outside the video"):
            validate(change(Config(), sandwich=SandwichConfig(current=current, offset=(0.2, 0.3))))


@pytest.mark.parametrize(("frames", "side"), [("past-past", -1), ("future-future", 1)])
def test_both_auxiliary_frames_can_come_from_one_side(frames: Sides, side: int) -> None:
    drawn = draw(20, frames=frames)
    distances = {(side * (s.past - s.current), side * (s.future - s.current)) for s in drawn}
    assert distances == {(a, b) for a in (3, 4, 5) for b in (3, 4, 5)}  # drawn independently
    assert {s.current for s in drawn} == between(6, 13)
    assert all(0 <= frame < 20 for s in drawn for frame in s)
    assert set(draw(1, count=5, frames=frames)) == {Sandwich(0, 0, 0)}


@pytest.mark.parametrize(("offset", "longest_short"), [((0.15, 0.25), 6), ((0.05, 0.15), 19)])
def test_videos_whose_smallest_offset_is_no_frame_are_short(offset: Range, longest_short: int) -> None:
    lengths = np.arange(1, 401)
    assert np.array_equal(usable(lengths, SandwichConfig(offset=offset)), lengths > longest_short)


@pytest.mark.parametrize(
    ("num_frames", "expected"),
    [
        (1, {(0, 0, 0)}),
        (2, {(0, 0, 0)}),
        (3, {(0, 0, 0), (1, 1, 1)}),
        (4, {(1 - a, 1, 1 + b) for a in (0, 1) for b in (0, 1)}),
        (5, {(c - a, c, c + b) for c in (1, 2) for a in (0, 1) for b in (0, 1)}),
        (6, {(c - a, c, c + b) for c in (1, 2, 3) for a in (0, 1) for b in (0, 1)}),
    ],
)
def test_repeated_short_videos_follow_the_formulas_as_they_are(
    num_frames: int, expected: set[tuple[int, int, int]]
) -> None:
    assert set(draw(num_frames, count=300)) == expected


@given(st.integers(1, 60), st.integers(1, 12), st.integers(0, 8))
@settings(max_examples=200, deadline=None)
def test_a_video_without_room_for_the_offsets_in_frames_is_short(
    num_frames: int, low: int, more: int
) -> None:
    high = low + more
    candidates = range(int(0.3 * num_frames), int(0.7 * num_frames))
    remain = [c for c in candidates if c - high >= 0 and c + high <= num_frames - 1]
    assert is_usable(num_frames, seconds=(low, high)) == bool(remain)
    if remain:
        drawn = draw(num_frames, count=8, offset_frames=(low, high))
        assert all(s.current in remain and s.past >= 0 and s.future < num_frames for s in drawn)


def test_past_and_future_may_be_the_current_frame_itself() -> None:
    moving, still = (
        sample_sandwich(20, np.random.default_rng(3), SandwichConfig(still=share)) for share in (0.0, 1.0)
    )
    assert still == (moving.current,) * 3
    assert moving == sample_sandwich(20, np.random.default_rng(3), SandwichConfig())
    assert moving.past < moving.current < moving.future
    rng = np.random.default_rng(0)
    drawn = [sample_sandwich(20, rng, SandwichConfig(still=0.3)) for _ in range(500)]
    assert 0.2 < np.mean([one.past == one.current for one in drawn]) < 0.4
    sampling = build_sampling(change(Config(), sandwich__still=1.0), 2.0)
    assert len(set(sampling.frames(20, np.random.default_rng(1)).values())) == 1
