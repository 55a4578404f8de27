"""Check a frame store: what is there, what training can use, what would spoil it."""

import itertools
from collections.abc import Sequence

import numpy as np

from tcore.config import Config
from tcore.data import kinetics
from tcore.data.check_sandwich import check_cuts, check_sandwich, mean_distance
from tcore.data.findings import NAMED, Findings, bars, commonest, count, for_each, name_some, say_seconds
from tcore.data.look import (
    FRAMES_PER_VIDEO,
    MOST_COMPARED,
    STILL,
    Look,
    look_alike,
    look_at,
    same_bytes,
)
from tcore.data.packed import shard_path
from tcore.data.stores import FolderStore, FrameStore, ImageStore, PackedStore
from tcore.device import num_cores

LENGTHS = (1, 2, 4, 7, 10, 15, 20, 25, 50, 100, 500, 1000, 5000)
VERIFIED_BYTES = 2 * 2**30  # a packed store up to this size is compared byte by byte
MOTIONS = (0, 1, 2, 5, 10, 20, 40)


def check_store(
    store: FrameStore, path: str, config: Config, *, sample: int = 2000, full: bool = False
) -> Findings:
    """Check a store of videos against the settings of a run."""
    findings = Findings(describe(store), path)
    say_numbers(findings, store, config)
    chosen = choose_videos(len(store), sample, config.seed, full)
    usable = check_sandwich(findings, store, config)
    check_cuts(findings, store, config, chosen)
    check_kinetics(findings, store.names)
    check_shards(findings, store, full)
    looks = take_looks(findings, store, chosen, mean_distance(store, config), config, full)
    check_frames(findings, store, looks, config, usable)
    check_motion(findings, store, looks)
    check_duplicates(findings, store, looks, "video", num_threads(config))
    return findings


def describe(store: FrameStore) -> str:
    """What kind of store it is."""
    return "a packed frame store" if isinstance(store, PackedStore) else "a folder of frame folders"


def check_images(path: str, store: FrameStore, config: Config, *, sample: int, full: bool) -> Findings:
    """Check a folder of photographs, for training on images as videos."""
    packed = isinstance(store, PackedStore)
    findings = Findings(f"{'a packed store' if packed else 'a folder'} of images, each one by itself", path)
    folders = {name.rpartition("/")[0] for name in store.names}
    findings.say(
        "images",
        f"{len(store):,} in {len(folders):,} folders",
        images=len(store),
        folders=len(folders),
    )
    check_shards(findings, store, full)
    chosen = choose_videos(len(store), sample, config.seed, full)
    looks = take_looks(findings, store, chosen, np.ones(len(store), np.int64), config, full)
    check_frames(findings, store, looks, config, np.ones(len(store), dtype=bool))
    check_duplicates(findings, store, looks, "image", num_threads(config))
    if not packed:
        findings.add(
            "advice",
            "these are taken for photographs, since their sizes differ within a folder: "
            "if they are frames of videos, say --kind frames.",
        )
    return findings


def num_threads(config: Config) -> int:
    """Threads that read: as many as there are reading processes in training."""
    return num_cores() if config.runtime.workers is None else config.runtime.workers


def choose_videos(count: int, sample: int, seed: int, full: bool) -> list[int]:
    """Videos to look into: all, or some drawn from the seed."""
    if full or count <= sample:
        return list(range(count))
    return sorted(np.random.default_rng(seed).choice(count, size=sample, replace=False).tolist())


def say_numbers(findings: Findings, store: FrameStore, config: Config) -> None:
    """Videos, frames, hours, lengths."""
    fps, lengths = store.fps or config.fps, store.lengths
    frames = int(lengths.sum())
    rate = f"{fps:g} frames per second" + ("" if store.fps else " (assumed; --fps says otherwise)")
    findings.say(
        "videos",
        f"{len(store):,}: {frames:,} frames, {say_seconds(frames / fps)} at {rate}",
        videos=len(store),
        frames=frames,
        hours=frames / fps / 3600,
        fps=fps,
        fps_assumed=store.fps is None,
    )
    low, median, high = int(lengths.min()), float(np.median(lengths)), int(lengths.max())
    labels = [f"{a}" if b - a == 1 else f"{a}-{b - 1}" for a, b in itertools.pairwise(LENGTHS)]
    findings.say(
        "length",
        f"{low:,} to {high:,} frames, median {median:g} ({say_seconds(median / fps)})",
        *bars(lengths, LENGTHS, [*labels, f"{LENGTHS[-1]}+"]),
        length={"min": low, "median": median, "max": high},
    )


