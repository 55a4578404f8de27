"""`tcore lab`: train and score the rows of an ablation table."""

import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tyro.conf import Positional

from tcore.cli.parsing import Switch, at_least, parse
from tcore.cli.train import Train, parse_train
from tcore.errors import InputError
from tcore.text import to_stderr

if TYPE_CHECKING:
    from tcore.lab import Plan


@dataclass(frozen=True)
class Lab:
    """Train and score the rows of an ablation table, and write one table beside the paper's."""

    table: Positional[str]
    """branch, alignment, offsets or masks; or a JSON file: [{"name": "deep", "flags": "--vit.depth 24"}]."""
    out: Path
    """Folder for runs, scores, lab.md, lab.png and lab.json; rerun the same command to resume."""
    recipe: str = "quickstart"
    """Settings that every row starts from."""
    frames: str | None = None
    """Training data, as for tcore train."""
    budget: int | None = None
    """Steps of a run (unset: the recipe's own length)."""
    seeds: int = 1
    """Runs of every row, with seeds 0, 1, ..."""
    rows: tuple[str, ...] = ()
    """Only these rows; others that OUT already holds stay in the table."""
    davis: Path | None = None
    """Score on a dataset laid out like DAVIS (unset: held-out rendered videos)."""
    binary: Switch = False
    """DAVIS-2016: any id above 0 is the one object."""
    size: tuple[int, int] | None = None
    """Another input size for scoring (height, width), to save time."""
    videos: int = 24
    """Number of held-out rendered videos to score on, without --davis."""
    extra: str = ""
    """More flags for every training, in quotes: --extra "--optim.batch 8 --vit.depth 4"."""
    gpus: tuple[str, ...] = ()
    """GPUs by number, one run at a time on each; one given twice takes two (unset: one run at a time)."""

    def execute(self) -> None:
        """Train and score what is missing, and print the table."""
        from tcore.evaluation.benchmarks import find_benchmark
        from tcore.evaluation.protocols import TCORE
        from tcore.lab import Plan, lab, split_flags

        at_least(1, seeds=self.seeds, budget=self.budget, videos=self.videos)
        check_gpus(self.gpus)
        if self.davis is None and (self.binary or self.size):
            given = "--binary" if self.binary else "--size"
            raise InputError(f"{given} goes with --davis DIR: leave it out for rendered videos.")
        if self.davis is not None:
            find_benchmark("davis").open(self.davis, TCORE, binary=self.binary).check()
        frames = ["--frames", self.frames] if self.frames else []
        steps = ["--optim.steps", str(self.budget)] if self.budget else []
        score = ["--davis", str(self.davis)] if self.davis else ["--rendered", "--videos", str(self.videos)]
        score += ["--binary"] if self.binary else []
        score += ["--size", *map(str, self.size)] if self.size else []
        extra = split_flags(self.extra, "--extra")
        plan = Plan(self.recipe, (*frames, *steps, *extra), tuple(score))
        check_rows(self, plan)
        devices = self.gpus or ("",)
        lines = lab(
            self.table, self.out, plan, seeds=self.seeds, only=self.rows, devices=devices, say=to_stderr
        )
        print("\n".join(lines))


def lab(argv: list[str]) -> None:
    """`tcore lab`: the words after --extra are flags of another command."""
    words: list[str] = []
    for word in argv:
        if words[-1:] == ["--extra"]:
            words[-1] = f"--extra={word}"
        else:
            words.append(word)
    parse(Lab, words, "tcore lab").execute()


def check_rows(command: Lab, plan: "Plan") -> None:
    """Refuse a bad row before the first one is trained."""
    from tcore.lab import Job, choose_rows, read_table

    for row in choose_rows(read_table(command.table), command.table, command.rows):
        job = Job(row, 0, Path(row.folder))
        words = job.commands(plan)[0][1:]
        try:
            train = parse_train(words)
            if train.plan or train.plan_memory is not None:
                raise InputError("--plan trains nothing; leave it out.")
            if train.run != job.folder / "run" or (train.config.seed and command.seeds > 1):
                raise InputError("the lab gives --run and --seed itself; use --out and --seeds.")
            if command.size is not None and min(command.size) < train.config.vit.patch_size:
                raise InputError(f"--size {command.size}: smaller than a patch; try 240 432.")
            check_training(train)
        except InputError as error:
            raise InputError(f"row {row.name}: {error}") from error
        except SystemExit as stop:  # tyro has said what is wrong
            raise InputError(f"row {row.name}: tcore train cannot run {shlex.join(words)}.") from stop


def check_training(train: Train) -> None:
    """Refuse a training that could not begin."""
    from tcore.config import validate
    from tcore.device import choose_device
    from tcore.pretrain import read_init
    from tcore.training.loop import open_source

    train.check()
    config, scoring = validate(train.config), train.scoring()
    choose_device(config.runtime.device)
    read_init(config)
    if scoring is not None:
        scoring.check(config.vit.patch_size)
    if train.store is not None:
        open_source(config, train.store, train.neighbors)


def check_gpus(gpus: tuple[str, ...]) -> None:
    """Refuse a GPU that is not there: its runs would be trained on the CPU."""
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    there = visible.split(",") if visible else [str(n) for n in range(torch.cuda.device_count())]
    there = there if torch.cuda.is_available() else []
    for gpu in gpus:
        if gpu not in there:
            known = f"there are {', '.join(there)}" if there else "there is none here"
            raise InputError(f"--gpus {gpu}: {known}. Separate numbers by spaces, as in --gpus 0 1.")
