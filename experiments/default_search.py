"""The search of the default encoder on one GPU: candidates and edge filters trained together, then scored.

    python experiments/default_search.py train --clips CLIPS --runs RUNS [--seconds 500] [--only NAME ...]
    python experiments/default_search.py score --runs RUNS --sets DIR ... --out OUT [--only NAME ...]

CLIPS is what experiments/open_clips.py copies; DIRs are laid out like DAVIS. `score` keeps its results under
RUNS, so that sets may come in several calls, and prints one table of all of them. `NAME+NAME` is an encoder
whose weights are the mean of two others', `NAME+` of the last four that a run kept.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file

import tcore
from experiments.edge_filter import read_bank, save_filter, train_filter
from experiments.learned_filter import load_filter
from tcore.data.images import ahead, encode_jpeg, read_image
from tcore.data.rendered_varied import render_varied
from tcore.evaluation import scores
from tcore.evaluation.edges import guided_labels
from tcore.evaluation.encoders import load_encoder
from tcore.evaluation.masks import VOID, as_binary, read_ids
from tcore.evaluation.protocols import TCORE
from tcore.evaluation.resize import grid_to_ids, ids_to_grid
from tcore.evaluation.run_clip import run_clip
from tcore.model.vit import save_safetensors

RUNTIME: dict[str, Any] = {
    "optim.steps": 800,
    "keep_every": 250,
    "checkpoint_every": 100_000,
    "runtime.workers": 1,
    "runtime.log_every": 50,
}
BASE = RUNTIME | {"auxiliary": "none", "masking.ratio": (0.6, 0.9)}
FINER = {"optim.batch": 64}
PUBLISHED = {"masking.ratio": (0.1, 0.5), "optim.steps": 1000, "runtime.workers": 2}
# The second round: masks as in the recipe, whose encoders lose nothing on the coarse grid.
RECIPE = {"masking.ratio": (0.3, 0.7), "keep_every": 100, "runtime.workers": 2}
HARD = RECIPE | {"auxiliary": "both", "masking.ratio": (0.6, 0.9), "optim.steps": 1200, "runtime.workers": 4}
# Name, data, and what differs from BASE.
CANDIDATES: dict[str, tuple[str, dict[str, Any]]] = {
    "open": ("CLIPS", {}),
    "mix": ("CLIPS*3+VARIED", {}),
    "both": ("CLIPS*3+VARIED", {"auxiliary": "both", **PUBLISHED}),
    "plain": ("CLIPS*3+VARIED", PUBLISHED),
    "rendered": ("VARIED", {}),
    "areas": ("CLIPS*3+VARIED", {"views.global_area": (0.08, 0.5), "views.local_area": (0.02, 0.12)}),
    "grid16": ("CLIPS*3+VARIED", {"views.global_size": 256, "views.local_size": 112, **FINER}),
    "patch8": ("CLIPS*3+VARIED", {"vit.patch_size": 8, **FINER}),
    "wide": ("CLIPS*3+VARIED", {"vit.dim": 256, "vit.depth": 8, "vit.num_heads": 4}),
    "recipe": ("CLIPS*3+VARIED", RECIPE),
    "branch": ("CLIPS*3+VARIED", RECIPE | {"auxiliary": "both"}),
    "scales": (
        "CLIPS*3+VARIED",
        RECIPE | {"views.global_area": (0.08, 1.0), "views.local_area": (0.02, 0.4)},
    ),
    "reach": ("CLIPS*3+VARIED", RECIPE | {"vit.reach": 5}),
    "momentum": ("CLIPS*3+VARIED", RECIPE | {"teacher.momentum": (0.95, 1.0)}),
    "tuned": ("CLIPS*3+VARIED", RECIPE | {"init": "default", "optim.base_lr": 5e-4}),
    # The third round: what was best on the fine grid, the masks of `mix` and the branch, together.
    "hard": ("CLIPS*3+VARIED", HARD),
    "longer": ("CLIPS*3+VARIED", HARD | {"optim.steps": 2000}),
    "raised": ("CLIPS*3+VARIED", HARD | {"init": "default", "optim.base_lr": 1e-3}),
}
# The fourth round: other methods, which differ from their short recipes in size and length.
SMALL = RUNTIME | {"vit.dim": 192, "vit.num_heads": 3, "optim.steps": 1200, "runtime.workers": 4}
METHODS = ("simclr", "dinov2", "croc", "odin")
CANDIDATES |= dict.fromkeys(METHODS, ("CLIPS*3+VARIED", SMALL | {"views.color": 0.0}))
# More rendered videos than recorded clips there can be, for a method that gained from more clips.
CANDIDATES["simclr-rendered"] = ("VARIED", SMALL | {"views.color": 0.0})
# Global crops that are flipped, as DINOv2's are, alone and with the branch.
FLIPPED = HARD | {"views.flip_global": 0.5}
CANDIDATES |= {
    "flipped": ("CLIPS*3+VARIED", FLIPPED | {"auxiliary": "none"}),
    "flipped-branch": ("CLIPS*3+VARIED", FLIPPED),
}
VIDEOS = "rendered-videos"  # under RUNS, beside the folders of candidates
FILTERS = ("pieces", "features", "both")
DETAILS = {"coarse": 1, "fine": 2, "finest": 3}
TRIED = ("default@-3", "default@-5", "default^5")  # features of another block, another reach
CLEAN = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def train_all(clips: Path, runs: Path, seconds: float, only: list[str], settings: dict[str, Any]) -> None:
    """Every candidate and every filter in a process of its own; what is not done in time is stopped."""
    runs.mkdir(parents=True, exist_ok=True)
    begun, running = time.monotonic(), {}
    names = [
        name for name in (*CANDIDATES, *(f"edges-{goal}" for goal in FILTERS)) if not only or name in only
    ]
    for name in names:
        command = [sys.executable, __file__, "one", name, "--clips", str(clips), "--runs", str(runs)]
        command += ["--seconds", str(seconds), "--settings", json.dumps(settings)]
        log = (runs / f"{name}.log").open("w")
        env = CLEAN | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "2"}
        running[name] = subprocess.Popen(command, stdout=log, stderr=log, env=env)
    render_all(runs / VIDEOS, settings.get("videos", 400))
    print(f"rendered after {time.monotonic() - begun:.0f} s", flush=True)
    while running and time.monotonic() - begun < seconds:
        time.sleep(2)
        for name, process in list(running.items()):
            if process.poll() is not None:
                print(f"{name}: exit {process.returncode}, {time.monotonic() - begun:.0f} s", flush=True)
                del running[name]
    for name, process in running.items():
        process.terminate()
        print(f"{name}: stopped", flush=True)
    for name in names:
        print(f"--- {name}", *(runs / f"{name}.log").read_text().splitlines()[-3:], sep="\n", flush=True)


def render_all(out: Path, videos: int) -> None:
    """Varied videos as folders of JPEG frames; the folder appears when all are there."""
    making = out.with_suffix(".making")
    if not out.exists():
        with ProcessPoolExecutor(min(14, os.cpu_count() or 1)) as pool:
            list(pool.map(render_one, [making] * videos, range(videos)))
        making.rename(out)


def render_one(out: Path, number: int) -> None:
    """One video."""
    torch.set_num_threads(1)
    folder = out / f"{number:05d}"
    folder.mkdir(parents=True, exist_ok=True)
    for index, frame in enumerate(render_varied(0, number, size=256)):
        (folder / f"{index:05d}.jpg").write_bytes(encode_jpeg(frame, 90))


def train_one(name: str, clips: Path, runs: Path, seconds: float, settings: dict[str, Any]) -> None:
    """One candidate, or one filter."""
    changed = {key: value for key, value in settings.items() if key not in ("videos", "filter_steps")}
    if name.startswith("edges-"):
        small = "filter_steps" in settings
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        bank = read_bank(clips, device, *((40, 2) if small else (1600, 150)))
        goal: Any = name.removeprefix("edges-")
        encoder = None if goal == "pieces" else load_encoder("default").to(device)
        steps, batch = (settings["filter_steps"], 2) if small else (4000, 32)
        made = train_filter(bank, encoder, goal, steps=steps, seconds=0.6 * seconds, batch=batch)
        save_filter(made, runs / f"{name}.safetensors")
        return
    data = CANDIDATES[name][0]
    while "VARIED" in data and not (runs / VIDEOS).exists():
        time.sleep(1)
    frames = data.replace("CLIPS", str(clips)).replace("VARIED", str(runs / VIDEOS))
    tcore.train(candidate(name, changed), runs / name, frames)


def candidate(name: str, changed: dict[str, Any]) -> tcore.Config:
    """The settings of a candidate."""
    differs, method = CANDIDATES[name][1], name.partition("-")[0]
    if method in METHODS:
        return tcore.recipe(f"vits16-{method}-short", differs | changed)
    return tcore.recipe("vitti16-short", BASE | differs | changed)


class Task(NamedTuple):
    """One clip to score with one encoder at one detail."""

    encoder: str
    detail: str
    root: str
    clip: str
    ways: tuple[str, ...]


def score_all(
    runs: Path,
    sets: list[Path],
    out: Path,
    processes: int,
    seconds: float,
    few: int | None,
    only: list[str],
) -> None:
    """Score what is not scored yet, as far as time allows, print the table, copy what should come back."""
    found, deadline = runs / "scores.jsonl", time.time() + seconds
    known = [json.loads(line) for line in found.read_text().splitlines()] if found.exists() else []
    done = {(row["encoder"], row["detail"], row["root"], row["clip"]) for row in known}
    for name in only:
        if "+" in name and not (runs / name).exists():
            mix_weights(runs, name)
    trained = [name for name in dict.fromkeys((*CANDIDATES, *only)) if encoder_file(runs, name)]
    filters = [f"edges-{goal}" for goal in FILTERS if (runs / f"edges-{goal}.safetensors").exists()]
    clips = [
        (root, clip.name) for root in sets for clip in sorted((root / "JPEGImages/480p").iterdir())[:few]
    ]
    tasks = [
        Task(encoder, detail, str(root), clip, ways(encoder, filters))
        # Clip by clip, so that what is not finished in time is so for all.
        for encoders, detail in (
            (["default", *trained], "fine"),
            (["default", *trained], "coarse"),
            (TRIED, "fine"),
        )
        for root, clip in clips
        for encoder in encoders
        if (not only or encoder in only) and (encoder, detail, root.name, clip) not in done
    ]
    with ProcessPoolExecutor(processes) as pool, found.open("a") as file:
        for rows in pool.map(score_clip, tasks, [runs] * len(tasks), [deadline] * len(tasks)):
            known += rows
            file.write("".join(json.dumps(row) + "\n" for row in rows))
            file.flush()
    print(*table(known), sep="\n", flush=True)
    bring_back(runs, known, trained, out)


def bring_back(runs: Path, rows: list[dict[str, Any]], trained: list[str], out: Path) -> None:
    """The best four encoders in half precision, and one archive of scores, filters, cards and logs."""
    out.mkdir(parents=True, exist_ok=True)
    fine = [row for row in rows if row["detail"] == "fine" and row["way"] == "off"]

    def score(name: str) -> float:
        each = [one for row in fine if row["encoder"] == name for one in row["objects"]]
        return float(np.mean(each)) if each else 0.0

    for name in sorted(trained, key=score, reverse=True)[:4]:
        weights = weights_file(runs, name)
        assert weights is not None
        halves = {key: value.half() for key, value in load_file(weights).items()}
        save_safetensors(halves, out / f"{name}.safetensors")
    with tarfile.open(out / "results.tar", "w") as archive:
        kept = [
            *runs.glob("*.jsonl"),
            *runs.glob("*.safetensors"),
            *runs.glob("*.log"),
            *runs.glob("*/*.json"),
        ]
        for path in sorted(kept):
            archive.add(path, str(path.relative_to(runs)))


def mix_weights(runs: Path, name: str) -> None:
    """The mean weights of two encoders, or of the last four that a run kept, as a folder of its own."""
    first, second = name.split("+")
    made = encoder_file(runs, first)
    kept = sorted((runs / first / "encoders").glob("*.safetensors"), key=os.path.getmtime)[-4:]
    pair = [weights_file(runs, one) for one in (first, second)] if second else kept
    files = [path for path in pair if path is not None]
    if made is None or not files or len(files) < len(pair):
        print(f"{name}: not there")
        return
    loaded = [load_file(path) for path in files]
    mean = {key: torch.stack([one[key].float() for one in loaded]).mean(dim=0) for key in loaded[0]}
    (runs / name).mkdir()
    save_safetensors(mean, runs / name / "encoder.safetensors")
    shutil.copyfile(runs / first / "encoder.json", runs / name / "encoder.json")


def weights_file(runs: Path, name: str) -> Path | None:
    """The weights of a run's encoder, or of the default one."""
    if name == "default":
        return Path(tcore.__file__).parent / "encoders/default.safetensors"
    made = encoder_file(runs, name)
    return made / "encoder.safetensors" if made is not None and made.is_dir() else made


