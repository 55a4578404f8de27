"""The verbs for people to look at: figure, report, demo, serve."""

import signal
import webbrowser
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from tyro.conf import Positional, UseAppendAction

from tcore.cli.parsing import Switch, WithDatasets, at_least
from tcore.errors import InputError
from tcore.text import to_stderr, to_stdout

if TYPE_CHECKING:
    from tcore.evaluation.encoder import Encoder
    from tcore.show.clips import Clip, Times
    from tcore.show.propagation import PropagatedClip


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A figure: where it is written, and what is said about it."""

    formats: ClassVar[tuple[str, ...]] = (".png", ".pdf")

    out: Path
    """PNG or PDF to write."""

    def execute(self) -> None:
        """Draw it, and say what it shows and where it is."""
        from tcore.show.plotting import check_out

        check_out(self.out, self.formats)
        for line in (*self.draw(), f"picture: {self.out}"):
            to_stdout(line)

    def draw(self) -> Iterable[str]:
        """Draw it; lines to print."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class FromEncoder(Drawn):
    """A picture that an encoder makes of some frames."""

    encoder: Positional[str]
    """Any encoder: a run folder, a file, default, random:vits16, timm:NAME ..."""

    def load(self) -> "Encoder":
        """The encoder."""
        from tcore.evaluation.encoders import load_encoder

        return load_encoder(self.encoder)


@dataclass(frozen=True, kw_only=True)
class FromFrames(FromEncoder):
    """A picture of some images, or of frames of a video."""

    sources: Positional[tuple[str, ...]] = ()
    """Images, or a video file or folder of frames, or rendered:N (unset: rendered:0)."""

    def open(self, encoder: "Encoder", times: "Times") -> "Clip":
        """The frames at a size for the encoder."""
        from tcore.show.clips import open_clip

        return open_clip(self.sources, times, encoder.patch_size)


@dataclass(frozen=True, kw_only=True)
class FromTimes(FromFrames):
    """A picture of frames that may be chosen."""

    frames: tuple[int, ...] = ()
    """Frames of a video by number (unset: spread over it)."""
    times: tuple[float, ...] = ()
    """The same in seconds."""


@dataclass(frozen=True, kw_only=True)
class Attention(FromTimes):
    """Where masked patches of the current frame look in past and future, and where the frame token looks.

    Three images or --frames are past, current and future. A run folder or default shows its patch matching
    module, any other encoder the similarity of features.
    """

    patch: UseAppendAction[tuple[tuple[int, int], ...]] = ()
    """ROW COLUMN of a patch of the current frame, from 0 (unset: masked ones of high contrast)."""
    heads: Literal["mean", "each"] = "mean"
    """Mean over the heads, or a map for each."""

    def draw(self) -> Iterable[str]:
        """Draw the maps."""
        from tcore.show.clips import Times
        from tcore.show.features import attention_figure, load_matcher

        encoder = self.load()
        clip, matcher = self.open(encoder, Times(self.frames, self.times)), load_matcher(self.encoder)
        found = attention_figure(
            encoder, clip, self.out, matcher=matcher, patches=self.patch, heads=self.heads
        )
        how = "cross-attention" if found.matched else "feature similarity (no patch matching module)"
        return [f"{how} of patches {', '.join(f'{r} {c}' for r, c in found.queries)}"]


@dataclass(frozen=True, kw_only=True)
class Matching(Drawn):
    """Whether the matching module of a run matches: attention on the true place and on the own object.

    On rendered videos, whose motion is known, and with --davis on clips whose objects are known; beside
    chance and beside similarity of features. The numbers are also written as JSON beside the picture.
    """

    run: Positional[str]
    """A run folder of T-CoRe, or default."""
    videos: int = 24
    """Rendered videos, held out."""
    davis: tuple[Path, ...] = ()
    """Datasets laid out like DAVIS."""
    binary: Switch = False
    """DAVIS-2016: any id above 0 is the one object."""
    batches: int = 0
    """Also the cross-entropy at masked patches over this many batches, by what the module looks at."""
    frames: str | None = None
    """With --batches: a store or folder of clips (unset: rendered videos)."""

    def draw(self) -> Iterable[str]:
        """Draw the shares, and print them."""
        from tcore.evaluation.encoders import DEFAULT
        from tcore.methods.match_quality import describe
        from tcore.show.features import load_matcher
        from tcore.show.matching import matching_figure, run_cross_entropies
        from tcore.show.plotting import title_of

        at_least(1, videos=self.videos)
        at_least(0, batches=self.batches)
        if self.binary and not self.davis:
            raise InputError("--binary goes with --davis DIR: leave it out.")
        if self.frames is not None and not self.batches:
            raise InputError(f"--frames {self.frames} goes with --batches N: leave it out.")
        names = [root.resolve().name for root in self.davis]
        for name in names:
            if names.count(name) > 1:
                raise InputError(f"--davis: two datasets are called {name}; give one of them another name.")
        if self.run != DEFAULT and not Path(self.run).is_dir():
            raise InputError(f"run {self.run} does not exist, or is not a folder: give a run of T-CoRe.")
        matcher = load_matcher(self.run)
        if matcher is None:
            raise InputError(
                f"{self.run} has no patch matching module: give a run of T-CoRe with --auxiliary both."
            )
        davis = [(root, self.binary) for root in self.davis]
        title = title_of(self.run, "does its module match?")
        found = matching_figure(matcher, self.out, title=title, videos=self.videos, davis=davis)
        for name, looked in found.items():
            yield from (f"{name}, {line}" for line in describe(looked))
        if self.batches:
            for name, value in run_cross_entropies(Path(self.run), self.frames, self.batches).items():
                yield f"cross-entropy, {name}: {value:.3f}"