def check_kinetics(findings: Findings, names: Sequence[str]) -> None:
    """Say how much of Kinetics-400 is there, where it is Kinetics-400."""
    found = kinetics.recognize(names)
    if found is None:
        return
    held_out = f"; {found.held_out:,} more under val or test" if found.held_out else ""
    findings.say(
        "Kinetics",
        f"{found.videos:,} of {kinetics.TRAIN_VIDEOS:,} training videos ({found.share:.1%}), "
        f"{found.classes} of {kinetics.CLASSES} classes{held_out}",
        kinetics={"videos": found.videos, "share": found.share, "classes": found.classes},
    )
    if found.held_out:
        findings.add(
            "warning",
            f"{found.held_out:,} videos lie under val or test and would be trained on: give train alone.",
        )
    if found.share < 0.99:
        findings.add(
            "warning",
            f"this looks like Kinetics-400, and {found.videos:,} of {kinetics.TRAIN_VIDEOS:,} training "
            f"videos ({found.share:.1%}) are here: published numbers were made with all of them.",
        )


def check_shards(findings: Findings, store: FrameStore, full: bool) -> None:
    """Compare the files of a packed store with what was written: sizes, or every byte."""
    if not isinstance(store, PackedStore):
        return
    shards = store.about["shards"]
    total = sum(shard["bytes"] for shard in shards)
    thorough = full or total <= VERIFIED_BYTES
    problems = store.verify() if thorough else shard_sizes(store)
    how = "every byte compared" if thorough else "sizes compared (--full compares every byte)"
    whole = count(len(problems), "problem") if problems else "all whole"
    findings.say(
        "shards",
        f"{count(len(shards), 'file')}, {total / 2**30:.1f} GiB: {whole}, {how}",
        shards=len(shards),
        shard_problems=problems,
    )
    for text in problems[:NAMED]:
        findings.add("error", f"{text} Copy this file again, or prepare the store anew.")
    if len(problems) > NAMED:
        findings.add("error", f"{len(problems) - NAMED:,} more such files; --json FILE lists them all.")


def shard_sizes(store: PackedStore) -> list[str]:
    """Shards that are missing or of another size than was written."""
    problems = []
    for number, shard in enumerate(store.about["shards"]):
        path = shard_path(store.root, number)
        found = path.stat().st_size if path.is_file() else 0
        if found != shard["bytes"]:
            problems.append(f"{path}: {found} bytes instead of {shard['bytes']}.")
    return problems


def take_looks(
    findings: Findings,
    store: FrameStore,
    chosen: list[int],
    distance: np.ndarray,
    config: Config,
    full: bool,
) -> list[Look]:
    """Look into the chosen videos, and say how thoroughly."""
    looks = list(
        for_each(
            lambda video: look_at(store, video, int(distance[video]), full),
            chosen,
            "looking",
            num_threads(config),
        )
    )
    frames = sum(look.num_frames for look in looks)
    every = "all" if len(chosen) == len(store) else f"{len(chosen):,} of"
    capped = (
        f"; at most about {FRAMES_PER_VIDEO} frames of a video"
        if not full and (store.lengths > FRAMES_PER_VIDEO).any()
        else ""
    )
    partly = bool(capped) or len(chosen) < len(store)
    findings.say(
        "looked at",
        f"{every} {len(store):,}, {frames:,} frames{capped}"
        + (" (--full looks at everything)" if partly else ""),
        looked_at={"videos": len(chosen), "frames": frames, "everything": not partly},
    )
    return looks