def ways(encoder: str, filters: list[str]) -> tuple[str, ...]:
    """How labels come to pixels (guided: radius, strength, keep): less for candidates."""
    settings = ("1.5 1e-5 0", "1.5 1e-5 1", "1 1e-5 0", "1 1e-5 1", "0.75 1e-5 1")
    guided = tuple(f"guided {one}" for one in settings)
    return ("off", *guided, *filters) if encoder == "default" else ("off", *guided[:2], *filters[-1:])


def encoder_file(runs: Path, name: str) -> Path | None:
    """The encoder of a run, or, where it was stopped, the last one that it kept."""
    if (runs / name / "encoder.safetensors").exists() and (runs / name / "encoder.json").exists():
        return runs / name
    kept = sorted((runs / name / "encoders").glob("*.safetensors"), key=lambda path: path.stat().st_mtime)
    return kept[-1] if kept else None


def score_clip(task: Task, runs: Path, deadline: float) -> list[dict[str, Any]]:
    """J and F of one clip, for every way to bring labels to pixels; nothing after the deadline."""
    if time.time() > deadline:
        return []
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name, _, reach = task.encoder.partition("^")
    name, _, layer = name.partition("@")
    spec = str(encoder_file(runs, name) or name)
    encoder = load_encoder(spec, int(layer or -1), int(reach) if reach else None).to(device)
    root = Path(task.root)
    frames, masks = (
        sorted((root / kind / "480p" / task.clip).iterdir()) for kind in ("JPEGImages", "Annotations")
    )
    read = (lambda path: as_binary(read_ids(path))) if "davis2016" in root.name else read_ids
    truth = [np.where(ids == VOID, 0, ids).astype(np.uint8) for ids in map(read, masks)]
    size, patch = truth[0].shape, encoder.patch_size
    factor = DETAILS[task.detail]
    grid = (30 * factor, 55 * factor)
    inside = (grid[0] * patch, grid[1] * patch)
    classes = int(truth[0].max()) + 1
    first = ids_to_grid(torch.from_numpy(truth[0]), input_size=inside, grid=grid, num_classes=classes)
    protocol = replace(TCORE, precision="bf16" if device.type == "cuda" else "fp32")
    found: dict[str, list[np.ndarray]] = {way: [] for way in task.ways}
    begun, seconds = time.perf_counter(), 0.0
    for frame, soft in run_clip(encoder, ahead(read_image, frames), first, inside, protocol):
        pixels = torch.from_numpy(frame.copy()).to(device)
        for way in task.ways:
            if way == "off":
                ids = grid_to_ids(soft, input_size=inside, output_size=size)
            else:
                fine = filtered(way, soft, pixels, runs, device)
                ids = grid_to_ids(fine, input_size=size, output_size=size)
            found[way].append(ids.cpu().numpy())
    seconds = time.perf_counter() - begun
    rows = []
    for way, predicted in found.items():
        every = 4 if classes > 8 else 1  # of many objects, the boundaries take long
        pairs = zip(truth[1:-1:every], predicted[1:-1:every], strict=True)
        objects = scores.object_scores(pairs, classes - 1)
        each = [[float(np.mean(kind)) for kind in one] for one in objects]
        rows.append(
            {"encoder": task.encoder, "detail": task.detail, "root": root.name, "clip": task.clip, "way": way}
            | {"objects": each, "frames": len(frames), "seconds": round(seconds, 2)}
        )
    return rows


