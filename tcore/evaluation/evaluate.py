"""Encoder x benchmarks -> score card: resumable, with every setting that the numbers depend on."""

import dataclasses
import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from tcore.device import world
from tcore.errors import InputError
from tcore.evaluation import benchmarks
from tcore.evaluation.benchmarks.benchmark import Benchmark, Result, Source
from tcore.evaluation.card import Card, device_name, differences, peak_memory, versions
from tcore.evaluation.encoder import Encoder
from tcore.evaluation.encoders import as_encoder
from tcore.evaluation.intervals import bootstrap
from tcore.evaluation.masks import encode_ids
from tcore.evaluation.protocols import TCORE, Protocol
from tcore.evaluation.resize import Size
from tcore.evaluation.run_clip import write_behind
from tcore.files import atomic, check_writable, digest, read_json, write_json
from tcore.rendezvous import LostPeerError, meet
from tcore.text import Progress, Say, did_you_mean, silent, to_stderr

JOIN = 600.0  # seconds that the processes wait for one another to start
WAIT = timedelta(hours=12)  # how long a process that has finished waits for the others


def evaluate(
    encoder: Encoder | str | Path,
    *,
    clips: int | None = None,
    protocol: Protocol = TCORE,
    binary: bool = False,
    size: Size | None = None,
    alone: bool = False,
    out: str | Path | None = None,
    save: bool = False,
    say: Say = silent,
    **sources: Source | None,
) -> Card:
    """Score an encoder on benchmarks by their names; with `out`, clip by clip on disk, so that it can resume.

    `evaluate("default", davis="DAVIS", vip="VIP", jhmdb="JHMDB", rendered=24)`: folders of datasets, and a
    number of held-out rendered videos. `clips` takes at most this many clips of a dataset, evenly spread.
    Processes started by torchrun share the clips, unless this one works `alone`.
    """
    chosen = choose(sources)
    for option, value in (("size", size), ("binary", binary)):
        takers = [b for b in benchmarks.all_benchmarks() if option in b.options]
        if value and not chosen.keys() & set(takers):
            raise InputError(f"--{option} goes with {' or '.join(f'--{taker.name}' for taker in takers)}.")
    if save and out is None:
        raise InputError("predictions can only be saved where there is an out folder.")
    opened = [
        benchmark.open(
            source,
            protocol,
            binary=binary and "binary" in benchmark.options,
            size=size if "size" in benchmark.options else None,
            most=clips if benchmark.on_disk else None,
        )
        for benchmark, source in chosen.items()
    ]
    folder = None if out is None else Path(out)
    if folder is not None:
        check_writable(folder)
    rank, count = place = (0, 1) if alone else join()
    encoder = as_encoder(encoder)
    device, identity = next(encoder.parameters()).device, encoder.identity()
    found = {b.name: run_benchmark(b, encoder, identity, folder, save, say, place) for b in opened}
    card: Card = {
        "encoder": identity,
        "benchmarks": found,
        "versions": versions(),
        "device": device_name(device),
        "processes": count,
        "seconds": round(sum(x["seconds"] for b in found.values() for x in b["clips"].values()), 3),
        "peak_memory": peak_memory(device),
    }
    if folder is not None and rank == 0:
        write_json(folder / "results.json", card)
    return card


def choose(sources: dict[str, Source | None]) -> dict[type[Benchmark], Source]:
    """The benchmarks that have a source, in the order of the list; an old name is accepted with a note."""
    known = benchmarks.all_benchmarks()
    for benchmark in known:
        if benchmark.old_name in sources:
            to_stderr(f"tcore: {benchmark.old_name}= of evaluate is now called {benchmark.name}=.")
            sources = sources | {benchmark.name: sources[benchmark.old_name]}
    names = {name for benchmark in known for name in (benchmark.name, benchmark.old_name)}
    for name in sources.keys() - names:
        raise InputError(f"evaluate() has no argument {name!r}.{did_you_mean(name, names)}")
    chosen = {benchmark: source for benchmark in known if (source := sources.get(benchmark.name))}
    if not chosen:
        flags = ", ".join(f"--{b.name} DIR" if b.on_disk else f"--{b.name}" for b in known)
        raise InputError(f"nothing to evaluate on: give one or more of {flags}.")
    return chosen


