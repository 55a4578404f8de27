"""The verbs that train: quickstart, and train, a recipe with some settings changed."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tyro.conf import Positional

from tcore.cli.parsing import Settings, Switch, parse_settings
from tcore.config import Config, flatten
from tcore.errors import InputError, PeerError
from tcore.recipes import RECIPES, recipe

if TYPE_CHECKING:
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
        if self.frames is None and self.recipe != "quickstart":
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
    from tcore.evaluation.sharing import leave
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
        print(said)
    leave()


def parse_train(argv: list[str]) -> Train:
    """The command that `tcore train` was given: a recipe, then flags in any order."""
    name = argv[0] if argv else ""
    if name in ("-h", "--help"):
        config = Config()
    elif not name or name.startswith("-"):
        raise InputError(f"tcore train needs a recipe first: one of {', '.join(RECIPES)}.")
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
    was, now = flatten(before), flatten(after)
    for name in now:
        counts = name.endswith("epochs") and name != "optim.freeze_last_layer_epochs"
        if counts and was[name] != now[name]:
            raise InputError(
                f"{name}={now[name]} has no effect while optim.steps={after.optim.steps}: "
                "add --optim.steps None to count in epochs."
            )
