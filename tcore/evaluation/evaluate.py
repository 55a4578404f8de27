"""Encoder x benchmarks -> score card: resumable, with every knob that the numbers depend on."""

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tcore.errors import InputError
from tcore.evaluation.benchmarks import Benchmark, open_benchmark
from tcore.evaluation.card import Card, device_name, differences, peak_memory, versions
from tcore.evaluation.encoder import Encoder
from tcore.evaluation.masks import encode_ids
from tcore.evaluation.protocols import TCORE, Protocol, Size, for_other_benchmarks
from tcore.evaluation.rendered_benchmark import RenderedBenchmark, open_rendered
from tcore.evaluation.run_clip import write_behind
from tcore.evaluation.sharing import deal, gather, join
from tcore.files import atomic, read_json, write_text
from tcore.text import Progress, format_seconds

Said = Callable[[str], None]

BOOTSTRAP = 1000


def evaluate(
    encoder: Encoder,
    *,
    davis: str | Path | None = None,
    vip: str | Path | None = None,
    jhmdb: str | Path | None = None,
    synthetic: int = 0,
    clips: int | None = None,
    protocol: Protocol = TCORE,
    binary: bool = False,
    size: Size | None = None,
    alone: bool = False,
    out: str | Path | None = None,
    save: bool = False,
    say: Said = lambda line: None,
) -> Card:
    """Score an encoder on any of the benchmarks; with `out`, clip by clip on disk, so that it can go on.

    `synthetic` is a number of held-out rendered videos; `clips` takes no more than so many of a dataset,
    evenly spread over it. Processes started by torchrun share the clips, unless this one works `alone`.
    """
    given = {"davis": davis, "vip": vip, "jhmdb": jhmdb}
    roots = {name: Path(root) for name, root in given.items() if root is not None}
    if not roots and synthetic < 1:
        raise InputError("nothing to evaluate on: give --davis DIR, --vip DIR, --jhmdb DIR or --synthetic.")
    if size is not None and not roots:
        raise InputError(f"--size {size[0]} {size[1]} goes with --davis, --vip or --jhmdb: leave it out.")
    if save and out is None:
        raise InputError("predictions can only be saved where there is an out folder.")
    if binary and davis is None:
        raise InputError("--binary goes with --davis DIR: any id above 0 is then the one object.")
    others = for_other_benchmarks(protocol)
    benchmarks: list[Benchmark | RenderedBenchmark] = [
        open_benchmark(
            name,
            root,
            protocol if name == "davis" else others,
            binary=binary and name == "davis",
            size=size,
            most=clips,
        )
        for name, root in roots.items()
    ]
    if synthetic:
        benchmarks.append(open_rendered(synthetic, encoder.patch_size, others))
    folder = None if out is None else writable(Path(out))
    rank, count = (0, 1) if alone else join()
    device = next(encoder.parameters()).device
    identity = encoder.identity()
    found = {
        benchmark.name: run_benchmark(benchmark, encoder, identity, folder, save, say, (rank, count))
        for benchmark in benchmarks
    }
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
        write_text(folder / "results.json", json.dumps(card, indent=1) + "\n")
    return card