@dataclass(frozen=True, kw_only=True)
class Correspondence(FromFrames):
    """Where the labels of some patches come from during propagation: their top-k sources."""

    frame: int | None = None
    """The frame whose patches are asked about (unset: the last of a rendered video, 10 of others)."""
    patch: UseAppendAction[tuple[tuple[int, int], ...]] = ()
    """ROW COLUMN of a patch, from 0 (unset: those of high contrast)."""
    protocol: str = "tcore"
    """How labels are propagated: tcore, dino, rsp or crw (rendered videos: tcore on their small grid)."""

    def draw(self) -> Iterable[str]:
        """Draw the sources, and list them."""
        from tcore.evaluation import protocols
        from tcore.show.clips import Times, rendered_number
        from tcore.show.features import correspondence_figure

        if len(self.sources) > 1:
            raise InputError(f"one video, not {len(self.sources)}: give a video file or a folder of frames.")
        rendered = not self.sources or rendered_number(self.sources[0]) is not None
        knobs = protocols.protocol(self.protocol)
        knobs = protocols.RENDERED if rendered and knobs == protocols.TCORE else knobs
        frame = self.frame if self.frame is not None else 19 if rendered else 10
        if frame < 1:
            raise InputError(f"--frame {frame}: its labels are given; choose a later one.")
        encoder = self.load()
        clip = self.open(encoder, Times((0, *range(max(1, frame - knobs.context), frame + 1))))
        found = correspondence_figure(encoder, clip, self.out, patches=self.patch, protocol=knobs)
        for (row, column), sources in found.items():
            listed = ", ".join(f"{clip.names[s.frame]} ({s.row} {s.column}) {s.weight:.0%}" for s in sources)
            yield f"patch {row} {column}: {listed}"


@dataclass(frozen=True, kw_only=True)
class Pca(FromTimes):
    """Patch features of frames in a common PCA, as colors."""

    def draw(self) -> Iterable[str]:
        """Draw frames above their features."""
        from tcore.show.clips import Times, evenly
        from tcore.show.features import pca_figure

        encoder, chosen = self.load(), bool(self.frames or self.times)
        times = Times(self.frames, self.times) if chosen else evenly(5)
        explained = pca_figure(encoder, self.open(encoder, times), self.out)
        return [f"three components, {explained:.0%} of the variance"]


@dataclass(frozen=True, kw_only=True)
class Propagation(FromEncoder, WithDatasets):
    """Propagated labels beside the truth: masks, parts or skeletons; a picture or an mp4."""

    formats: ClassVar[tuple[str, ...]] = (*Drawn.formats, ".mp4")

    source: Positional[str] = "rendered"
    """A rendered video, rendered:N, or a video file or folder of frames with --labels."""
    labels: Path | None = None
    """Mask PNG of the first frame, for a video of your own."""
    clip: str = ""
    """Name of a clip of the dataset (unset: the first one)."""
    binary: Switch = False
    """DAVIS-2016: any id above 0 is the one object."""
    show: tuple[Literal["objects", "parts", "joints"], ...] = ("objects", "parts", "joints")
    """What to show of a rendered video."""
    columns: int = 6
    """Frames in a row."""
    protocol: str = "tcore"
    """How labels are propagated: tcore, dino, rsp or crw."""

    def draw(self) -> Iterable[str]:
        """Draw the labels, or write the video."""
        from tcore.show.plotting import title_of
        from tcore.show.propagation import propagation_figure, propagation_video, with_truth

        encoder = self.load()
        clips = self._propagated(encoder)
        if self.out.suffix.lower() == ".mp4":
            return [f"{propagation_video(clips, self.out)} frames"]
        title = title_of(encoder.name, clips[0].name)
        propagation_figure(with_truth(clips), self.out, columns=self.columns, title=title)
        return []

    def _propagated(self, encoder: "Encoder") -> "list[PropagatedClip]":
        """The clip that the flags name, with its labels propagated."""
        from tcore.evaluation import protocols
        from tcore.evaluation.benchmarks import find_benchmark
        from tcore.show import propagation
        from tcore.show.clips import rendered_number

        knobs = protocols.protocol(self.protocol)
        roots = self.datasets()
        if len(roots) > 1:
            raise InputError(f"{' and '.join(f'--{name}' for name in roots)} are mutually exclusive.")
        if self.binary and "davis" not in roots:
            raise InputError("--binary goes with --davis DIR: leave it out.")
        for name, root in roots.items():
            opened = find_benchmark(name).open(root, knobs, binary=self.binary)
            return [propagation.label_clip(encoder, opened, self.clip)]
        if self.labels is not None:
            return [propagation.label_video(encoder, Path(self.source), self.labels, knobs)]
        number = rendered_number(self.source)
        if number is None:
            raise InputError(f"{self.source} needs --labels FIRST.png, the mask of its first frame.")
        knobs = protocols.RENDERED if knobs == protocols.TCORE else knobs
        clips = propagation.label_rendered(encoder, number, knobs)
        return [clip for kind in self.show for clip in clips if clip.kind == kind]


