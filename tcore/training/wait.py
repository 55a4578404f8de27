"""Whether training waits for its data, and what would help."""

from collections import deque
from collections.abc import Mapping
from typing import Any

from tcore.data.images import simplejpeg
from tcore.data.loader import num_workers
from tcore.data.samples import Source
from tcore.data.stores import PackedStore, RenderedStore
from tcore.device import num_cores

SHARE = 0.1  # of the time: more of it spent waiting is worth a word
WINDOW, FEWEST = 50, 10  # steps that are averaged over, at most and at least
SILENCE = 500  # steps until it is said again


class DataWait:
    """Averages the share of the time that steps wait for data, and warns now and then."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._steps: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        self._first, self._silent_until = True, 0

    def note(self, step: int, metrics: Mapping[str, Any], look: bool) -> str | None:
        """Count a step; where people look, say so if there was too much waiting."""
        if self._first or isinstance(self._source.store, RenderedStore):
            # The first step waits for the reading processes to start; rendered videos are kept in memory.
            self._first = False
            return None
        seconds = 1 / metrics["samples_per_second"]  # in units of a batch, which cancel out
        self._steps.append((metrics["data_wait"] * seconds, seconds))
        waited, spent = (sum(column) for column in zip(*self._steps, strict=True))
        ripe = look and len(self._steps) >= FEWEST and step >= self._silent_until
        if not ripe or waited <= SHARE * spent:
            return None
        self._silent_until = step + SILENCE
        return (
            f"warning: step {step}: {waited / spent:.0%} of the last {len(self._steps)} steps was spent "
            f"waiting for data; {self._advice()}"
        )

    def _advice(self) -> str:
        """The knobs that are left to turn."""
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
