"""What the sandwich settings make of a store: usable videos, offsets in seconds, shot cuts."""

from dataclasses import replace

import numpy as np
from jaxtyping import Bool, Int64

from tcore.config import Config
from tcore.data.findings import Findings, count, name_some, say_seconds
from tcore.data.samples import offset_in_frames
from tcore.data.sandwich import sample_sandwich, usable
from tcore.data.stores import FrameStore, list_clips

PROPOSED = (1.5, 2.5)  # seconds: what the published fractions mean in a video of 10 s
USUAL = (4.0, 25.0)  # seconds: lengths for which those fractions still mean something near it
ODD_SHARE = 0.25  # of the videos: more of another length, and seconds are proposed
CROSSING = 0.05  # of the sandwiches: more that cross a cut, and splitting is advised
DRAWS = 8  # sandwiches drawn per video to estimate that


def check_sandwich(findings: Findings, store: FrameStore, config: Config) -> Bool[np.ndarray, " videos"]:
    """Say which videos can be used and what the offsets mean in seconds."""
    long_enough = usable_videos(store, config)
    good = long_enough | (config.sandwich.short_videos == "repeat")
    need = shortest_usable(store, config)
    short = [store.names[video] for video in np.flatnonzero(~long_enough).tolist()]
    findings.say(
        "sandwich",
        f"{int(good.sum()):,} of {len(store):,} videos can be used (need {need} frames or more)",
        say_offsets(store, config),
        usable=int(good.sum()),
        shortest_usable=need,
        too_short=short,
    )
    single = int((store.lengths == 1).sum())
    if not good.any():
        longest = int(store.lengths.max())
        findings.add(
            "error",
            f"no usable video: the longest has {longest} frames, these settings need {need}; extract more "
            "frames per second, use smaller --sandwich.offset-seconds, or --sandwich.short-videos repeat.",
        )
    elif short:
        of_one = f", {single:,} of them with one frame" if single else ""
        fate = "training repeats" if config.sandwich.short_videos == "repeat" else "training leaves out"
        findings.add(
            "warning" if len(short) > 0.05 * len(store) else "advice",
            f"{count(len(short), 'video')} of fewer than {need} frames{of_one}, which {fate} "
            f"({name_some(short)}): extract more frames per second to use them.",
        )
    propose_seconds(findings, store, config, good)
    return good


def usable_videos(store: FrameStore, config: Config) -> Bool[np.ndarray, " videos"]:
    """Videos of which at least one clip is long enough."""
    sandwich = config.sandwich
    clips = list_clips(store, split_at_cuts=sandwich.cuts == "split")
    fits = usable(
        clips.length,
        current=sandwich.current,
        offset=sandwich.offset,
        offset_frames=offset_in_frames(store, config),
    )
    good = np.zeros(len(store), dtype=bool)
    good[clips.video[fits]] = True
    return good


def shortest_usable(store: FrameStore, config: Config) -> int:
    """Frames that a video needs at least."""
    lengths = np.arange(1, 1_000_000)
    fits = usable(
        lengths,
        current=config.sandwich.current,
        offset=config.sandwich.offset,
        offset_frames=offset_in_frames(store, config),
    )
    return int(lengths[fits.argmax()])


def say_offsets(store: FrameStore, config: Config) -> str:
    """The offsets in seconds and in frames."""
    fps = store.fps or config.fps
    in_frames = offset_in_frames(store, config)
    if config.sandwich.offset_seconds is not None and in_frames is not None:
        low, high = config.sandwich.offset_seconds
        return f"offset {low:g}-{high:g} s = {in_frames[0]}-{in_frames[1]} frames"
    low, high = config.sandwich.offset
    length = float(np.median(store.lengths)) / fps
    spread = f"{low:g}-{high:g} of {say_seconds(length)}"
    return f"offset {spread} (the median video) = {say_span(low * length, high * length)}"


def say_span(low: float, high: float) -> str:
    """A range of durations in one unit.

    >>> say_span(1.5, 2.5), say_span(540, 900)
    ('1.5-2.5 s', '9-15 min')
    """
    return f"{low:.2g}-{high:.2g} s" if high < 120 else f"{low / 60:.3g}-{high / 60:.3g} min"


