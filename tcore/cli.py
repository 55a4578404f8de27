"""The command line: a verb, a function; flags and help come from the settings themselves."""

import os
import socket
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import torch
from PIL.Image import DecompressionBombWarning
from tyro.conf import FlagCreatePairsOff, Positional, arg

from tcore.cli_check import check_verb
from tcore.cli_data import prepare_verb
from tcore.cli_demo import demo_verb
from tcore.cli_evaluation import evaluate_verb, propagate_verb, score_verb
from tcore.cli_export import export_verb
from tcore.cli_figure import figure_verb
from tcore.cli_images import neighbors_verb
from tcore.cli_lab import lab_verb
from tcore.cli_parsing import check_flags, parse, suggest
from tcore.cli_report import report_verb
from tcore.config import Config
from tcore.config_file import flatten
from tcore.errors import EchoError, InputError
from tcore.recipes import RECIPES, recipe

if TYPE_CHECKING:
    from tcore.training.watch import Watch

ABOUT = """\
tcore: self-supervised video representation by temporal correspondence

  tcore prepare SOURCE STORE                                   videos, frame folders or images to a store
  tcore train RECIPE [--frames STORE] [--run RUN] [settings]   pre-train an encoder, or go on with a run
  tcore train RECIPE --evaluate-every 500 --davis DIR          ... scored along the way, the best encoder kept
  tcore train RECIPE --plan                                    what that would take, from a few real steps
  tcore train RECIPE --plan-memory 24                          would it fit on a GPU of 24 GiB
  torchrun --nproc-per-node 8 -m tcore -- train RECIPE ...     the same on many GPUs or machines
  tcore quickstart                                             train on rendered videos, see what it is worth
  tcore check STORE|VIDEOS|DATASET [--sheet FILE.png]          what is there, and would training work
  tcore evaluate ENCODER --davis DIR --jhmdb DIR --out OUT     what an encoder is worth, by label propagation
  tcore score davis|vip|jhmdb --truth DIR --predictions DIR    score anybody's predictions, as JSON
  tcore propagate ENCODER VIDEO --labels FIRST --out OUT       masks or points of a frame, through a video
  tcore export ENCODER OUT --format FORMAT                     for torch, timm, transformers, ONNX runtimes
  tcore neighbors IMAGES --encoder RUN                         nearest other images, for training on images
  tcore figure KIND ... --out FILE.png                         attention, pca, propagation, dynamics, ...
  tcore report RUN... --out report.html                        settings, curves, scores, figures of runs
  tcore demo [ENCODER]                                         a page: paint, propagate, look, correct
  tcore lab TABLE --out OUT [--seeds 3]                        the paper's ablation tables, trained and scored

recipes
{recipes}

`tcore train RECIPE --help` lists every setting with the recipe's values."""


@dataclass(frozen=True)
class TrainCommand:
    """Pre-train a dense frame encoder on videos, or go on with a run where it stopped."""

    recipe: Positional[str] = ""
    """Settings to start from; `tcore --help` lists the recipes."""
    run: Path | None = None
    """Folder of the run: settings, metrics, checkpoint, encoder (default: runs/RECIPE)."""
    frames: str | None = None
    """A store of `tcore prepare`, frame folders, images, or `rendered`; or a mixture as in docs/data.md."""
    neighbors: Path | None = None
    """With --source images: another file of neighbours than the one inside or beside the store."""
    plan: FlagCreatePairsOff[bool] = False
    """Train nothing: print sizes, memory, speed and first losses, measured in a few real steps."""
    plan_memory: float | None = None
    """Train nothing: print what would fit on a GPU of so many GiB, from the settings alone."""
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


@dataclass(frozen=True)
class QuickstartCommand:
    """Train the quickstart recipe on rendered videos, score it on held-out ones, draw a picture."""

    run: Path = Path("runs/quickstart")
    """Folder of the run."""
    seed: int = 0
    """Seed of the training."""
    videos: int = 24
    """Held-out videos to score on."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command; bad input is one line and exit code 2."""
    words = list(sys.argv[1:] if argv is None else argv)
    # torchrun -m tcore -- train ... --run RUN: without the -- torchrun would read --run itself.
    words = words[1:] if words[:1] == ["--"] else words
    # Images that declare too many pixels are refused by an error of our own.
    warnings.filterwarnings("ignore", category=DecompressionBombWarning)
    try:
        _dispatch(words)
    except EchoError as error:
        time.sleep(1)  # torchrun ends all processes with the first that stops: the other one speaks first
        _exit(error.exit_code)
    except InputError as error:
        _fail(str(error), error.exit_code)
    except BrokenPipeError:  # the reader of our output has seen enough
        sys.stderr.close()
        raise SystemExit(0) from None
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _fail(f"{where}{error.strerror or error}. What was saved before is intact.", 2)
    except torch.OutOfMemoryError:
        _fail(f"the GPU is out of memory: use {_lighter(words)}.", 1)
    except KeyboardInterrupt:
        _fail("interrupted; the same command goes on from what was saved.", 130)


