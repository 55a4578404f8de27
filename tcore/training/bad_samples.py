"""Samples that could not be read while a run went on: counted, told, and too many of them end it."""

from collections import deque

from tcore.errors import InputError

WINDOW = 1000  # samples that the share is taken of
SILENCE = 100  # steps until it is said again


class UnreadableError(InputError):
    """More samples could not be read than the settings allow."""


class BadSamples:
    """Counts unreadable samples among the last thousand or so; each was replaced by another one."""

    def __init__(self, limit: float) -> None:
        self.total, self._limit, self._silent_until = 0, limit, 0
        self._steps: deque[tuple[int, int]] = deque()  # bad, read

    def note(self, step: int, bad: tuple[str, ...], read: int) -> str | None:
        """Count a step: a line now and then, an error above the limit."""
        self._steps.append((len(bad), read))
        while len(self._steps) > 1 and sum(n for _, n in self._steps) - self._steps[0][1] >= WINDOW:
            self._steps.popleft()
        if not bad:
            return None
        self.total += len(bad)
        recent, among = (sum(column) for column in zip(*self._steps, strict=True))
        if recent > self._limit * max(among, WINDOW):
            raise UnreadableError(
                f"step {step}: {recent} of the last {max(among, WINDOW)} samples could not be read, more "
                f"than runtime.bad_samples={self._limit:g} allows: look with tcore check, repair the store "
                "or raise the setting; the same command goes on from the last checkpoint. "
                f"The last one: {bad[-1]}"
            )
        if step < self._silent_until:
            return None
        self._silent_until = step + SILENCE
        return (
            f"warning: step {step}: {len(bad)} unreadable, replaced by other clips "
            f"({self.total} since the start of this process): {bad[-1]}"
        )
