"""The command line: from a verb to its command; errors are one line and an exit code."""

import importlib
import os
import socket
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

from tcore.errors import InputError, PeerError, reason
from tcore.recipes import METHOD_NAMES, RECIPES
from tcore.text import did_you_mean, print_error

ABOUT = """\
tcore: self-supervised video representation by temporal correspondence

data
  tcore prepare SOURCE STORE                                  pack videos or images for training
  tcore check STORE|VIDEOS|DATASET [--sheet FILE.png]         find what is wrong with data before training
  tcore neighbors IMAGES --encoder RUN                        find the nearest images, to train on images

training
  tcore quickstart                                            train on rendered videos, score, draw a picture
  tcore train RECIPE [--frames STORE] [--run RUN] [settings]  pre-train an encoder, or resume a run
  tcore train RECIPE --plan                                   measure what a run would take
  torchrun --nproc-per-node 8 -m tcore -- train RECIPE ...    the same on many GPUs or machines
  tcore lab methods --out OUT [--budget-minutes 10]           train and score all methods with one budget
  tcore lab TABLE --out OUT [--seeds 3]                       train and score the rows of an ablation table

encoders
  tcore propagate ENCODER VIDEO --labels FIRST [--out OUT]    propagate masks or points through a video
  tcore propagate ENCODER VIDEO --box dog 40 60 200 120       the same from a box around the object
  tcore frame VIDEO OUT.png --at 3.5s                         one frame of a video as a picture
  tcore evaluate ENCODER --davis DIR --jhmdb DIR --out OUT    score an encoder by label propagation
  tcore score BENCHMARK --truth DIR --predictions DIR         score predictions of any method
  tcore export ENCODER OUT --format FORMAT                    write it for torch, timm, transformers or ONNX

to look at
  tcore demo [ENCODER]                                        paint, propagate and correct in the browser
  tcore serve [ENCODER] [--label-studio URL]                  the same over HTTP, also for Label Studio
  tcore figure KIND ... --out FILE.png                        attention, pca, propagation, dynamics, ...
  tcore report RUN... --out report.html                       settings, curves, scores and figures of runs

recipes
{recipes}

`tcore VERB --help` lists the flags of a verb, `tcore train RECIPE --help` every setting with its value."""

# What takes less memory, by verb.
LIGHTER = {
    "train": "a larger --optim.accumulate (--plan tells which one fits), or a smaller --optim.batch",
    "evaluate": "--precision bf16, or a smaller --size",
    "propagate": "a smaller --long-side",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command; bad input is one line and exit code 2."""
    words = list(sys.argv[1:] if argv is None else argv)
    # torchrun -m tcore -- train ... --run RUN: without the -- torchrun would read --run itself.
    words = words[1:] if words[:1] == ["--"] else words
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
        _fail(f"{where}{reason(error)}. What was saved before, if anything, is intact.", 2)
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":  # torch's own, which may not be imported
            raise
        _fail(f"the GPU is out of memory: use {LIGHTER.get(words[0], 'smaller inputs')}.", 1)
    except KeyboardInterrupt:
        _fail("interrupted; rerun the same command to resume from what was saved.", 130)


def _fail(text: str, code: int) -> NoReturn:
    rank = os.environ.get("RANK", "0")
    where = "" if rank == "0" else f" (process {rank} on {socket.gethostname()})"
    print_error(text, where)
    _exit(code)


def _exit(code: int) -> NoReturn:
    """End with an exit code; one of several processes at once, as torch may wait for those that are gone."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    raise SystemExit(code) from None


def _dispatch(argv: list[str]) -> None:
    if not argv or argv[0] in ("-h", "--help", "help"):
        # The twins of the quickstart are one line: they differ in the method alone.
        shown = {name: entry.says for name, entry in RECIPES.items() if "quickstart-" not in name}
        shown["quickstart-METHOD"] = f"The same for another method: {', '.join(METHOD_NAMES[1:])}."
        width = max(map(len, shown))
        print(ABOUT.format(recipes="\n".join(f"  {name:{width}}  {says}" for name, says in shown.items())))
        return
    if argv[0] == "--version":
        from tcore import __version__

        print(f"tcore {__version__}")
        return
    verb, rest = argv[0], argv[1:]
    if verb not in VERBS:
        raise InputError(f"no command {verb!r}: see tcore --help.{did_you_mean(verb, VERBS)}")
    from PIL.Image import DecompressionBombWarning

    # Images that declare too many pixels are refused by an error of our own.
    warnings.filterwarnings("ignore", category=DecompressionBombWarning)
    # What torch cannot compute on Apple's GPU it computes on the CPU, with a warning; read on its import.
    os.environ.setdefault("PYTORCH_ENABLE_MPS_FALLBACK", "1")
    module, name = VERBS[verb]
    command = getattr(importlib.import_module(f"tcore.cli.{module}"), name)
    if name.islower():  # a function that parses the words itself
        command(rest)
    else:
        from tcore.cli.parsing import parse

        parse(command, rest, f"tcore {verb}").execute()


# The module of tcore.cli and the command in it; a module is imported when its verb is called.
VERBS = {
    "prepare": ("data", "Prepare"),
    "check": ("data", "check"),
    "neighbors": ("data", "Neighbors"),
    "quickstart": ("train", "Quickstart"),
    "train": ("train", "train"),
    "lab": ("train", "lab"),
    "propagate": ("encoders", "Propagate"),
    "frame": ("encoders", "FrameOf"),
    "evaluate": ("encoders", "Evaluate"),
    "score": ("encoders", "Score"),
    "export": ("encoders", "Export"),
    "demo": ("show", "Demo"),
    "serve": ("show", "Serve"),
    "figure": ("show", "Figure"),
    "report": ("show", "Report"),
}