@dataclass(frozen=True, kw_only=True)
class Neighbors(Drawn):
    """Images beside their neighbors, with the cosine under each."""

    store: Positional[Path]
    """A folder of images, or a packed store of images, whose neighbors were found."""
    images: int = 8
    """Images to show, one per row."""
    seed: int = 0
    """Which images."""

    def draw(self) -> Iterable[str]:
        """Draw the rows."""
        from tcore.show.samples import neighbors_figure

        at_least(1, images=self.images)
        neighbors_figure(self.store, self.out, number=self.images, seed=self.seed)
        return []


@dataclass(frozen=True, kw_only=True)
class Dynamics(Drawn):
    """Losses, health and scores over the steps of one or several runs."""

    runs: Positional[tuple[Path, ...]]
    """Run folders; scores are there after tcore evaluate RUN --every-checkpoint or train --evaluate-every."""

    def draw(self) -> Iterable[str]:
        """Draw the curves."""
        from tcore.show.runs import dynamics_figure, read_runs

        runs = read_runs(self.runs)
        dynamics_figure(runs, self.out, title=", ".join(run.name for run in runs))
        return []


@dataclass(frozen=True, kw_only=True)
class FromRun(Drawn):
    """A picture of training samples of a run."""

    run: Positional[Path]
    """A run folder: its settings and its frames."""
    frames: str | None = None
    """Other frames than those of the run: a store, a folder, or rendered."""
    rows: int = 4
    """Samples to show."""


@dataclass(frozen=True, kw_only=True)
class Reconstruction(FromRun):
    """What a run of MAE, SiamMAE, RSP or the like restores: frames, what is seen of them, predictions."""

    def draw(self) -> Iterable[str]:
        """Draw the samples."""
        from tcore.show.reconstruction import reconstruction_figure

        at_least(1, rows=self.rows)
        found = reconstruction_figure(self.run, self.out, frames=self.frames, rows=self.rows)
        return [f"columns: {', '.join(found)}"]


@dataclass(frozen=True, kw_only=True)
class Sandwich(FromRun):
    """Training samples of a run: past, current, future, crops and masks (of a store: tcore check --sheet)."""

    def draw(self) -> Iterable[str]:
        """Draw the samples."""
        from tcore.show.samples import sandwich_figure

        return [f"{sandwich_figure(self.run, self.out, frames=self.frames, rows=self.rows)} samples"]


@dataclass(frozen=True, kw_only=True)
class Failures(Drawn, WithDatasets):
    """The worst clips of a score card, and where they break."""

    card: Positional[Path]
    """results.json of tcore evaluate, or its folder."""
    count: int = 4
    """Clips of every benchmark."""
    encoder: str | None = None
    """The encoder, if it is no longer where the card says."""

    def draw(self) -> Iterable[str]:
        """Draw the clips, and say where each breaks."""
        from tcore.evaluation.card import read_card
        from tcore.evaluation.encoders import load_encoder
        from tcore.show.plotting import title_of
        from tcore.show.propagation import failures_figure, find_failures

        card = read_card(self.card)
        encoder = load_encoder(self.encoder or card["encoder"]["name"])
        roots = self.datasets()
        found = find_failures(card, encoder, roots, count=self.count, say=to_stderr)
        failures_figure(found, self.out, title=f"worst clips of {title_of(encoder.name, '')}")
        for one in found:
            word = "breaks" if one.lasting else "worst"
            yield f"{one.labels.name}  {100 * one.score:.1f}  {word} at frame {one.breaks}"


