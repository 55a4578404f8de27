"""Methods side by side, a table of `lab`: one set of clips, one budget, one way of scoring at two grids."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, get_args

import numpy as np

from tcore.config import Config, differences, flatten, from_dict, override, to_dict
from tcore.device import choose_device, num_cores
from tcore.errors import InputError
from tcore.evaluation.benchmarks import find_benchmark
from tcore.evaluation.card import device_name, interval
from tcore.evaluation.encoder import load_control
from tcore.evaluation.encoders import load_encoder
from tcore.evaluation.evaluate import evaluate
from tcore.evaluation.intervals import clip_scores, difference, mean_scores
from tcore.evaluation.protocols import TCORE, Precision, protocol
from tcore.evaluation.published import PUBLISHED
from tcore.files import check_writable, number, number_or_nan, read_json, whole, write_json
from tcore.lab import (
    DONE,
    PICTURE,
    Job,
    Processes,
    Row,
    finished,
    refuse_changed,
    run_command,
    run_jobs,
    run_table,
    write_table,
)
from tcore.pretrain import check_training, train
from tcore.recipes import recipe
from tcore.show.comparison import GRIDS, at, draw_scores, markdown
from tcore.show.runs import read_run
from tcore.text import Say, count, print_error, silent, to_stderr, to_stdout
from tcore.training.checkpoint import ENCODER
from tcore.training.plan import measure_speed

WORK, COST, SCORES, SPEED = "job.json", "cost.json", "scores.json", "speed.json"
MODULE = "tcore.compare"
MEASURED = 10.0  # seconds of steps that tell the speed of a row
# Rows without learning, which a method should beat: labels of the first frame, mean color of a patch.
BASELINES = ("copy", "color")
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


# What is read of the files of a run.
WORK_SHAPE = {
    "config": dict,
    "baseline?": lambda value: value is None or isinstance(value, str),
    "patch_size?": whole,
    "recipe?": str,
    "frames?": lambda value: value is None or isinstance(value, str),
    "datasets?": [lambda value: isinstance(value, list) and [*map(type, value)] == [str, str, bool]],
    "precision?": lambda value: value in get_args(Precision),
}
SPEED_SHAPE = {
    "config": dict,
    "device?": str,
    "samples_per_second": lambda value: number(value) and value > 0,
    "gib": number,
    "wait?": number,
}
COST_SHAPE = {"at_a_time": whole, "device": str}
RESULT_SHAPE = {
    "main": str,
    "truth?": str,
    "scores": {str: number_or_nan},
    "interval": {str: interval},
    "clips?": {str: {str: number_or_nan}},  # not in labs of earlier versions
}


class Dataset(NamedTuple):
    """What encoders are scored on: a benchmark's name, and its folder or a number of rendered videos."""

    kind: str
    source: str
    binary: bool = False

    @property
    def label(self) -> str:
        """A short name for the table."""
        return Path(self.source).resolve().name if self.kind != "rendered" else "rendered"

    @property
    def grids(self) -> tuple[str, ...]:
        """The protocols that it is scored with; rendered videos have one grid."""
        return tuple(GRIDS)[:1] if self.kind == "rendered" else tuple(GRIDS)

    def check(self) -> None:
        """Refuse what could not be scored."""
        find_benchmark(self.kind).open(self.source, TCORE, binary=self.binary).check()


@dataclass(frozen=True)
class Entry:
    """A row: its name, the recipe that it starts from, and its settings (the seed and the length follow)."""

    name: str
    recipe: str
    config: Config


@dataclass(frozen=True)
class Budget:
    """How long every row is trained, given in one of three ways; without any, as long as its recipe says."""

    steps: int | None = None
    samples: int | None = None
    minutes: float | None = None
    """Minutes of training on this device, at the steady speed that is measured first."""

    def steps_of(self, config: Config, samples_per_second: float | None) -> int | None:
        """The length of a run in steps."""
        if self.steps is not None:
            return self.steps
        samples = self.samples
        if self.minutes is not None:
            assert samples_per_second is not None  # measured before anything is trained
            samples = round(60 * self.minutes * samples_per_second)
        return config.optim.steps if samples is None else max(1, round(samples / config.optim.samples))


@dataclass(frozen=True)
class Shared:
    """What all rows share."""

    frames: str | None = None
    """Training data, as for `tcore train`; None: rendered videos."""
    datasets: tuple[Dataset, ...] = field(default=(Dataset("rendered", "24"),))
    precision: Precision = "fp32"
    """Arithmetic of scoring; bf16 is faster on a GPU."""

    def scoring(self) -> dict[str, Any]:
        """How rows are scored, for job.json."""
        return {"datasets": [list(each) for each in self.datasets], "precision": self.precision}

    def check(self) -> None:
        """Refuse data that could not be scored, before anything is trained."""
        labels = [dataset.label for dataset in self.datasets]
        for dataset in self.datasets:
            if labels.count(dataset.label) > 1:
                raise InputError(f"two datasets are called {dataset.label}: give one of them another name.")
            dataset.check()


