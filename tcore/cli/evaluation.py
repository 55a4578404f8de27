"""The verbs around an encoder: evaluate, score, propagate."""

import json
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from tyro.conf import FlagCreatePairsOff, Positional

from tcore.cli.parsing import check_flags, gather_values, parse
from tcore.config import Reach
from tcore.errors import InputError
from tcore.evaluation.propagate import Precision


@dataclass(frozen=True)
class EvaluateCommand:
    """Score an encoder by label propagation: masks (DAVIS), body parts (VIP), joints (JHMDB)."""

    encoder: Positional[str] = ""
    """A run folder, a checkpoint, default (comes with the package), random:vits16 (untrained), control:copy
    or control:color (nothing learned), timm:NAME, hf:NAME or hub:REPO:NAME."""
    davis: Path | None = None
    """Dataset laid out like DAVIS: JPEGImages/480p, Annotations/480p."""
    vip: Path | None = None
    """Dataset laid out like VIP: Images, Annotations/Category_ids."""
    jhmdb: Path | None = None
    """Dataset laid out like JHMDB: Rename_Images, joint_positions."""
    synthetic: FlagCreatePairsOff[bool] = False
    """Score on held-out rendered videos: masks, parts and joints; needs no dataset."""
    videos: int = 24
    """Number of rendered videos."""
    out: Path | None = None
    """Folder for results.json and what is saved; an interrupted evaluation goes on there."""
    layer: int = -1
    """Block whose output makes the features, after the final norm; negative counts from the end."""
    reach: Reach = None
    """How far a patch looks, in patches, or everywhere (default: as the encoder was trained)."""
    protocol: str = "tcore"
    """Protocol for davis: tcore, dino, rsp or crw."""
    first_frame: Literal["repeated", "once"] | None = None
    """How the first frame counts while the past is short: repeated as published, or once."""
    precision: Precision = "fp32"
    """Arithmetic of the encoder and form of the features; bf16 is faster, and nearly the same."""
    skip_first: FlagCreatePairsOff[bool] = False
    """VIP: leave the first frame, whose labels are given, out of the score."""
    count_lost: FlagCreatePairsOff[bool] = False
    """JHMDB: a joint that only the prediction lost is wrong; published scores leave it out."""
    round_border: FlagCreatePairsOff[bool] = False
    """JHMDB: joints near the top and left border stay where they are; published scores move them a cell."""
    binary: FlagCreatePairsOff[bool] = False
    """Davis: any id above 0, 255 included, is the one object (DAVIS-2016)."""
    size: tuple[int, int] | None = None
    """Another input size (height, width), to save time; such numbers compare with nothing published."""
    clips: int | None = None
    """At most so many clips of every dataset, evenly spread, to save time."""
    save: FlagCreatePairsOff[bool] = False
    """Save the predictions: indexed PNGs, joints.npz."""
    every_checkpoint: FlagCreatePairsOff[bool] = False
    """Score every encoder that the run kept (encoders/step-*.safetensors); --out is RUN/checkpoints then."""
    worst: int = 0
    """Print this many of the worst clips of every benchmark."""


@dataclass(frozen=True)
class ScoreCommand:
    """Score predictions in the official layout of a benchmark; prints JSON."""

    benchmark: Positional[str] = ""
    """davis, vip or jhmdb."""
    truth: Path | None = None
    """The dataset with the true labels."""
    predictions: Path | None = None
    """A folder per clip: PNG masks named like the frames, or joints.npz."""
    binary: FlagCreatePairsOff[bool] = False
    """Davis: any id above 0, 255 included, is the one object (DAVIS-2016)."""
    skip_first: FlagCreatePairsOff[bool] = False
    """VIP: leave the first frame out of the score."""
    count_lost: FlagCreatePairsOff[bool] = False
    """JHMDB: a joint that only the prediction lost is wrong, instead of left out."""


@dataclass(frozen=True)
class PropagateCommand:
    """Carry a mask or points through a video: masks or tracks, an overlay, a confidence per frame."""

    encoder: Positional[str] = ""
    """default (comes with the package), a run folder, or any other encoder that tcore evaluate takes."""
    video: Positional[str] = ""
    """A video file, or a folder of frames."""
    labels: tuple[Path, ...] = ()
    """Mask PNG of frame 0 and others named by number (00012.png), or CSV or JSON of frame,name,x,y."""
    out: Path | None = None
    """New folder for masks/ or tracks.csv, confidence.csv, overlay.mp4 and propagation.json
    (default: propagated/NAME-OF-VIDEO)."""
    layer: int = -1
    """Block whose output makes the features, after the final norm; negative counts from the end."""
    reach: Reach = None
    """How far a patch looks, in patches, or everywhere (default: as the encoder was trained)."""
    protocol: str = "tcore"
    """How labels are carried: tcore, dino, rsp or crw."""
    precision: Precision = "fp32"
    """Arithmetic of the encoder and form of the features; bf16 is faster, and nearly the same."""
    long_side: int = 880
    """Larger frames go in smaller, with this long side; others at their own size."""
    overlay: bool = True
    """Write overlay.mp4."""


