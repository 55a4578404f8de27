"""`tcore prepare`: a folder of videos becomes a packed store, once, whatever stops it in between."""

import csv
import hashlib
import io
import json
import math
import os
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tcore.data.engines import Tell, run_here, run_processes, run_ray
from tcore.data.packed import STORE, shard_path, write_index
from tcore.data.packing import Note, Settings, Task, read_record, record_path
from tcore.data.sandwich import usable
from tcore.data.sources import Listing, list_source, plan_shards
from tcore.data.stores import PackedStore
from tcore.errors import InputError
from tcore.files import TEMPORARY, lock, read_json, write_text

PLAN = "plan.json"  # there while a store is unfinished
SKIPPED = "skipped.csv"
VIDEO_FPS, VIDEO_SHORT_SIDE = 2.0, 256


@dataclass(frozen=True)
class Summary:
    """What a finished store holds, and what it does not."""

    store: PackedStore
    notes: list[Note]

    def lines(self) -> list[str]:
        """For a person."""
        store, root = self.store, self.store.root
        frames = int(store.lengths.sum())
        size = sum(shard["bytes"] for shard in store.about["shards"]) / 1e9
        hours = f"{frames / store.fps / 3600:.3g} hours, " if store.fps else ""
        lines = [f"{root}: {len(store):,} videos, {frames:,} frames, {hours}{size:.3g} GB"]
        short = int((~usable(store.lengths)).sum())
        if short and store.kind != "images":
            lines.append(f"{short:,} of them are too short for the usual offsets (fewer than 7 frames)")
        for outcome, verb in (("skipped", "skipped"), ("partial", "kept in part")):
            notes = [note for note in self.notes if note.outcome == outcome]
            if notes:
                lines.append(f"{verb}: {len(notes):,} ({root / SKIPPED})")
                lines += [f"  {printable(note.file)}: {note.reason}" for note in notes[:5]]
                lines += [f"  and {len(notes) - 5:,} more"] if len(notes) > 5 else []
        where = shlex.quote(os.fspath(root))
        if store.kind == "images":
            first = f"tcore train vits16-imagenet --auxiliary none --frames {where} --run RUN"
            return [
                *lines,
                "each image is a video of one frame",
                f"next: {first} (stage 1 of docs/images.md)",
            ]
        return [*lines, f"next: tcore train quickstart --frames {where} --run RUN"]


def prepare(
    source: Path,
    store: Path,
    *,
    fps: float | None = None,
    short_side: int | None = None,
    quality: int = 90,
    images: bool = False,
    workers: int = 1,
    part: tuple[int, int] | None = None,
    engine: str = "processes",
    tell: "Progress | None" = None,
) -> Summary | None:
    """Make a store, or go on with one; None where other parts are still to come."""
    _check_numbers(fps, short_side, quality, workers, part, engine)
    _keep_apart(source, store)
    if not store.is_dir() and store.exists():
        raise InputError(f"store {store} is a file: give a new folder.")
    listing = list_source(source, images)
    try:
        store.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write to {store}: {error.strerror}; choose another folder.") from error
    settings = _settings(listing.kind, fps, short_side, quality)
    shards = plan_shards(listing.items)
    plan = _plan(settings, listing, len(shards))
    if _begin(store, plan):
        return Summary(PackedStore(store), read_skipped(store))
    number, parts = part or (1, 1)
    mine = range(number - 1, len(shards), parts)
    if part:
        write_text(store / "parts" / f"{number}-of-{parts}.part", "")
    own = f"{number}-of-{parts}"
    with lock(store / "parts" / f"lock-{own}", f"store {store} (part {own})", "give another STORE"):
        _run(listing, store, settings, [(n, shards[n]) for n in mine], workers, engine, tell)
    return None if part else merge(store)


def merge(store: Path) -> Summary:
    """Make the index when every shard is there, and remove what was only needed until then."""
    if not (store / PLAN).is_file():
        if (store / STORE).is_file():
            return Summary(PackedStore(store), read_skipped(store))
        raise InputError(f"{store} holds no parts of a store: give the STORE of tcore prepare --part.")
    plan = read_json(store / PLAN)
    missing = [n for n in range(plan["shards"]) if not record_path(store, n).is_file()]
    if missing:
        raise InputError(_explain_missing(store, missing, plan["shards"]))
    records = [read_record(record_path(store, n)) for n in range(plan["shards"])]
    notes = [note for _, found in records for note in found]
    write_text(store / SKIPPED, _table(notes))
    if not any(shard.videos for shard, _ in records):
        raise InputError(f"not one of {plan['videos']} videos could be read: see {store / SKIPPED}.")
    kept = plan["settings"]
    write_index(store, [shard for shard, _ in records], kept["kind"], kept["fps"], plan)
    _clean(store)
    return Summary(PackedStore(store), notes)


def read_skipped(store: Path) -> list[Note]:
    """The lines of skipped.csv."""
    with (store / SKIPPED).open(encoding="utf-8", errors="surrogateescape", newline="") as file:
        return [Note(row[0], row[1], int(row[2]), row[3]) for row in list(csv.reader(file))[1:]]


class Progress:
    """What is told about work that goes on; the number of videos comes first."""

    def begin(self, videos: int, done: int) -> None:
        """There are so many videos, of which some were done before."""

    def tell(self, what: str, frames: int) -> None:
        """A video was taken in whole, in part, or skipped; `not` before that takes it back."""