def check_frames(
    findings: Findings, store: FrameStore, looks: list[Look], config: Config, usable: np.ndarray
) -> None:
    """Frames that cannot be read, sizes that differ, frames smaller than a crop."""
    sizes = [f"{width}x{height}" for look in looks for height, width in look.sizes]
    findings.say(
        "size", commonest(sizes) if sizes else "unknown: no frame could be read", sizes=sorted(set(sizes))
    )
    broken = [look for look in looks if look.unreadable]
    fatal = [look for look in broken if usable[look.video]]
    findings.figures["unreadable"] = {store.names[look.video]: list(look.unreadable) for look in broken}
    if broken:
        lost = sum(len(look.unreadable) for look in broken)
        names = name_some([store.names[look.video] for look in broken])
        findings.add(
            "error" if fatal else "warning",
            f"{count(lost, 'unreadable frame')} in {len(broken):,} of {len(looks):,} videos looked at "
            f"({len(broken) / len(looks):.1%}); training puts other clips in their place, and stops where "
            f"they are many: extract them again or remove these videos. "
            f"{broken[0].unreadable[0]} Videos: {names}.",
        )
    mixed = [store.names[look.video] for look in looks if len(look.sizes) > 1]
    findings.figures["differing_sizes"] = mixed
    if mixed:
        findings.add(
            "warning",
            f"{count(len(mixed), 'video')} with frames of differing sizes ({name_some(mixed)}): past, "
            "current and future would not line up; is each folder one video? Extract them again at one size.",
        )
    small = sum(min(look.sizes[0]) < config.views.global_size / 2 for look in looks if look.sizes)
    if small:
        side = config.views.global_size
        findings.add(
            "advice",
            f"{small:,} of {len(looks):,} have a short side of less than half of --views.global-size {side}: "
            "crops are blown up; use larger frames or a smaller --views.global-size.",
        )


def check_motion(findings: Findings, store: FrameStore, looks: list[Look]) -> None:
    """How much changes between past and current, and which videos stand still."""
    motion = np.array([look.motion for look in looks if np.isfinite(look.motion)])
    if not len(motion):
        return
    labels = [f"{a}-{b}" for a, b in itertools.pairwise(MOTIONS)]
    still = [store.names[look.video] for look in looks if look.most_motion < STILL]
    findings.say(
        "motion",
        f"mean change between past and current, gray levels of 255: median {np.median(motion):.1f}",
        *bars(motion, MOTIONS, [*labels, f"{MOTIONS[-1]}+"]),
        motion={"median": float(np.median(motion)), "mean": float(motion.mean())},
        still=still,
    )
    if still:
        findings.add(
            "warning",
            f"{len(still):,} of {len(looks):,} videos stand still ({name_some(still)}): they teach no "
            "correspondence; leave them out.",
        )


def check_duplicates(
    findings: Findings, store: FrameStore, looks: list[Look], noun: str, threads: int
) -> None:
    """The same video twice, byte by byte in the whole store, or nearly the same among those looked at."""
    exact: list[list[int]] = []
    readable = {look.video for look in looks if not look.unreadable}
    if isinstance(store, FolderStore | ImageStore):
        exact = same_bytes(store, range(len(store)), threads)
    elif isinstance(store, PackedStore):  # without files of their own, those that were looked at will do
        exact = same_bytes(store, sorted(readable), threads)
    near = [group for group in look_alike(looks) if not any(set(group) <= set(same) for same in exact)]
    named = {
        kind: [[store.names[video] for video in group] for group in groups]
        for kind, groups in (("duplicates", exact), ("near_duplicates", near))
    }
    extra = sum(len(group) - 1 for group in exact)
    alike = f"{count(len(near), 'group')} that look alike"
    if len(looks) > MOST_COMPARED:
        alike = "whether others look alike is not sought among so many"
    findings.say("duplicates", f"{count(extra, noun)} with the bytes of another; {alike}", **named)
    for kind, what in (
        ("duplicates", "the bytes of another"),
        ("near_duplicates", "nearly the pictures of another"),
    ):
        groups = named[kind]
        if groups:
            surplus = sum(len(group) - 1 for group in groups)
            pairs = [" = ".join(group[:3]) + (" ..." if len(group) > 3 else "") for group in groups]
            findings.add(
                "warning" if kind == "duplicates" else "advice",
                f"{count(surplus, noun)} with {what} ({name_some(pairs)}): keep one of each"
                + (", or it counts twice." if kind == "duplicates" else "; look at them first."),
            )
