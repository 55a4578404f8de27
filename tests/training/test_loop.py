import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tcore import InputError, load_encoder, train
from tcore.data.loader import render_batch
from tcore.errors import DivergedError
from tcore.methods import build_source
from tcore.training.loop import introduce, keeps, open_store
from tcore.training.optim import build_schedule
from tcore.training.step import Trainer
from tests.tiny import TINY, as_tcore, settings_of, tiny
from tests.training.jobs import StoppedError, stopping_at

TIMINGS = {"samples_per_second", "data_wait", "memory_gib"}
FIGURES = (
    "total",
    "dino",
    "past_teacher",
    "future_teacher",
    "past_future",
    "koleo",
    "lr",
    "lr_backbone",
    "lr_head",
    "lr_last_layer",
    "lr_match",
    "weight_decay",
    "momentum",
    "teacher_temperature",
    "student_temperature",
    "gradient_norm_backbone",
    "gradient_norm_head",
    "gradient_norm_match",
    "samples_per_second",
    "data_wait",
    "memory_gib",
)


def metrics(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in TIMINGS} for line in lines]


def checkpoint(run: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(run / "checkpoint.pt", weights_only=True)
    return state


def assert_same_state(a: Any, b: Any) -> None:
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same_state(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same_state(x, y)
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    else:
        assert a == b


def assert_same_run(a: Path, b: Path) -> None:
    assert metrics(a) == metrics(b)
    assert_same_state(checkpoint(a), checkpoint(b))
    for name in ("encoder.safetensors", "matching.safetensors"):
        assert (a / name).read_bytes() == (b / name).read_bytes()
    kept = sorted(path.name for path in (a / "encoders").iterdir())
    assert kept == sorted(path.name for path in (b / "encoders").iterdir())


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tiny(keep_every=3), tmp_path_factory.mktemp("runs") / "finished", quiet=True)


def test_run_folder_holds_everything(finished: Path) -> None:
    names = {path.name for path in finished.iterdir()}
    expected = {"config.json", "metrics.jsonl", "checkpoint.pt", "encoder.safetensors", "encoder.json"}
    assert expected | {"matching.safetensors", "encoders", "environment.json"} <= names
    assert [p.name for p in sorted((finished / "encoders").iterdir())] == [
        "step-000003.safetensors",
        "step-000006.safetensors",
    ]
    assert not list(finished.rglob("*.tmp"))


def test_every_step_has_one_line_with_all_figures(finished: Path) -> None:
    lines = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    for name in FIGURES:
        assert all(math.isfinite(line[name]) for line in lines), name
    assert [line["step"] for line in lines if "health" in line] == [2, 4, 6]


def test_logged_total_is_the_weighted_sum_that_is_minimized(finished: Path) -> None:
    weights = settings_of(tiny()).loss.weights()
    for line in metrics(finished):
        expected = sum(weights[name] * line[name] for name in weights if name in line)
        assert line["total"] == pytest.approx(expected, rel=1e-6)


def test_exported_encoder_is_the_teacher(finished: Path) -> None:
    state = checkpoint(finished)["model"]
    exported = load_file(finished / "encoder.safetensors")
    teacher = {k.removeprefix("teacher.backbone."): v for k, v in state.items() if "teacher.backbone" in k}
    assert_same_state(dict(exported), teacher)
    features = load_encoder(finished)(torch.zeros(1, 32, 48, 3, dtype=torch.uint8))
    assert features.shape == (1, 32, 4, 6)


def test_kept_encoder_loads_by_its_path(finished: Path) -> None:
    kept = load_encoder(finished / "encoders" / "step-000006.safetensors")
    last = load_encoder(finished)
    assert_same_state(dict(kept.state_dict()), dict(last.state_dict()))


def test_matching_export_holds_student_backbone_and_matching_module(finished: Path) -> None:
    exported = load_file(finished / "matching.safetensors")
    assert {name.split(".")[0] for name in exported} == {"backbone", "match"}
    state = checkpoint(finished)["model"]
    assert torch.equal(exported["backbone.cls_token"], state["student.backbone.cls_token"])


def test_training_moves_student_and_teacher_but_not_alike(finished: Path) -> None:
    start = Trainer(tiny()).method.state_dict()
    state = checkpoint(finished)["model"]
    name = "backbone.blocks.0.attn.qkv.weight"
    assert not torch.equal(state[f"student.{name}"], start[f"student.{name}"])
    assert not torch.equal(state[f"teacher.{name}"], start[f"teacher.{name}"])
    assert not torch.equal(state[f"teacher.{name}"], state[f"student.{name}"])


def test_finished_run_is_left_as_it_is(finished: Path) -> None:
    before = metrics(finished), checkpoint(finished)
    train(tiny(keep_every=3), finished, quiet=True)
    assert metrics(finished) == before[0]
    assert_same_state(checkpoint(finished), before[1])


def test_run_stopped_at_any_step_and_resumed_equals_uninterrupted_run(tmp_path: Path, finished: Path) -> None:
    for stop in (1, 5):  # before the first checkpoint, and after the second
        run = tmp_path / f"stopped-{stop}"
        with pytest.raises(StoppedError):
            train(tiny(keep_every=3), run, quiet=True, on_step=stopping_at(stop))
        train(tiny(keep_every=3), run, quiet=True)
        assert_same_run(run, finished)


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
    code = f"""
import resource, torch, tcore
import tcore.cli.main, tcore.cli.train
torch.set_num_threads(1)
def fill(step):
    if step == 1:  # nothing can grow any more: metrics, events, checkpoints
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
config = tcore.recipe("quickstart", {TINY!r} | {{"runtime.log_every": 1}})
run = {str(tmp_path / "run")!r}
tcore.cli.train.train = lambda argv: tcore.train(config, run, quiet=True, on_step=fill)
tcore.cli.main.main(["train"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert "metrics.jsonl" in done.stderr


def test_other_settings_are_refused_with_a_list_of_the_differences(finished: Path) -> None:
    with pytest.raises(InputError, match=r"loss.past_future 20.0 -> 0.0.*optim.steps 6 -> 7"):
        train(tiny(keep_every=3, loss__past_future=0.0, optim__steps=7), finished, quiet=True)


def test_how_a_run_is_carried_out_may_change_on_resume(finished: Path) -> None:
    train(tiny(keep_every=3, runtime__log_every=1, checkpoint_every=1), finished, quiet=True)
    train(tiny(keep_every=3), finished, quiet=True)


def test_other_videos_are_refused_on_resume(tmp_path: Path) -> None:
    from PIL import Image

    for store in ("a", "b"):
        for index in range(7 if store == "a" else 8):
            folder = tmp_path / store / "video"
            folder.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (40, 32), (index * 9, 50, 90)).save(folder / f"{index}.png")
    config = tiny(optim__steps=2, runtime__workers=0)
    run = train(config, tmp_path / "run", tmp_path / "a", quiet=True)
    with pytest.raises(InputError, match="other videos"):
        train(config, run, tmp_path / "b", quiet=True)
    (tmp_path / "a").rename(tmp_path / "moved")
    train(config, run, tmp_path / "moved", quiet=True)


def test_foreign_folder_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(InputError, match="is not a run folder"):
        train(tiny(), tmp_path, quiet=True)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_non_finite_loss_stops_before_the_update_and_keeps_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tcore.model import losses

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


def test_full_disk_leaves_the_last_checkpoint_intact(tmp_path: Path, finished: Path) -> None:
    run = tmp_path / "run"
    settings = TINY | {"keep_every": 3}
    code = f"""
import resource, signal, sys, torch, tcore
from tcore.cli.main import main
from tcore.training import checkpoint, loop
torch.set_num_threads(1)
save = loop.save_checkpoint
def save_on_a_disk_that_fills_up(run, step, *rest):
    if step == 4:  # from here on no file can grow beyond 40 kB; the kernel itself refuses the write
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, resource.RLIM_INFINITY))
    save(run, step, *rest)
