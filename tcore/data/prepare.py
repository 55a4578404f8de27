"""`tcore prepare`: turn a folder of videos into a packed store; stopped at any point, it resumes exactly.

`plan.json` is there while a store is unfinished; each finished shard has a record under `parts/`.
"""

import hashlib
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from tcore.data.images import IMAGE_SUFFIXES
from tcore.data.loader import die_with_parent
from tcore.data.packed import KINDS, STORE, write_index
from tcore.data.packing import (
    Item,
    Note,
    Settings,
    Task,
    read_record,
    record_path,
    remove_leftovers,
    write_guarded,
    write_shard,
)
from tcore.data.stores import VIDEO_SUFFIXES, PackedStore, natural, walk_files, walk_frames
from tcore.errors import InputError, import_package, reason
from tcore.files import TEMPORARY, lock, misfit, number, read_csv, read_json, whole, write_json, write_text
from tcore.text import Progress, Say, csv_text, format_seconds, list_some, printable, silent

PLAN = "plan.json"
SKIPPED = "skipped.csv"
VIDEO_FPS, VIDEO_SHORT_SIDE = 2.0, 256
SHARD_VIDEOS = 256
SHARD_BYTES = 2**30  # of the source
FEWEST_SHARDS = 64  # small sources are divided further: a process works on one shard at a time
# Approximate sizes of a frame in a folder (looking up millions of them takes long) and of a rendered video.
FRAME_BYTES, RENDERED_BYTES = 50_000, 2**22
MOST_SHARDS = 2**20
Report = Callable[[Task], None]  # called for every finished shard
# The contents of plan.json; those of earlier versions have no dates.
PLANNED = {
    "settings": {
        "kind": lambda value: value in KINDS,
        "fps": lambda value: value is None or number(value),
        "short_side": lambda value: value is None or whole(value),
        "quality": whole,
    },
    "videos": whole,
    "shards": lambda value: whole(value) and value <= MOST_SHARDS,
    "listing": str,
    "dates?": str,
}
RESUME = "rerun the same tcore prepare command to resume"


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
    say: Say = silent,
) -> PackedStore | None:
    """Make a store, or resume one; None where other parts are still to be made."""
    for flag, value, low, high in (
        ("--fps", fps, 0.001, 1000),
        ("--short-side", short_side, 16, 8192),
        ("--quality", quality, 1, 100),
        ("--workers", workers, 1, 4096),
    ):
        if value is not None and not low <= value <= high:
            raise InputError(f"{flag} {value:g}: need a number between {low} and {high}.")
    if part is not None and not 1 <= part[0] <= part[1]:
        raise InputError(f"--part {part[0]}/{part[1]}: need i/n with i between 1 and n.")
    if engine not in ("processes", "ray", "here"):
        raise InputError(f"--engine {engine}: need processes, ray or here.")
    a, b = source.resolve(), store.resolve()
    if a == b or a in b.parents or b in a.parents:
        raise InputError(f"store {store} and source {source} are inside each other: give another folder.")
    root, kind, items = list_source(source, images)
    try:
        store.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write to {store}: {reason(error)}; choose another folder.") from error
    settings = _settings(kind, fps, short_side, quality)
    shards = plan_shards(items)
    if _begin(store, _plan(settings, items, len(shards))):
        return PackedStore(store)
    number, parts = part or (1, 1)
    own = f"{number}-of-{parts}"
    tasks = [
        Task(root.resolve(), store.resolve(), settings, n, tuple(shards[n]))
        for n in range(number - 1, len(shards), parts)
    ]
    with lock(store / "parts" / f"lock-{own}", f"store {store} (part {own})", "give another STORE"):
        _run(tasks, workers, engine, say)
    return None if part else merge(store)


