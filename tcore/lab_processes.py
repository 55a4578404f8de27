"""The processes of a lab, one for each training and scoring; who asks the lab to leave asks them too."""

import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from tcore.training.signals import SIGNALS


class Processes:
    """While entered, hands on a signal that asks to stop; a training saves its step then, and leaves.

    A terminal interrupts all processes by itself, a scheduler or `kill` only the one that it knows.
    Whoever catches the KeyboardInterrupt of either way asks them, before waiting for them.
    """

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[bytes]] = set()
        self._asked: int | None = None
        self._before: dict[signal.Signals, Any] = {}

    def go_on(self) -> None:
        """Nothing is begun once somebody asked to stop."""
        if self._asked is not None:
            raise KeyboardInterrupt

    def run(self, line: Sequence[str], environment: Mapping[str, str], log: Path) -> int:
        """Carry out a command line, keep what it says, and return its exit code."""
        self.go_on()
        with log.open("a") as said:
            process = subprocess.Popen(line, env=environment, stdout=said, stderr=said)
        self._running.add(process)
        if self._asked is not None:  # begun while the word went round
            process.send_signal(self._asked)
        try:
            return process.wait()
        finally:
            self._running.discard(process)

    def ask(self, number: int = signal.SIGTERM) -> bool:
        """Ask what is running to leave; False if it was asked before, and is saving."""
        if self._asked is not None:
            return False
        self._asked = number
        for process in list(self._running):
            process.send_signal(number)
        return True

    def _hand_on(self, number: int, frame: FrameType | None) -> None:
        if self.ask(number):
            raise KeyboardInterrupt

    def __enter__(self) -> "Processes":
        if threading.current_thread() is threading.main_thread():  # Python allows it nowhere else
            self._before = {number: signal.signal(number, self._hand_on) for number in SIGNALS}
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
