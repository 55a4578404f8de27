"""Visitors: each has a folder and a clip of their own; when the page is full, the longest idle one leaves."""

import secrets
import shutil
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tcore.demo.clips import Clip
from tcore.demo.engine import Engine
from tcore.demo.job import Job
from tcore.errors import InputError

T = TypeVar("T")


class Visitor:
    """One visitor."""

    def __init__(self, folder: Path) -> None:
        self.id = folder.name
        self.folder = folder
        self._job: Job | None = None
        self._lock = threading.Lock()

    @property
    def job(self) -> Job:
        """The clip that this visitor works on."""
        if self._job is None:
            raise InputError("there is no clip yet: choose a sample or upload a video.")
        return self._job

    @property
    def running(self) -> bool:
        """Whether a run is in progress."""
        return self._job is not None and self._job.running

    def open(self, engine: Engine, read: Callable[[Path, T, int], Clip], source: T, max_frames: int) -> Job:
        """Replace the clip, once the new one could be read into its folder."""
        with self._lock:
            folder = self.folder / secrets.token_hex(8)
            folder.mkdir(parents=True)
            try:
                job = Job(read(folder, source, max_frames), engine, folder)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            before, self._job = self._job, job
            if before is not None:
                before.stop()
                shutil.rmtree(before.folder, ignore_errors=True)
            return job

    def close(self) -> None:
        """Stop what runs and remove every file."""
        if self._job is not None:
            self._job.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


class Visitors:
    """All visitors, the most recent ones last."""

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder, self._limit = folder, limit
        self._visitors: OrderedDict[str, Visitor] = OrderedDict()
        self._lock = threading.Lock()

    def new(self) -> Visitor:
        """A new visitor, with an id that nobody can guess."""
        with self._lock:
            leaving = None
            if len(self._visitors) >= self._limit:
                idle = next((key for key, visitor in self._visitors.items() if not visitor.running), None)
                if idle is None:
                    raise InputError(f"all {self._limit} visitors are running something: try again later.")
                leaving = self._visitors.pop(idle)
            visitor = Visitor(self._folder / secrets.token_urlsafe(16))
            visitor.folder.mkdir()
            self._visitors[visitor.id] = visitor
        if leaving is not None:
            leaving.close()
        return visitor

    def get(self, key: str) -> Visitor | None:
        """A visitor by id; None where the visit has ended."""
        with self._lock:
            if key in self._visitors:
                self._visitors.move_to_end(key)
            return self._visitors.get(key)

    def close(self) -> None:
        """End all visits."""
        with self._lock:
            for visitor in self._visitors.values():
                visitor.close()
            self._visitors.clear()