def compare(
    entries: Sequence[Entry],
    out: Path,
    shared: Shared,
    *,
    baselines: Sequence[str] = (),
    budget: Budget = Budget(),
    seeds: int = 1,
    devices: Sequence[str] = ("",),
    measure: bool = False,
    seconds: float = MEASURED,
    say: Say = silent,
) -> list[str]:
    """Train and score what is missing; write lab.md, lab.json and lab.png. Rows of earlier calls are kept.

    `baselines` (`BASELINES`) are rows that are only scored, on the grid of the first entry. `measure` takes
    the speed of every row by itself also where the budget does not need it. `devices` are numbers of GPUs;
    one that is named twice has two runs at a time.
    """
    check_writable(out)
    shared.check()
    for entry in entries:
        if Row(entry.name).folder != entry.name:
            raise InputError(f"row {entry.name!r} is no name of a folder: use letters, digits, . _ and -.")
        try:
            check_training(entry.config, shared.frames)
        except InputError as error:
            raise InputError(f"row {entry.name}: {error}") from error
    if measure or budget.minutes is not None:
        measure_rows(entries, out, shared, devices, seconds, say)
    works: dict[Job, dict[str, Any]] = {}
    for seed in range(seeds):
        for entry in entries:
            speed = read_speed(out / entry.name, entry.config)
            steps = budget.steps_of(entry.config, None if speed is None else speed["samples_per_second"])
            config = override(entry.config, {"optim.steps": steps, "seed": seed})
            job = Job(Row(entry.name), seed, out / entry.name / f"seed-{seed}")
            works[job] = work_of(replace(entry, config=config), shared)
    for name in baselines:
        job = Job(Row(name), 0, out / name / "seed-0")
        works[job] = baseline_work(name, entries[0].config.vit.patch_size, shared)
    todo = {job: is_missing(job, work) for job, work in works.items()}  # refuses before anything is written
    if budget.minutes is not None:
        check_measured_here(dict.fromkeys(job.folder.parent for job, missing in todo.items() if missing))
    commands: dict[Job, list[list[str]] | None] = dict.fromkeys(works)
    for job, work in works.items():
        if todo[job]:
            (job.folder / DONE).unlink(missing_ok=True)
            train = [] if "baseline" in work else [["train", str(job.folder), str(len(devices))]]
            commands[job] = [*train, ["score", str(job.folder)]]
        write_json(job.folder / WORK, work)
    write = partial(write_rows, out, [entry.name for entry in entries])
    return run_table(commands, out, devices, say, write, MODULE)


def measure_rows(
    entries: Sequence[Entry], out: Path, shared: Shared, devices: Sequence[str], seconds: float, say: Say
) -> None:
    """Measure the steady speed of every row that has none yet; several warm up at a time, one is timed."""
    missing = [entry for entry in entries if read_speed(out / entry.name, entry.config) is None]
    for entry in missing:
        work = {"config": to_dict(entry.config), "frames": shared.frames}
        write_json(out / entry.name / WORK, work)

    def run(job: Job, free: "SimpleQueue[str]", processes: Processes) -> None:
        device = free.get()
        try:
            run_command(["speed", str(job.folder), str(seconds)], job, "speed.log", device, processes, MODULE)
        finally:
            free.put(device)
        if (found := read_speed(job.folder)) is not None:
            wait = f"{found.get('wait', 0.0):.0%} of the time waiting for frames"
            say(
                f"{job.row.name}: {found['samples_per_second']:.1f} samples/s, {found['gib']:.1f} GiB, {wait}"
            )

    jobs = [Job(Row(entry.name), 0, out / entry.name) for entry in missing]
    say(f"measuring the speed of {count(len(jobs), 'row')}")
    if failed := run_jobs(jobs, run, devices, say, list):
        raise failed[0]


def read_speed(folder: Path, config: Config | None = None) -> dict[str, Any] | None:
    """The measured speed of a row; None where it was not measured. That of other settings is refused."""
    if not (folder / SPEED).exists():
        return None
    found: dict[str, Any] = read_json(folder / SPEED, shape=SPEED_SHAPE, remedy="remove it")
    if config is not None:
        refuse_changed(differences(from_dict(found["config"]), config), folder)
    return found


