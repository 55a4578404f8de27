"""The quickstart encoder, trained from the page where there is none yet: a process of its own."""

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from tcore.recipes import recipe
from tcore.training.checkpoint import ENCODER


class Trainer:
    """Trains the quickstart into a run folder; a run that was stopped there goes on."""

    def __init__(self, run: Path, settings: tuple[str, ...] = ()) -> None:
        self.run = run
        self.command = f"tcore quickstart --run {run}"
        self._settings = settings
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self._said: list[str] = []
        self._steps = recipe("quickstart").optim.steps or 0

    def start(self) -> None:
        """Start the training, unless it is under way."""
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                return
            argv = [sys.executable, "-m", "tcore", "train", "quickstart", "--run", str(self.run)]
            self._said = []
            self._process = subprocess.Popen(
                [*argv, *self._settings],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            threading.Thread(target=self._listen, args=(self._process,), daemon=True).start()

    def stop(self) -> None:
        """End the process that was started here; its last checkpoint stays."""
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                self._process.terminate()
                self._process.wait()

    def state(self) -> dict[str, Any]:
        """How far the training is."""
        process = self._process
        code = None if process is None else process.poll()
        trained = (self.run / ENCODER).is_file()
        if process is None or code == 0:
            state = "done" if trained and process is not None else "idle"
        else:
            state = "running" if code is None else "failed"
        error = self._said[-1] if state == "failed" and self._said else ""
        return {
            "state": state,
            "step": self._step(),
            "steps": self._steps,
            "command": self.command,
            "error": error.removeprefix("tcore: error: "),
        }

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        with process.stderr as lines:
            for line in lines:
                self._said = [*self._said[-20:], line.strip()] if line.strip() else self._said

    def _step(self) -> int:
        """Steps that were done, by the last line of the metrics."""
        try:
            with (self.run / "metrics.jsonl").open("rb") as file:
                file.seek(max(0, file.seek(0, 2) - 8192))
                lines = file.read().decode(errors="ignore").splitlines()
        except OSError:
            return 0
        for line in reversed(lines):
            try:
                return int(json.loads(line)["step"])
            except (ValueError, KeyError, TypeError):
                continue
        return 0
