"""Ablation tables: read, checked before the first run, trained, scored, resumed and summarized."""

import json
import re
import shlex
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tcore.cli.main import main
from tcore.cli.train import check_gpus, parse_train
from tcore.config import override, save_config
from tcore.errors import InputError
from tcore.files import write_text
from tcore.lab.ablation import (
    TABLES,
    Plan,
    check_folder,
    collect,
    commands_of,
    is_done,
    lab,
    markdown,
    read_table,
)
from tcore.lab.runs import DONE, STARTED, Job, Processes, Row
from tcore.recipes import recipe
from tcore.show.runs import Run
from tests.conftest import Refused
from tests.tiny import settings_of

TINY = (
    "--views.global-size 32 --views.local-size 16 --views.num-local 1 --head.prototypes 16 --head.hidden 16 "
    "--vit.dim 24 --vit.depth 1 --vit.num-heads 3 --optim.batch 2 --rendered.videos 2 --rendered.size 32"
)


def plan_of(steps: str = "--optim.steps 2", videos: int = 2) -> Plan:
    return Plan("quickstart", (*steps.split(), *TINY.split()), ("--rendered", "--videos", str(videos)))


PLAN = plan_of()
NONE = Row("none", "--auxiliary none", (61.9, 59.7, 64.0))


def run_lab(out: Path, table: str = "branch", *only: str, plan: Plan = PLAN, gpu: str = "") -> list[str]:
    """Run a table with one seed and return the lines of its table."""
    return lab(table, out, plan, seeds=1, only=only, devices=(gpu,), say=lambda line: None)


def write_card(job: Job, *values: float) -> None:
    clips = {f"clip{i}": {"J&F": value} for i, value in enumerate(values)}
    scores = dict.fromkeys(("J&F", "J", "F"), sum(values) / len(values))
    ends = {"J&F": [min(values), max(values)]} if len(values) > 1 else {}
    card = {"benchmarks": {"davis": {"scores": scores, "interval": ends, "clips": clips}}}
    write_text(job.folder / "scores" / "results.json", json.dumps(card))


def finish(job: Job, *values: float) -> Job:
    write_card(job, *values)
    write_text(job.folder / DONE, json.dumps({"commands": commands_of(job, PLAN), "seconds": [60.0, 5.0]}))
    return job


def wait_for(path: Path) -> bool:
    last = time.monotonic() + 180
    while not path.exists() and time.monotonic() < last:
        time.sleep(0.01)
    return path.exists()


