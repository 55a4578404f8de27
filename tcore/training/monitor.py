"""What a run watches in its data: the time spent waiting for it, and samples that cannot be read."""

from collections import deque
from collections.abc import Mapping
from typing import Any

from tcore.data.images import simplejpeg
from tcore.data.loader import num_workers
from tcore.data.source import Source
from tcore.data.stores import PackedStore, RenderedStore
from tcore.device import num_cores
from tcore.errors import InputError

WAIT_SHARE = 0.1  # of the time: more of it spent waiting is worth a warning
WAIT_STEPS, WAIT_FEWEST = 50, 10  # steps that are averaged over, at most and at least
WAIT_PAUSE = 500  # steps until the next warning
BAD_SAMPLES = 1000  # samples that the share of bad ones is taken of
BAD_PAUSE = 100  # steps until the next warning


class UnreadableError(InputError):
    """More samples could not be read than the settings allow."""


class DataWait:
    """Averages the share of the time that steps wait for data, and warns now and then."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._steps: deque[tuple[float, float]] = deque(maxlen=WAIT_STEPS)
        self._first, self._quiet_until = True, 0

    def note(self, step: int, metrics: Mapping[str, Any], look: bool) -> str | None:
        """Count a step; where a line is printed anyway, return a warning if there was too much waiting."""
        if self._first or isinstance(self._source.store, RenderedStore):
            # The first step waits for the reading processes to start; rendered videos are kept in memory.
            self._first = False
            return None
        seconds = 1 / metrics["samples_per_second"]  # in units of a batch, which cancel out
        self._steps.append((metrics["data_wait"] * seconds, seconds))
        waited, spent = (sum(column) for column in zip(*self._steps, strict=True))
        due = look and len(self._steps) >= WAIT_FEWEST and step >= self._quiet_until
        if not due or waited <= WAIT_SHARE * spent:
            return None
        self._quiet_until = step + WAIT_PAUSE
        return (
            f"warning: step {step}: {waited / spent:.0%} of the last {len(self._steps)} steps was spent "
            f"waiting for data; {self._advice()}"
        )

    def _advice(self) -> str:
        """Settings that are left to try."""
        workers, cores = num_workers(self._source), num_cores()
        advice = []
        if workers < cores:
            advice.append(f"--runtime.workers {cores} reads with every core (now {workers})")
        if not isinstance(self._source.store, PackedStore):
            advice.append("tcore prepare packs the frames into few large files")
        if simplejpeg() is None:
            advice.append("pip install simplejpeg decodes several times faster")
        if not advice:
            advice.append("tcore prepare --short-side 256 makes smaller frames, which decode faster")
        return ", ".join(advice) + "; benchmarks/loader.py shows where the time goes."


class BadSamples:
    """Counts samples that could not be read, and were replaced by others; too many of them end the run."""

    def __init__(self, limit: float) -> None:
        self.total, self._limit, self._quiet_until = 0, limit, 0
        self._steps: deque[tuple[int, int]] = deque()  # bad, read

    def note(self, step: int, bad: tuple[str, ...], read: int) -> str | None:
        """Count a step: a warning now and then, an error above the limit."""
        self._steps.append((len(bad), read))
        while len(self._steps) > 1 and sum(n for _, n in self._steps) - self._steps[0][1] >= BAD_SAMPLES:
            self._steps.popleft()
        if not bad:
            return None
        self.total += len(bad)
        recent, among = (sum(column) for column in zip(*self._steps, strict=True))
        if recent > self._limit * max(among, BAD_SAMPLES):
            raise UnreadableError(
                f"step {step}: {recent} of the last {max(among, BAD_SAMPLES)} samples could not be read, "
                f"more than runtime.bad_samples={self._limit:g} allows: find them with tcore check, repair "
                "the store or raise the setting, and rerun the same command to resume. "
                f"The last one: {bad[-1]}"
            )
        if step < self._quiet_until:
            return None
        self._quiet_until = step + BAD_PAUSE
        return (
            f"warning: step {step}: {len(bad)} unreadable, replaced by other clips "
            f"({self.total} since the start of this process): {bad[-1]}"
        )
