"""Pre-training as users call it: data, weights to start from, and scores along the way."""

import json
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tcore.config import Config, validate
from tcore.data.images import Frame
from tcore.data.stores import FrameStore
from tcore.device import choose_device
from tcore.errors import InputError
from tcore.evaluation.benchmarks import find_benchmark
from tcore.evaluation.card import Card
from tcore.evaluation.cycle import store_clips
from tcore.evaluation.encoder import Encoder
from tcore.evaluation.encoders import load_encoder
from tcore.evaluation.evaluate import evaluate
from tcore.evaluation.protocols import TCORE
from tcore.evaluation.resize import Size
from tcore.evaluation.trajectory import FOLDER, Row, Scored, add_row, main_score, score_step
from tcore.files import number_or_nan, parse_line, whole, write_json
from tcore.methods.match_quality import (
    CROSS,
    Looked,
    Matcher,
    build_matcher,
    measure_matching,
    rendered_motion,
)
from tcore.model.vit import VisionTransformer, build_vit, save_safetensors
from tcore.text import Say, format_seconds, silent
from tcore.training.checkpoint import Init, encoder_card
from tcore.training.loop import OnStep, ScoreNow, open_source, train_run

BEST, BEST_CARD = "encoder-best.safetensors", "encoder-best.json"
# About half of the published 480x880, in whole patches of 8 or 16: a sixteenth of the pairs to compare.
DAVIS_SIZE = (240, 432)
MOTIONS = 16  # rendered videos that show whether the matching module matches
VIDEOS = 8  # rendered ones: a third of what `tcore evaluate --rendered` takes
SILENCE = 30.0  # seconds between two lines of progress


def train(
    config: Config,
    run: str | Path,
    frames: str | Path | None = None,
    *,
    neighbors: str | Path | None = None,
    scoring: "Scoring | None" = None,
    quiet: bool = False,
    on_step: OnStep | None = None,
    watch: "Scoring | None" = None,
) -> Path:
    """Train in a run folder, or resume there; without `frames` on rendered videos.

    Neighbors of images are found inside or beside their store, unless `neighbors` is another file.
    With `scoring` the encoder is scored along the way, and the best is kept; what is trained stays the same.
    `on_step` is called with the number of steps done, before each step. `watch` is the old name of `scoring`.

    >>> import tempfile, tcore
    >>> config = tcore.recipe("quickstart", {"optim.steps": 1, "optim.batch": 2, "rendered.videos": 2})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = tcore.train(config, folder + "/run", quiet=True)
    ...     sorted(path.name for path in run.glob("encoder*"))
    ['encoder.json', 'encoder.safetensors', 'encoders']
    """
    if watch is not None:
        warnings.warn("watch= is now called scoring=.", DeprecationWarning, stacklevel=2)
        scoring = scoring or watch
    return train_run(
        config,
        Path(run),
        frames,
        neighbors=neighbors,
        read_init=read_init,
        scoring=scoring,
        quiet=quiet,
        on_step=on_step,
    )


class Best(NamedTuple):
    """The best encoder so far: its step, its main score, and the way in which it was scored."""

    step: int
    score: float
    way: str


class AbandonedError(Exception):
    """A stop was requested while the run was being scored."""