def merge(store: Path) -> PackedStore:
    """Write the index when every shard is there, and remove what only an unfinished store needs."""
    if (store / STORE).is_file() and not (store / PLAN).is_file():
        return PackedStore(store)
    plan = _read_plan(store)
    missing = [n for n in range(plan["shards"]) if not record_path(store, n).is_file()]
    if missing:
        raise InputError(
            f"{store} is not complete: {len(missing)} of {plan['shards']} shards are missing "
            f"({list_some(missing, 10)}; "
            f"--part i/n writes i - 1, i - 1 + n, ...): run or finish the other parts first."
        )
    records = [read_record(record_path(store, n)) for n in range(plan["shards"])]
    skipped = [
        [printable(note.file), note.outcome, note.frames, printable(note.reason)]
        for _, notes in records
        for note in notes
    ]
    write_text(store / SKIPPED, csv_text([[field.name for field in fields(Note)], *skipped]))
    if not any(shard.videos for shard, _ in records):
        raise InputError(f"none of {plan['videos']} videos could be read: see {store / SKIPPED}.")
    kept, made = plan["settings"], {name: value for name, value in plan.items() if name != "dates"}
    write_index(store, [shard for shard, _ in records], kept["kind"], kept["fps"], made)
    _clean(store)
    return PackedStore(store)


def summarize(store: PackedStore) -> list[str]:
    """What a finished store holds, and what it does not, for a person."""
    root, frames = store.root, int(store.lengths.sum())
    size = sum(shard["bytes"] for shard in store.about["shards"]) / 1e6
    stored = f"{size:,.1f} MB" if size < 1000 else f"{size / 1000:,.1f} GB"
    rate = f"{format_seconds(frames / store.fps)} at {store.fps:g} frames per second, " if store.fps else ""
    lines = [f"{root}: {len(store):,} videos, {frames:,} frames, {rate}{stored}"]
    try:
        skipped = [row for _, row in read_csv(root / SKIPPED)]
        wrong = misfit(skipped, [{"file": str, "outcome": str, "reason": str}])
    except InputError as error:
        wrong = str(error)
    if wrong:
        skipped = []
        lines.append(f"{root / SKIPPED} is damaged: what was skipped is not known")
    for outcome, verb in (("skipped", "skipped"), ("partial", "kept in part")):
        notes = [note for note in skipped if note["outcome"] == outcome]
        if notes:
            lines.append(f"{verb}: {len(notes):,} ({root / SKIPPED})")
            lines += [f"  {note['file']}: {note['reason']}" for note in notes[:5]]
            lines += [f"  and {len(notes) - 5:,} more"] if len(notes) > 5 else []
    where = shlex.quote(os.fspath(root))
    if store.kind == "images":
        first = f"tcore train vits16-imagenet --auxiliary none --frames {where} --run RUN"
        lines.append("each image is a video of one frame")
        return [*lines, f"next: {first} (stage 1 of docs/images.md)"]
    return [*lines, f"next: tcore train quickstart --frames {where} --run RUN"]


def _run(tasks: list[Task], workers: int, engine: str, say: Say) -> None:
    """Write the shards that are not there yet."""
    left = [task for task in tasks if not task.record.is_file()]
    videos, waiting = (sum(len(task.items) for task in some) for some in (tasks, left))
    if waiting < videos:
        say(f"{videos - waiting:,} of {videos:,} videos were done before")
    for task in left:  # what was being read when the last run was killed is no worse than other videos
        task.trying.unlink(missing_ok=True)
    progress = Progress("videos", videos, videos - waiting, say=say)
    skipped = frames = 0

    def report(task: Task) -> None:
        nonlocal skipped, frames
        shard, _ = read_record(task.record)
        skipped += len(task.items) - len(shard.videos)
        frames += sum(len(video.sizes) for video in shard.videos)
        progress.update(progress.done + len(task.items), f"skipped {skipped:,}  frames {frames:,}")

    try:
        if left and engine == "ray":
            _run_ray(left, report)
        elif engine == "here":
            for task in left:
                write_shard(task)
                report(task)
        else:
            _run_processes(left, workers, report)
    finally:
        for task in left:
            remove_leftovers(task)


