from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tcore.errors import InputError
from tcore.evaluation import propagate
from tcore.evaluation.propagate import Propagator, label_sources, propagate_features, propagate_plainly
from tcore.evaluation.protocols import FirstFrame, Protocol

quick = settings(deadline=None, max_examples=20)


def random_video(seed: int, time: int, height: int, width: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(8, height, width, generator=generator)
    noise = torch.randn(time, 8, height, width, generator=generator)
    labels = torch.randn(height, width, 3, generator=generator).mul(3).softmax(dim=2)
    return start + noise, labels


def run(features: Tensor, first: Tensor, **knobs: Any) -> Tensor:
    return torch.stack(list(propagate_features(features, first, Protocol(**knobs))))


KNOBS = {
    "context": st.integers(0, 5),
    "radius": st.sampled_from([0.0, 1.0, 1.5, 2.0, 3.3, 20.0, float("inf")]),
    "topk": st.integers(1, 12),
    "first_frame": st.sampled_from(["repeated", "once"]),
    "window": st.sampled_from(["disk", "square"]),
    "limit_first": st.booleans(),
}


@quick
@given(
    seed=st.integers(0, 2**31),
    time=st.integers(2, 9),
    grid=st.tuples(st.integers(1, 7), st.integers(1, 7)),
    knobs=st.fixed_dictionaries(KNOBS),
    score_bytes=st.sampled_from([1, 700, 5000, 1 << 24]),
)
def test_streaming_agrees_with_the_full_matrix_and_real_copies(
    seed: int, time: int, grid: tuple[int, int], knobs: dict[str, Any], score_bytes: int
) -> None:
    features, first = random_video(seed, time, *grid)
    if knobs["limit_first"]:  # a disk without its center holds no key at all
        knobs["radius"] = max(knobs["radius"], 0.5)
    protocol = Protocol(**knobs)
    propagator = Propagator(protocol, score_bytes)
    propagator.start(features[0], first)
    found = torch.stack([first, *(propagator.step(frame) for frame in features[1:])])
    torch.testing.assert_close(found, propagate_plainly(features, first, protocol), rtol=0, atol=1e-5)


def test_what_is_held_does_not_grow_with_the_video() -> None:
    features, first = random_video(5, 12, 4, 5)
    propagator = Propagator(Protocol(context=2))

    def held() -> int:
        return sum(value.nbytes for value in vars(propagator).values() if isinstance(value, Tensor))

    for _ in range(2):  # it can be started again
        propagator.start(features[0], first)
        before = held()
        found = torch.stack([propagator.step(frame) for frame in features[1:]])
        assert held() == before == 4 * 3 * 20 * (8 + 3)
        torch.testing.assert_close(found, run(features, first, context=2)[1:])


def test_half_precision_features_and_autocast_are_computed_in_single_precision() -> None:
    features, first = random_video(7, 4, 5, 6)
    features = features.bfloat16()
    expected = run(features.float(), first)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = run(features, first)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected)


def test_bad_settings_and_frames_are_named() -> None:
    features, first = random_video(8, 2, 4, 5)
    for name, value in {"context": -1, "radius": -2, "topk": 0, "temperature": 0.0}.items():
        with pytest.raises(InputError, match=f"{name} is {value}"):
            Protocol(**{name: value})  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"grid \(5, 4\)"):
        Propagator(Protocol()).start(features[0], first.transpose(0, 1))
    propagator = Propagator(Protocol())
    with pytest.raises(RuntimeError, match="before start"):
        propagator.step(features[1])
    propagator.start(features[0], first)
    with pytest.raises(InputError, match=r"\(8, 5, 4\)"):
        propagator.step(features[1].transpose(1, 2))


def test_features_held_in_bf16_are_compared_in_single_precision() -> None:
    features, labels = random_video(3, time=4, height=5, width=7)
    held = run(features, labels, context=2, radius=4, precision="bf16")
    unit = F.normalize(features, dim=1).bfloat16().float()
    propagator = Propagator(Protocol(context=2, radius=4, precision="bf16"))
    propagator.start(features[0], labels)
    assert propagator._features.dtype == torch.bfloat16
    assert torch.equal(propagator._features[0].float(), unit[0].permute(2, 1, 0).flatten(0, 1))
    exact = run(features, labels, context=2, radius=4)
    assert not torch.equal(held, exact)
    assert (held - exact).abs().mean() < 0.02


