import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tcore.errors import InputError
from tcore.evaluation.scores import (
    boundary_similarity,
    class_iou,
    confusion_matrix,
    davis_scores,
    mean_iou,
    object_statistics,
    pck,
    region_similarity,
)

quick = settings(deadline=None, max_examples=25)


def blobs(rng: np.random.Generator, frames: int, height: int, width: int) -> np.ndarray:
    """Masks of a few overlapping boxes, some of them empty or full."""
    masks = np.zeros((frames, height, width), dtype=bool)
    for mask in masks:
        for _ in range(rng.integers(0, 4)):
            top, left = rng.integers(-3, height), rng.integers(-3, width)
            mask[max(top, 0) : top + rng.integers(1, 12), max(left, 0) : left + rng.integers(1, 12)] ^= True
    return masks


def slow_boundary(mask: np.ndarray) -> set[tuple[int, int]]:
    height, width = mask.shape
    return {
        (y, x)
        for y in range(height)
        for x in range(width)
        for dy, dx in ((0, 1), (1, 0), (1, 1))
        if y + dy < height and x + dx < width and mask[y, x] != mask[y + dy, x + dx]
    }


def slow_f(truth: np.ndarray, prediction: np.ndarray) -> float:
    radius = math.ceil(0.008 * math.sqrt(truth.shape[0] ** 2 + truth.shape[1] ** 2))
    sets = slow_boundary(truth), slow_boundary(prediction)
    if not all(sets):
        return float(not any(sets))

    def share(points: set[tuple[int, int]], targets: set[tuple[int, int]]) -> float:
        near = [any((y - v) ** 2 + (x - u) ** 2 <= radius**2 for v, u in targets) for y, x in points]
        return sum(near) / len(near)

    precision, recall = share(sets[1], sets[0]), share(sets[0], sets[1])
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


@quick
@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.integers(1, 40))
def test_boundary_similarity_agrees_with_a_search_of_all_pairs(seed: int, height: int, width: int) -> None:
    rng = np.random.default_rng(seed)
    truth, prediction = blobs(rng, 2, height, width), blobs(rng, 2, height, width)
    expected = [slow_f(t, p) for t, p in zip(truth, prediction, strict=True)]
    np.testing.assert_allclose(boundary_similarity(truth, prediction), expected, atol=1e-12)


def test_boundary_similarity_agrees_with_the_search_where_the_disk_is_large() -> None:
    rng = np.random.default_rng(3)
    truth, prediction = np.zeros((2, 1, 20, 500), dtype=bool)
    truth[0, 8:, ::90] = True
    prediction[0, 3:, 4::80] = rng.random((17, 7)) < 0.5
    assert boundary_similarity(truth, prediction)[0] == pytest.approx(slow_f(truth[0], prediction[0]))


def test_an_empty_mask_scores_one_against_an_empty_mask_and_zero_against_an_object() -> None:
    empty, square = np.zeros((1, 20, 20), dtype=bool), np.zeros((1, 20, 20), dtype=bool)
    square[0, 5:9, 5:9] = True
    for measure in (region_similarity, boundary_similarity):
        assert measure(empty, empty)[0] == 1
        assert measure(empty, square)[0] == 0
        assert measure(square, empty)[0] == 0


def test_void_is_background_and_an_object_that_is_never_predicted_is_an_empty_mask() -> None:
    truth = np.zeros((4, 16, 16), dtype=np.uint8)
    truth[:, 2:6, 2:6], truth[:, 9:13, 9:13], truth[:, 0, 0] = 1, 2, 255
    prediction = np.where(truth == 1, 1, 0).astype(np.uint8)
    first, second = davis_scores(truth, prediction)
    assert first.tolist() == [[1, 1], [1, 1]]
    assert second.tolist() == [[0, 0], [0, 0]]


def test_objects_that_appear_after_the_first_frame_and_the_ends_are_not_scored() -> None:
    truth = np.zeros((5, 8, 8), dtype=np.uint8)
    truth[:, 1:4, 1:4], truth[2:, 5:, 5:] = 1, 2
    assert len(davis_scores(truth, truth)) == 1
    assert davis_scores(truth[:, 5:], truth[:, 5:]) == []
    with pytest.raises(InputError, match="2 frames"):
        davis_scores(truth[:2], truth[:2])