Figure = (
    Attention
    | Matching
    | Correspondence
    | Pca
    | Propagation
    | Neighbors
    | Dynamics
    | Sandwich
    | Reconstruction
    | Failures
)


@dataclass(frozen=True)
class Report:
    """Write one file about some runs: settings, curves, scores beside published ones, figures, cost."""

    runs: Positional[tuple[Path, ...]]
    """Run folders, or folders of tcore evaluate --out."""
    out: Path
    """HTML (one self-contained file) or Markdown to write."""
    draw: bool = True
    """Draw figures that a run lacks, or that are older than its encoder, into RUN/figures."""

    def execute(self) -> None:
        """Write the report."""
        from tcore.show.report import write_report

        write_report(self.runs, self.out, draw=self.draw, say=to_stderr)
        to_stdout(f"report: {self.out}")


@dataclass(frozen=True)
class Served:
    """A server of one encoder, until Ctrl-C."""

    encoder: Positional[str] = "default"
    """A run folder, a checkpoint, timm:NAME ...; default comes with tcore."""
    host: str = "127.0.0.1"
    """Address to listen on; others than 127.0.0.1 let other machines in, which then need a token."""
    port: int = 7860
    """Port to listen on; 0 takes any that is free."""
    max_upload_mb: int = 200
    """Largest video that may be uploaded, in MB."""
    max_frames: int = 240
    """Frames of an uploaded video that are used, at most."""
    max_visitors: int = 8
    """Visitors at a time; a new one replaces the one who was away longest."""
    max_disk_gb: int = 16
    """Disk space for the files of all visitors, in GB."""
    detail: Literal["coarse", "fine", "finest"] | None = None
    """A patch covers 16, 8 or about 5 pixels of a frame (unset: fine, or coarse on a slow CPU)."""
    edges: Literal["on", "off"] = "on"
    """Masks follow the edges of a frame; off: labels of the grid are interpolated."""
    long_side: int | None = None
    """Shrink larger frames to this long side (unset: to a short side of 480)."""
    device: str = "auto"
    """auto (CUDA where there is one), cpu, cuda, cuda:1 ..., or mps, Apple's GPU (not tested on one)."""

    def _serve(self, studio: str | None = None, what: str = "page", browser: bool = False) -> None:
        if not 0 <= self.port <= 65535:
            raise InputError(f"--port {self.port}: need 0 to 65535.")
        at_least(1, max_upload_mb=self.max_upload_mb, max_frames=self.max_frames)
        at_least(1, max_visitors=self.max_visitors, max_disk_gb=self.max_disk_gb)
        # Importing torch, loading and timing a frame take seconds, or a minute on a busy machine.
        to_stderr(f"loading the encoder {self.encoder}; the address follows.")
        from tcore.demo.engine import load_engine

        try:
            from tcore.demo.label_studio import LabelStudio, check_address
            from tcore.demo.limits import Limits
            from tcore.demo.server import Demo as Page
        except ImportError as error:
            raise InputError(f"tcore demo needs {error.name}: pip install starlette uvicorn.") from error
        if studio is not None:
            check_address(studio)
        limits = Limits(self.max_upload_mb, self.max_frames, self.max_visitors, 1000 * self.max_disk_gb)
        edges: Literal["guided", "off"] = "guided" if self.edges == "on" else "off"
        engine = load_engine(self.encoder, self.detail, edges, to_stderr, self.device, self.long_side)
        server: Page | LabelStudio
        if studio is None:
            server = Page(engine, limits, self.host, self.port)
        else:
            server = LabelStudio(engine, limits, studio, self.host, self.port)
        to_stdout(f"encoder: {engine.encoder.name}")
        if server.token:
            to_stderr(
                f"warning: --host {self.host} lets other machines in. Whoever has the address with its token "
                "can use the page, and nothing is encrypted."
            )
        print(f"{what}: {server.url} (Ctrl-C stops)", flush=True)
        if browser and not webbrowser.open(server.url):
            to_stderr("no browser could be opened: open the address above.")
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # removes the temporary folder, too
        try:
            server.serve()
        except KeyboardInterrupt:
            to_stderr("stopped.")


@dataclass(frozen=True, kw_only=True)
class Serve(Served):
    """Answer over HTTP: the API that the page uses, or a machine-learning backend for Label Studio."""

    label_studio: str | None = None
    """Address of the Label Studio whose tasks are answered, as http://localhost:8080 (unset: our own API)."""

    def execute(self) -> None:
        """Serve until Ctrl-C."""
        self._serve(self.label_studio, "API" if self.label_studio is None else "backend")


@dataclass(frozen=True, kw_only=True)
class Demo(Served):
    """Paint objects on a frame in the browser and watch them being propagated through the video."""

    browser: bool = True
    """Open the page in the browser."""

    def execute(self) -> None:
        """Serve the page until Ctrl-C."""
        self._serve(browser=self.browser)