@dataclass(frozen=True)
class Scoring:
    """Scores during training: what is scored, and how often; what is trained stays the same."""

    every: int
    """Steps between two scores; the last step is scored as well."""
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
            find_benchmark("davis").open(Path(self.davis), TCORE, binary=self.binary, most=self.clips).check()
        if self.cycle_frames is not None:
            next(iter(store_clips(FrameStore.open(self.cycle_frames))))

    def score(self, encoder: Encoder, out: Path, say: Say) -> Card:
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

    def cycle_clips(self) -> tuple[Iterator[Sequence[Frame]] | None, str]:
        """Clips for the cycle consistency, None for rendered ones; and a short name for them."""
        if self.cycle_frames is None:
            return None, "rendered"
        store = FrameStore.open(self.cycle_frames)
        return store_clips(store), store.fingerprint()

    def __call__(self, now: ScoreNow) -> None:
        """Score an encoder and keep the best; what fails here never ends a run."""
        begun = time.perf_counter()
        try:
            folder = now.run / FOLDER
            row = self._row(now, _encoder(now), folder / f"step-{now.step:06d}") | matching_of(now)
            add_row(folder, now.run, now.step, row)
            best = self._keep_best(now, row)
        except AbandonedError:
            now.say(f"step {now.step}: stop requested; it is scored when the run resumes.")
        except Exception as error:  # of any kind: training must continue
            what = "" if isinstance(error, InputError) else f"{type(error).__name__}: "
            now.say(f"warning: step {now.step} could not be scored: {what}{' '.join(str(error).split())}")
        else:
            now.say(describe(now.step, row, best, time.perf_counter() - begun))
        if now.device.type == "cuda":
            torch.cuda.empty_cache()  # return the memory of scoring to training

    def _row(self, now: ScoreNow, encoder: Encoder, folder: Path) -> Row:
        return score_step(encoder, folder, self._card(now), *self.cycle_clips())

    def _card(self, now: ScoreNow) -> Scored:
        """Makes the card, unless a stop is requested meanwhile; long work says how far it is."""
        told = time.perf_counter()

        def say(line: str) -> None:
            nonlocal told
            if now.stopped():
                raise AbandonedError
            if time.perf_counter() - told > SILENCE:
                told = time.perf_counter()
                now.say(f"scoring: {line}")

        return lambda encoder, out: self.score(encoder, out, say)

    def _keep_best(self, now: ScoreNow, row: Row) -> Best:
        """The best so far, after this step; its encoder is kept."""
        score = main_score(row)[2]
        best = read_best(now.run, now.say)
        if best is not None and best.way != row["way"]:
            # Another dataset, size or number of clips than before: the best is scored again, to compare.
            encoder = load_encoder(now.run / BEST).to(now.device)
            again = self._row(now, encoder, now.run / FOLDER / "best")
            best = Best(best.step, main_score(again)[2], again["way"])
            write_best(now.run, encoder.backbone.state_dict(), best, again, now.config)
        if best is None or score > best.score:
            best = Best(now.step, score, row["way"])
            write_best(now.run, now.weights, best, row, now.config)
        return best


def _encoder(now: ScoreNow) -> Encoder:
    """A copy of the encoder, so that scoring cannot change what is trained."""
    with torch.random.fork_rng(devices=[]):
        vit = build_vit(now.config.vit, now.config.views.global_size)
    vit.load_state_dict(dict(now.weights))
    encoder = Encoder(vit, f"{now.run} at step {now.step}").to(now.device)
    encoder.notes = list(now.config.method.notes)
    return encoder


def matching_of(now: ScoreNow) -> Row:
    """Whether the matching module of the step matches, on rendered videos; nothing where there is none."""
    if "matching" not in now.extras:
        return {}
    matcher = build_matcher(now.config, now.extras["matching"])
    matcher = Matcher(matcher.backbone.to(now.device), matcher.match.to(now.device))
    side, patch = now.config.views.global_size, now.config.vit.patch_size
    found = measure_matching(matcher, rendered_motion(MOTIONS, max(side, 32), patch))
    return {"matching": {name: looked._asdict() for name, looked in found.items()}}


def describe(step: int, row: Row, best: Best, seconds: float) -> str:
    """One line for a person."""
    benchmark, name, score = main_score(row)
    standing = "the best so far" if best.step == step else f"best {100 * best.score:.1f} at step {best.step}"
    return (
        f"step {step} scored: {benchmark} {name} {100 * score:.1f} ({standing}), "
        f"cycle {100 * row['cycle']:.1f}%{_matching_said(row)}, in {format_seconds(seconds)}"
    )