def test_a_table_is_trained_scored_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real commands, by which a user would get the same; the second call finds everything done."""

    def run(self: Processes, command: list[str], environment: object, log: Path) -> int:
        assert command[:3] == [sys.executable, "-m", "tcore"]
        with log.open("a") as said, redirect_stdout(said), redirect_stderr(said):
            main(command[3:])
        return 0

    def draw(runs: Sequence[Run], out: Path, title: str) -> None:  # tests/show draws it
        assert [run.name for run in runs] == ["no pf"]
        out.touch()

    monkeypatch.setattr(Processes, "run", run)
    monkeypatch.setattr("tcore.lab.ablation.dynamics_figure", draw)
    table, out = tmp_path / "mine.json", tmp_path / "out"
    table.write_text(json.dumps([{"name": "with pf"}, {"name": "no pf", "flags": "--loss.past-future 0"}]))
    lines = run_lab(out, str(table), "no pf")
    assert "| no pf | `--loss.past-future 0` | 1 |" in lines[4]
    assert "(lab.png)" in lines[-1]
    assert (out / "lab.png").exists()
    assert (out / "lab.md").read_text().splitlines() == lines
    assert (out / "no-pf" / "seed-0" / "run" / "encoder.safetensors").exists()
    written = (out / "no-pf" / "seed-0" / "train.log").stat().st_mtime_ns
    assert run_lab(out, str(table), "no pf") == lines
    assert (out / "no-pf" / "seed-0" / "train.log").stat().st_mtime_ns == written


def test_every_row_of_the_paper_has_its_numbers_and_its_flags() -> None:
    assert [len(TABLES[name]) for name in ("branch", "alignment", "offsets", "masks")] == [5, 4, 6, 6]
    for rows in TABLES.values():
        assert len({row.folder for row in rows}) == len(rows)
        for row in rows:
            assert row.published is not None
            both, region, boundary = row.published
            assert both == pytest.approx((region + boundary) / 2, abs=0.11)
    # What a row does not vary is the published value, also in a recipe that has another one.
    configs = [parse_train(["vits16-short", *row.flags.split()]).config for row in TABLES["masks"]]
    found = [(mask.probability, mask.ratio) for mask in (settings_of(config).masking for config in configs)]
    assert found[:4] == [(share, (0.1, 0.5)) for share in (0.1, 0.3, 0.5, 0.7)]
    assert found[4:] == [(0.5, (0.2, 0.6)), (0.5, (0.3, 0.7))]
    names = [row.name for row in TABLES["branch"]]
    configs = [parse_train(["vits16-short", *row.flags.split()]).config for row in TABLES["branch"]]
    sides = dict(zip(names, (settings_of(config).auxiliary for config in configs), strict=True))
    configs = [parse_train(["vits16-short", *row.flags.split()]).config for row in TABLES["offsets"]]
    assert {settings_of(config).auxiliary for config in configs} == {"both"}
    assert sides == {"none": "none", "past": "past", "future": "future", "both": "both", "all": "both"}


def test_rows_are_summarized_over_seeds_and_clips(tmp_path: Path) -> None:
    for seed, values in enumerate(([0.2, 0.4], [0.3, 0.5])):
        finish(Job(NONE, seed, tmp_path / "none" / f"seed-{seed}"), *values)
    (found,) = collect(tmp_path, [NONE, Row("never run")])
    assert found["seeds"] == 2
    assert found["J&F"] == pytest.approx(35)
    assert found["over_seeds"] == pytest.approx(12.71 * 7.0711 / 2**0.5, rel=1e-3)
    assert found["over_clips"] == pytest.approx([25, 45])
    head, _, row = markdown("t", [found])[2:]
    assert "| davis J&F |" in head
    assert head.endswith("| paper's J&F (J / F) on DAVIS-2017 |")
    assert "61.9 (59.7 / 64.0)" in row
    assert list(markdown("t", [found | {"flags": ""}]))[-1].startswith("| none | - | 2 | 35.0 |")


def test_rows_are_compared_with_the_first_one_clip_by_clip(tmp_path: Path) -> None:
    rows = [NONE, Row("all"), Row("past")]
    for row, folder, by in zip(rows, ("none", "all", "past"), (0.0, 0.01, 0.03), strict=True):
        for seed, values in enumerate(([0.2, 0.4], [0.201, 0.399])):
            finish(Job(row, seed, tmp_path / folder / f"seed-{seed}"), *(value + by for value in values))
    none, every, past = collect(tmp_path, rows)
    assert "difference" not in none
    assert every["difference"]["points"] == pytest.approx(1)
    assert every["difference"]["over_seeds"] == pytest.approx(0, abs=1e-9)  # both seeds have the same mean
    assert past["difference"]["over_clips"] == pytest.approx(0, abs=1e-9)  # every clip gains the same
    lines = markdown("t", [none, every, past])
    assert "| difference from none |" in lines[2]
    assert "| - |" in lines[4]
    assert "| **+1.0** ± 0.0 (± 0.0) |" in lines[5]
    assert "| **+3.0** ± 0.0 (± 0.0) |" in lines[6]
    assert "difference" not in "".join(markdown("t", [none]))  # nothing to compare with
    for file in tmp_path.glob("past/seed-*/scores/results.json"):
        card = json.loads(file.read_text())
        card["benchmarks"]["davis"]["truth"] = "other"
        write_text(file, json.dumps(card))
    found = collect(tmp_path, rows)
    assert found[2]["difference"] is None
    assert "**Scored on other true labels** than none: past." in markdown("t", found)


def test_the_cost_of_a_run_counts_all_its_steps_also_where_it_was_stopped(tmp_path: Path) -> None:
    run = finish(Job(NONE, 0, tmp_path / "none" / "seed-0"), 0.2, 0.4).folder / "run"
    assert collect(tmp_path, [NONE])[0]["minutes"] == 1.0  # of the process, which is all that is known
    save_config(recipe("quickstart", {"optim.batch": 30}), run / "config.json")
    lines = [json.dumps({"step": step, "samples_per_second": 1.0}) for step in (1, 2, 3, 4)]
    write_text(run / "metrics.jsonl", "\n".join(lines) + "\n")
    assert collect(tmp_path, [NONE])[0]["minutes"] == 2.0


def test_a_run_that_fails_costs_the_others_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], job: Job, log_name: str, device: str, processes: Any, module: str) -> float:
        if job.row.name == "both":
            raise InputError("both, seed 0: out of memory")
        write_card(job, 0.2, 0.4)
        return 1.0

    monkeypatch.setattr("tcore.lab.runs.run_command", run)
    (tmp_path / "past").touch()  # its folder cannot be made
    with pytest.raises(InputError, match=r"2 of 5 runs failed; .*lab\.md .*past/seed-0"):
        run_lab(tmp_path)
    found = json.loads((tmp_path / "lab.json").read_text())
    assert [row["row"] for row in found] == ["none", "future", "all"]
    assert "| all |" in (tmp_path / "lab.md").read_text()


def test_a_gpu_trains_the_next_run_while_one_is_scored_and_the_table_is_written_after_every_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one GPU, one training at a time; the first is scored only once the second is being trained."""
    second, training = threading.Event(), []

    def run(command: list[str], job: Job, log_name: str, device: str, processes: Any, module: str) -> float:
        assert device == "3"
        if command[0] == "train":
            training.append(job.row.name)
            assert len(training) == 1, "two trainings at a time"
            if job.row.name == "past":
                second.set()
            if job.row.name == "all":  # the last
                assert wait_for(tmp_path / "lab.md"), "the table is written at the end only"
            training.remove(job.row.name)
        elif job.row.name == "none":
            assert second.wait(60), "nothing was trained meanwhile"
        write_card(job, 0.5)
        return 1.0

    monkeypatch.setattr("tcore.lab.runs.run_command", run)
    run_lab(tmp_path, gpu="3")
    assert len(json.loads((tmp_path / "lab.json").read_text())) == 5


