"""What a process of a lab of methods does: train a run, score it, or measure its speed."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tcore.config import from_dict
from tcore.device import choose_device, num_cores
from tcore.errors import InputError
from tcore.evaluation.benchmarks import find_benchmark
from tcore.evaluation.card import device_name
from tcore.evaluation.encoder import load_control
from tcore.evaluation.encoders import load_encoder
from tcore.evaluation.evaluate import evaluate
from tcore.evaluation.protocols import protocol
from tcore.files import write_json
from tcore.lab.record import COST, SCORES, SPEED, Dataset, read_work
from tcore.pretrain import train
from tcore.text import print_error, to_stderr, to_stdout
from tcore.training.checkpoint import ENCODER
from tcore.training.plan import measure_speed


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
        for grid in dataset.grids(encoder.patch_size):
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
            names = find_benchmark(kind).score_names
            found.setdefault(dataset.label, {})[grid] = {
                **{name: result[name] for name in ("scores", "interval", "truth")},
                "main": names[0],
                "seconds": card["seconds"],
                "clips": {
                    clip: {name: scores[name] for name in names if name in scores}
                    for clip, scores in result["clips"].items()
                },
            }
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


def main(words: Sequence[str]) -> None:
    """What a process of the lab does: `python -m tcore.lab.worker train|score|speed FOLDER [NUMBER]`."""
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
