"""Spoilt files of every kind: a reader gives a value or says in one line what is wrong, and never hangs."""

import resource
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import numpy as np
import pytest

from tcore.errors import InputError
from tests.readers import Reader, make_readers, spoil

SECONDS = 10  # a reader of a file of some kilobytes that takes longer hangs


class HangError(Exception):
    """A reader took too long."""


@contextmanager
def time_limit() -> Iterator[None]:
    """Interrupt what takes too long."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise HangError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def try_reader(reader: Reader, data: bytes) -> str:
    """Give a reader some bytes; `read` or `refused`, anything else is an error."""
    reader.file.write_bytes(data)
    try:
        with time_limit():
            reader.read()
    except InputError:
        return "refused"
    except Exception as error:
        raise AssertionError(f"{reader.name}: {error!r} of {data!r}") from error
    return "read"


def campaign(root: Path, inputs: int, seed: int) -> Counter[tuple[str, str]]:
    """Share some inputs among all readers; the others' files are whole meanwhile."""
    rng, outcomes = np.random.default_rng(seed), Counter[tuple[str, str]]()
    readers = make_readers(root)
    for number, reader in enumerate(readers):
        whole = reader.file.read_bytes()
        for _ in range(inputs // len(readers) + (number < inputs % len(readers))):
            outcomes[reader.name, try_reader(reader, spoil(whole, rng))] += 1
        reader.file.write_bytes(whole)
        reader.read()
    return outcomes


def test_spoilt_files_are_read_or_refused_and_nothing_else(tmp_path: Path) -> None:
    outcomes = campaign(tmp_path, inputs=1500, seed=0)
    assert outcomes.total() == 1500
    # What is only a hint, or free text, is never refused.
    lenient = {"checkpoint.json", "metrics.jsonl", "list of clips"}
    assert {name for name, _ in outcomes} - lenient <= {n for n, what in outcomes if what == "refused"}


@pytest.mark.long
def test_a_hundred_thousand_spoilt_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begun, memory = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcomes = campaign(tmp_path, inputs=100_000, seed=1)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) / 2**20
    with capsys.disabled():
        print(f"\n{outcomes.total():,} inputs, {time.monotonic() - begun:.0f} s, {grown:.2f} GiB more")
        for name in dict.fromkeys(name for name, _ in outcomes):
            print(f"| {name} | {outcomes[name, 'refused']:,} | {outcomes[name, 'read']:,} |")
    assert outcomes.total() == 100_000
    assert grown < 2
