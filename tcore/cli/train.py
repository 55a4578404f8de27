"""The verbs that train: quickstart; train, a recipe with some settings changed; lab, a table of them."""

import os
import shlex
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tyro.conf import Positional

from tcore.cli.parsing import Settings, Switch, at_least, parse, parse_settings
from tcore.config import Config, flatten
from tcore.errors import InputError, PeerError
from tcore.recipes import METHOD_NAMES, recipe, recipe_of
from tcore.text import to_stderr, to_stdout

if TYPE_CHECKING:
    from tcore.lab.ablation import Plan
    from tcore.lab.methods import Budget
    from tcore.lab.runs import Row
    from tcore.pretrain import Scoring


@dataclass(frozen=True)
class Quickstart:
    """Train the quickstart recipe on rendered videos, score it on held-out ones, draw a picture."""

    run: Path = Path("runs/quickstart")
    """Folder of the run."""
    seed: int = 0
    """Seed of the training."""
    videos: int = 24
    """Number of held-out videos to score on."""

    def execute(self) -> None:
        """Train, score, draw."""
        from tcore.quickstart import quickstart

        at_least(1, videos=self.videos)
        quickstart(self.run, recipe("quickstart", {"seed": self.seed}), num_videos=self.videos)


@dataclass(frozen=True)
class Train:
    """Pre-train a dense frame encoder on videos, or resume a run where it stopped."""

    recipe: Positional[str]
    """Settings to start from; `tcore --help` lists the recipes."""
    run: Path | None = None
    """Folder of the run: settings, metrics, checkpoint, encoder (unset: runs/RECIPE)."""
    frames: str | None = None
    """A store, a folder of frame folders or images, rendered, photographs:FOLDER, or a mix: "CLIPS*5+B"."""
    neighbors: Path | None = None
    """With --source images: file of neighbors (unset: the one in or beside the store)."""
    plan: Switch = False
    """Do not train: measure a few real steps and print sizes, memory, speed and first losses."""
    plan_memory: float | None = None
    """Like --plan; also say which --optim.accumulate fits a GPU of this many GiB (measured on a GPU)."""
    evaluate_every: int | None = None
    """Score the encoder every this many steps and at the end; keep the best as encoder-best.safetensors."""
    davis: Path | None = None
    """With --evaluate-every: score on a dataset laid out like DAVIS (unset: held-out rendered videos)."""
    binary: Switch = False
    """With --davis: DAVIS-2016, any id above 0 is the one object."""
    evaluate_size: tuple[int, int] | None = None
    """With --davis: input size (height, width; unset: 240 432, which is faster than the published size)."""
    evaluate_clips: int | None = None
    """With --evaluate-every: clips of --davis, evenly spread (unset: all), or rendered videos (8)."""
    cycle_frames: str | None = None
    """With --evaluate-every: store of videos for the cycle consistency (unset: rendered videos)."""
    config: Settings = field(default_factory=Config)

    @property
    def store(self) -> str | None:
        """Where the frames are; None if they are rendered."""
        return None if self.frames == "rendered" else self.frames

    def check(self) -> None:
        """Refuse a recipe without its data, and scoring flags without scoring."""
        if self.frames == "":
            raise InputError("--frames is empty: give a folder of frame folders, or rendered.")
        if self.frames is None and not self.recipe.startswith("quickstart"):
            raise InputError(
                f"recipe {self.recipe} needs --frames STORE, of {self.config.source} "
                "(or --frames rendered, to try it on rendered videos)."
            )
        for name in ("davis", "binary", "evaluate_size", "evaluate_clips", "cycle_frames"):
            if self.evaluate_every is None and getattr(self, name) not in (None, False):
                raise InputError(f"--{name.replace('_', '-')} goes with --evaluate-every STEPS.")

    def scoring(self) -> "Scoring | None":
        """How the run is scored while it trains, if it is."""
        from tcore.pretrain import Scoring

        if self.evaluate_every is None:
            return None
        return Scoring(
            self.evaluate_every,
            self.davis,
            self.evaluate_size,
            self.evaluate_clips,
            self.cycle_frames,
            self.binary,
        )


