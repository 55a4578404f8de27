"""The score card for people: a table beside published rows, what it depends on, the worst clips."""

import platform
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import torch

from tcore import __version__
from tcore.device import peak_memory_gib
from tcore.errors import InputError
from tcore.evaluation.benchmarks import find_benchmark
from tcore.evaluation.benchmarks.benchmark import Benchmark
from tcore.evaluation.protocols import PROTOCOLS, TCORE
from tcore.evaluation.published import LINES, PUBLISHED, SHOWN, published_on
from tcore.files import misfit, number, number_or_nan, read_json, row_of, whole
from tcore.text import to_stderr

Card = dict[str, Any]


def grid_lines(name: str, result: Card) -> int:
    """Patches along the short side of DAVIS; where they differ, scores do not compare."""
    finer = {"60x110": 60, "90x165": 90, "up960": 60, "up1440": 90}
    grids = [clip["grid"] for clip in result["clips"].values() if "grid" in clip]
    return min(grids[0]) if grids and name == "davis" else finer.get(result["protocol"].get("resize"), LINES)


interval = row_of(2, number_or_nan)  # its two ends
_size = row_of(2, lambda side: whole(side) and 0 < side < 2**14)
# What is read of a card.
_KNOBS = {"context?": whole, "radius?": number, "topk?": whole, "temperature?": number}
_RESULT = {
    "scores": {str: number_or_nan},
    "interval?": {str: interval},
    "clips_from?": str,
    "protocol": _KNOBS,
    "binary": bool,
    "clips": {str: {"input?": _size, "grid?": _size}},
    "differs?": [str],
}
SHAPE = {
    "encoder": {"name": str, "weights": str, "notes?": [str]},
    "benchmarks": {str: _RESULT},
    "versions?": {str: str},
    "device?": str,
    "seconds?": number,
}


def read_card(path: Path) -> Card:
    """A score card from results.json, or from the folder that holds it."""
    file = path / "results.json" if path.is_dir() else path
    return check_card(read_json(file, "score card ", dict, "tcore evaluate --out writes it"), file)


def check_card(values: Card, file: Path) -> Card:
    """A card that was read from a file, with the names that benchmarks have now; a damaged one is refused."""
    if "benchmarks" not in values:
        raise InputError(f"{file} is not a score card of tcore evaluate: it has no benchmarks.")
    if wrong := misfit(values, SHAPE, "card"):
        raise InputError(f"{file} is damaged ({wrong} is missing or wrong): run tcore evaluate again.")
    return values | {"benchmarks": rename_old(values["benchmarks"])}


def versions() -> dict[str, str]:
    """The versions of what computed the numbers."""
    return {
        "tcore": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "pillow": PIL.__version__,
    }