def run_benchmark(
    benchmark: Benchmark,
    encoder: Encoder,
    identity: dict[str, Any],
    out: Path | None,
    save: bool,
    say: Say,
    place: tuple[int, int],
) -> Card:
    """All clips of one benchmark; results that are on disk are not computed again."""
    rank, count = place
    own = sorted(benchmark.clips, key=lambda clip: -clip.length)[rank::count]
    mine: dict[str, Any] = {}
    if out is not None and benchmark.old_name and (old := out / "clips" / benchmark.old_name).is_dir():
        to_stderr(f"tcore: results in {old} are reused; {old.name} is now called {benchmark.name}.")
    progress = Progress(benchmark.name, len(own), say=say, every=0)
    for clip in own:
        truth, frames = benchmark.fingerprints(clip, encoder.patch_size)
        key = clip_key(benchmark, identity, truth, frames)
        result = None if out is None else read_result(out / "clips", benchmark, clip.name, key, save)
        if result is None:
            begun = time.perf_counter()
            with write_behind(predictions_saver((out or Path()) / "predictions" / benchmark.name)) as write:
                result = benchmark.run(encoder, clip, write if save else None)
            result["seconds"] = round(time.perf_counter() - begun, 3)
            if out is not None:
                path = out / "clips" / benchmark.name / f"{clip.name}.json"
                kept = {
                    "key": key,
                    "saved": save,
                    "sha256": digest(result, sort_keys=False),
                    "result": result,
                }
                write_json(path, kept, indent=None)
        mine[clip.name] = (result, truth)
        progress.advance(f"{clip.name}  {result['seconds']} s")
    found = gather(mine) if count > 1 else mine
    results = {clip.name: found[clip.name][0] for clip in benchmark.clips}
    each = list(results.values())
    truths = "".join(found[clip.name][1] for clip in benchmark.clips)
    return {
        "scores": benchmark.summarize(each),
        "interval": bootstrap(len(each), lambda chosen: benchmark.summarize(each[i] for i in chosen)),
        "clips_from": benchmark.clips_from,
        "protocol": dataclasses.asdict(benchmark.protocol),
        "binary": benchmark.binary,
        "truth": hashlib.sha256(truths.encode()).hexdigest()[:16],
        "clips": {name: per_clip(benchmark, result) for name, result in results.items()},
        "differs": differences(benchmark),
    }


def per_clip(benchmark: Benchmark, result: Result) -> Card:
    """What the card says of one clip."""
    shown: Card = {
        name: result[name] for name in ("frames", "input", "grid", "seconds", "objects") if name in result
    }
    try:
        return benchmark.summarize([result]) | shown
    except InputError:  # nothing to score in this clip alone
        return shown


def clip_key(benchmark: Benchmark, identity: dict[str, Any], truth: str, frames: str) -> str:
    """Everything that a clip's result depends on; another key means another result."""
    protocol = dataclasses.asdict(benchmark.protocol)
    for name, only in (("search", "exact"), ("edges", "off")):
        if protocol[name] == only:
            del protocol[name]  # earlier versions had no other
    knobs = {
        "weights": identity["weights"],
        "benchmark": benchmark.old_name or benchmark.name,  # so that results of earlier versions are found
        "protocol": protocol,
        "binary": benchmark.binary,
        "size": benchmark.fixed_size,
        "truth": truth,
        "frames": frames,
    }
    return digest(knobs)


def read_result(folder: Path, benchmark: Benchmark, clip: str, key: str, save: bool) -> Any:
    """The result that is on disk, if it would come out again (and its predictions are there when wanted)."""
    for name in filter(None, (benchmark.name, benchmark.old_name)):
        try:
            found = read_json(folder / name / f"{clip}.json")
        except InputError:
            continue
        if isinstance(found, dict) and found.get("key") == key and (found.get("saved") or not save):
            result = found.get("result")
            # Earlier versions wrote no checksum.
            known = found.get("sha256")
            if known == digest(result, sort_keys=False) or (known is None and _can_score(benchmark, result)):
                return result
            to_stderr(f"tcore: {folder / name / clip}.json is damaged: this clip is scored again.")
    return None


def _can_score(benchmark: Benchmark, result: Any) -> bool:
    try:
        per_clip(benchmark, result)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError):
        return False
    return "seconds" in result


def predictions_saver(folder: Path) -> Callable[[str, str, Any], None]:
    """Writes indexed PNGs for ids, npz for joints."""

    def save(clip: str, name: str, values: Any) -> None:
        with atomic(folder / clip / name) as temporary:
            if name.endswith(".npz"):
                with temporary.open("wb") as file:
                    np.savez(file, joints=values)
            else:
                temporary.write_bytes(encode_ids(values))

    return save


def join() -> tuple[int, int]:
    """Which process this is, and of how many; without torchrun there is one."""
    here = world()
    if here.size > 1 and not dist.is_initialized():
        store = meet(here.rank, here.size, JOIN)
        dist.init_process_group("gloo", store=store, rank=here.rank, world_size=here.size, timeout=WAIT)
    return here.rank, here.size


@contextmanager
def _together() -> Iterator[None]:
    """What needs all processes; one that is gone is one line of each of the others."""
    try:
        yield
    except RuntimeError as error:
        reason = "another process ended before its work was done; rerun the same command."
        raise LostPeerError(reason) from error


def gather(values: dict[str, Any]) -> dict[str, Any]:
    """The values of all processes together."""
    found: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
    with _together():
        dist.all_gather_object(found, values)
    return {name: value for each in found for name, value in each.items()}


def leave() -> None:
    """Wait until all processes have finished; one of several ends here, with exit code 0."""
    if dist.is_initialized():
        with _together():
            dist.barrier()
        sys.stdout.flush()
        sys.stderr.flush()
        # Threads of PyTorch's engine may outlive the interpreter's end, which then aborts: exit at once.
        os._exit(0)
