"""Being asked to leave: a signal ends a run after its current step, with a checkpoint."""

import signal
import threading
from types import FrameType
from typing import Any

# Of an operator or a scheduler: SLURM sends either before it takes the machine away.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Preempted(SystemExit):
    """A run saved itself and left because it was asked to; not caught, the process ends with exit code 0."""

    def __init__(self) -> None:
        super().__init__(0)


class StopRequest:
    """While entered, notes the first signal that asks to stop; the loop looks at it after every step."""

    def __init__(self) -> None:
        self.name: str | None = None
        self._before: dict[signal.Signals, Any] = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.name = self.name or signal.Signals(number).name

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():  # Python allows it nowhere else
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            # None: the handler was not installed from Python, and cannot be from here.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