def device_name(device: torch.device) -> str:
    """The device as people know it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{'Apple GPU' if device.type == 'mps' else 'CPU'} ({platform.machine()})"


def peak_memory(device: torch.device) -> dict[str, float]:
    """Largest memory use of this process so far, in GB, and of the GPU where there is one."""
    devices = {"cpu_gb": torch.device("cpu")} | ({"gpu_gb": device} if device.type == "cuda" else {})
    return {name: round(peak_memory_gib(one) * 2**30 / 1e9, 3) for name, one in devices.items()}


def rename_old(results: dict[str, Any]) -> dict[str, Any]:
    """Results by benchmark, as a card has them, with the names that benchmarks have now."""
    renamed = {}
    for name, result in results.items():
        new = find_benchmark(name).name
        if new != name:
            to_stderr(f"tcore: benchmark {name} is now called {new}.")
        renamed[new] = result
    return renamed


def table(card: Card) -> list[str]:
    """The card as lines for a person."""
    name, results = card["encoder"]["name"], card["benchmarks"]
    official = {b: result for b, result in results.items() if find_benchmark(b).official_clips}
    lines: list[str] = []
    for count in dict.fromkeys(grid_lines(*one) for one in official.items()):
        alike = {b: result for b, result in official.items() if grid_lines(b, result) == count}
        lines += _rows(name, alike, tuple(row for row in published_on(count) if row in SHOWN))
    for benchmark, result in results.items():
        if benchmark not in official:
            lines += _rows(f"{name} ({benchmark})", {benchmark: result}, ())
    for benchmark, result in results.items():
        lines += conditions(benchmark, result)
    if "reach" in card["encoder"]:
        reach = card["encoder"]["reach"]
        lines.append(f"patches attend to patches up to {reach} away; published scores use --reach everywhere")
    lines += card["encoder"].get("notes", [])
    memory = ", ".join(f"{x:.2f} GB {kind[:3].upper()}" for kind, x in card["peak_memory"].items())
    lines.append(f"{card['seconds']:.0f} s on {card['device']}, peak memory {memory}")
    return lines


def _rows(name: str, results: dict[str, Card], published: tuple[str, ...]) -> Iterator[str]:
    scores = {c: v for result in results.values() for c, v in result["scores"].items()}
    spread = {c: v for result in results.values() for c, v in result["interval"].items()}
    published = tuple(row for row in published if PUBLISHED[row].scores.keys() & scores.keys())
    width = max(len(row) for row in (name, "95% interval over clips", *published))
    ours = ", ".join(dict.fromkeys(result["protocol"].get("name", "") for result in results.values()))
    title, how = ("  protocol", f"  {ours}") if published else ("", "")
    yield f"{'':{width}}" + "".join(f"{column.replace('@0.', '@.'):>13}" for column in scores) + title
    yield f"{name:{width}}" + "".join(f"{100 * value:13.1f}" for value in scores.values()) + how
    if spread:
        ranges = (f"{100 * spread[c][0]:.1f}-{100 * spread[c][1]:.1f}" if c in spread else "" for c in scores)
        yield f"{'95% interval over clips':{width}}" + "".join(f"{text:>13}" for text in ranges)
    for row in published:
        protocol, known, _ = PUBLISHED[row]
        values = (known.get(column) for column in scores)
        numbers = "".join(f"{'-' if value is None else value:>13}" for value in values)
        yield f"{row:{width}}{numbers}  {protocol}"


def conditions(name: str, result: Card) -> Iterator[str]:
    """What the numbers of one benchmark depend on, and why they may not be comparable."""
    knobs = result["protocol"]
    sizes = {(*clip.get("grid", ()), *clip.get("input", ())) for clip in result["clips"].values()}
    grid = "grid {}x{} of {}x{} pixels, ".format(*min(sizes)) if len(min(sizes, default=())) == 4 else ""
    yield (
        f"{name}: {grid}protocol {knobs['name']}, context {knobs['context']}, {knobs['window']} "
        f"{knobs['radius']:g}, top-{knobs['topk']}, temperature {knobs['temperature']}, "
        f"first frame {knobs['first_frame']}, {knobs['precision']}"
        f"{', edges ' + knobs['edges'] if knobs.get('edges', 'off') != 'off' else ''}; "
        f"clips {len(result['clips'])} ({result['clips_from']}); truth {result['truth']}"
    )
    if result["differs"]:
        yield f"{name}: not comparable with the published rows: {'; '.join(result['differs'])}"


def differences(benchmark: Benchmark) -> list[str]:
    """What was done differently than for the published rows."""
    if not benchmark.official_clips:
        return []
    found = []
    if (count := len(benchmark.clips)) != (official := benchmark.official_clips[0]):
        found.append(f"{count} instead of {official} clips")
    if benchmark.fixed_size is not None:
        found.append("input {}x{}".format(*benchmark.fixed_size))  # height first, as protocols have it
    if benchmark.binary:
        found.append("one object per clip (binary)")
    named = next((known for known in PROTOCOLS if known.name == benchmark.protocol.name), TCORE)
    found += [] if named is TCORE else [f"protocol {named.name}"]
    usual = asdict(benchmark.adapt(named))
    knobs = asdict(benchmark.protocol).items()
    return found + [f"{knob} {value}" for knob, value in knobs if knob != "name" and value != usual[knob]]


def worst(card: Card, benchmark: str) -> list[tuple[str, float]]:
    """Clips of a benchmark with their main score, worst first; those without one are left out."""
    main = find_benchmark(benchmark).score_names[0]
    clips = card["benchmarks"][benchmark]["clips"].items()
    found = [(title, float(clip[main])) for title, clip in clips if number(clip.get(main))]
    return sorted(found, key=lambda one: one[1])


def worst_clips(card: Card, count: int) -> list[str]:
    """The clips with the lowest score of every benchmark, as lines for a person."""
    return [
        f"{name}  {find_benchmark(name).score_names[0]} {100 * value:5.1f}  {title}"
        for name in card["benchmarks"]
        for title, value in worst(card, name)[:count]
    ]