def propose_seconds(
    findings: Findings, store: FrameStore, config: Config, good: Bool[np.ndarray, " videos"]
) -> None:
    """Propose offsets in seconds where fractions of the video make no sense."""
    fps = store.fps or config.fps
    seconds = store.lengths[good] / fps
    odd = (seconds < USUAL[0]) | (seconds > USUAL[1])
    if config.sandwich.offset_seconds is not None or not len(odd) or odd.mean() <= ODD_SHARE:
        return
    reach = int(PROPOSED[0] * fps), int(PROPOSED[1] * fps)
    fits = usable(store.lengths, current=config.sandwich.current, offset_frames=reach)
    now, then = int(good.sum()), int(fits.sum()) if reach[0] >= 1 else 0
    findings.figures["proposal"] = {"offset_seconds": PROPOSED, "usable": then}
    low, high = config.sandwich.offset
    length = float(np.median(seconds[odd]))
    fact = (
        f"{odd.mean():.0%} of the videos are much longer or shorter than 10 s: {low:g}-{high:g} of it mean "
        f"{say_span(low * length, high * length)} in one of {say_seconds(length)}."
    )
    flag = f"--sandwich.offset-seconds {PROPOSED[0]} {PROPOSED[1]}"
    if then >= 0.5 * now:
        findings.add("advice", f"{fact} Use {flag}, with which {then:,} videos are usable (now {now:,}).")
    else:
        findings.add(
            "advice",
            f"{fact} {flag} would leave {then:,} usable (now {now:,}): use longer videos, or correct --fps.",
        )


def check_cuts(findings: Findings, store: FrameStore, config: Config, chosen: list[int]) -> None:
    """Count shot cuts where the store knows them, and sandwiches that cross one."""
    videos, _ = store.all_cuts()
    if not len(videos):
        findings.say("cuts", "this store knows none (tcore prepare marks those of videos)", cuts=0)
        return
    crossing = share_crossing(store, config, chosen)
    findings.say(
        "cuts",
        f"{len(videos):,} in {len(np.unique(videos)):,} of {len(store):,} videos; "
        f"{crossing:.0%} of the sandwiches {'would ' if config.sandwich.cuts == 'split' else ''}cross one",
        cuts=len(videos),
        crossing_a_cut=crossing,
    )
    if crossing > CROSSING and config.sandwich.cuts == "ignore":
        findings.add(
            "advice",
            f"{crossing:.0%} of the sandwiches cross a shot cut, where nothing corresponds: use "
            "--sandwich.cuts split, which treats each shot as a video (published runs crossed them).",
        )


def share_crossing(store: FrameStore, config: Config, chosen: list[int]) -> float:
    """Share of some drawn sandwiches of whole videos with a cut between their first and last frame."""
    whole = replace(config, sandwich=replace(config.sandwich, cuts="ignore"))
    rng, good = np.random.default_rng(config.seed), usable_videos(store, whole)
    in_frames = offset_in_frames(store, config)
    crossed = []
    for video in (video for video in chosen if good[video]):
        cuts = store.cuts(video)
        for _ in range(DRAWS):
            drawn = sample_sandwich(
                int(store.lengths[video]),
                rng,
                current=config.sandwich.current,
                offset=config.sandwich.offset,
                offset_frames=in_frames,
                frames=config.sandwich.frames,
            )
            crossed.append(any(min(drawn) < cut <= max(drawn) for cut in cuts))
    return float(np.mean(crossed)) if crossed else 0.0


def mean_distance(store: FrameStore, config: Config) -> Int64[np.ndarray, " videos"]:
    """Frames between past and current, on average, in each video."""
    in_frames = offset_in_frames(store, config)
    if in_frames is not None:
        return np.full(len(store), round(sum(in_frames) / 2), dtype=np.int64)
    return np.rint(sum(config.sandwich.offset) / 2 * store.lengths).astype(np.int64)
