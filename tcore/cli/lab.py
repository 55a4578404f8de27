"""The verb around experiments: lab."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tyro.conf import FlagCreatePairsOff, Positional

from tcore.cli.parsing import check_flags, parse
from tcore.errors import InputError

if TYPE_CHECKING:
    from tcore.lab import Plan


@dataclass(frozen=True)
class LabCommand:
    """Train and score the rows of an ablation table, and write one table beside the paper's."""

    table: Positional[str] = ""
    """branch, alignment, offsets or masks; or a JSON file: [{"name": "deep", "flags": "--vit.depth 24"}]."""
    out: Path | None = None
    """Folder for runs, scores, lab.md, lab.png and lab.json; the same command goes on there."""
    recipe: str = "quickstart"
    """Settings that every row starts from."""
    frames: str | None = None
    """Training data, as for tcore train."""
    budget: int | None = None
    """Steps of a run (default: the recipe's own length)."""
    seeds: int = 1
    """Runs of every row, seeds 0, 1, ..."""
    rows: tuple[str, ...] = ()
    """Some rows only; others that are in OUT already stay in the table."""
    davis: Path | None = None
    """Score on a dataset laid out like DAVIS (default: held-out rendered videos)."""
    binary: FlagCreatePairsOff[bool] = False
    """DAVIS-2016: any id above 0 is the one object."""
    size: tuple[int, int] | None = None
    """Another input size for scoring (height, width), to save time."""
    videos: int = 24
    """Held-out rendered videos to score on, without --davis."""
    extra: str = ""
    """More flags for every training, in quotes: --extra "--optim.batch 8 --vit.depth 4"."""
    gpus: tuple[str, ...] = ()
    """GPUs by number, a run at a time on each; one named twice takes two (default: one run at a time)."""


def lab_verb(argv: list[str]) -> None:
    """`tcore lab`: an ablation table of one's own."""
    if argv[-1:] == ["--extra"]:
        raise InputError('--extra needs flags in quotes: --extra "--optim.batch 8 --vit.depth 4".')
    # The flags of --extra are not ours to check.
    quoted = [f"--extra={word}" if argv[i - 1] == "--extra" and i else word for i, word in enumerate(argv)]
    argv = [word for word in quoted if word != "--extra"]
    check_flags(argv, "tcore lab", LabCommand())
    command = parse(LabCommand, argv, "tcore lab", LabCommand())
    from tcore.evaluation.benchmarks import open_benchmark
    from tcore.evaluation.protocols import TCORE
    from tcore.lab import TABLES, Plan, lab, split_flags

    if not command.table or command.out is None:
        raise InputError(
            f"tcore lab needs a table and --out OUT: one of {', '.join(TABLES)}, or a JSON file."
        )
    for name in ("seeds", "budget", "videos"):
        value = getattr(command, name)
        if value is not None and value < 1:
            raise InputError(f"--{name} {value}: need 1 or more.")
    check_gpus(command.gpus)
    if command.davis is None and (command.binary or command.size):
        given = "--binary" if command.binary else "--size"
        raise InputError(f"{given} goes with --davis DIR: leave it out for rendered videos.")
    if command.davis is not None:
        open_benchmark("davis", command.davis, TCORE, binary=command.binary).check()
    plan = Plan(
        command.recipe,
        command.frames,
        command.budget,
        command.davis,
        command.binary,
        command.size,
        command.videos,
        tuple(split_flags(command.extra, "--extra")),
    )
    check_rows(command, plan)
    lines = lab(
        command.table,
        command.out,
        plan,
        seeds=command.seeds,
        only=command.rows,
        devices=command.gpus or ("",),
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    print("\n".join(lines))


def check_rows(command: LabCommand, plan: "Plan") -> None:
    """What is wrong with a row is said here, not when its turn comes."""
    from tcore.lab import Job, choose_rows, flag_name, read_table

    seen: set[object] = set()
    for row in choose_rows(read_table(command.table), command.table, command.rows):
        words = Job(row, 0, Path(row.folder)).commands(plan)[0][1:]
        try:
            if trains_nothing := sorted(
                {"-h", "--help", "--plan", "--plan-memory"} & set(map(flag_name, words))
            ):
                raise InputError(f"{trains_nothing[0]} trains nothing; leave it out.")
            patch_size = check_training(words, seen)
        except InputError as error:
            raise InputError(f"row {row.name}: {error}") from error
        own = {flag_name(word) for word in (*row.flags.split(), *plan.extra)}
        if "--run" in own or ("--seed" in own and command.seeds > 1):
            raise InputError(f"row {row.name}: the lab gives --run and --seed itself; use --out and --seeds.")
        if plan.size is not None and min(plan.size) < patch_size:
            raise InputError(f"--size {plan.size[0]} {plan.size[1]} is smaller than a patch: try 240 432.")


def check_training(words: list[str], seen: set[object]) -> int:
    """Refuse a training that could not begin, and return its patch size; `seen` data are not read again."""
    from tcore.cli.train import check_watch, make_watch, need_frames, parse_train
    from tcore.device import choose_device
    from tcore.training.init import read_init
    from tcore.training.loop import open_source
    from tcore.validation import validate

    train = parse_train(words)
    need_frames(train)
    check_watch(train)
    config, watch = validate(train.config), make_watch(train)
    choose_device(config.runtime.device)
    read_init(config)
    if watch is not None and watch not in seen:
        watch.check(config.vit.patch_size)
    alone = config.auxiliary == "none"
    data = (train.frames, train.neighbors, config.source, alone, config.sandwich, config.fps)
    if train.frames not in (None, "rendered") and data not in seen:
        open_source(config, train.frames, train.neighbors)
    seen |= {watch, data}
    return config.vit.patch_size


def check_gpus(gpus: tuple[str, ...]) -> None:
    """Refuse a GPU that is not there: its runs would be trained on the CPU."""
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    there = visible.split(",") if visible else [str(n) for n in range(torch.cuda.device_count())]
    there = there if torch.cuda.is_available() else []
    for gpu in gpus:
        if gpu not in there:
            known = f"there are {', '.join(there)}" if there else "there is none here"
            raise InputError(f"--gpus {gpu}: {known}. Give numbers apart by spaces, as in --gpus 0 1.")