def evaluate_verb(argv: list[str]) -> None:
    """`tcore evaluate`: the score card of an encoder."""
    check_flags(argv, "tcore evaluate", EvaluateCommand())
    command = parse(EvaluateCommand, argv, "tcore evaluate", EvaluateCommand())
    if not command.encoder:
        raise InputError("tcore evaluate needs an encoder: a run folder, a file, default or random:vits16.")
    if command.worst < 0 or command.videos < 1:
        raise InputError(f"--worst {command.worst} --videos {command.videos}: need 0 and 1 or more.")
    from tcore.device import choose_device
    from tcore.evaluation.card import Card, table, worst_clips
    from tcore.evaluation.encoder import Encoder
    from tcore.evaluation.encoders import DEFAULT, load_encoder
    from tcore.evaluation.evaluate import evaluate
    from tcore.evaluation.protocols import protocol
    from tcore.evaluation.sharing import join, leave
    from tcore.evaluation.trajectory import evaluate_checkpoints, trajectory_table

    knobs = replace(
        protocol(command.protocol),
        precision=command.precision,
        skip_first=command.skip_first,
        count_lost=command.count_lost,
        round_border=command.round_border,
    )
    if command.first_frame is not None:
        knobs = replace(knobs, first_frame=command.first_frame)
    if command.every_checkpoint and command.encoder == DEFAULT:
        raise InputError("default kept no encoders along its way; a run folder of that name is ./default.")
    rank, count = join()
    speaker = f"[{rank}] " if count > 1 else ""

    def say(line: str) -> None:
        print(speaker + line, file=sys.stderr, flush=True)

    def score(encoder: Encoder, out: Path | None) -> Card:
        return evaluate(
            encoder.to(choose_device("auto")),
            davis=command.davis,
            vip=command.vip,
            jhmdb=command.jhmdb,
            rendered=command.videos if command.synthetic else 0,
            clips=command.clips,
            protocol=knobs,
            binary=command.binary,
            size=command.size,
            out=out,
            save=command.save,
            say=say,
        )

    if command.every_checkpoint:
        found = evaluate_checkpoints(
            command.encoder, score, command.out, layer=command.layer, reach=command.reach, say=say
        )
        if rank == 0:
            print("\n".join(trajectory_table(found)))
        return
    encoder = load_encoder(command.encoder, command.layer, command.reach)
    card = score(encoder, command.out)
    if rank == 0:
        print(encoder.report, file=sys.stderr)
        print("\n".join([*table(card), *worst_clips(card, command.worst)]))
    leave()


def score_verb(argv: list[str]) -> None:
    """`tcore score`: predictions that are there already."""
    check_flags(argv, "tcore score", ScoreCommand())
    command = parse(ScoreCommand, argv, "tcore score", ScoreCommand())
    from tcore.evaluation.benchmarks import BENCHMARKS, find_benchmark
    from tcore.evaluation.protocols import TCORE

    benchmark = find_benchmark(command.benchmark)
    if command.truth is None or command.predictions is None:
        raise InputError(f"tcore score {command.benchmark} needs --truth DIR and --predictions DIR.")
    for option in ("binary", "skip_first", "count_lost"):
        if getattr(command, option) and option not in benchmark.options:
            owners = " or ".join(one.name for one in BENCHMARKS if option in one.options and one.on_disk)
            raise InputError(
                f"--{option.replace('_', '-')} goes with {owners}, not with {command.benchmark}."
            )
    if not command.predictions.is_dir():
        raise InputError(f"predictions {command.predictions}: no such folder.")
    protocol = replace(TCORE, skip_first=command.skip_first, count_lost=command.count_lost)
    opened = benchmark.open(command.truth, protocol, binary=command.binary)
    total, found = opened.score(command.predictions)
    line = "  ".join(f"{name} {100 * value:.2f}" for name, value in total.items())
    print(f"{line}  ({len(opened.clips)} clips)", file=sys.stderr)
    print(json.dumps(found, indent=1))


def propagate_verb(argv: list[str]) -> None:
    """`tcore propagate`: first labels through anybody's video."""
    check_flags(argv, "tcore propagate", PropagateCommand())
    command = parse(PropagateCommand, gather_values(argv, "--labels"), "tcore propagate", PropagateCommand())
    if not command.encoder or not command.video:
        raise InputError("tcore propagate needs an encoder and a video: tcore propagate ENCODER VIDEO.")
    if not command.labels:
        raise InputError("tcore propagate needs --labels FIRST: a mask of frame 0, or points.")
    video = Path(os.path.normpath(Path(command.video).absolute()))  # a link goes by its own name
    out = command.out or Path("propagated") / (video.name if video.is_dir() else video.stem)
    from tcore.device import choose_device
    from tcore.evaluation.encoders import load_encoder
    from tcore.evaluation.protocols import protocol
    from tcore.video.propagate_video import progress_lines, propagate_video_file

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    knobs = replace(protocol(command.protocol), precision=command.precision)
    done = propagate_video_file(
        load_encoder(command.encoder, command.layer, command.reach).to(choose_device("auto")),
        command.video,
        command.labels,
        out,
        protocol=knobs,
        long_side=command.long_side,
        overlay=command.overlay,
        say=say,
        progress=progress_lines(say),
    )
    print(f"{out}: {done.frames} frames, mean confidence {done.confidence:.3f}")
