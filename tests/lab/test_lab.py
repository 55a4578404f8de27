"""Ablation tables of one's own."""

import json
import shlex
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tcore.cli.lab import check_gpus
from tcore.cli.main import main
from tcore.cli.train import parse_train
from tcore.config_file import save_config
from tcore.errors import InputError
from tcore.files import write_text
from tcore.lab import Job, Plan, lab, read_table
from tcore.lab_table import DONE, collect, markdown, over_clips, over_seeds
from tcore.recipes import recipe
from tcore.show.tables import TABLES, Row

TINY = (
    "--views.global-size 32 --views.local-size 16 --views.num-local 1 --head.prototypes 16 --head.hidden 16 "
    "--vit.dim 24 --vit.depth 1 --vit.num-heads 3 --optim.batch 2 --rendered.videos 2 --rendered.size 32"
)
PLAN = Plan("quickstart", None, 2, None, False, None, 2, tuple(TINY.split()))


def card(values: list[float]) -> dict[str, Any]:
    clips = {f"clip{i}": {"J&F": value} for i, value in enumerate(values)}
    mean = sum(values) / len(values)
    return {"benchmarks": {"davis": {"scores": {"J&F": mean, "J": mean, "F": mean}, "clips": clips}}}


def finish(job: Job, values: list[float]) -> None:
    write_text(job.folder / "scores" / "results.json", json.dumps(card(values)))
    write_text(job.folder / DONE, json.dumps({"commands": job.commands(PLAN), "seconds": [60.0, 5.0]}))


def test_a_table_is_trained_scored_and_written(tmp_path: Path) -> None:
    """Real processes, as a user would start them; the second call finds everything done."""
    table = tmp_path / "mine.json"
    table.write_text(json.dumps([{"name": "with pf"}, {"name": "no pf", "flags": "--loss.past-future 0"}]))
    said: list[str] = []
    lines = lab(str(table), tmp_path / "out", PLAN, seeds=1, only=("no pf",), devices=("",), say=said.append)
    assert "| no pf | `--loss.past-future 0` | 1 |" in lines[4]
    assert lines[-1] == "![Losses and health of every row, first seed](lab.png)"
    assert (tmp_path / "out" / "lab.png").stat().st_size > 10_000
    assert (tmp_path / "out" / "lab.md").read_text().splitlines() == lines
    assert (tmp_path / "out" / "no-pf" / "seed-0" / "run" / "encoder.safetensors").exists()
    again = lab(str(table), tmp_path / "out", PLAN, seeds=1, only=("no pf",), devices=("",), say=said.append)
    assert again == lines
    assert "1 of them done before" in said[-1]


def test_every_row_of_the_paper_has_its_numbers() -> None:
    assert {name: len(rows) for name, rows in TABLES.items()} == {
        "branch": 5,
        "alignment": 4,
        "offsets": 6,
        "masks": 6,
    }
    for rows in TABLES.values():
        assert len({row.folder for row in rows}) == len(rows)
        for row in rows:
            assert row.published is not None
            both, region, boundary = row.published
            assert both == pytest.approx((region + boundary) / 2, abs=0.11)


def test_rows_are_summed_up_over_seeds_and_clips(tmp_path: Path) -> None:
    row = Row("none", "--auxiliary none", (61.9, 59.7, 64.0))
    for seed, values in enumerate(([0.2, 0.4], [0.3, 0.5])):
        finish(Job(row, seed, tmp_path / row.folder / f"seed-{seed}"), values)
    (found,) = collect(tmp_path, [row, Row("never run")])
    assert found["seeds"] == 2
    assert found["J&F"] == pytest.approx(35)
    assert found["over_seeds"] == pytest.approx(12.71 * 7.0711 / 2**0.5, rel=1e-3)
    assert found["over_clips"] == pytest.approx([25, 45])
    assert "61.9 (59.7 / 64.0)" in list(markdown("t", [found]))[-1]
    assert list(markdown("t", [found | {"flags": ""}]))[-1].startswith("| none | - | 2 | 35.0 |")


