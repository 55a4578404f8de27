"""The score card for people: a table beside the published rows, what it rests on, the worst clips."""

import platform
import resource
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
import PIL
import torch

from tcore.evaluation.protocols import TCORE
from tcore.evaluation.published import COLUMNS, OFFICIAL_CLIPS, PUBLISHED, SHOWN

Card = dict[str, Any]
MAIN_SCORE = {"davis": "J&F", "vip": "mIoU", "jhmdb": "PCK@0.1", "synthetic": "J&F"}


def versions() -> dict[str, str]:
    """What the numbers were computed with."""
    from tcore import __version__

    return {
        "tcore": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "pillow": PIL.__version__,
    }


def device_name(device: torch.device) -> str:
    """The device as people know it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})"


def peak_memory(device: torch.device) -> dict[str, float]:
    """Largest memory of this process so far, in GB: resident, and on the GPU where there is one."""
    unit = 1 if sys.platform == "darwin" else 1024
    peak = {"cpu_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9, 3)}
    if device.type == "cuda":
        peak["gpu_gb"] = round(torch.cuda.max_memory_allocated(device) / 1e9, 3)
    return peak


def table(card: Card) -> list[str]:
    """The card as lines for a person."""
    benchmarks = card["benchmarks"]
    lines: list[str] = []
    published = {name: result for name, result in benchmarks.items() if name in OFFICIAL_CLIPS}
    if published:
        columns = [c for c in COLUMNS if any(c in result["scores"] for result in published.values())]
        lines += _rows(card["encoder"]["name"], published, columns)
    if "synthetic" in benchmarks:
        result = benchmarks["synthetic"]
        lines += _rows(f"{card['encoder']['name']} (rendered)", {"synthetic": result}, list(result["scores"]))
    for name, result in benchmarks.items():
        lines += _foundations(name, result)
    if "reach" in card["encoder"]:
        lines.append(
            f"patches look {card['encoder']['reach']} patches far; --reach everywhere is as published"
        )
    memory = ", ".join(f"{x:.2f} GB {kind[:3].upper()}" for kind, x in card["peak_memory"].items())
    lines.append(f"{card['seconds']:.0f} s on {card['device']}, peak memory {memory}")
    return lines


def _rows(name: str, results: dict[str, Card], columns: list[str]) -> Iterator[str]:
    scores = {c: v for result in results.values() for c, v in result["scores"].items()}
    spread = {c: v for result in results.values() for c, v in result["interval"].items()}
    shown = {} if "synthetic" in results else {row: PUBLISHED[row] for row in SHOWN}
    width = max(len(row) for row in (name, "95% interval over clips", *shown))
    yield f"{'':{width}}" + "".join(f"{column.replace('@0.', '@.'):>13}" for column in columns)
    yield f"{name:{width}}" + "".join(f"{100 * scores[c]:13.1f}" for c in columns)
    if spread:
        ranges = (
            f"{100 * spread[c][0]:.1f}-{100 * spread[c][1]:.1f}" if c in spread else "" for c in columns
        )
        yield f"{'95% interval over clips':{width}}" + "".join(f"{text:>13}" for text in ranges)
    for row, numbers in shown.items():
        named = dict(zip(COLUMNS, numbers, strict=True))
        yield f"{row:{width}}" + "".join(f"{'-' if (v := named[c]) is None else v:>13}" for c in columns)


def _foundations(name: str, result: Card) -> Iterator[str]:
    """What the numbers of one benchmark rest on, and what keeps them from being compared."""
    knobs = result["protocol"]
    yield (
        f"{name}: protocol {knobs['name']}, context {knobs['context']}, {knobs['window']} "
        f"{knobs['radius']:g}, top-{knobs['topk']}, temperature {knobs['temperature']}, "
        f"first frame {knobs['first_frame']}, {knobs['precision']}; "
        f"{clips(len(result['clips']))} ({result['clips_from']}); truth {result['truth']}"
    )
    if name in OFFICIAL_CLIPS and result["differs"]:
        yield f"{name}: not comparable with the published rows: {'; '.join(result['differs'])}"


def clips(count: int) -> str:
    """A number of clips in words."""
    return f"{count} clip{'' if count == 1 else 's'}"


def differences(name: str, result: Card, fixed_size: tuple[int, int] | None) -> list[str]:
    """What was done otherwise than for the published rows."""
    if name not in OFFICIAL_CLIPS:
        return []
    found = []
    if len(result["clips"]) != OFFICIAL_CLIPS[name]:
        found.append(f"{clips(len(result['clips']))} instead of {OFFICIAL_CLIPS[name]}")
    if fixed_size is not None:
        found.append(f"input {fixed_size[0]}x{fixed_size[1]}")
    if result["binary"]:
        found.append("one object per clip (binary)")
    usual = asdict(TCORE) | ({"topk": 10} if name == "vip" else {})
    knobs = result["protocol"]
    found += [f"{knob} {knobs[knob]}" for knob in usual if knob != "name" and knobs[knob] != usual[knob]]
    return found


def worst_clips(card: Card, count: int) -> list[str]:
    """The clips with the lowest score of every benchmark, worst first."""
    lines = []
    for name, result in card["benchmarks"].items():
        score = MAIN_SCORE[name]
        scored = [(clip[score], title) for title, clip in result["clips"].items() if score in clip]
        for value, title in sorted(scored)[:count]:
            lines.append(f"{name}  {score} {100 * value:5.1f}  {title}")
    return lines
