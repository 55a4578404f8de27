"""The quickstart: train on rendered videos, then score the encoder on held-out ones."""

import dataclasses
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tcore.config import Config
from tcore.evaluation.benchmarks.rendered import Rendered
from tcore.evaluation.encoder import Encoder, load_control
from tcore.evaluation.encoders import load_encoder
from tcore.evaluation.protocols import RENDERED
from tcore.files import write_json
from tcore.methods import build
from tcore.pretrain import train
from tcore.show.propagation import label_clip, propagation_figure
from tcore.show.report import write_report
from tcore.text import count, format_seconds

COPY, COLOR, UNTRAINED, TRAINED = "copy first frame", "raw color patches", "untrained", "trained"
COLUMNS = {"J&F": "J&F", "J": "J", "F": "F", "mIoU": "part mIoU", "PCK@0.2": "PCK@.2"}
SAVED = {"region": "J", "boundary": "F", "part_iou": "mIoU", "pck": "PCK@0.2"}  # names in results.json


def quickstart(run: Path, config: Config, *, num_videos: int = 24) -> dict[str, dict[str, float]]:
    """Train, score, print the table, save the picture and the report."""
    started = time.perf_counter()
    train(config, run)
    trained = time.perf_counter()

    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"\ntrained in {format_seconds(trained - started)}; scoring {count(num_videos, 'held-out video')} ..."
    )
    benchmark = Rendered.open(num_videos, RENDERED)
    encoders = untrained_encoders(config) | {TRAINED: load_encoder(run)}
    scores = {
        name: benchmark.summarize([benchmark.run(encoder, clip) for clip in benchmark.clips])
        for name, encoder in encoders.items()
    }
    results = {
        "heldout_videos": num_videos,
        "protocol": dataclasses.asdict(RENDERED),
        "scores": {name: {old: s[new] for old, new in SAVED.items()} for name, s in scores.items()},
    }
    write_json(run / "results.json", results, indent=2)
    picture = run / "propagation.png"
    shown = [(name, label_clip(encoders[name], benchmark), False) for name in (COPY, UNTRAINED, TRAINED)]
    propagation_figure([("truth", shown[0][1], True), *shown], picture)

    console.print(_table(scores, num_videos))
    gain = 100 * (scores[TRAINED]["J&F"] - scores[UNTRAINED]["J&F"])
    console.print(
        f"training gains {gain:+.1f} J&F points; picture: {picture}; encoder: {run}/encoder.safetensors"
    )
    report = write_report([run], run / "report.html", say=lambda line: console.print(line, markup=False))
    console.print(f"report: {report} (open it in a browser)", markup=False)
    return scores


def untrained_encoders(config: Config) -> dict[str, Encoder]:
    """What training must beat: two controls, and the encoder that it begins with."""
    untrained = Encoder(build(config).encoder(), UNTRAINED)
    copy, pixels = (load_control(name, untrained.patch_size) for name in ("copy", "pixels"))
    return {COPY: copy, COLOR: pixels, UNTRAINED: untrained}


def _table(scores: dict[str, dict[str, float]], num_videos: int) -> Table:
    table = Table(title=f"label propagation on {num_videos} held-out rendered videos")
    table.add_column("features")
    for column in COLUMNS.values():
        table.add_column(column, justify="right")
    for name, found in scores.items():
        table.add_row(name, *(f"{100 * found[column]:.1f}" for column in COLUMNS))
    return table