@pytest.mark.parametrize("grid", [(4, 6), (6, 4)])
@pytest.mark.parametrize("first_frame", ["repeated", "once"])
@pytest.mark.parametrize("search", ["exact", "halved"])
def test_the_sources_of_a_cell_make_its_label(
    grid: tuple[int, int], first_frame: FirstFrame, search: str
) -> None:
    features, first = random_video(3, 9, *grid)
    knobs: dict[str, Any] = {"context": 3, "radius": 2.5, "topk": 5, "first_frame": first_frame}
    knobs["search"] = search
    labels = run(features, first, **knobs)
    propagator = Propagator(Protocol(**knobs))
    propagator.start(features[0], first)
    for time in range(1, 9):
        row, column = time % grid[0], (2 * time) % grid[1]
        found = propagator.sources(features[time], row, column)
        assert sum(source.weight for source in found) == pytest.approx(1)
        assert [s.weight for s in found] == sorted((s.weight for s in found), reverse=True)
        assert {s.frame for s in found} <= {0, *range(max(1, time - 3), time)}
        mixed = torch.stack([s.weight * labels[s.frame, s.row, s.column] for s in found]).sum(dim=0)
        torch.testing.assert_close(mixed, labels[time, row, column])
        for s in found:
            cosine = F.cosine_similarity(
                features[time, :, row, column], features[s.frame, :, s.row, s.column], dim=0
            )
            assert s.similarity == pytest.approx(float(cosine), abs=1e-5)
        # Labels that are known are taken as they are; asking has changed nothing.
        propagator.skip(features[time], labels[time])


def test_sources_of_the_last_frame_need_the_first_and_the_context_alone() -> None:
    features, _ = random_video(5, 7, 4, 6)
    cells, protocol = [(1, 4), (3, 0)], Protocol(context=2, radius=3)
    expected = label_sources(features, cells, protocol)
    found = label_sources(features[[0, 4, 5, 6]], cells, protocol)
    again = [[s._replace(frame=[0, 4, 5][s.frame]) for s in sources] for sources in found]
    assert [[s[:3] for s in sources] for sources in again] == [[s[:3] for s in one] for one in expected]


def test_labels_given_for_a_later_frame_restart_the_propagation() -> None:
    features, first = random_video(9, 6, 4, 5)
    seen: list[Tensor | None] = []

    def given(index: int, propagated: Tensor | None) -> Tensor | None:
        seen.append(propagated)
        return {0: first, 3: first.flip(0)}.get(index)

    found = torch.stack(list(propagate_features(features, given, Protocol(context=2))))
    assert torch.equal(found[:3], run(features[:3], first, context=2))
    assert torch.equal(found[3:], run(features[3:], first.flip(0), context=2))
    assert seen[0] is None
    assert seen[3] is not None
    assert not torch.equal(seen[3], found[3])
    with pytest.raises(InputError, match="first frame has no labels"):
        next(propagate_features(features, lambda index, propagated: None, Protocol()))


@pytest.mark.parametrize("grid", [(8, 12), (9, 7), (5, 5), (7, 8)])
@pytest.mark.parametrize("limit_first", [False, True])
def test_halved_search_that_keeps_every_candidate_is_exact(
    monkeypatch: pytest.MonkeyPatch, grid: tuple[int, int], limit_first: bool
) -> None:
    features, first = random_video(11, 7, *grid)
    knobs: dict[str, Any] = {"context": 3, "radius": 3.3, "limit_first": limit_first}
    exact = run(features, first, **knobs)
    assert not torch.equal(run(features, first, **knobs, search="halved"), exact)  # few of many, of noise
    monkeypatch.setattr(propagate, "CANDIDATES", 10**6)
    torch.testing.assert_close(run(features, first, **knobs, search="halved"), exact)


def test_halved_search_of_a_moving_pattern_is_nearly_exact() -> None:
    noise = torch.randn(1, 8, 10, 14, generator=torch.Generator().manual_seed(4))
    texture = F.interpolate(noise, size=(40, 56), mode="bicubic")[0]
    features = torch.stack([texture[:, 8 - t : 32 - t, 8 + t : 48 + t] for t in range(6)])
    first = F.one_hot((features[0, 0] > 0).long(), 2).float()
    exact = run(features, first, context=3, radius=6)
    found = run(features, first, context=3, radius=6, search="halved")
    assert (found.argmax(dim=3) == exact.argmax(dim=3)).float().mean() > 0.97
