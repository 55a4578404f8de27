"""An encoder on benchmarks: the score card, what it depends on, resuming and sharing."""

import json
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tcore.cli.main import main
from tcore.data.rendered import RenderedVideo
from tcore.errors import InputError
from tcore.evaluation import benchmarks, intervals
from tcore.evaluation.benchmarks import find_benchmark
from tcore.evaluation.benchmarks.benchmark import Benchmark, Clip, LabeledClip, Layout, Result, Save, Source
from tcore.evaluation.benchmarks.rendered import Rendered, propagate_video
from tcore.evaluation.card import Card, rename_old, table, worst_clips
from tcore.evaluation.encoder import Encoder
from tcore.evaluation.encoders import choose_reach, load_encoder
from tcore.evaluation.evaluate import clip_key, evaluate, gather, join, leave
from tcore.evaluation.protocols import PROTOCOLS, RENDERED, TCORE, protocol
from tcore.evaluation.published import PUBLISHED
from tcore.rendezvous import LostPeerError
from tests.evaluation.clips import tiny_encoder, write_folder
from tests.evaluation.layouts import heldout_videos, write_davis, write_jhmdb, write_vip
from tests.training.jobs import fork_together

SIZE = (64, 64)
FRAMES = 5


@pytest.fixture(scope="module", autouse=True)
def few_draws() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(intervals, "BOOTSTRAP", 20)
        yield


@pytest.fixture(scope="module")
def videos() -> list[RenderedVideo]:
    return heldout_videos(2, num_frames=FRAMES, size=64)


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


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("out")


@pytest.fixture(scope="module")
def card(encoder: Encoder, datasets: dict[str, Any], out: Path) -> Card:
    before = sorted((str(p), p.stat().st_mtime_ns) for p in datasets["davis"].rglob("*"))
    found = evaluate(encoder, **datasets, size=SIZE, out=out, save=True)
    assert sorted((str(p), p.stat().st_mtime_ns) for p in datasets["davis"].rglob("*")) == before
    return found


def test_official_layouts_give_the_scores_of_the_rendered_videos(
    videos: list[RenderedVideo], encoder: Encoder, card: Card
) -> None:
    rendered = Rendered([], RENDERED, "")
    published, with_ten_keys = (
        rendered.summarize(
            rendered.compare(video, propagate_video(video, encoder, replace(TCORE, topk=topk)))
            for video in videos
        )
        for topk in (7, 10)
    )
    scores = {name: result["scores"] for name, result in card["benchmarks"].items()}
    expected = {"davis": published, "vip": with_ten_keys, "jhmdb": published}
    for name, found in scores.items():
        assert found == pytest.approx({score: expected[name][score] for score in found}, abs=1e-9)


def test_card_says_what_the_numbers_depend_on(card: Card) -> None:
    davis, jhmdb = card["benchmarks"]["davis"], card["benchmarks"]["jhmdb"]
    assert (davis["clips_from"], jhmdb["clips_from"]) == ("all clips found", "the official list")
    assert davis["protocol"]["context"] == 20
    assert set(davis["clips"]) == {"clip0", "clip1"}
    low, high = davis["interval"]["J&F"]
    assert low <= davis["scores"]["J&F"] <= high
    assert len(card["encoder"]["weights"]) == 16
    assert card["versions"]["torch"] == torch.__version__
    assert card["peak_memory"]["cpu_gb"] > 0.01
    assert card["seconds"] > 0
    text = "\n".join(table(card))
    for part in ("grid 8x8 of 64x64 pixels, protocol tcore", "2 instead of 30 clips; input 64x64"):
        assert part in text
    assert "--reach" not in text
    worst = min(davis["clips"], key=lambda name: davis["clips"][name]["J&F"])
    assert worst_clips(card, 1)[0].endswith(worst)
    assert [len(worst_clips(card, count)) for count in (2, 0)] == [6, 0]


def with_grid(card: Card, grid: tuple[int, int]) -> Card:
    """A card of DAVIS alone, as if its clips had been on a grid."""
    davis = card["benchmarks"]["davis"]
    clips = {name: clip | {"grid": list(grid)} for name, clip in davis["clips"].items()}
    return card | {"benchmarks": {"davis": davis | {"clips": clips}}}


