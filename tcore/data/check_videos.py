"""Check a folder of video files before frames are taken out of them."""

import hashlib
import itertools
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tcore.config import Config
from tcore.data.check import check_kinetics, choose_videos, num_threads
from tcore.data.check_sandwich import check_sandwich
from tcore.data.findings import Findings, bars, commonest, count, for_each, name_some, say_seconds
from tcore.data.look import STILL, Look, look_alike, shrink
from tcore.data.video import Probe, VideoFiles, list_videos, probe
from tcore.errors import InputError

SECONDS = (0, 1, 2, 4, 8, 12, 25, 60, 300, 3600)
BAD_SHARE = 0.05  # of the files: more that cannot be used, and something went wrong as a whole


def check_videos(
    root: Path, config: Config, *, sample: int = 2000, full: bool = False
) -> tuple[Findings, VideoFiles | None]:
    """Check video files; also gives those that can be read, as a store."""
    names = list_videos(root)
    if not names:
        raise InputError(f"no video files under {root}.")
    findings = Findings("a folder of video files", str(root))
    chosen = [names[i] for i in choose_videos(len(names), sample, config.seed, full)]
    probes = list(for_each(lambda name: probe(root, name, full), chosen, "decoding", num_threads(config)))
    good = [found for found in probes if not found.problem]
    say_files(findings, names, probes, good, full)
    check_kinetics(findings, names)
    say_bad(findings, probes)
    if not good:
        return findings, None
    store = VideoFiles(root, good, config.fps)
    check_sandwich(findings, store, config)
    check_same(findings, root, good)
    return findings, store


def say_files(
    findings: Findings, names: Sequence[str], probes: Sequence[Probe], good: Sequence[Probe], full: bool
) -> None:
    """Counts, codecs, sizes, rates, lengths."""
    how = "from beginning to end" if full else "first, middle and last part (--full decodes everything)"
    findings.say("videos", f"{len(names):,} files", videos=len(names))
    findings.say(
        "decoded",
        f"{len(probes):,} of {len(names):,}, {how}",
        decoded={"videos": len(probes), "full": full},
    )
    if not good:
        return
    seconds = np.array([found.seconds for found in good])
    codecs = [found.codec for found in good]
    findings.say("codec", commonest(codecs), codecs={c: codecs.count(c) for c in sorted(set(codecs))})
    sizes = [f"{found.size[1]}x{found.size[0]}" for found in good]
    findings.say("size", commonest(sizes), sizes=sorted(set(sizes)))
    findings.say("rate", commonest(f"{found.fps:.4g} fps" for found in good))
    labels = [f"{a}-{b} s" for a, b in itertools.pairwise(SECONDS)]
    findings.say(
        "length",
        f"{say_seconds(seconds.min())} to {say_seconds(seconds.max())}, median "
        f"{say_seconds(float(np.median(seconds)))}, {say_seconds(float(seconds.sum()))} in all",
        *bars(seconds, SECONDS, [*labels, f"{SECONDS[-1]}+ s"]),
        hours=float(seconds.sum()) / 3600,
        files=[
            {"name": f.name, "codec": f.codec, "seconds": f.seconds, "fps": f.fps, "size": f.size}
            for f in good
        ],
    )


def say_bad(findings: Findings, probes: Sequence[Probe]) -> None:
    """Name every file that cannot be used, with the reason."""
    bad = [found for found in probes if found.problem]
    findings.figures["bad"] = {found.name: found.problem for found in bad}
    if not bad:
        return
    findings.say("bad", f"{len(bad):,}", *(f"{found.name}: {found.problem}" for found in bad[:20]))
    more = " (the first 20 are listed above, --json FILE has all)" if len(bad) > 20 else ""
    findings.add(
        "error" if len(bad) > BAD_SHARE * len(probes) else "warning",
        f"{len(bad):,} of {len(probes):,} files cannot be used ({len(bad) / len(probes):.1%}){more}: "
        "get them again, or go on without them.",
    )


def check_same(findings: Findings, root: Path, good: Sequence[Probe]) -> None:
    """Files with the same bytes, files that look alike, files that stand still."""
    by_size: defaultdict[int, list[Probe]] = defaultdict(list)
    for found in good:
        by_size[(root / found.name).stat().st_size].append(found)
    by_bytes: defaultdict[bytes, list[str]] = defaultdict(list)
    for found in (f for group in by_size.values() if len(group) > 1 for f in group):
        with (root / found.name).open("rb") as file:
            by_bytes[hashlib.file_digest(file, "sha256").digest()].append(found.name)
    exact = [group for group in by_bytes.values() if len(group) > 1]
    looks = []
    for i, found in enumerate(good):
        assert found.thumbs is not None  # only a file with a problem has none
        changes = [
            float(np.abs(found.thumbs[0].astype(np.int16) - thumb).mean()) for thumb in found.thumbs[1:]
        ]
        portrait = np.stack([shrink(thumb) for thumb in found.thumbs])
        looks.append(Look(i, 3, (found.size,), (), float(np.mean(changes)), max(changes), portrait))
    alike = [[good[video].name for video in group] for group in look_alike(looks)]
    near = [group for group in alike if not any(set(group) <= set(same) for same in exact)]
    still = [good[look.video].name for look in looks if look.most_motion < STILL]
    findings.say(
        "duplicates",
        f"{count(sum(len(group) - 1 for group in exact), 'file')} with the bytes of another; "
        f"{count(len(near), 'group')} that look alike",
        duplicates=exact,
        near_duplicates=near,
        still=still,
    )
    if exact:
        findings.add(
            "warning", f"the same file twice: {name_some([' = '.join(g) for g in exact])}; keep one of each."
        )
    if near:
        findings.add("advice", f"these look alike: {name_some([' = '.join(g) for g in near])}; look at them.")
    if still:
        findings.add(
            "warning", f"{count(len(still), 'video')} without motion ({name_some(still)}): leave them out."
        )