def _run_processes(tasks: list[Task], workers: int, report: Report) -> None:
    """Write every shard in a process of its own; where that dies, the shard is tried again."""
    # Neither torch nor PyAV survives a fork in any state; a fork server is clean, and imports them once.
    forks = "forkserver" in multiprocessing.get_all_start_methods()  # not on Windows
    context = multiprocessing.get_context("forkserver" if forks else "spawn")
    if forks:
        context.set_forkserver_preload(["tcore.data.packing"])
    waiting, running = tasks[::-1], dict[Future[Task], tuple[ProcessPoolExecutor, Task]]()
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                task, pool = waiting.pop(), ProcessPoolExecutor(1, context, initializer=_start_process)
                with without_main():
                    running[pool.submit(write_guarded, task)] = pool, task
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                pool, task = running.pop(future)
                pool.shutdown()
                if not isinstance(future.exception(), BrokenProcessPool):
                    report(future.result())
                elif task.trying.is_file():
                    waiting.append(task)
                else:
                    raise InputError(f"a process died before it read anything: too little memory? {RESUME}.")
    finally:
        for pool, _ in running.values():
            for process in list((pool._processes or {}).values()):
                process.terminate()
            pool.shutdown(cancel_futures=True)


def _start_process() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    die_with_parent()


@contextmanager
def without_main() -> Iterator[None]:
    """Keep processes started meanwhile from importing, and so running, the caller's script again."""
    main = sys.modules["__main__"]
    names: list[str] = [name for name in ("__file__", "__spec__") if name in vars(main)]
    before = {name: vars(main).pop(name) for name in names}
    main.__spec__ = None
    try:
        yield
    finally:
        vars(main).update(before)


def _run_ray(tasks: list[Task], report: Report) -> None:
    """Write shards by Ray tasks; the store must be on a file system that all machines share."""
    ray = import_package("ray", "--engine ray")
    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    # Ray repeats a task whose process died; after two deaths a video is skipped.
    write: Any = ray.remote(max_retries=2 * SHARD_VIDEOS)(write_guarded)
    pending = [write.remote(task) for task in tasks]
    while pending:
        done, pending = ray.wait(pending, num_returns=1)
        try:
            report(ray.get(done[0]))
        except ray.exceptions.WorkerCrashedError as error:
            raise InputError(f"a Ray task keeps dying: too little memory? {RESUME}.") from error
        except ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, OSError | InputError) else error from None


def _settings(kind: str, fps: float | None, short_side: int | None, quality: int) -> Settings:
    """Settings with the defaults of the kind: videos are reduced, frames and images stay as they are."""
    if kind in ("images", "rendered") and fps is not None:
        raise InputError(f"--fps {fps:g} does not apply to {kind}: leave it out.")
    if kind in ("videos", "rendered"):
        fps, short_side = fps or VIDEO_FPS, short_side or VIDEO_SHORT_SIDE
    return Settings(kind, fps, short_side, quality)


def _plan(settings: Settings, items: list[Item], shards: int) -> dict[str, Any]:
    """What a store is made of; equal plans make equal stores."""
    listing, dates = hashlib.sha256(), hashlib.sha256()
    for item in items:
        listing.update(os.fsencode(f"{item.name}\0{item.path}\0{len(item.images)}\0{item.bytes}\n"))
        dates.update(f"{item.changed}\n".encode())
    return {
        "settings": asdict(settings),
        "videos": len(items),
        "shards": shards,
        "listing": listing.hexdigest(),
        "dates": dates.hexdigest(),
    }


def _read_plan(store: Path) -> dict[str, Any]:
    remedy = "give a new folder, or restore the file"
    return dict(read_json(store / PLAN, "the plan of an unfinished store, ", PLANNED, remedy))


def _begin(store: Path, plan: dict[str, Any]) -> bool:
    """Claim a folder for a store and return whether it is finished already; refuse any other contents."""
    finished = (store / STORE).is_file()
    if finished:
        found = PackedStore(store).about["made"]
        found = {} if misfit(found, PLANNED) else found
    elif (store / PLAN).exists():
        found = _read_plan(store)
    elif any(not path.name.endswith(TEMPORARY) for path in store.iterdir()):
        raise InputError(f"{store} is not empty and holds no store: give a new folder.")
    else:
        write_json(store / PLAN, plan)
        found = plan
    # A finished store stays what it is when its source is copied; an unfinished one must not mix two sources.
    dated = not finished and "dates" in found
    if any(found.get(name) != plan[name] for name in plan if dated or name != "dates"):
        raise InputError(f"{store} holds another store ({_difference(found, plan)}): give a new folder.")
    if finished:
        _clean(store)
    return finished


