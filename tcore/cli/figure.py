"""`tcore figure KIND`: pictures of an encoder's features, of runs, score cards and stores."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tyro.conf import Positional, UseAppendAction

from tcore.cli.parsing import WithDatasets
from tcore.errors import InputError
from tcore.text import to_stderr

if TYPE_CHECKING:
    from tcore.evaluation.encoder import Encoder
    from tcore.show.clips import Clip
    from tcore.show.propagation import PropagatedClip


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A figure: where it is written, and what is said about it."""

    out: Path
    """PNG or PDF to write."""

    def execute(self) -> None:
        """Draw it, and say what it shows and where it is."""
        from tcore.show.plotting import FORMATS, check_out

        video = (".mp4",) if isinstance(self, Propagation) else ()
        check_out(self.out, (*FORMATS, *video))
        for line in (*self.draw(), f"picture: {self.out}"):
            print(line)

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

    def title(self, source: str) -> str:
        """The title: encoder and clip."""
        from tcore.show.plotting import title_of

        return title_of(self.encoder, source)


@dataclass(frozen=True, kw_only=True)
class FromFrames(FromEncoder):
    """A picture of some images, or of frames of a video."""

    sources: Positional[tuple[str, ...]] = ()
    """Images, or a video file or folder of frames, or rendered:N (unset: rendered:0)."""
    long_side: int = 448
    """Shrink larger frames to this long side."""


@dataclass(frozen=True, kw_only=True)
class FromTimes(FromFrames):
    """A picture of frames that may be chosen."""

    frames: tuple[int, ...] = ()
    """Frames of a video by number (unset: spread over it)."""
    times: tuple[float, ...] = ()
    """The same in seconds."""

    def open(self, encoder: "Encoder", count: int | None = None) -> "Clip":
        """The frames at a size for the encoder; unnamed ones are `count` spread over the video."""
        from tcore.show.clips import Times, evenly, open_clip

        given = Times(self.frames, self.times)
        times = given if count is None or self.frames or self.times else evenly(count)
        return open_clip(self.sources, times, encoder.patch_size, long_side=self.long_side)


@dataclass(frozen=True, kw_only=True)
class Attention(FromTimes):
    """Where masked patches of the current frame look in past and future, and where the frame token looks.

    Three images or --frames are past, current and future. A run folder or default shows its patch matching
    module, any other encoder the similarity of features.
    """

    patch: UseAppendAction[tuple[tuple[int, int], ...]] = ()
    """ROW COLUMN of a patch of the current frame, from 0."""
    count: int = 4
    """Number of patches to choose if none is given: masked ones of high contrast."""
    heads: Literal["mean", "each"] = "mean"
    """Mean over the heads, or a map for each."""
    seed: int = 0
    """Which patches are masked."""

    def draw(self) -> Iterable[str]:
        """Draw the maps."""
        from tcore.show.attention import attend, attention_figure
        from tcore.show.matcher import load_matcher

        encoder = self.load()
        clip = self.open(encoder)
        matcher, size = load_matcher(self.encoder), encoder.patch_size
        found = attend(encoder, clip, matcher=matcher, patches=self.patch, count=self.count, seed=self.seed)
        title = self.title(clip.source)
        attention_figure(clip, found, self.out, patch_size=size, heads=self.heads, title=title)
        how = "cross-attention" if found.matched else "feature similarity (no patch matching module)"
        return [f"{how} of patches {', '.join(f'{r} {c}' for r, c in found.queries)}"]


@dataclass(frozen=True, kw_only=True)
class Correspondence(FromFrames):
    """Where the labels of some patches come from during propagation: their top-k sources."""

    frame: int | None = None
    """The frame whose patches are asked about (unset: the last of a rendered video, 10 of others)."""
    patch: UseAppendAction[tuple[tuple[int, int], ...]] = ()
    """ROW COLUMN of a patch, from 0."""
    count: int = 3
    """Number of patches to choose if none is given: those of high contrast."""
    protocol: str = "tcore"
    """How labels are propagated: tcore, dino, rsp or crw (rendered videos: tcore on their small grid)."""

    def draw(self) -> Iterable[str]:
        """Draw the sources, and list them."""
        from tcore.evaluation import protocols
        from tcore.show.clips import Times, is_rendered, open_clip
        from tcore.show.features import correspond, correspondence_figure

        if len(self.sources) > 1:
            raise InputError(f"one video, not {len(self.sources)}: give a video file or a folder of frames.")
        rendered = not self.sources or is_rendered(self.sources[0])
        knobs = protocols.protocol(self.protocol)
        knobs = protocols.RENDERED if rendered and knobs == protocols.TCORE else knobs
        frame = self.frame if self.frame is not None else 19 if rendered else 10
        if frame < 1:
            raise InputError(f"--frame {frame}: its labels are given; choose a later one.")
        encoder = self.load()
        held = Times((0, *range(max(1, frame - knobs.context), frame + 1)))
        clip = open_clip(self.sources, held, encoder.patch_size, long_side=self.long_side)
        found = correspond(encoder, clip, patches=self.patch, count=self.count, protocol=knobs)
        title, size = self.title(clip.source), encoder.patch_size
        correspondence_figure(clip, found, self.out, patch_size=size, protocol=knobs, title=title)
        for cell, sources in zip(found.patches, found.sources, strict=True):
            listed = ", ".join(f"{clip.names[s.frame]} ({s.row} {s.column}) {s.weight:.0%}" for s in sources)
            yield f"patch {cell[0]} {cell[1]}: {listed}"