def train(argv: list[str]) -> None:
    """`tcore train`: plan a run, or train it."""
    first = os.environ.get("RANK", "0") == "0"
    try:
        command = parse_train(argv)
        command.check()
    except InputError as error:  # torchrun gives all processes the same words: the first one complains
        if first:
            raise
        raise PeerError(str(error)) from error
    from tcore.evaluation.evaluate import leave
    from tcore.pretrain import read_init
    from tcore.pretrain import train as pretrain
    from tcore.training.guard import StopRequested
    from tcore.training.plan import plan

    scoring = command.scoring()
    if command.plan or command.plan_memory is not None:
        if scoring is not None:
            scoring.check(command.config.vit.patch_size)
        said = plan(command.config, command.store, command.neighbors, command.plan_memory, read_init)
        said += "\n(scoring during training is not counted)" if scoring is not None else ""
    else:
        run = command.run or Path("runs") / command.recipe
        try:
            pretrain(command.config, run, command.store, neighbors=command.neighbors, scoring=scoring)
        except StopRequested:  # saved, and stopping as requested
            leave()
            raise
        said = f"encoder: {run / 'encoder.safetensors'}"
    if first:
        to_stdout(said)
    leave()


def parse_train(argv: list[str]) -> Train:
    """The command that `tcore train` was given: a recipe, then flags in any order."""
    name = argv[0] if argv else ""
    if name in ("-h", "--help"):
        config = Config()
    elif not name or name.startswith("-"):
        raise InputError("tcore train needs a recipe first, such as quickstart: tcore --help lists them.")
    else:
        config = recipe(name)
    # The word for no limit is the same as where an encoder is used.
    words = [word.replace("--vit.reach=everywhere", "--vit.reach=None") for word in argv]
    for at, word in enumerate(words[:-1]):
        if word == "--vit.reach" and words[at + 1] == "everywhere":
            words[at + 1] = "None"
    command = parse_settings(Train, words, "tcore train", config)
    _refuse_epochs_beside_steps(config, command.config)
    return command


def _refuse_epochs_beside_steps(before: Config, after: Config) -> None:
    """Lengths in epochs have no effect while a run is given in steps."""
    if after.optim.steps is None:
        return
    for name, value in epochs_changed(before, after).items():
        raise InputError(
            f"{name}={value} has no effect while optim.steps={after.optim.steps}: "
            "add --optim.steps None to count in epochs."
        )


def epochs_changed(before: Config, after: Config) -> dict[str, Any]:
    """Lengths in epochs that were changed, except the one that every run gives in epochs."""
    was, now = flatten(before), flatten(after)
    return {
        name: now[name]
        for name in now
        if name.endswith("epochs") and name != "optim.freeze_last_layer_epochs" and was[name] != now[name]
    }


