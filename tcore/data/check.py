"""`tcore check` for training data: what a folder holds, what training can use of it, what would spoil it."""

import hashlib
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, UInt8
from PIL import Image

from tcore.config import Config
from tcore.data.findings import Findings, bars, commonest, for_each
from tcore.data.images import BAD_IMAGE, image_problem, open_image
from tcore.data.probe import Probe, VideoFiles, probe
from tcore.data.source import Sampling
from tcore.data.stores import (
    VIDEO_SUFFIXES,
    FolderStore,
    FrameStore,
    PackedStore,
    list_clips,
    natural,
    walk_files,
)
from tcore.device import num_cores
from tcore.errors import InputError
from tcore.files import open_regular
from tcore.text import count, format_seconds, list_some

LENGTHS = (1, 2, 4, 7, 10, 15, 20, 25, 50, 100, 500, 1000, 5000)
MOTIONS = (0, 1, 2, 5, 10, 20, 40)
VERIFIED_BYTES = 2 * 2**30  # a packed store up to this size is compared byte by byte
STILL = 1.0  # gray levels of 255: smaller changes are JPEG noise
DRAWS = 8  # samples drawn per video, for the distance of their frames and for the cuts between them
USUAL_GAP, PROPOSED = (0.8, 5.0), (1.5, 2.5)  # seconds; the published offsets in a video of 10 s
ODD_SHARE = 0.25  # of the videos: with more of them outside the usual gap, offsets in seconds are proposed
CROSSING = 0.05  # of the samples: with more of them across a cut, splitting is proposed
BAD_SHARE = 0.05  # of the video files: more bad ones are an error
FRAMES_PER_VIDEO = 64  # frames decoded of a video, unless all are asked for
THUMB = 32  # side of the gray thumbnails that are compared

Thumb = UInt8[np.ndarray, "32 32"]


class Look(NamedTuple):
    """What decoding some frames of a video showed."""

    video: int
    name: str
    num_frames: int
    sizes: tuple[tuple[int, int], ...]
    """Distinct heights and widths."""
    unreadable: tuple[str, ...]
    """Errors of the frames that cannot be read."""
    changes: tuple[float, ...]
    """Mean changes between thumbnails of two frames, in gray levels of 255."""


def check_store(
    store: FrameStore,
    path: str,
    config: Config,
    sampling: Sampling | None,
    *,
    sample: int = 2000,
    full: bool = False,
) -> Findings:
    """Check a store of videos against the settings of a run; without a sampling, a store of photographs."""
    packed, usable, gaps = isinstance(store, PackedStore), np.ones(len(store), bool), dict[int, float]()
    chosen = choose_videos(len(store), sample, config.seed, full)
    if sampling is None:
        findings = Findings(f"{'a packed store' if packed else 'a folder'} of single images", path)
        folders = len({name.rpartition("/")[0] for name in store.names})
        findings.say("images", f"{len(store):,} in {folders:,} folders", images=len(store), folders=folders)
    else:
        findings = Findings("a packed frame store" if packed else "a folder of frame folders", path)
        say_numbers(findings, store, config)
        usable = check_usable(findings, store, sampling)
        gaps = check_samples(findings, store, config, sampling, [v for v in chosen if usable[v]])
    check_shards(findings, store, full)
    looks = take_looks(findings, store, chosen, gaps, config, full)
    check_frames(findings, looks, config, usable)
    check_motion(findings, looks)
    check_duplicates(findings, store, "video" if sampling else "image", config)
    if sampling is None and not packed:
        findings.add(
            "advice",
            "these are taken for photographs, because their sizes differ within a folder: if they are frames "
            "of videos, use --kind frames.",
        )
    return findings


