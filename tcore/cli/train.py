"""`tcore train`: a recipe with some settings changed, planned or trained."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import FlagCreatePairsOff, Positional, arg

from tcore.cli.parsing import check_flags, parse
from tcore.config import Config
from tcore.config_file import flatten
from tcore.errors import InputError, PeerError
from tcore.recipes import RECIPES, recipe

if TYPE_CHECKING:
    from tcore.training.watch import Watch


@dataclass(frozen=True)
class TrainCommand:
    """Pre-train a dense frame encoder on videos, or go on with a run where it stopped."""

    recipe: Positional[str] = ""
    """Settings to start from; `tcore --help` lists the recipes."""
    run: Path | None = None
    """Folder of the run: settings, metrics, checkpoint, encoder (default: runs/RECIPE)."""
    frames: str | None = None
    """A store of `tcore prepare`, frame folders, images, `rendered`, `photographs:FOLDER`; or several of them
    in quotes, some more often than others: "CLIPS*5+photographs:PHOTOS"."""
    neighbors: Path | None = None
    """With --source images: another file of neighbors than the one inside or beside the store."""
    plan: FlagCreatePairsOff[bool] = False
    """Train nothing: print sizes, memory, speed and first losses, measured in a few real steps."""
    plan_memory: float | None = None
    """Like --plan, and say whether the batch fits a GPU of this many GiB, or which --optim.accumulate would;
    measured on a GPU."""
    evaluate_every: int | None = None
    """Score the encoder every so many steps and at the end, and keep the best as encoder-best.safetensors."""
    davis: Path | None = None
    """With --evaluate-every: score on a dataset laid out like DAVIS (default: held-out rendered videos)."""
    binary: FlagCreatePairsOff[bool] = False
    """With --davis: DAVIS-2016, any id above 0 is the one object."""
    evaluate_size: tuple[int, int] | None = None
    """With --davis: input size (height, width; default: 240 432, which is faster than the published size)."""
    evaluate_clips: int | None = None
    """With --evaluate-every: clips of --davis, evenly spread (default: all), or rendered videos (8)."""
    cycle_frames: str | None = None
    """With --evaluate-every: a store of videos for the cycle consistency (default: rendered videos)."""
    config: Annotated[Config, arg(name="")] = field(default_factory=Config)


def train_verb(argv: list[str]) -> None:
    """Plan a training, or do it."""
    first = os.environ.get("RANK", "0") == "0"
    try:
        command = parse_train(argv)
        store = None if command.frames == "rendered" else command.frames
        need_frames(command)
        check_watch(command)
    except InputError as error:  # torchrun gives all processes the same words: one of them complains
        if first:
            raise
        raise PeerError(str(error)) from error
    from tcore.evaluation.sharing import leave

    watch = make_watch(command)
    if command.plan or command.plan_memory is not None:
        from tcore.training.plan import plan

        if watch is not None:
            watch.check(command.config.vit.patch_size)
        said = plan(command.config, store, command.neighbors, command.plan_memory)
        said += "\n(scoring along the way is not counted)" if watch is not None else ""
    else:
        from tcore.training.guard import StopRequested
        from tcore.training.loop import train

        run = command.run or Path("runs") / command.recipe
        try:
            train(command.config, run, store, neighbors=command.neighbors, watch=watch)
        except StopRequested:  # saved, and asked to go
            leave()
            raise
        said = f"encoder: {run / 'encoder.safetensors'}"
    if first:
        print(said)
    leave()


def need_frames(command: TrainCommand) -> None:
    """Refuse a recipe without the data that it needs."""
    if command.frames == "":
        raise InputError("--frames is empty: give a folder of frame folders, or rendered.")
    if command.frames is None and command.recipe != "quickstart":
        raise InputError(_what_frames(command))


def check_watch(command: TrainCommand) -> None:
    """Refuse ways of looking where nobody looks."""
    for name in ("davis", "binary", "evaluate_size", "evaluate_clips", "cycle_frames"):
        if command.evaluate_every is None and getattr(command, name) not in (None, False):
            raise InputError(f"--{name.replace('_', '-')} goes with --evaluate-every STEPS.")


def make_watch(command: TrainCommand) -> "Watch | None":
    """How the run is looked at while it trains, if it is."""
    from tcore.training.watch import Watch

    if command.evaluate_every is None:
        return None
    return Watch(
        command.evaluate_every,
        command.davis,
        command.evaluate_size,
        command.evaluate_clips,
        command.cycle_frames,
        command.binary,
    )


def _what_frames(command: TrainCommand) -> str:
    """What to give a recipe that has no frames of its own."""
    if command.config.source == "images":
        return f"recipe {command.recipe} needs --frames IMAGES, a folder of images or a packed store of them."
    return (
        f"recipe {command.recipe} needs --frames STORE, a folder of frame folders "
        "(or --frames rendered, to try it on rendered videos)."
    )


def parse_train(argv: list[str]) -> TrainCommand:
    """The command that `tcore train` was given: a recipe with some settings changed, in any order."""
    check_flags(argv, "tcore train", TrainCommand())
    # The word for no reach is the same as where an encoder is used.
    argv = [word.replace("--vit.reach=everywhere", "--vit.reach=None") for word in argv]
    argv = [
        "None" if (before, word) == ("--vit.reach", "everywhere") else word
        for before, word in zip(["", *argv], argv, strict=False)
    ]
    asks_help = "-h" in argv or "--help" in argv
    if asks_help:
        name = next((word for word in argv if word in RECIPES), "")
    else:
        name = parse(TrainCommand, argv, "tcore train", TrainCommand()).recipe
        if not name:
            raise InputError(f"tcore train needs a recipe: one of {', '.join(RECIPES)}.")
    config = recipe(name) if name else Config()
    command = parse(TrainCommand, argv, "tcore train", TrainCommand(recipe=name, config=config))
    _refuse_epochs_beside_steps(config, command.config)
    return command


def _refuse_epochs_beside_steps(before: Config, after: Config) -> None:
    """Lengths in epochs have no effect while a run is given in steps."""
    if after.optim.steps is None:
        return
    was, now = flatten(before), flatten(after)
    for name in ("optim.epochs", "optim.warmup_epochs", "teacher.temperature_epochs"):
        if was[name] != now[name]:
            raise InputError(
                f"{name}={now[name]} has no effect while optim.steps={after.optim.steps}: "
                "add --optim.steps None to count in epochs."
            )