def writable(folder: Path) -> Path:
    """The folder, made where it is not there; one that cannot be written to is refused before any work."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with atomic(folder / "writable") as temporary:
            temporary.touch()
        (folder / "writable").unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"cannot write to {folder}: {error.strerror}.") from error
    return folder


def run_benchmark(
    benchmark: Benchmark | RenderedBenchmark,
    encoder: Encoder,
    identity: dict[str, Any],
    out: Path | None,
    save: bool,
    say: Said,
    place: tuple[int, int] = (0, 1),
) -> Card:
    """All clips of one benchmark, those that were done before taken from disk."""
    rank, count = place
    clips: list[Any] = list(benchmark.clips)
    own = deal([clip.length for clip in clips], count)[rank]
    mine: dict[str, Any] = {}
    progress = Progress(benchmark.name, len(own), say=say, every=0)
    for clip in (clips[index] for index in own):
        truth, frames = benchmark.fingerprints(clip)
        key = clip_key(benchmark, identity, truth, frames)
        path = None if out is None else out / "clips" / benchmark.name / f"{clip.name}.json"
        result = None if path is None else read_result(path, key, save)
        if result is None:
            result = run_clip(benchmark, encoder, clip, out if save else None)
            if path is not None:
                write_text(path, json.dumps({"key": key, "saved": save, "result": result}) + "\n")
        mine[clip.name] = (result, truth)
        progress.advance(f"{clip.name} in {format_seconds(result['seconds'])}")
    found = gather(mine) if count > 1 else mine
    results = {clip.name: found[clip.name][0] for clip in benchmark.clips}
    truths = "".join(found[clip.name][1] for clip in benchmark.clips)
    card: Card = {
        "scores": benchmark.summarize(results.values()),
        "interval": bootstrap(benchmark, list(results.values())),
        "clips_from": benchmark.clips_from,
        "protocol": dataclasses.asdict(benchmark.protocol),
        "binary": benchmark.binary,
        "truth": hashlib.sha256(truths.encode()).hexdigest()[:16],
        "clips": {name: per_clip(benchmark, result) for name, result in results.items()},
    }
    return card | {"differs": differences(benchmark.name, card, benchmark.fixed_size)}


def run_clip(
    benchmark: Benchmark | RenderedBenchmark, encoder: Encoder, clip: Any, out: Path | None
) -> dict[str, Any]:
    """The result of one clip, with the seconds it took; predictions are saved under `out` where given."""
    begun = time.perf_counter()
    if out is None:
        result = benchmark.run(encoder, clip, None)
    else:
        with write_behind(predictions_saver(out / "predictions" / benchmark.name)) as save:
            result = benchmark.run(encoder, clip, save)
    return result | {"seconds": round(time.perf_counter() - begun, 3)}


def per_clip(benchmark: Benchmark | RenderedBenchmark, result: Card) -> Card:
    """What the card says of one clip."""
    told: Card = {name: result[name] for name in ("frames", "input", "seconds", "objects") if name in result}
    try:
        return benchmark.summarize([result]) | told
    except InputError:  # nothing to score in this clip alone
        return told


def clip_key(
    benchmark: Benchmark | RenderedBenchmark, identity: dict[str, Any], truth: str, frames: str
) -> str:
    """Everything that a clip's result depends on; another key means another result."""
    knobs = {
        "weights": identity["weights"],
        "benchmark": benchmark.name,
        "protocol": dataclasses.asdict(benchmark.protocol),
        "binary": benchmark.binary,
        "size": benchmark.fixed_size,
        "truth": truth,
        "frames": frames,
    }
    return hashlib.sha256(json.dumps(knobs, sort_keys=True).encode()).hexdigest()


def read_result(path: Path, key: str, save: bool) -> Any:
    """The result that is on disk, where it is the one that would come out again (and its masks are there)."""
    try:
        found = read_json(path)
    except InputError:
        return None
    if not isinstance(found, dict) or "result" not in found:
        return None
    if found.get("key") != key or (save and not found.get("saved")):
        return None
    return found["result"]


def bootstrap(benchmark: Benchmark | RenderedBenchmark, results: list[Card]) -> dict[str, list[float]]:
    """95% interval of every score over resampled clips."""
    if len(results) < 2:
        return {}
    rng = np.random.default_rng(0)
    draws = [
        benchmark.summarize([results[i] for i in rng.integers(len(results), size=len(results))])
        for _ in range(BOOTSTRAP)
    ]
    return {
        name: [float(x) for x in np.percentile([draw[name] for draw in draws], [2.5, 97.5])]
        for name in draws[0]
    }


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