def check_videos(
    root: Path, config: Config, sampling: Sampling, *, sample: int = 2000, full: bool = False
) -> tuple[Findings, VideoFiles | None]:
    """Check video files; also returns those that can be read, as a store."""
    names = sorted((p for p in walk_files(root) if Path(p).suffix.lower() in VIDEO_SUFFIXES), key=natural)
    if not names:
        raise InputError(f"no video files under {root}.")
    findings = Findings("a folder of video files", str(root))
    chosen = [names[i] for i in choose_videos(len(names), sample, config.seed, full)]
    probes = list(for_each(lambda name: probe(root, name, full), chosen, "decoding", num_threads(config)))
    how = "from beginning to end" if full else "first, middle and last part (--full decodes everything)"
    findings.say("decoded", f"{len(probes):,} of {len(names):,} files, {how}", files=len(names))
    good = _say_bad(findings, probes)
    if not good:
        return findings, None
    store = VideoFiles(root, good, config.fps)
    rates = commonest(f"{found.fps:.4g} fps" for found in good)
    findings.say("codec", f"{commonest(found.codec for found in good)}; {rates}")
    say_numbers(findings, store, config)
    usable = check_usable(findings, store, sampling)
    changes = [[change(found.thumbs[0], other) for other in found.thumbs[1:]] for found in good]
    looks = [Look(i, one.name, 3, (one.size,), (), tuple(changes[i])) for i, one in enumerate(good)]
    check_frames(findings, looks, config, usable)
    check_motion(findings, looks)
    check_duplicates(findings, store, "file", config)
    return findings, store


def _say_bad(findings: Findings, probes: list[Probe]) -> list[Probe]:
    """Name every file that cannot be used, with the reason; returns the others."""
    bad = [found for found in probes if found.problem]
    findings.figures["bad"] = {found.name: found.problem for found in bad}
    if bad:
        findings.say("bad", f"{len(bad):,}", *(f"{found.name}: {found.problem}" for found in bad[:20]))
        more = " (the first 20 are listed above, --json FILE has all)" if len(bad) > 20 else ""
        findings.add(
            "error" if len(bad) > BAD_SHARE * len(probes) else "warning",
            f"{len(bad):,} of {len(probes):,} files cannot be used ({len(bad) / len(probes):.1%}){more}: "
            "download them again, or continue without them.",
        )
    return [found for found in probes if not found.problem]


def num_threads(config: Config) -> int:
    """Threads that read: as many as training has reading processes."""
    return num_cores() if config.runtime.workers is None else config.runtime.workers


def choose_videos(number: int, sample: int, seed: int, full: bool) -> list[int]:
    """Videos to decode: all, or some drawn from the seed."""
    if full or number <= sample:
        return list(range(number))
    return sorted(np.random.default_rng(seed).choice(number, size=sample, replace=False).tolist())


def say_numbers(findings: Findings, store: FrameStore, config: Config) -> None:
    """Videos, frames, hours, lengths."""
    fps, lengths = store.fps or config.fps, store.lengths
    frames = int(lengths.sum())
    rate = f"{fps:g} frames per second{'' if store.fps else ' (assumed; set it with --fps)'}"
    findings.say(
        "videos",
        f"{len(store):,}: {frames:,} frames, {format_seconds(frames / fps)} at {rate}",
        videos=len(store),
        frames=frames,
        hours=frames / fps / 3600,
        fps=fps,
        fps_assumed=store.fps is None,
    )
    low, median, high = int(lengths.min()), float(np.median(lengths)), int(lengths.max())
    findings.say(
        "length",
        f"{low:,} to {high:,} frames, median {median:g} ({format_seconds(median / fps)})",
        *bars(lengths, LENGTHS),
        length={"min": low, "median": median, "max": high},
    )


def check_usable(findings: Findings, store: FrameStore, sampling: Sampling) -> Bool[np.ndarray, "videos"]:
    """Which videos training can use: those with a clip that is long enough; all, where short ones repeat."""
    clips = list_clips(store, sampling.split_at_cuts)
    fits = np.zeros(len(store), dtype=bool)
    fits[clips.video[sampling.usable(clips.length)]] = True
    good = fits | sampling.repeats_short
    lengths = np.arange(1, 1_000_000)
    need = int(lengths[sampling.usable(lengths).argmax()])
    short = [store.names[video] for video in np.flatnonzero(~fits).tolist()]
    findings.say(
        "usable",
        f"{int(good.sum()):,} of {len(store):,} videos can be used (need {need} frames or more)",
        usable=int(good.sum()),
        shortest_usable=need,
        too_short=short,
    )
    if not good.any():
        findings.add(
            "error",
            f"no usable video: the longest has {store.lengths.max()} frames, these settings need {need}; "
            "extract more frames per second, use smaller offsets, or --sandwich.short-videos repeat.",
        )
    elif short:
        single = int((store.lengths == 1).sum())
        of_one = f", {single:,} of them with one frame" if single else ""
        fate = "training repeats" if sampling.repeats_short else "training leaves out"
        findings.add(
            "warning" if len(short) > 0.05 * len(store) else "advice",
            f"{count(len(short), 'video')} of fewer than {need} frames{of_one}, which {fate} "
            f"({list_some(short)}): extract more frames per second to use them.",
        )
    return good


