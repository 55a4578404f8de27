"""Rows of methods from their files: scores over seeds, differences to the first row, cost."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tcore.config import Config, differences, flatten, from_dict
from tcore.errors import InputError
from tcore.evaluation.intervals import clip_scores, comparable, difference, mean_scores
from tcore.evaluation.published import PUBLISHED
from tcore.files import read_json
from tcore.lab.record import COST, COST_SHAPE, Dataset, read_scores, read_speed, read_work, scored_by
from tcore.lab.runs import DONE, PICTURE, finished, write_table
from tcore.recipes import recipe
from tcore.show.comparison import GRIDS, at, draw_scores, markdown
from tcore.show.runs import read_run

# Rows of the T-CoRe paper's tables: ViT-S/16 on Kinetics-400 where there is one.
PAPER = {
    "tcore": "T-CoRe, K400, 400 ep",
    "dino": "DINO, K400, 400 ep",
    "ibot": "iBOT, K400, 400 ep",
    "dinov2": "DINOv2, K400, 400 ep",
    "simclr": "SimCLR, K400, 400 ep",
    "mocov3": "MoCo v3, K400, 400 ep",
    "croc": "CrOC, ImageNet, 300 ep",
    "odin": "ODIN2 ResNet-50, ImageNet, 1000 ep",
    "mae": "MAE, K400, 400 ep",
    "rcmae": "RC-MAE, ImageNet, 1600 ep",
    "siammae": "SiamMAE, K400, 400 ep",
    "cropmae": "CropMAE, K400, 400 ep",
    "rsp": "RSP, K400, 400 ep",
    "dropmae": "DropMAE ViT-B/16, K400, 1600 ep",
    "videomae": "VideoMAE, K400, 1600 ep",
    "maest": "MAE-ST ViT-L/16, K400, 1600 ep",
}


def write_rows(out: Path, first: Sequence[str], draw: bool) -> list[str]:
    """Write all rows of a folder; the named ones come first, baselines last."""
    folders = {path.parent.parent.name for path in out.glob(f"*/seed-*/{DONE}")}
    rows = [collect_row(out / name) for name in (*first, *sorted(folders - set(first))) if name in folders]
    rows.sort(key=lambda row: row["train"] is None)
    note_differences(rows)
    if draw and any(row["scores"] for row in rows):
        draw_scores(rows, out / PICTURE, title="methods, one budget")
    picture = ["", f"![Score against minutes of training]({PICTURE})"] if (out / PICTURE).is_file() else []
    return write_table(out, rows, [*markdown(rows), *picture] if rows else [])


def note_differences(rows: Sequence[dict[str, Any]]) -> None:
    """Note how far every row is above the first one, at every grid: on each dataset, and on all of them.

    Datasets whose true labels or clips differ from the first row's are not compared. A baseline scores the
    same with every seed.
    """
    for row in rows[1:]:
        row["difference"], row["other_clips"] = {}, []
        times = rows[0]["seeds"] if row["train"] is None else 1
        for grid in GRIDS:
            sets = []
            labels = dict.fromkeys(label for one in rows for label in one["scores"] if at(one, label, grid))
            for label in labels:
                found, other = at(row, label, grid), at(rows[0], label, grid)
                if found and other and not comparable(found, other):
                    row["other_clips"] += [label] if label not in row["other_clips"] else []
                    other = {}
                clips = {name: times * values for name, values in found.get("clips", {}).items()}
                sets.append((clips, other.get("clips", {})))
                if found:
                    found["difference"] = difference(sets[-1])
            row["difference"][grid] = difference(*sets) if len(sets) > 1 else None


def collect_row(folder: Path) -> dict[str, Any]:
    """What is known of a row: every score over its seeds, and what it cost; baselines cost nothing."""
    works = {run: read_work(run) for run in finished(folder)}
    first, *_ = works.values()
    # A seed that was scored in another way than the first one would spoil the mean.
    runs = [run for run, work in works.items() if scored_by(work) == scored_by(first)]
    binary = {Dataset(*given).label: given[2] for given in first["datasets"]}
    cards = [read_scores(run) for run in runs]
    row: dict[str, Any] = {
        "row": folder.name,
        "train": None,
        "precision": first["precision"],
        "seeds": len(runs),
        "left_out": len(works) - len(runs),
        "scores": {
            label: {
                grid: over_runs([card[label][grid] for card in cards]) | {"binary": binary.get(label, False)}
                for grid in grids
            }
            for label, grids in cards[0].items()
            if all(card.get(label, {}).keys() >= grids.keys() for card in cards)
        },
        "published": published(folder.name),
    }
    return row if first["baseline"] else row | collect_cost(folder, runs, first)


def collect_cost(folder: Path, runs: Sequence[Path], work: Mapping[str, Any]) -> dict[str, Any]:
    """How a row is trained, and what that costs."""
    config = from_dict(work["config"])
    costs = [read_json(run / COST, shape=COST_SHAPE, remedy=f"remove {run / DONE}") for run in runs]
    journals = [read_run(run / "run") for run in runs]
    samples = (config.optim.steps or 0) * config.optim.samples
    seconds = [journal.seconds() or 0.0 for journal in journals]
    speeds = [np.median([*journal.series("samples_per_second").values()] or [0.0]) for journal in journals]
    memory = [max(journal.series("memory_gib").values(), default=0.0) for journal in journals]
    waits = [wait for journal in journals for wait in journal.series("data_wait").values()]
    measured = read_speed(folder)
    speed = measured["samples_per_second"] if measured else float(np.mean(speeds))
    return {
        "train": f"tcore train {work['recipe']} {flags_of(work['recipe'], config)}".rstrip(),
        "frames": work["frames"],
        "samples": samples,
        "minutes": samples / speed / 60 if measured else float(np.mean(seconds)) / 60,
        "samples_per_second": speed,
        "alone": measured is not None or all(cost["at_a_time"] == 1 for cost in costs),
        "wait": float(np.mean(waits)) if waits else None,
        "gib": max(memory),
        "device": costs[0]["device"],
    }


def over_runs(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The scores of a dataset at one grid, in percent: means over seeds, and intervals of the main one."""
    main = results[0]["main"]
    if len({(*result["scores"], result.get("truth")) for result in results}) > 1:
        raise InputError(
            f"the seeds of a row differ in scores or clips: remove their {DONE} to score them again."
        )
    return {
        "main": main,
        "truth": results[0].get("truth"),
        **mean_scores(results, results[0]["scores"], main),
        "clips": clip_scores([result.get("clips", {}) for result in results], main),
        "each_seed": [100 * r["scores"][main] for r in results],
    }


def published(name: str) -> dict[str, Any] | None:
    """The paper's row of a method, and the protocol that it was measured with."""
    if name not in PAPER:
        return None
    row = PUBLISHED[PAPER[name]]
    return {"name": PAPER[name], "protocol": row.protocol, **row.scores}


def flags_of(name: str, config: Config) -> str:
    """The flags that make these settings of a recipe."""
    words = []
    known = flatten(recipe(name))
    for setting, (_, value) in differences(recipe(name), config).items():
        if setting in known and setting != "seed":
            flag = f"--{setting.replace('_', '-')}"
            group, _, last = flag[2:].rpartition(".")
            if isinstance(value, bool):
                words.append(flag if value else f"--{group}.no-{last}")
            else:
                words += [flag, *(map(str, value) if isinstance(value, tuple) else [str(value)])]
    return " ".join(words)
