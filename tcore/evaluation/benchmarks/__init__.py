"""The benchmarks: a new one is a class in a file of its own, and an entry in this list; no torch here."""

import importlib
from typing import TYPE_CHECKING, NamedTuple

from tcore.errors import InputError
from tcore.text import did_you_mean

if TYPE_CHECKING:
    from tcore.evaluation.benchmarks.benchmark import Benchmark


class Entry(NamedTuple):
    """A benchmark of the list; its class is imported when it is used."""

    name: str
    place: str
    """Module and class."""
    folders: str = ""
    """What a dataset on disk holds; it then has a flag, such as --davis DIR."""

    def load(self) -> "type[Benchmark]":
        """The class."""
        module, _, name = self.place.partition(":")
        found: type[Benchmark] = getattr(importlib.import_module(module), name)
        return found


BENCHMARKS = (
    Entry("davis", f"{__name__}.davis:Davis", "JPEGImages/480p, Annotations/480p"),
    Entry("vip", f"{__name__}.vip:Vip", "Images, Annotations/Category_ids"),
    Entry("jhmdb", f"{__name__}.jhmdb:Jhmdb", "Rename_Images, joint_positions"),
    Entry("rendered", f"{__name__}.rendered:Rendered"),
)


def datasets() -> list[str]:
    """Names of the benchmarks that are read from a folder."""
    return [entry.name for entry in BENCHMARKS if entry.folders]


def all_benchmarks() -> "list[type[Benchmark]]":
    """The classes, in the order of the list."""
    return [entry.load() for entry in BENCHMARKS]


def find_benchmark(name: str) -> "type[Benchmark]":
    """A benchmark by its name, or by the name that it had before.

    >>> find_benchmark("davis").main_score
    'J&F'
    """
    for benchmark in all_benchmarks():
        if name in (benchmark.name, benchmark.old_name):
            return benchmark
    names = [entry.name for entry in BENCHMARKS]
    raise InputError(f"no benchmark {name!r}: there are {', '.join(names)}.{did_you_mean(name, names)}")