def check_samples(
    findings: Findings, store: FrameStore, config: Config, sampling: Sampling, chosen: list[int]
) -> dict[int, float]:
    """Draw samples of whole videos: how far apart their frames are, and how many cross a shot cut.

    Returns the mean distance between the frames of a sample, for each video.
    """
    fps, rng = store.fps or config.fps, np.random.default_rng(config.seed)
    gaps, crossed = dict[int, float](), list[bool]()
    for video in chosen:
        cuts, length = store.cuts(video), int(store.lengths[video])
        drawn = [sorted(sampling.frames(length, rng).values()) for _ in range(DRAWS)]
        gaps[video] = float(np.mean([np.diff(frames).mean() if len(frames) > 1 else 0 for frames in drawn]))
        crossed += [any(frames[0] < cut <= frames[-1] for cut in cuts) for frames in drawn]
    seconds = np.array(list(gaps.values())) / fps
    if len(seconds) and seconds.max() > 0:
        low, high = np.percentile(seconds, (5, 95)).tolist()
        apart = f"frames are {low:.2g} to {high:.2g} s apart on average"
        findings.say("samples", apart, gap_seconds=[low, high])
        odd = (seconds < USUAL_GAP[0]) | (seconds > USUAL_GAP[1])
        if odd.mean() > ODD_SHARE:
            typical, (least, most) = float(np.median(seconds[odd])), PROPOSED
            far = f"use --sandwich.offset-seconds {least} {most}"
            findings.add(
                "advice",
                f"in {odd.mean():.0%} of the videos the frames of a sample are {typical:.2g} s apart "
                f"(published: {least}-{most} s): "
                f"{far if typical > USUAL_GAP[1] else 'use longer videos, or correct --fps'}.",
            )
    _say_cuts(findings, store, sampling, float(np.mean(crossed)) if crossed else 0.0)
    return gaps


def _say_cuts(findings: Findings, store: FrameStore, sampling: Sampling, crossing: float) -> None:
    """Count shot cuts where the store knows them, and samples that cross one."""
    videos, _ = store.all_cuts()
    if not len(videos):
        findings.say("cuts", "this store knows none (tcore prepare marks those of videos)", cuts=0)
        return
    would = "would " if sampling.split_at_cuts else ""
    findings.say(
        "cuts",
        f"{len(videos):,} in {len(np.unique(videos)):,} of {len(store):,} videos; "
        f"{crossing:.0%} of the samples {would}cross one",
        cuts=len(videos),
        crossing_a_cut=crossing,
    )
    if crossing > CROSSING and not sampling.split_at_cuts:
        findings.add(
            "advice",
            f"{crossing:.0%} of the samples cross a shot cut, where nothing corresponds: use "
            "--sandwich.cuts split, which treats each shot as a video (published runs crossed them).",
        )


def check_shards(findings: Findings, store: FrameStore, full: bool) -> None:
    """Compare the files of a packed store with what was written: sizes, or every byte."""
    if not isinstance(store, PackedStore):
        return
    shards = store.about["shards"]
    total = sum(shard["bytes"] for shard in shards)
    thorough = full or total <= VERIFIED_BYTES
    problems = store.verify(full=thorough)
    how = "every byte compared" if thorough else "sizes compared (--full compares every byte)"
    state = count(len(problems), "problem") if problems else "all intact"
    findings.say(
        "shards",
        f"{count(len(shards), 'file')}, {total / 2**30:.1f} GiB: {state}, {how}",
        shards=len(shards),
        shard_problems=problems,
    )
    findings.add_errors([f"{text} Copy this file again, or prepare the store again." for text in problems])