@dataclass(frozen=True)
class Lab:
    """Train and score the rows of an ablation table or all methods, in one table beside the paper's rows."""

    table: Positional[str]
    """methods, branch, alignment, offsets or masks; or a file: [{"name": "a", "flags": "--vit.depth 24"}]."""
    out: Path
    """Folder for runs, scores, lab.md, lab.png and lab.json; rerun the command to resume, or to add rows."""
    recipe: str = "quickstart"
    """Settings that every row starts from. With methods, a family: with vits16-short, row dino trains
    vits16-dino-short."""
    frames: str | None = None
    """Training data, as for tcore train."""
    budget: int | None = None
    """Steps of every run (unset: the recipe's, or T-CoRe's samples for methods). At most one budget."""
    seeds: int = 1
    """Runs of every row, with seeds 0, 1, ..."""
    rows: tuple[str, ...] = ()
    """Only these rows; others that OUT already holds stay in the table. With methods, also copy and color:
    baselines without learning (labels of the first frame, mean color of a patch)."""
    davis: Path | None = None
    """Score on a dataset laid out like DAVIS (unset: held-out rendered videos)."""
    binary: Switch = False
    """DAVIS-2016: any id above 0 is the one object."""
    size: tuple[int, int] | None = None
    """Another input size for scoring (height, width), to save time."""
    videos: int = 24
    """Held-out rendered videos to score on if no dataset is given."""
    extra: str = ""
    """More flags for every training, in quotes: --extra "--optim.batch 8 --vit.depth 4"."""
    gpus: tuple[str, ...] = ()
    """GPUs by number, one run at a time on each; one given twice takes two (unset: one run at a time)."""
    budget_samples: int | None = None
    """With methods: samples of every run (unset: as many as the recipe of T-CoRe sees)."""
    budget_minutes: float | None = None
    """With methods: minutes of this device, at the steady speed of each row, which is measured first."""
    measure_speed: Switch = False
    """With methods: measure the speed of every row alone, whatever the budget (runs may share a GPU)."""
    masks: tuple[Path, ...] = ()
    """With methods: more datasets laid out like DAVIS, without --binary."""
    vip: Path | None = None
    """With methods: a dataset laid out like VIP."""
    jhmdb: Path | None = None
    """With methods: a dataset laid out like JHMDB."""
    points: tuple[Path, ...] = ()
    """With methods: folders of clips with a keypoints.csv each."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """With methods: arithmetic of scoring; bf16 is faster on a GPU, and nearly the same."""

    def execute(self) -> None:
        """Train and score what is missing, and print the table."""
        at_least(1, seeds=self.seeds, budget=self.budget, videos=self.videos)
        check_gpus(self.gpus)
        if self.videos != Lab.videos and any((self.davis, self.masks, self.vip, self.jhmdb, self.points)):
            raise InputError(f"--videos {self.videos} is for runs without a dataset on disk: omit it.")
        lines = self.compare_methods() if self.table == "methods" else self.run_table()
        to_stdout("\n".join(lines))

    def compare_methods(self) -> list[str]:
        """Train and score methods on all datasets that are given."""
        from tcore.lab.ablation import split_flags
        from tcore.lab.methods import BASELINES, Entry, Shared, compare
        from tcore.lab.record import Dataset

        budget = self.budget_of_rows()
        if self.size is not None or (self.binary and self.davis is None):
            wrong = "--size: the two grids are fixed" if self.size else "--binary goes with --davis DIR"
            raise InputError(f"{wrong}; leave it out.")
        extra = split_flags(self.extra, "--extra")
        entries = []
        rows = tuple(dict.fromkeys(self.rows)) or (*METHOD_NAMES, *BASELINES)
        if not (methods := [name for name in rows if name not in BASELINES]):
            raise InputError(f"--rows {' '.join(rows)}: name a method too; these are what it should beat.")
        frames = [] if self.frames is None else ["--frames", self.frames]
        for name in methods:
            own = recipe_of(name, self.recipe)
            train = checked_training([own, *frames, *extra])
            refuse_ignored(train, Train(own, frames=self.frames, config=train.config))
            entries.append(Entry(name, own, train.config))
        named = [("davis", self.davis), *(("davis", root) for root in self.masks), ("vip", self.vip)]
        named += [("jhmdb", self.jhmdb), *(("points", root) for root in self.points)]
        datasets = tuple(
            Dataset(kind, str(root), self.binary and root == self.davis) for kind, root in named if root
        )
        return compare(
            entries,
            self.out,
            Shared(train.store, datasets or (Dataset("rendered", str(self.videos)),), self.precision),
            baselines=[name for name in BASELINES if name in rows],
            budget=budget,
            seeds=self.seeds,
            devices=self.gpus or ("",),
            measure=self.measure_speed,
            say=to_stderr,
        )

    def budget_of_rows(self) -> "Budget":
        """How long every method is trained: as a flag says, or for as many samples as T-CoRe's recipe."""
        from tcore.lab.methods import Budget

        budgets = {
            "--budget": self.budget,
            "--budget-samples": self.budget_samples,
            "--budget-minutes": self.budget_minutes,
        }
        given = [name for name, value in budgets.items() if value is not None]
        if len(given) > 1:
            raise InputError(f"{' and '.join(given)} are mutually exclusive.")
        at_least(1, budget_samples=self.budget_samples)
        if self.budget_minutes is not None and not 0 < self.budget_minutes <= LONGEST:
            raise InputError(
                f"--budget-minutes {self.budget_minutes}: need more than 0 and at most {LONGEST:,}."
            )
        if given:
            return Budget(self.budget, self.budget_samples, self.budget_minutes)
        optim = recipe(self.recipe).optim
        if optim.steps is None:
            raise InputError(
                f"recipe {self.recipe} counts in epochs, which differ from method to method: give "
                "--budget-samples, --budget-minutes or --budget."
            )
        return Budget(samples=optim.steps * optim.samples)

    def run_table(self) -> list[str]:
        """Train and score the rows of an ablation table."""
        from tcore.evaluation.benchmarks import find_benchmark
        from tcore.evaluation.protocols import TCORE
        from tcore.lab.ablation import Plan, lab, read_table, split_flags

        for name in METHODS_ONLY:
            if getattr(self, name) != getattr(Lab, name):
                raise InputError(f"--{name.replace('_', '-')} goes with tcore lab methods: leave it out.")
        if self.davis is None and (self.binary or self.size):
            given = "--binary" if self.binary else "--size"
            raise InputError(f"{given} goes with --davis DIR: leave it out for rendered videos.")
        if self.davis is not None:
            find_benchmark("davis").open(self.davis, TCORE, binary=self.binary).check()
        frames = [] if self.frames is None else ["--frames", self.frames]
        steps = ["--optim.steps", str(self.budget)] if self.budget else []
        score = ["--davis", str(self.davis)] if self.davis else ["--rendered", "--videos", str(self.videos)]
        score += ["--binary"] if self.binary else []
        score += ["--size", *map(str, self.size)] if self.size else []
        extra = split_flags(self.extra, "--extra")
        words = (*frames, *steps, *extra)
        plan = Plan(self.recipe, words, tuple(score), lambda words: checked_training(words[1:]).config)
        for row in read_table(self.table, self.rows):
            try:
                check_row(row, plan, self)
            except InputError as error:
                raise InputError(f"row {row.name}: {error}") from error
        devices = self.gpus or ("",)
        return lab(
            self.table, self.out, plan, seeds=self.seeds, only=self.rows, devices=devices, say=to_stderr
        )