def filtered(
    way: str, soft: torch.Tensor, frame: torch.Tensor, runs: Path, device: torch.device
) -> torch.Tensor:
    """Labels of the guide."""
    if way.startswith("guided"):
        _, radius, strength, keep = way.split()
        return guided_labels(soft, frame, float(radius), float(strength), keep=keep == "1")
    return load_filter(device, runs / f"{way}.safetensors").refine(soft, frame)


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """J&F, J and F by encoder, detail and way: means over all objects of a set."""
    roots = sorted({row["root"] for row in rows})
    yield " | ".join(["encoder detail way", *(f"{root} J&F (J F) n" for root in roots)])
    keys = dict.fromkeys((row["encoder"], row["detail"], row["way"]) for row in rows)
    for key in sorted(keys):
        cells = []
        for root in roots:
            mine = [r for r in rows if (r["encoder"], r["detail"], r["way"]) == key and r["root"] == root]
            objects = np.array([one for row in mine for one in row["objects"]]).reshape(-1, 2)
            j, f = 100 * objects.mean(0) if len(objects) else (np.nan, np.nan)
            cells.append(f"{(j + f) / 2:.1f} ({j:.1f} {f:.1f}) {len(mine)}")
        yield " | ".join([" ".join(key), *cells])


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("train", "one", "score"))
    parser.add_argument("name", nargs="?")
    parser.add_argument("--clips", type=Path)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=500)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--settings", type=json.loads, default={}, help="JSON that changes all candidates")
    parser.add_argument("--sets", type=Path, nargs="*", default=[])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--few", type=int)
    given = parser.parse_args()
    if given.what == "train":
        train_all(given.clips.resolve(), given.runs.resolve(), given.seconds, given.only, given.settings)
    elif given.what == "one":
        train_one(given.name, given.clips, given.runs, given.seconds, given.settings)
    else:
        score_all(given.runs, given.sets, given.out, given.processes, given.seconds, given.few, given.only)


if __name__ == "__main__":
    main()
