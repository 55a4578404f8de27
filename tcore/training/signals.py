"""Being asked to leave: a signal ends a run after its current step, with a checkpoint."""

import signal
import threading
from types import FrameType
from typing import Any

from tcore.training.guard import LostPeerError

# Of an operator or a scheduler: SLURM sends either before it takes the machine away.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Preempted(SystemExit):
    """A run saved itself and left because it was asked to; not caught, the process ends with exit code 0."""

    def __init__(self) -> None:
        super().__init__(0)


class StopRequest:
    """While entered, notes the first signal that asks to stop; the loop looks at it after every step.

    Left because another process is lost, it goes on noting: nothing but a last line comes then.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self._before: dict[signal.Signals, Any] = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.name = self.name or signal.Signals(number).name

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():  # Python allows it nowhere else
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if isinstance(error, LostPeerError):
            return  # torchrun ends the others by SIGTERM: who is about to name the lost one speaks first
        for number, handler in self._before.items():
            # None: the handler was not installed from Python, and cannot be from here.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