@pytest.mark.parametrize(
    ("lines", "shown"), [(30, ["64.7", "71.1"]), (60, ["79.7"]), (90, ["83.3"]), (45, [])]
)
def test_published_rows_are_those_of_the_same_grid(card: Card, lines: int, shown: list[str]) -> None:
    text = "\n".join(table(with_grid(card, (lines, 2 * lines))))
    assert [score for score in ("64.7", "71.1", "79.7", "83.3") if score in text] == shown


def test_published_rows_say_the_protocol_they_were_measured_with(card: Card) -> None:
    lines = table(with_grid(card, (30, 55)))
    ends = {line[: line.index("ep") + 2]: line.split()[-1] for line in lines if " ep " in line}
    assert ends["T-CoRe, K400, 400 ep"] == "tcore"
    assert ends["DINO, K400, 400 ep"] == "unknown"
    assert ends["RSP, K400, 400 ep"] == "rsp"
    assert lines[0].endswith("protocol")
    assert {row.protocol for row in PUBLISHED.values()} <= {*(known.name for known in PROTOCOLS), "unknown"}


def test_saved_predictions_score_the_same(card: Card, datasets: dict[str, Any], out: Path) -> None:
    for name, root in datasets.items():
        total, details = find_benchmark(name).open(root, TCORE).score(out / "predictions" / name)
        assert total == pytest.approx(card["benchmarks"][name]["scores"], abs=1e-12)
        assert details
    with Image.open(out / "predictions" / "davis" / "clip0" / "00003.png") as mask:
        assert mask.mode == "P"
        assert mask.getpalette()[3:6] == [128, 0, 0]  # type: ignore[index]
    assert json.loads((out / "results.json").read_text()) == card


