"""Scores while a run trains: how one looks, never what is trained; and the best encoder so far."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tcore.config import Config
from tcore.data.images import Frame
from tcore.data.stores import FrameStore
from tcore.errors import InputError
from tcore.evaluation.benchmarks import open_benchmark
from tcore.evaluation.card import Card
from tcore.evaluation.cycle import store_clips
from tcore.evaluation.encoder import Encoder
from tcore.evaluation.encoders import load_encoder
from tcore.evaluation.evaluate import evaluate
from tcore.evaluation.protocols import TCORE, Size
from tcore.evaluation.trajectory import FOLDER, Row, add_row, main_score, score_step
from tcore.files import write_text
from tcore.model.vit import build_vit
from tcore.model.weights import save_safetensors
from tcore.text import format_seconds
from tcore.training import distributed, guard
from tcore.training.checkpoint import encoder_card
from tcore.training.guard import StopRequest
from tcore.training.step import Clock, Trainer

BEST, BEST_CARD = "encoder-best.safetensors", "encoder-best.json"
# About half of the published 480x880, in whole patches of 8 or 16: a sixteenth of the pairs to compare.
DAVIS_SIZE = (240, 432)
VIDEOS = 8  # rendered ones: a third of what `tcore evaluate --synthetic` takes
SILENCE = 30.0  # seconds until progress is told, and told again

Said = Callable[[str], None]


@dataclass(frozen=True)
class Watch:
    """How one looks at a run while it trains: what is scored, and how often."""

    every: int
    """Steps between two looks; the last step is looked at as well."""
    davis: str | Path | None = None
    """Dataset laid out like DAVIS; without it held-out rendered videos are scored."""
    size: Size | None = None
    """Input size for davis (height, width): 240x432 unless told otherwise."""
    clips: int | None = None
    """Clips of davis, evenly spread (all), or rendered videos (8)."""
    cycle_frames: str | Path | None = None
    """A store for the cycle consistency; rendered videos without it."""
    binary: bool = False
    """DAVIS-2016: any id above 0 is the one object."""

    def check(self, patch_size: int) -> None:
        """Refuse what could not be scored, before anything is trained."""
        if self.every < 1:
            raise InputError(f"--evaluate-every {self.every}: need 1 step or more.")
        if self.clips is not None and self.clips < 1:
            raise InputError(f"--evaluate-clips {self.clips}: need 1 or more.")
        if self.size is not None and (self.davis is None or min(self.size) < patch_size):
            why = "is smaller than a patch" if self.davis else "goes with --davis"
            raise InputError(f"--evaluate-size {self.size[0]} {self.size[1]} {why}: try 240 432.")
        if self.binary and self.davis is None:
            raise InputError("--binary goes with --davis: any id above 0 is then the one object.")
        if self.davis is not None:
            open_benchmark("davis", Path(self.davis), TCORE, binary=self.binary, most=self.clips).check()
        if self.cycle_frames is not None:
            next(iter(store_clips(FrameStore.open(self.cycle_frames))))

    def score(self, encoder: Encoder, out: Path | None, say: Said) -> Card:
        """The card of an encoder, as `tcore evaluate` makes it; by this process alone."""
        on_gpu = next(encoder.parameters()).is_cuda
        return evaluate(
            encoder,
            davis=self.davis,
            rendered=0 if self.davis else self.clips or VIDEOS,
            clips=self.clips,
            binary=self.binary,
            protocol=replace(TCORE, precision="bf16" if on_gpu else "fp32"),
            size=(self.size or DAVIS_SIZE) if self.davis else None,
            alone=True,
            out=out,
            say=say,
        )

    def cycle_clips(self) -> Iterator[Sequence[Frame]] | None:
        """Clips for the cycle consistency; None stands for rendered ones."""
        return None if self.cycle_frames is None else store_clips(FrameStore.open(self.cycle_frames))

    def clips_of(self) -> str:
        """A short name for these clips."""
        return "rendered" if self.cycle_frames is None else FrameStore.open(self.cycle_frames).fingerprint()


class Best(NamedTuple):
    """The best encoder so far: its step, its main score, and the way in which it was scored."""

    step: int
    score: float
    way: str


class AbandonedError(Exception):
    """The run was asked to leave while it was being scored."""


class Watcher:
    """Looks at a run now and then; without a `Watch`, never."""

    def __init__(
        self, watch: Watch | None, run: Path, trainer: Trainer, num_steps: int, stop: StopRequest, say: Said
    ) -> None:
        self._watch, self._run, self._trainer, self._num_steps = watch, run, trainer, num_steps
        self._stop, self._say = stop, say

    def due(self, step: int) -> bool:
        """Whether the encoder of this step is to be scored."""
        if self._watch is None or step < 1:
            return False
        return step == self._num_steps or step % self._watch.every == 0

    def look(self, step: int) -> None:
        """Score the teacher on the first process, while others wait; what fails here never ends a run."""
        backbone = distributed.whole(self._trainer.model.teacher.backbone.state_dict())
        distributed.on_first(lambda: self._look(step, backbone))
        # The time that this took is no time of the next step.
        self._trainer.clock = Clock(self._trainer.device)

    def _look(self, step: int, weights: Mapping[str, Tensor]) -> None:
        assert self._watch is not None  # otherwise never due
        begun = time.perf_counter()
        try:
            encoder = self._encoder(step, weights)
            folder = self._run / FOLDER
            row = self._row(encoder, folder / f"step-{step:06d}")
            add_row(folder, self._run, step, row)
            best = self._keep_best(step, weights, row)
        except AbandonedError:
            self._say(f"step {step}: asked to leave, scored when the run goes on.")
        except Exception as error:  # whatever it is, training is worth more
            what = "" if isinstance(error, InputError) else f"{type(error).__name__}: "
            self._say(f"warning: step {step} could not be scored: {what}{' '.join(str(error).split())}")
        else:
            self._say(describe(step, row, best, time.perf_counter() - begun))
        if self._trainer.device.type == "cuda":
            torch.cuda.empty_cache()  # what scoring needed is training's again

    def _encoder(self, step: int, weights: Mapping[str, Tensor]) -> Encoder:
        """A copy of the teacher's backbone, so that nothing that is trained can notice."""
        config: Config = self._trainer.config
        with torch.random.fork_rng(devices=[]):
            vit = build_vit(config.vit, config.views.global_size)
        vit.load_state_dict(dict(weights))
        return Encoder(vit, f"{self._run} at step {step}").to(self._trainer.device)

    def _row(self, encoder: Encoder, folder: Path) -> Row:
        assert self._watch is not None
        watch = self._watch
        return score_step(encoder, folder, self._score, watch.cycle_clips(), watch.clips_of())

    def _score(self, encoder: Encoder, out: Path | None) -> Card:
        """The card, unless the run is asked to leave meanwhile; long work tells how far it is."""
        assert self._watch is not None
        told = time.perf_counter()

        def say(line: str) -> None:
            nonlocal told
            guard.heartbeat()  # the other processes wait: scoring takes long, and is no hang
            if self._stop.name is not None:
                raise AbandonedError
            if time.perf_counter() - told > SILENCE:
                told = time.perf_counter()
                self._say(f"scoring: {line}")

        return self._watch.score(encoder, out, say)

    def _keep_best(self, step: int, weights: Mapping[str, Tensor], row: Row) -> Best:
        """The best so far, after this step; its encoder is kept."""
        config, score = self._trainer.config, main_score(row)[2]
        best = read_best(self._run, self._say)
        if best is not None and best.way != row["way"]:
            # Another dataset, size or number of clips than before: the best is scored again, to compare.
            encoder = load_encoder(self._run / BEST).to(self._trainer.device)
            again = self._row(encoder, self._run / FOLDER / "best")
            best = Best(best.step, main_score(again)[2], again["way"])
            write_best(self._run, encoder.backbone.state_dict(), best, again, config)
        if best is None or score > best.score:
            best = Best(step, score, row["way"])
            write_best(self._run, weights, best, row, config)
        return best