def take_looks(
    findings: Findings,
    store: FrameStore,
    chosen: list[int],
    gaps: dict[int, float],
    config: Config,
    full: bool,
) -> list[Look]:
    """Decode frames of the chosen videos, and say how thoroughly."""

    def take(video: int) -> Look:
        return look_at(store, video, round(gaps.get(video, 1)), full)

    looks = list(for_each(take, chosen, "decoding", num_threads(config)))
    frames = sum(look.num_frames for look in looks)
    every = "all" if len(chosen) == len(store) else f"{len(chosen):,} of"
    capped = not full and bool((store.lengths > FRAMES_PER_VIDEO).any())
    at_most = f"; at most about {FRAMES_PER_VIDEO} frames of a video" if capped else ""
    partly = capped or len(chosen) < len(store)
    findings.say(
        "decoded",
        f"{every} {len(store):,}, {frames:,} frames{at_most}" + (" (--full decodes all)" if partly else ""),
        looked_at={"videos": len(chosen), "frames": frames, "everything": not partly},
    )
    return looks


def check_frames(findings: Findings, looks: list[Look], config: Config, usable: np.ndarray) -> None:
    """Frames that cannot be read, sizes that differ, frames smaller than a crop."""
    sizes = [f"{width}x{height}" for look in looks for height, width in look.sizes]
    known = commonest(sizes) if sizes else "unknown: no frame could be read"
    findings.say("size", known, sizes=sorted(set(sizes)))
    broken = [look for look in looks if look.unreadable]
    findings.figures["unreadable"] = {look.name: list(look.unreadable) for look in broken}
    if broken:
        lost = sum(len(look.unreadable) for look in broken)
        findings.add(
            "error" if any(usable[look.video] for look in broken) else "warning",
            f"{count(lost, 'unreadable frame')} in {len(broken):,} of {len(looks):,} decoded videos "
            f"({len(broken) / len(looks):.1%}); training uses other clips instead, and stops where there are "
            f"many: extract them again or remove these videos. "
            f"{broken[0].unreadable[0]} Videos: {list_some([look.name for look in broken])}.",
        )
    mixed = [look.name for look in looks if len(look.sizes) > 1]
    findings.figures["differing_sizes"] = mixed
    if mixed:
        findings.add(
            "warning",
            f"{count(len(mixed), 'video')} with frames of differing sizes ({list_some(mixed)}): the frames "
            "of a sample would not line up; is each folder one video? Extract them again at one size.",
        )
    side = config.views.global_size
    small = sum(min(look.sizes[0]) < side / 2 for look in looks if look.sizes)
    if small:
        findings.add(
            "advice",
            f"{small:,} of {len(looks):,} have a short side of less than half of --views.global-size {side}: "
            "crops are enlarged; use larger frames or a smaller --views.global-size.",
        )


def check_motion(findings: Findings, looks: list[Look]) -> None:
    """How much changes between two frames, and which videos stand still."""
    moving = [look for look in looks if look.changes]
    if not moving:
        return
    motion = np.array([np.mean(look.changes) for look in moving])
    still = [look.name for look in moving if max(look.changes) < STILL]
    findings.say(
        "motion",
        f"mean change between two frames, gray levels of 255: median {np.median(motion):.1f}",
        *bars(motion, MOTIONS),
        motion={"median": float(np.median(motion)), "mean": float(motion.mean())},
        still=still,
    )
    if still:
        findings.add(
            "warning",
            f"{len(still):,} of {len(looks):,} videos stand still ({list_some(still)}): they teach no "
            "correspondence; leave them out.",
        )


def check_duplicates(findings: Findings, store: FrameStore, noun: str, config: Config) -> None:
    """Videos that are stored as the same bytes."""
    groups = [[store.names[video] for video in group] for group in same_bytes(store, num_threads(config))]
    found = f"{count(sum(len(group) - 1 for group in groups), noun)} with the bytes of another"
    findings.say("duplicates", found, duplicates=groups)
    if groups:
        pairs = [" = ".join(group[:3]) + (" ..." if len(group) > 3 else "") for group in groups]
        findings.add("warning", f"{found} ({list_some(pairs)}): keep one of each, or it counts twice.")