@dataclass(frozen=True, kw_only=True)
class Pca(FromTimes):
    """Patch features of frames in a common PCA, as colors."""

    count: int = 5
    """Number of frames to spread over the video if none are given."""

    def draw(self) -> Iterable[str]:
        """Draw frames above their features."""
        from tcore.show.features import pca_figure

        encoder = self.load()
        clip = self.open(encoder, self.count)
        explained = pca_figure(encoder, clip, self.out, title=self.title(clip.source))
        return [f"three components, {explained:.0%} of the variance"]


@dataclass(frozen=True, kw_only=True)
class Propagation(FromEncoder, WithDatasets):
    """Propagated labels beside the truth: masks, parts or skeletons; a picture or an mp4."""

    source: Positional[str] = "rendered"
    """A rendered video, rendered:N, or a video file or folder of frames with --labels."""
    labels: Path | None = None
    """Mask PNG of the first frame, for a video of your own."""
    clip: str = ""
    """Name of a clip of the dataset (unset: the first one)."""
    show: tuple[Literal["objects", "parts", "joints"], ...] = ("objects", "parts", "joints")
    """What to show of a rendered video."""
    columns: int = 6
    """Frames in a row."""
    protocol: str = "tcore"
    """How labels are propagated: tcore, dino, rsp or crw."""
    long_side: int = 880
    """Shrink larger frames of a video of your own to this long side."""

    def draw(self) -> Iterable[str]:
        """Draw the labels, or write the video."""
        from tcore.show.propagation import propagation_figure, propagation_video

        clips = self._propagated()
        if self.out.suffix.lower() == ".mp4":
            return [f"{propagation_video(clips, self.out)} frames"]
        propagation_figure(clips, self.out, columns=self.columns, title=self.title(clips[0].name))
        return []

    def _propagated(self) -> "list[PropagatedClip]":
        """The clip that the flags name, with its labels propagated."""
        from tcore.evaluation import protocols
        from tcore.evaluation.benchmarks import find_benchmark
        from tcore.show import propagation
        from tcore.show.clips import is_rendered

        knobs = protocols.protocol(self.protocol)
        roots = self.datasets()
        if len(roots) > 1:
            raise InputError(f"{' and '.join(f'--{name}' for name in roots)} are mutually exclusive.")
        for name, root in roots.items():
            return [propagation.label_clip(self.load(), find_benchmark(name).open(root, knobs), self.clip)]
        if self.labels is not None:
            path, side = Path(self.source), self.long_side
            return [propagation.label_video(self.load(), path, self.labels, protocol=knobs, long_side=side)]
        if not is_rendered(self.source):
            raise InputError(f"{self.source} needs --labels FIRST.png, the mask of its first frame.")
        knobs = protocols.RENDERED if knobs == protocols.TCORE else knobs
        found = propagation.label_rendered(self.load(), self.source, knobs)
        return [found[kind] for kind in self.show]


@dataclass(frozen=True, kw_only=True)
class Neighbors(Drawn):
    """Images beside their neighbors, with the cosine under each."""

    store: Positional[Path]
    """A folder of images, or a packed store of images, whose neighbors were found."""
    images: int = 8
    """Images to show, one per row."""
    seed: int = 0
    """Which images."""
    neighbors: Path | None = None
    """File of neighbors (unset: the one in or beside the store)."""

    def draw(self) -> Iterable[str]:
        """Draw the rows."""
        from tcore.show.samples import neighbors_figure

        neighbors_figure(self.store, self.out, number=self.images, seed=self.seed, neighbors=self.neighbors)
        return []


@dataclass(frozen=True, kw_only=True)
class Dynamics(Drawn):
    """Losses, health and scores over the steps of one or several runs."""

    runs: Positional[tuple[Path, ...]]
    """Run folders; scores are there after tcore evaluate RUN --every-checkpoint or train --evaluate-every."""

    def draw(self) -> Iterable[str]:
        """Draw the curves."""
        from tcore.show.dynamics import dynamics_figure
        from tcore.show.runs import read_runs

        runs = read_runs(self.runs)
        dynamics_figure(runs, self.out, title=", ".join(run.name for run in runs))
        return []


@dataclass(frozen=True, kw_only=True)
class Sandwich(Drawn):
    """Training samples of a run: past, current, future, crops and masks (of a store: tcore check --sheet)."""

    run: Positional[Path]
    """A run folder: its settings and its frames."""
    frames: str | None = None
    """Other frames than those of the run: a store, a folder, or rendered."""
    rows: int = 4
    """Samples to show."""

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
        from tcore.evaluation.encoders import load_encoder
        from tcore.show.failures import failures_figure, find_failures, read_card
        from tcore.show.plotting import title_of

        card = read_card(self.card)
        encoder = load_encoder(self.encoder or card["encoder"]["name"])
        roots = self.datasets()
        found = find_failures(card, encoder, roots, count=self.count, say=to_stderr)
        failures_figure(found, self.out, title=f"worst clips of {title_of(encoder.name, '')}")
        for one in found:
            word = "breaks" if one.lasting else "worst"
            yield f"{one.clip}  {100 * one.score:.1f}  {word} at frame {one.breaks}"


Figure = Attention | Correspondence | Pca | Propagation | Neighbors | Dynamics | Sandwich | Failures
