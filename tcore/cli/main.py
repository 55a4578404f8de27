"""The command line: a verb, a function; flags and help come from the settings themselves."""

import os
import socket
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from PIL.Image import DecompressionBombWarning

from tcore.cli.check import check_verb
from tcore.cli.data import prepare_verb
from tcore.cli.demo import demo_verb
from tcore.cli.evaluation import evaluate_verb, propagate_verb, score_verb
from tcore.cli.export import export_verb
from tcore.cli.figure import figure_verb
from tcore.cli.images import neighbors_verb
from tcore.cli.lab import lab_verb
from tcore.cli.parsing import check_flags, parse, suggest
from tcore.cli.report import report_verb
from tcore.cli.train import train_verb
from tcore.errors import InputError, PeerError
from tcore.recipes import RECIPES, recipe

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
  tcore propagate ENCODER VIDEO --labels FIRST [--out OUT]     masks or points of a frame, through a video
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
    except PeerError as error:
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
        _fail(f"the GPU is out of memory: use {LIGHTER.get(words[0], 'smaller inputs')}.", 1)
    except KeyboardInterrupt:
        _fail("interrupted; the same command goes on from what was saved.", 130)


# What takes less memory, by verb.
LIGHTER = {
    "train": "a larger --optim.accumulate (--plan tells which one fits), or a smaller --optim.batch",
    "evaluate": "--precision bf16, or a smaller --size",
    "propagate": "a smaller --long-side",
}


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


def _quickstart(argv: list[str]) -> None:
    check_flags(argv, "tcore quickstart", QuickstartCommand())
    command = parse(QuickstartCommand, argv, "tcore quickstart", QuickstartCommand())
    from tcore.quickstart import quickstart

    quickstart(command.run, recipe("quickstart", {"seed": command.seed}), num_videos=command.videos)


VERBS: dict[str, Callable[[list[str]], None]] = {
    "prepare": prepare_verb,
    "train": train_verb,
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
