"""The verbs around an encoder: evaluate, score, propagate, frame, export."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tyro.conf import Positional, UseAppendAction

from tcore.cli.parsing import Switch, WithDatasets, at_least
from tcore.config import Reach, Resize
from tcore.errors import InputError
from tcore.text import Say, count, print_error, to_stderr, to_stdout

if TYPE_CHECKING:
    from tcore.evaluation.card import Card
    from tcore.evaluation.encoder import Encoder
    from tcore.video.mark import Mark


@dataclass(frozen=True, kw_only=True)
class WithEncoder:
    """A command that uses an encoder."""

    encoder: Positional[str]
    """A run, a file, default, random:vits16, untrained:RUN, control:copy, timm:N, hf:N, hub:REPO:N."""
    layer: int = -1
    """Block whose output, after the final norm, gives the features; negative counts from the end."""
    reach: Reach = None
    """How many patches away a patch attends, or everywhere (unset: as the encoder was trained)."""
    positions: Resize | None = None
    """Positions on other grids: resized to the size or by a factor, or exact, where they are fixed."""
    heads: int | None = None
    """Attention heads of a checkpoint file, where weights do not tell (MoCo v3's ViT-S: 12)."""
    network: Literal["teacher", "student"] = "teacher"
    """Which network of a checkpoint file that holds both (DINO, iBOT, CrOC)."""

    def load(self) -> "Encoder":
        """The encoder."""
        from tcore.evaluation.encoders import load_encoder

        return load_encoder(
            self.encoder, self.layer, self.reach, self.positions, heads=self.heads, network=self.network
        )


@dataclass(frozen=True, kw_only=True)
class WithProtocol(WithEncoder):
    """A command that propagates labels."""

    protocol: str = "tcore"
    """How labels are propagated: tcore, dino, rsp, crw, dinov3; -fine and -finest of tcore and dinov3."""
    device: str = "auto"
    """auto (CUDA where there is one), cpu, cuda, cuda:1 ..., or mps, Apple's GPU (not tested on one)."""


@dataclass(frozen=True, kw_only=True)
class Evaluate(WithProtocol, WithDatasets):
    """Score an encoder by label propagation: masks (DAVIS), body parts (VIP), joints (JHMDB)."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """Precision of the encoder and of the features; bf16 is faster, and nearly the same."""
    rendered: Switch = False
    """Score on held-out rendered videos: masks, parts and joints; needs no dataset."""
    videos: int = 24
    """Number of rendered videos."""
    out: Path | None = None
    """Folder for results.json and saved predictions; rerun the same command to resume."""
    first_frame: Literal["repeated", "once"] | None = None
    """How the first frame counts while there are few earlier frames: repeated as published, or once."""
    skip_first: Switch = False
    """VIP: leave the first frame, whose labels are given, out of the score."""
    count_lost: Switch = False
    """JHMDB: a joint that only the prediction lost counts as wrong; published scores leave it out."""
    edges: Literal["on", "off"] = "off"
    """Masks follow the edges of a frame, as in tcore propagate; published scores are without."""
    round_border: Switch = False
    """JHMDB: joints near the top and left border stay where they are; published scores move them a cell."""
    binary: Switch = False
    """DAVIS-2016: any id above 0, 255 included, is the one object."""
    size: tuple[int, int] | None = None
    """Another input size (height, width), to save time; such numbers compare with nothing published."""
    clips: int | None = None
    """At most this many clips of every dataset, evenly spread, to save time."""
    save: Switch = False
    """Save the predictions: indexed PNGs, joints.npz."""
    every_checkpoint: Switch = False
    """Score every encoder that the run kept (encoders/step-*.safetensors); --out is RUN/checkpoints then."""
    worst: int = 0
    """Print this many of the worst clips of every benchmark."""

    def execute(self) -> None:
        """Print the score card of an encoder, or the scores of all that a run kept."""
        at_least(0, worst=self.worst)
        at_least(1, videos=self.videos)
        from tcore.evaluation.card import table, worst_clips
        from tcore.evaluation.encoders import DEFAULT
        from tcore.evaluation.evaluate import join, leave
        from tcore.evaluation.trajectory import evaluate_checkpoints, trajectory_table

        if self.every_checkpoint and self.encoder == DEFAULT:
            raise InputError("default kept no encoders on its way; a run folder of that name is ./default.")
        rank, count = join()
        say = to_stderr if count == 1 else lambda line: to_stderr(f"[{rank}] {line}")
        score = partial(self._score, say=say)
        if self.every_checkpoint:
            found = evaluate_checkpoints(
                self.encoder,
                score,
                self.out,
                layer=self.layer,
                reach=self.reach,
                positions=self.positions,
                say=say,
            )
            lines = trajectory_table(found)
        else:
            encoder = self.load()
            card = score(encoder, self.out)
            lines = [*table(card), *worst_clips(card, self.worst)]
            if rank == 0:
                to_stderr(encoder.report)
        if rank == 0:
            to_stdout("\n".join(lines))
        leave()

    def _score(self, encoder: "Encoder", out: Path | None, say: Say) -> "Card":
        from tcore.device import encoder_device
        from tcore.evaluation.evaluate import evaluate
        from tcore.evaluation.protocols import protocol

        chosen = protocol(self.protocol)
        knobs = replace(
            chosen,
            precision=self.precision,
            edges="guided" if self.edges == "on" else "off",
            first_frame=self.first_frame or chosen.first_frame,
            skip_first=self.skip_first,
            count_lost=self.count_lost,
            round_border=self.round_border,
        )
        return evaluate(
            encoder.to(encoder_device(self.device)),
            **self.datasets(),
            rendered=self.videos if self.rendered else 0,
            clips=self.clips,
            protocol=knobs,
            binary=self.binary,
            size=self.size,
            out=out,
            save=self.save,
            say=say,
        )


@dataclass(frozen=True)
class Score:
    """Score predictions in the official layout of a benchmark; prints JSON."""

    benchmark: Positional[str]
    """The benchmark that they are predictions for, by the name of its flag of `tcore evaluate`: davis, ..."""
    truth: Path
    """The dataset with the true labels."""
    predictions: Path
    """A folder per clip: PNG masks named like the frames, or joints.npz."""
    binary: Switch = False
    """DAVIS-2016: any id above 0, 255 included, is the one object."""
    skip_first: Switch = False
    """VIP: leave the first frame out of the score."""
    count_lost: Switch = False
    """JHMDB: a joint that only the prediction lost counts as wrong, instead of being left out."""

    def execute(self) -> None:
        """Print the scores of every clip."""
        from tcore.evaluation.benchmarks import find_benchmark
        from tcore.evaluation.protocols import TCORE

        benchmark = find_benchmark(self.benchmark)
        for option in ("binary", "skip_first", "count_lost"):
            if getattr(self, option) and option not in benchmark.options:
                raise InputError(f"--{option.replace('_', '-')} has no effect on {benchmark.name}.")
        if not self.predictions.is_dir():
            raise InputError(f"predictions {self.predictions}: no such folder.")
        protocol = replace(TCORE, skip_first=self.skip_first, count_lost=self.count_lost)
        opened = benchmark.open(self.truth, protocol, binary=self.binary)
        total, found = opened.score(self.predictions)
        line = "  ".join(f"{name} {100 * value:.2f}" for name, value in total.items())
        to_stderr(f"{line}  ({count(len(opened.clips), 'clip')})")
        print(json.dumps(found, indent=1))


@dataclass(frozen=True, kw_only=True)
class Propagate(WithProtocol):
    """Propagate a mask or points through a video: masks or tracks, an overlay, a confidence per frame."""

    video: Positional[tuple[Path, ...]]
    """Video files or folders of frames, one or more; a folder of video files means all of them."""
    labels: UseAppendAction[tuple[tuple[Path, ...], ...]] = ()
    """PNG masks by frame number (00012.png; first.png: --start), CSV or JSON of points, or their folder."""
    box: UseAppendAction[tuple[tuple[str, float, float, float, float], ...]] = ()
    """NAME X Y WIDTH HEIGHT in pixels: the object in this box is followed."""
    click: UseAppendAction[tuple[tuple[str, float, float], ...]] = ()
    """NAME X Y: a pixel of an object."""
    click_not: UseAppendAction[tuple[tuple[str, float, float], ...]] = ()
    """NAME X Y: a pixel that is not part of an object that has a box or clicks."""
    mark_at: str | None = None
    """The frame of boxes and clicks: its number, or a time such as 3.5s (unset: --start)."""
    start: str = "0"
    """The first frame: its number, or a time such as 3.5s."""
    end: str | None = None
    """The last frame, included (unset: the end of the video)."""
    every: int = 1
    """Take every N-th frame."""
    out: Path | None = None
    """New folder (unset: propagated/NAME-OF-VIDEO); of several videos, it holds a folder each."""
    detail: Literal["coarse", "fine", "finest"] | None = None
    """A patch covers 16, 8 or about 5 pixels of a frame (unset: fine, or coarse on a slow CPU)."""
    edges: Literal["on", "off"] = "on"
    """Masks follow the edges of a frame; off: labels of the grid are interpolated."""
    long_side: int | None = None
    """Shrink larger frames to this long side (unset: to a short side of 480)."""
    protocol: str = "tcore"
    """How labels are propagated: tcore, dino, rsp, crw or dinov3; the grid is chosen by --detail."""
    precision: Literal["fp32", "bf16"] | None = None
    """Precision of the encoder and of the features (unset: bf16 on a GPU, else fp32)."""
    search: Literal["exact", "halved"] | None = None
    """Compare all patches, or means of four first (unset: exact; halved for large grids on a CPU)."""
    overlay: bool = True
    """Write overlay.mp4."""
    format: Literal["davis", "tracks", "coco", "yolo", "cvat", "dlc"] | None = None
    """Files of the labels (unset: davis, PNG masks, or tracks, a CSV of points); dlc is DeepLabCut's."""

    def execute(self) -> None:
        """Propagate the labels through each video, and say where they are."""
        from tcore.device import encoder_device
        from tcore.video.resume import DoneError
        from tcore.video.several import find_labels, find_videos

        at_least(1, every=self.every)
        self._refuse_grid()
        given, marks = list(chain(*self.labels)), self._marks()
        if not given and not marks:
            raise InputError("nothing to follow: give --labels, --box or --click.")
        videos = find_videos(self.video)
        in_folder = len(given) == 1 and given[0].is_dir()
        if len(videos) > 1 and given and not in_folder:
            raise InputError(
                f"{len(videos)} videos: --labels must be one folder, with labels named like them."
            )
        encoder, failed = self.load().to(encoder_device(self.device)), []
        for name, video in videos.items():
            out = self.out or Path("propagated") / name
            out = out / name if self.out and len(videos) > 1 else out
            try:
                labels = find_labels(given[0], name, len(videos) == 1) if in_folder else given
                self._propagate(encoder, video, labels, marks, out)
            except DoneError as error:
                if len(videos) == 1:
                    raise
                to_stderr(str(error))
            except InputError as error:
                if len(videos) == 1 or error.exit_code == 130:
                    raise
                failed.append(name)
                print_error(f"{video}: {error}")
        if failed:
            raise InputError(f"{len(failed)} of {len(videos)} videos failed: {', '.join(failed)}.")

    def _propagate(
        self, encoder: "Encoder", video: Path, labels: "list[Path]", marks: "list[Mark]", out: Path
    ) -> None:
        from tcore.evaluation.protocols import protocol
        from tcore.video.propagate_video import propagate_video_file

        with first_interrupt("stopping after this frame; Ctrl-C again stops at once.") as interrupted:
            done = propagate_video_file(
                encoder,
                video,
                labels,
                out,
                marks=marks,
                mark_at=self.mark_at,
                start=self.start,
                end=self.end,
                every=self.every,
                protocol=protocol(self.protocol),
                precision=self.precision,
                detail=self.detail,
                edges=self.edges == "on",
                long_side=self.long_side,
                search=self.search,
                overlay=self.overlay,
                form=self.format,
                interrupted=interrupted,
                say=to_stderr,
            )
        to_stdout(f"{out}: {done.frames} frames, mean confidence {done.confidence:.3f}")

    def _refuse_grid(self) -> None:
        """A protocol's own grid is for benchmarks: here --detail says how fine it is."""
        from tcore.evaluation.protocols import FINER

        name, _, grid = self.protocol.partition("-")
        if grid in FINER:
            raise InputError(
                f"--protocol {self.protocol}: the grid is chosen by --detail here; use --protocol {name} "
                f"--detail {grid}."
            )

    def _marks(self) -> "list[Mark]":
        """Boxes and clicks by the name of their object, in the order in which names appear."""
        from tcore.video.mark import Mark

        boxes = {name: box for name, *box in self.box}
        if len(boxes) < len(self.box):
            raise InputError("two boxes for one object: every --box needs its own NAME.")
        on, off = (
            {name: tuple((x, y) for one, x, y in clicks if one == name) for name, _, _ in clicks}
            for clicks in (self.click, self.click_not)
        )
        names = list(dict.fromkeys([*boxes, *on]))
        for name in off:
            if name not in names:
                raise InputError(f"--click-not {name}: that object has no --box and no --click.")
        if self.mark_at is not None and not names:
            raise InputError(f"--mark-at {self.mark_at} has no effect without --box or --click.")
        found = []
        for name in names:
            box = boxes.get(name)
            corners = None if box is None else (box[0], box[1], box[2], box[3])
            found.append(Mark(name, corners, on.get(name, ()), off.get(name, ())))
        return found


@dataclass(frozen=True)
class FrameOf:
    """Write one frame of a video to a picture, to paint a mask over it or to read off coordinates."""

    video: Positional[Path]
    """A video file, or a folder of frames."""
    out: Positional[Path]
    """New file: .png or .jpg."""
    at: str = "0"
    """The number of the frame, or a time such as 3.5s."""

    def execute(self) -> None:
        """Write the picture."""
        from PIL import Image

        from tcore.data.part import open_part
        from tcore.files import atomic

        if self.out.suffix.lower() not in (".png", ".jpg", ".jpeg"):
            raise InputError(f"{self.out}: need a name that ends in .png or .jpg.")
        if self.out.exists():
            raise InputError(f"{self.out} already exists: give another name.")
        video = open_part(self.video, self.at, start_is="--at")
        frame = next(iter(video))
        with atomic(self.out) as temporary:
            kind = "PNG" if self.out.suffix.lower() == ".png" else "JPEG"
            Image.fromarray(frame).save(temporary, format=kind)
        to_stdout(f"{self.out}: frame {video.number(0)}, {frame.shape[1]}x{frame.shape[0]}")


@contextmanager
def first_interrupt(text: str) -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed; only the second time it ends the program at once."""
    pressed = False

    def note(number: int, frame: object) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True
        to_stderr(text)

    from tcore.device import on_signals

    with on_signals(("SIGINT",), note):
        yield lambda: pressed


@dataclass(frozen=True, kw_only=True)
class Export(WithEncoder):
    """Write an encoder for torch, timm, transformers or an ONNX runtime."""

    out: Positional[Path]
    """New file (.safetensors, .pth, .onnx), new folder for timm, hf and hub, or folder for default."""
    format: str | None = None
    """safetensors, torch, timm, hf, hub (with a model card), onnx, or default (as in the package)."""
    license: str | None = None
    """With --format hub: the license of the weights, such as apache-2.0."""
    results: Path | None = None
    """With --format hub: results.json of tcore evaluate --out, whose scores go into the model card."""

    def execute(self) -> None:
        """Write the files, and say how to load them."""
        from tcore.evaluation.export import check_out, export, ship

        if self.format == "default":
            for path in ship(self.load(), self.out):
                to_stdout(f"{path}: {path.stat().st_size / 2**20:.1f} MiB")
            print('in the folder tcore/encoders of a checkout it is load_encoder("default")')
            return
        chosen = check_out(self.out, self.format)  # before a large encoder is read
        encoder = self.load()
        done = export(encoder, self.out, chosen, self.license, self.results)
        for line in (*encoder.report.splitlines(), *done.notes):
            to_stdout(line)
        to_stdout(f"{done.path}: {done.size / 2**20:.1f} MiB, {chosen}")
        to_stdout(f"load it: {done.load}")