def work_of(entry: Entry, shared: Shared) -> dict[str, Any]:
    """What job.json says of a run: how to train and score it."""
    return {
        "recipe": entry.recipe,
        "frames": shared.frames,
        "config": to_dict(entry.config),
        **shared.scoring(),
    }


def baseline_work(name: str, patch_size: int, shared: Shared) -> dict[str, Any]:
    """What job.json says of a baseline, which is only scored."""
    return {"config": {}, "baseline": name, "patch_size": patch_size, **shared.scoring()}


def is_missing(job: Job, work: dict[str, Any]) -> bool:
    """Whether a run is still to be trained or scored; refuses a folder that was made with other settings."""
    folder = job.folder
    if not (folder / WORK).is_file():
        return True
    before, wanted = read_work(folder), NO_WORK | work
    if "baseline" not in work:
        refuse_changed(differences(from_dict(before["config"]), from_dict(work["config"])), folder)
        if before["frames"] != work["frames"]:
            raise InputError(
                f"{folder} was made with --frames {before['frames']}, now {work['frames']}: give another "
                "--out, or remove this folder."
            )
    if not (folder / DONE).is_file():
        return True
    changed = any(before[name] != wanted[name] for name in SCORING)
    if changed and "baseline" not in work and not (folder / "run" / ENCODER).is_file():
        raise InputError(
            f"{folder} has no {ENCODER} left that could be scored in another way: score it as before, give "
            "another --out, or remove this folder."
        )
    return changed


def check_measured_here(folders: Iterable[Path]) -> None:
    """Refuse to turn minutes into steps by the speed of another device."""
    for folder in folders:
        found = read_speed(folder) or {}
        here = device_name(choose_device(from_dict(found["config"]).runtime.device)) if found else ""
        if found.get("device", here) != here:
            raise InputError(
                f"{folder / SPEED} was measured on {found['device']}, this is {here}: give another --out, or "
                "remove it."
            )


SCORING = ("datasets", "precision", "patch_size")  # in job.json: how a run is scored
# What job.json says where it says nothing.
NO_WORK: dict[str, Any] = {
    "baseline": None,
    "patch_size": 16,
    "recipe": "",
    "frames": None,
    "datasets": [],
    "precision": "fp32",
}


def read_work(folder: Path) -> dict[str, Any]:
    """The settings of a run: how to train and score it."""
    found: dict[str, Any] = read_json(folder / WORK, "what to do from ", WORK_SHAPE, "remove it")
    return NO_WORK | found