def look_at(store: FrameStore, video: int, distance: int, full: bool) -> Look:
    """Decode frames of a video as thumbnails; changes are measured between frames this far apart."""
    length = int(store.lengths[video])
    distance = min(max(1, distance), max(1, length - 1))
    thumbs: dict[int, Thumb] = {}
    sizes, unreadable = set(), []
    wanted = choose_frames(length, distance, full)
    for index in wanted:
        try:
            (data,) = store.read_bytes(video, [index])
            size, thumbs[index] = read_thumb(data, store.where(video, index))
            sizes.add(size)
        except InputError as error:
            unreadable.append(str(error))
    pairs = ((thumbs[t], thumbs[t + distance]) for t in thumbs if t + distance in thumbs)
    changes = tuple(change(before, after) for before, after in pairs)
    return Look(video, store.names[video], len(wanted), tuple(sorted(sizes)), tuple(unreadable), changes)


def change(before: Thumb, after: Thumb) -> float:
    """Mean change between two thumbnails, in gray levels."""
    return float(np.abs(before.astype(np.int16) - after).mean())


def choose_frames(length: int, distance: int, full: bool) -> list[int]:
    """Frames to decode: all of a short video, pairs that are `distance` apart spread over a long one.

    >>> choose_frames(5, 2, full=False), len(choose_frames(7200, 1440, full=False))
    ([0, 1, 2, 3, 4], 65)
    """
    if full or length <= FRAMES_PER_VIDEO:
        return list(range(length))
    anchors = np.linspace(0, length - 1 - distance, FRAMES_PER_VIDEO // 2).astype(int).tolist()
    return sorted({0, length // 2, length - 1, *anchors, *(t + distance for t in anchors)})


def read_thumb(data: bytes, name: str) -> tuple[tuple[int, int], Thumb]:
    """Height and width of an image, and the image in gray and small; errors call it `name`."""
    try:
        with open_image(data) as image:
            size = image.height, image.width
            image.draft("L", (2 * THUMB, 2 * THUMB))  # a JPEG is decoded small: several times faster
            small = image.convert("L").resize((THUMB, THUMB), Image.Resampling.BOX)
            return size, np.asarray(small)
    except BAD_IMAGE as error:
        raise InputError(f"cannot read frame {name}: {image_problem(error)}.") from error


def same_bytes(store: FrameStore, threads: int) -> list[list[int]]:
    """Groups of videos with the same bytes; only those whose sizes in bytes agree are read."""
    by_size: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    sizes = for_each(lambda video: _size_of(store, video), range(len(store)), "comparing", threads)
    for video, size in enumerate(sizes):
        by_size[size].append(video)
    same: defaultdict[bytes, list[int]] = defaultdict(list)
    for size, group in by_size.items():
        for video in group if size and len(group) > 1 else ():
            with suppress(InputError, OSError):  # reported as unreadable
                same[_digest(store, video)].append(video)
    return [group for group in same.values() if len(group) > 1]


def _size_of(store: FrameStore, video: int) -> tuple[int, ...]:
    """Sizes in bytes, as far as they are cheap to get; none where nothing is stored."""
    length = int(store.lengths[video])
    if isinstance(store, PackedStore):
        return store.sizes(video)
    with suppress(OSError):
        if isinstance(store, FolderStore):
            return length, *(store.path(video, i).stat().st_size for i in (0, length // 2, length - 1))
    return ()


def _digest(store: FrameStore, video: int) -> bytes:
    """A hash of all that is stored of a video."""
    digest, frames = hashlib.sha256(), range(int(store.lengths[video]))
    if isinstance(store, FolderStore):
        for path in dict.fromkeys(store.path(video, frame) for frame in frames):
            with open_regular(path) as file:
                hashlib.file_digest(file, lambda: digest)
    else:
        for data in store.read_bytes(video, frames):
            digest.update(data)
    return digest.digest()
