"""The quickstart: train on rendered videos, then score the encoder on held-out ones."""

import dataclasses
import json
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tcore.config import Config
from tcore.data.rendered import RenderedVideo
from tcore.errors import InputError
from tcore.evaluation.benchmarks.rendered import (
    HELDOUT_SEED,
    Features,
    Propagated,
    RenderedScores,
    copy_first_frame,
    heldout_videos,
    propagate_video,
    raw_color,
    score_videos,
)
from tcore.evaluation.encoder import Encoder
from tcore.evaluation.encoders import load_encoder
from tcore.evaluation.protocols import RENDERED
from tcore.files import write_text
from tcore.methods import build
from tcore.pretrain import train
from tcore.show.propagation import compare_rendered, comparison_figure
from tcore.show.report import write_report
from tcore.text import format_seconds

COPY, COLOR, UNTRAINED, TRAINED = "copy first frame", "raw color patches", "untrained", "trained"


def quickstart(run: Path, config: Config, *, num_videos: int = 24) -> dict[str, RenderedScores]:
    """Train, score, print the table, save the picture and the report."""
    if num_videos < 1:
        raise InputError(f"videos={num_videos}: need 1 or more.")
    started = time.perf_counter()
    train(config, run)
    trained = time.perf_counter()

    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"\ntrained in {format_seconds(trained - started)}; scoring {num_videos} held-out videos ..."
    )
    videos = heldout_videos(num_videos, seed=HELDOUT_SEED, size=config.rendered.size)
    untrained = Encoder(build(config).encoder(), UNTRAINED)
    found = propagate_all(videos, {UNTRAINED: untrained, TRAINED: load_encoder(run)})
    scores = {name: score_videos(videos, labels) for name, labels in found.items()}

    results = {name: dataclasses.asdict(score) for name, score in scores.items()}
    protocol = dataclasses.asdict(RENDERED)
    write_text(
        run / "results.json",
        json.dumps({"heldout_videos": num_videos, "protocol": protocol, "scores": results}, indent=2) + "\n",
    )
    picture = run / "propagation.png"
    shown = {
        name: compare_rendered(videos[0], found[name][0], name)["objects"]
        for name in (COPY, UNTRAINED, TRAINED)
    }
    comparison_figure(shown, picture)

    console.print(_table(scores, num_videos))
    gain = 100 * (scores[TRAINED].region_and_boundary - scores[UNTRAINED].region_and_boundary)
    console.print(
        f"training gains {gain:+.1f} J&F points; picture: {picture}; encoder: {run}/encoder.safetensors"
    )
    report = write_report([run], run / "report.html", say=lambda line: console.print(line, markup=False))
    console.print(f"report: {report} (open it in a browser)", markup=False)
    return scores


def propagate_all(videos: list[RenderedVideo], encoders: dict[str, Encoder]) -> dict[str, list[Propagated]]:
    """Labels of the first frames, propagated by two controls and some encoders."""
    patch_size = next(iter(encoders.values())).patch_size
    found = {COPY: [copy_first_frame(video) for video in videos]}
    features: dict[str, Features] = {COLOR: raw_color(patch_size), **encoders}
    for name, extract in features.items():
        found[name] = [propagate_video(video, extract) for video in videos]
    return found


def _table(scores: dict[str, RenderedScores], num_videos: int) -> Table:
    table = Table(title=f"label propagation on {num_videos} held-out rendered videos")
    table.add_column("features")
    for column in ("J&F", "J", "F", "part mIoU", "PCK@.2"):
        table.add_column(column, justify="right")
    for name, s in scores.items():
        values = (s.region_and_boundary, s.region, s.boundary, s.part_iou, s.pck)
        table.add_row(name, *(f"{100 * value:.1f}" for value in values))
    return table
