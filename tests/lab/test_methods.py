"""Methods side by side: trained with one budget, scored in one way, resumed, refused where they differ."""

import json
import math
import shlex
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from tcore.cli.main import main
from tcore.config import load_config
from tcore.data.rendered import render_video
from tcore.errors import InputError
from tcore.evaluation.encoder import load_control
from tcore.evaluation.evaluate import evaluate
from tcore.evaluation.published import PUBLISHED
from tcore.lab import worker
from tcore.lab.methods import Budget, Entry, Shared, compare
from tcore.lab.record import Dataset
from tcore.lab.results import PAPER, flags_of, note_differences, over_runs, published
from tcore.lab.runs import Processes
from tcore.lab.worker import among_others
from tcore.recipes import METHOD_NAMES, RECIPES, recipe_of
from tcore.show.comparison import GRIDS, difference_cell, grid_table, markdown, spread
from tests.conftest import Refused
from tests.evaluation.layouts import write_davis
from tests.tiny import change, shrunk

RENDERED = Shared(datasets=(Dataset("rendered", "1"),))


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The processes of a lab, one after another in this one; returns what they were told."""
    told: list[list[str]] = []

    def run(self: Processes, command: list[str], environment: object, log: Path) -> int:
        told.append(command[3:])
        assert command[1:3] == ["-m", "tcore.lab.worker"]
        with log.open("a") as said, redirect_stdout(said), redirect_stderr(said):
            worker.main(command[3:])
        return 0

    monkeypatch.setattr(Processes, "run", run)
    return told


def entry(name: str, **changes: Any) -> Entry:
    own = recipe_of(name, "quickstart")
    return Entry(name, own, change(shrunk(own), optim__steps=1, optim__batch=2, **changes))


def test_three_methods_are_trained_with_one_budget_scored_and_written(
    tmp_path: Path, in_this_process: list[list[str]]
) -> None:
    """The second call finds everything done; another seed and other rows may be added."""
    entries = [entry("tcore"), entry("dino"), entry("siammae", optim__repeat=2, mask_ratio=0.75)]
    said: list[str] = []
    lines = compare(entries, tmp_path, RENDERED, budget=Budget(samples=4), say=said.append)
    assert [words[0] for words in in_this_process] == ["train", "score"] * 3
    log = tmp_path / "dino" / "seed-0" / "train.log"
    assert f"dino, seed 0: training, {log} has its progress" in said
    ended = [line.partition(", about ")[0] for line in said if " ended" in line]
    assert ended == ["1 of 3 runs ended", "2 of 3 runs ended"]
    rows = {row["row"]: row for row in json.loads((tmp_path / "lab.json").read_text())}
    assert list(rows) == ["tcore", "dino", "siammae"]
    assert [row["samples"] for row in rows.values()] == [4, 4, 4]
    journal = (tmp_path / "dino" / "seed-0" / "run" / "metrics.jsonl").read_text().splitlines()
    waits = [json.loads(line)["data_wait"] for line in journal]
    assert rows["dino"]["wait"] == pytest.approx(sum(waits) / len(waits))
    assert rows["dino"]["wait"] > 0
    assert any("| waiting for frames |" in line for line in lines)
    assert "--optim.steps 2" in rows["tcore"]["train"]
    assert "--optim.steps 1" in rows["siammae"]["train"]
    found = rows["siammae"]["scores"]["rendered"]["tcore"]
    assert found["main"] == "J&F"
    assert 0 < found["J&F"] < 100
    assert found["each_seed"] == [found["J&F"]]
    assert rows["dino"]["published"] == {
        "name": "DINO, K400, 400 ep",
        "protocol": "unknown",
        **PUBLISHED["DINO, K400, 400 ep"].scores,
    }
    assert (tmp_path / "lab.md").read_text().splitlines() == lines
    assert (tmp_path / "lab.png").exists()
    assert any(line.startswith("| siammae | 1 |") and "57.9, unknown" in line for line in lines)
    assert compare(entries, tmp_path, RENDERED, budget=Budget(samples=4)) == lines
    assert len(in_this_process) == 6
    compare(entries[1:2], tmp_path, RENDERED, budget=Budget(samples=4), seeds=2)
    assert len(in_this_process) == 8
    rows = {row["row"]: row for row in json.loads((tmp_path / "lab.json").read_text())}
    assert (rows["dino"]["seeds"], rows["tcore"]["seeds"]) == (2, 1)
    assert rows["dino"]["scores"]["rendered"]["tcore"]["over_seeds"] is not None
    first, second = (rows[name]["scores"]["rendered"]["tcore"] for name in ("dino", "siammae"))
    assert "difference" not in first
    assert second["difference"]["points"] == pytest.approx(second["J&F"] - first["J&F"])
    assert "Difference from dino:" in (tmp_path / "lab.md").read_text().splitlines()


def test_the_command_trains_three_methods_and_scores_baselines_beside_them(
    tmp_path: Path, in_this_process: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """`tcore lab methods` whole: flags in, a table with baselines last, and nothing to do the second time."""
    small = "--vit.dim 24 --vit.depth 1 --vit.num-heads 2 --optim.batch 2 --rendered.videos 2"
    words = ["lab", "methods", "--out", str(tmp_path), "--videos", "1", "--budget-samples", "4"]
    words += ["--extra", f"{small} --decoder.depth 1"]
    rows = ["--rows", "mae", "color", "siammae", "cropmae", "copy"]
    main([*words, *rows])
    assert [told[0] for told in in_this_process] == ["train", "score"] * 3 + ["score"] * 2
    said = capsys.readouterr()
    assert "runs: 5, 0 of them already done" in said.err
    assert "color, seed 0: scored in" in said.err
    names = [line.split(" | ")[0][2:] for line in said.out.splitlines() if " | 1 | " in line]
    assert names == ["mae", "siammae", "cropmae", "color", "copy"]
    found = {row["row"]: row for row in json.loads((tmp_path / "lab.json").read_text())}
    card = evaluate(load_control("color", 8), rendered=1)["benchmarks"]["rendered"]["scores"]
    assert found["color"]["scores"]["rendered"]["tcore"]["J&F"] == pytest.approx(100 * card["J&F"])
    copy, mae = (found[name]["scores"]["rendered"]["tcore"] for name in ("copy", "mae"))
    assert copy["difference"]["points"] == pytest.approx(copy["J&F"] - mae["J&F"])
    cost = said.out.partition("## Cost")[2]
    assert "| mae | 4 |" in cost
    assert "color" not in cost
    assert (tmp_path / "lab.png").stat().st_size > 0
    main([*words, *rows])
    assert "runs: 5, 5 of them already done" in capsys.readouterr().err
    written = (tmp_path / "mae" / "seed-0" / "run" / "encoder.safetensors").stat().st_mtime_ns
    main([*words[:5], "2", *words[6:], *rows[:3]])  # two videos: scored again, trained no more
    assert [told[0] for told in in_this_process[8:]] == ["score", "score"]
    assert (tmp_path / "mae" / "seed-0" / "run" / "encoder.safetensors").stat().st_mtime_ns == written


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--rows copy color", "--rows copy color: name a method too"),
        ("--rows mae --extra '--evaluate-every 5'", "--extra: --evaluate-every has no place"),
        ("--rows mae --extra '--seed 3'", "--extra: --seed has no place"),
        ("--rows mae --extra '--frames rendered'", "--extra: --frames has no place"),
        ("--rows mae --extra '--optim.steps 7'", "--extra: --optim.steps has no place"),
        ("--rows mae --extra '--optim.epochs 7'", "optim.epochs=7 has no effect while optim.steps=600"),
        (
            "--rows dino --recipe vits16-k400 --frames rendered --budget 3 --extra '--optim.epochs 7'",
            "--extra: --optim.epochs has no place",
        ),
        ("--rows mae --frames ''", "--frames is empty: give a folder"),
        ("--rows mae --recipe vits16-k400 --frames rendered", "recipe vits16-k400 counts in epochs"),
        (
            "--rows mae --recipe quickstrt",
            "no recipe 'quickstrt': tcore --help lists them. Did you mean quickstart?",
        ),
        ("--budget-minutes 1e308", "need more than 0 and at most 1,000,000"),
        ("--rows mae colour", "no method 'colour'"),
        ("--rows mae --videos 3 --davis there", "--videos 3 is for runs without a dataset"),
        ("--budget 1 --budget-samples 2", "--budget and --budget-samples are mutually exclusive"),
    ],
)
def test_what_the_command_cannot_do_is_one_line_and_writes_nothing(
    tmp_path: Path, refused: Refused, words: str, said: str
) -> None:
    assert said in refused.in_one_line("lab", "methods", "--out", tmp_path / "lab", *shlex.split(words))
    assert not (tmp_path / "lab").exists()


def test_other_settings_are_refused_and_other_scoring_trains_nothing(
    tmp_path: Path, in_this_process: list[list[str]]
) -> None:
    one, run = [entry("dino")], tmp_path / "dino" / "seed-0" / "run"
    compare(one, tmp_path, RENDERED)
    written = (run / "encoder.safetensors").stat().st_mtime_ns
    with pytest.raises(InputError, match=r"dino/seed-0 .*optim.steps=1, now 5 .another budget"):
        compare(one, tmp_path, RENDERED, budget=Budget(steps=5))
    with pytest.raises(InputError, match=r"row mae: .*nowhere"):
        compare([entry("mae")], tmp_path, Shared(frames="nowhere"))
    compare(one, tmp_path, Shared(datasets=(Dataset("rendered", "2"),)))
    assert [words[0] for words in in_this_process] == ["train", "score", "score"]
    assert (run / "encoder.safetensors").stat().st_mtime_ns == written
    scores = tmp_path / "dino" / "seed-0" / "scores" / "rendered-tcore" / "results.json"
    assert len(json.loads(scores.read_text())["benchmarks"]["rendered"]["clips"]) == 2


def test_a_budget_in_minutes_is_measured_once_and_then_a_number_of_steps(
    tmp_path: Path, in_this_process: list[list[str]]
) -> None:
    minutes = Budget(minutes=1e-6)
    for _ in range(2):
        compare([entry("dino")], tmp_path, RENDERED, budget=minutes, seconds=0.0)
    assert [words[0] for words in in_this_process] == ["speed", "train", "score"]
    speed = json.loads((tmp_path / "dino" / "speed.json").read_text())
    assert speed["samples_per_second"] > 0
    assert speed["steps"] >= 3
    assert 0 < speed["wait"] < 1  # frames are rendered in the training process
    (row,) = json.loads((tmp_path / "lab.json").read_text())
    assert row["samples_per_second"] == speed["samples_per_second"]
    assert row["minutes"] == pytest.approx(row["samples"] / speed["samples_per_second"] / 60)
    assert load_config(tmp_path / "dino" / "seed-0" / "run" / "config.json").optim.steps == 1
    with pytest.raises(InputError, match=r"dino/seed-0 was made with optim.base_lr"):
        compare([entry("dino", optim__base_lr=0.5)], tmp_path, RENDERED, budget=minutes)


def test_the_length_follows_from_the_budget() -> None:
    config = change(shrunk("quickstart-mae"), optim__batch=8, optim__repeat=2, optim__steps=7)
    assert Budget().steps_of(config, None) == 7
    assert Budget(steps=5).steps_of(config, None) == 5
    assert Budget(samples=128_000).steps_of(config, None) == 8_000
    assert Budget(minutes=1.0).steps_of(config, 160.0) == 600
    assert Budget(minutes=1e-9).steps_of(config, 160.0) == 1


def test_datasets_on_disk_are_scored_at_two_grids(tmp_path: Path, in_this_process: list[list[str]]) -> None:
    small = change(
        shrunk("quickstart-dino"), vit__patch_size=16, vit__depth=1, optim__steps=1, optim__batch=2
    )
    videos = [render_video(0, 0, num_frames=3, size=32)]
    davis = Dataset("davis", str(write_davis(tmp_path / "mine", videos)), binary=True)
    one = Entry("dino", "quickstart-dino", small)
    lines = compare([one], tmp_path / "lab", Shared(datasets=(davis,)))
    (row,) = json.loads((tmp_path / "lab" / "lab.json").read_text())
    assert list(row["scores"]["mine"]) == ["tcore", "tcore-fine"]
    assert row["scores"]["mine"]["tcore"]["binary"]
    spelled = Dataset("davis", str(tmp_path / "lab" / ".." / "mine"), binary=True)
    assert compare([one], tmp_path / "lab", Shared(datasets=(spelled,))) == lines
    assert len(in_this_process) == 2
    assert any("960x1760" in line for line in lines)
    for grid, size in (("tcore", [480, 880]), ("tcore-fine", [960, 1760])):
        card = tmp_path / "lab" / "dino" / "seed-0" / "scores" / f"mine-{grid}" / "results.json"
        assert json.loads(card.read_text())["benchmarks"]["davis"]["clips"]["clip0"]["input"] == size
    with pytest.raises(InputError, match="two datasets are called mine"):
        compare([], tmp_path / "lab", Shared(datasets=(davis, davis)))
    assert davis.grids(14) == ("tcore", "tcore-fine")
    assert davis.grids(8) == ("tcore",)  # 480x880 pixels are 60x110 patches already


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"seeds": 0}, "seeds=0"),
        ({"entries": []}, "rows=0"),
        ({"baselines": ["mean"]}, r"baselines=\['mean'\]: need .*copy, color"),
    ],
)
def test_callers_from_python_are_told_what_is_wrong(tmp_path: Path, given: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        compare(**({"entries": [entry("mae")], "out": tmp_path / "lab", "shared": RENDERED} | given))
    assert not (tmp_path / "lab").exists()


@pytest.mark.parametrize("given", [{"steps": 0}, {"minutes": -1.0}, {"steps": 1, "samples": 2}])
def test_budgets_that_are_none_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="give one of steps, samples and minutes, above 0"):
        Budget(**given)


def test_every_method_has_its_row_of_the_paper_and_recipes_of_one_budget() -> None:
    assert list(PAPER) == list(METHOD_NAMES)
    assert set(PAPER.values()) <= set(PUBLISHED)
    quick = RECIPES["quickstart"].config
    for name in METHOD_NAMES:
        config = RECIPES[recipe_of(name, "quickstart")].config
        assert (config.vit.dim, config.vit.depth, config.rendered) == (96, 4, quick.rendered)
        assert (config.optim.steps, config.optim.samples) == (quick.optim.steps, quick.optim.samples)
    for name, size, said in (("din", "quickstart", "'din'.*dino"), ("dino", "vitti16-short", "vitti16-dino")):
        with pytest.raises(InputError, match=said):
            recipe_of(name, size)


def test_settings_are_said_as_flags() -> None:
    config = change(
        RECIPES["quickstart"].config,
        auxiliary="none",
        views__fixed_space=False,
        sandwich__offset=(0.1, 0.2),
        seed=3,
    )
    said = flags_of("quickstart", config)
    assert said == "--auxiliary none --sandwich.offset 0.1 0.2 --views.no-fixed-space"


def test_scores_of_seeds_are_means_with_intervals() -> None:
    results = [
        {"main": "J&F", "scores": {"J&F": x}, "interval": {"J&F": [x - 0.1, x + 0.1]}} for x in (0.2, 0.4)
    ]
    found = over_runs(results)
    assert found["J&F"] == pytest.approx(30)
    assert found["over_seeds"] == pytest.approx(12.71 * 14.142 / 2**0.5, rel=1e-3)
    assert found["over_clips"] == pytest.approx([20, 40])
    assert over_runs([results[0] | {"interval": {}}])["over_clips"] is None
    assert found["clips"] == {}  # labs of earlier versions did not note them


def row_of(name: str, by: int, *labels: str) -> dict[str, Any]:
    """A row whose two clips are above 50 and 40 by the same, and by twice as much on the finer grid."""
    cost = {"samples": 1, "minutes": 1.0, "samples_per_second": 1.0, "alone": True, "wait": None, "gib": 0.0}
    scores: dict[str, Any] = {label: {} for label in labels}
    for label in labels:
        for factor, grid in enumerate(list(GRIDS)[: 1 if label == "rendered" else 2], start=1):
            clips = {"a": {"J&F": (50 + factor * by) / 100}, "b": {"J&F": (40 + factor * by) / 100}}
            result = {"main": "J&F", "scores": {"J&F": 0.45}, "interval": {}, "clips": clips}
            scores[label][grid] = over_runs([result, result])
    row = {"row": name, "seeds": 2, "scores": scores, "published": None, "frames": None}
    return row | {"device": "", "train": "", **cost}


def test_rows_are_compared_with_the_first_one_on_every_dataset_and_on_all() -> None:
    rows = [row_of("none", 0, "x", "rendered"), row_of("all", 1, "x", "rendered"), row_of("part", 2, "x")]
    note_differences(rows)
    lines = list(markdown(rows))
    assert lines.count("Difference from none:") == 2
    assert "| row | x | rendered | mean of these 2 |" in lines
    assert not any("budget" in line for line in lines[1:])
    one, two, four = (f"**+{x}.0** ± 0.0 (± 0.0)" for x in (1, 2, 4))
    assert f"| all | {one} | {one} | {one} |" in lines
    assert f"| all | {two} |" in lines  # the finer grid, which rendered videos do not have
    assert f"| part | {two} | - | - |" in lines  # not scored on all, so there is no mean
    assert f"| part | {four} |" in lines
    rows[2] |= row_of("more", 2, "x", "rendered", "y")
    note_differences(rows)
    lines = list(markdown(rows))
    assert "| row | x | rendered | y | mean of these 3 |" in lines
    assert f"| all | {one} | {one} | - | - |" in lines  # of two sets, not of these three
    rows[1] |= {"samples": 64, "minutes": 2.0}
    assert "**Rows differ in budget**: 1 sample (none); 64 samples (all); 1 sample (more)." in markdown(rows)
    rows[1] |= {"minutes": 1.0}  # a budget in minutes
    assert not any("Rows differ in budget" in line for line in markdown(rows))


def test_a_baseline_needs_no_seeds_to_be_surely_worse() -> None:
    """It would have the same scores with each of them, so the interval is that of the other row."""
    rows = [row_of("none", 0, "x"), row_of("color", -9, "x")]
    for scores in rows[0]["scores"]["x"].values():
        scores["clips"] = {name: [value - 1, value + 1] for name, value in (("a", 50.0), ("b", 40.0))}
    rows[1] |= {"train": None, "seeds": 1}
    for scores in rows[1]["scores"]["x"].values():
        scores["clips"] = {name: values[:1] for name, values in scores["clips"].items()}
    note_differences(rows)
    found = rows[1]["scores"]["x"]["tcore"]["difference"]
    assert found["points"] == pytest.approx(-9)
    assert found["over_seeds"] == pytest.approx(12.71)
    assert not found["sure"]
    assert rows[1]["scores"]["x"]["tcore-fine"]["difference"]["sure"]  # -18


def test_rows_of_other_clips_or_without_a_dataset_are_not_compared_there() -> None:
    rows = [row_of("none", 0, "x", "y"), row_of("other", 1, "x", "y"), row_of("part", 2, "x")]
    rows[1]["scores"]["y"]["tcore"]["truth"] = "other clips"
    rows[1]["scores"]["y"]["tcore-fine"]["binary"] = True
    rows[2] |= {"frames": "CLIPS", "left_out": 2}
    note_differences(rows)
    lines = list(markdown(rows))
    assert "| other | **+1.0** ± 0.0 (± 0.0) | - | - |" in lines
    assert "| part | **+2.0** ± 0.0 (± 0.0) | - | - |" in lines
    assert "**other was scored on other clips** or true labels than none: y." in lines
    assert "**Rows differ in training data**: rendered videos (none, other); CLIPS (part)." in lines
    assert "**part: 2 seeds left out**, scored in another way: rerun with --seeds 4." in lines
    assert not any("precision" in line for line in lines)


def test_a_difference_says_how_sure_it_is_and_which_clips_it_lacks() -> None:
    found = {"points": -1.26, "over_seeds": 0.5, "over_clips": 1.31, "left_out": 0, "sure": False}
    assert difference_cell(found) == "-1.3 ± 0.5 (± 1.3)"
    assert difference_cell(found | {"over_seeds": None, "left_out": 2}) == "-1.3 (± 1.3), without 2 clips"
    assert difference_cell(found | {"sure": True}).startswith("**-1.3** ±")


def test_scores_of_the_paper_are_those_of_the_kinds_of_benchmarks_that_were_scored() -> None:
    row = row_of("dino", 1, "x", "joints") | {"published": published("dino")}
    for scores in row["scores"]["joints"].values():
        scores |= {"main": "PCK@0.1", "PCK@0.1": 40.0}
    head, _, line = list(grid_table([row], ["x", "joints"], "tcore", ""))[2:5]
    assert head.endswith("| paper's J&F on DAVIS-2017 / PCK@0.1 on JHMDB, protocol |")
    assert line.endswith("| 59.5 / 41.1, unknown (DINO, K400, 400 ep) |")


def test_a_score_that_nothing_had_has_no_interval() -> None:
    found = {"main": "J&F", "J&F": math.nan, "over_seeds": math.nan, "over_clips": [math.nan, math.nan]}
    assert spread(found) == ("-", "-", "-")


def test_seeds_that_were_scored_in_another_way_are_left_out(
    tmp_path: Path, in_this_process: list[list[str]]
) -> None:
    one = [entry("mae")]
    compare(one, tmp_path, RENDERED, seeds=2)
    lines = compare(one, tmp_path, Shared(datasets=(Dataset("rendered", "2"),)))
    (row,) = json.loads((tmp_path / "lab.json").read_text())
    assert (row["seeds"], row["left_out"]) == (1, 1)
    assert "**mae: 1 seed left out**, scored in another way: rerun with --seeds 2." in lines
    compare(one, tmp_path, Shared(datasets=(Dataset("rendered", "2"),)), seeds=2)
    (row,) = json.loads((tmp_path / "lab.json").read_text())
    assert (row["seeds"], row["left_out"]) == (2, 0)


def test_a_finished_run_without_its_encoder_keeps_its_scores(
    tmp_path: Path, in_this_process: list[list[str]]
) -> None:
    """Other scoring is refused before anything is written, and so is another row's change of settings."""
    two = Shared(datasets=(Dataset("rendered", "2"),))
    lines = compare([entry("mae"), entry("dino")], tmp_path, RENDERED)
    with pytest.raises(InputError, match=r"dino/seed-0 was made with"):
        compare([entry("mae"), entry("dino", optim__base_lr=0.5)], tmp_path, two)
    (tmp_path / "mae" / "seed-0" / "run" / "encoder.safetensors").unlink()
    with pytest.raises(InputError, match=r"mae/seed-0 has no encoder.safetensors left"):
        compare([entry("dino"), entry("mae")], tmp_path, two)
    assert compare([entry("mae"), entry("dino")], tmp_path, RENDERED) == lines
    assert len(in_this_process) == 4


