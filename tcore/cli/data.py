"""The verbs that look at data: prepare, check, neighbors."""

import argparse
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from tyro.conf import Positional

from tcore.cli.parsing import Settings, Switch, at_least, parse_settings
from tcore.config import Config
from tcore.errors import InputError
from tcore.recipes import recipe
from tcore.text import to_stderr, to_stdout


@dataclass(frozen=True)
class Prepare:
    """Pack a folder of videos, frame folders or images into a store for `tcore train`."""

    source: Positional[str]
    """A folder of video files, frame folders or images (--images), at any depth; or rendered:N, varied:N."""
    store: Positional[Path | None] = None
    """New folder for the store; rerun the same command to resume."""
    fps: float | None = None
    """Frames to keep per second of video (unset: 2); for frame folders, the rate they were taken at."""
    short_side: int | None = None
    """Shrink larger frames to this short side (unset: 256 for videos; frames and images keep their size)."""
    quality: int = 90
    """JPEG quality of frames that are encoded."""
    images: Switch = False
    """Take every image as a video of one frame."""
    workers: int | None = None
    """Number of processes (unset: one per core)."""
    part: str | None = None
    """Do part i of n only (i/n), for example on another machine; --merge puts the parts together."""
    merge: Switch = False
    """Put the parts of a store together: tcore prepare STORE --merge."""
    engine: str = "processes"
    """What does the work: processes of this machine, the machines of a ray cluster, or here, one process."""

    def execute(self) -> None:
        """Pack what is there, and say what was skipped."""
        from tcore.data.prepare import merge, prepare, summarize
        from tcore.device import num_cores

        if self.merge:
            to_stdout("\n".join(summarize(merge(self.store or Path(self.source)))))
            return
        if self.store is None:
            raise InputError("tcore prepare needs a source and a store: tcore prepare SOURCE STORE.")
        store = prepare(
            Path(self.source),
            self.store,
            fps=self.fps,
            short_side=self.short_side,
            quality=self.quality,
            images=self.images,
            workers=num_cores() if self.workers is None else self.workers,
            part=_part(self.part),
            engine=self.engine,
            say=to_stderr,
        )
        if store:
            to_stdout("\n".join(summarize(store)))
        else:
            merge_them = f"tcore prepare {shlex.quote(str(self.store))} --merge"
            to_stdout(f"part {self.part} is done; when all are: {merge_them}")


def _part(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
    if not match:
        raise InputError(f"--part {text!r}: need i/n, such as 1/8.")
    return int(match[1]), int(match[2])


@dataclass(frozen=True)
class Check:
    """Find what is wrong with a frame store, video files, images or a benchmark before training on them."""

    path: Positional[Path]
    """Frame store, folder of video files or images, or a dataset laid out like a benchmark (DAVIS, ...)."""
    recipe: str = "vits16-k400"
    """Recipe whose settings the data is checked against; its settings are flags, as for tcore train."""
    kind: str = "auto"
    """What the folder holds, if auto takes it for something else: frames, images, videos or a benchmark."""
    sample: int = 2000
    """Number of videos whose frames are checked, drawn from the seed."""
    full: Switch = False
    """Check every frame of every video."""
    sheet: Path | None = None
    """Picture (PNG) to draw: training samples with their crops and masks."""
    json: Path | None = None
    """File to write all findings to, for programs."""
    config: Settings = field(default_factory=Config)

    def execute(self) -> None:
        """Print the findings; exit code 1 if training, or the benchmark, would fail."""
        from tcore.show.check import check as check_folder

        at_least(1, sample=self.sample)
        findings = check_folder(
            self.path,
            self.config,
            kind=self.kind,
            sample=self.sample,
            full=self.full,
            sheet=self.sheet,
            report=self.json,
        )
        to_stdout(findings.text())
        if findings.exit_code:
            raise SystemExit(findings.exit_code)


def check(argv: list[str]) -> None:
    """`tcore check`: the recipe decides which settings there are."""
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--recipe", default=Check.recipe, nargs="?")
    name = early.parse_known_args(argv)[0].recipe
    parse_settings(Check, argv, "tcore check", recipe(name or Check.recipe)).execute()


@dataclass(frozen=True)
class Neighbors:
    """Find the nearest other images of every image, for training with --source images."""

    store: Positional[Path]
    """A folder of images at any depth, or a packed store of images."""
    encoder: str
    """A run trained with --auxiliary none, or any other encoder that `tcore evaluate` takes."""
    k: int = 5
    """Neighbors of each image."""
    out: Path | None = None
    """File to write (unset: neighbors.safetensors in a packed store, else IMAGES.neighbors.safetensors)."""

    def execute(self) -> None:
        """Write the file of neighbors."""
        from tcore.device import choose_device
        from tcore.evaluation.encoders import load_encoder
        from tcore.evaluation.neighbors import find_all

        encoder = load_encoder(self.encoder).to(choose_device("auto"))
        to_stdout(f"neighbors: {find_all(encoder, self.store, k=self.k, out=self.out, say=to_stderr)}")
