"""Readers of runs: settings, weights, scores, and the folders of labs."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import save_file

from tcore import files
from tcore.config import load_config, save_config, to_dict
from tcore.data.stores import read_rate
from tcore.evaluation.benchmarks.rendered import Rendered
from tcore.evaluation.card import read_card, worst_clips
from tcore.evaluation.encoder import Encoder
from tcore.evaluation.encoders import load_encoder, read_normalization
from tcore.evaluation.evaluate import read_result
from tcore.evaluation.export import export, ship
from tcore.evaluation.protocols import RENDERED
from tcore.evaluation.trajectory import add_row, read_checkpoints, trajectory_table
from tcore.lab import ablation
from tcore.lab.results import collect_row
from tcore.lab.runs import DONE, STARTED, Job, Row
from tcore.methods.regions import load_discovery
from tcore.model.vit import VisionTransformer
from tcore.pretrain import BEST, Best, read_best, write_best
from tcore.show.comparison import markdown
from tcore.show.features import load_matcher
from tcore.show.report import SECTIONS, picture_data
from tcore.show.runs import read_runs
from tcore.show.samples import frames_of
from tcore.training.checkpoint import Init, load_newest, read_state, record_init
from tcore.training.journal import forget_after, note_environment
from tests.readers.reader import SIZES, Reader, small_encoder
from tests.tiny import tiny


def weight_readers(root: Path) -> list[Reader]:
    """Readers of settings, checkpoints and encoders."""
    root.mkdir(parents=True)
    encoder = small_encoder()
    run, folder, torch_file, config = root / "run", root / "timm", root / "small.pth", root / "config.json"
    run.mkdir()
    card = {"vit": SIZES | {"layer_scale": 1.0}}
    (run / "encoder.json").write_text(json.dumps(card))
    save_file(encoder.backbone.state_dict(), run / "encoder.safetensors")
    torch.save({"model": encoder.backbone.state_dict(), "epoch": 3}, torch_file)
    alone = export(encoder, root / "alone.safetensors", "safetensors").path
    export(encoder, folder, "timm")
    hub = export(encoder, root / "hub", "hub", "other").path
    save_config(tiny(), config)
    old = shutil.copytree(Path(__file__).parents[1] / "training" / "old_run", root / "old")
    unlisted = shutil.copytree(old, root / "unlisted") / "checkpoint.pt"
    unlisted.with_suffix(".json").unlink()
    checkpoint, normal = old / "checkpoint.pt", root / "preprocessor.json"
    normal.write_text(json.dumps({"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.2, 0.2]}))

    def read_checkpoint(path: Path = checkpoint) -> None:
        load_newest(path, lambda path: read_state(path, "cpu"), lambda line: None)

    def discover() -> None:
        assert isinstance(encoder.backbone, VisionTransformer)
        load_discovery(encoder.backbone, str(run))

    def read_card_of_run() -> None:
        ship(load_encoder(run), root / "shipped")
        shutil.rmtree(root / "shipped")

    return [
        *journal_readers(root / "journal", encoder),
        Reader("config.json", config, lambda: load_config(config)),
        Reader("encoder.json", run / "encoder.json", lambda: load_encoder(run), share=0.2),
        Reader("encoder.safetensors", run / "encoder.safetensors", lambda: load_encoder(run), share=0.2),
        Reader("encoder of a discovery", run / "encoder.safetensors", discover, share=0.2),
        Reader("exported safetensors", alone, lambda: load_encoder(alone), share=0.2),
        Reader("exported config.json", folder / "config.json", lambda: load_encoder(folder), share=0.2),
        Reader("hub config.json", hub / "config.json", lambda: load_encoder(f"hf:{hub}"), share=0.2),
        Reader("card of a twin", run / "encoder.json", lambda: load_encoder(f"untrained:{run}"), share=0.1),
        Reader("torch checkpoint", torch_file, lambda: load_encoder(torch_file), share=0.2),
        Reader("exported card", run / "encoder.json", read_card_of_run, share=0.05),
        Reader("checkpoint.json", checkpoint.with_suffix(".json"), read_checkpoint, share=0.1),
        Reader("checkpoint.pt", checkpoint, read_checkpoint, share=0.1),
        Reader("checkpoint.pt, not listed", unlisted, partial(read_checkpoint, unlisted), share=0.1),
        Reader("matching.safetensors", old / "matching.safetensors", lambda: load_matcher(old), share=0.2),
        Reader("encoder.json of a matcher", old / "encoder.json", lambda: load_matcher(old), share=0.2),
        Reader("preprocessor_config.json", normal, lambda: read_normalization(normal)),
    ]


def journal_readers(root: Path, encoder: Encoder) -> list[Reader]:
    """Readers of what a training notes about itself."""
    root.mkdir()
    metrics, environment, note = root / "metrics.jsonl", root / "environment.json", root / "lock.json"
    metrics.write_text('{"step": 1, "total": 2.0}\n{"step": 2, "total": 1.5}\n')
    init = Init("default", "abc", {}, [])
    record_init(init, root)
    row = {"weights": "abc", "scores": {"rendered": {"J&F": 0.5}}, "cycle": 0.5}
    write_best(root, encoder.backbone.state_dict(), Best(2, 0.5, "way"), row, tiny())
    note_environment(root, None, torch.device("cpu"), None, resumes=False)  # type: ignore[arg-type]
    rate = root / "fps.txt"
    rate.write_text("29.97\n")
    note.write_text(json.dumps({"pid": 1, "host": "here"}))

    def read_init() -> None:
        record_init(init, root)

    def read_environment() -> None:
        note_environment(root, None, torch.device("cpu"), None, resumes=True)  # type: ignore[arg-type]

    return [
        Reader("metrics.jsonl", metrics, lambda: forget_after(metrics, 1), share=0.5),
        Reader("init.json", root / "init.json", read_init, share=0.5),
        Reader("best encoder", root / BEST, lambda: read_best(root)),
        Reader("fps.txt", rate, lambda: read_rate(rate)),
        Reader("environment.json", environment, read_environment, share=0.5),
        Reader("frames of a run", environment, lambda: frames_of(environment)),
        Reader("lock.json", note, lambda: files._holder(note)),
    ]


def write_run(root: Path) -> dict[str, Any]:
    """A run of three steps with its scores, as reports and figures read it; returns its score card."""
    save_config(tiny(), root / "config.json")
    line = {"total": 2.0, "dino": 1.0, "gradient_norm_backbone": 3.0, "samples_per_second": 9.5}
    cost = {"data_wait": 0.1, "memory_gib": 0.5, "health": {"state": "learning", "patch_rank": 3.0}}
    lines = [json.dumps({"step": step} | line | cost) + "\n" for step in (1, 2, 3)]
    (root / "metrics.jsonl").write_text("".join(lines))
    (root / "environment.json").write_text(json.dumps({"frames": "rendered", "torch": "2"}))
    scores = dict.fromkeys(Rendered.score_names, 0.5)
    result = {
        "scores": scores,
        "interval": {name: [0.4, 0.6] for name in scores},
        "clips_from": "rendered",
        "protocol": {"name": "tcore", "context": 3},
        "binary": False,
        "truth": "abc",
        "clips": {name: scores | {"input": [64, 64], "seconds": 1.0} for name in ("one", "two")},
        "differs": [],
    }
    card = {
        "encoder": {"name": "small", "weights": "abc"},
        "benchmarks": {"rendered": result},
        "versions": {"torch": "2"},
        "device": "cpu",
        "seconds": 2.0,
    }
    (root / "eval").mkdir()
    (root / "eval" / "results.json").write_text(json.dumps(card))
    quick = dict.fromkeys(("region", "boundary", "part_iou", "pck"), 0.5)
    (root / "results.json").write_text(json.dumps({"heldout_videos": 2, "scores": {"trained": quick}}))
    Image.new("RGB", (16, 16)).save(root / "picture.png")
    row = {"weights": "abc", "way": "way", "scores": {"rendered": scores}, "interval": {}, "cycle": 0.5}
    for step in (1, 2):
        add_row(root / "checkpoints", root, step, row)
    return card


def run_readers(root: Path) -> list[Reader]:
    """Readers of a run and its scores, for reports and figures."""
    card = write_run(root)
    table = root / "checkpoints" / "checkpoints.json"
    benchmark, kept = Rendered.open(1, RENDERED), root / "clips" / "rendered" / "one.json"
    kept.parent.mkdir(parents=True)
    clip: dict[str, Any] = {"seconds": 1.0, "frames": 5, "input": [64, 64]}
    kept.write_text(
        json.dumps(
            {"key": "key", "saved": False, "sha256": files.digest(clip, sort_keys=False), "result": clip}
        )
    )

    other = root.parent / "another"
    files.write_text(other / "eval" / "results.json", json.dumps(card))

    def report() -> None:
        runs = read_runs([root, other])
        for describe in SECTIONS.values():
            list(describe(runs))

    def read_table() -> None:
        trajectory_table(read_checkpoints(table))

    def read_kept() -> None:
        read_result(root / "clips", benchmark, "one", "key", False)

    return [
        Reader("metrics.jsonl of a report", root / "metrics.jsonl", report, share=0.5),
        Reader("environment.json of a report", root / "environment.json", report, share=0.5),
        Reader("score card of a report", root / "eval" / "results.json", report, share=0.5),
        Reader("results of a quickstart", root / "results.json", report, share=0.5),
        Reader("checkpoints.json of a report", table, report, share=0.5),
        Reader("checkpoints.json", table, read_table),
        Reader(
            "score card", root / "eval" / "results.json", lambda: worst_clips(read_card(root / "eval"), 3)
        ),
        Reader("picture", root / "picture.png", lambda: picture_data(root / "picture.png")),
        Reader("kept clip", kept, read_kept),
    ]


def lab_readers(root: Path) -> list[Reader]:
    """Readers of tables of rows, and of what a lab wrote."""
    rows, plan = root / "rows.json", ablation.Plan("quickstart")
    job = Job(Row("fast"), 0, root / "out" / "fast" / "seed-0")
    scores = {"J&F": 0.5, "J": 0.5, "F": 0.5}
    card = {"benchmarks": {"davis": {"scores": scores, "clips": {"a": scores, "b": scores}}}}
    started, done = job.folder / STARTED, job.folder / DONE
    results = job.folder / "scores" / "results.json"
    results.parent.mkdir(parents=True)
    rows.write_text(json.dumps([{"name": "fast", "flags": "--optim.base-lr 0.004"}]))
    started.write_text(json.dumps(ablation.commands_of(job, plan)))
    done.write_text(json.dumps({"commands": ablation.commands_of(job, plan), "seconds": [60.0, 5.0]}))
    results.write_text(json.dumps(card))

    def read_started() -> None:
        done.rename(done.with_suffix(".aside"))
        try:
            ablation.is_done(job, plan)
        finally:
            done.with_suffix(".aside").rename(done)

    return [
        *comparison_readers(root / "methods" / "quick"),
        Reader("rows of a lab", rows, lambda: ablation.read_table(str(rows))),
        Reader("commands.json", started, read_started),
        Reader("lab.json", done, lambda: ablation.is_done(job, plan)),
        Reader("lab.json of a table", done, lambda: ablation.collect(root / "out", [job.row])),
        Reader("scores of a lab", results, lambda: ablation.collect(root / "out", [job.row])),
    ]


def comparison_readers(row: Path) -> list[Reader]:
    """Readers of a row of `tcore lab methods`."""
    run, about = row / "seed-0", {"config": to_dict(tiny())}
    result = {"main": "J", "scores": {"J": 0.5, "F": 0.4}, "interval": {"J": [0.4, 0.6]}}
    known = {
        run / "job.json": about | {"recipe": "quickstart", "datasets": [["davis", "d", True]]},
        run / "cost.json": {"at_a_time": 1, "device": "cpu"},
        run / "scores.json": {"d": {"tcore": result, "tcore-fine": result}},
        row / "speed.json": about | {"samples_per_second": 3.0, "gib": 0.5},
    }
    for path, content in (known | {run / DONE: {}, run / "run" / "config.json": about["config"]}).items():
        files.write_text(path, json.dumps(content))

    def read() -> None:
        list(markdown([collect_row(row)]))

    return [Reader(f"{path.name} of a comparison", path, read) for path in known]
