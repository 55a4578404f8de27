"""The benchmarks: a new one is a class in a file of its own, and a line in this list; no torch here."""

import importlib
from typing import TYPE_CHECKING

from tcore.errors import InputError
from tcore.text import did_you_mean

if TYPE_CHECKING:
    from tcore.evaluation.benchmarks.benchmark import Benchmark

# What a dataset on disk holds, by the benchmark's name: it then has a flag, such as --davis DIR.
# The class is called like its module, and imported when it is used.
BENCHMARKS = {
    "davis": "JPEGImages/480p, Annotations/480p",
    "vip": "Images, Annotations/Category_ids",
    "jhmdb": "Rename_Images, joint_positions",
    "points": "folders of frames, each with a keypoints.csv (frame,name,x,y,visible)",
    "rendered": "",
}


def datasets() -> list[str]:
    """Names of the benchmarks that are read from a folder."""
    return [name for name, folders in BENCHMARKS.items() if folders]


def all_benchmarks() -> "list[type[Benchmark]]":
    """The classes, in the order of the list."""
    return [getattr(importlib.import_module(f"{__name__}.{name}"), name.capitalize()) for name in BENCHMARKS]


def find_benchmark(name: str) -> "type[Benchmark]":
    """A benchmark by its name, or by the name that it had before.

    >>> find_benchmark("davis").score_names[0]
    'J&F'
    """
    for benchmark in all_benchmarks():
        if name in (benchmark.name, benchmark.old_name):
            return benchmark
    raise InputError(
        f"no benchmark {name!r}: there are {', '.join(BENCHMARKS)}.{did_you_mean(name, BENCHMARKS)}"
    )