def _run(
    listing: Listing,
    store: Path,
    settings: Settings,
    shards: Sequence[tuple[int, Any]],
    workers: int,
    engine: str,
    progress: Progress | None,
) -> None:
    """Write the shards that are not there yet."""
    left = [(n, items) for n, items in shards if not record_path(store, n).is_file()]
    tasks = [Task(listing.root.resolve(), store.resolve(), settings, n, tuple(items)) for n, items in left]
    progress = progress or Progress()
    videos = sum(len(items) for _, items in shards)
    progress.begin(videos, videos - sum(len(items) for _, items in left))
    tell: Tell = progress.tell
    try:
        if tasks and engine == "ray":
            run_ray(tasks, tell)
        elif engine == "here":
            run_here(tasks, tell)
        elif tasks:
            run_processes(tasks, workers, tell)
    finally:
        for number, _ in left:  # what a process that was stopped left behind
            path = shard_path(store, number)
            for leftover in path.parent.glob(f".{path.name}.*{TEMPORARY}"):
                leftover.unlink(missing_ok=True)


def _settings(kind: str, fps: float | None, short_side: int | None, quality: int) -> Settings:
    """Settings with the defaults of the kind: videos are reduced, frames and images stay as they are."""
    if kind == "videos":
        return Settings(kind, fps or VIDEO_FPS, short_side or VIDEO_SHORT_SIDE, quality)
    if kind in ("images", "rendered") and fps is not None:
        raise InputError(f"--fps {fps:g} has no meaning for {kind}: leave it out.")
    if kind == "rendered":
        return Settings(kind, VIDEO_FPS, short_side or VIDEO_SHORT_SIDE, quality)
    return Settings(kind, fps, short_side, quality)


def _plan(settings: Settings, listing: Listing, shards: int) -> dict[str, Any]:
    """What a store is made of; equal plans make equal stores."""
    digest = hashlib.sha256()
    for item in listing.items:
        digest.update(os.fsencode(f"{item.name}\0{item.path}\0{len(item.images)}\0{item.bytes}\n"))
    return {
        "settings": asdict(settings),
        "videos": len(listing.items),
        "shards": shards,
        "listing": digest.hexdigest(),
    }


def _begin(store: Path, plan: dict[str, Any]) -> bool:
    """Claim the folder of a store; True where the store is finished already, another one is refused."""
    if (store / STORE).is_file():
        found = PackedStore(store).about["made"]
    elif (store / PLAN).is_file():
        found = read_json(store / PLAN)
    elif store.is_dir() and any(not p.name.endswith(TEMPORARY) for p in store.iterdir()):
        raise InputError(f"{store} is not empty and holds no store: give a new folder.")
    else:
        write_text(store / PLAN, json.dumps(plan, indent=1) + "\n")
        found = plan
    if found != plan:
        raise InputError(f"{store} holds another store ({_difference(found, plan)}): give a new folder.")
    if (store / STORE).is_file():
        _clean(store)
        return True
    return False


def _difference(found: dict[str, Any], wanted: dict[str, Any]) -> str:
    """The first setting that is not the same."""
    for name, value in wanted["settings"].items():
        if (other := found.get("settings", {}).get(name)) != value:
            return f"{name} {other} there, {value} here"
    if found.get("videos") != wanted["videos"]:
        return f"{found.get('videos')} videos there, {wanted['videos']} here"
    return "files of other names or sizes"


def _explain_missing(store: Path, missing: list[int], shards: int) -> str:
    """Which parts are to be done, or done again."""
    parts = {int(p.stem.split("-of-")[1]) for p in (store / "parts").glob("*-of-*.part")}
    said = f"{store} is not complete: {len(missing)} of {shards} shards are missing"
    if len(parts) != 1:
        return f"{said}; give the same tcore prepare command again; it goes on."
    total = parts.pop()
    wanted = sorted({n % total + 1 for n in missing})
    return f"{said}, of --part {', '.join(f'{n}/{total}' for n in wanted)}: run or finish these first."


def _clean(store: Path) -> None:
    """Remove what only an unfinished store needs."""
    shutil.rmtree(store / "parts", ignore_errors=True)
    (store / PLAN).unlink(missing_ok=True)


def _table(notes: Sequence[Note]) -> str:
    """The text of skipped.csv."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["file", "outcome", "frames", "reason"])
    rows.writerows([printable(note.file), note.outcome, note.frames, note.reason] for note in notes)
    return text.getvalue()


def printable(name: str) -> str:
    """A file name whose strange bytes can be printed."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _keep_apart(source: Path, store: Path) -> None:
    """Nothing is written into a source, nor is a store its own source."""
    a, b = source.resolve(), store.resolve()
    if a == b or a in b.parents or b in a.parents:
        raise InputError(f"store {store} and source {source} lie inside each other: give another folder.")


def _check_numbers(
    fps: float | None,
    short_side: int | None,
    quality: int,
    workers: int,
    part: tuple[int, int] | None,
    engine: str,
) -> None:
    if fps is not None and not (math.isfinite(fps) and 0.001 <= fps <= 1000):
        raise InputError(f"--fps {fps:g}: need frames per second between 0.001 and 1000.")
    if short_side is not None and not 16 <= short_side <= 8192:
        raise InputError(f"--short-side {short_side}: need pixels between 16 and 8192.")
    if not 1 <= quality <= 100:
        raise InputError(f"--quality {quality}: need a JPEG quality between 1 and 100.")
    if workers < 1:
        raise InputError(f"--workers {workers}: need at least 1 process.")
    if part is not None and not 1 <= part[0] <= part[1]:
        raise InputError(f"--part {part[0]}/{part[1]}: need i/n with i between 1 and n.")
    if engine not in ("processes", "ray", "here"):
        raise InputError(f"--engine {engine}: need processes, ray or here.")