def test_flags_of_a_row_replace_those_of_all_rows() -> None:
    row = Row("own", "--optim.steps 5 --optim.base-lr 0.1 --views.no-fixed-space")
    shared = "--optim.steps 9 --optim.base_lr 0.2 --optim.batch 4 --views.fixed-space"
    train, _ = commands_of(Job(row, 0, Path("there")), Plan("quickstart", tuple(shared.split())))
    config = parse_train(train[1:]).config
    assert (config.optim.steps, config.optim.base_lr, config.optim.batch) == (5, 0.1, 4)
    assert not config.views.fixed_space


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("branch --davis nowhere", "nowhere"),
        ("branch --seeds 0", "--seeds 0"),
        ("branch --binary", "--binary"),
        ("branch --gpus 7", "--gpus 7"),
        ("branch --recipe vits16-short", "row none: .*--frames STORE"),
        ("branch --recipe vits17", "vits17"),
        ("branch --rows non", "'non' in branch.*none"),
        ("branch --extra='--vit.depth 0'", "row none: vit.depth=0"),
        ("branch --extra='--plan'", "row none: --plan"),
        ("branch --extra=--help", "row none: .*--help"),
        ("branch --extra='--evaluate-every 2 --davis nowhere'", "row none: .*nowhere"),
        ("branch --extra='--init nowhere.pth'", "row none: .*nowhere.pth"),
        ("branch --frames nowhere", "row none: .*nowhere"),
        ("branch --extra='--run elsewhere'", "--run and --seed"),
        ("branch --seeds 2 --extra='--seed 1'", "--run and --seed"),
        ("branch --extra='--vit.depth \"4'", "--extra, '--vit.depth \"4'"),
        ("rows.json", "row typo: .*--loss.past-futur "),
        ("branch --out rows.json/below", "^tcore: error: .*rows.json is a file.*\n$"),
        ("branch --precision bf16", "--precision goes with tcore lab methods"),
        ("branch --masks a", "--masks goes with tcore lab methods"),
        ("methods --rows tcor", "'tcor'.*tcore"),
        ("methods --budget 3 --budget-minutes 1", "--budget and --budget-minutes"),
        ("methods --budget-minutes 0", "--budget-minutes 0"),
        ("methods --budget-samples 0", "--budget-samples 0"),
        ("methods --size 240 432", "--size"),
        ("methods --binary", "--binary"),
        ("methods --rows dino --masks nowhere", "nowhere"),
        ("methods --recipe vits16-short", "vits16-tcore-short needs --frames"),
        ("methods --rows dino --extra='--matching.gain 2'", "--matching.gain"),
    ],
)
def test_what_is_wrong_with_a_row_is_said_before_anything_is_trained(
    words: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"name": "fine"}, {"name": "typo", "flags": "--loss.past-futur 0"}]
    Path("rows.json").write_text(json.dumps(rows))
    assert re.search(named, refused("lab", "--out=lab", *shlex.split(words)))
    assert not Path("lab", "dino").exists()
    assert words.startswith("methods") or not Path("lab").exists()