def test_a_damaged_result_is_found_before_anything_is_trained(
    tmp_path: Path, in_this_process: list[list[str]]
) -> None:
    compare([entry("mae")], tmp_path, RENDERED)
    (tmp_path / "mae" / "seed-0" / "scores.json").write_text("{")
    with pytest.raises(InputError, match=r"cannot read .*scores\.json"):
        compare([entry("mae"), entry("dino")], tmp_path, RENDERED)
    with pytest.raises(InputError, match=r"cannot read .*scores\.json"):  # a row of an earlier call
        compare([entry("dino")], tmp_path, RENDERED)
    assert len(in_this_process) == 2


def test_minutes_at_the_speed_of_another_device_are_refused(
    tmp_path: Path, in_this_process: list[list[str]]
) -> None:
    minutes = Budget(minutes=1e-6)
    lines = compare([entry("mae")], tmp_path, RENDERED, budget=minutes, seconds=0.0)
    file = tmp_path / "mae" / "speed.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"device": "NVIDIA H200"}))
    again = compare([entry("mae")], tmp_path, RENDERED, budget=minutes)
    assert again == lines  # what is finished may come from another machine
    remedy = "give --budget-samples 2, what its runs have seen"
    with pytest.raises(InputError, match=f"speed.json was measured on NVIDIA H200, this is CPU.*: {remedy}"):
        compare([entry("mae")], tmp_path, RENDERED, budget=minutes, seeds=2)
    compare([entry("mae")], tmp_path, RENDERED, budget=Budget(samples=2), seeds=2)
    assert [words[0] for words in in_this_process] == ["speed", *["train", "score"] * 2]


def test_nothing_is_measured_where_a_run_has_other_settings(
    tmp_path: Path, in_this_process: list[list[str]]
) -> None:
    compare([entry("mae")], tmp_path, RENDERED)
    others = [entry("dino"), entry("mae", optim__base_lr=0.5)]
    with pytest.raises(InputError, match=r"mae/seed-0 was made with optim.base_lr"):
        compare(others, tmp_path, RENDERED, budget=Budget(minutes=1e-6), seconds=0.0)
    assert not (tmp_path / "dino").exists()
    assert len(in_this_process) == 2


def test_a_measurement_waits_until_nobody_else_is_at_work(tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    path = tmp_path / "lock"
    with among_others(path) as alone, path.open() as other:
        fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)  # warms up beside it
        fcntl.flock(other, fcntl.LOCK_UN)
        with alone(), pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