def _matching_said(row: Row) -> str:
    """How many times chance is put on the true place, where there is a matching module."""
    if "matching" not in row:
        return ""
    times = Looked(**row["matching"][CROSS]).times_chance()
    return f", true place {times['place']:.1f}x chance ({times['moved']:.1f}x if moved)"


def write_best(run: Path, weights: Mapping[str, Tensor], best: Best, row: Row, config: Config) -> None:
    """Keep an encoder as the best; its step and score are in the metadata of the same file."""
    save_safetensors(weights, run / BEST, {"best": json.dumps(best._asdict())})
    scored = {name: row[name] for name in ("weights", "scores", "cycle")}
    card = encoder_card(config, best.step) | {"best": best._asdict() | scored}
    write_json(run / BEST_CARD, card, indent=2)


BEST_SHAPE = {"step": whole, "score": number_or_nan, "way": str}


def read_best(run: Path, say: Say = silent) -> Best | None:
    """The best encoder that a run kept; None where there is none, or none that can be read."""
    path = run / BEST
    if not path.is_file():
        return None
    try:
        with safe_open(str(path), framework="pt") as file:
            values = parse_line(file.metadata()["best"].encode(), BEST_SHAPE)
        return Best(values["step"], float(values["score"]), values["way"])
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        say(f"warning: {path} cannot be read ({error}): the best so far begins anew.")
        return None


def read_init(config: Config) -> Init | None:
    """The weights of `init`, checked against the sizes of the run; None where none is asked for."""
    if config.init is None:
        return None
    encoder = load_encoder(config.init)
    vit = encoder.backbone
    if not isinstance(vit, VisionTransformer):
        raise InputError(
            f"init={config.init} runs in the code of another package, whose weights are not ours to train: "
            "give a run, a checkpoint file or an exported folder."
        )
    _check_sizes(vit, config)
    state = dict(vit.state_dict())
    grid = config.views.global_size // config.vit.patch_size
    lines = [f"starts from {config.init} (weights {encoder.fingerprint()}), student and teacher"]
    lines += [f"  {line}" for line in encoder.report.splitlines() if line.startswith("not in the file")]
    if grid != vit.native_grid:
        with torch.no_grad():
            state["pos_embed"] = vit.positions(grid, grid).clone()
        was = vit.native_grid
        lines.append(f"  positions resized from {was}x{was} to {grid}x{grid}, as the encoder itself does")
    if vit.reach != config.vit.reach:
        both = (vit.reach, config.vit.reach)
        before, after = ("everywhere" if reach is None else f"up to {reach} patches away" for reach in both)
        lines.append(f"  its patches attended {before}, and now attend {after} (--vit.reach)")
    return Init(config.init, encoder.fingerprint(), state, lines)


def check_training(config: Config, frames: str | None, neighbors: Path | None = None) -> Config:
    """Refuse a training that could not begin; returns its settings, checked."""
    config = validate(config)
    choose_device(config.runtime.device)
    read_init(config)
    open_source(config, frames, neighbors)
    return config


def _check_sizes(vit: VisionTransformer, config: Config) -> None:
    """Refuse an encoder of another size, with the settings that would fit it."""
    found = {
        "dim": vit.dim,
        "depth": vit.depth,
        "num_heads": vit.num_heads,
        "patch_size": vit.patch_size,
        "num_registers": vit.num_registers,
    }
    wanted = {name: getattr(config.vit, name) for name in found}
    differing = [name for name in found if found[name] != wanted[name]]
    if differing:
        listed = ", ".join(f"vit.{name} {found[name]} instead of {wanted[name]}" for name in differing)
        flags = " ".join(f"--vit.{name.replace('_', '-')} {found[name]}" for name in differing)
        raise InputError(f"init={config.init} does not fit, it has {listed}: add {flags}.")
