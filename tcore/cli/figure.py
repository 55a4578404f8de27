"""`tcore figure KIND`: pictures, a function for each kind; those of an encoder's frames."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from tyro.conf import Positional

from tcore.cli.figure_runs import dynamics, failures, neighbors, sandwich
from tcore.cli.parsing import check_flags, gather_values, need_out, parse, suggest
from tcore.errors import InputError

if TYPE_CHECKING:
    from tcore.evaluation.encoder import Encoder
    from tcore.show.carried import Carried

Command = TypeVar("Command")


@dataclass(frozen=True)
class AttentionFigure:
    """Where masked patches of the current frame look in past and future, and where the frame token looks."""

    encoder: Positional[str] = ""
    """A run folder or default shows its patch matching module, any other encoder similarities of features."""
    sources: Positional[tuple[str, ...]] = ()
    """Three images, or a video file or folder of frames, or rendered:N (default: rendered:0)."""
    out: Path | None = None
    """PNG or PDF to write."""
    frames: tuple[int, ...] = ()
    """Past, current and future frame of a video by number (default: at 1/4, 1/2 and 3/4 of it)."""
    times: tuple[float, ...] = ()
    """The same in seconds."""
    patch: tuple[int, ...] = ()
    """ROW COLUMN of a patch of the current frame, from 0; may be given several times."""
    count: int = 4
    """Patches to choose where none is given: masked ones of high contrast."""
    heads: Literal["mean", "each"] = "mean"
    """Mean over the heads, or a map for each."""
    long_side: int = 448
    """Larger frames go in smaller, with this long side."""
    seed: int = 0
    """Which patches are masked."""


@dataclass(frozen=True)
class CorrespondenceFigure:
    """Where the labels of some patches come from during propagation: their top-k sources."""

    encoder: Positional[str] = ""
    """Any encoder: a run folder, a file, default, random:vits16, timm:NAME ..."""
    sources: Positional[tuple[str, ...]] = ()
    """A video file or folder of frames, or rendered:N (default: rendered:0)."""
    out: Path | None = None
    """PNG or PDF to write."""
    frame: int | None = None
    """The frame that asks (default: the last one of a rendered video, frame 10 of others)."""
    patch: tuple[int, ...] = ()
    """ROW COLUMN of a patch, from 0; may be given several times."""
    count: int = 3
    """Patches to choose where none is given: those of high contrast."""
    protocol: str = "tcore"
    """How labels are carried: tcore, dino, rsp or crw (rendered videos: tcore on their small grid)."""
    long_side: int = 448
    """Larger frames go in smaller, with this long side."""


@dataclass(frozen=True)
class PcaFigure:
    """Patch features of frames in a common PCA, as colors."""

    encoder: Positional[str] = ""
    """Any encoder: a run folder, a file, default, random:vits16, timm:NAME ..."""
    sources: Positional[tuple[str, ...]] = ()
    """Images, or a video file or folder of frames, or rendered:N (default: rendered:0)."""
    out: Path | None = None
    """PNG or PDF to write."""
    frames: tuple[int, ...] = ()
    """Frames of a video by number (default: spread over it)."""
    times: tuple[float, ...] = ()
    """The same in seconds."""
    count: int = 5
    """Frames to spread over the video where none are given."""
    long_side: int = 448
    """Larger frames go in smaller, with this long side."""


@dataclass(frozen=True)
class PropagationFigure:
    """Carried labels beside the truth: masks, parts or skeletons; a picture, or an mp4."""

    encoder: Positional[str] = ""
    """Any encoder: a run folder, a file, default, random:vits16, timm:NAME ..."""
    source: Positional[str] = "rendered"
    """A rendered video, rendered:N, or a video file or folder of frames with --labels."""
    out: Path | None = None
    """PNG, PDF or MP4 to write."""
    labels: Path | None = None
    """Mask PNG of the first frame, for a video of your own."""
    davis: Path | None = None
    """A clip of a dataset like DAVIS instead."""
    vip: Path | None = None
    """A clip of VIP instead."""
    jhmdb: Path | None = None
    """A clip of JHMDB instead."""
    clip: str = ""
    """Name of the clip (default: the first one)."""
    show: tuple[Literal["objects", "parts", "joints"], ...] = ("objects", "parts", "joints")
    """What to show of a rendered video."""
    columns: int = 6
    """Frames in a row."""
    protocol: str = "tcore"
    """How labels are carried: tcore, dino, rsp or crw."""
    long_side: int = 880
    """Larger frames of a video of your own go in smaller, with this long side."""


def figure_verb(argv: list[str]) -> None:
    """`tcore figure`: draw a picture of a kind."""
    kinds = ", ".join(FIGURES)
    if not argv or argv[0] in ("-h", "--help"):
        print(f"usage: tcore figure KIND ... --out FILE.png\nkinds: {kinds} (tcore figure KIND --help)")
        return
    if argv[0] not in FIGURES:
        hint = suggest(argv[0], list(FIGURES))
        raise InputError(f"no figure {argv[0]!r}{hint} There is {kinds}.")
    FIGURES[argv[0]](argv[1:])


def _read(kind: type[Command], argv: list[str], name: str) -> Command:
    """A command with values of --patch gathered, an encoder and a file to write."""
    prog = f"tcore figure {name}"
    check_flags(argv, prog, kind())
    command = parse(kind, gather_values(argv, "--patch"), prog, kind())
    if not getattr(command, "encoder"):  # noqa: B009
        raise InputError(f"{prog} needs an encoder: {prog} ENCODER ... --out FILE.png.")
    return command


def _load(spec: str) -> "Encoder":
    from tcore.evaluation.encoders import load_encoder

    return load_encoder(spec)


def _cells(values: tuple[int, ...]) -> list[tuple[int, int]]:
    if len(values) % 2:
        raise InputError(f"--patch {' '.join(map(str, values))}: give pairs, a row and a column.")
    return list(zip(values[::2], values[1::2], strict=True))


def _attention(argv: list[str]) -> None:
    command = _read(AttentionFigure, argv, "attention")
    from tcore.show.attention import attend, attention_figure
    from tcore.show.clips import Times, open_clip
    from tcore.show.matcher import load_matcher
    from tcore.show.plotting import check_out, title_of

    out = check_out(need_out(command.out, "tcore figure attention"))
    encoder = _load(command.encoder)
    times = Times(command.frames, command.times)
    clip = open_clip(command.sources, times, encoder.patch_size, long_side=command.long_side)
    found = attend(
        encoder,
        clip,
        matcher=load_matcher(command.encoder),
        patches=_cells(command.patch),
        count=command.count,
        seed=command.seed,
    )
    title = title_of(command.encoder, clip.source)
    attention_figure(clip, found, out, patch_size=encoder.patch_size, heads=command.heads, title=title)
    how = "cross-attention" if found.matched else "feature similarity (no patch matching module)"
    print(f"{how} of patches {', '.join(f'{r} {c}' for r, c in found.queries)}; picture: {out}")


def _correspondence(argv: list[str]) -> None:
    command = _read(CorrespondenceFigure, argv, "correspondence")
    from tcore.evaluation import protocols
    from tcore.show.clips import RENDERED, Times, open_clip
    from tcore.show.features import correspond, correspondence_figure
    from tcore.show.plotting import check_out, title_of

    out = check_out(need_out(command.out, "tcore figure correspondence"))
    if len(command.sources) > 1:
        raise InputError(f"one video, not {len(command.sources)}: give a video file or a folder of frames.")
    rendered = not command.sources or command.sources[0].startswith(RENDERED)
    knobs = protocols.protocol(command.protocol)
    knobs = protocols.RENDERED if rendered and knobs == protocols.TCORE else knobs
    frame = command.frame if command.frame is not None else 19 if rendered else 10
    if frame < 1:
        raise InputError(f"--frame {frame}: its labels are given; choose a later one.")
    encoder = _load(command.encoder)
    held = Times((0, *range(max(1, frame - knobs.context), frame + 1)))
    clip = open_clip(command.sources, held, encoder.patch_size, long_side=command.long_side)
    found = correspond(encoder, clip, patches=_cells(command.patch), count=command.count, protocol=knobs)
    title = title_of(command.encoder, clip.source)
    correspondence_figure(clip, found, out, patch_size=encoder.patch_size, protocol=knobs, title=title)
    for cell, sources in zip(found.patches, found.sources, strict=True):
        told = ", ".join(f"{clip.names[s.frame]} ({s.row} {s.column}) {s.weight:.0%}" for s in sources)
        print(f"patch {cell[0]} {cell[1]}: {told}")
    print(f"picture: {out}")


def _pca(argv: list[str]) -> None:
    command = _read(PcaFigure, argv, "pca")
    from tcore.show.clips import Times, evenly, open_clip
    from tcore.show.features import pca_figure
    from tcore.show.plotting import check_out, title_of

    out = check_out(need_out(command.out, "tcore figure pca"))
    encoder = _load(command.encoder)
    given = command.frames or command.times
    times = Times(command.frames, command.times) if given else evenly(command.count)
    clip = open_clip(command.sources, times, encoder.patch_size, long_side=command.long_side)
    explained = pca_figure(encoder, clip, out, title=title_of(command.encoder, clip.source))
    print(f"three components, {explained:.0%} of the variance; picture: {out}")


def _propagation(argv: list[str]) -> None:
    command = _read(PropagationFigure, argv, "propagation")
    from tcore.show.plotting import check_out, title_of
    from tcore.show.propagation import propagation_figure, propagation_video

    out = check_out(need_out(command.out, "tcore figure propagation"), (".png", ".pdf", ".mp4"))
    clips = _carried(command, _load(command.encoder))
    if out.suffix.lower() == ".mp4":
        print(f"{propagation_video(clips, out)} frames; video: {out}")
        return
    propagation_figure(clips, out, columns=command.columns, title=title_of(command.encoder, clips[0].name))
    print(f"picture: {out}")


def _carried(command: PropagationFigure, encoder: "Encoder") -> "list[Carried]":
    """The clip that a command names, with its labels carried."""
    from tcore.evaluation import protocols
    from tcore.evaluation.benchmarks import open_benchmark
    from tcore.show import carried
    from tcore.show.clips import is_rendered

    knobs = protocols.protocol(command.protocol)
    roots = {n: root for n in ("davis", "vip", "jhmdb") if (root := getattr(command, n)) is not None}
    if len(roots) > 1:
        raise InputError(f"one clip, of one dataset: {' and '.join(f'--{name}' for name in roots)} exclude.")
    for name, root in roots.items():
        return [carried.carry_clip(encoder, open_benchmark(name, root, knobs), command.clip)]
    if command.labels is not None:
        path, side = Path(command.source), command.long_side
        return [carried.carry_video(encoder, path, command.labels, protocol=knobs, long_side=side)]
    if not is_rendered(command.source):
        raise InputError(f"{command.source} needs --labels FIRST.png, the mask of its first frame.")
    knobs = protocols.RENDERED if knobs == protocols.TCORE else knobs
    found = carried.carry_rendered(encoder, command.source, knobs)
    return [found[kind] for kind in command.show]


FIGURES: dict[str, Callable[[list[str]], None]] = {
    "attention": _attention,
    "correspondence": _correspondence,
    "pca": _pca,
    "propagation": _propagation,
    "neighbors": neighbors,
    "dynamics": dynamics,
    "sandwich": sandwich,
    "failures": failures,
}
