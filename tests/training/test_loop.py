import json
import math
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tcore import InputError, load_encoder, train
from tcore.cli.main import main
from tcore.errors import DivergedError
from tcore.methods import build_source
from tcore.model import losses
from tcore.training import loop
from tcore.training.checkpoint import save_checkpoint
from tcore.training.loop import introduce, keeps, open_store
from tcore.training.optim import build_schedule
from tcore.training.step import Trainer
from tests.data.clips import write_clip
from tests.runs import assert_same_run, assert_same_state, checkpoint, metrics
from tests.tiny import TINY, as_tcore, settings_of, tiny
from tests.training.faults import finish, start
from tests.training.jobs import StoppedError, no_file_beyond, stopping_at

FIGURES = (
    "total dino past_teacher future_teacher past_future koleo lr lr_backbone lr_head lr_last_layer lr_match "
    "weight_decay momentum teacher_temperature student_temperature gradient_norm_backbone gradient_norm_head "
    "gradient_norm_match samples_per_second data_wait memory_gib"
).split()


def test_run_folder_holds_everything_and_a_line_for_every_step(whole: Path) -> None:
    names = {path.name for path in whole.iterdir()}
    expected = {"config.json", "metrics.jsonl", "checkpoint.pt", "encoder.safetensors", "encoder.json"}
    assert expected | {"matching.safetensors", "encoders", "environment.json"} <= names
    kept = sorted(path.name for path in (whole / "encoders").iterdir())
    assert kept == ["step-000003.safetensors", "step-000006.safetensors"]
    assert not list(whole.rglob("*.tmp"))
    lines, weights = metrics(whole), settings_of(tiny()).loss.weights()
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in lines if "health" in line] == [2, 4, 6]
    for line in lines:
        assert all(math.isfinite(line[name]) for name in FIGURES)
        minimized = sum(weights[name] * line[name] for name in weights if name in line)
        assert line["total"] == pytest.approx(minimized, rel=1e-6)


def test_exports_are_the_teacher_and_what_matches(whole: Path) -> None:
    state = checkpoint(whole)["model"]
    teacher = {k.removeprefix("teacher.backbone."): v for k, v in state.items() if "teacher.backbone" in k}
    assert_same_state(dict(load_file(whole / "encoder.safetensors")), teacher)
    last, kept = (load_encoder(whole / name) for name in ("", "encoders/step-000006.safetensors"))
    assert last(torch.zeros(1, 32, 48, 3, dtype=torch.uint8)).shape == (1, 32, 4, 6)
    assert_same_state(dict(kept.state_dict()), dict(last.state_dict()))
    exported = load_file(whole / "matching.safetensors")
    assert {name.split(".")[0] for name in exported} == {"backbone", "match"}
    assert torch.equal(exported["backbone.cls_token"], state["student.backbone.cls_token"])


def test_training_moves_student_and_teacher_but_not_alike(whole: Path) -> None:
    start, state = Trainer(tiny()).method.state_dict(), checkpoint(whole)["model"]
    student, teacher = (f"{name}.backbone.blocks.0.attn.qkv.weight" for name in ("student", "teacher"))
    assert not torch.equal(state[student], start[student])
    assert not torch.equal(state[teacher], start[teacher])
    assert not torch.equal(state[teacher], state[student])


