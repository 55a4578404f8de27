import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tcore.data.rendered import RenderedVideo
from tcore.errors import InputError
from tcore.evaluation.card import Card, table, worst_clips
from tcore.evaluation.encoder import Encoder
from tcore.evaluation.encoders import choose_reach
from tcore.evaluation.evaluate import evaluate
from tcore.evaluation.protocols import RENDERED, TCORE, protocol
from tcore.evaluation.rendered import HELDOUT_SEED, heldout_videos, propagate_video, score_videos
from tcore.evaluation.score import score_davis, score_jhmdb, score_vip, summarize_davis
from tcore.evaluation.scores import pck
from tests.evaluation.clips import tiny_encoder
from tests.evaluation.layouts import write_davis, write_jhmdb, write_vip

SIZE = (64, 64)


@pytest.fixture(scope="module")
def videos() -> list[RenderedVideo]:
    return heldout_videos(2, num_frames=6, size=64)


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return tiny_encoder()


@pytest.fixture(scope="module")
def datasets(videos: list[RenderedVideo], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("datasets")
    return {
        "davis": write_davis(root / "davis", videos),
        "vip": write_vip(root / "vip", videos),
        "jhmdb": write_jhmdb(root / "jhmdb", videos),
    }


def test_official_layouts_give_the_scores_of_the_rendered_videos(
    videos: list[RenderedVideo], encoder: Encoder, datasets: dict[str, Any]
) -> None:
    card = evaluate(encoder, **datasets, protocol=TCORE, size=SIZE)
    published = score_videos(videos, [propagate_video(v, encoder, TCORE) for v in videos])
    with_ten_keys = score_videos(
        videos, [propagate_video(v, encoder, replace(TCORE, topk=10)) for v in videos]
    )
    davis = card["benchmarks"]["davis"]["scores"]
    assert davis["J"] == pytest.approx(published.region, abs=1e-9)
    assert davis["F"] == pytest.approx(published.boundary, abs=1e-9)
    assert card["benchmarks"]["vip"]["scores"]["mIoU"] == pytest.approx(with_ten_keys.part_iou, abs=1e-9)
    assert card["benchmarks"]["jhmdb"]["scores"]["PCK@0.2"] == pytest.approx(published.pck, abs=1e-9)


def test_card_says_what_the_numbers_depend_on(encoder: Encoder, datasets: dict[str, Any]) -> None:
    card = evaluate(encoder, davis=datasets["davis"], jhmdb=datasets["jhmdb"], size=SIZE)
    davis, jhmdb = card["benchmarks"]["davis"], card["benchmarks"]["jhmdb"]
    assert davis["clips_from"] == "all clips found"
    assert jhmdb["clips_from"] == "the official list"
    assert davis["protocol"]["context"] == 20
    assert set(davis["clips"]) == {"clip0", "clip1"}
    low, high = davis["interval"]["J&F"]
    assert low <= davis["scores"]["J&F"] <= high
    assert len(card["encoder"]["weights"]) == 16
    assert any("protocol tcore" in line for line in table(card))
    assert not any("patches far" in line for line in table(card))


def test_card_of_an_encoder_with_a_reach_says_so_and_its_clips_are_not_reused(
    datasets: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    near = tiny_encoder()
    calls = count_steps(near, monkeypatch)
    evaluate(near, davis=datasets["davis"], size=SIZE, out=tmp_path)
    calls.clear()
    choose_reach(near, 1)
    card = evaluate(near, davis=datasets["davis"], size=SIZE, out=tmp_path)
    assert sum(calls) == 12  # both clips, all frames
    assert card["encoder"]["reach"] == 1
    assert any("patches look 1 patches far" in line for line in table(card))


def test_saved_predictions_score_the_same(encoder: Encoder, datasets: dict[str, Any], tmp_path: Path) -> None:
    card = evaluate(encoder, **datasets, size=SIZE, out=tmp_path, save=True)
    saved = tmp_path / "predictions"
    davis = summarize_davis(score_davis(datasets["davis"], saved / "davis"))
    assert davis["J&F"] == pytest.approx(card["benchmarks"]["davis"]["scores"]["J&F"], abs=1e-12)
    vip = score_vip(datasets["vip"], saved / "vip")
    assert vip["mIoU"] == pytest.approx(card["benchmarks"]["vip"]["scores"]["mIoU"], abs=1e-12)
    jhmdb = score_jhmdb(datasets["jhmdb"], saved / "jhmdb")
    assert jhmdb["PCK@0.1"] == pytest.approx(card["benchmarks"]["jhmdb"]["scores"]["PCK@0.1"], abs=1e-12)
    with Image.open(saved / "davis" / "clip0" / "00003.png") as mask:
        assert mask.mode == "P"
        assert mask.getpalette()[3:6] == [128, 0, 0]  # type: ignore[index]
    assert json.loads((tmp_path / "results.json").read_text()) == card


def count_steps(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    features = Encoder.features

    def counted(self: Encoder, images: torch.Tensor) -> torch.Tensor:
        calls.append(len(images))
        return features(self, images)

    monkeypatch.setattr(Encoder, "features", counted)
    return calls


def test_evaluation_goes_on_where_it_stopped_and_reuses_nothing_else(
    encoder: Encoder, datasets: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = count_steps(encoder, monkeypatch)

    def run(protocol_name: str = "tcore", root: Path = datasets["davis"]) -> Card:
        calls.clear()
        return evaluate(encoder, davis=root, protocol=protocol(protocol_name), size=SIZE, out=tmp_path)

    first = run()
    assert sum(calls) == 12  # two clips of six frames, each encoded once
    assert run()["benchmarks"] == first["benchmarks"]
    assert sum(calls) == 0
    (tmp_path / "clips" / "davis" / "clip1.json").unlink()
    run()
    assert sum(calls) == 6
    run("crw")
    assert sum(calls) == 12


def test_changed_truth_is_scored_anew(
    videos: list[RenderedVideo], encoder: Encoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_davis(tmp_path / "davis", videos[:1])
    before = evaluate(encoder, davis=root, size=SIZE, out=tmp_path / "out")
    mask = root / "Annotations" / "480p" / "clip0" / "00002.png"
    Image.fromarray(np.zeros_like(videos[0].objects[2])).save(mask)
    after = evaluate(encoder, davis=root, size=SIZE, out=tmp_path / "out")
    assert after["benchmarks"]["davis"]["scores"] != before["benchmarks"]["davis"]["scores"]
    assert after["benchmarks"]["davis"]["truth"] != before["benchmarks"]["davis"]["truth"]


@pytest.mark.parametrize("name", ["tcore", "dino", "rsp", "crw"])
def test_every_protocol_runs(name: str, encoder: Encoder, datasets: dict[str, Any]) -> None:
    card = evaluate(encoder, davis=datasets["davis"], protocol=protocol(name), size=SIZE)
    assert 0 < card["benchmarks"]["davis"]["scores"]["J&F"] < 1
    assert card["benchmarks"]["davis"]["protocol"]["name"] == name


def test_dataset_is_not_written_to(encoder: Encoder, datasets: dict[str, Any], tmp_path: Path) -> None:
    before = sorted((str(p), p.stat().st_mtime_ns) for p in datasets["davis"].rglob("*"))
    evaluate(encoder, davis=datasets["davis"], size=SIZE, out=tmp_path, save=True)
    assert sorted((str(p), p.stat().st_mtime_ns) for p in datasets["davis"].rglob("*")) == before


def test_input_sizes_are_those_of_the_protocols() -> None:
    assert TCORE.input_size((480, 854), 16) == (480, 880)
    assert TCORE.input_size((480, 854), 14) == (476, 868)
    assert protocol("dino").input_size((480, 854), 16) == (480, 832)
    assert protocol("dino").input_size((854, 480), 16) == (832, 480)
    assert protocol("crw").input_size((480, 854), 16) == (480, 848)
    assert RENDERED.input_size((128, 128), 8) == (128, 128)


def test_nothing_to_evaluate_on_is_an_error(encoder: Encoder) -> None:
    with pytest.raises(InputError, match="nothing to evaluate on"):
        evaluate(encoder)


def test_first_mask_without_object_is_an_error(
    videos: list[RenderedVideo], encoder: Encoder, tmp_path: Path
) -> None:
    root = write_davis(tmp_path, videos[:1])
    empty = root / "Annotations" / "480p" / "clip0" / "00000.png"
    Image.fromarray(np.zeros((64, 64), np.uint8)).save(empty)
    with pytest.raises(InputError, match=r"first mask .*00000.png is all background"):
        evaluate(encoder, davis=root, size=SIZE)


def test_changed_frames_are_encoded_anew(
    videos: list[RenderedVideo], encoder: Encoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_davis(tmp_path / "davis", videos[:1])
    evaluate(encoder, davis=root, size=SIZE, out=tmp_path / "out")
    calls = count_steps(encoder, monkeypatch)
    frame = root / "JPEGImages" / "480p" / "clip0" / "00002.png"
    frame = frame if frame.exists() else frame.with_suffix(".jpg")
    Image.fromarray(np.zeros((64, 64, 3), dtype=np.uint8)).save(frame)
    evaluate(encoder, davis=root, size=SIZE, out=tmp_path / "out")
    assert sum(calls) == 6


def test_rendered_videos_are_a_benchmark_with_all_three_scores(encoder: Encoder, tmp_path: Path) -> None:
    card = evaluate(encoder, synthetic=2, out=tmp_path, save=True)["benchmarks"]["synthetic"]
    assert set(card["scores"]) == {"J&F", "J", "F", "mIoU", "PCK@0.1", "PCK@0.2"}
    side = 16 * encoder.patch_size
    videos = heldout_videos(2, seed=HELDOUT_SEED, size=side)
    expected = score_videos(videos, [propagate_video(video, encoder) for video in videos])
    assert card["scores"]["J"] == pytest.approx(expected.region, abs=1e-12)
    assert card["scores"]["mIoU"] == pytest.approx(expected.part_iou, abs=1e-12)
    assert card["scores"]["PCK@0.2"] == pytest.approx(expected.pck, abs=1e-12)
    assert len(list((tmp_path / "predictions" / "synthetic").glob("*/objects/*.png"))) == 40


def test_table_stands_beside_the_published_rows_and_says_what_differs(
    encoder: Encoder, datasets: dict[str, Any]
) -> None:
    card = evaluate(encoder, **datasets, size=SIZE)
    text = "\n".join(table(card))
    assert "T-CoRe, K400, 400 ep" in text
    assert "64.7" in text
    assert "not comparable with the published rows: 2 clips instead of 30; input 64x64" in text
    assert card["versions"]["torch"] == torch.__version__
    assert card["peak_memory"]["cpu_gb"] > 0.01
    assert card["seconds"] > 0


def test_worst_clips_come_first(encoder: Encoder, datasets: dict[str, Any]) -> None:
    card = evaluate(encoder, davis=datasets["davis"], size=SIZE)
    clips = card["benchmarks"]["davis"]["clips"]
    worst = min(clips, key=lambda name: clips[name]["J&F"])
    assert worst_clips(card, 1)[0].endswith(worst)
    assert len(worst_clips(card, 2)) == 2
    assert worst_clips(card, 0) == []


def test_corrections_change_what_they_name(encoder: Encoder, datasets: dict[str, Any]) -> None:
    def scores(**changes: Any) -> dict[str, Any]:
        card = evaluate(encoder, **datasets, size=SIZE, protocol=replace(TCORE, **changes))
        return {name: result["scores"] for name, result in card["benchmarks"].items()}

    before = scores()
    without_first = scores(skip_first=True)
    assert without_first["vip"]["mIoU"] < before["vip"]["mIoU"]
    assert without_first["davis"] == before["davis"]
    rounded = scores(round_border=True)
    assert rounded["vip"] == before["vip"]
    half = scores(precision="bf16")
    assert half["davis"] != before["davis"]
    assert half["davis"]["J&F"] == pytest.approx(before["davis"]["J&F"], abs=0.05)


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


def test_processes_that_share_the_clips_give_the_same_card(datasets: dict[str, Any], tmp_path: Path) -> None:
    """Real processes, as torchrun starts them, and one more than there are clips."""
    count = 3
    command = [sys.executable, "-m", "tcore", "evaluate", "random:vitti16", "--size", "64", "64"]
    command += [word for name, root in datasets.items() for word in (f"--{name}", str(root))]

    def run(out: Path, **place: str) -> "subprocess.Popen[str]":
        environment = os.environ | {"OMP_NUM_THREADS": "1"} | place
        return subprocess.Popen(
            [*command, "--out", str(out)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = [
        run(
            tmp_path / "shared",
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(count),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
        )
        for rank in range(count)
    ]
    said = [process.communicate(timeout=120) for process in [*shared, run(tmp_path / "alone")]]
    assert all(process.returncode == 0 for process in shared), said
    together, alone = (
        json.loads((tmp_path / name / "results.json").read_text()) for name in ("shared", "alone")
    )
    assert together["processes"] == count
    for name, result in alone["benchmarks"].items():
        assert together["benchmarks"][name]["scores"] == result["scores"]
        assert together["benchmarks"][name]["truth"] == result["truth"]
    assert said[1][0] == "", "only the first process prints the table"