def test_cost_of_a_run_is_that_of_all_its_steps_even_where_it_was_stopped(tmp_path: Path) -> None:
    row, folder = Row("none", "--auxiliary none"), tmp_path / "none" / "seed-0"
    finish(Job(row, 0, folder), [0.2, 0.4])
    assert collect(tmp_path, [row])[0]["minutes"] == 1.0  # of the process, which is all that is known
    save_config(recipe("quickstart", {"optim.batch": 30}), folder / "run" / "config.json")
    lines = [json.dumps({"step": step, "samples_per_second": 1.0}) for step in (1, 2, 3, 4)]
    write_text(folder / "run" / "metrics.jsonl", "\n".join(lines) + "\n")
    assert collect(tmp_path, [row])[0]["minutes"] == 2.0


def test_one_seed_or_one_clip_has_no_interval() -> None:
    import numpy as np

    assert over_seeds([3.0]) is None
    assert over_clips(np.array([3.0])) is None
    assert over_seeds([2.0, 2.0, 2.0]) == 0


def test_rows_of_masks_are_those_of_the_paper_with_every_recipe() -> None:
    for name in ("vits16-k400-100ep", "vits16-short"):
        masks = [parse_train([name, *row.flags.split()]).config.masking for row in TABLES["masks"]]
        found = [(mask.probability, mask.ratio) for mask in masks]
        assert found[:4] == [(share, (0.1, 0.5)) for share in (0.1, 0.3, 0.5, 0.7)]
        assert found[4:] == [(0.5, (0.2, 0.6)), (0.5, (0.3, 0.7))]


def test_a_run_that_fails_is_named_with_its_last_line(tmp_path: Path) -> None:
    plan = Plan("quickstart", str(tmp_path / "nowhere"), 1, None, False, None)
    with pytest.raises(
        InputError, match=r"1 of 1 runs failed\. .*all, seed 0: `tcore train .*nowhere.* does not exist"
    ):
        lab("branch", tmp_path / "out", plan, seeds=1, only=("all",), devices=("",), say=lambda line: None)
    assert not (tmp_path / "out" / "lab.md").exists()


def test_a_run_that_fails_costs_the_others_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(job: Job, plan: Plan, free: Any, say: Any, processes: Any) -> None:
        if job.row.name == "past":
            raise InputError("past, seed 0: out of memory")
        finish(job, [0.2, 0.4])

    monkeypatch.setattr("tcore.lab.run_job", run)
    said: list[str] = []
    with pytest.raises(InputError, match=r"1 of 5 runs failed; .*lab\.md has the 4 rows .*out of memory"):
        lab("branch", tmp_path, PLAN, seeds=1, only=(), devices=("0", "0"), say=said.append)
    assert said == ["5 runs, 0 of them done before; 2 at a time", "failed: past, seed 0: out of memory"]
    assert [row["row"] for row in json.loads((tmp_path / "lab.json").read_text())] == [
        "none",
        "future",
        "both",
        "all",
    ]


def wait_for(path: Path) -> bool:
    last = time.monotonic() + 60
    while not path.exists() and time.monotonic() < last:
        time.sleep(0.01)
    return path.exists()