def test_a_finished_run_stays_as_it_is_also_where_it_is_carried_out_otherwise(
    whole: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(whole, tmp_path / "run")
    for how in ({}, {"runtime__log_every": 1, "checkpoint_every": 1}, {}):
        train(tiny(keep_every=3, **how), run, quiet=True)
        assert_same_run(run, whole)
    with pytest.raises(InputError, match=r"loss.past_future 20.0 -> 0.0.*optim.steps 6 -> 7"):
        train(tiny(keep_every=3, loss__past_future=0.0, optim__steps=7), run, quiet=True)


def test_run_stopped_at_any_step_and_resumed_equals_uninterrupted_run(tmp_path: Path, whole: Path) -> None:
    for stop in (1, 5):  # before the first checkpoint, and after the second
        run = tmp_path / f"stopped-{stop}"
        with pytest.raises(StoppedError):
            train(tiny(keep_every=3), run, quiet=True, on_step=stopping_at(stop))
        assert_same_run(train(tiny(keep_every=3), run, quiet=True), whole)


def test_twenty_encoders_are_kept_by_default() -> None:
    for num_steps in (20, 30, 39, 50, 59, 374_400):
        assert sum(keeps(done, num_steps, None) for done in range(1, num_steps + 1)) == 20
    assert sum(keeps(done, 7, None) for done in range(1, 8)) == 7
    assert [done for done in range(1, 10) if keeps(done, 9, 4)] == [4, 8]


def test_settings_made_in_python_are_checked_too(tmp_path: Path) -> None:
    wrong: dict[str, Any] = {
        "auxiliary": "bothh",
        "loss__form": "papr",
        "optim__precision": "fp16",
        "optim__batch": "eight",
        "vit__layer_scale": math.nan,
    }
    for name, value in wrong.items():
        with pytest.raises(InputError, match=name.replace("__", ".")):
            train(tiny(**{name: value}), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()
    for offset in ([0.1, 0.2], (0.1, 0.2)):  # a list will do, and is the same setting
        train(tiny(sandwich__offset=offset, optim__steps=1), tmp_path / "run", quiet=True)


def test_precision_of_a_run_is_recorded_and_kept(tmp_path: Path) -> None:
    run = train(tiny(optim__steps=1), tmp_path / "run", quiet=True)
    assert json.loads((run / "config.json").read_text())["optim"]["precision"] == "fp32"
    with pytest.raises(InputError, match=r"optim.precision fp32 -> bf16"):
        train(tiny(optim__steps=1, optim__precision="bf16"), run, quiet=True)


def test_what_will_not_be_as_it_seems_is_said_at_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = {"masking__probability": 0.1, "sandwich__cuts": "split", "optim__batch": 1, "optim__steps": 1}
    train(tiny(**odd), tmp_path / "run")
    said = capsys.readouterr().err
    for words in ("koleo is 0", "masks none", "knows no shot cuts"):
        assert words in said


@pytest.mark.long
def test_full_disk_is_one_line_with_tensorboard_too(tmp_path: Path) -> None:
    job = start(tmp_path / "run", faults=[(1, "limit")], quiet=True, runtime__log_every=1)
    code, said = finish(job)
    assert (code, said.count("\n")) == (2, 1), said
    assert "metrics.jsonl" in said


def test_other_videos_are_refused_on_resume(tmp_path: Path) -> None:
    for store, frames in (("a", 7), ("b", 8)):
        write_clip(tmp_path / store / "video", frames)
    config = tiny(optim__steps=1, runtime__workers=0)
    run = train(config, tmp_path / "run", tmp_path / "a", quiet=True)
    with pytest.raises(InputError, match="other videos"):
        train(config, run, tmp_path / "b", quiet=True)
    (tmp_path / "a").rename(tmp_path / "moved")
    train(config, run, tmp_path / "moved", quiet=True)


def test_non_finite_loss_stops_before_the_update_and_keeps_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    koleo, calls = losses.koleo_loss, []

    def poisoned(frames: torch.Tensor, num_videos: int) -> torch.Tensor:
        calls.append(1)
        factor = float("nan") if len(calls) > 6 else 1.0  # two crops a step: the fourth step
        return koleo(frames, num_videos) * factor

    monkeypatch.setattr(losses, "koleo_loss", poisoned)
    with pytest.raises(DivergedError, match=r"loss koleo=nan at step 4: .*checkpoint of step 2"):
        train(tiny(), run, quiet=True)
    assert checkpoint(run)["step"] == 2
    assert len(metrics(run)) == 3
    assert all(torch.isfinite(v).all() for v in checkpoint(run)["model"].values())


def test_non_finite_gradient_stops_before_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny()
    source, trainer = build_source(open_store(config, None), config), Trainer(config)
    before = {name: value.clone() for name, value in trainer.method.state_dict().items()}
    weight = next(as_tcore(trainer.method).student.head.parameters())
    weight.register_hook(lambda gradient: gradient * float("nan"))
    with pytest.raises(DivergedError, match=r"gradient norm of head=nan at step 1"):
        trainer.step(iter([source[0]]), 0, build_schedule(config, trainer.method, 1).at(3))
    assert_same_state(dict(trainer.method.state_dict()), before)


def test_full_disk_leaves_the_last_checkpoint_intact(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, config = tmp_path / "run", tiny(keep_every=3)

    def save_on_a_disk_that_fills_up(run: Path, step: int, *rest: Any) -> None:
        with no_file_beyond(40_000) if step == 4 else nullcontext():  # the kernel itself refuses the write
            save_checkpoint(run, step, *rest)

    monkeypatch.setattr(loop, "save_checkpoint", save_on_a_disk_that_fills_up)
    monkeypatch.setattr("tcore.cli.train.train", lambda argv: train(config, run, quiet=True))
    with pytest.raises(SystemExit) as stop:
        main(["train"])
    monkeypatch.undo()
    said = capsys.readouterr().err
    assert (stop.value.code, said.count("\n")) == (2, 1)
    assert "File too large" in said
    assert str(run) in said
    assert checkpoint(run)["step"] == 2
    assert not list(run.rglob("*.tmp"))
    assert_same_run(train(config, run, quiet=True), whole)


def test_accumulated_parts_equal_the_large_batch_where_the_losses_allow(tmp_path: Path) -> None:
    # Everything but KoLeo (neighbors within a part), Sinkhorn (rows of a part) and stochastic depth.
    same = {"loss__koleo": 0.0, "teacher__targets": "centering", "vit__drop_path": 0.0, "optim__steps": 2}
    whole = train(tiny(**same), tmp_path / "whole", quiet=True)
    parts = train(tiny(**same, optim__accumulate=2), tmp_path / "parts", quiet=True)
    for a, b in zip(metrics(whole), metrics(parts), strict=True):
        for name in ("total", "dino", "past_teacher", "future_teacher", "past_future"):
            assert a[name] == pytest.approx(b[name], rel=1e-4), name
        assert a["gradient_norm_backbone"] == pytest.approx(b["gradient_norm_backbone"], rel=1e-3)
    centers = [checkpoint(run)["model"]["patch_center.value"] for run in (whole, parts)]
    torch.testing.assert_close(centers[0], centers[1], rtol=1e-3, atol=1e-6)


def test_bf16_runs_and_stays_near_fp32() -> None:
    config, results = tiny(), []
    source = build_source(open_store(config, None), config)
    for precision in ("fp32", "bf16"):
        trainer = Trainer(tiny(optim__precision=precision))
        results.append(
            trainer.step(iter([source[0]]), 0, build_schedule(config, trainer.method, 1).at(0)).metrics()
        )
    assert all(p.dtype == torch.float32 for p in trainer.method.parameters())
    assert results[0]["dino"] != results[1]["dino"]
    assert results[0]["dino"] == pytest.approx(results[1]["dino"], rel=2e-2)


def test_frozen_prototypes_do_not_move_and_others_do() -> None:
    config = tiny(optim__freeze_last_layer_epochs=1, rendered__videos=9, optim__weight_decay=(0.0, 0.0))
    source, trainer = build_source(open_store(config, None), config), Trainer(config)
    schedule = build_schedule(config, trainer.method, source.steps_per_epoch)
    head = as_tcore(trainer.method).student.head
    before = {name: value.clone() for name, value in head.state_dict().items()}
    for step in range(2):
        trainer.step(iter([source[step]]), step, schedule.at(step))
    after = head.state_dict()
    assert torch.equal(after["prototypes.directions"], before["prototypes.directions"])
    assert not torch.equal(after["mlp.0.weight"], before["mlp.0.weight"])
    rates = [schedule.at(step).logged() for step in (source.steps_per_epoch - 1, source.steps_per_epoch)]
    assert [line["lr_last_layer"] for line in rates] == [0.0, rates[1]["lr_head"]] != [0.0, 0.0]


@pytest.mark.long
def test_compiled_blocks_give_the_same_losses() -> None:
    # In a process of its own: the shape checks of the tests cannot be compiled.
    code = f"""
import torch, tcore
from tcore.data.loader import render_batch
from tcore.methods import build_source
from tcore.training.loop import open_store
from tcore.training.step import Trainer
settings = {TINY!r} | {{"vit.depth": 1, "vit.drop_path": 0.3, "vit.reach": 1}}
found = []
for compiled in ("off", "on"):
    config = tcore.recipe("quickstart", settings | {{"runtime.compile": compiled}})
    source, trainer = build_source(open_store(config, None), config), Trainer(config)
    batch = render_batch(source[0], trainer.device, trainer.render)
    losses = trainer.method(batch, {{"teacher_temperature": 0.05}}, torch.Generator().manual_seed(0))
    trainer.method.total(losses).backward()
    gradient = trainer.method.student.backbone.blocks[0].attn.qkv.weight.grad
    found.append((losses, gradient))
for name, value in found[0][0].items():
    torch.testing.assert_close(found[1][0][name], value, rtol=1e-4, atol=1e-5)
torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-3, atol=1e-5)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(("wish", "said"), [("on", 1), ("auto", 0), ("off", 0)])
def test_a_first_step_that_takes_long_is_announced(wish: str, said: int) -> None:
    trainer = Trainer(tiny(runtime__device="cpu"))  # not compiled itself: that would take the minute
    config = tiny(runtime__compile=wish)
    lines = introduce(build_source(open_store(config, None), config), trainer, num_steps=6, first_step=0)
    assert sum("the first step compiles the model" in line for line in lines) == said