# What takes less memory, by verb.
LIGHTER = {
    "evaluate": "--precision bf16, or a smaller --size",
    "propagate": "a smaller --long-side",
}


def _lighter(words: list[str]) -> str:
    """What takes less memory than the command that ran out of it."""
    if words[0] != "train":
        return LIGHTER.get(words[0], "smaller inputs")
    from tcore.training.build import choose_device
    from tcore.training.distributed import world
    from tcore.training.fit import Place, advice, free_memory

    config = parse_train(words[1:]).config
    device = choose_device(config.runtime.device)
    return advice(config, Place(free_memory(device), device.type, world().size))


def _fail(text: str, code: int) -> NoReturn:
    rank = os.environ.get("RANK", "0")
    where = "" if rank == "0" else f" (process {rank} on {socket.gethostname()})"
    print(f"tcore: error{where}: " + " ".join(text.split()), file=sys.stderr)
    _exit(code)


def _exit(code: int) -> NoReturn:
    """End with an exit code; one of several processes at once, as torch may wait for those that are gone."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    raise SystemExit(code) from None


def _dispatch(argv: list[str]) -> None:
    if not argv or argv[0] in ("-h", "--help", "help"):
        width = max(map(len, RECIPES))
        print(ABOUT.format(recipes="\n".join(f"  {k:{width}}  {r.says}" for k, r in RECIPES.items())))
        return
    if argv[0] == "--version":
        from tcore import __version__

        print(f"tcore {__version__}")
        return
    verb, rest = argv[0], argv[1:]
    if verb not in VERBS:
        raise InputError(f"no command {verb!r}{suggest(verb, list(VERBS))} See tcore --help.")
    VERBS[verb](rest)


def _train(argv: list[str]) -> None:
    first = os.environ.get("RANK", "0") == "0"
    try:
        command = parse_train(argv)
        store = None if command.frames == "rendered" else command.frames
        if command.frames == "":
            raise InputError("--frames is empty: give a folder of frame folders, or rendered.")
        needs_frames = command.recipe != "quickstart" and command.plan_memory is None
        if command.frames is None and needs_frames:
            raise InputError(_what_frames(command))
        _check_watch(command)
    except InputError as error:  # torchrun gives all processes the same words: one of them complains
        if first:
            raise
        raise EchoError(str(error)) from error
    from tcore.evaluation.sharing import leave

    if command.plan and command.plan_memory is not None:
        raise InputError(f"--plan and --plan-memory {command.plan_memory:g}: choose one.")
    watch = _watch(command)
    if command.plan_memory is not None:
        from tcore.training.plan import plan_memory

        said = plan_memory(command.config, command.plan_memory)
    elif command.plan:
        from tcore.training.plan import plan

        if watch is not None:
            watch.check(command.config.vit.patch_size)
        said = plan(command.config, store, command.neighbors)
        said += "\n(scoring along the way is not counted)" if watch is not None else ""
    else:
        from tcore.training.loop import train
        from tcore.training.signals import Preempted

        run = command.run or Path("runs") / command.recipe
        try:
            train(command.config, run, store, neighbors=command.neighbors, watch=watch)
        except Preempted:  # saved, and asked to go
            leave()
            raise
        said = f"encoder: {run / 'encoder.safetensors'}"
    if first:
        print(said)
    leave()


def _check_watch(command: TrainCommand) -> None:
    """Refuse ways of looking where nobody looks."""
    for name in ("davis", "binary", "evaluate_size", "evaluate_clips", "cycle_frames"):
        if command.evaluate_every is None and getattr(command, name) not in (None, False):
            raise InputError(f"--{name.replace('_', '-')} goes with --evaluate-every STEPS.")


def _watch(command: TrainCommand) -> "Watch | None":
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


def _quickstart(argv: list[str]) -> None:
    check_flags(argv, "tcore quickstart", QuickstartCommand())
    command = parse(QuickstartCommand, argv, "tcore quickstart", QuickstartCommand())
    from tcore.show.quickstart import quickstart

    quickstart(command.run, recipe("quickstart", {"seed": command.seed}), num_videos=command.videos)


VERBS: dict[str, Callable[[list[str]], None]] = {
    "prepare": prepare_verb,
    "train": _train,
    "quickstart": _quickstart,
    "check": check_verb,
    "evaluate": evaluate_verb,
    "score": score_verb,
    "propagate": propagate_verb,
    "export": export_verb,
    "neighbors": neighbors_verb,
    "figure": figure_verb,
    "lab": lab_verb,
    "report": report_verb,
    "demo": demo_verb,
}