def test_decay_compares_the_first_quarter_with_the_last_both_ends_included() -> None:
    values = np.arange(9, dtype=float)
    assert object_statistics(values)["decay"] == np.mean([0, 1, 2]) - np.mean([6, 7, 8])
    assert object_statistics(np.array([0.7])) == {"mean": 0.7, "recall": 1.0, "decay": 0.0}
    long = object_statistics(np.linspace(1, 0, 1001))
    assert long["decay"] == pytest.approx(0.75)
    assert long["recall"] == pytest.approx(500 / 1001)  # .5 itself is not above .5


def test_miou_leaves_out_void_pixels_and_absent_classes_but_not_wrong_guesses() -> None:
    truth = np.array([0, 0, 1, 1, 255, 20], dtype=np.uint8)
    prediction = np.array([0, 0, 1, 5, 7, 7], dtype=np.uint8)
    confusion = confusion_matrix(truth, prediction)
    assert confusion.sum() == 4
    np.testing.assert_array_equal(np.flatnonzero(~np.isnan(class_iou(confusion))), [0, 1, 5])
    assert mean_iou(confusion) == pytest.approx((1 + 0.5 + 0) / 3)


def test_impossible_classes_and_empty_confusions_are_refused() -> None:
    with pytest.raises(InputError, match="class 20"):
        confusion_matrix(np.array([0, 3]), np.array([0, 20]))
    with pytest.raises(InputError, match="empty"):
        mean_iou(confusion_matrix(np.array([255]), np.array([20])))


def slow_pck(truth: list[np.ndarray], prediction: list[np.ndarray], threshold: float) -> float:
    right: dict[int, list[bool]] = {}
    for true, found in zip(truth, prediction, strict=True):
        for frame in range(1, true.shape[2]):
            seen = [
                j for j in range(true.shape[1]) if not np.isnan([true[:, j, frame], found[:, j, frame]]).any()
            ]
            for joint in seen:
                box = np.ptp(true[:, seen, frame], axis=1)
                distance = math.dist(true[:, joint, frame], found[:, joint, frame])
                right.setdefault(joint, []).append(distance / (0.6 * math.hypot(*box)) <= threshold)
    return float(np.mean([np.mean(hits) for hits in right.values()]))


def test_pck_agrees_with_a_plain_loop_when_truth_and_prediction_lose_joints() -> None:
    rng = np.random.default_rng(5)
    truth = [rng.uniform(0, 200, (2, 6, frames)) for frames in (4, 9, 2)]
    prediction = [t + rng.normal(0, 20, t.shape) for t in truth]
    truth[0][:, 2, :] = truth[1][:, 2, :] = truth[2][:, 2, :] = np.nan  # never found at all
    truth[1][:, 3, 4] = truth[1][:, 0, 0] = np.nan
    prediction[1][:, 3, 4] = prediction[0][:, 5, 1:3] = prediction[0][:, 5, 0] = np.nan
    for threshold in (0.05, 0.1, 0.2):
        scores = pck(truth, prediction, (threshold,))
        assert scores.pck[0] == pytest.approx(slow_pck(truth, prediction, threshold))
        assert (scores.lost_in_truth, scores.lost_in_prediction) == (12 + 1, 2)
        assert np.isnan(scores.per_joint[0]).nonzero()[0].tolist() == [2]
        assert scores.scored == 6 * 12 - 13 - 2


def test_pck_without_a_single_joint_to_score_is_refused() -> None:
    lost = np.full((2, 3, 4), np.nan)
    with pytest.raises(InputError, match="none of 9 joints"):
        pck([lost], [lost])
    with pytest.raises(InputError, match="no clips"):
        pck([], [])


def test_a_box_without_extent_accepts_exact_hits_alone() -> None:
    truth, prediction = np.full((2, 2, 3), 7.0), np.full((2, 2, 3), 7.0)
    prediction[0, 1] = 7.5
    assert pck([truth], [prediction]).per_joint[0].tolist() == [1, 0]


def test_a_lost_joint_is_left_out_or_wrong() -> None:
    truth = np.zeros((2, 3, 2))
    truth[:, :, 1] = [[0, 10, 20], [0, 10, 20]]
    found = truth.copy()
    found[:, 2, 1] = np.nan
    left_out, wrong = (pck([truth], [found], (0.1,), count_lost=count) for count in (False, True))
    assert left_out.pck[0] == 1
    assert wrong.pck[0] == pytest.approx(2 / 3)
    assert (left_out.scored, wrong.scored) == (2, 3)
    assert left_out.lost_in_prediction == wrong.lost_in_prediction == 1