loop.save_checkpoint = save_on_a_disk_that_fills_up
import tcore.cli.main, tcore.cli.train
config = tcore.recipe("quickstart", {settings!r})
tcore.cli.train.train = lambda argv: tcore.train(config, {str(run)!r}, quiet=True)
main(["train"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1
    assert "File too large" in done.stderr
    assert str(run) in done.stderr
    assert checkpoint(run)["step"] == 2
    assert not list(run.rglob("*.tmp"))
    train(tiny(keep_every=3), run, quiet=True)
    assert_same_run(run, finished)


def test_accumulated_parts_equal_the_large_batch_where_the_losses_allow(tmp_path: Path) -> None:
    # Everything but KoLeo (neighbors within a part), Sinkhorn (rows of a part) and stochastic depth.
    same = {"loss__koleo": 0.0, "teacher__targets": "centering", "vit__drop_path": 0.0, "optim__steps": 4}
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


def test_a_step_moves_both_centers_by_a_tenth_of_the_mean_teacher_output() -> None:
    config = tiny(teacher__targets="centering")
    source, trainer = build_source(open_store(config, None), config), Trainer(config)
    method = as_tcore(trainer.method)
    batch, teacher = render_batch(source[0], trainer.device), method.teacher
    with torch.no_grad():
        outputs = teacher.head(teacher.backbone(batch.teacher_crops).frame)
    trainer.step(iter([source[0]]), 0, build_schedule(config, trainer.method, 1).at(0))
    torch.testing.assert_close(method.frame_center.value, 0.1 * outputs.mean(dim=0))
    assert method.patch_center.value.abs().max() > 0


def test_frozen_prototypes_do_not_move_and_others_do() -> None:
    config = tiny(optim__freeze_last_layer_epochs=1, rendered__videos=40, optim__weight_decay=(0.0, 0.0))
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


def test_unknown_device_is_an_error_that_names_it() -> None:
    with pytest.raises(InputError, match=r"runtime.device=gpu"):
        Trainer(tiny(runtime__device="gpu"))
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match=r"runtime.device=cuda: no CUDA device"):
            Trainer(tiny(runtime__device="cuda"))
    with pytest.raises(InputError, match=r"runtime.device=meta: use auto"):
        Trainer(tiny(runtime__device="meta"))


@pytest.mark.parametrize(("wish", "said"), [("on", 1), ("auto", 0), ("off", 0)])
def test_a_first_step_that_takes_long_is_announced(wish: str, said: int) -> None:
    trainer = Trainer(tiny(runtime__device="cpu"))  # not compiled itself: that would take the minute
    config = tiny(runtime__compile=wish)
    lines = introduce(build_source(open_store(config, None), config), trainer, num_steps=6, first_step=0)
    assert sum("the first step compiles the model" in line for line in lines) == said
