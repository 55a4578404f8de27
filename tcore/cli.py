"""The command line: a verb, a function; flags and help come from the settings themselves."""

import contextlib
import dataclasses
import difflib
import io
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro
from tyro.conf import FlagCreatePairsOff, Positional, arg

from tcore.config import Config
from tcore.config_file import flatten
from tcore.errors import InputError
from tcore.recipes import RECIPES, recipe

Command = TypeVar("Command")

ABOUT = """\
tcore: self-supervised video representation by temporal correspondence

  tcore train RECIPE [--frames STORE] [--run RUN] [settings]   pre-train an encoder, or go on with a run
  tcore train RECIPE --plan                                    what that would take, from a few real steps
  tcore quickstart                                             train on rendered videos, see what it is worth
  tcore evaluate ENCODER --davis DIR --jhmdb DIR --out OUT     what an encoder is worth, by label propagation
  tcore score davis|vip|jhmdb --truth DIR --predictions DIR    score anybody's predictions, as JSON

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
    """Frame store: a folder of frame folders, or `rendered` for rendered videos (quickstart's default)."""
    plan: FlagCreatePairsOff[bool] = False
    """Train nothing: print sizes, memory, speed and first losses, measured in a few real steps."""
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


@dataclass(frozen=True)
class EvaluateCommand:
    """Score an encoder by label propagation: masks (DAVIS), body parts (VIP), joints (JHMDB)."""

    encoder: Positional[str] = ""
    """A run folder, a checkpoint, random:vits16 (untrained), timm:NAME, hf:NAME or hub:REPO:NAME."""
    davis: Path | None = None
    """Dataset laid out like DAVIS: JPEGImages/480p, Annotations/480p."""
    vip: Path | None = None
    """Dataset laid out like VIP: Images, Annotations/Category_ids."""
    jhmdb: Path | None = None
    """Dataset laid out like JHMDB: Rename_Images, joint_positions."""
    out: Path | None = None
    """Folder for results.json and what is saved; an interrupted evaluation goes on there."""
    layer: int = -1
    """Block whose output makes the features, after the final norm; negative counts from the end."""
    protocol: str = "tcore"
    """Protocol for davis: tcore, dino, rsp or crw."""
    binary: FlagCreatePairsOff[bool] = False
    """Davis: any id above 0, 255 included, is the one object (DAVIS-2016)."""
    size: tuple[int, int] | None = None
    """Another input size (height, width), to save time; such numbers compare with nothing published."""
    save: FlagCreatePairsOff[bool] = False
    """Save the predictions: indexed PNGs, joints.npz."""


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


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command; bad input is one line and exit code 2."""
    try:
        _dispatch(list(sys.argv[1:] if argv is None else argv))
    except InputError as error:
        _fail(str(error), error.exit_code)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _fail(f"{where}{error.strerror or error}. What was saved before is intact.", 2)
    except KeyboardInterrupt:
        _fail("interrupted; the same command goes on from the last checkpoint.", 130)


def _fail(text: str, code: int) -> None:
    print("tcore: error: " + " ".join(text.split()), file=sys.stderr)
    raise SystemExit(code)


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
        raise InputError(f"no command {verb!r}{_suggest(verb, list(VERBS))} See tcore --help.")
    VERBS[verb](rest)


def _train(argv: list[str]) -> None:
    command = parse_train(argv)
    store = None if command.frames == "rendered" else command.frames
    if command.frames is None and command.recipe != "quickstart":
        raise InputError(
            f"recipe {command.recipe} needs --frames STORE, a folder of frame folders "
            "(or --frames rendered, to try it on rendered videos)."
        )
    if command.plan:
        from tcore.training.plan import plan

        print(plan(command.config, store))
        return
    from tcore.training.loop import train

    run = train(command.config, command.run or Path("runs") / command.recipe, store)
    print(f"encoder: {run / 'encoder.safetensors'}")


def parse_train(argv: list[str]) -> TrainCommand:
    """The command that `tcore train` was given: a recipe with some settings changed, in any order."""
    _check_flags(argv, "tcore train", TrainCommand())
    asks_help = "-h" in argv or "--help" in argv
    if asks_help:
        name = next((word for word in argv if word in RECIPES), "")
    else:
        name = _parse(TrainCommand, argv, "tcore train", TrainCommand()).recipe
        if not name:
            raise InputError(f"tcore train needs a recipe: one of {', '.join(RECIPES)}.")
    config = recipe(name) if name else Config()
    return _parse(TrainCommand, argv, "tcore train", TrainCommand(recipe=name, config=config))


def _quickstart(argv: list[str]) -> None:
    _check_flags(argv, "tcore quickstart", QuickstartCommand())
    command = _parse(QuickstartCommand, argv, "tcore quickstart", QuickstartCommand())
    from tcore.show.quickstart import quickstart

    quickstart(command.run, seed=command.seed, num_videos=command.videos)


def _evaluate(argv: list[str]) -> None:
    _check_flags(argv, "tcore evaluate", EvaluateCommand())
    command = _parse(EvaluateCommand, argv, "tcore evaluate", EvaluateCommand())
    if not command.encoder:
        raise InputError("tcore evaluate needs an encoder: a run folder, a file, or random:vits16.")
    from tcore.evaluation.encoders import load_encoder
    from tcore.evaluation.evaluate import evaluate, table
    from tcore.evaluation.protocols import protocol
    from tcore.training.build import choose_device

    knobs = protocol(command.protocol)
    encoder = load_encoder(command.encoder, command.layer).to(choose_device("auto"))
    if encoder.report:
        print(encoder.report, file=sys.stderr)
    card = evaluate(
        encoder,
        davis=command.davis,
        vip=command.vip,
        jhmdb=command.jhmdb,
        protocol=knobs,
        binary=command.binary,
        size=command.size,
        out=command.out,
        save=command.save,
        say=lambda line: print(line, file=sys.stderr),
    )
    print("\n".join(table(card)))


def _score(argv: list[str]) -> None:
    _check_flags(argv, "tcore score", ScoreCommand())
    command = _parse(ScoreCommand, argv, "tcore score", ScoreCommand())
    from tcore.evaluation import score

    if command.benchmark not in ("davis", "vip", "jhmdb"):
        raise InputError(f"tcore score needs a benchmark, davis, vip or jhmdb; got {command.benchmark!r}.")
    if command.truth is None or command.predictions is None:
        raise InputError(f"tcore score {command.benchmark} needs --truth DIR and --predictions DIR.")
    if command.binary and command.benchmark != "davis":
        raise InputError(f"--binary goes with davis, not with {command.benchmark}.")
    if not command.predictions.is_dir():
        raise InputError(f"predictions {command.predictions}: no such folder.")
    if command.benchmark == "davis":
        found = score.score_davis(command.truth, command.predictions, binary=command.binary)
        total = score.summarise_davis(found)
        line = "  ".join(f"{name} {100 * total[name]:.2f}" for name in ("J&F", "J", "F"))
        print(f"{line}  ({len(found)} sequences, {total['objects']} objects)", file=sys.stderr)
    elif command.benchmark == "vip":
        found = score.score_vip(command.truth, command.predictions)
    else:
        found = score.score_jhmdb(command.truth, command.predictions)
    print(json.dumps(found, indent=1))


VERBS: dict[str, Callable[[list[str]], None]] = {
    "train": _train,
    "quickstart": _quickstart,
    "evaluate": _evaluate,
    "score": _score,
}


def _parse(kind: type[Command], argv: list[str], prog: str, default: Command) -> Command:
    """Parse with tyro; its boxed error becomes one line."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(kind, args=argv, prog=prog, default=default)
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise InputError(f"{_condense(said.getvalue())} See {prog} --help.") from None


def _condense(box: str) -> str:
    """The message of a tyro error box, without the box and the help below it."""
    lines = [re.sub(r"[╭╮╰╯│]", "", re.sub(r"\x1b\[[0-9;]*m", "", line)).strip() for line in box.splitlines()]
    message = []
    for line in lines[1:]:  # the first line is the title of the box
        if set(line) == {"─"}:
            break
        message.append(line)
    text = " ".join(" ".join(message).split()).split(" Got errors:")[0]
    return text.rstrip(".") + "." if text else "these arguments cannot be read."


def _check_flags(argv: list[str], prog: str, default: Any) -> None:
    """Refuse an unknown flag with the nearest known one."""
    known = _flags(default)
    for word in argv:
        flag = word.split("=", 1)[0].replace("_", "-")
        if flag.startswith("--") and flag not in known:
            raise InputError(f"unknown flag {flag}{_suggest(flag, known)} See {prog} --help.")


def _flags(default: Any) -> list[str]:
    """Every flag that a command understands."""
    values: dict[str, Any] = {}
    for name in (f.name for f in dataclasses.fields(default)):
        value = getattr(default, name)
        values |= flatten(value) if isinstance(value, Config) else {name: value}
    flags = ["--help"]
    for name, value in values.items():
        group, _, last = name.replace("_", "-").rpartition(".")
        prefix = f"--{group}." if group else "--"
        flags.append(prefix + last)
        if isinstance(value, bool):
            flags.append(f"{prefix}no-{last}")
    return flags


def _suggest(word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else "."
