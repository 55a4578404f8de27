"""Visitors and their jobs: a clip, its features, and the run that propagates labels through it."""

import asyncio
import logging
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tcore.demo.clips import Clip
from tcore.demo.engine import CELLS, Engine
from tcore.errors import InputError
from tcore.evaluation.propagate import Labels, propagate_features
from tcore.video.labels import Masks, Points
from tcore.video.propagate_video import fit_size
from tcore.video.tracked import Found, TrackedMasks, TrackedPoints, track_labels

State = Literal["idle", "running", "done", "canceled", "failed"]
LOG = logging.getLogger(__name__)


class Job:
    """A clip and everything computed from it; the page reads its state while a run is in progress."""

    def __init__(self, clip: Clip, engine: Engine) -> None:
        self.clip, self.engine, self.key = clip, engine, clip.folder.name
        patch = engine.encoder.patch_size
        self.inside = fit_size(clip.size, patch, CELLS * patch)
        self.grid = (self.inside[0] // patch, self.inside[1] // patch)
        self.protocol = engine.protocol(self.inside)
        self.given: Masks | Points | None = None
        self.found: list[Found] = []
        """Labels of the first frames; the values of masks are on disk."""
        self.state: State = "idle"
        self.error = ""
        self.first, self.seconds = 0, 0.0  # of the last run: its first frame, and how long it has taken
        self._encoded: set[int] = set()
        self._lock = threading.Lock()
        self._soft: Iterator[Labels] | None = None  # of the run in progress

    @property
    def done(self) -> int:
        """Number of labeled frames."""
        return len(self.found)

    def features(self, index: int) -> Float[Tensor, "channels rows columns"]:
        """Features of a frame, encoded once and kept on disk."""
        path = self.clip.folder / f"features-{index}.npy"
        if index not in self._encoded:
            np.save(path, self.engine.encode(self.clip.frame(index), self.inside).cpu().numpy())
            self._encoded.add(index)
        return torch.from_numpy(np.load(path)).to(self.engine.device)

    def labels(self, index: int) -> np.ndarray:
        """Ids of a labeled frame, or x, y and confidence of every point."""
        if isinstance(self.given, Masks):
            return np.load(self.clip.folder / f"ids-{index}.npy")
        return self.found[index].values

    def run(self, given: Masks | Points, changed: int) -> None:
        """Start to propagate from the last annotated frame up to the first changed one."""
        if 0 not in given.frames:
            raise InputError("frame 0 has no labels yet: paint an object or set a point on the first frame.")
        late = [frame for frame in given.frames if not 0 <= frame < self.clip.count]
        if late:
            raise InputError(f"labels for frame {late[0]}, but there are {self.clip.count} frames.")
        patch = self.engine.encoder.patch_size
        track = track_labels(given, self.clip.size, self.inside, patch, self.protocol)
        with self._lock:
            if self.state == "running":
                raise InputError("a run is in progress: cancel it, or wait until it is done.")
            before = self.given
            same = type(given) is type(before) and getattr(given, "names", ()) == getattr(before, "names", ())
            reach = min(changed, self.done) if same else 0
            first = max(frame for frame in given.frames if frame <= max(0, reach))
            frames = range(first, self.clip.count)
            self._soft = propagate_features(
                (self.features(index) for index in frames),
                lambda index, propagated: track.given(frames[index], propagated),
                self.protocol,
            )
            self.given, self.found, self.first = given, self.found[:first], first
            self.state, self.error, self.seconds = "running", "", 0.0
            self.engine.submit(self._step, track, self._soft, time.perf_counter())

    def cancel(self) -> None:
        """End the run; frames labeled so far stay, the one being computed is dropped."""
        with self._lock:
            if self.state == "running":
                self.state, self._soft = "canceled", None

    def _step(self, track: TrackedMasks | TrackedPoints, soft: Iterator[Labels], started: float) -> None:
        """Label one frame, then wait for the next turn behind the other visitors."""
        if self._soft is not soft:
            return
        try:
            found = track.read(self.done, next(soft))
            with self._lock:
                if self._soft is not soft:
                    return
                if isinstance(track, TrackedMasks):
                    np.save(self.clip.folder / f"ids-{self.done}.npy", found.values)
                    found = found._replace(values=np.empty(0))
                self.found.append(found)
                self.seconds = time.perf_counter() - started
                if self.done == self.clip.count:
                    self.state, self._soft = "done", None
        except Exception as error:
            with self._lock:
                if self._soft is not soft:  # canceled, and its files are gone
                    return
                self.state, self.error, self._soft = "failed", f"the run failed: {error!r}.", None
            LOG.exception("a run failed")
        else:
            self.engine.submit(self._step, track, soft, started)


class Visitor:
    """One visitor, with a folder and a clip of their own."""

    def __init__(self, folder: Path) -> None:
        self.id, self.folder = folder.name, folder
        self.turn = asyncio.Lock()
        """Held while a request changes the clip or starts a run."""
        self._job: Job | None = None
        folder.mkdir()

    @property
    def job(self) -> Job:
        """The clip that this visitor works on."""
        if self._job is None:
            raise InputError("there is no clip yet: choose a sample or upload a video.")
        return self._job

    @property
    def busy(self) -> bool:
        """Whether a run is in progress."""
        return self._job is not None and self._job.state == "running"

    def open(self, engine: Engine, read: Callable[[Path], Clip]) -> None:
        """Replace the clip, once the new one could be read into its folder."""
        folder = self.folder / secrets.token_hex(8)
        folder.mkdir()
        try:
            job = Job(read(folder), engine)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        before, self._job = self._job, job
        if before is not None:
            before.cancel()
            shutil.rmtree(before.clip.folder, ignore_errors=True)

    def close(self) -> None:
        """Stop what runs and remove every file."""
        if self._job is not None:
            self._job.cancel()
        shutil.rmtree(self.folder, ignore_errors=True)


class Visitors:
    """All visitors, the longest idle ones first; when the page is full, the first without a run leaves."""

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder, self._limit = folder, limit
        self._visitors: dict[str, Visitor] = {}
        self._lock = threading.Lock()

    def new(self) -> Visitor:
        """A new visitor, with an id that nobody can guess."""
        with self._lock:
            if len(self._visitors) >= self._limit:
                idle = next((visitor for visitor in self._visitors.values() if not visitor.busy), None)
                if idle is None:
                    raise InputError(f"all {self._limit} visitors are running something: try again later.")
                self._visitors.pop(idle.id).close()
            visitor = Visitor(self._folder / secrets.token_urlsafe(16))
            self._visitors[visitor.id] = visitor
        return visitor

    def get(self, key: str) -> Visitor | None:
        """A visitor by id; None where the visit has ended."""
        with self._lock:
            if key in self._visitors:
                self._visitors[key] = self._visitors.pop(key)  # the most recent one is the last
            return self._visitors.get(key)

    def close(self) -> None:
        """End all visits."""
        with self._lock:
            while self._visitors:
                self._visitors.popitem()[1].close()