def test_a_gpu_trains_the_next_run_while_one_is_scored_and_a_cut_off_lab_has_its_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one GPU, one training at a time; the first is scored only once the second is being trained."""
    second, training = threading.Event(), []

    def run(command: list[str], job: Job, log_name: str, device: str, processes: Any) -> float:
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
        write_text(job.folder / "scores" / "results.json", json.dumps(card([0.5])))
        return 1.0

    monkeypatch.setattr("tcore.lab.run_command", run)
    lab("branch", tmp_path, PLAN, seeds=1, only=(), devices=("3",), say=lambda line: None)
    assert len(json.loads((tmp_path / "lab.json").read_text())) == 5


def test_who_interrupts_a_lab_does_not_get_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = []

    def run(job: Job, plan: Plan, free: Any, say: Any, processes: Any) -> None:
        begun.append(job.row.name)
        time.sleep(1 if len(begun) > 1 else 0)
        raise KeyboardInterrupt

    monkeypatch.setattr("tcore.lab.run_job", run)
    with pytest.raises(KeyboardInterrupt):
        lab("masks", tmp_path, PLAN, seeds=1, only=(), devices=("",), say=lambda line: None)
    assert len(begun) <= 2  # one may begin before the word is out


def test_flags_of_a_row_take_the_place_of_those_of_all_rows() -> None:
    row = Row("own", "--optim.steps 5 --frames clips+photographs:images --seed 7 --optim.base-lr 0.1")
    plan = Plan(
        "quickstart", "clips", 9, None, False, None, 2, ("--optim.base_lr", "0.2", "--optim.batch", "4")
    )
    train, _ = Job(row, 0, Path("there")).commands(plan)
    assert train == ["train", "quickstart", "--run", "there/run", "--optim.batch", "4", *row.flags.split()]


def test_what_cannot_be_scored_is_said_before_anything_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.json"
    rows.write_text(json.dumps([{"name": "fine"}, {"name": "typo", "flags": "--loss.past-futur 0"}]))
    for words, said in (
        ("branch --davis nowhere", "nowhere"),
        ("branch --videos 0", "--videos 0: need 1"),
        ("branch --seeds 0", "--seeds 0: need 1"),
        ("branch --binary", "--binary goes with --davis DIR"),
        ("branch --size 9 9", "--size goes with --davis DIR"),
        ("branch --gpus 7", "--gpus 7: there is none here"),
        ("branch --recipe vits16-short", "row none: recipe vits16-short needs --frames STORE"),
        ("branch --recipe vits17", "no recipe 'vits17'"),
        ("branch --extra='--vit.depth 0'", "row none: vit.depth=0"),
        ("branch --extra='--plan'", "row none: --plan trains nothing"),
        ("branch --extra=--help", "row none: --help trains nothing"),
        ("branch --extra='--davis nowhere'", "row none: --davis goes with --evaluate-every"),
        ("branch --extra='--evaluate-every 2 --davis nowhere'", "row none: dataset nowhere does not exist"),
        ("branch --extra='--init nowhere.pth'", "row none: encoder nowhere.pth does not exist"),
        ("branch --extra='--runtime.device tpu'", "row none: runtime.device=tpu"),
        ("branch --extra", "--extra needs flags in quotes"),
        ("branch --frames nowhere", "row none: frame store nowhere does not exist"),
        ("branch --extra='--run elsewhere'", "the lab gives --run and --seed itself"),
        ("branch --seeds 2 --extra='--seed 1'", "the lab gives --run and --seed itself"),
        ("branch --extra='--vit.depth \"4'", "--extra, '--vit.depth \"4': no closing quotation"),
        (f"{rows}", "row typo: unknown flag --loss.past-futur; did you mean --loss.past-future?"),
    ):
        with pytest.raises(SystemExit):
            main(["lab", "--out", str(tmp_path / "lab"), *shlex.split(words)])
        assert said in capsys.readouterr().err
    assert not (tmp_path / "lab").exists()


def test_a_gpu_that_others_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    check_gpus(("0", "1", "1"))
    with pytest.raises(InputError, match=r"--gpus 0,1: there are 0, 1\. Give numbers apart by spaces"):
        check_gpus(("0,1",))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    check_gpus(("5",))
    with pytest.raises(InputError, match=r"--gpus 1: there are 4, 5"):
        check_gpus(("1",))


def test_tables_that_are_none_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no table 'brunch'"):
        read_table("brunch")
    bad = tmp_path / "bad.json"
    for text in ("{", "{}", "[1]", "[]", '[{"name": "a"}, {"name": "a"}]', '[{"name": "a", "flag": "--x"}]'):
        bad.write_text(text)
        with pytest.raises(InputError, match=r"bad\.json"):
            read_table(str(bad))
    bad.write_text('[{"name": "a b"}, {"name": "a-b"}]')
    with pytest.raises(InputError, match="rows 'a b' and 'a-b' share a folder, a-b: rename one"):
        read_table(str(bad))
    bad.write_text('[{"name": "lab.json"}]')
    with pytest.raises(InputError, match=r"row 'lab\.json' has the name of a file of the lab: rename it"):
        read_table(str(bad))
    bad.write_text('[{"name": "deep", "flags": ["--vit.depth", "2"]}]')
    with pytest.raises(
        InputError, match=r"""flags of row 'deep' are \["--vit.depth", "2"\]; need one text"""
    ):
        read_table(str(bad))
    with pytest.raises(InputError, match="no row 'non' in branch"):
        lab("branch", tmp_path, PLAN, seeds=1, only=("non",), devices=("",), say=lambda line: None)