def describe(step: int, row: Row, best: Best, seconds: float) -> str:
    """One line for a person."""
    benchmark, name, score = main_score(row)
    standing = "the best so far" if best.step == step else f"best {100 * best.score:.1f} at step {best.step}"
    return (
        f"step {step} scored: {benchmark} {name} {100 * score:.1f} ({standing}), "
        f"cycle {100 * row['cycle']:.1f}%, in {format_seconds(seconds)}"
    )


def write_best(run: Path, weights: Mapping[str, Tensor], best: Best, row: Row, config: Config) -> None:
    """Keep an encoder as the best. What it is stands in the file itself, so that the two never part."""
    save_safetensors(weights, run / BEST, {"best": json.dumps(best._asdict())})
    scored = {name: row[name] for name in ("weights", "scores", "cycle")}
    card = encoder_card(config, best.step) | {"best": best._asdict() | scored}
    write_text(run / BEST_CARD, json.dumps(card, indent=2) + "\n")


def read_best(run: Path, say: Said = lambda line: None) -> Best | None:
    """The best encoder that a run kept; None where there is none, or none that can be read."""
    path = run / BEST
    if not path.is_file():
        return None
    try:
        with safe_open(str(path), framework="pt") as file:
            values = json.loads(file.metadata()["best"])
        return Best(int(values["step"]), float(values["score"]), str(values["way"]))
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        say(f"warning: {path} cannot be read ({error}): the best so far begins anew.")
        return None