def train_here(folder: Path, at_a_time: int) -> None:
    """Train a run in this process, or resume it; one that is trained is left alone."""
    work = read_work(folder)
    config, frames = from_dict(work["config"]), work["frames"]
    if not (folder / COST).is_file():
        if frames is not None and config.runtime.workers is None:  # cores are shared by the runs at a time
            workers = max(1, min(16, num_cores() // at_a_time))
            config = replace(config, runtime=replace(config.runtime, workers=workers))
        train(config, folder / "run", frames)
        cost = {"at_a_time": at_a_time, "device": device_name(choose_device(config.runtime.device))}
        write_json(folder / COST, cost, indent=None)
    to_stdout(f"encoder: {folder / 'run' / ENCODER}")


def score_here(folder: Path) -> None:
    """Score a trained run on all datasets and grids in this process; clips that are on disk are reused."""
    work = read_work(folder)
    baseline = work["baseline"]
    encoder = load_control(baseline, work["patch_size"]) if baseline else load_encoder(folder / "run")
    encoder.to(choose_device("auto"))
    found: dict[str, dict[str, Any]] = {}
    for kind, source, binary in work["datasets"]:
        dataset = Dataset(kind, source, binary)
        sources: dict[str, Any] = {kind: int(source) if kind == "rendered" else source}
        for grid in dataset.grids:
            card = evaluate(
                encoder,
                protocol=replace(protocol(grid), precision=work["precision"]),
                binary=binary,
                alone=True,
                out=folder / "scores" / f"{dataset.label}-{grid}",
                say=to_stderr,
                **sources,
            )
            (result,) = card["benchmarks"].values()
            kept = {name: result[name] for name in ("scores", "interval", "truth")}
            names = find_benchmark(kind).score_names
            kept |= {"main": names[0], "seconds": card["seconds"]}
            kept["clips"] = {
                clip: {name: found[name] for name in names if name in found}
                for clip, found in result["clips"].items()
            }
            found.setdefault(dataset.label, {})[grid] = kept
    write_json(folder / SCORES, found)


def speed_here(folder: Path, seconds: float) -> None:
    """Measure the speed of a row in this process."""
    work = read_work(folder)
    config = from_dict(work["config"])
    lock = folder.parent / f"speed-{os.environ.get('CUDA_VISIBLE_DEVICES', 'cpu')}.lock"
    with among_others(lock) as alone:
        found = measure_speed(config, work["frames"], seconds=seconds, alone=alone)
    device = device_name(choose_device(config.runtime.device))
    said = {"config": work["config"], **found._asdict(), "device": device}
    write_json(folder / SPEED, said)


@contextmanager
def among_others(path: Path) -> Iterator[Callable[[], Any]]:
    """A shared lock: inside the block several processes may work; `alone` waits until no other one does."""
    import fcntl

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_SH)

        @contextmanager
        def alone() -> Iterator[None]:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
            fcntl.flock(file, fcntl.LOCK_UN)

        yield alone


def write_rows(out: Path, first: Sequence[str], draw: bool) -> list[str]:
    """Write all rows of a folder; the named ones come first, baselines last."""
    folders = {path.parent.parent.name for path in out.glob(f"*/seed-*/{DONE}")}
    rows = [collect_row(out / name) for name in (*first, *sorted(folders - set(first))) if name in folders]
    rows.sort(key=lambda row: row["train"] is None)
    note_differences(rows)
    if draw and any(row["scores"] for row in rows):
        draw_scores(rows, out / PICTURE, title="methods, one budget")
    picture = ["", f"![Score against minutes of training]({PICTURE})"]
    return write_table(out, rows, [*markdown(rows), *picture] if rows else [])


def note_differences(rows: Sequence[dict[str, Any]]) -> None:
    """Note how far every row is above the first one, at every grid: on each dataset, and on all of them.

    Where true labels or clips are not those of the first row, nothing is compared.
    """
    for row in rows[1:]:
        row["difference"], row["other_clips"] = {}, []
        for grid in GRIDS:
            sets = []
            for label in dict.fromkeys((*rows[0]["scores"], *row["scores"])):
                found, other = at(row, label, grid), at(rows[0], label, grid)
                if found and other and found["truth"] != other["truth"]:
                    row["other_clips"] += [label] if label not in row["other_clips"] else []
                    other = {}
                if found or other:
                    sets.append((found.get("clips", {}), other.get("clips", {})))
                if found:
                    found["difference"] = difference(sets[-1])
            row["difference"][grid] = difference(*sets) if len(sets) > 1 else None


def read_scores(run: Path) -> dict[str, dict[str, Any]]:
    """The scores of a run by dataset and grid."""
    remedy = f"remove {run / DONE}, and the next call scores this run again"
    found: dict[str, dict[str, Any]] = read_json(run / SCORES, "", {str: {str: RESULT_SHAPE}}, remedy)
    for result in (result for grids in found.values() for result in grids.values()):
        if result["main"] not in result["scores"]:
            raise InputError(f"cannot read {run / SCORES}: no score {result['main']!r}; {remedy}.")
    return found


def collect_row(folder: Path) -> dict[str, Any]:
    """What is known of a row: every score over its seeds, and what it cost; baselines cost nothing."""
    works = {run: read_work(run) for run in finished(folder)}
    first, *_ = works.values()
    # A seed that was scored in another way than the first one would spoil the mean.
    runs = [run for run, work in works.items() if all(work[name] == first[name] for name in SCORING)]
    cards = [read_scores(run) for run in runs]
    row: dict[str, Any] = {
        "row": folder.name,
        "train": None,
        "precision": first["precision"],
        "seeds": len(runs),
        "left_out": len(works) - len(runs),
        "scores": {
            label: {grid: over_runs([card[label][grid] for card in cards]) for grid in grids}
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
            f"seeds of a row have other scores or clips each: remove their {DONE} to score them again."
        )
    ends = [result["interval"].get(main) for result in results]
    return {
        "main": main,
        "truth": results[0].get("truth"),
        **mean_scores([result["scores"] for result in results], results[0]["scores"], main),
        "over_clips": [100 * float(x) for x in np.mean(ends, axis=0)] if all(ends) else None,
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


def main(words: Sequence[str]) -> None:
    """What a process of the lab does: `python -m tcore.compare train|score|speed FOLDER [NUMBER]`."""
    what, folder = words[0], Path(words[1])
    try:
        if what == "train":
            train_here(folder, int(words[2]))
        elif what == "score":
            score_here(folder)
        else:
            speed_here(folder, float(words[2]))
    except InputError as error:
        print_error(str(error))
        raise SystemExit(error.exit_code) from None


if __name__ == "__main__":
    main(sys.argv[1:])
