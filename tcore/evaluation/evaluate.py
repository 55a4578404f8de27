"""Encoder x benchmarks -> score card: resumable, with every knob that the numbers depend on."""

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tcore.errors import InputError
from tcore.evaluation.benchmarks import Benchmark, fingerprint, open_benchmark
from tcore.evaluation.encoder import Encoder
from tcore.evaluation.masks import davis_palette
from tcore.evaluation.protocols import TCORE, Protocol, Size
from tcore.files import atomic, write_text

Said = Callable[[str], None]
Card = dict[str, Any]

BOOTSTRAP = 1000


def evaluate(
    encoder: Encoder,
    *,
    davis: str | Path | None = None,
    vip: str | Path | None = None,
    jhmdb: str | Path | None = None,
    protocol: Protocol = TCORE,
    binary: bool = False,
    size: Size | None = None,
    out: str | Path | None = None,
    save: bool = False,
    say: Said = lambda line: None,
) -> Card:
    """Score an encoder on any of the benchmarks; with `out`, clip by clip on disk, so that it can go on."""
    given = {"davis": davis, "vip": vip, "jhmdb": jhmdb}
    roots = {name: Path(root) for name, root in given.items() if root is not None}
    if not roots:
        raise InputError("nothing to evaluate on: give davis, vip or jhmdb.")
    if save and out is None:
        raise InputError("predictions can only be saved where there is an out folder.")
    benchmarks = [
        open_benchmark(
            name, root, protocol if name == "davis" else TCORE, binary=binary and name == "davis", size=size
        )
        for name, root in roots.items()
    ]
    folder = None if out is None else Path(out)
    identity = {"name": encoder.name, "weights": encoder.fingerprint()}
    card: Card = {"encoder": identity, "benchmarks": {}}
    for benchmark in benchmarks:
        card["benchmarks"][benchmark.name] = run_benchmark(benchmark, encoder, identity, folder, save, say)
    if folder is not None:
        write_text(folder / "results.json", json.dumps(card, indent=1) + "\n")
    return card


def run_benchmark(
    benchmark: Benchmark,
    encoder: Encoder,
    identity: dict[str, str],
    out: Path | None,
    save: bool,
    say: Said,
) -> Card:
    """All clips of one benchmark, those that were done before taken from disk."""
    results: dict[str, Any] = {}
    started = time.perf_counter()
    truths = [fingerprint(benchmark.truth_files(clip)) for clip in benchmark.clips]
    for done, (clip, truth) in enumerate(zip(benchmark.clips, truths, strict=True)):
        key = clip_key(benchmark, identity, truth)
        path = None if out is None else out / "clips" / benchmark.name / f"{clip.name}.json"
        result = None if path is None else read_result(path, key, save)
        if result is None:
            saver = predictions_saver(out / "predictions" / benchmark.name) if out and save else None
            begun = time.perf_counter()
            result = benchmark.run(encoder, clip, saver)
            result["seconds"] = round(time.perf_counter() - begun, 3)
            if path is not None:
                write_text(path, json.dumps({"key": key, "saved": save, "result": result}) + "\n")
        results[clip.name] = result
        elapsed = time.perf_counter() - started
        left = elapsed / (done + 1) * (len(benchmark.clips) - done - 1)
        say(f"{benchmark.name} {done + 1}/{len(benchmark.clips)}  {clip.name}  ETA {left:.0f} s")
    return {
        "scores": benchmark.summarise(results.values()),
        "interval": bootstrap(benchmark, list(results.values())),
        "clips_from": "the official list" if benchmark.listed else "all clips found",
        "protocol": dataclasses.asdict(benchmark.protocol),
        "binary": benchmark.binary,
        "truth": hashlib.sha256("".join(truths).encode()).hexdigest()[:16],
        "clips": {name: per_clip(benchmark, result) for name, result in results.items()},
    }


def per_clip(benchmark: Benchmark, result: Card) -> Card:
    """What the card says of one clip."""
    told: Card = {name: result[name] for name in ("frames", "input", "seconds", "objects") if name in result}
    try:
        return benchmark.summarise([result]) | told
    except InputError:  # nothing to score in this clip alone
        return told


def clip_key(benchmark: Benchmark, identity: dict[str, str], truth: str) -> str:
    """Everything that a clip's result depends on; another key means another result."""
    knobs = {
        "weights": identity["weights"],
        "benchmark": benchmark.name,
        "protocol": dataclasses.asdict(benchmark.protocol),
        "binary": benchmark.binary,
        "size": benchmark.fixed_size,
        "truth": truth,
    }
    return hashlib.sha256(json.dumps(knobs, sort_keys=True).encode()).hexdigest()


def read_result(path: Path, key: str, save: bool) -> Any:
    """The result that is on disk, where it is the one that would come out again (and its masks are there)."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if found.get("key") != key or (save and not found.get("saved")):
        return None
    return found["result"]


def bootstrap(benchmark: Benchmark, results: list[Card]) -> dict[str, list[float]]:
    """95% interval of every score over resampled clips."""
    if len(results) < 2:
        return {}
    rng = np.random.default_rng(0)
    draws = [
        benchmark.summarise([results[i] for i in rng.integers(len(results), size=len(results))])
        for _ in range(BOOTSTRAP)
    ]
    return {
        name: [float(x) for x in np.percentile([draw[name] for draw in draws], [2.5, 97.5])]
        for name in draws[0]
    }


def predictions_saver(folder: Path) -> Callable[[str, str, Any], None]:
    """Writes indexed PNGs for ids, npz for joints."""
    palette = davis_palette()

    def save(clip: str, name: str, values: Any) -> None:
        with atomic(folder / clip / name) as temporary:
            if name.endswith(".npz"):
                with temporary.open("wb") as file:
                    np.savez(file, joints=values)
            else:
                image = Image.fromarray(values)
                image.putpalette(palette)
                image.save(temporary, format="PNG")

    return save


def table(card: Card) -> list[str]:
    """The card as lines for a person."""
    lines = []
    for name, result in card["benchmarks"].items():
        for score, value in result["scores"].items():
            interval = result["interval"].get(score)
            spread = f"  [{100 * interval[0]:.1f}, {100 * interval[1]:.1f}]" if interval else ""
            lines.append(f"{name:6} {score:7} {100 * value:5.1f}{spread}")
        knobs = result["protocol"]
        lines.append(
            f"       protocol {knobs['name']}: context {knobs['context']}, {knobs['window']} "
            f"{knobs['radius']:g}, top-{knobs['topk']}, temperature {knobs['temperature']}, "
            f"first frame {knobs['first_frame']}; {len(result['clips'])} clips ({result['clips_from']}); "
            f"truth {result['truth']}"
        )
    return lines
