"""Does the matching module match, and does it help? Settings of T-CoRe side by side, at two grids.

    python experiments/branch_study.py --out LAB --frames CLIPS --data DATA [--rows NAME ...] [--seeds 3]
        [--sets few|all] [--gpus 0 0 0] [--recipe vits16-tcore-short] [--steps 1000] [--hold-gib 4]

Every row is the recipe with the settings below, trained and scored by the same code as `tcore lab methods`
(lab.md, lab.json). Rows with a module are measured as by `tcore figure matching`: matching.md has the shares
on held-out rendered videos and, where DATA has it, on davis2016. A rerun does what is missing.
"""

import argparse
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

import tcore
from tcore.files import read_json, write_text
from tcore.lab.methods import Budget, Entry, Shared, compare
from tcore.lab.record import Dataset
from tcore.methods.match_quality import CROSS, PLAIN, STILL
from tcore.show.features import load_matcher
from tcore.show.matching import matching_figure
from tcore.text import markdown_table, to_stderr

NONE: dict[str, Any] = {"auxiliary": "none"}
HARD: dict[str, Any] = {"masking.ratio": (0.6, 0.9)}
FLIP: dict[str, Any] = {"views.flip_global": 0.5}
# Cross-attention that begins by comparing features: cosines, projections that start as the identity.
COSINE: dict[str, Any] = {"matching.form": "cosine", "matching.temperature": 0.07, "matching.num_heads": 4}
MATCH = COSINE | {"matching.start": "identity"}
GRADIENT: dict[str, Any] = {"matching.auxiliary_gradient": True}
BOX: dict[str, Any] = {"views.auxiliary_box": "current"}
# Cross-attention that goes where visible patches have gone.
MOTION = MATCH | {"matching.form": "motion", "matching.num_heads": 1}
# The loss of own masked patches, which the branch takes the place of, beside those of the branch.
OWN: dict[str, Any] = {"loss.own_patches": 1.0}
FAST: dict[str, Any] = {"teacher.momentum": (0.95, 1.0)}
ROWS: dict[str, dict[str, Any]] = {
    "all": {},
    "none": NONE,
    "alone": NONE | {"loss.patch_teacher": 0.0},
    "none-flip": NONE | FLIP,
    "none-hard": NONE | HARD,
    "none-hard-flip": NONE | HARD | FLIP,
    "none-flip-fast": NONE | FLIP | FAST,
    "none-fast": NONE | FAST,
    "none-hard-fast": NONE | HARD | FAST,
    "none-faster": NONE | {"teacher.momentum": (0.9, 1.0)},
    "none-fast-random": NONE | FAST | {"masking.kind": "random"},
    "none-fast-koleo": NONE | FAST | {"loss.koleo": 0.0},
    "none-fast-sharp": NONE | FAST | {"views.blur": 0.0},
    "none-fast-reach": NONE | FAST | {"vit.reach": 4},
    "none-fast-large": NONE | FAST | {"views.global_size": 192, "views.local_size": 80},
    "own": OWN,
    "own-match": MATCH | OWN,
    "own-match-box": MATCH | OWN | BOX,
    "own-motion": MOTION | OWN,
    "own-motion-box": MOTION | OWN | BOX,
    "own-match-late": MATCH | OWN | {"loss.auxiliary": (0.0, 1.0)},
    "own-match-early": MATCH | OWN | {"loss.auxiliary": (1.0, 0.0)},
    "own-match-still": MATCH | OWN | {"sandwich.still": 0.5},
    "own-match-near": MATCH | OWN | {"sandwich.offset": (0.05, 0.15)},
    "all-flip": FLIP,
    "match": MATCH,
    "match-box": MATCH | BOX,
    "match-gradient": MATCH | GRADIENT,
    "match-still": MATCH | {"sandwich.still": 0.5},
    "match-hard": MATCH | HARD,
    "match-hard-gradient": MATCH | HARD | GRADIENT,
    "match-box-gradient": MATCH | BOX | GRADIENT,
    "match-sharp": MATCH | {"matching.temperature": 0.03},
    "match-one-head": MATCH | {"matching.num_heads": 1},
}
FEW = (("davis", "davis2016", True),)
ALL = (
    *FEW,
    *(("davis", f"eval/masks_{name}", False) for name in ("ytvos", "cells", "pumavos")),
    ("vip", "eval/semantic_camvid", False),
    ("jhmdb", "jhmdb_clip", False),
    *(("points", f"eval/keypoints_{name}", False) for name in ("badja", "dlc", "sleap")),
)


def measure(run: Path, davis: Path) -> dict[str, Any]:
    """Where the module of a run looks; the numbers are kept beside the run, with a picture."""
    picture = run.parent / "matching.png"
    if not picture.with_suffix(".json").exists():
        torch.set_num_threads(1)
        matcher = load_matcher(run)
        assert matcher is not None
        sets = [(davis, True)] if davis.is_dir() else []
        matching_figure(matcher, picture, title=run.parent.parent.name, davis=sets)
    found: dict[str, Any] = read_json(picture.with_suffix(".json"))
    return found


def line(name: str, found: dict[str, Any]) -> list[str]:
    """One row of the table of shares: times chance on the true place, and shares on the own object."""
    cells = [name]
    for way in (CROSS, PLAIN, STILL):
        times = found["rendered"][way]["times_chance"]
        cells.append(f"{times['place']:.1f}, {times['moved']:.1f}")
    for way in (CROSS, PLAIN, STILL):
        one = found.get("davis2016", {}).get(way)
        cells.append(f"{one['object']:.1%}" if one else "-")
    return cells


def main() -> None:
    """Train, score, measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--frames")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--sets", choices=("few", "all", "rendered"), default="few")
    parser.add_argument("--gpus", nargs="+", default=[""])
    parser.add_argument("--recipe", default="vits16-tcore-short")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--hold-gib", type=float, default=0.0)
    given = parser.parse_args()
    shared_settings = {"auxiliary": "both", "runtime.hold_gib": given.hold_gib}
    entries = [
        Entry(name, given.recipe, tcore.recipe(given.recipe, shared_settings | ROWS[name]))
        for name in given.rows
    ]
    named = {"few": FEW, "all": ALL, "rendered": ()}[given.sets]
    sets = tuple(Dataset(kind, str(given.data / path), binary) for kind, path, binary in named)
    precision: Any = "bf16" if given.gpus[0] else "fp32"
    shared = Shared(given.frames, sets or (Dataset("rendered", "24"),), precision)
    lines = compare(
        entries,
        given.out,
        shared,
        budget=Budget(steps=given.steps),
        seeds=given.seeds,
        devices=given.gpus,
        say=to_stderr,
    )
    print("\n".join(lines), flush=True)
    runs = [
        given.out / name / f"seed-{seed}" / "run"
        for name in given.rows
        for seed in range(given.seeds)
        if ROWS[name].get("auxiliary") != "none"
    ]
    with ProcessPoolExecutor(len(given.gpus), multiprocessing.get_context("spawn")) as pool:
        found = list(pool.map(measure, runs, [given.data / "davis2016"] * len(runs)))
    names = [f"{run.parent.parent.name}, {run.parent.name}" for run in runs]
    head = ["row", *(f"rendered: {way}" for way in (CROSS, PLAIN, STILL))]
    head += [f"davis2016: {way}" for way in (CROSS, PLAIN, STILL)]
    table = list(markdown_table(head, [line(*pair) for pair in zip(names, found, strict=True)]))
    write_text(given.out / "matching.md", "\n".join(table) + "\n")
    print("\n".join(table), flush=True)


if __name__ == "__main__":
    main()
