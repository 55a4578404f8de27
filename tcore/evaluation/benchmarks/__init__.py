"""The benchmarks: a new one is a class in a file of its own, and an entry in this list."""

from tcore.errors import InputError
from tcore.evaluation.benchmarks.benchmark import Benchmark, Source
from tcore.evaluation.benchmarks.davis import Davis as Davis
from tcore.evaluation.benchmarks.jhmdb import Jhmdb as Jhmdb
from tcore.evaluation.benchmarks.rendered import Rendered
from tcore.evaluation.benchmarks.vip import Vip as Vip
from tcore.evaluation.protocols import Protocol
from tcore.evaluation.resize import Size
from tcore.text import did_you_mean

BENCHMARKS: tuple[type[Benchmark], ...] = (Davis, Vip, Jhmdb, Rendered)


def find_benchmark(name: str) -> type[Benchmark]:
    """A benchmark by its name, or by the name that it had before.

    >>> find_benchmark("davis").main_score
    'J&F'
    """
    for benchmark in BENCHMARKS:
        if name in (benchmark.name, benchmark.old_name):
            return benchmark
    names = [benchmark.name for benchmark in BENCHMARKS]
    raise InputError(f"no benchmark {name!r}: there are {', '.join(names)}.{did_you_mean(name, names)}")


def open_benchmark(
    name: str,
    source: Source,
    protocol: Protocol,
    *,
    binary: bool = False,
    size: Size | None = None,
    most: int | None = None,
) -> Benchmark:
    """A benchmark by its name: its clips are found, nothing is read yet; `most` takes some of them."""
    return find_benchmark(name).open(source, protocol, binary=binary, size=size, most=most)