def _difference(found: dict[str, Any], wanted: dict[str, Any]) -> str:
    """The first thing that differs between two plans."""
    there, here = (
        dict(plan.get("settings", {})) | {"videos": plan.get("videos")} for plan in (found, wanted)
    )
    differing = (
        f"{name} {there.get(name)} there, {here[name]} here" for name in here if there.get(name) != here[name]
    )
    return next(differing, "files of other names, sizes or dates")


def _clean(store: Path) -> None:
    """Remove what only an unfinished store needs, and what killed processes were writing."""
    for leftover in store.rglob(f".*{TEMPORARY}"):
        leftover.unlink(missing_ok=True)
    shutil.rmtree(store / "parts", ignore_errors=True)
    (store / PLAN).unlink(missing_ok=True)


def list_source(source: Path, images: bool) -> tuple[Path, str, list[Item]]:
    """The folder, the kind (videos, frames, images or rendered) and the videos that a source offers.

    These are video files, or else folders of frames; with `images`, every image is a video of one frame.
    """
    if str(source).startswith(("rendered:", "varied:")) and not source.exists():
        count = re.fullmatch(r"(rendered|varied):([0-9]{1,7})", str(source))
        if count is None or int(count[2]) < 1:
            raise InputError(f"{source}: need a number of videos from 1, as in rendered:512.")
        items = [Item(f"{count[1]}-{n:05d}", str(n), (), RENDERED_BYTES, 0) for n in range(int(count[2]))]
        return Path(), "rendered", items
    if not source.exists():
        raise InputError(f"source {source} does not exist: give a folder of videos or of frame folders.")
    root, files = (source.parent, [source.name]) if source.is_file() else (source, walk_files(source))
    kind = "images" if images and source.is_dir() else "videos"
    items = _list_files(root, files, kind)
    if kind == "videos" and not items and source.is_dir():
        kind = "frames"
        items = [
            Item(name, name, tuple(f), FRAME_BYTES * len(f), (source / name).stat().st_mtime_ns)
            for name, f, _ in walk_frames(source)
        ]
    if not items:
        wanted = "image" if images else "video"
        raise InputError(f"no {wanted} files under {source} (found {len(files)} other files).")
    return root, kind, items


def _list_files(root: Path, files: Sequence[str], kind: str) -> list[Item]:
    suffixes = IMAGE_SUFFIXES if kind == "images" else VIDEO_SUFFIXES
    chosen = [f for f in files if Path(f).suffix.lower() in suffixes]
    rows, regular = [], False
    for file, name in zip(chosen, unique_names(chosen), strict=True):
        path, single = (Path(file).parent, (Path(file).name,)) if kind == "images" else (Path(file), ())
        size, changed = 0, 0  # of a pipe, or of a link that leads nowhere: it is listed as skipped
        if (root / file).is_file():
            about, regular = (root / file).stat(), True
            size, changed = about.st_size, about.st_mtime_ns
        rows.append(Item(name, os.fspath(path), single, size, changed))
    return sorted(rows, key=lambda item: natural(item.name)) if regular else []


def unique_names(files: Sequence[str]) -> list[str]:
    """Paths without their suffixes; with them where two would be the same.

    >>> unique_names(["a/x.mp4", "b/x.mp4", "b/y.mp4", "b/y.avi"])
    ['a/x', 'b/x', 'b/y.mp4', 'b/y.avi']
    """
    names = [os.fspath(Path(file).with_suffix("")) for file in files]
    while True:
        counts = Counter(names)
        changed = [file if counts[name] > 1 else name for file, name in zip(files, names, strict=True)]
        if changed == names:
            return names
        names = changed


def plan_shards(items: Sequence[Item]) -> list[list[Item]]:
    """Videos in order, as many per shard as their number and sizes allow; a function of the items alone."""
    most = min(SHARD_VIDEOS, max(1, len(items) // FEWEST_SHARDS))
    shards: list[list[Item]] = []
    room, size = 0, 0
    for item in items:
        if room == 0 or size + item.bytes > SHARD_BYTES:
            shards.append([])
            room, size = most, 0
        shards[-1].append(item)
        room -= 1
        size += item.bytes
    return shards