def test_a_gpu_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    check_gpus(("0", "1", "1"))
    with pytest.raises(InputError, match=r"--gpus 0,1: there are 0, 1"):
        check_gpus(("0,1",))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    check_gpus(("5",))
    with pytest.raises(InputError, match=r"--gpus 1: there are 4, 5"):
        check_gpus(("1",))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", r"bad\.json"),
        ("[]", r"bad\.json"),
        ("[1]", "row 1"),
        ('[{"name": "a", "flag": "--x"}]', "row .*flag"),
        ('[{"name": "deep", "flags": ["--vit.depth", "2"]}]', "row .*deep"),
        ('[{"name": "a b"}, {"name": "a-b"}]', "row 'a b'"),
        ('[{"name": "lab.json"}]', r"row 'lab\.json'"),
    ],
)
def test_a_file_that_is_not_a_table_is_refused(text: str, named: str, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(InputError, match=named):
        read_table(str(tmp_path / "bad.json"))
    with pytest.raises(InputError, match=r"'brunch': give methods, .*Did you mean branch"):
        read_table("brunch")


def test_runs_of_another_table_or_length_in_the_folder_are_refused(tmp_path: Path) -> None:
    """Also those that are not asked for now: the table would list them."""
    row = Row("both", "--vit.depth 2")
    job = finish(Job(row, 1, tmp_path / "both" / "seed-1"), 0.5)
    for table, only in (("alignment", "space"), ("branch", "none")):
        with pytest.raises(InputError, match=r"both/seed-1 .*`tcore train .*depth 2"):
            run_lab(tmp_path, table, only)
    with pytest.raises(InputError, match=r"both is not a row of masks"):
        run_lab(tmp_path, "masks")
    check_folder(tmp_path, [row], "mine.json", PLAN)
    with pytest.raises(InputError, match=r"\(now --optim\.steps 3\)"):
        check_folder(tmp_path, [row], "mine.json", plan_of("--optim.steps 3"))
    with pytest.raises(InputError, match=r"\(now without --optim\.steps\)"):
        is_done(job, plan_of(""))
    with pytest.raises(InputError, match=r"`tcore evaluate .*--videos 2` \(now --videos 3\)"):
        is_done(job, plan_of(videos=3))
    write_text(job.folder / DONE, "{")
    with pytest.raises(InputError, match=r"lab\.json is damaged"):
        is_done(job, PLAN)


def test_runs_are_told_by_their_settings_where_words_or_a_recipe_have_changed(tmp_path: Path) -> None:
    plan = Plan("quickstart", ("--frames", "F"), (), lambda words: parse_train(words[1:]).config)
    job = Job(Row("all", "--auxiliary both --views.no-fixed-space"), 0, tmp_path / "all" / "seed-0")
    shorter = Row("all", "--views.no-fixed-space")  # both is the recipe's own
    made = commands_of(replace(job, row=shorter), plan)
    write_text(job.folder / STARTED, json.dumps(made))
    with pytest.raises(InputError, match=r"\(now --auxiliary both\)"):
        is_done(job, plan)
    config = parse_train(commands_of(job, plan)[0][1:]).config
    save_config(override(config, {"optim.precision": "fp32"}), job.folder / "run" / "config.json")
    assert not is_done(job, plan)  # not trained to its end, and no run of others
    with pytest.raises(InputError, match=r"\(now --frames G\)"):
        is_done(job, replace(plan, train=("--frames", "G")))
    # The same words, but a recipe that was another one when they were run.
    write_text(job.folder / STARTED, json.dumps(commands_of(job, plan)))
    save_config(override(config, {"auxiliary": "past"}), job.folder / "run" / "config.json")
    with pytest.raises(InputError, match=r"auxiliary=past, now both: give another --out"):
        is_done(job, plan)


def test_an_unfinished_run_of_other_commands_is_refused_too(tmp_path: Path) -> None:
    """Otherwise another length fails for this row, trains the next one, and bars the first command."""
    job = Job(NONE, 0, tmp_path / "none" / "seed-0")
    assert not is_done(job, PLAN)
    write_text(job.folder / STARTED, json.dumps(commands_of(job, plan_of("--optim.steps 1000000"))))
    with pytest.raises(InputError, match=r"none/seed-0 .*1000000.* \(now --optim.steps 2\)"):
        run_lab(tmp_path, "branch", "all")
    assert not (tmp_path / "all").exists()
    write_text(job.folder / STARTED, "[]")
    with pytest.raises(InputError, match=r"commands\.json is damaged"):
        check_folder(tmp_path, [NONE], "mine.json", PLAN)


def test_a_folder_may_be_moved_and_may_be_of_an_earlier_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    finish(Job(NONE, 0, Path("old/none/seed-0")), 0.5)
    Path("old").rename("new")
    done = Path("new/none/seed-0") / DONE
    done.write_text(done.read_text().replace('"--rendered"', '"--synthetic"'))
    assert is_done(Job(NONE, 0, tmp_path / "new" / "none" / "seed-0"), PLAN)