def count_frames(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    features = Encoder.features

    def counted(self: Encoder, images: torch.Tensor) -> torch.Tensor:
        calls.append(len(images))
        return features(self, images)

    monkeypatch.setattr(Encoder, "features", counted)
    return calls


def test_evaluation_resumes_and_reuses_only_what_would_come_out_again(
    videos: list[RenderedVideo], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder, root = tiny_encoder(), write_davis(tmp_path / "davis", videos)
    calls = count_frames(monkeypatch)

    def run(name: str = "tcore", encoded: int = 0) -> Card:
        calls.clear()
        found = evaluate(encoder, davis=root, protocol=protocol(name), size=SIZE, out=tmp_path / "out")
        assert sum(calls) == encoded, "each frame of each clip once"
        return found

    first = run(encoded=2 * FRAMES)
    assert run()["benchmarks"] == first["benchmarks"]
    (tmp_path / "out" / "clips" / "davis" / "clip1.json").unlink()
    run(encoded=FRAMES)
    for name in ("dino", "rsp", "crw"):
        other = run(name, encoded=2 * FRAMES)["benchmarks"]["davis"]
        assert 0 < other["scores"]["J&F"] < 1
        assert other["protocol"]["name"] == name
        assert other["differs"] == ["2 instead of 30 clips", "input {}x{}".format(*SIZE), f"protocol {name}"]
    run(encoded=2 * FRAMES)
    Image.fromarray(np.zeros((64, 64, 3), np.uint8)).save(root / "JPEGImages/480p/clip0/00002.png")
    run(encoded=FRAMES)
    Image.fromarray(np.zeros((64, 64), np.uint8)).save(root / "Annotations/480p/clip0/00002.png")
    changed = run(encoded=FRAMES)["benchmarks"]["davis"]
    assert changed["scores"] != first["benchmarks"]["davis"]["scores"]
    assert changed["truth"] != first["benchmarks"]["davis"]["truth"]
    choose_reach(encoder, 1)
    near = run(encoded=2 * FRAMES)
    assert near["encoder"]["reach"] == 1
    assert any("--reach everywhere" in line for line in table(near))


def test_results_with_and_without_edges_or_an_exact_search_are_never_mixed() -> None:
    knobs = (TCORE, replace(TCORE, edges="guided"), replace(TCORE, search="halved"))
    keys = {clip_key(find_benchmark("davis")([], one, ""), {"weights": "w"}, "t", "f") for one in knobs}
    assert len(keys) == 3


def test_input_sizes_are_those_of_the_protocols(encoder: Encoder) -> None:
    assert TCORE.input_size((480, 854), 16) == (480, 880)
    assert TCORE.input_size((480, 854), 14) == (476, 868)
    assert protocol("dino").input_size((480, 854), 16) == (480, 832)
    assert protocol("dino").input_size((854, 480), 16) == (832, 480)
    assert protocol("crw").input_size((480, 854), 16) == (480, 848)
    # Finer grids are the same for every patch; DINOv3's sides are rounded up.
    for patch, fine in ((16, (960, 1760)), (14, (840, 1540)), (8, (480, 880))):
        assert protocol("tcore-fine").input_size((480, 854), patch) == fine
        finest = protocol("tcore-finest").input_size((480, 854), patch)
        assert finest == (90 * patch, 165 * patch)
    for name, short in (("dinov3", 480), ("dinov3-fine", 960), ("dinov3-finest", 1440)):
        assert protocol(name).input_size((480, 854), 16) == (short, -(-854 * short // 480 // 16) * 16)
    assert protocol("dinov3").input_size((480, 854), 14) == (490, 854)
    assert protocol("dinov3").input_size((854, 480), 16) == (864, 480)
    assert RENDERED.input_size((128, 128), 8) == (128, 128)
    vip, jhmdb = (find_benchmark(name)([], TCORE, "") for name in ("vip", "jhmdb"))
    assert vip.input_size(encoder, (720, 1280)) == (448, 880)
    assert vip.input_size(encoder, (1280, 720)) == (880, 448)
    assert jhmdb.input_size(encoder, (240, 320)) == (320, 320)


def test_bad_requests_are_named(videos: list[RenderedVideo], encoder: Encoder, tmp_path: Path) -> None:
    bad: dict[str, dict[str, Any]] = {
        "--davis DIR, --vip DIR, --jhmdb DIR, --points DIR, --rendered": {},
        "Did you mean davis": {"davsi": tmp_path},
        "--binary goes with --davis": {"rendered": 1, "binary": True},
        "rendered=-1": {"rendered": -1},
    }
    for message, options in bad.items():
        with pytest.raises(InputError, match=message):
            evaluate(encoder, **options)
    with pytest.raises(InputError, match="encoder nowhere does not exist"):
        evaluate("nowhere", rendered=1)
    root = write_davis(tmp_path, videos[:1])
    empty = root / "Annotations" / "480p" / "clip0" / "00000.png"
    Image.fromarray(np.zeros((64, 64), np.uint8)).save(empty)
    with pytest.raises(InputError, match=r"first mask .*00000.png is all background"):
        evaluate(encoder, davis=root, size=SIZE)


def test_rendered_videos_are_a_benchmark_with_all_three_scores(
    encoder: Encoder, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    card = evaluate(encoder, rendered=1, out=tmp_path, save=True)
    found = card["benchmarks"]["rendered"]
    assert set(found["scores"]) == {"J&F", "J", "F", "mIoU", "PCK@0.1", "PCK@0.2"}
    assert len(list((tmp_path / "predictions" / "rendered").glob("*/objects/*.png"))) == 20
    assert any("tiny (rendered)" in line for line in table(card))
    # Arguments, results and clips of earlier versions say "synthetic".
    capsys.readouterr()
    (tmp_path / "clips" / "rendered").rename(tmp_path / "clips" / "synthetic")
    calls = count_frames(monkeypatch)
    again = evaluate(encoder, synthetic=1, out=tmp_path)["benchmarks"]
    assert (again["rendered"]["scores"], calls) == (found["scores"], [])
    assert rename_old({"synthetic": found}) == {"rendered": found}
    assert capsys.readouterr().err.count("now called rendered") == 3


class Brightness(Benchmark):
    """A fifth benchmark: how bright the frames of a clip are; no encoder is asked."""

    name = "brightness"
    score_names = ("light",)
    official_clips = (7,)

    @classmethod
    def layout(cls, source: Source) -> Layout:
        root = Path(str(source))
        names = sorted(p.name for p in root.iterdir())
        return Layout(names, False, lambda name: Clip(name, tuple(sorted((root / name).iterdir())), ()))

    def run(self, encoder: Encoder, clip: Any, save: Save | None = None) -> Result:
        return {"light": [float(np.asarray(Image.open(path)).mean()) / 255 for path in clip.frames]}

    def total(self, results: Iterable[Result]) -> Result:
        return {"light": float(np.mean([result["light"] for result in results]))}

    def label(self, encoder: Encoder, clip: Any) -> LabeledClip:
        raise NotImplementedError


def test_a_new_benchmark_is_a_module_and_a_line_in_the_list(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(benchmarks.BENCHMARKS, "brightness", "a folder of frames per clip")
    monkeypatch.setitem(sys.modules, f"{benchmarks.__name__}.brightness", sys.modules[__name__])
    for name, value in (("dark", 51), ("light", 204)):
        write_folder(tmp_path / "data" / name, np.full((2, 8, 8, 3), value, np.uint8))
    # The command line takes it without a word of its own.
    main(["evaluate", "random:vitti16", "--brightness", str(tmp_path / "data"), "--worst", "1"])
    text = capsys.readouterr().out
    assert "50.0" in text
    assert "brightness: not comparable with the published rows: 2 instead of 7 clips" in text
    assert "brightness  light  20.0  dark" in text
    main(["check", str(tmp_path / "data"), "--kind", "brightness"])
    assert "2 whole of 2" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["figure", "failures", "--help"])
    assert "--brightness" in capsys.readouterr().out


def test_corrections_change_what_they_name(encoder: Encoder, datasets: dict[str, Any], card: Card) -> None:
    def scores(name: str, **changes: Any) -> dict[str, float]:
        source = {name: datasets[name]}
        changed = evaluate(encoder, **source, size=SIZE, protocol=replace(TCORE, **changes))
        found: dict[str, float] = changed["benchmarks"][name]["scores"]
        return found

    before = {name: result["scores"] for name, result in card["benchmarks"].items()}
    assert scores("vip", skip_first=True)["mIoU"] < before["vip"]["mIoU"]
    assert scores("davis", skip_first=True, round_border=True) == before["davis"]
    assert scores("davis", edges="guided") != before["davis"]
    assert scores("vip", edges="guided") != before["vip"]
    assert scores("jhmdb", edges="guided") == before["jhmdb"]  # joints have no edges
    half = scores("davis", precision="bf16")
    assert half != before["davis"]
    assert half["J&F"] == pytest.approx(before["davis"]["J&F"], abs=0.05)


def test_processes_that_share_the_clips_give_the_same_card(datasets: dict[str, Any], tmp_path: Path) -> None:
    """Two processes as torchrun starts them; one clip each."""
    words = ["evaluate", "random:vitti16", "--size", "64", "64", "--davis", str(datasets["davis"])]
    words += ["--out", str(tmp_path / "out")]
    code, said = fork_together(2, lambda: main(words), tmp_path / "log")
    assert code == 0, said
    together = json.loads((tmp_path / "out" / "results.json").read_text())
    assert together["processes"] == 2
    assert said.count("davis 1/1") == 2
    encoder = load_encoder("random:vitti16")
    alone = evaluate(encoder, davis=datasets["davis"], size=SIZE)
    for field in ("scores", "truth"):
        assert together["benchmarks"]["davis"][field] == alone["benchmarks"]["davis"][field]
    assert said.count("not comparable with") == 1, "only the first process prints the table"


def test_a_process_that_is_gone_before_the_end_is_one_line_of_the_others(tmp_path: Path) -> None:
    """Where results are gathered, and where all wait for the last one."""

    def work() -> None:
        if join()[0] == 0:
            os._exit(0)
        for end in (lambda: gather({}), leave):
            try:
                end()
            except LostPeerError as error:
                print(f"lost, exit code {error.exit_code}")

    code, said = fork_together(2, work, tmp_path / "log")
    assert code == 0, said
    assert said.count("lost, exit code 1") == 2