def refuse_ignored(train: Train, taken: Train) -> None:
    """Refuse flags of a training that `tcore lab methods` would ignore, or gives itself."""
    ignored = [
        f"--{each.name.replace('_', '-')}"
        for each in fields(train)
        if getattr(train, each.name) != getattr(taken, each.name)
    ]
    own = recipe(train.recipe)
    ignored += ["--seed"] if train.config.seed != own.seed else []
    ignored += [f"--{name.replace('_', '-')}" for name in epochs_changed(own, train.config)]
    ignored += ["--optim.steps"] if train.config.optim.steps != own.optim.steps else []
    for flag in ignored:
        raise InputError(
            f"--extra: {flag} has no place in tcore lab methods (see --budget, --seeds): leave it out."
        )


LONGEST = 1_000_000  # minutes: two years
# Flags of `tcore lab methods` alone.
METHODS_ONLY = (
    *("budget_samples", "budget_minutes", "measure_speed"),
    *("masks", "vip", "jhmdb", "points", "precision"),
)


def lab(argv: list[str]) -> None:
    """`tcore lab`: the words after --extra are flags of another command."""
    words: list[str] = []
    for word in argv:
        if words[-1:] == ["--extra"]:
            words[-1] = f"--extra={word}"
        else:
            words.append(word)
    parse(Lab, words, "tcore lab").execute()


def check_row(row: "Row", plan: "Plan", command: Lab) -> None:
    """Refuse a row whose training could not begin, before the first one is trained."""
    from tcore.lab.ablation import commands_of
    from tcore.lab.runs import Job
    from tcore.pretrain import check_training

    job = Job(row, 0, Path(row.folder))
    train = checked_training(commands_of(job, plan)[0][1:])
    if train.run != job.folder / "run" or (train.config.seed and command.seeds > 1):
        raise InputError("the lab gives --run and --seed itself; use --out and --seeds.")
    if command.size is not None and min(command.size) < train.config.vit.patch_size:
        raise InputError(f"--size {command.size}: smaller than a patch; try 240 432.")
    config = check_training(train.config, train.store, train.neighbors)
    if (scoring := train.scoring()) is not None:
        scoring.check(config.vit.patch_size)


def checked_training(words: list[str]) -> Train:
    """The training command that some words make, checked."""
    try:
        train = parse_train(words)
    except SystemExit as stop:  # tyro has said what is wrong
        raise InputError(f"tcore train cannot run {shlex.join(words)}.") from stop
    if train.plan or train.plan_memory is not None:
        raise InputError("--plan trains nothing; leave it out.")
    train.check()
    return train


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
